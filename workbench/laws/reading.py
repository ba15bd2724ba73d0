"""Reading points from whatever has them: rows, a DataFrame, a mapping of columns, a CSV file."""

import csv
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.checks import nearest
from workbench.laws.points import Points, PointsError

NAMES = {
    "parameters": ("parameters", "params", "n", "model_size", "num_parameters"),
    "tokens": ("tokens", "training_tokens", "samples", "d", "num_tokens"),
    "loss": ("loss", "final_loss", "validation_loss", "l"),
    "run": ("run", "run_name"),
}
"""What each column is called here, and what else it may be called; capitals do not matter."""


def read(source: Any) -> Points:
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
            f"points={source!r:.80}: rows of (parameters, tokens, loss), a DataFrame with these columns or the path of a CSV file is wanted"
        )
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in source]  # those of a numpy array are arrays
    if rows and isinstance(rows[0], Mapping):
        return Points.of(_named(rows, "the first point"))
    for place, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise PointsError(f"point {place} is {row!r:.80}: (parameters, tokens, loss) is wanted")
    return Points.of(rows)


def _csv(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}: a CSV with columns parameters, tokens and loss is wanted")
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
    found = {name: _find(others, given) for name, others in NAMES.items()}
    if rows:
        for name in ("parameters", "tokens", "loss"):
            if found[name] is None:
                near = nearest(name, given, cutoff=0.5)
                hint = f' (is it "{near}"? then rename it)' if near else ""
                raise PointsError(
                    f"{where} has no column {name}{hint}: it has {', '.join(given) or 'none'}; wanted are parameters, tokens, loss"
                )
    wanted = [one for one in found.values() if one is not None]
    try:
        return [tuple(row[name] for name in wanted) for row in rows]
    except KeyError as error:
        raise PointsError(f"a point lacks {error}: each needs {', '.join(wanted)}") from None


def _find(names: Sequence[str], given: Sequence[str]) -> str | None:
    by_small = {name.strip().lower(): name for name in given}
    return next((by_small[name] for name in names if name in by_small), None)
