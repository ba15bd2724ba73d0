"""Steps and losses as arrays: what an alarm looks at, many steps at once."""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from workbench.core.vocabulary import PHASES
from workbench.timeline.analysis.change_points import BLOCK
from workbench.timeline.steps import Row

Floats = NDArray[np.float64]
UNREAD = np.array(0x7FC0_5EED, np.uint32).view(np.float32)[()]
"""A NaN that no operator gives: the place of a loss that was not read, or that its device has not written yet."""


def blocks_of(rows: Sequence[Row], memory: Sequence[float]) -> Floats:
    """Whole blocks of steps: (blocks, BLOCK, series), of the step's seconds, its phases', samples per second, and memory.

    Args:
        rows: of the steps, a multiple of BLOCK, or none.
        memory: bytes, of each kind that is followed; nan = not known.
    """
    width = len(PHASES) + 1
    try:
        values = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * width).reshape(-1, width)  # in half of np.array's time
    except TypeError:  # None, where samples are not known
        values = np.array(rows, dtype=np.float64)
    table = np.full((len(rows), 1 + width + len(memory)), math.nan)
    phases = table[:, 1:width]
    phases[:] = values[:, :-1] / 1e9
    length, samples = phases.sum(axis=1), values[:, -1]
    table[:, 0] = length
    np.divide(samples, length, out=table[:, width], where=(samples > 0) & (length > 0))
    table[:, width + 1 :] = memory
    return table.reshape(-1, BLOCK, table.shape[1])


def blocks_of_losses(losses: Sequence[float], every: int) -> Floats:
    """Whole blocks of losses, (blocks, BLOCK, 1): of each `every` steps, the first that is known; nan if none is."""
    steps = np.array(losses).reshape(-1, every)
    known: Floats = steps[np.arange(len(steps)), np.isfinite(steps).argmax(axis=1)]
    return known.reshape(-1, BLOCK, 1)


def put(ring: NDArray[np.float32], first: int, values: Sequence[float]) -> None:
    """Put values into a ring; of more than it has places, the latest. The very object `math.nan` becomes UNREAD."""
    last, values = first + len(values), values[-len(ring) :]
    latest = np.array(values, np.float32)
    latest[[value is math.nan for value in values]] = UNREAD
    ring[np.arange(last - len(values), last) % len(ring)] = latest


def taken_means(seen: NDArray[np.float32], first: int, count: int, each: int) -> list[float]:
    """Means of so many values of a ring, each of `each` neighbours; the values become UNREAD. A mean is inf where one of them is NaN or
    infinite, else nan where one is UNREAD.
    """
    places = np.arange(first, first + count) % len(seen)
    read = seen[places]
    seen[places] = UNREAD
    values = read.astype(np.float64)
    values[~np.isfinite(read)] = math.inf
    unread = read.view(np.uint32) == UNREAD.view(np.uint32)
    values[unread] = 0.0
    starts = np.arange(0, count, each)
    means = np.add.reduceat(values, starts) / np.diff(starts, append=count)
    means[np.isfinite(means) & np.logical_or.reduceat(unread, starts)] = math.nan
    found: list[float] = means.tolist()
    return found
