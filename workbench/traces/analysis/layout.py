"""Lays the events of traces out in rows, each call below its caller, and reduces a window on them to rectangles that a page can draw."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.traces.analysis.columns import Codes, Columns
from workbench.traces.analysis.event_kinds import DEVICE, KINDS
from workbench.traces.analysis.intervals import Numbers
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
class Layout:
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
    """Number of its kind, in the order of `event_kinds.KINDS`."""
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
        lowered = text.strip().lower()
        return np.array([i for i, name in enumerate(self.names) if lowered and lowered in name.lower()], dtype=np.int64)

    def called(self, names: Iterable[str]) -> NDArray[np.int64]:
        """Numbers of names, as far as they are there."""
        chosen = set(names)
        return np.array([i for i, name in enumerate(self.names) if name in chosen], dtype=np.int64)

    def chosen(self, codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which events have one of some names."""
        mask = np.zeros(len(self.names) + 1, dtype=np.bool_)
        mask[codes] = True
        events: NDArray[np.bool_] = mask[self.name]
        return events

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
        """The next of some events in the order of time, then of rows, or with -1 the previous event; cyclic. None without any."""
        places = np.flatnonzero(mask)
        if not len(places):
            return None
        places = places[np.argsort(self.start[places], kind="stable")]  # places are in the order of rows already
        if place is None:
            return int(places[0 if step > 0 else -1])
        low, high = (int(np.searchsorted(self.start[places], self.start[place], side=side)) for side in ("left", "right"))
        here = low + int(np.searchsorted(places[low:high], place, side="right" if step > 0 else "left"))
        return int(places[here % len(places) if step > 0 else here - 1])


def lay_out(traces: Trace | Mapping[int, Trace]) -> Layout:
    """Lay the events of traces out in rows.

    Clocks of different machines do not agree, so traces of several ranks are aligned at the beginning of the first step that all of them
    have: this shows how ranks run apart within their steps, not which of them began first.
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
            events, depth = _rows(trace.columns, events)
            device, height = bool(trace.kinds.where(*DEVICE)[events].any()), int(depth.max()) + 1
            lane_name = trace.columns.lanes[lane].name
            strips.append(Strip(name=lane_name, rank=rank, device=device, first=rows, rows=height, events=len(depth)))
            order = np.lexsort((trace.columns.start[events], depth))
            events, shift = events[order], shifts[source]
            source_of = np.full(len(events), source, dtype=np.int16)
            start, end = trace.columns.start[events] + shift, trace.columns.end[events] + shift
            parts.append((depth[order] + rows, start, end, codes[trace.columns.label[events]], kind[events], source_of, events))
            rows += height
    dtypes = (np.int32, np.int64, np.int64, np.int32, np.int8, np.int16, np.int64)
    columns: list[NDArray[Any]] = [np.empty(0, dtype=dtype) for dtype in dtypes]
    if parts:
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    row, start, end, name, kinds, sources, event = columns
    return Layout(
        strips=tuple(strips),
        names=tuple(names),
        row=row,
        start=start,
        end=end,
        name=name,
        kind=kinds,
        source=sources,
        event=event,
        shifts=tuple(shifts),
        edges=np.searchsorted(row, np.arange(rows + 1)),
    )


def _rows(columns: Columns, events: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The row of each event of a lane: below all that are still running when it begins.

    Returns:
        The events in the order of time, the longer first, and their rows, counted from 0.
    """
    events = events[np.lexsort((-columns.end[events], columns.start[events]))]
    start, end = columns.start[events], columns.end[events]
    depth = np.zeros(len(events), dtype=np.int32)
    if not (start[1:] < end[:-1]).any():  # a stream: one after the other
        return events, depth
    depths = []
    running: list[int] = []
    for begin, until in zip(start.tolist(), end.tolist(), strict=True):
        while running and running[-1] <= begin:
            running.pop()
        depths.append(len(running))
        running.append(until)
    return events, np.array(depths, dtype=np.int32)


def _ordered(trace: Trace) -> list[int]:
    """Lanes with events: streams of devices first, then the thread that marks steps, then those with most events."""
    shown = trace.kinds.codes != KINDS.index("ignored")
    lane, count = trace.columns.lane, len(trace.columns.lanes)
    events = np.bincount(lane[shown], minlength=count)
    device = np.bincount(lane[trace.kinds.where(*DEVICE)], minlength=count) > 0
    marks = np.bincount(lane[trace.kinds.where("step")], minlength=count) > 0
    return [int(number) for number in np.lexsort((-events, ~marks, ~device)) if events[number]]


def _shifts(traces: list[Trace]) -> list[int]:
    """Nanoseconds that each trace is moved by, so that the first step they all have begins at one place."""
    begins = [dict(zip(trace.windows.numbers.tolist(), trace.windows.spans[:, 0].tolist(), strict=True)) for trace in traces]
    common = sorted(set.intersection(*(set(starts) for starts in begins))) if begins else []
    if not common:
        return [0] * len(traces)
    return [begins[0][common[0]] - starts[common[0]] for starts in begins]


MOST = 4_000
"""Rectangles that are made at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """Rectangles in the order of rows and time; one is an event, or several that follow each other and are too narrow to be seen."""

    start: Numbers
    """Of the first of its events, or where the window begins."""
    end: Numbers
    """Of the last of its events, or where the window ends."""
    row: NDArray[np.int32]
    count: Numbers
    """Number of its events."""
    busy: Numbers
    """Nanoseconds inside the window in which they run."""
    lit: Numbers
    """Those of them that belong to events that are chosen."""
    chosen: Numbers
    """How many of its events are chosen."""
    place: Numbers
    """Place in the layout of the longest of its events (of the chosen ones, if it has any)."""
    width: int
    """Nanoseconds of a piece of time: what is shorter may be put together with its neighbours."""

    def __len__(self) -> int:
        return len(self.start)

    def packed(self, layout: Layout) -> dict[str, Any]:
        """For a page: little-endian bytes of each column, times from the beginning of the first on; and each name once."""
        codes, name = np.unique(layout.name[self.place], return_inverse=True)
        origin = int(self.start.min()) if len(self) else 0
        columns = {
            "start": (self.start - origin).astype("<f8"),
            "length": (self.end - self.start).astype("<f8"),
            "busy": self.busy.astype("<f8"),
            "lit": self.lit.astype("<f8"),
            "row": self.row.astype("<i4"),
            "count": self.count.astype("<i4"),
            "chosen": self.chosen.astype("<i4"),
            "name": name.astype("<i4"),
            "kind": layout.kind[self.place].astype("<i4"),
        }
        packed = {key: value.tobytes() for key, value in columns.items()}
        return {**packed, "origin": origin, "names": [layout.names[code] for code in codes.tolist()], "width": self.width}


def tiles(
    layout: Layout,
    start: int,
    end: int,
    *,
    rows: tuple[int, int] | None = None,
    bins: int = 1_000,
    most: int = MOST,
    chosen: NDArray[np.bool_] | None = None,
) -> Tiles:
    """Make the rectangles that a window shows.

    The window is cut into pieces of time. An event as long as a piece is a rectangle of its own; shorter ones of a row that begin in the
    same piece, with no longer one between them, are one rectangle together. Rectangles of a row do not overlap, as its events do not. If
    that makes too many, the pieces become longer.

    Args:
        layout: the rows, with the events of each.
        start: nanoseconds at which the window begins.
        end: nanoseconds at which it ends.
        rows: from this one up to, not including, that one; None = all.
        bins: pieces of time: half the dots that a row has.
        most: rectangles at most; but at least three in each row that is looked at.
        chosen: for each event: is it highlighted?

    Raises:
        ValueError: it ends before it begins.
    """
    if not start < end:
        raise ValueError(f"tiles(start={start}, end={end}): it has to end after it begins")
    low, high = (0, layout.rows) if rows is None else (max(0, rows[0]), min(layout.rows, rows[1]))
    places = _seen(layout, start, end, low, high)
    row = layout.row[places]
    begin, until = np.maximum(layout.start[places], start), np.minimum(layout.end[places], end)
    length = until - begin
    width = max(1, -(-(end - start) // max(1, bins)))
    while True:
        first = _firsts(row, begin - start, length, width)
        if len(first) <= max(most, 1) or width >= end - start:
            break
        width *= 2 ** max(1, (len(first) // max(most, 1)).bit_length() - 1)
    picked = chosen[places] if chosen is not None else np.zeros(len(places), dtype=np.bool_)
    if not len(first):
        none = np.empty(0, dtype=np.int64)
        return Tiles(start=none, end=none, row=row, count=none, busy=none, lit=none, chosen=none, place=none, width=width)
    return Tiles(
        start=begin[first],
        end=until[np.append(first[1:], len(places)) - 1],
        row=row[first],
        count=np.diff(np.append(first, len(places))),
        busy=np.add.reduceat(length, first),
        lit=np.add.reduceat(np.where(picked, length, 0), first),
        chosen=np.add.reduceat(picked.astype(np.int64), first),
        place=places[_longest(length, picked, first)],
        width=width,
    )


def _seen(layout: Layout, start: int, end: int, low: int, high: int) -> Numbers:
    """Places of the events of some rows that are in a window. Starts and ends of a row are both in order, so two searches find them."""
    places = [np.empty(0, dtype=np.int64)]
    for row in range(low, high):
        begin, until = int(layout.edges[row]), int(layout.edges[row + 1])
        starts = layout.start[begin:until]
        first = min(np.searchsorted(layout.end[begin:until], start, side="right"), np.searchsorted(starts, start, side="left"))
        places.append(np.arange(begin + first, begin + np.searchsorted(starts, end, side="left"), dtype=np.int64))
    return np.concatenate(places)


def _firsts(row: NDArray[np.int32], begin: Numbers, length: Numbers, width: int) -> NDArray[np.intp]:
    """Where in the order of events a new rectangle begins."""
    piece, wide = begin // width, length >= width
    if not len(row):
        return np.empty(0, dtype=np.intp)
    new = (row[1:] != row[:-1]) | (piece[1:] != piece[:-1]) | wide[1:] | wide[:-1]
    return np.flatnonzero(np.concatenate([[True], new]))


def _longest(length: Numbers, picked: NDArray[np.bool_], first: NDArray[np.intp]) -> NDArray[np.intp]:
    """The longest event of each rectangle, the first of equals; chosen events come before all others."""
    rank = np.where(picked, length + (int(length.max()) + 1), length)
    most = np.maximum.reduceat(rank, first)
    best = np.flatnonzero(rank == np.repeat(most, np.diff(np.append(first, len(length)))))
    return best[np.searchsorted(best, first)]
