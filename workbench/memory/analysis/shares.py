"""Shares: a sum of bytes taken apart by one thing, such as modules or operators; the rows add up to the sum."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.display import table as display
from workbench.core.vocabulary import GROUPS
from workbench.memory.analysis.holders import Holder

SHOWN = 20
"""Rows of a table; what is smaller is one row. `to_frame` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One row."""

    name: str
    """What holds it."""
    held: Mapping[str, int]
    """Group → bytes."""
    count: int
    """Storages."""

    @property
    def bytes(self) -> int:
        """Of all groups."""
        return sum(self.held.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares(display.Shown):
    """Who holds how much, the largest first. Iterates over its rows; `shares["blocks.0"]` finds one."""

    key: str
    """What the rows are: "module", "operator"."""
    rows: tuple[Share, ...]
    """The largest first."""
    title: str = ""
    """One line above."""
    note: str = ""
    """One line below: what the numbers are."""

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return sum(row.bytes for row in self.rows)

    @property
    def table(self) -> display.Table:
        """The SHOWN largest rows and, where there are more, one for the rest; groups that hold nothing have no column."""
        groups = [group for group in GROUPS if any(row.held.get(group) for row in self.rows)]
        shown, rest = self.rows[:SHOWN], self.rows[SHOWN:]
        if rest:
            held = {group: sum(row.held.get(group, 0) for row in rest) for group in groups}
            shown = (*shown, Share(name=f"{len(rest)} others", held=held, count=sum(row.count for row in rest)))
        rows = [
            [
                row.name,
                units.bytes_(row.bytes),
                units.percent(row.bytes / self.total if self.total else None),
                *(units.bytes_(row.held.get(group, 0) or None) for group in groups if len(groups) > 1),
            ]
            for row in shown
        ]
        names = [group.replace("_", " ") for group in groups if len(groups) > 1]
        return display.Table(columns=(self.key, "memory", "share", *names), rows=rows, title=self.title or None, note=self.note or None)

    def to_frame(self) -> Any:
        """A DataFrame with one row per row: name, bytes per group, bytes, storages."""
        names = (self.key, *GROUPS, "bytes", "storages")
        rows = ((row.name, *(row.held.get(group, 0) for group in GROUPS), row.bytes, row.count) for row in self.rows)
        return display.frame((dict(zip(names, row, strict=True)) for row in rows), columns=names)

    def __getitem__(self, name: str) -> Share:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no {self.key} {name!r}: there are {', '.join(row.name for row in self.rows[:SHOWN])}")

    def __iter__(self) -> Iterator[Share]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Shares({len(self.rows)} rows by {self.key}, {units.bytes_(self.total)})"


def shares(holders: Iterable[Holder], name: Callable[[Holder], str], key: str, title: str, note: str) -> Shares:
    """Holders summed by what `name` says of each."""
    found: dict[str, tuple[dict[str, int], list[int]]] = {}
    for h in holders:
        held, count = found.setdefault(name(h), ({}, [0]))
        held[h.group] = held.get(h.group, 0) + h.bytes
        count[0] += h.count
    made = [Share(name=what, held=held, count=count[0]) for what, (held, count) in found.items()]
    return Shares(key=key, rows=tuple(sorted(made, key=lambda row: (-row.bytes, natural(row.name)))), title=title, note=note)


def natural(name: str) -> list[tuple[int, str]]:
    """A key to sort names of modules by: layers.2 comes before layers.10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]


def prefix(module: str, depth: int | None) -> str:
    """The first `depth` names of a module's path; all of them where depth is None.

    >>> prefix("blocks.3.mlp.up", 2), prefix("head", 2), prefix("", 2)
    ('blocks.3', 'head', '')
    """
    return module if depth is None else ".".join(module.split(".")[:depth])
