"""Reading: the points of a curve from runs that may differ in one knob and in nothing else."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.core import run_directory
from workbench.runs.run import Run
from workbench.runs.spec import SHARDED, RunSpec, check_names
from workbench.scaling.analysis.curve.forms import How
from workbench.scaling.analysis.curve.point import PROCESSES, CurveError, ScalingPoint
from workbench.timeline.timeline import Timeline

_BATCH = ("micro_batch", "accumulation")
"""What strong scaling changes with the number of processes, so that the global batch stays."""
_BEFORE = ("data_wait", "h2d", "forward")
"""Phases that a rank is through before it meets the others."""


def read(runs: Sequence[Any], over: str, slots: int | None, exposed: Mapping[Any, float]) -> dict[str, Any]:
    """The arguments of the curve. See `ScalingCurve.from_runs`.

    Raises:
        CurveError: as there.
    """
    example = f"wb.sweep(spec, {over}=[1, 2, 4])" if over == PROCESSES else f"wb.sweep(spec, {over}=[…])"
    for run in runs:
        if not isinstance(run, Run):
            raise CurveError(f"from_runs() got a {type(run).__name__}: runs are wanted, such as those of {example}")
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
    """ "strong" if the runs share a global batch that their processes divide, else "weak".

    Raises:
        CurveError: they differ in another field.
    """
    first = runs[0].spec
    for run in runs[1:]:
        if type(run.spec) is not type(first):
            raise CurveError(f"{runs[0]!r} and {run!r} are not of one kind, a task and a script: a curve is of one program")
    found = {name: value for run in runs[1:] for name, value in first.changes(run.spec).items() if name != over}  # type: ignore[arg-type]
    divided = over == PROCESSES and bool(found) and set(found) <= set(_BATCH)
    if divided and len({getattr(run.spec, "global_batch", None) for run in runs}) == 1:
        return "strong"
    if found:
        name, (here, there) = next(iter(found.items()))
        others = f" (and in {', '.join(list(found)[1:])})" if len(found) > 1 else ""
        hint = "; for strong scaling choose micro_batch so that the global batch is the same in all" if divided else ""
        raise CurveError(
            f"the runs differ in {name}{others}, {here!r} and {there!r}: a curve is of runs that differ in {over} alone{hint}. "
            "Make one curve for each, or wb.compare(*runs)"
        )
    return "weak"


def check_same_machine(runs: Sequence[Run]) -> None:
    """See that runs can be on one curve.

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
        **where,
        rates=(rate,),
        exposed=exposed,
        straggling=straggling(timelines),
        cpu_per_sample=None if math.isnan(cpu) else cpu,
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
