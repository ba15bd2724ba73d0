"""Scene: the events of traces laid out in rows. In a row no event overlaps another, and what is called lies below its caller."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.traces.analysis.columns import Codes, Columns, Lane
from workbench.traces.analysis.intervals import Numbers
from workbench.traces.analysis.labels import DEVICE, KINDS
from workbench.traces.analysis.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """A thread of the host or a stream of a device, in as many rows as its calls are deep."""

    name: str
    rank: int | None
    """Of the process, where traces of several were given."""
    device: bool
    first: int
    """Number of its first row."""
    rows: int
    events: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """Events in the order of rows and, in a row, of time: one place each in every array."""

    strips: tuple[Strip, ...]
    """From top to bottom."""
    names: tuple[str, ...]
    row: NDArray[np.int32]
    start: Numbers
    """Nanoseconds; of several traces, those of the first one, to which the others were shifted."""
    end: Numbers
    name: NDArray[np.int32]
    """Number of its name."""
    kind: NDArray[np.int8]
    """Number of its kind, in the order of `kinds.KINDS`."""
    source: NDArray[np.int16]
    """Which of the traces it is from, counted from 0."""
    event: Numbers
    """Its number there."""
    shifts: tuple[int, ...]
    """Nanoseconds that each of the traces was moved by."""
    edges: Numbers
    """Place of the first event of each row, and one more: where the last one ends."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.edges) - 1

    @property
    def span(self) -> tuple[int, int]:
        """Nanoseconds, from the first event to the end of the last; (0, 1) without events."""
        return (int(self.start.min()), max(int(self.end.max()), int(self.start.min()) + 1)) if len(self) else (0, 1)

    def find(self, text: str) -> NDArray[np.int64]:
        """Numbers of the names that have a text in them, whatever its case; none for an empty text."""
        wanted = text.strip().lower()
        return np.array([i for i, name in enumerate(self.names) if wanted and wanted in name.lower()], dtype=np.int64)

    def called(self, names: Iterable[str]) -> NDArray[np.int64]:
        """Numbers of names, as far as they are there."""
        wanted = set(names)
        return np.array([i for i, name in enumerate(self.names) if name in wanted], dtype=np.int64)

    def chosen(self, codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which events have one of some names."""
        told = np.zeros(len(self.names) + 1, dtype=np.bool_)
        told[codes] = True
        found: NDArray[np.bool_] = told[self.name]
        return found

    def at(self, row: int, time: float, within: float = 0.0) -> int | None:
        """The event of a row at a time, in nanoseconds, or the nearest one within some nanoseconds of it; None without one."""
        if not 0 <= row < self.rows:
            return None
        low, high = int(self.edges[row]), int(self.edges[row + 1])
        after = low + int(np.searchsorted(self.start[low:high], time, side="right"))
        near = [place for place in (after - 1, after) if low <= place < high]
        far = [(max(float(self.start[place]) - time, time - float(self.end[place]), 0.0), place) for place in near]
        best = min(far, default=None)
        return best[1] if best is not None and best[0] <= within else None

    def following(self, mask: NDArray[np.bool_], place: int | None, step: int = 1) -> int | None:
        """The next of some events in the order of time, then of rows, or with -1 the one before; round and round. None without any.

        Args:
            mask: which events.
            place: from where on; None = from the beginning, or the end.
            step: 1 or -1.
        """
        found = np.flatnonzero(mask)
        if not len(found):
            return None
        found = found[np.argsort(self.start[found], kind="stable")]  # places are in the order of rows already
        if place is None:
            return int(found[0 if step > 0 else -1])
        low, high = (int(np.searchsorted(self.start[found], self.start[place], side=side)) for side in ("left", "right"))
        here = low + int(np.searchsorted(found[low:high], place, side="right" if step > 0 else "left"))
        return int(found[here % len(found) if step > 0 else here - 1])


def scene(traces: Trace | Mapping[int, Trace]) -> Scene:
    """Lay traces out.

    Clocks of different machines do not agree, so traces of several ranks are set one below the other with the beginning of the first step
    that all of them have at the same place: what is seen then is how the ranks run apart within their steps, not which one began first.

    Args:
        traces: one, or by rank.
    """
    given: Mapping[Any, Trace] = traces if isinstance(traces, Mapping) else {None: traces}
    shifts = _shifts(list(given.values()))
    names, strips = Codes(), list[Strip]()
    parts: list[tuple[NDArray[Any], ...]] = []
    rows = 0
    for source, (rank, trace) in enumerate(given.items()):
        codes = np.array([names[label.name] for label in trace.columns.labels] or [0], dtype=np.int32)
        kind = trace.kinds.codes
        for lane in _ordered(trace):
            events = np.flatnonzero((trace.columns.lane == lane) & (kind != KINDS.index("ignored")))
            events, depth = laid(trace.columns, events)
            strips.append(_strip(trace.columns.lanes[lane], rank, bool(trace.kinds.where(*DEVICE)[events].any()), rows, depth))
            order = np.lexsort((trace.columns.start[events], depth))
            events, shift = events[order], shifts[source]
            told = np.full(len(events), source, dtype=np.int16)
            start, end = trace.columns.start[events] + shift, trace.columns.end[events] + shift
            parts.append((depth[order] + rows, start, end, codes[trace.columns.label[events]], kind[events], told, events))
            rows = strips[-1].first + strips[-1].rows
    empty: list[NDArray[Any]] = [np.empty(0, dtype=one) for one in (np.int32, np.int64, np.int64, np.int32, np.int8, np.int16, np.int64)]
    row, start, end, name, found, told, event = [np.concatenate(one) for one in zip(*parts, strict=True)] if parts else empty
    return Scene(
        strips=tuple(strips),
        names=tuple(names),
        row=row,
        start=start,
        end=end,
        name=name,
        kind=found,
        source=told,
        event=event,
        shifts=tuple(shifts),
        edges=np.searchsorted(row, np.arange(rows + 1)),
    )


def laid(columns: Columns, events: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The row of each event of a lane: below all that are still running when it begins.

    Returns:
        The events in the order of time, the longer first, and their rows, counted from 0.
    """
    events = events[np.lexsort((-columns.end[events], columns.start[events]))]
    start, end = columns.start[events], columns.end[events]
    depth = np.zeros(len(events), dtype=np.int32)
    if not (start[1:] < end[:-1]).any():  # a stream: one after the other
        return events, depth
    found = []
    running: list[int] = []
    for begin, until in zip(start.tolist(), end.tolist(), strict=True):
        while running and running[-1] <= begin:
            running.pop()
        found.append(len(running))
        running.append(until)
    return events, np.array(found, dtype=np.int32)


def _ordered(trace: Trace) -> list[int]:
    """Lanes that have something to show: streams of devices first, then the thread that marks steps, then those with most events."""
    shown = trace.kinds.codes != KINDS.index("ignored")
    lane, count = trace.columns.lane, len(trace.columns.lanes)
    events = np.bincount(lane[shown], minlength=count)
    device = np.bincount(lane[trace.kinds.where(*DEVICE)], minlength=count) > 0
    marks = np.bincount(lane[trace.kinds.where("step")], minlength=count) > 0
    return [int(one) for one in np.lexsort((-events, ~marks, ~device)) if events[one]]


def _strip(lane: Lane, rank: int | None, device: bool, first: int, depth: NDArray[np.int32]) -> Strip:
    return Strip(name=lane.name, rank=rank, device=device, first=first, rows=int(depth.max()) + 1, events=len(depth))


def _shifts(traces: list[Trace]) -> list[int]:
    """Nanoseconds that each trace is moved by, so that the first step they all have begins at one place."""
    begins = [dict(zip(one.windows.numbers.tolist(), one.windows.spans[:, 0].tolist(), strict=True)) for one in traces]
    common = sorted(set.intersection(*(set(one) for one in begins))) if begins else []
    if not common:
        return [0] * len(traces)
    return [begins[0][common[0]] - one[common[0]] for one in begins]
