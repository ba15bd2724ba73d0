"""Doubt: arithmetic with intervals, and what noise does to them."""

import math

from workbench import units
from workbench.diagnosis.evidence import Arm, Evidence
from workbench.statistics import Interval

FOREIGN = 0.3
"""Cores taken by others from which on noise may spoil a close decision; the prediction errors of loaders explode there."""
SPREAD = 0.25
"""Middle half over median of equal blocks, likewise."""
MIDDLE_HALF = 1.35
"""Standard deviations that the middle half of normal values is wide."""
NINETY = 1.645
"""Standard deviations to each side that hold 90 % of normal values."""
FRESH = 0.2
"""Of training: the most that a batch costs more when it is fresh than when it is replayed (10 to 20 % where batches are cheap to make)."""


def scaled(one: Interval, by: float) -> Interval:
    """The interval times a positive number."""
    return Interval(low=one.low * by, mid=one.mid * by, high=one.high * by)


def at_least_0(one: Interval) -> Interval:
    """No part takes less than no time: noise below it is cut off."""
    return Interval(low=max(0.0, one.low), mid=max(0.0, one.mid), high=max(0.0, one.high))


def less(one: Interval, by: float) -> Interval:
    """The interval moved down, but not below 0."""
    return at_least_0(Interval(low=one.low - by, mid=one.mid - by, high=one.high - by))


def plus(one: Interval, two: Interval) -> Interval:
    """The sum of two parts whose errors have nothing to do with each other."""
    down, up = math.hypot(one.mid - one.low, two.mid - two.low), math.hypot(one.high - one.mid, two.high - two.mid)
    mid = one.mid + two.mid
    return Interval(low=mid - down, mid=mid, high=mid + up)


def capped(one: Interval, most: float) -> Interval:
    """No end above `most`."""
    return Interval(low=min(one.low, most), mid=min(one.mid, most), high=min(one.high, most))


def noises(e: Evidence) -> list[str]:
    """What makes close decisions doubtful, in words."""
    if e.noise is None:
        return []
    said = []
    if e.noise.foreign > FOREIGN:
        said.append(f"Other processes took {e.noise.foreign:.1f} of {e.noise.cores:.0f} cores.")
    if e.noise.spread > SPREAD:
        said.append(f"Equal blocks vary by {units.percent(e.noise.spread)}.")
    return said


def beside_others(e: Evidence, saved: Interval) -> Interval:
    """The fraction that reductions take, no more certain than other processes let it be: while they have the core of one rank, the others
    wait for it in the reduction. That makes up to `crowded / cores × (1 − 1 / ranks)` of the rest of the step. (Measured: beside others
    that took 0.6 of 2 cores, the reductions of two ranks were 18 % of a step instead of 9 %; this gives 13.)
    """
    if e.noise is None or e.device != "cpu" or e.noise.foreign <= FOREIGN:
        return saved
    crowded = max(0.0, min(e.noise.foreign, e.world_size * e.threads + e.noise.foreign - e.noise.cores))
    waited = crowded / e.noise.cores * (1 - 1 / e.world_size) * (1 - saved.mid)
    return Interval(low=saved.low - waited, mid=saved.mid, high=saved.high)


def in_turn(data: Interval, loader: float, clean: float) -> Interval:
    """What a loader without workers adds: what it takes, which noise spoils less than the difference of two long steps, and a bit more."""
    more = FRESH * (clean - data.mid)
    return Interval(low=min(data.low, loader), mid=min(data.mid, loader + more / 2), high=min(data.high, loader + more))


def between(arm: Interval, traced: float) -> Interval:
    """Two sources that noise keeps from agreeing: the truth lies somewhere between them.

    A trace is a share of its own steps, which noise changes little, but does not see what an optimizer's writes push out of the caches.
    To read that again takes no longer than the optimizer, which reads and writes it.
    """
    low, mid, high = min(arm.low, traced), (arm.mid + traced) / 2, max(arm.high, traced)
    return capped(Interval(low=low, mid=mid, high=high), 2 * traced)


def widened(e: Evidence, arm: Arm) -> Interval:
    """The fraction that an arm saves, no more certain than equal blocks are equal: three pairs may agree by chance."""
    saved = arm.saved
    block = (e.noise.spread if e.noise else 0.0) / MIDDLE_HALF
    loose = NINETY * block * math.sqrt(1.5 / len(arm.pairs)) * max(0.0, 1 - saved.mid)  # one block beside the mean of two
    return Interval(low=min(saved.low, saved.mid - loose), mid=saved.mid, high=max(saved.high, saved.mid + loose))
