"""A noise scale in words: what a reader of it should know, and what would make it better."""

import math
from typing import TYPE_CHECKING

from workbench import units

if TYPE_CHECKING:
    from workbench.batch.noise_scale import NoiseScale
    from workbench.batch.noise_steps import NoiseBlock

SHORT = 4.0
"""Times by which the noise scale exceeds a group's samples, before larger groups are advised."""
MOVED = 1.5
"""Times by which stretches of a training differ, before it is worth a word."""
LARGER = 4
"""Times by which they then are to be larger."""


def samples(value: float) -> str:
    """A number of samples as text.

    >>> samples(83.8), samples(float("inf"))
    ('83.8', 'unknown')
    """
    return "unknown" if math.isinf(value) else units.count(float(f"{value:.3g}"))


def left_out(lost: int, start: int, count: int) -> list[str]:
    """Steps that do not count.

    Args:
        lost: those whose gradients are no numbers.
        start: those at the beginning whose gradients are of another size.
        count: all steps.
    """
    told = []
    if lost:
        told.append(f"{lost} of {count} steps left out: their gradients were inf, NaN or 0 (in fp16 a few at the start are normal)")
    if start:
        told.append(f"the first {start} steps left out: gradients still changed in size")
    return told


def advice(result: "NoiseScale") -> list[str]:
    """What would help, and what to beware of."""
    told, known, now = [], math.isfinite(result.b_simple), result.micro_batch
    if not result.enough and (not known or result.b_simple > SHORT * now):
        what = f"{samples(result.b_simple)} samples" if known else "still unknown"
        gain = f": with {LARGER * now} about {result.steps_with(micro_batch=LARGER * now):,} steps in all" if known else ""
        told.append(f"groups of {now} samples are small beside the noise scale ({what}): larger ones help more than more steps{gain}")
    known_blocks = [block for block in result.over_time if block.low > 0 and math.isfinite(block.high)]
    if known_blocks:
        least, most = min(known_blocks, key=lambda block: block.high), max(known_blocks, key=lambda block: block.low)
        if _apart(least, most):
            told.append(
                f"it moves while training goes on: {samples(least.b_simple)} in steps {least.first}–{least.last}, "
                f"{samples(most.b_simple)} in steps {most.first}–{most.last}; see over_time"
            )
    if result.dataset_size and now * result.groups > result.dataset_size:
        told.append(f"a step takes more than the {units.count(result.dataset_size)} samples of the dataset")
    return told


def _apart(least: "NoiseBlock", most: "NoiseBlock") -> bool:
    """Do two stretches differ, beyond what happens when many are compared: by twice what their intervals allow for?"""
    allowed = math.log(least.high / least.low) + math.log(most.high / most.low)  # twice the half widths
    return most.b_simple > MOVED * least.b_simple and math.log(most.b_simple / least.b_simple) > allowed
