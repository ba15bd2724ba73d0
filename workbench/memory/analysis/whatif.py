"""What-ifs about memory: MemoryComparison (each change alone), MemoryLadder (changes added until it fits), MaxMicroBatch."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table
from workbench.core.display import table as display
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.fit import KNOWN_AS_RANGE, NOT_CERTAIN, spare_words, usable_words

SAME = "as it is"
"""Label of the row in which nothing is changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A change of knobs, and the memory that is predicted with it."""

    changes: Mapping[str, Any]
    """Knobs that are turned; empty = none."""
    breakdown: MemoryBreakdown | None
    """None if it could not be estimated."""
    complaint: str = ""
    """Why it could not be estimated."""

    @property
    def label(self) -> str:
        """The change in words."""
        return units.knobs(self.changes) or SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryComparison(display.Shown, JsonDataclass):
    """The predicted memory of a step with each of several changes. The first row is the step as it is."""

    rows: tuple[WhatIf, ...]
    """The baseline, then one per change."""
    capacity: int | None = None
    """Bytes of the device that it should fit; None = no device was named."""
    margin: float = 0.0
    """Share of the device that stays free besides."""
    device: str = "cuda"
    """Device whose memory behaviour the estimates have."""

    def __getitem__(self, place: int) -> WhatIf:
        return self.rows[place]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def baseline(self) -> MemoryBreakdown:
        """The memory of the step as it is."""
        assert self.rows[0].breakdown is not None
        return self.rows[0].breakdown

    @property
    def table(self) -> display.Table:
        """One row per change: what it holds at its peak, what that saves, and where the peak lies."""
        fits = ["fits"] if self.capacity is not None else []
        rows = []
        for row in self.rows:
            breakdown = row.breakdown
            if breakdown is None:
                rows.append([row.label, "–", "–", row.complaint, *(["–"] if fits else [])])
                continue
            saved = self.baseline.total - breakdown.total
            change = "" if row is self.rows[0] else f"{units.bytes_(-saved)} ({units.percent(-saved / self.baseline.total)})"
            verdict = ["yes" if needed(breakdown) <= (self.capacity or 0) else "no"] if fits else []
            rows.append([row.label, units.bytes_(breakdown.total), change, breakdown.peak_moment, *verdict])
        note = f"predicted, {self.device}; peak of what tensors hold"
        if self.capacity is not None:
            note += f"; fits = reserved memory and what lies outside of it within the {usable_words(self.capacity, self.margin)}"
        return display.Table(columns=("change", "peak", "difference", "where the peak lies", *fits), rows=rows, title="Memory", note=note)

    def to_frame(self) -> Any:
        """A DataFrame with one row per change: its groups of bytes, total, reserved, device_used, moment."""
        return display.frame([_row(row) for row in self.rows])

    def plot(self, ax: Any = None) -> Any:
        """Stacked bars, one per change; returns the Axes."""
        estimated = [row for row in self.rows if row.breakdown is not None]
        return display.picture("memory")([r.breakdown for r in estimated], labels=[r.label for r in estimated], device=self.capacity, ax=ax)

    def __repr__(self) -> str:
        return f"MemoryComparison({', '.join(row.label for row in self.rows)})"


JUMP = 4
"""Bytes reserved over bytes of tensors, of one sample more, that are worth a word: cached blocks are too small for it all at once."""


def needed(breakdown: MemoryBreakdown) -> int:
    """Bytes that a device must have: reserved by the allocator and outside of it; without an allocator those of the tensors."""
    used = breakdown.device_used
    return breakdown.total if used is None else used


def needed_at_most(breakdown: MemoryBreakdown) -> int:
    """The same bytes with the highest estimate of those outside the allocator."""
    return breakdown.fits(0, margin=0.0).high


def _doubt(breakdown: MemoryBreakdown, capacity: int) -> str:
    """Words to append where the range of bytes outside the allocator leaves open whether it fits; else none."""
    return "" if breakdown.fits(capacity, margin=0.0).certain else f"; {NOT_CERTAIN}"


def _row(row: WhatIf) -> dict[str, object]:
    breakdown = row.breakdown
    if breakdown is None:
        return {"change": row.label, "complaint": row.complaint}
    frame = {group: getattr(breakdown, group) for group in breakdown.largest}
    used = {"reserved": breakdown.reserved, "device_used": breakdown.device_used, "peak_moment": breakdown.peak_moment}
    return {"change": row.label, **frame, "total": breakdown.total, **used}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRung:
    """One entry of a MemoryLadder: a change on the way to a step that fits."""

    change: Mapping[str, Any]
    """Knobs that it changes."""
    breakdown: MemoryBreakdown
    """Predicted with this change and all before it."""
    slowdown: float
    """Seconds per sample after it over those before, at the roofline of the device; nan = not known."""
    price: str
    """What it costs besides time."""

    @property
    def label(self) -> str:
        """The change in words."""
        return units.knobs(self.change)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLadder(display.Shown):
    """The changes that make a step fit a device at the least cost in time, added one by one."""

    start: MemoryBreakdown
    """Without any change."""
    rungs: tuple[MemoryRung, ...]
    """The changes in the order in which they are made; the cheapest in time come first."""
    device: str
    """Device that it should fit."""
    capacity: int
    """Its bytes, less the margin."""
    margin: float
    """Share of the device that stays free."""
    tried: int = 0
    """Combinations that were estimated."""
    tried_changes: tuple[str, ...] = ()
    """The changes that they combine, in words."""
    advice: str = ""
    """What is left to try where nothing fits."""

    @property
    def end(self) -> MemoryBreakdown:
        """With all changes."""
        return self.rungs[-1].breakdown if self.rungs else self.start

    @property
    def fits(self) -> bool:
        """Whether the step fits at the end."""
        return needed(self.end) <= self.capacity

    @property
    def notes(self) -> tuple[str, ...]:
        """What the estimates assume or leave out, at the start and at the end."""
        return tuple(dict.fromkeys((*self.start.notes, *self.end.notes)))

    @property
    def changes(self) -> dict[str, Any]:
        """All knobs that are changed: `spec.replace(**ladder.changes)`."""
        return {name: value for rung in self.rungs for name, value in rung.change.items()}

    @property
    def doubt(self) -> str:
        """Why it is not certain whether it fits at the end, in words to append; empty = it is."""
        return _doubt(self.end, self.capacity)

    @property
    def slowdown(self) -> float:
        """Seconds per sample at the end over those at the start."""
        return math.prod(rung.slowdown for rung in self.rungs)

    @property
    def word(self) -> str:
        """The result in a line."""
        spare = spare_words(self.capacity, self.capacity - needed(self.end), self.margin)
        doubt = self.doubt
        if not self.rungs and self.fits:
            return f"it fits {self.device} as it is, with {spare}{doubt}"
        if not self.fits:
            what = f" of {', '.join(self.tried_changes)}" if self.tried_changes else ""
            least = f"the best of {self.tried} combinations{what} needs {spare}{doubt}"
            return f"nothing tried makes it fit {self.device}: {least}" + (f"; {self.advice}" if self.advice else "")
        return f"it fits {self.device} with {units.knobs(self.changes)}: {spare}, {_time(self.slowdown)}{doubt}"

    @property
    def table(self) -> display.Table:
        """One row per change."""
        return self.table_without(())

    def table_without(self, notes: Collection[str]) -> display.Table:
        """One row per change, without notes that stand elsewhere already."""
        rows = [[SAME, units.bytes_(needed(self.start)), "", "", self.start.peak_moment]]
        rows += [
            [rung.label, units.bytes_(needed(rung.breakdown)), _time(rung.slowdown), rung.price, rung.breakdown.peak_moment]
            for rung in self.rungs
        ]
        what = f"What makes it fit {self.device}" if self.rungs or not self.fits else f"It fits {self.device} as it is"
        return display.Table(
            columns=("change", "needs", "time", "price", "where the peak lies"),
            rows=rows,
            title=f"{what}: {usable_words(self.capacity, self.margin)}",
            note=display.notes(
                [
                    f"{self.word}; predicted; time at the device's roofline, communication left out",
                    *(note for note in self.notes if note not in notes),
                ]
            ),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per change, the start first."""
        start = {"change": SAME, "needed": needed(self.start), "total": self.start.total, "slowdown": 1.0, "price": ""}
        rows = [
            {"change": r.label, "needed": needed(r.breakdown), "total": r.breakdown.total, "slowdown": r.slowdown, "price": r.price}
            for r in self.rungs
        ]
        return display.frame([start, *rows])

    plot = display.plot_method("memory_ladder")

    def __repr__(self) -> str:
        return f"MemoryLadder({self.device!r}, {units.knobs(self.changes) or SAME}, fits={self.fits})"


def _time(slowdown: float) -> str:
    if math.isnan(slowdown):
        return "time not predicted"
    return "same time" if abs(slowdown - 1) < 0.005 else f"{units.times(slowdown)} the time"


def combinations(moves: Iterable[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """All sets of moves of which no two change the same knob, as indices of `moves`; with the empty set.

    >>> combinations([{"precision": "amp_bf16"}, {"parallel": "zero1"}, {"parallel": "fsdp"}])
    [(), (0,), (1,), (0, 1), (2,), (0, 2)]
    """
    sets: list[tuple[int, ...]] = [()]
    listed = list(moves)
    for place, move in enumerate(listed):
        sets += [(*others, place) for others in sets if not any(set(move) & set(listed[other]) for other in others)]
    return sets


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxMicroBatch:
    """The largest micro-batch that fits a device, and why the next larger one does not. `int()` of it is the number."""

    micro_batch: int
    """Samples; 0 = not even one sample fits."""
    breakdown: MemoryBreakdown
    """Predicted with that many samples; with one sample, if not even that fits."""
    next: MemoryBreakdown
    """With one sample more, which is too much."""
    device: str
    """Device that it should fit."""
    capacity: int
    """Its bytes, less the margin."""
    runs: int
    """Dry runs that were made."""
    margin: float = 0.0
    """Share of the device that stays free."""
    surely: int = 0
    """Samples up to which it fits with the highest estimate of the bytes outside the allocator, too; 0 = not known of any number."""

    def __int__(self) -> int:
        return self.micro_batch

    __index__ = __int__

    @property
    def spare(self) -> int:
        """Bytes left."""
        return self.capacity - needed(self.breakdown)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the estimate assumes or leaves out."""
        return self.breakdown.notes

    @property
    def doubt(self) -> str:
        """Why it is not certain that so many fit, and up to how many surely do, in words to append; empty = it is certain."""
        doubt = _doubt(self.breakdown, self.capacity)
        return f"; {NOT_CERTAIN}, but up to micro_batch={self.surely} is certain to fit" if doubt and self.surely else doubt

    @property
    def room(self) -> str:
        """Bytes left in words, and up to how many samples are certain to fit where that is not the answer."""
        return spare_words(self.capacity, self.spare, self.margin) + self.doubt

    @property
    def word(self) -> str:
        """The result in a line."""
        if not self.micro_batch:
            return f"not even one sample fits {self.device}: {self.room}; try wb.memory_ladder(spec, device={self.device!r})"
        if self.doubt and self.surely:
            return f"micro_batch={self.micro_batch} is the largest that probably fits {self.device}; up to {self.surely} is certain to fit"
        return f"micro_batch={self.micro_batch} is the largest that fits {self.device}{self.doubt}"

    @property
    def reason(self) -> str:
        """What is left of the memory, and what one sample more would need, in a line; "" = not even one sample fits."""
        if not self.micro_batch:
            return ""
        over = units.bytes_(needed(self.next) - self.capacity)
        more, reserved = self.next.total - self.breakdown.total, (self.next.reserved or 0) - (self.breakdown.reserved or 0)
        jump = f", since the allocator reserves {units.bytes_(reserved)} more at once for it, and tensors only {units.bytes_(more)}"
        beyond = f"one more is {over} too much, at the {self.next.peak_moment}{jump * (reserved > JUMP * max(more, 1))}"
        return f"{spare_words(self.capacity, self.spare, self.margin)}; {beyond}" + f"; {KNOWN_AS_RANGE}" * bool(self.doubt and self.surely)

    @property
    def program(self) -> str:
        """Precision, optimizer and parallelism of the step, as the title of the breakdown has them, in a sentence."""
        return f"for a step with {self.breakdown.title.rpartition(' samples, ')[2]}: precision= and optimizer= choose others"

    def __str__(self) -> str:
        return table.notes([self.word, *filter(None, [self.reason]), self.program, *self.notes])

    def __repr__(self) -> str:
        return f"MaxMicroBatch({self.micro_batch}, device={self.device!r})"

    def _repr_html_(self) -> str:
        return f"<p>{table.escape(str(self)).replace(chr(10), '<br>')}</p>"
