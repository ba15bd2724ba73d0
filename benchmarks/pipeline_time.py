"""Compares `wb.estimate_time` of a pipeline, at the level of one measured process, with measured pipelines on 2 and 3 gloo ranks.

"sleeping": each block of the model sleeps, twice as long in its backward as in its forward, so that ranks do not share cores and other jobs
hardly matter: it tries the sum of stages, bubble and messages. "computing": its blocks multiply matrices on this machine's cores, of which
each rank needs one. The steps that are compared are the medians of runs of the same blocks, and nothing is fitted.

python benchmarks/pipeline_time.py [sleeping] [computing]    about 2 min each
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from datetime import date
from typing import Any

import torch
from torch import Tensor, nn

import workbench as wb
from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.step_time import CPU
from workbench.core.display.table import Table

FORWARD = 0.01
"""Seconds that a block sleeps in its forward; in its backward it sleeps twice as long."""
WIDTH, ROWS = 64, 512
"""Small weights and many rows: of the computing, products are most and the update next to nothing, as the sleeps have it."""
STEPS = 8
CASES: dict[str, dict[str, Any]] = {
    "2 stages, GPipe, 2 micro-batches": {"stages": 2, "schedule": "gpipe", "micro_batches": 2},
    "2 stages, 1F1B, 4 micro-batches": {"stages": 2, "schedule": "1f1b", "micro_batches": 4},
    "2 stages, 1F1B, 8 micro-batches": {"stages": 2, "schedule": "1f1b", "micro_batches": 8},
    "2 stages, interleaved in 2, 4 micro-batches": {"stages": 2, "schedule": "interleaved(chunks=2)", "micro_batches": 4},
    "3 stages, GPipe, 3 micro-batches": {"stages": 3, "schedule": "gpipe", "micro_batches": 3},
    "3 stages, 1F1B, 6 micro-batches": {"stages": 3, "schedule": "1f1b", "micro_batches": 6},
    "2 stages of 7 blocks (4 and 3), 1F1B, 4 micro-batches": {"stages": 2, "schedule": "1f1b", "micro_batches": 4, "task": "seven"},
}


class Wait(torch.autograd.Function):
    """Sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same tensor, later."""
        time.sleep(FORWARD * (type(x) is Tensor))  # not in a dry run
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The same gradient, later."""
        time.sleep(2 * FORWARD * (type(gradient) is Tensor))
        return gradient


class Block(nn.Module):
    """A layer that sleeps, or one of two larger products."""

    def __init__(self, *, sleeps: bool) -> None:
        super().__init__()
        self.sleeps = sleeps
        self.layers = (
            nn.Linear(WIDTH, WIDTH) if sleeps else nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of (samples, WIDTH)."""
        x = self.layers(x)
        return Wait.apply(x) if self.sleeps else x  # type: ignore[no-any-return,no-untyped-call]


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random samples."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.roll(1)


def _task(blocks: int, *, sleeps: bool) -> wb.Task:
    def loss(model: Any, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return wb.Task(
        model=lambda: nn.Sequential(*[Block(sleeps=sleeps) for _ in range(blocks)]), dataset=Rows, loss=loss, optimizer="sgd(lr=0.01)"
    )


def sleeping() -> wb.Task:
    """Twelve blocks that sleep."""
    return _task(12, sleeps=True)


def sleeping_seven() -> wb.Task:
    """Seven blocks that sleep."""
    return _task(7, sleeps=True)


def computing() -> wb.Task:
    """Twelve blocks that compute."""
    return _task(12, sleeps=False)


def computing_seven() -> wb.Task:
    """Seven blocks that compute."""
    return _task(7, sleeps=False)


def compared(kind: str, links: Any, folder: str) -> list[list[str]]:
    """A row per case."""
    rows, levels = [], dict[str, Any]()
    cluster = Cluster.of(CPU, gpus_per_node=4, intra=links, inter=links)
    for name, case in CASES.items():
        task = f"{__file__}:{kind}" + (f"_{case['task']}" if "task" in case else "")
        one = wb.RunSpec(task=task, device="cpu", micro_batch=ROWS, accumulation=4, steps=STEPS)
        if task not in levels:
            alone = _step(one, folder)
            levels[task] = wb.estimate_time(one, device="cpu", measured=alone).calibration
            print(f"one process, 4 micro-batches: {1e3 * alone:.0f} ms", flush=True)
        spec = one.replace(
            accumulation=case["micro_batches"], nproc_per_node=case["stages"], pipeline_parallel=case["stages"],
            pipeline_schedule=case["schedule"],
        )  # fmt: skip
        predicted = wb.estimate_time(spec, device="cpu", cluster=cluster, calibration=levels[task])
        seconds, span = _step(spec, folder), predicted.seconds
        rows.append(
            [name, f"{1e3 * seconds:.0f} ms", f"{1e3 * span.mid:.0f} ms", f"{100 * (span.mid / seconds - 1):+.0f} %",
             "yes" if span.low <= seconds <= span.high else "no", f"{100 * predicted.idle() / span.mid:.0f} %"]
        )  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def _step(spec: wb.RunSpec, folder: str) -> float:
    """Median seconds of a step, of the slowest rank; the first is left out."""
    run = wb.launch(spec, runs_dir=folder).wait(check=True)
    return max(statistics.median(step.seconds for step in timeline.steps[1:]) for timeline in run.timelines)


def main() -> None:
    """Print a table for each kind of block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["sleeping", "computing"])
    kinds = parser.parse_args().kinds
    links = wb.measure_collectives(2, kinds=["all_reduce"])
    note = f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {STEPS} steps each; load "
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            rows = compared(kind, links, folder)
        columns = ("pipeline", "step, measured", "predicted", "error", "inside the interval", "of it idle, predicted")
        print(Table(columns=columns, rows=rows, title=f"Pipelines of blocks, {kind}", note=note + f"{os.getloadavg()[0]:.1f}"))


if __name__ == "__main__":
    main()
