"""Report: the rows of one part, kept in a JSON file after each row, and its Markdown table."""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MARKS = {True: "✓", False: "✗", None: "·"}
"""Right, wrong, for information."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of a part's table."""

    name: str
    """Unique in its part."""
    ok: bool | None
    """Is it as expected? None = for information."""
    cells: dict[str, str] = field(default_factory=dict)
    """Column → text."""
    values: dict[str, Any] = field(default_factory=dict)
    """The numbers behind the texts, in seconds, bytes and fractions."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a part has shown so far. It is written to `path` after each row, so that nothing is lost when its process ends."""

    path: Path
    part: str
    title: str = ""
    version: str = ""
    """Of the code that made it."""
    complete: bool = False
    """Has the part come to its end?"""
    error: str = ""
    """Why it has not: the last line of a traceback, or the time limit."""
    seconds: float = 0.0
    """What it took, all attempts together."""
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    only: str = ""
    """Only rows are made whose name contains this; not kept."""

    @classmethod
    def load(cls, path: Path) -> "Report | None":
        """The report in a file; None where there is none that can be read."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            rows = [Row(**row) for row in value.pop("rows")]
            value.pop("passed", None)
            return cls(path=path, rows=rows, **value)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self) -> None:
        """Write the file, whole or not at all."""
        names = ("part", "title", "version", "complete", "error", "seconds", "machine")
        value: dict[str, Any] = {name: getattr(self, name) for name in names}
        value["passed"] = self.passed
        value["rows"] = [{"name": row.name, "ok": row.ok, "cells": row.cells, "values": row.values} for row in self.rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(value, indent=1, ensure_ascii=False, default=str), encoding="utf-8")
        os.replace(new, self.path)

    @property
    def passed(self) -> bool:
        """Did the part come to its end, with no row that is wrong?"""
        return self.complete and not self.error and not any(row.ok is False for row in self.rows)

    @property
    def score(self) -> tuple[int, int]:
        """Rows that are right, and rows that are judged."""
        judged = [row.ok for row in self.rows if row.ok is not None]
        return sum(judged), len(judged)

    def row(self, name: str, ok: bool | None, *, values: dict[str, Any] | None = None, **cells: str) -> None:
        """Add a row, and keep it.

        Args:
            name: unique in the part; a row of the same name is replaced.
            ok: is it as expected? None = for information.
            values: the numbers.
            **cells: column → text.
        """
        self.rows = [row for row in self.rows if row.name != name]
        self.rows.append(Row(name=name, ok=None if ok is None else bool(ok), cells=cells, values=values or {}))
        self.save()
        print(f"  {MARKS[self.rows[-1].ok]} {self.part}: {name}: {'; '.join(filter(None, cells.values()))}", file=sys.stderr, flush=True)

    def has(self, name: str) -> bool:
        """Is a row of that name not needed, since it is there from an attempt before, or others were asked for?"""
        return self.only not in name or any(row.name == name for row in self.rows)

    def todo(self, things: Iterable[T], name: Callable[[T], str] = str) -> Iterator[T]:
        """Those things whose row is still needed."""
        return (thing for thing in things if not self.has(name(thing)))

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """What raises inside becomes a wrong row that says so; the part goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.row(name, False, result=f"raised {last_line(error)}", values={"raised": traceback.format_exc()})

    def markdown(self) -> str:
        """Heading, table, and what went wrong."""
        right, judged = self.score
        lines = [f"### {self.title or self.part} (`{self.part}`): {right} of {judged} right", ""]
        columns = list(dict.fromkeys(column for row in self.rows for column in row.cells))
        if self.rows:
            lines += [_line(["", "what", *columns]), _line(["---"] * (len(columns) + 2))]
            lines += [_line([MARKS[row.ok], row.name, *(row.cells.get(column, "") for column in columns)]) for row in self.rows]
        if not self.complete:
            lines += ["", f"✗ Not complete: {self.error or 'it was interrupted'}."]
        lines += ["", f"({self.seconds:.0f} s)"]
        return "\n".join(lines)


def last_line(error: BaseException) -> str:
    """Type and first line of an error's text."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
