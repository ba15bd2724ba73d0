"""ScalingPoint: the throughput of some number of processes (or value of another knob), as often as it was measured."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from workbench.checks import is_number, is_whole
from workbench.codec import JsonDataclass

PROCESSES = "nproc_per_node"
"""The knob of scaling proper; any other is only measured."""
CONTRADICTION = 2.0
"""Repeats of a point, or neighbours per process, further apart than this factor contradict each other: a mixed-up column does that."""
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860)
"""95 % quantiles of Student's t for 1 … 8 degrees of freedom; beyond, a series is exact to 0.1 %."""


class CurveError(ValueError):
    """Points that make no curve, or a question that a curve cannot answer; the message says what was given, what is wanted, what to try."""


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
    """Why an attempt failed, where one did."""
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
                raise CurveError(f"{rate!r} samples/s with {self.world_size} processes: a finite number above 0 is wanted")
        object.__setattr__(self, "rates", tuple(int(rate) if isinstance(rate, Integral) else float(rate) for rate in self.rates))
        if self.exposed is not None and not is_number(self.exposed, least=0, below=1, numpy=True):
            raise CurveError(
                f"exposed={self.exposed!r} with {self.world_size} processes: the share of the step in which only communication "
                "happens is wanted, from 0 to below 1 (seconds divided by the step's seconds)"
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
        """Where it lies on the axis: the value of the knob that was turned."""
        return self.world_size if self.value is None else self.value

    @property
    def unsteady(self) -> bool:
        """Do the repeats lie further apart than any one spec's should?"""
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
        CurveError: it is none.
    """
    if not is_whole(value, least=1, numpy=True):
        raise CurveError(f"{value!r} processes: a whole number of at least 1 is wanted")
    return int(value)


def _t95(freedom: int) -> float:
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return 1.6449 + 1.5238 / freedom + 1.4202 / freedom**2  # Cornish and Fisher's expansion around the normal quantile
