"""Tiles: what a window on a scene shows, in so few rectangles that a page can draw them, and without losing an event or a nanosecond."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.traces.analysis.intervals import Numbers
from workbench.traces.analysis.layout import Scene

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
    """How many events it stands for."""
    busy: Numbers
    """Nanoseconds inside the window in which they run."""
    lit: Numbers
    """Those of them that belong to events that are chosen."""
    chosen: Numbers
    """How many of its events are chosen."""
    place: Numbers
    """Where the longest of its events (of the chosen ones, if it has any) stands in the scene."""
    width: int
    """Nanoseconds of a piece of time: what is shorter may be put together with its neighbours."""

    def __len__(self) -> int:
        return len(self.start)

    def packed(self, scene: Scene) -> dict[str, Any]:
        """For a page: little-endian bytes of each column, times from the beginning of the first on; and the names, each told once."""
        told, name = np.unique(scene.name[self.place], return_inverse=True)
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
            "kind": scene.kind[self.place].astype("<i4"),
        }
        packed = {key: value.tobytes() for key, value in columns.items()}
        return {**packed, "origin": origin, "names": [scene.names[code] for code in told.tolist()], "width": self.width}


def tiles(
    scene: Scene,
    start: int,
    end: int,
    *,
    rows: tuple[int, int] | None = None,
    bins: int = 1_000,
    most: int = MOST,
    chosen: NDArray[np.bool_] | None = None,
) -> Tiles:
    """What a window shows.

    The window is cut into pieces of time. An event as long as a piece is a rectangle of its own; shorter ones of a row that begin in the
    same piece, with no longer one between them, are one rectangle together. Rectangles of a row do not overlap, as its events do not. If
    that makes too many, the pieces become longer.

    Args:
        scene: what is looked at.
        start: nanoseconds.
        end: where the window ends.
        rows: from this one up to, not including, that one; None = all.
        bins: pieces of time: half the dots that a row has.
        most: rectangles at most; but at least three in each row that is looked at.
        chosen: which events are to be told from the others.

    Raises:
        ValueError: it ends before it begins.
    """
    if not start < end:
        raise ValueError(f"tiles(start={start}, end={end}): it has to end after it begins")
    low, high = (0, scene.rows) if rows is None else (max(0, rows[0]), min(scene.rows, rows[1]))
    places = _seen(scene, start, end, low, high)
    row = scene.row[places]
    begin, until = np.maximum(scene.start[places], start), np.minimum(scene.end[places], end)
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


def _seen(scene: Scene, start: int, end: int, low: int, high: int) -> Numbers:
    """Places of the events of some rows that are in a window. Starts and ends of a row are both in order, so two searches find them."""
    found = [np.empty(0, dtype=np.int64)]
    for row in range(low, high):
        begin, until = int(scene.edges[row]), int(scene.edges[row + 1])
        starts = scene.start[begin:until]
        first = min(np.searchsorted(scene.end[begin:until], start, side="right"), np.searchsorted(starts, start, side="left"))
        found.append(np.arange(begin + first, begin + np.searchsorted(starts, end, side="left"), dtype=np.int64))
    return np.concatenate(found)


def _firsts(row: NDArray[np.int32], begin: Numbers, length: Numbers, width: int) -> NDArray[np.intp]:
    """Where in the order of events a new rectangle begins."""
    piece, wide = begin // width, length >= width
    if not len(row):
        return np.empty(0, dtype=np.intp)
    new = (row[1:] != row[:-1]) | (piece[1:] != piece[:-1]) | wide[1:] | wide[:-1]
    return np.flatnonzero(np.concatenate([[True], new]))


def _longest(length: Numbers, picked: NDArray[np.bool_], first: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of each rectangle the longest event, the first of equals; one that is chosen before all others."""
    rank = np.where(picked, length + (int(length.max()) + 1), length)
    most = np.maximum.reduceat(rank, first)
    best = np.flatnonzero(rank == np.repeat(most, np.diff(np.append(first, len(length)))))
    return best[np.searchsorted(best, first)]
