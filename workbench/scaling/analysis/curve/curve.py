"""ScalingCurve: throughput against the number of processes, or another knob, as it was measured.

Showing: a curve as a table and as rows for a DataFrame.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from workbench.core import units
from workbench.core.codec import JsonDataclass, fields_from_json
from workbench.core.display import table
from workbench.core.display import table as display
from workbench.scaling.analysis.curve.forms import How, Kind
from workbench.scaling.analysis.curve.point import PROCESSES, CurveError, ScalingPoint, checked_size, merged

if TYPE_CHECKING:
    from workbench.runs.run import Run
    from workbench.scaling.analysis.curve.fit import CurveFit


KINDS = {
    "weak": "each process keeps its batch, the global one grows",
    "strong": "the global batch stays, each process gets a smaller part",
}


def table_of(curve: "ScalingCurve") -> table.Table:
    """One row per point; columns of which nothing is known are left out."""
    points = curve.points
    columns: dict[str, list[object]] = {
        "processes" if curve.over == PROCESSES else curve.over: [point.at for point in points],
        "throughput": [units.rate(point.samples_per_sec) for point in points],
        "90 % interval": [_between(point) for point in points],
    }
    if curve.over == PROCESSES or len(set(curve.world_sizes)) > 1:
        columns["per process"] = [units.rate(point.per_process) for point in points]
    columns["speedup"] = [units.times(one) for one in curve.speedup]
    if curve.over == PROCESSES:
        columns["efficiency"] = [units.percent(one) for one in curve.efficiency]
    if curve.over == PROCESSES or any(point.exposed is not None for point in points):
        columns["exposed"] = [units.percent(point.exposed) for point in points]
    if any(point.straggling is not None for point in points):
        columns["straggling"] = [units.percent(point.straggling) for point in points]
    if any(point.cpu_per_sample is not None for point in points):
        columns["CPU per sample"] = [units.seconds(point.cpu_per_sample) for point in points]
    columns[""] = [_said(point) for point in points]
    title = f"{curve.kind.capitalize()} scaling: {KINDS[curve.kind]}" if curve.over == PROCESSES else f"Throughput by {curve.over}"
    return table.Table(
        columns=tuple(columns), rows=[list(row) for row in zip(*columns.values(), strict=True)], title=title, note=_note(curve)
    )


def rows_of(curve: "ScalingCurve") -> list[dict[str, Any]]:
    """Plain values, one mapping per point."""
    return [
        {
            "world_size": point.world_size,
            **({} if curve.over == PROCESSES else {"value": point.at}),
            "samples_per_sec": point.samples_per_sec,
            "low": point.low,
            "high": point.high,
            "repeats": len(point.rates),
            "speedup": speedup,
            "efficiency": share,
            "exposed": _number(point.exposed),
            "straggling": _number(point.straggling),
            "cpu_per_sample": _number(point.cpu_per_sample),
            "oversubscribed": point.oversubscribed,
            "failed": point.failed,
        }
        for point, speedup, share in zip(curve.points, curve.speedup, curve.efficiency, strict=True)
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _between(point: ScalingPoint) -> str:
    return units.MISSING if math.isnan(point.low) else f"{units.rate(point.low)} … {units.rate(point.high)}"


def _note(curve: "ScalingCurve") -> str:
    if curve.base is None:
        base = "nothing was measured"
    elif curve.over == PROCESSES:
        base = f"speedup and efficiency: of {curve.base.at}"
    else:
        base = f"speedup: over {curve.over}={curve.base.at}"
    return "; ".join(["measured", base, *curve.notes])


def _said(point: ScalingPoint) -> str:
    """What is to be said of a point."""
    crowded = "oversubscribed: no scaling, left out of fits" if point.oversubscribed else ""
    apart = "repeats lie more than a factor of 2 apart: measure it again on a quieter machine" if point.unsteady else ""
    failed = f"{'a repeat ' if point.rates else ''}failed: {point.failed}" if point.failed else ""
    return "; ".join(filter(None, [crowded, apart, failed]))


@dataclass(frozen=True, slots=True)
class ScalingCurve(display.Shown, JsonDataclass):
    """Measured throughput by number of processes, or by another knob. Points of one number are repeats of each other.

    >>> curve = ScalingCurve([(8, 40150), (16, 75220), (32, 141470)], kind="weak")
    >>> [round(share, 2) for share in curve.efficiency]
    [1.0, 0.94, 0.88]
    >>> found = curve.fit().predict(64)
    >>> found.low < found.mid < found.naive
    True
    """

    points: Sequence[Any]
    """(world_size, samples_per_sec) each, or with the exposed share of the step behind, or ScalingPoints; rows may be
    mappings with these names, or all of it a DataFrame like `to_frame`'s. Kept as ScalingPoints, sorted."""
    kind: Kind = "weak"
    """ "weak": each process keeps its batch. "strong": the global batch stays."""
    slots: int | None = None
    """Cores (or GPUs) there were: points with more processes are oversubscribed. None = not known; a point says it of itself."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """What to keep in mind about the measurement."""
    over: str = field(default=PROCESSES, kw_only=True)
    """The knob that was turned; fits are of processes alone."""
    grows: How = field(default=How(), kw_only=True)
    """What the processes do, where that says how throughput grows: how many micro-batches go through a pipeline whose stages they are, or
    that they share the weights."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CurveError(f"kind={self.kind!r}: allowed are " + " and ".join(f'"{name}" ({what})' for name, what in KINDS.items()))
        to_dict = getattr(self.points, "to_dict", None)
        if callable(to_dict):  # a DataFrame
            object.__setattr__(self, "points", to_dict("records"))
        if isinstance(self.points, str | Mapping) or not isinstance(self.points, Iterable):
            raise CurveError(f"points={self.points!r:.80}: a list of (world_size, samples_per_sec) is wanted")
        found = merged(self.points)
        if not found:
            raise CurveError("a curve of no points: give (world_size, samples_per_sec) of two or more numbers of processes")
        if self.slots is not None:
            object.__setattr__(self, "slots", checked_size(self.slots))
            found = tuple(_marked(point, self.slots) for point in found)
        object.__setattr__(self, "points", found)

    @classmethod
    def from_runs(
        cls,
        runs: "Iterable[Run]",
        *,
        over: str = PROCESSES,
        slots: int | None = None,
        exposed: Mapping[Any, float] | None = None,
        notes: Iterable[str] = (),
    ) -> "ScalingCurve":
        """The curve of runs that differ in nothing but one knob, such as those of `sweep(spec, nproc_per_node=[1, 2, 4])`.

        Weak scaling if they have the same micro-batch; strong if micro-batches differ and the global batch does not. Runs of one size are
        repeats. A run that failed is kept and shown, and no fit uses it. `wb.scaling_curve` makes the runs as well.

        Args:
            runs: finished ones.
            over: the knob that was turned.
            slots: cores (or GPUs) there were; None = what the runs say of their machine. A run is oversubscribed if its processes, or on
                CPUs their threads, are more.
            exposed: share of the step that is nothing but communication, by the knob's value, where it was measured.
            notes: what to keep in mind about the measurement.

        Raises:
            CurveError: no runs, one that still runs, or they differ in another field; the message names it.
        """
        from workbench.scaling.analysis.curve.read import read

        found = read(list(runs), over, slots, exposed or {})
        return cls(**{**found, "notes": (*found["notes"], *notes)})

    # --- what was measured

    @property
    def usable(self) -> tuple[ScalingPoint, ...]:
        """The points that fits use: measured, and not oversubscribed."""
        return tuple(point for point in self.points if point.usable)

    @property
    def world_sizes(self) -> list[int]:
        """Processes of each point."""
        return [point.world_size for point in self.points]

    @property
    def values(self) -> list[Any]:
        """Of the knob that was turned, one for each point."""
        return [point.at for point in self.points]

    @property
    def samples_per_sec(self) -> list[float]:
        """Of each point, all processes together; nan where it failed."""
        return [point.samples_per_sec for point in self.points]

    @property
    def base(self) -> ScalingPoint | None:
        """The smallest measured point: what speedup and efficiency are relative to."""
        return next((point for point in self.points if point.rates), None)

    @property
    def speedup(self) -> list[float]:
        """Throughput of each point over that of the smallest."""
        return [point.samples_per_sec / self.base.samples_per_sec if self.base else math.nan for point in self.points]

    @property
    def efficiency(self) -> list[float]:
        """Throughput per process of each point over that of the smallest; 1 = perfect."""
        return [point.per_process / self.base.per_process if self.base else math.nan for point in self.points]

    def fit(self, *, level: float = 0.9, noise: float | None = None) -> "CurveFit":
        """Hold all laws against the usable points.

        Args:
            level: how often the intervals should hold what is measured later.
            noise: standard deviation of one measurement as a fraction of it; None = as repeats tell, or 2 % without any.

        Raises:
            CurveError: fewer than two usable points, or a curve over another knob than the processes.
        """
        from workbench.scaling.analysis.curve.fit import fit

        if self.over != PROCESSES:
            raise CurveError(
                f"a curve over {self.over} has no law to be fitted: the laws are about processes. Its best measured value is "
                f"{self.best!r}; wb.scaling_curve(spec.replace({self.over}=…)) measures processes with it"
            )
        return fit(self.usable, self.kind, self.grows, level=level, noise=noise)

    @property
    def best(self) -> Any:
        """Where throughput was highest; None where nothing was measured."""
        found = max((point for point in self.points if point.rates), key=lambda point: point.samples_per_sec, default=None)
        return found and found.at

    # --- how it shows itself

    @property
    def table(self) -> display.Table:
        """One row per number of processes, or value of the knob."""
        return table_of(self)

    def to_frame(self) -> Any:
        """A DataFrame with a row per number of processes."""
        return display.frame(rows_of(self))

    plot = display.plot_method("scaling")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ScalingCurve":
        """Inverse of `to_json`."""
        return fields_from_json(cls, {**value, "points": [ScalingPoint.from_json(point) for point in value["points"]]})

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        if self.over != PROCESSES:
            return f"ScalingCurve({self.over}: {', '.join(map(str, self.values))})"
        return f"ScalingCurve({self.kind}, {', '.join(map(str, self.world_sizes))} processes)"


def _marked(point: ScalingPoint, slots: int) -> ScalingPoint:
    return replace(point, oversubscribed=point.oversubscribed or point.world_size > slots)
