"""Interval: a quantity that was measured several times, and where it lies as far as pairs of neighbouring blocks can tell."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from workbench.codec import from_json, to_json

ONE_PAIR = 0.1
"""A single pair does not show how far blocks differ: by this fraction, about what neighbours do on a machine that others use, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A quantity that was measured several times: where it lies, and between what."""

    low: float
    mid: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def to_json(self) -> list[float | None]:
        """Low, mid and high; what is not finite as None."""
        return [to_json(end) for end in (self.low, self.mid, self.high)]

    @classmethod
    def from_json(cls, value: Sequence[float | None]) -> Self:
        """Inverse of `to_json`."""
        low, mid, high = from_json(tuple[float, float, float], value)
        return cls(low=low, mid=mid, high=high)


def interval_of(pairs: Sequence[tuple[float, float]], what: Any, *, draws: int = 400, level: float = 0.9) -> Interval:
    """`what(base, arm)` of the pairs' sums, with its bootstrap interval over the pairs (the same draws each time: no chance in a result).
    Of a single pair it is as wide as if the arm's block were off by `ONE_PAIR`.

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
        base, arm = pairs[0]
        ends = sorted(what(base, arm * by) for by in (1 - ONE_PAIR, 1 + ONE_PAIR))
        return Interval(low=min(ends[0], mid), mid=mid, high=max(ends[1], mid))
    chance = random.Random(0)
    drawn = [chance.choices(pairs, k=len(pairs)) for _ in range(draws)]
    values = sorted(what(sum(base for base, _ in some), sum(arm for _, arm in some)) for some in drawn)
    edge = round((1 - level) / 2 * (draws - 1))
    return Interval(low=min(values[edge], mid), mid=mid, high=max(values[-1 - edge], mid))
