"""Rates: a short real sweep over micro-batches, from which a Throughput is made."""

import os
from collections.abc import Sequence

from workbench.batch.analysis.throughput import Throughput
from workbench.runs.failure import RunError
from workbench.runs.launch.environment import gpu_count
from workbench.runs.launch.sweep import run_all
from workbench.runs.spec import RunSpec

STEPS = 60
"""Optimizer steps at each micro-batch; those of the warm-up among them."""
MOST = 7
"""Micro-batches that are tried at most."""


def places(now: int, largest: int) -> list[int]:
    """Micro-batches to try: the present one, and its doubles and halves up to the largest, the widest range that MOST of them cover.

    >>> places(32, 300)
    [8, 16, 32, 64, 128, 256, 300]
    """
    top = min(now, largest)
    doubles = [top << power for power in range(1, 32) if top << power < largest]
    upward = [*doubles, *([largest] if largest > top else [])][: MOST - 2]
    halves = [top >> power for power in range(1, 32) if top >> power >= 1]
    return sorted({*halves[: max(1, MOST - 1 - len(upward))], top, *upward})


def measured(
    spec: RunSpec, micro_batches: Sequence[int], *, steps: int = STEPS, runs_dir: str | os.PathLike[str] | None = None
) -> Throughput:
    """Samples per second at several micro-batches, each run there and back again in one launch; and what accumulation saves.

    Args:
        spec: what is run, with as many ranks as it has.
        micro_batches: to try; one that fails is left out, and said.
        steps: optimizer steps of each.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        RunError: not even one of them took a step; their run directories stay.
        LaunchError, TaskError: the spec cannot run here.
    """
    plain = spec.replace(accumulation=1, steps=steps, warmup_steps=0, schedule="constant", evaluate=False, profile=None)
    specs = [(f"micro_batch={micro}", plain.replace(micro_batch=micro)) for micro in micro_batches]
    middle = micro_batches[len(micro_batches) // 2]
    twice = plain.replace(micro_batch=middle, accumulation=2, steps=max(1, steps // 2))
    runs = run_all([*specs, (f"micro_batch={middle} accumulation=2", twice)], runs_dir=runs_dir, repeat=2)
    failed = next((run.error for run in runs if run.error), None)
    if failed and not any(run.ok for run in runs if run.spec != twice):
        raise RunError(failed)
    return Throughput.from_runs(runs)


def ranks_here(spec: RunSpec, world_size: int) -> int:
    """Ranks that this machine can run side by side: as many as wanted where it has the cores or GPUs, else as many as the spec has."""
    here = 0 if spec.device == "cpu" else gpu_count()
    return world_size if world_size <= (here or os.cpu_count() or 1) else spec.nproc_per_node
