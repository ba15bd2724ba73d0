"""ScalingPoint: the throughput that some number of processes had, as often as it was measured."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CONTRADICTION = 2.0
"""Repeats of a point, or neighbours per process, further apart than this factor contradict each other: a mixed-up column does that."""
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943)
"""95 % quantiles of Student's t for 1 … 6 degrees of freedom; beyond, a series is exact to 0.1 %."""


class CurveError(ValueError):
    """Points that make no curve, or a question that a curve cannot answer; the message says what was given, what is wanted, what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One number of processes, with its throughput.

    >>> point = ScalingPoint(world_size=4, rates=(380.0, 400.0, 390.0))
    >>> round(point.samples_per_sec), point.low < 380 < 400 < point.high
    (390, True)
    """

    world_size: int
    """Processes."""
    rates: tuple[float, ...] = ()
    """Samples (or tokens) per second of all processes together, once per repeat; empty = every attempt failed."""
    exposed: float | None = None
    """Share of the step in which nothing but communication happens, 0 … 1; None = not measured."""
    oversubscribed: bool = False
    """More processes than cores or GPUs: what is measured is how they wait for each other, and no fit uses it."""
    failed: str = ""
    """Why an attempt failed, where one did."""

    def __post_init__(self) -> None:
        checked_size(self.world_size)
        for rate in self.rates:
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
                raise CurveError(f"{rate!r} samples/s with {self.world_size} processes: a finite number above 0 is wanted")
        if self.exposed is not None and not 0 <= self.exposed < 1:
            raise CurveError(
                f"exposed={self.exposed!r} with {self.world_size} processes: the share of the step in which only communication "
                "happens is wanted, from 0 to below 1 (seconds divided by the step's seconds)"
            )
        if self.rates and max(self.rates) > CONTRADICTION * min(self.rates):
            raise CurveError(
                f"the points of {self.world_size} processes contradict each other: {min(self.rates):g} and {max(self.rates):g} samples/s. "
                "Are they of the same model, batch and precision, and none of them per process? Measure again, or leave the wrong one out"
            )

    @property
    def usable(self) -> bool:
        """May a fit use it?"""
        return bool(self.rates) and not self.oversubscribed

    @property
    def samples_per_sec(self) -> float:
        """Geometric mean of the repeats; nan where every attempt failed."""
        return math.exp(sum(map(math.log, self.rates)) / len(self.rates)) if self.rates else math.nan

    @property
    def per_process(self) -> float:
        """Samples per second and process."""
        return self.samples_per_sec / self.world_size

    @property
    def spread(self) -> float | None:
        """Standard deviation of the repeats as a fraction of them; None with fewer than two."""
        if len(self.rates) < 2:
            return None
        logs = [math.log(rate / self.samples_per_sec) for rate in self.rates]
        return math.sqrt(sum(log**2 for log in logs) / (len(logs) - 1))

    @property
    def low(self) -> float:
        """Lower end of the 90 % interval of the mean (Student's t on the logarithms); nan with fewer than two repeats."""
        return self._end(-1)

    @property
    def high(self) -> float:
        """Upper end of it."""
        return self._end(1)

    def _end(self, sign: int) -> float:
        if self.spread is None:
            return math.nan
        return self.samples_per_sec * math.exp(sign * _t95(len(self.rates) - 1) * self.spread / math.sqrt(len(self.rates)))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "world_size": self.world_size,
            "rates": list(self.rates),
            "exposed": self.exposed,
            "oversubscribed": self.oversubscribed,
            "failed": self.failed,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ScalingPoint":
        """Inverse of `to_json`."""
        return cls(**{**value, "rates": tuple(value["rates"])})


def checked_size(value: Any) -> int:
    """A number of processes.

    Raises:
        CurveError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CurveError(f"{value!r} processes: a whole number of at least 1 is wanted")
    return value


def merged(points: Iterable[Any]) -> tuple[ScalingPoint, ...]:
    """Points by ascending world size, those of one size made repeats of each other.

    Args:
        points: (world_size, samples_per_sec), (world_size, samples_per_sec, exposed) or ScalingPoints.

    Raises:
        CurveError: something else, or repeats that contradict each other.
    """
    found: dict[int, list[ScalingPoint]] = {}
    for place, given in enumerate(points):
        point = given if isinstance(given, ScalingPoint) else _of_row(given, place)
        found.setdefault(point.world_size, []).append(point)
    return tuple(_one(found[size]) for size in sorted(found))


def _of_row(row: Any, place: int) -> ScalingPoint:
    values = tuple(row) if isinstance(row, list | tuple) else ()
    if len(values) not in (2, 3):
        raise CurveError(
            f"point {place}, {row!r:.80}: (world_size, samples_per_sec) is wanted, or these and the "
            "exposed share of the step, or a ScalingPoint"
        )
    if isinstance(values[0], float) and values[0].is_integer():
        values = (int(values[0]), *values[1:])
    return ScalingPoint(world_size=values[0], rates=(values[1],), exposed=values[2] if len(values) == 3 else None)


def _one(same: list[ScalingPoint]) -> ScalingPoint:
    """Points of one size as one, with all their repeats (sorted: the order in which they were given says nothing)."""
    shares = sorted(point.exposed for point in same if point.exposed is not None)
    return ScalingPoint(
        world_size=same[0].world_size,
        rates=tuple(sorted(rate for point in same for rate in point.rates)),
        exposed=shares[len(shares) // 2] if shares else None,
        oversubscribed=any(point.oversubscribed for point in same),
        failed="; ".join(dict.fromkeys(point.failed for point in same if point.failed)),
    )


def _t95(freedom: int) -> float:
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return 1.6449 + 1.5238 / freedom + 1.4202 / freedom**2  # Cornish and Fisher's expansion around the normal quantile
