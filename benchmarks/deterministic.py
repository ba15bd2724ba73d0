"""Measures what `deterministic=True` costs a step of the sample tasks: ratios of the times of blocks with and without it, by turns.

Both trainings are in one process: the same model, the same batches. Turns change their order (A B, B A), so that a machine that gets slower
favours neither. Times are those of the CPU: one thread computes, and other jobs do not count; on a GPU those of the wall clock, from
synchronisation to synchronisation. The last column compares blocks without it in the same way: what a ratio of equal blocks scatters by.

python benchmarks/deterministic.py [--device cuda] [TASK…]
"""

import argparse
import os
import platform
import statistics
import time
from datetime import date
from typing import Any

import torch

from workbench.core.display.table import Table
from workbench.harness.deterministic import set_deterministic
from workbench.runs.spec import RunSpec
from workbench.runs.task import resolve
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer

TASKS = ("clipart-resnet", "text-gpt", "fashion-mlp", "workbench.train.tasks:moe_gpt")
PAIRS = 25
"""Of blocks, for each task."""
SECONDS = 0.4
"""Of a block, about."""


def ratios(name: str, ranks: Ranks, device: str = "cpu") -> tuple[float, list[float], list[float]]:
    """Milliseconds of a step as it is; and, pair by pair, the time of a deterministic block over one that is not, and of two such."""
    spec = RunSpec(task=name, device=device, micro_batch=32)
    trainer = Trainer(spec, resolve(name), ranks, alone=True)
    batches: Any = trainer.batches()
    given = [next(batches) for _ in range(4)]

    def clock() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def block(steps: int, *, on: bool) -> float:
        set_deterministic(on)
        trainer.step([given[0]])  # what the switch makes anew counts in no block
        began = clock()
        for step in range(steps):
            trainer.step([given[step % len(given)]])
        seconds = clock() - began
        set_deterministic(False)
        return seconds

    block(3, on=True)
    block(3, on=False)
    steps = max(2, round(SECONDS * 3 / block(3, on=False)))
    with_it, without, plain = list[float](), list[float](), list[float]()
    for pair in range(PAIRS):
        order = (True, False, False) if pair % 2 else (False, False, True)
        times = [block(steps, on=on) for on in order]
        on = times[order.index(True)]
        near, far = (times[1], times[2]) if pair % 2 else (times[1], times[0])
        with_it.append(on / near)
        without.append(far / near)
        plain.append(near / steps)
    return 1e3 * statistics.median(plain), with_it, without


def spread(values: list[float]) -> str:
    """Median and interquartile range."""
    low, mid, high = statistics.quantiles(values, n=4)
    return f"{mid:.3f} ({low:.3f} … {high:.3f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given, rows = parser.parse_args(), []
    ranks = Ranks.join(RunSpec(task="deterministic", device=given.device))
    try:
        for name in given.tasks:
            step, with_it, without = ratios(name, ranks, given.device)
            rows.append([name, f"{step:.2f} ms", spread(with_it), spread(without)])
            print(*rows[-1], sep=" | ", flush=True)
    finally:
        ranks.leave()
    where = torch.cuda.get_device_name() if given.device == "cuda" else "one thread"
    note = f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {where}, {PAIRS} pairs"
    columns = ("task", "step as it is", "deterministic / as it is", "as it is / as it is")
    print(Table(columns=columns, rows=rows, title="Price of deterministic=True", note=note))


if __name__ == "__main__":
    main()
