"""Points: the runs that a law is fitted to, from rows, DataFrames, CSV files or finished runs."""

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core.checks import nearest
from workbench.core.codec import JsonDataclass

MIN_POINTS = 5
"""Points below which nothing is fitted: the law has five numbers."""
MIN_VARIED = 2
"""Sizes and amounts of data below which nothing is fitted: the effect of what never varied is unknown."""


class PointsError(ValueError):
    """Points that no law can be fitted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points(JsonDataclass):
    """Measured runs, as columns of equal length."""

    parameters: tuple[float, ...]
    """Parameters of each model (N)."""
    tokens: tuple[float, ...]
    """Tokens, or samples, that each was trained on (D)."""
    loss: tuple[float, ...]
    """Final loss of each (L), all in the same unit; above 0."""
    run: tuple[str, ...]
    """The run that each belongs to; points of one run share its random error."""

    def __len__(self) -> int:
        return len(self.loss)

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> "Points":
        """Points from rows of (parameters, tokens, loss) or (parameters, tokens, loss, run).

        Raises:
            PointsError: a row of another length, or a value that is no number above 0.
        """
        columns: list[list[float]] = [[], [], []]
        names = []
        for place, row in enumerate(rows):
            if len(row) not in (3, 4):
                raise PointsError(f"point {place}, {tuple(row)!r:.80}: give (parameters, tokens, loss), or these and the name of its run")
            for name, column, value in zip(("parameters", "tokens", "loss"), columns, row, strict=False):
                try:
                    column.append(positive(value, name))
                except PointsError as error:
                    raise PointsError(f"point {place}: {error}") from None
            names.append(str(row[3]) if len(row) == 4 else f"run {place}")
        return cls(parameters=tuple(columns[0]), tokens=tuple(columns[1]), loss=tuple(columns[2]), run=tuple(names))

    @property
    def rows(self) -> list[tuple[float, float, float, str]]:
        """Inverse of `of`."""
        return list(zip(self.parameters, self.tokens, self.loss, self.run, strict=True))

    @property
    def sizes(self) -> tuple[float, ...]:
        """The different numbers of parameters, ascending."""
        return tuple(sorted(set(self.parameters)))

    @property
    def amounts(self) -> tuple[float, ...]:
        """The different numbers of tokens, ascending."""
        return tuple(sorted(set(self.tokens)))

    def compute(self, per: float) -> tuple[float, ...]:
        """Training FLOPs of each: `per` · N · D."""
        return tuple(per * n * d for n, d in zip(self.parameters, self.tokens, strict=True))

    def where(self, keep: Iterable[bool]) -> "Points":
        """Those of them whose flag is set."""
        return Points.of([row for row, kept in zip(self.rows, keep, strict=True) if kept])

    def check(self) -> "Points":
        """These points, if a law can be fitted to them.

        Raises:
            PointsError: too few, or one of the two has not been varied.
        """
        if len(self) < MIN_POINTS:
            raise PointsError(
                f"{len(self)} points were given, and the law E + A/N^α + B/D^β has five numbers to find: at least {MIN_POINTS} points are "
                "needed, better 15 or more; add short runs of small models, such as 4 sizes × 4 amounts of data"
            )
        for what, values, remedy in (
            ("parameters", self.sizes, "runs of a smaller and a larger model"),
            ("tokens", self.amounts, "shorter and longer runs"),
        ):
            if len(values) < MIN_VARIED:
                raise PointsError(
                    f"all {len(self)} points have the same number of {what} ({values[0]:,.0f}), so its effect cannot be determined: "
                    f"add {remedy}, at least by a factor of 4"
                )
        return self


def positive(value: Any, name: str) -> float:
    """The value, if it is a finite number above 0.

    Raises:
        PointsError: it is not; the message has its name.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise PointsError(f"{name}={value!r} is not a number") from None
    if not (math.isfinite(number) and number > 0):
        hint = "; a run that has diverged teaches the law nothing: leave it out" if name == "loss" else ""
        raise PointsError(f"{name}={value!r}: a finite number above 0 is needed{hint}")
    return number


NAMES = {
    "parameters": ("parameters", "params", "n", "model_size", "num_parameters"),
    "tokens": ("tokens", "training_tokens", "samples", "d", "num_tokens"),
    "loss": ("loss", "final_loss", "validation_loss", "l"),
    "run": ("run", "run_name"),
}
"""What each column is called here, and what else it may be called; capitals do not matter."""


def read_points(source: Any) -> Points:
    """The points of a source.

    Args:
        source: `Points`; rows of (parameters, tokens, loss), or mappings with these names; a DataFrame or a mapping of columns; the path
            of a CSV file with a head line, separated by commas, semicolons (then 2,5 is 2.5) or tabs. `NAMES` has the column names that
            are understood.

    Raises:
        PointsError: it is none of these, a column is missing, or a value is no number above 0.
        FileNotFoundError: there is no such file.
    """
    if isinstance(source, Points):
        return source
    if isinstance(source, str | os.PathLike):
        return Points.of(_named(_csv(Path(source)), str(source)))
    if hasattr(source, "columns") or isinstance(source, Mapping):  # a DataFrame without pandas being imported
        names = list(source.columns) if hasattr(source, "columns") else list(source)
        columns = {str(name): list(source[name]) for name in names}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise PointsError(f"the columns differ in length: {', '.join(f'{name} {n}' for name, n in lengths.items())}")
        return Points.of(_named([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)], "the table", names))
    if not isinstance(source, Iterable) or getattr(source, "ndim", 1) == 0:
        raise PointsError(
            f"points={source!r:.80}: rows of (parameters, tokens, loss), a DataFrame with these columns or the path of a CSV file is needed"
        )
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in source]  # those of a numpy array are arrays
    if rows and isinstance(rows[0], Mapping):
        return Points.of(_named(rows, "the first point"))
    for place, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise PointsError(f"point {place} is {row!r:.80}: give (parameters, tokens, loss)")
    return Points.of(rows)


def _csv(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}: a CSV with columns parameters, tokens and loss is needed")
    try:
        text = path.read_text(encoding="utf-8-sig")  # Excel begins a file with a mark of its own
    except UnicodeDecodeError:
        raise PointsError(f'{path} is not UTF-8 text: save it as "CSV UTF-8"') from None
    head = text.partition("\n")[0]
    separator = max(",;\t", key=head.count)  # Excel writes ";" where a comma is the decimal point
    rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=separator))
    if separator == ";":
        rows = [{name: _point(value) for name, value in row.items()} for row in rows]
    return [row for row in rows if any(row.values())]


def _point(value: Any) -> Any:
    """A number with a decimal comma, with a point."""
    return value.replace(",", ".") if isinstance(value, str) and re.fullmatch(r"\s*-?\d+,\d+([eE][+-]?\d+)?\s*", value) else value


def _named(rows: Sequence[Mapping[str, Any]], where: str, names: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Rows in the order of `NAMES`, from mappings whatever they call the columns."""
    given = [str(name) for name in (names or (rows[0] if rows else ()))]
    columns = {name: _find(others, given) for name, others in NAMES.items()}
    if rows:
        for name in ("parameters", "tokens", "loss"):
            if columns[name] is None:
                near = nearest(name, given, cutoff=0.5)
                hint = f' (is it "{near}"? then rename it)' if near else ""
                raise PointsError(
                    f"{where} has no column {name}{hint}: it has {', '.join(given) or 'none'}; it needs parameters, tokens, loss"
                )
    wanted = [column for column in columns.values() if column is not None]
    try:
        return [tuple(row[name] for name in wanted) for row in rows]
    except KeyError as error:
        raise PointsError(f"a point lacks {error}: each needs {', '.join(wanted)}") from None


def _find(names: Sequence[str], given: Sequence[str]) -> str | None:
    by_small = {name.strip().lower(): name for name in given}
    return next((by_small[name] for name in names if name in by_small), None)


TAIL = 0.1
"""Share of a run's last steps whose training loss is averaged, where there is no evaluation."""
TRAINING = "training loss"
"""What that is called."""


def points_of(
    runs: Sequence[Any], *, parameters: Mapping[str, float] | Sequence[float] | None, tokens_per_sample: float, loss: str | None
) -> tuple[Points, tuple[str, ...]]:
    """A point per run, and notes on them. See `ScalingLaw.from_runs`.

    Raises:
        PointsError: a run has no loss, or its parameters are not known.
    """
    positive(tokens_per_sample, "tokens_per_sample")
    if parameters is not None and not isinstance(parameters, Mapping) and len(parameters) != len(runs):
        raise PointsError(f"parameters has {len(parameters)} numbers for {len(runs)} runs: give one for each, or a mapping by task")
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
    if notes and len(rows) < MIN_POINTS:
        raise PointsError(f"{len(rows)} of {len(runs)} runs have a loss, and {MIN_POINTS} are needed: {'; '.join(notes)}")
    names = [row[3] for row in rows]  # each run has its own random error
    names = [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names)]
    points = Points.of([(n, d, value, name) for (n, d, value, _), name in zip(rows, names, strict=True)])
    if used == {TRAINING}:
        notes.append(f"loss: mean of the training loss over the last {TAIL:.0%} of the steps")
    return points, tuple(notes)


def _loss(run: Any, steps: Sequence[Mapping[str, float]], figures: Mapping[str, float], wanted: str | None) -> tuple[str, float]:
    """The name of a run's final loss, and its value."""
    losses = [name for name in figures if name.endswith("loss")]
    if wanted is None and len(losses) > 1:
        raise PointsError(f"{run!r} has several losses, {', '.join(losses)}: choose one with loss=")
    name = wanted or (losses[0] if losses else TRAINING)
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
