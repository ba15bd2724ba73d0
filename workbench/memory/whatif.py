"""What changes do to memory, one by one: MemoryComparison."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench import display, units
from workbench.codec import JsonDataclass
from workbench.memory.breakdown import MemoryBreakdown

SAME = "as it is"
"""Label of the row in which nothing is changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A change, and the memory it is predicted to lead to."""

    changes: Mapping[str, Any]
    """Knobs that are turned; empty = none."""
    breakdown: MemoryBreakdown | None
    """None if it could not be estimated."""
    complaint: str = ""
    """Why it could not be."""

    @property
    def label(self) -> str:
        """The change in words."""
        return changes_in_words(self.changes) or SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryComparison(display.Shown, JsonDataclass):
    """What each of several changes does to the memory of a step. The first row is the step as it is."""

    rows: tuple[WhatIf, ...]
    """The baseline, then one per change."""
    capacity: int | None = None
    """Bytes of the device that it should fit; None = none was named."""
    device: str = "cuda"
    """Whose semantics the estimates have."""

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
            found = row.breakdown
            if found is None:
                rows.append([row.label, "–", "–", row.complaint, *(["–"] if fits else [])])
                continue
            saved = self.baseline.total - found.total
            change = "" if row is self.rows[0] else f"{units.bytes_(-saved)} ({units.percent(-saved / self.baseline.total)})"
            verdict = ["yes" if needed(found) <= (self.capacity or 0) else "no"] if fits else []
            rows.append([row.label, units.bytes_(found.total), change, found.peak_moment, *verdict])
        note = f"predicted, {self.device}; peak of what tensors hold"
        if self.capacity is not None:
            note += f"; fits = reserved memory and what lies outside of it within {units.bytes_(self.capacity)}"
        return display.Table(columns=("change", "peak", "difference", "where the peak lies", *fits), rows=rows, title="Memory", note=note)

    def to_frame(self) -> Any:
        """A DataFrame with one row per change: its groups of bytes, total, reserved, device_used, moment."""
        return display.frame([_row(row) for row in self.rows])

    def plot(self, ax: Any = None) -> Any:
        """Stacked bars, one per change; returns the Axes."""
        found = [row for row in self.rows if row.breakdown is not None]
        return display.picture("memory")([r.breakdown for r in found], labels=[r.label for r in found], device=self.capacity, ax=ax)

    def __repr__(self) -> str:
        return f"MemoryComparison({', '.join(row.label for row in self.rows)})"


def needed(breakdown: MemoryBreakdown) -> int:
    """Bytes that a device must have for it: what the allocator takes and what lies outside; without an allocator what tensors hold."""
    used = breakdown.device_used
    return breakdown.total if used is None else used


def changes_in_words(changes: Mapping[str, Any]) -> str:
    """`{"precision": "amp_bf16", "micro_batch": 8}` → "precision=amp_bf16, micro_batch=8"."""
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def _row(row: WhatIf) -> dict[str, object]:
    found = row.breakdown
    if found is None:
        return {"change": row.label, "complaint": row.complaint}
    frame = {group: getattr(found, group) for group in found.largest}
    used = {"reserved": found.reserved, "device_used": found.device_used, "peak_moment": found.peak_moment}
    return {"change": row.label, **frame, "total": found.total, **used}
