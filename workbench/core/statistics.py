"""The Interval (low, mid, high) of a quantity, and the bootstrap interval of paired measurements."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from workbench.core import units
from workbench.core.codec import JsonDataclass, OrInf, OrMinusInf, fields_from_json, from_json, to_json

ONE_PAIR = 0.1
"""How far the blocks of a single pair are taken to differ by chance: about what neighbouring blocks do on a shared machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval(JsonDataclass):
    """A quantity with its lower and upper end, measured several times or predicted.

    >>> Interval(low=1, mid=2, high=4).of(lambda value: 10 * value)
    Interval(low=10, mid=20, high=40)
    """

    low: OrMinusInf
    """Lower end; -inf = there is none."""
    mid: float
    """The value to use where one number is needed."""
    high: OrInf
    """Upper end; inf = there is none."""

    @property
    def width(self) -> float:
        """From end to end."""
        return self.high - self.low

    @property
    def reversed(self) -> tuple[float, float, float]:
        """High, mid, low."""
        return self.high, self.mid, self.low

    def of(self, function: Callable[[float], float]) -> "Interval":
        """A function of it, rising or falling."""
        ends = sorted((function(self.low), function(self.high)))
        return Interval(low=ends[0], mid=function(self.mid), high=ends[1])

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def cells(self, show: Callable[[float], str]) -> list[str]:
        """The middle, the lower and the upper end as text; a dash for an infinite end."""
        return [show(value) if math.isfinite(value) else units.MISSING for value in (self.mid, self.low, self.high)]

    def to_list(self) -> list[float | None]:
        """Low, mid and high as plain JSON values: the shorter form, which `from_json` reads as well."""
        return [to_json(end) for end in (self.low, self.mid, self.high)]

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | Sequence[float | None]) -> Self:
        """Inverse of `to_json`, and of `to_list`."""
        if isinstance(value, Mapping):
            return fields_from_json(cls, value)
        low, mid, high = from_json(tuple[float, float, float], value)
        return cls(low=low, mid=mid, high=high)


def interval_of(pairs: Sequence[tuple[float, float]], what: Any, *, draws: int = 400, level: float = 0.9) -> Interval:
    """`what(baseline, variant)` of the pairs' sums, with its bootstrap interval over the pairs (from the same draws in each call).
    With a single pair it is as wide as if the variant's block were off by `ONE_PAIR`.

    Args:
        pairs: (baseline, variant), neighbours in time.
        what: a function of both sums.
        draws: how many resamples.
        level: the probability that the interval holds.

    Raises:
        ValueError: no pair.
    """
    if not pairs:
        raise ValueError("an interval of no pairs: measure at least one")

    def of(some: Sequence[tuple[float, float]]) -> float:
        return float(what(sum(base for base, _ in some), sum(changed for _, changed in some)))

    mid = of(pairs)
    if len(pairs) == 1:
        base, changed = pairs[0]
        ends = sorted(what(base, changed * by) for by in (1 - ONE_PAIR, 1 + ONE_PAIR))
        return Interval(low=min(ends[0], mid), mid=mid, high=max(ends[1], mid))
    chance = random.Random(0)
    values = sorted(of(chance.choices(pairs, k=len(pairs))) for _ in range(draws))
    edge = round((1 - level) / 2 * (draws - 1))
    return Interval(low=min(values[edge], mid), mid=mid, high=max(values[-1 - edge], mid))
