"""Points from runs: what each was made of and where its loss ended."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.laws.points import FEWEST, Points, PointsError, positive

TAIL = 0.1
"""Share of a run's last steps whose training loss is averaged, where there is no evaluation."""
TRAINING = "training loss"
"""What that is called."""


def points_of(
    runs: Sequence[Any], *, parameters: Mapping[str, float] | Sequence[float] | None, tokens_per_sample: float, loss: str | None
) -> tuple[Points, tuple[str, ...]]:
    """A point per run, and what to keep in mind about them. See `ScalingLaw.from_runs`.

    Raises:
        PointsError: a run has no loss, or its parameters are not known.
    """
    positive(tokens_per_sample, "tokens_per_sample")
    if parameters is not None and not isinstance(parameters, Mapping) and len(parameters) != len(runs):
        raise PointsError(f"parameters has {len(parameters)} numbers for {len(runs)} runs: one for each is wanted, or a mapping by task")
    rows, notes, used = [], [], set()
    for place, run in enumerate(runs):
        reported = run.metric_rows
        if not run.ok:
            why = f": {str(run.error).splitlines()[0]}" if run.error else ""
            notes.append(f"{run!r} was {run.state} and is left out{why}")
            continue
        steps = [row for row in reported if "samples" in row]  # the others are an evaluation's
        figures = {name: value for row in reported if "samples" not in row for name, value in row.items() if name not in ("step", "steps")}
        name, value = _loss(run, steps, figures, loss)
        if not math.isfinite(value):
            notes.append(f"{run!r} has diverged and is left out")
            continue
        used.add(name)
        rows.append((_parameters(run, place, parameters, figures), steps[-1]["samples"] * tokens_per_sample, value, run.name))
    if len(used) > 1:
        raise PointsError(f"the runs report different losses ({', '.join(sorted(used))}): give loss= the name that all of them have")
    if notes and len(rows) < FEWEST:
        raise PointsError(f"{len(rows)} of {len(runs)} runs have a loss, and {FEWEST} are wanted: {'; '.join(notes)}")
    names = _apart([row[3] for row in rows])
    points = Points.of([(n, d, value, name) for (n, d, value, _), name in zip(rows, names, strict=True)])
    if used == {TRAINING}:
        notes.append(f"loss: mean of the training loss over the last {TAIL:.0%} of the steps")
    return points, tuple(notes)


def _loss(run: Any, steps: Sequence[Mapping[str, float]], figures: Mapping[str, float], wanted: str | None) -> tuple[str, float]:
    """The name of a run's final loss, and its value."""
    found = [name for name in figures if name.endswith("loss")]
    if wanted is None and len(found) > 1:
        raise PointsError(f"{run!r} has several losses, {', '.join(found)}: choose one with loss=")
    name = wanted or (found[0] if found else TRAINING)
    if name != TRAINING:
        if name not in figures:
            raise PointsError(
                f"{run!r} has no figure {name!r}: its evaluation gave {', '.join(figures) or 'none (evaluate=False?)'}; "
                f'loss="{TRAINING}" is always there'
            )
        return name, float(figures[name])
    if not steps:
        raise PointsError(f"{run!r} has reported no loss; only runs of a RunSpec do")
    tail = [row["loss"] for row in steps[-max(1, round(TAIL * len(steps))) :]]
    return TRAINING, sum(tail) / len(tail)


def _parameters(run: Any, place: int, given: Mapping[str, float] | Sequence[float] | None, figures: Mapping[str, float]) -> float:
    if isinstance(given, Mapping):
        if run.spec.task not in given:
            raise PointsError(f"parameters has no entry for the task {run.spec.task!r}: it has {', '.join(given) or 'none'}")
        return given[run.spec.task]
    if given is not None:
        return given[place]
    if "parameters" in figures:
        return figures["parameters"]
    raise PointsError(
        f"how many parameters {run!r} has is not known: give parameters=[…] in the order of the runs, or let wb.scaling_law make the runs"
    )


def _apart(names: Sequence[str]) -> list[str]:
    """Names of runs, told apart where two are the same: each run's point has luck of its own."""
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names)]
