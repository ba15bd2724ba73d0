"""MemoryLog: every allocation, resizing and free of storages in some training steps, in the order of the program."""

from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.core.vocabulary import CATEGORIES as CATEGORIES
from workbench.core.vocabulary import GROUPS as GROUPS

MARK, ALLOC, FREE, RESIZE = range(4)
"""Kinds of event."""


@dataclass(slots=True)
class Record:
    """One storage."""

    size: int
    """Bytes, at its largest."""
    category: str | None
    """A key of CATEGORIES; None = decided when the log is read."""
    phase: str
    """Of MEMORY_PHASES, when it was allocated."""
    step: int
    """Optimizer step, from 0, when it was allocated."""
    micro: int
    """Forward and backward, counted over all steps, when it was allocated."""
    module: str
    """Innermost module whose forward was running, by its name in the model; "" = the model itself or outside of it."""
    op: str
    """Operator that allocated it, such as "aten.addmm.default"; "" = none."""
    allocated_at: int
    """Position in the events."""
    freed_at: int | None = None
    """Position of its free in the events; None = it was not freed."""


class Event(NamedTuple):
    """An allocation, resizing or free of a storage; or a mark, at which a phase begins."""

    kind: int
    """MARK, ALLOC, FREE or RESIZE."""
    index: int  # type: ignore[assignment]  # tuple.index is not missed
    """Of the record; of the mark in `MemoryLog.marks` if it is one."""
    size: int
    """Bytes after the event (ALLOC, RESIZE); 0 otherwise."""


class Mark(NamedTuple):
    """Where a phase begins."""

    phase: str
    step: int
    micro: int


@dataclass(slots=True)
class MemoryLog:
    """The record of some training steps, as a Recorder writes it."""

    records: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    """Name of each module → its class."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader, such as that `.item()` was answered without a value."""
