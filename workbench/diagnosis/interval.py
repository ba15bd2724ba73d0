"""Interval: a quantity that was measured several times, and where it lies as far as pairs of neighbouring blocks can tell."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A quantity that was measured several times: where it lies, and between what."""

    low: float
    mid: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low


def interval_of(pairs: Sequence[tuple[float, float]], what: Any, *, draws: int = 400, level: float = 0.9) -> Interval:
    """`what(base, arm)` of the pairs' sums, with its bootstrap interval over the pairs (the same draws each time: no chance in a result).

    Args:
        pairs: neighbours in time: (baseline, arm).
        what: a function of both sums.
        draws: how many resamples.
        level: the probability that the interval holds.

    Raises:
        ValueError: no pair.
    """
    if not pairs:
        raise ValueError("an interval of no pairs: measure at least one")
    mid = what(sum(base for base, _ in pairs), sum(arm for _, arm in pairs))
    if len(pairs) == 1:
        return Interval(low=mid, mid=mid, high=mid)
    chance = random.Random(0)
    drawn = [chance.choices(pairs, k=len(pairs)) for _ in range(draws)]
    values = sorted(what(sum(base for base, _ in some), sum(arm for _, arm in some)) for some in drawn)
    edge = round((1 - level) / 2 * (draws - 1))
    return Interval(low=min(values[edge], mid), mid=mid, high=max(values[-1 - edge], mid))
