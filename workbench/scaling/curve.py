"""ScalingCurve: throughput against the number of processes, as it was measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from workbench import display, units
from workbench.scaling.forms import Kind
from workbench.scaling.point import CurveError, ScalingPoint, checked_size, merged

if TYPE_CHECKING:
    from workbench.run import Run
    from workbench.scaling.fitting import CurveFit

KINDS = {
    "weak": "each process keeps its batch, the global one grows",
    "strong": "the global batch stays, each process gets a smaller part",
}


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Measured throughput by number of processes. Points of one size are repeats of each other.

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
    def from_runs(cls, runs: "Iterable[Run]", *, slots: int | None = None, exposed: Mapping[int, float] | None = None) -> "ScalingCurve":
        """The curve of runs that differ in nothing but their number of processes, such as those of `sweep(spec, nproc_per_node=[1, 2, 4])`.

        Weak scaling if they have the same micro-batch; strong if micro-batches differ and the global batch does not. Runs of one size are
        repeats. A run that failed is kept and shown, and no fit uses it.

        Args:
            runs: finished ones.
            slots: cores (or GPUs) there were; None = what the runs say of their machine.
            exposed: share of the step that is nothing but communication, by number of processes, where it was measured.

        Raises:
            CurveError: no runs, one that still runs, or they differ in another field; the message names it.
        """
        from workbench.scaling.reading import read

        return cls(**read(list(runs), slots, exposed or {}))

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
            CurveError: fewer than two usable points.
        """
        from workbench.scaling.fitting import fit

        return fit(self.usable, self.kind, level=level, noise=noise)

    # --- how it shows itself

    @property
    def table(self) -> display.Table:
        """One row per number of processes."""
        rows = [
            [
                point.world_size,
                units.rate(point.samples_per_sec),
                units.MISSING if math.isnan(point.low) else f"{units.rate(point.low)} … {units.rate(point.high)}",
                units.rate(point.per_process),
                units.times(speedup),
                units.percent(share),
                units.percent(point.exposed),
                _said(point),
            ]
            for point, speedup, share in zip(self.points, self.speedup, self.efficiency, strict=True)
        ]
        base = f"speedup and efficiency: of {self.base.world_size}" if self.base else "nothing was measured"
        return display.Table(
            columns=("processes", "throughput", "90 % interval", "per process", "speedup", "efficiency", "exposed", ""),
            rows=rows,
            title=f"{self.kind.capitalize()} scaling: {KINDS[self.kind]}",
            note="; ".join(["measured", base, *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with a row per number of processes."""
        return display.frame(
            [
                {
                    "world_size": point.world_size,
                    "samples_per_sec": point.samples_per_sec,
                    "low": point.low,
                    "high": point.high,
                    "repeats": len(point.rates),
                    "speedup": speedup,
                    "efficiency": share,
                    "exposed": math.nan if point.exposed is None else point.exposed,
                    "oversubscribed": point.oversubscribed,
                    "failed": point.failed,
                }
                for point, speedup, share in zip(self.points, self.speedup, self.efficiency, strict=True)
            ]
        )

    def plot(self, ax: Any = None) -> Any:
        """`plot.scaling`: points, and where two or more are usable the band and the naive line; returns the Axes."""
        return display.picture("scaling")(self, ax=ax)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"points": [point.to_json() for point in self.points], "kind": self.kind, "slots": self.slots, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ScalingCurve":
        """Inverse of `to_json`."""
        points = [ScalingPoint.from_json(one) for one in value["points"]]
        return cls(points, kind=value["kind"], slots=value["slots"], notes=tuple(value["notes"]))

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        return f"ScalingCurve({self.kind}, {', '.join(map(str, self.world_sizes))} processes)"

    def __str__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def _marked(point: ScalingPoint, slots: int) -> ScalingPoint:
    return replace(point, oversubscribed=point.oversubscribed or point.world_size > slots)


def _said(point: ScalingPoint) -> str:
    """What is to be said of a point."""
    crowded = "oversubscribed: no scaling, left out of fits" if point.oversubscribed else ""
    failed = f"{'a repeat ' if point.rates else ''}failed: {point.failed}" if point.failed else ""
    return "; ".join(filter(None, [crowded, failed]))
