"""The Interval (low, mid, high) of a quantity, the bootstrap interval of paired measurements, and intervals for stopping early."""

import functools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from workbench.core import units
from workbench.core.codec import JsonDataclass, OrInf, OrMinusInf, fields_from_json, from_json, to_json

ONE_PAIR = 0.1
"""How far the blocks of a single pair are taken to differ by chance. Chosen: about what neighbouring blocks do on a shared machine. It is
the interval of a value that was measured once, and says so."""


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
        ends = {end: number for end, number in (("low", low), ("high", high)) if not math.isnan(number) or math.isnan(mid)}
        return cls(**{"low": -math.inf, "high": math.inf, **ends}, mid=mid)  # an end that is not there, but a middle


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


LOOKS = 16
"""The most measurements before a decision: an interval that is looked at after each of them has to allow for as many looks."""
USUAL_SPREAD, SPREAD_DEGREES = 0.03, 2
"""Standard deviation of the ratio of neighbouring blocks on a quiet machine, and how many measurements this prior knowledge counts for.
Chosen within the 1 to 8 % by which blocks vary there (two cores). It widens intervals of two or three pairs that agree by chance, and
hardly any of more."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A variance, and the degrees of freedom that it comes from."""

    variance: float = USUAL_SPREAD**2
    degrees: int = SPREAD_DEGREES

    def with_values(self, values: Sequence[float]) -> "Spread":
        """Pooled with that of values around their mean."""
        if len(values) < 2:
            return self
        more = len(values) - 1
        return Spread((self.degrees * self.variance + more * statistics.variance(values)) / (self.degrees + more), self.degrees + more)


def repeated_interval(values: Sequence[float], *, spread: Spread | None = None, level: float = 0.9, looks: int = LOOKS) -> Interval:
    """An interval of the mean that may be looked at after each new value, to stop as soon as it is clear: with probability `level`, none
    of the looks is wrong.

    Each look has `1 / looks` of the error (Bonferroni), and Student's t because values are few. Their variance is pooled with one that is
    known beforehand, so that two values which agree by chance do not suffice.
    Source: Jennison and Turnbull, "Interim analyses: the repeated confidence interval approach", J. R. Statist. Soc. B 51, 1989; the pooled
    variance is the moderated t of Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004. Left out: the looks are correlated, so the interval is
    wider than necessary.

    Args:
        values: independent measurements; at least one.
        spread: of such values, as known beforehand; None = `USUAL_SPREAD`.
        level: the probability that the interval holds at all looks together.
        looks: how many there are at most.
    """
    mid = statistics.fmean(values)
    known = (spread or Spread()).with_values(values)
    half = student_t((1 - level) / looks, known.degrees) * math.sqrt(known.variance / len(values))
    return Interval(low=mid - half, mid=mid, high=mid + half)


@functools.lru_cache
def student_t(outside: float, degrees: int) -> float:
    """Student's t that a value exceeds on either side with the probability `outside`.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4; solved by bisection. scipy has it, too, and takes 0.3 s to import: in the middle of
    an experiment, or in a notebook's kernel that only reads a result.

    >>> round(student_t(0.05, 2), 3), round(student_t(0.05, 9), 3)
    (4.303, 2.262)
    """
    low, high = 0.0, math.pi / 2  # of the angle atan(t / sqrt(degrees))
    for _ in range(60):
        angle = (low + high) / 2
        odd = degrees % 2
        term = math.cos(angle) if odd else 1.0
        total = term if degrees > 1 else 0.0
        for k in range(1 + odd, degrees - 1, 2):
            term *= k / (k + 1) * math.cos(angle) ** 2
            total += term
        inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
        low, high = (angle, high) if inside < 1 - outside else (low, angle)
    return math.tan(low) * math.sqrt(degrees)
