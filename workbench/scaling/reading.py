"""Reading: the points of a curve from runs that may differ in their number of processes and in nothing else."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench import rundir
from workbench.run import Run
from workbench.scaling.point import CurveError, ScalingPoint

SWEPT = "nproc_per_node"
_BATCH = ("micro_batch", "accumulation")
"""What strong scaling changes with the number of processes, so that the global batch stays."""


def read(runs: Sequence[Any], slots: int | None, exposed: Mapping[int, float]) -> dict[str, Any]:
    """The arguments of the curve. See `ScalingCurve.from_runs`.

    Raises:
        CurveError: as there.
    """
    for run in runs:
        if not isinstance(run, Run):
            raise CurveError(f"from_runs() got a {type(run).__name__}: runs are wanted, such as those of wb.sweep(spec, {SWEPT}=[1, 2, 4])")
        if run.state == "running":
            raise CurveError(f"{run!r} still runs: wait for it, run.wait()")
    if not runs:
        raise CurveError(f"from_runs() got no runs: wb.sweep(spec, {SWEPT}=[1, 2, 4]) gives some")
    if unknown := sorted(set(exposed) - {run.spec.nproc_per_node for run in runs}):
        raise CurveError(f"exposed has an entry for {unknown[0]} processes, and no run has as many")
    kind = _kind(runs)
    _same_machine(runs)
    on_gpus = any(timeline.clock == "device" for run in runs for timeline in run.timelines)
    notes = []
    if slots is None:
        what = "gpus" if on_gpus else "cores"
        slots = rundir.read_json(runs[0].path / rundir.RUN_JSON).get(what)
        notes += [f"how many {what} there were is not known: give slots="] if slots is None else []
    points = [_point(run, exposed.get(run.spec.nproc_per_node)) for run in runs]
    return {"points": points, "kind": kind, "slots": slots, "notes": tuple(notes)}


def _kind(runs: Sequence[Run]) -> str:
    """ "strong" if the runs share a global batch that their processes divide, else "weak".

    Raises:
        CurveError: they differ in another field.
    """
    first = runs[0].spec
    for run in runs[1:]:
        if type(run.spec) is not type(first):
            raise CurveError(f"{runs[0]!r} and {run!r} are not of one kind, a task and a script: a curve is of one program")
    found = {name: value for run in runs[1:] for name, value in first.changes(run.spec).items() if name != SWEPT}  # type: ignore[arg-type]
    if found and set(found) <= set(_BATCH) and len({getattr(run.spec, "global_batch", None) for run in runs}) == 1:
        return "strong"
    if found:
        name, (here, there) = next(iter(found.items()))
        others = f" (and in {', '.join(list(found)[1:])})" if len(found) > 1 else ""
        hint = "; for strong scaling choose micro_batch so that the global batch is the same in all" if set(found) <= set(_BATCH) else ""
        raise CurveError(
            f"the runs differ in {name}{others}, {here!r} and {there!r}: a curve is of runs that differ in {SWEPT} alone{hint}. "
            "Make one curve for each, or wb.compare(*runs)"
        )
    return "weak"


def _same_machine(runs: Sequence[Run]) -> None:
    """Raises CurveError where the runs were made on different hosts or with different versions of torch."""
    infos = [rundir.read_json(run.path / rundir.RUN_JSON) for run in runs]
    for name, values in (
        ("host", [info.get("host") for info in infos]),
        ("torch", [info.get("versions", {}).get("torch") for info in infos]),
    ):
        if len(set(values)) > 1:
            shown = " and ".join(map(repr, dict.fromkeys(values)))
            raise CurveError(f"the runs differ in {name}, {shown}: a curve is of runs that differ in {SWEPT} alone")


def _point(run: Run, exposed: float | None) -> ScalingPoint:
    size, rate = run.spec.nproc_per_node, run.samples_per_sec
    if not run.ok:
        return ScalingPoint(world_size=size, failed=str(run.error or run.state).splitlines()[0])
    if math.isnan(rate):
        return ScalingPoint(world_size=size, failed="no measured step: a script's steps are measured with watch=True")
    return ScalingPoint(world_size=size, rates=(rate,), exposed=exposed)
