"""Holder: the bytes that a module and operator hold at one moment; Shares: holders summed by module or by operator."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.display import table as display
from workbench.core.vocabulary import CATEGORIES, GROUPS, MEMORY_PARTS
from workbench.memory.analysis.log import Record
from workbench.memory.analysis.replay import Replay

_PARTS = {part.name: part for part in MEMORY_PARTS}
_LASTING = tuple(part.name for part in MEMORY_PARTS if part.lasting)
_MADE = {"to_copy": "dtype casts", "empty": "scratch memory or empty tensors"}
_LOSS = ("log_softmax", "nll_loss", "cross_entropy", "mse_loss", "binary_cross_entropy", "logsumexp", "kl_div", "smooth_l1")
_SCRATCH, _UNSPLIT = "scratch", "unsplit"
_OWN = {_SCRATCH: "scratch memory of kernels", _UNSPLIT: "rests of blocks that are not split off", "cublas": "workspace of cuBLAS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Storages at one moment with the same module, operator, group and phase."""

    module: str
    """Name of the module whose forward allocated them; "" = outside of all, or the model itself."""
    module_class: str
    """Class of the module; "" = not known."""
    op: str
    """Operator that made them, such as "aten.addmm.default"; "" = none."""
    group: str
    """Of `vocabulary.GROUPS`."""
    phase: str
    """Of `vocabulary.MEMORY_PHASES`, when they were allocated."""
    bytes: int
    """Sum of their bytes."""
    count: int = 1
    """Number of storages."""
    recomputed: bool = False
    """Were they recomputed in the backward, under activation checkpointing?"""

    @property
    def operator(self) -> str:
        """The operator without its namespace and overload: "addmm"."""
        return short(self.op)

    @property
    def words(self) -> str:
        """Short description: "log_softmax of the loss", "gelu in blocks.3.mlp (GELU)", "optimizer states"."""
        part = _PARTS.get(self.group)
        if part and part.noun:
            return part.noun + (f" of {self.module}" if self.module and part.of_module else "")
        if self.op in _OWN:
            return _OWN[self.op]
        name = self.operator
        made = _MADE.get(name, name) or "tensors made by no operator"
        for ending in ("_backward_data", "_backward"):
            if name.endswith(ending):
                made = f"gradient of {name.removesuffix(ending)}"
        if self.module:
            kind = f" ({self.module_class})" if self.module_class else ""
            return f"{made} in {self.module}{kind}" + (", recomputed" if self.recomputed else "")
        if any(loss in name for loss in _LOSS):
            return f"{made} of the loss"
        return f"{made} in {self.phase}"


def short(op: str) -> str:
    """An operator without its namespace, overload and leading underscores: "aten._log_softmax.default" → "log_softmax".

    >>> short("aten._log_softmax.default"), short("scratch"), short("")
    ('log_softmax', 'scratch', '')
    """
    parts = op.split(".")
    return (parts[1] if len(parts) > 1 else op).strip("_")


def holders_at(replay: Replay, position: int) -> tuple[Holder, ...]:
    """The holders after the event at `position`, merged, largest first."""
    records, modules = replay.log.records, replay.log.modules
    return merged(_holder(records[index], held, modules) for index, held in replay.alive(position).items())


def merged(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """Merge holders that differ in bytes and count only; largest first, equal ones by name."""
    sums_of: dict[tuple[Any, ...], list[int]] = {}
    for h in holders:
        sums = sums_of.setdefault((h.module, h.module_class, h.op, h.group, h.phase, h.recomputed), [0, 0])
        sums[0] += h.bytes
        sums[1] += h.count
    names = ("module", "module_class", "op", "group", "phase", "recomputed")
    made = [Holder(bytes=held, count=count, **dict(zip(names, key, strict=True))) for key, (held, count) in sums_of.items()]
    return tuple(sorted(made, key=lambda h: (-h.bytes, h.group, h.module, h.op, h.phase)))


def scratch_of(held: int, phase: str) -> Holder:
    """Memory inside kernels, which no log of tensors sees."""
    return Holder(module="", module_class="", op=_SCRATCH, group="temporaries", phase=phase, bytes=held)


def unsplit_of(held: int, phase: str) -> Holder:
    """Bytes by which large blocks are larger than their tensors: CUDA's allocator splits a rest off only if it is above 1 MiB."""
    return Holder(module="", module_class="", op=_UNSPLIT, group="other", phase=phase, bytes=held)


def telling(holders: Iterable[Holder], moment: str) -> Holder | None:
    """The largest holders that explain a peak: in forward and backward, those that are not always there.

    Gradients are, from the second micro-step on, so they tell something at the end of a backward only.
    """
    passing = " of forward" in moment or " of backward" in moment
    left_out = (*_LASTING, *(() if "end of backward" in moment else ("gradients",))) if passing else ()
    known = [h for h in holders if h.group not in left_out]
    return max(known, key=lambda h: h.bytes, default=None)


def _holder(record: Record, held: int, modules: Mapping[str, str]) -> Holder:
    category = record.category or "other"
    return Holder(
        module=record.module,
        module_class=modules.get(record.module, ""),
        op=record.op,
        group=CATEGORIES[category],
        phase=record.phase,
        bytes=held,
        recomputed=category == "recompute",
    )


SHOWN = 20
"""Most rows of a table; all smaller holders share one row. `to_frame` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One row of Shares."""

    name: str
    """Name of the module or operator."""
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
    """Memory by module or operator, largest first. Iterates over its rows; `shares["blocks.0"]` finds one."""

    key: str
    """What the rows are: "module", "operator"."""
    rows: tuple[Share, ...]
    """The largest first."""
    title: str = ""
    """Title of the table."""
    note: str = ""
    """Note below the table: what the numbers are."""

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
    """Sum holders by the result of `name`."""
    sums: dict[str, tuple[dict[str, int], list[int]]] = {}
    for h in holders:
        held, count = sums.setdefault(name(h), ({}, [0]))
        held[h.group] = held.get(h.group, 0) + h.bytes
        count[0] += h.count
    made = [Share(name=what, held=held, count=count[0]) for what, (held, count) in sums.items()]
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
