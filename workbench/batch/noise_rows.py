"""A run's gradient norms, as its ranks have written them down: put together into a NoiseScale."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.batch.noise_scale import NoiseScale
from workbench.batch.noise_steps import NoiseScaleError


def combined(ranks: Sequence[Sequence[Mapping[str, Any]]], *, notes: Sequence[str] = ()) -> NoiseScale:
    """The noise scale of a run.

    Args:
        ranks: of each rank, a line that says what it is of, and one per step: the mean square of its micro-batches' gradients, and its
            share of the square of the mean gradient. Steps that not all ranks have written yet do not count.
        notes: what a reader should know.

    Raises:
        NoiseScaleError: not all ranks have begun, or there are too few steps, or none with gradients that are numbers.
    """
    heads = [rows[0] for rows in ranks if rows]
    if not heads or len(heads) < heads[0]["world_size"]:
        raise NoiseScaleError(
            f"{len(heads)} ranks have written gradient norms so far, and all are needed: wait until the first steps are done"
        )
    head = heads[0]
    by_step: dict[int, list[tuple[float, float] | None]] = {}
    for rows in ranks:
        for row in rows[1:]:
            by_step.setdefault(row["step"], []).append(None if row["small"] is None else (row["small"], row["big"]))
    steps = [step for step, found in sorted(by_step.items()) if len(found) == head["world_size"]]
    whole = [by_step[step] for step in steps]
    pairs = [pair for found in whole if (pair := _added(found)) is not None]
    told = list(notes)
    if split := len(whole) - len(pairs):
        told.append(
            f"{split} steps left out: their micro-batches were taken in parts, since memory ran out, or gradients came in parts (reentrant "
            "checkpoints that share a weight, two backwards through one forward)"
        )
    return NoiseScale.of(
        pairs,
        micro_batch=head["micro_batch"],
        groups=head["accumulation"] * head["world_size"],
        dataset_size=head["dataset_size"],
        every=_stride(steps, head["every"]),
        optimizer=head["optimizer"],
        notes=told,
    )


def _stride(steps: Sequence[int], begun_with: int) -> int:
    """One of how many steps was looked at, of late: a run may look less often than it began with."""
    latest = steps[-_LATEST:]
    return round((latest[-1] - latest[0]) / (len(latest) - 1)) if len(latest) > 1 else begun_with


_LATEST = 9
"""Steps that say how often a run looks now."""


def _added(found: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Over the ranks: the mean of the first, the sum of the second."""
    known = [pair for pair in found if pair is not None]
    if len(known) < len(found):
        return None
    return math.fsum(small for small, _ in known) / len(known), math.fsum(big for _, big in known)
