"""Threads: what each thread of the host is in at any time."""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.traces.columns import Columns
from workbench.traces.nesting import Nesting


@dataclass(slots=True)
class Thread:
    """Pieces of time in order, each in its innermost event; where there is none there is no piece."""

    start: list[int]
    end: list[int]
    event: list[int]

    def before(self, time: int) -> int:
        """The piece that begins last before a time; -1 = none."""
        return bisect_left(self.start, time) - 1


def threads(columns: Columns, calls: Nesting, loader: NDArray[np.bool_]) -> dict[int, Thread]:
    """Each thread, by its number.

    Args:
        columns: the events.
        calls: those of the host that count.
        loader: which events are waiting for a batch: what is called in there is theirs.
    """
    real = calls.spans[:, 1] > calls.spans[:, 0]
    places = np.flatnonzero(real)
    start, end = calls.spans[places].T if len(places) else (np.empty(0, dtype=np.int64),) * 2
    depth, lane = calls.depth[places], columns.lane[calls.events[places]]
    times, lanes = np.concatenate([end, start]), np.concatenate([lane, lane])
    then = np.concatenate([calls.parent[places], places])  # what the thread is in from that time on
    rank = np.concatenate([-depth - 1, depth])  # at one time: ends before beginnings, inner ends first, outer beginnings first
    order = np.lexsort((rank, times, lanes))
    times, lanes, then = times[order], lanes[order], then[order]
    until = np.append(times[1:], 0)
    kept = (then >= 0) & (until > times) & np.append(lanes[1:] == lanes[:-1], False)
    holder = calls.nearest(loader[calls.events])
    found = {}
    for one in np.unique(lanes[kept]).tolist():
        here = kept & (lanes == one)
        inner = np.where(holder[then[here]] >= 0, holder[then[here]], then[here])
        found[one] = Thread(times[here].tolist(), until[here].tolist(), calls.events[inner].tolist())
    return found
