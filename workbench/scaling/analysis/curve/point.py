"""ScalingPoint: the throughput of a number of processes (or value of another knob), with all its repeats."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from workbench.core.checks import is_number, is_whole
from workbench.core.codec import JsonDataclass

PROCESSES = "nproc_per_node"
"""The knob of scaling proper; any other is only measured."""
CONTRADICTION = 2.0
"""Repeats of a point, or neighbours per process, further apart than this factor contradict each other: a mixed-up column does that."""
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860)
"""95 % quantiles of Student's t for 1 … 8 degrees of freedom; beyond, a series is exact to 0.1 %."""


class CurveError(ValueError):
    """Points that make no curve, or a question that a curve cannot answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint(JsonDataclass):
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
    """Why an attempt failed, if one did."""
    value: Any = None
    """Of the knob that was turned, where it is not the number of processes."""
    straggling: float | None = None
    """Share of the step in which the average process waits for the slowest one's data and forward; None = not known."""
    cpu_per_sample: float | None = None
    """CPU seconds of all processes, and their workers, for a sample; None = not known."""
    of_one_spec: bool = False
    """The repeats are of one spec for certain: if they lie far apart, the machine was to blame and not a mixed-up column."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", checked_size(self.world_size))
        if self.value is not None and (isinstance(self.value, bool) or not isinstance(self.value, Real)):
            object.__setattr__(self, "value", str(self.value))
        for rate in self.rates:
            if not is_number(rate, above=0, numpy=True):
                raise CurveError(f"{rate!r} samples/s with {self.world_size} processes: a finite number above 0 is needed")
        object.__setattr__(self, "rates", tuple(int(rate) if isinstance(rate, Integral) else float(rate) for rate in self.rates))
        if self.exposed is not None and not is_number(self.exposed, least=0, below=1, numpy=True):
            raise CurveError(
                f"exposed={self.exposed!r} with {self.world_size} processes: the share of the step in which only communication "
                "happens is needed, from 0 to below 1 (seconds divided by the step's seconds)"
            )
        if self.exposed is not None:
            object.__setattr__(self, "exposed", float(self.exposed))
        if self.unsteady and not self.of_one_spec:
            raise CurveError(
                f"the points of {self.world_size} processes contradict each other: {min(self.rates):g} and {max(self.rates):g} samples/s. "
                "Are they of the same model, batch and precision, and none of them per process? Measure again, or leave the wrong one out"
            )

    @property
    def at(self) -> Any:
        """Its place on the axis: the value of the knob that was changed."""
        return self.world_size if self.value is None else self.value

    @property
    def unsteady(self) -> bool:
        """Do the repeats lie further apart than repeats of one spec should?"""
        return bool(self.rates) and max(self.rates) > CONTRADICTION * min(self.rates)

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


def checked_size(value: Any) -> int:
    """A number of processes.

    Raises:
        CurveError: it is not a whole number of at least 1.
    """
    if not is_whole(value, least=1, numpy=True):
        raise CurveError(f"{value!r} processes: a whole number of at least 1 is needed")
    return int(value)


def _t95(freedom: int) -> float:
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return 1.6449 + 1.5238 / freedom + 1.4202 / freedom**2  # Cornish and Fisher's expansion around the normal quantile


def merged(points: Iterable[Any]) -> tuple[ScalingPoint, ...]:
    """Points by ascending number of processes or value (texts in their order), those of one made repeats of each other.

    Args:
        points: (world_size, samples_per_sec), (world_size, samples_per_sec, exposed), mappings with these names, or ScalingPoints.

    Raises:
        CurveError: something else, or repeats that contradict each other.
    """
    repeats: dict[Any, list[ScalingPoint]] = {}
    for place, given in enumerate(points):
        point = given if isinstance(given, ScalingPoint) else _of_row(given, place)
        repeats.setdefault(point.at, []).append(point)
    numbers = sorted(at for at in repeats if not isinstance(at, str))
    return tuple(_one(repeats[at]) for at in [*numbers, *(at for at in repeats if isinstance(at, str))])


def _of_row(row: Any, place: int) -> ScalingPoint:
    """A point from (world_size, samples_per_sec[, exposed]) or a mapping with these names, such as a row of a curve's frame."""
    if isinstance(row, Mapping):
        return _of_mapping(row, place)
    if callable(getattr(row, "tolist", None)):  # a row of an array
        row = row.tolist()
    values = tuple(row) if isinstance(row, list | tuple) else ()
    if len(values) not in (2, 3):
        raise CurveError(_no_row(row, place))
    _check_one(values[0], values[1], place)
    return ScalingPoint(world_size=_whole(values[0]), rates=(values[1],), exposed=values[2] if len(values) == 3 else None)


def _of_mapping(row: Mapping[str, Any], place: int) -> ScalingPoint:
    if "world_size" not in row or "samples_per_sec" not in row:
        raise CurveError(_no_row(dict(row), place))
    rate, exposed, failed = row["samples_per_sec"], row.get("exposed"), row.get("failed")
    failed = failed if isinstance(failed, str) else ""
    _check_one(row["world_size"], rate, place)
    return ScalingPoint(
        world_size=_whole(row["world_size"]),
        rates=() if failed and _missing(rate) else (rate,),
        exposed=None if _missing(exposed) else exposed,
        oversubscribed=bool(row.get("oversubscribed", False)),
        failed=failed,
        value=None if _missing(row.get("value")) else row["value"],
        straggling=None if _missing(row.get("straggling")) else row["straggling"],
        cpu_per_sample=None if _missing(row.get("cpu_per_sample")) else row["cpu_per_sample"],
    )


def _check_one(size: Any, rate: Any, place: int) -> None:
    """Refuse several throughputs in one row."""
    rate = rate.tolist() if callable(getattr(rate, "tolist", None)) else rate
    if isinstance(rate, list | tuple):
        rows = ", ".join(f"({size!r}, {repeat!r})" for repeat in rate[:2])
        raise CurveError(
            f"point {place}, ({size!r}, {rate!r:.60}): give one throughput per row; repeats are several rows: {rows or '(1, 100.0)'}, …"
        )


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, Real) and math.isnan(value))


def _whole(value: Any) -> Any:
    """A size that is whole as an int, as a column of an array or a frame may hold it as 4.0."""
    whole = isinstance(value, Real) and not isinstance(value, Integral) and float(value).is_integer()
    return int(value) if whole else value


def _no_row(row: Any, place: int) -> str:
    return (
        f"point {place}, {row!r:.80}: give (world_size, samples_per_sec), or these and the "
        "exposed share of the step, a mapping with these names, or a ScalingPoint; repeats are several rows"
    )


def _one(same: list[ScalingPoint]) -> ScalingPoint:
    """Merges points of one size into one with all their repeats (sorted: the order in which they were given says nothing)."""

    def middle(name: str) -> float | None:
        known = sorted(getattr(point, name) for point in same if getattr(point, name) is not None)
        return known[len(known) // 2] if known else None

    return ScalingPoint(
        world_size=same[0].world_size,
        rates=tuple(sorted(rate for point in same for rate in point.rates)),
        exposed=middle("exposed"),
        oversubscribed=any(point.oversubscribed for point in same),
        failed="; ".join(dict.fromkeys(point.failed for point in same if point.failed)),
        value=same[0].value,
        straggling=middle("straggling"),
        cpu_per_sample=middle("cpu_per_sample"),
        of_one_spec=all(point.of_one_spec for point in same),
    )
