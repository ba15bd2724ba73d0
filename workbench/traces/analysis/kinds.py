"""Kinds: the kind of every event of a trace, and when events of a kind run.

Threads: what each thread of the host is in at any time.

Launching: which call of the host launched which work of the device.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.intervals import Numbers, Spans, union
from workbench.traces.analysis.labels import DEVICE as DEVICE
from workbench.traces.analysis.labels import HOST_COLLECTIVE as HOST_COLLECTIVE
from workbench.traces.analysis.labels import KINDS as KINDS
from workbench.traces.analysis.labels import Label
from workbench.traces.analysis.labels import kind_of as kind_of
from workbench.traces.analysis.nesting import Nesting


class Kinds:
    """The kind of every event of a trace."""

    def __init__(self, columns: Columns, of: Callable[[Label], str] = kind_of) -> None:
        self._columns = columns
        codes = {kind: code for code, kind in enumerate(KINDS)}
        self._of = np.array([codes[of(label)] for label in columns.labels] or [0], dtype=np.int8)
        self._code = self._of[columns.label]
        self._codes = codes
        self._covers: dict[str, Spans] = {}
        self.device = bool(np.isin(self._code, [codes[kind] for kind in DEVICE]).any())
        """Did a device other than the CPU work?"""

    @property
    def codes(self) -> NDArray[np.int8]:
        """Number of each event's kind, in the order of KINDS."""
        return self._code

    def where(self, *kinds: str) -> NDArray[np.bool_]:
        """Which events are of one of some kinds."""
        found: NDArray[np.bool_] = np.isin(self._code, [self._codes[kind] for kind in kinds])
        return found

    def spans(self, *kinds: str) -> Spans:
        """Start and end of the events of some kinds, in the order of the file."""
        chosen = self.where(*kinds)
        return np.stack([self._columns.start[chosen], self._columns.end[chosen]], axis=1)

    def cover(self, *kinds: str) -> Spans:
        """The time in which an event of one of some kinds runs."""
        for kind in kinds:
            if kind not in self._covers:
                self._covers[kind] = union(self.spans(kind))
        return union(*(self._covers[kind] for kind in kinds)) if len(kinds) != 1 else self._covers[kinds[0]]


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


def callers(columns: Columns, kinds: Kinds, work: Numbers) -> Numbers:
    """Number of the call that launched each of some events of a device, by correlation; -1 where the file does not tell.

    Args:
        columns: the events.
        kinds: what they are.
        work: numbers of events of a device.
    """
    calls = np.flatnonzero(kinds.where("runtime", "wait") & (columns.correlation >= 0))
    if not len(calls):
        return np.full(len(work), -1, dtype=np.int64)
    keys, at = np.unique(columns.correlation[calls], return_index=True)
    wanted = columns.correlation[work]
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found: Numbers = np.where((keys[place] == wanted) & (wanted >= 0), calls[at][place], -1)
    return found
