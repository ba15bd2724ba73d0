"""Compares the loss of every parallel mode, and of every pair that is allowed, with that of one process, on 2 and 4 gloo ranks.

The model is the sample GPT with four layers; each mode takes the same samples in a step. The table has the largest difference of a loss.

python benchmarks/loss_equality.py [STEPS]
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from workbench.runs.spec import RunSpec
from workbench.runs.task import Task
from workbench.train.models import Gpt
from workbench.train.ranks import Ranks
from workbench.train.tasks import WINDOW, moe_gpt, text_gpt
from workbench.train.trainer import Trainer

STEPS = 6
TOLERANCE = 1e-5
"""Largest difference of a loss of about 5 nats that rounding explains: fp32 keeps 2.4e-7 of such a number, and each step adds up."""
SAMPLES = 32
PLAN = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise", "head": "colwise_rep"}
ONE: dict[str, Any] = {"nproc_per_node": 1, "accumulation": 4}
SHARED: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP, small buckets": {"bucket_cap_mb": 0.05},
    "ZeRO-1": {"parallel": "zero1"},
    "ZeRO-2": {"parallel": "zero2"},
    "FSDP": {"parallel": "fsdp"},
    "HSDP": {"parallel": "hsdp", "shard_ranks": 2},
    "FSDP, checkpointing": {"parallel": "fsdp", "checkpointing": "full"},
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
STAGES: dict[str, dict[str, Any]] = {f"PP {name}": {"pipeline_parallel": 2, "pipeline_schedule": name} for name in SCHEDULES}
ON_TWO = {**SHARED, "TP": {"tensor_parallel": 2}, **STAGES, "PP 1f1b, checkpointing": {**STAGES["PP 1f1b"], "checkpointing": "full"}}
ON_FOUR = {
    **SHARED,
    **{f"{name} × TP": {**SHARED[name], "tensor_parallel": 2} for name in ("DDP", "ZeRO-1", "ZeRO-2", "FSDP", "HSDP")},
    "TP": {"tensor_parallel": 4},
    **{f"DDP × {name}": stages for name, stages in STAGES.items()},
    **{f"ZeRO-1 × {name}": {**stages, "parallel": "zero1"} for name, stages in STAGES.items()},
    **{f"PP {name} of 4": {"pipeline_parallel": 4, "pipeline_schedule": name} for name in ("gpipe", "1f1b")},
}
EXPERTS = "MoE "
"""How the names of the modes begin whose model is the mixture of experts, which is compared with itself on one process."""
DIVIDED: dict[str, Any] = {"expert_parallel": 2}
ON_TWO |= {"MoE DDP": {}, "MoE EP": DIVIDED, "MoE EP, checkpointing": {**DIVIDED, "checkpointing": "full"}}
ON_FOUR |= {"MoE EP": {"expert_parallel": 4}, "MoE DDP × EP": DIVIDED}
ALONE = {"one process": {}, "MoE one process": {}}
MODES: dict[int, dict[str, dict[str, Any]]] = {1: ALONE, 2: ON_TWO, 4: ON_FOUR}


def task(name: str) -> Task:
    """The text model with four layers, which can be split and cut, or with two layers of four experts."""
    if name.startswith(EXPERTS):
        return dataclasses.replace(moe_gpt(), optimizer="sgd(lr=0.3, momentum=0.9)")
    model = partial(Gpt, length=WINDOW, width=64, layers=4, heads=4)
    return dataclasses.replace(text_gpt(), model=model, tensor_parallel=PLAN, optimizer="sgd(lr=0.3, momentum=0.9)")


def losses(name: str, knobs: dict[str, Any], ranks: Ranks, steps: int) -> list[float]:
    """The mean loss of each step over all ranks."""
    spec = RunSpec(task="text-gpt", device="cpu", steps=steps, clip_grad_norm=1.0, nproc_per_node=ranks.world_size, accumulation=4, **knobs)
    spec = spec.replace(micro_batch=SAMPLES // spec.accumulation // spec.data_ranks)
    trainer, found = Trainer(spec, task(name), ranks), []
    with contextlib.closing(trainer.batches()) as batches:
        for _ in range(steps):
            loss = trainer.step([next(batches) for _ in range(spec.accumulation)])
            dist.all_reduce(loss)
            found.append(loss.item() / ranks.world_size)
    return found


def on_ranks(path: Path, steps: int, only: Collection[str] = ()) -> None:
    """What torchrun starts: all modes of this number of ranks, or these only, one after the other."""
    ranks = Ranks.join(RunSpec(task="text-gpt", device="cpu"))
    modes = MODES[ranks.world_size]
    found = {name: losses(name, modes[name], ranks, steps) for name in only or modes}
    if not ranks.rank:
        path.write_text(json.dumps(found), encoding="utf-8")
    ranks.agree(True)
    ranks.leave()


def measured(count: int, steps: int = STEPS) -> dict[str, list[float]]:
    """The losses of each mode on so many ranks, in one launch.

    Raises:
        RuntimeError: a rank failed; with its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={count}",
            __file__,
            str(path),
            str(steps),
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1200, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        found: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
        return found


def difference(one: list[float], other: list[float]) -> float:
    """The largest of the differences of two lists of losses."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def beside(alone: dict[str, list[float]], name: str) -> list[float]:
    """The losses of the model of a mode on one process."""
    return alone["MoE one process" if name.startswith(EXPERTS) else "one process"]


def main(steps: int = STEPS) -> int:
    """Print the table; 1 if a mode is beyond the tolerance."""
    alone = measured(1, steps)
    for name, found in alone.items():
        print(f"{name}: {', '.join(f'{loss:.4f}' for loss in found)}\n")
    print("| ranks | mode | largest difference of a loss from one process |\n| --- | --- | --- |")
    worst, count = 0.0, 0
    for ranks in (2, 4):
        for name, found in measured(ranks, steps).items():
            print(f"| {ranks} | {name} | {(gap := difference(beside(alone, name), found)):.1e} |")
            worst, count = max(worst, gap), count + 1
    print(f"\n{count} modes and pairs, {steps} steps; largest difference {worst:.1e}, tolerance {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        on_ranks(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(*map(int, sys.argv[1:2])))
