"""ScalingCurve: measured throughput over the number of processes, or over another knob."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from workbench.core import run_directory, units
from workbench.core.codec import JsonDataclass, fields_from_json
from workbench.core.display import table as display
from workbench.runs.run import Run
from workbench.runs.spec import SHARDED, RunSpec, check_names
from workbench.scaling.analysis.curve.forms import How, Kind
from workbench.scaling.analysis.curve.point import PROCESSES, CurveError, ScalingPoint, checked_size, merged
from workbench.timeline.timeline import Timeline

if TYPE_CHECKING:
    from workbench.scaling.analysis.curve.fit import CurveFit


KINDS = {"weak": "each process keeps its batch, the global one grows", "strong": "the global batch stays, each process gets a smaller part"}


@dataclass(frozen=True, slots=True)
class ScalingCurve(display.Shown, JsonDataclass):
    """Measured throughput against the number of processes, or another knob. Points with the same number are repeats.

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
    """Cores (or GPUs) of the machine: points with more processes are oversubscribed. None = not known; a point says it of itself."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Notes on the measurement."""
    over: str = field(default=PROCESSES, kw_only=True)
    """The knob that was turned; fits are of processes alone."""
    grows: How = field(default=How(), kw_only=True)
    """What the processes do, where that says how throughput grows: how many micro-batches go through a pipeline whose stages they are, or
    that they share the weights."""
    unit: str = field(default="samples", kw_only=True)
    """What is counted per second, for tables and pictures: "samples", or "tokens"."""

    def __post_init__(self) -> None:
        if not (isinstance(self.unit, str) and self.unit):
            raise CurveError(f'unit={self.unit!r}: a word for what is counted per second is needed, such as "samples" or "tokens"')
        if self.kind not in KINDS:
            raise CurveError(f"kind={self.kind!r}: allowed are " + " and ".join(f'"{name}" ({what})' for name, what in KINDS.items()))
        to_dict = getattr(self.points, "to_dict", None)
        if callable(to_dict):  # a DataFrame
            object.__setattr__(self, "points", to_dict("records"))
        if isinstance(self.points, str | Mapping) or not isinstance(self.points, Iterable):
            raise CurveError(f"points={self.points!r:.80}: give a list of (world_size, samples_per_sec)")
        points = merged(self.points)
        if not points:
            raise CurveError("a curve of no points: give (world_size, samples_per_sec) of two or more numbers of processes")
        if self.slots is not None:
            object.__setattr__(self, "slots", checked_size(self.slots))
            points = tuple(replace(point, oversubscribed=point.oversubscribed or point.world_size > self.slots) for point in points)
        object.__setattr__(self, "points", points)

    @classmethod
    def from_runs(
        cls,
        runs: Iterable[Run],
        *,
        over: str = PROCESSES,
        slots: int | None = None,
        exposed: Mapping[Any, float] | None = None,
        notes: Iterable[str] = (),
    ) -> "ScalingCurve":
        """The curve of runs that differ only in one knob, such as those of `sweep(spec, nproc_per_node=[1, 2, 4])`.

        Scaling is weak if the runs have the same micro-batch, and strong if micro-batches differ and the global batch does not. Runs of one
        size are repeats. A failed run is kept and shown, and fits ignore it. `wb.scaling_curve` also makes the runs.

        Args:
            runs: finished runs.
            over: the knob that was varied.
            slots: cores (or GPUs) of the machine; None = as the runs recorded. A run with more processes, or on CPUs more threads, is
                oversubscribed.
            exposed: value of the knob → share of the step that is exposed communication, where it was measured.
            notes: notes on the measurement.

        Raises:
            CurveError: no runs, a run that still runs, or runs that differ in another field, which the message names.
        """

        arguments = curve_arguments(list(runs), over, slots, exposed or {})
        return cls(**{**arguments, "notes": (*arguments["notes"], *notes)})

    # --- what was measured

    @property
    def usable(self) -> tuple[ScalingPoint, ...]:
        """The points that fits use: those that were measured and are not oversubscribed."""
        return tuple(point for point in self.points if point.usable)

    @property
    def world_sizes(self) -> list[int]:
        """Number of processes of each point."""
        return [point.world_size for point in self.points]

    @property
    def values(self) -> list[Any]:
        """Value of the varied knob at each point."""
        return [point.at for point in self.points]

    @property
    def samples_per_sec(self) -> list[float]:
        """Samples per second of each point, over all processes; nan if it failed."""
        return [point.samples_per_sec for point in self.points]

    @property
    def base(self) -> ScalingPoint | None:
        """The smallest measured point, to which speedup and efficiency are relative."""
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
        """Fit all laws to the usable points.

        Args:
            level: probability with which the intervals should contain a later measurement.
            noise: relative standard deviation of one measurement; None = from repeats, or 2 % without repeats.

        Raises:
            CurveError: fewer than two usable points, or a curve over a knob other than the number of processes.
        """
        from workbench.scaling.analysis.curve.fit import fit

        if self.over != PROCESSES:
            raise CurveError(
                f"a curve over {self.over} has no law to be fitted: the laws are about processes. Its best measured value is "
                f"{self.best!r}; wb.scaling_curve(spec.replace({self.over}=…)) measures processes with it"
            )
        if len(self.usable) < 2 and (stopped := next((note for note in self.notes if "resume=" in note), "")):
            raise CurveError(f"a law needs two usable points, and the curve has {len(self.usable)} so far: {stopped}")
        return replace(fit(self.usable, self.kind, self.grows, level=level, noise=noise, unit=self.unit), slots=self.slots)

    @property
    def best(self) -> Any:
        """The point with the highest throughput; None if nothing was measured."""
        fastest = max((point for point in self.points if point.rates), key=lambda point: point.samples_per_sec, default=None)
        return fastest and fastest.at

    # --- how it shows itself

    @property
    def table(self) -> display.Table:
        """One row per number of processes, or value of the knob."""
        points = self.points
        columns: dict[str, list[object]] = {
            "processes" if self.over == PROCESSES else self.over: [point.at for point in points],
            "throughput": [units.rate(point.samples_per_sec, self.unit) for point in points],
            "90 % interval": [
                units.MISSING if math.isnan(point.low) else f"{units.rate(point.low, self.unit)} … {units.rate(point.high, self.unit)}"
                for point in points
            ],
        }
        if self.over == PROCESSES or len(set(self.world_sizes)) > 1:
            columns["per process"] = [units.rate(point.per_process, self.unit) for point in points]
        columns["speedup"] = [units.times(speedup) for speedup in self.speedup]
        if self.over == PROCESSES:
            columns["efficiency"] = [units.percent(share) for share in self.efficiency]
        if self.over == PROCESSES or any(point.exposed is not None for point in points):
            columns["exposed"] = [units.percent(point.exposed) for point in points]
        if any(point.straggling is not None for point in points):
            columns["straggling"] = [units.percent(point.straggling) for point in points]
        if any(point.cpu_per_sample is not None for point in points):
            columns["CPU per sample"] = [units.seconds(point.cpu_per_sample) for point in points]
        columns[""] = [_remarks(point) for point in points]
        title = f"{self.kind.capitalize()} scaling: {KINDS[self.kind]}" if self.over == PROCESSES else f"Throughput by {self.over}"
        return display.Table(
            columns=tuple(columns), rows=[list(row) for row in zip(*columns.values(), strict=True)], title=title, note=self._note
        )

    def to_frame(self) -> Any:
        """A DataFrame with a row per number of processes."""
        rows = [
            {
                "world_size": point.world_size,
                **({} if self.over == PROCESSES else {"value": point.at}),
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
            for point, speedup, share in zip(self.points, self.speedup, self.efficiency, strict=True)
        ]
        return display.frame(rows)

    @property
    def _note(self) -> str:
        if self.base is None:
            base = "nothing was measured"
        elif self.over == PROCESSES:
            base = f"speedup and efficiency: of {self.base.at}"
        else:
            base = f"speedup: over {self.over}={self.base.at}"
        return display.notes(["measured", base, *self.notes])

    plot = display.plot_method("scaling")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ScalingCurve":
        return fields_from_json(cls, {**value, "points": [ScalingPoint.from_json(point) for point in value["points"]]})

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        if self.over != PROCESSES:
            return f"ScalingCurve({self.over}: {', '.join(map(str, self.values))})"
        return f"ScalingCurve({self.kind}, {', '.join(map(str, self.world_sizes))} processes)"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _remarks(point: ScalingPoint) -> str:
    """Notes on a point."""
    crowded = "oversubscribed: no scaling, left out of fits" if point.oversubscribed else ""
    apart = "repeats lie more than a factor of 2 apart: measure it again on a quieter machine" if point.unsteady else ""
    failed = f"{'a repeat ' if point.rates else ''}failed: {point.failed}" if point.failed else ""
    return "; ".join(filter(None, [crowded, apart, failed]))


_BATCH = ("micro_batch", "accumulation")
"""What strong scaling changes with the number of processes, so that the global batch stays."""
_BEFORE = ("data_wait", "h2d", "forward")
"""Phases of a rank before it waits for the others."""


def curve_arguments(runs: Sequence[Any], over: str, slots: int | None, exposed: Mapping[Any, float]) -> dict[str, Any]:
    """The arguments of the curve. See `ScalingCurve.from_runs`.

    Raises:
        CurveError: as there.
    """
    example = f"wb.sweep(spec, {over}=[1, 2, 4])" if over == PROCESSES else f"wb.sweep(spec, {over}=[…])"
    for run in runs:
        if not isinstance(run, Run):
            raise CurveError(f"from_runs() got a {type(run).__name__}: give runs, such as those of {example}")
        if run.state == "running":
            raise CurveError(f"{run!r} still runs: wait for it, run.wait()")
    if not runs:
        raise CurveError(f"from_runs() got no runs: {example} gives some")
    check_names(type(runs[0].spec), {over: None})
    values = {_value(run, over) for run in runs}
    if unknown := [value for value in exposed if value not in values]:
        what = f"{unknown[0]} processes, and no run has as many" if over == PROCESSES else f"{over}={unknown[0]!r}, and no run has it"
        raise CurveError(f"exposed has an entry for {what}")
    kind = _kind(runs, over)
    check_same_machine(runs)
    on_gpus = any(timeline.clock == "device" for run in runs for timeline in run.timelines)
    notes = []
    if slots is None:
        what = "gpus" if on_gpus else "cores"
        slots = run_directory.read_json(runs[0].path / run_directory.RUN_JSON).get(what)
        notes += [f"how many {what} there were is not known: give slots="] if slots is None else []
    points = [_point(run, over, exposed.get(_value(run, over)), None if on_gpus else slots) for run in runs]
    sharded = over == PROCESSES and all(getattr(run.spec, "parallel", "") in SHARDED for run in runs)
    return {"points": points, "kind": kind, "slots": slots, "notes": tuple(notes), "over": over, "grows": How(sharded=sharded)}


def _value(run: Run, over: str) -> Any:
    """Of the knob that was turned, as the curve shows it."""
    return shown_value(getattr(run.spec, over))


def shown_value(value: Any) -> Any:
    """A knob's value on a curve: a number, or a text."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _kind(runs: Sequence[Run], over: str) -> str:
    """ "strong" if the runs share a global batch that their processes divide, else "weak"."""
    first = runs[0].spec
    for run in runs[1:]:
        if type(run.spec) is not type(first):
            raise CurveError(f"{runs[0]!r} and {run!r} are not of one kind, a task and a script: a curve is of one program")
    differing = {name: value for run in runs[1:] for name, value in first.changes(run.spec).items() if name != over}  # type: ignore[arg-type]
    divided = over == PROCESSES and bool(differing) and set(differing) <= set(_BATCH)
    if divided and len({getattr(run.spec, "global_batch", None) for run in runs}) == 1:
        return "strong"
    if differing:
        name, (here, there) = next(iter(differing.items()))
        others = f" (and in {', '.join(list(differing)[1:])})" if len(differing) > 1 else ""
        hint = "; for strong scaling choose micro_batch so that the global batch is the same in all" if divided else ""
        raise CurveError(
            f"the runs differ in {name}{others}, {here!r} and {there!r}: a curve is of runs that differ in {over} alone{hint}. "
            "Make one curve for each, or wb.compare(*runs)"
        )
    return "weak"


def check_same_machine(runs: Sequence[Run]) -> None:
    """Refuse runs that cannot be on one curve.

    Raises:
        CurveError: they were made on different hosts or with different versions of torch.
    """
    infos = [run_directory.read_json(run.path / run_directory.RUN_JSON) for run in runs]
    for name, values in (
        ("host", [info.get("host") for info in infos]),
        ("torch", [info.get("versions", {}).get("torch") for info in infos]),
    ):
        if len(set(values)) > 1:
            shown = " and ".join(map(repr, dict.fromkeys(values)))
            raise CurveError(f"the runs differ in {name}, {shown}: a curve is of runs that differ in one knob alone")


def _point(run: Run, over: str, exposed: float | None, cores: int | None) -> ScalingPoint:
    spec, rate = run.spec, run.samples_per_sec
    where: dict[str, Any] = {
        "world_size": spec.world_size,
        "value": None if over == PROCESSES else _value(run, over),
        "oversubscribed": cores is not None and spec.nproc_per_node * spec.threads > cores,
        "of_one_spec": isinstance(spec, RunSpec),
    }
    if not run.ok:
        return ScalingPoint(**where, failed=str(run.error or run.state).splitlines()[0])
    if math.isnan(rate):
        return ScalingPoint(**where, failed="no measured step: a script's steps are measured with watch=True")
    timelines = run.timelines
    cpu = statistics.fmean(timeline.cpu_per_sample for timeline in timelines)
    return ScalingPoint(
        **where, rates=(rate,), exposed=exposed, straggling=straggling(timelines), cpu_per_sample=None if math.isnan(cpu) else cpu
    )


def straggling(timelines: Sequence[Timeline]) -> float | None:
    """Share of the step in which the average rank waits for the slowest one's data and forward; what it waits for in the backward does not
    show in timelines and is left out. None of one rank, or where no step was measured on all.
    """
    by_step = [{step.index: step for step in timeline.measured} for timeline in timelines]
    common = set.intersection(*(set(steps) for steps in by_step)) if len(by_step) > 1 else set[int]()
    if not common:
        return None
    waited = whole = 0.0
    for index in common:
        steps = [steps[index] for steps in by_step]
        own = [sum(step.phases[: len(_BEFORE)]) for step in steps]
        waited += max(own) - statistics.fmean(own)
        whole += statistics.fmean(step.seconds for step in steps)
    return waited / whole if whole else None
