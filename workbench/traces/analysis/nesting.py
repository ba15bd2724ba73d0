"""Finds which event of the host called which, and merges calls by name into trees."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.intervals import Numbers, Spans, covered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nesting:
    """Some events of the host, by thread and time, each after the one that called it. A place is a position in this order."""

    events: Numbers
    """Number of the event at each place."""
    parent: Numbers
    """Place of the event around it, on its own thread; -1 = none."""
    depth: Numbers
    """How many are around it."""
    spans: Spans
    """From when to when, cut to the event around: no time is in two events unless one is inside the other."""

    def levels(self) -> Iterator[Numbers]:
        """Places that have something around them, the outer ones first."""
        order = np.argsort(self.depth, kind="stable")
        borders = np.searchsorted(self.depth[order], np.arange(1, int(self.depth.max(initial=0)) + 2))
        for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            yield order[begin:end]

    def nearest(self, chosen: NDArray[np.bool_]) -> Numbers:
        """The innermost chosen place around each place, itself included; -1 without one."""
        result = np.where(chosen, np.arange(len(chosen)), -1)
        for level in self.levels():
            result[level] = np.where(chosen[level], level, result[self.parent[level]])
        return result

    def within(self, cover: Spans) -> tuple[Numbers, Numbers]:
        """Nanoseconds of each place inside a cover: with what it calls, and without."""
        total = covered(cover, self.spans)
        own = total.copy()
        inner = self.parent >= 0
        np.subtract.at(own, self.parent[inner], total[inner])
        return total, own


def nest_events(columns: Columns, chosen: NDArray[np.bool_]) -> Nesting:
    """Find which of the chosen events are inside which."""
    of = np.flatnonzero(chosen)
    events = of[np.lexsort((-columns.end[of], columns.start[of], columns.lane[of]))]
    spans = np.stack([columns.start[events], columns.end[events]], axis=1)
    parent, depth, spans[:, 0] = _around(columns.lane[events].tolist(), *spans.T.tolist()) if len(events) else ([], [], [])
    made = Nesting(events=events, parent=np.array(parent, dtype=np.int64), depth=np.array(depth, dtype=np.int64), spans=spans)
    for level in made.levels():
        around = spans[made.parent[level]]
        spans[level] = np.clip(spans[level], around[:, :1], around[:, 1:])
    return made


def _around(lanes: list[int], starts: list[int], ends: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Place of the event around each, how many there are, and from when on it counts.

    An event is inside another if most of it is: clocks make it outlast its caller by a little, while a range that a Python function opens
    on behalf of its caller (`record_function.__enter__`) begins inside that function, and goes on long after it.
    """
    parents, depths, begins = [], [], []
    open_: list[tuple[int, int]] = []  # end and place of the events around
    lane = -1
    for place, (on, start, end) in enumerate(zip(lanes, starts, ends, strict=True)):
        if on != lane:
            lane = on
            open_.clear()
        begin = start
        while open_ and (open_[-1][0] <= start or end - open_[-1][0] > open_[-1][0] - start):
            begin = max(begin, open_.pop()[0])
        parents.append(open_[-1][1] if open_ else -1)
        depths.append(len(open_))
        begins.append(begin)
        open_.append((end, place))
    return parents, depths, begins


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Merged:
    """A tree of calls: events of one name under the same callers are one node. Nodes of a level follow those of the level above."""

    node: Numbers
    """Of each place."""
    parent: Numbers
    """Of each node; -1 = none."""
    name: Numbers
    """Of each node: the number of its name."""

    def summed(self, values: Numbers) -> Numbers:
        """Sum of a value of the places over each node."""
        sums = np.zeros(len(self.name), dtype=np.int64)
        np.add.at(sums, self.node, values)
        return sums

    def rolled(self, values: Numbers) -> Numbers:
        """A value of the nodes, with those of all nodes below."""
        sums = values.copy()
        for node in range(len(self.parent) - 1, -1, -1):
            if self.parent[node] >= 0:
                sums[self.parent[node]] += sums[node]
        return sums

    def walk(self, weight: Numbers) -> Iterator[tuple[int, int]]:
        """Nodes and their depths, each before those below it, the heaviest first."""
        below: dict[int, list[int]] = {}
        for node in np.argsort(weight, kind="stable").tolist():  # taken from the end
            below.setdefault(int(self.parent[node]), []).append(node)
        open_ = [(node, 0) for node in below.get(-1, [])]
        while open_:
            node, depth = open_.pop()
            yield node, depth
            open_ += [(child, depth + 1) for child in below.get(node, [])]


def merge_calls(nesting: Nesting, name: Numbers) -> Merged:
    """Merge the events of a nesting by the path of their names."""
    node = np.full(len(name), -1, dtype=np.int64)
    parents, names = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    count, most = 0, int(name.max(initial=0)) + 1
    for level in (np.flatnonzero(nesting.depth == 0), *nesting.levels()):
        above = np.where(nesting.parent[level] >= 0, node[nesting.parent[level]], -1)
        keys, at = np.unique((above + 1) * most + name[level], return_inverse=True)
        node[level] = at + count
        parents.append(keys // most - 1)
        names.append(keys % most)
        count += len(keys)
    return Merged(node=node, parent=np.concatenate(parents), name=np.concatenate(names))


def name_numbers(columns: Columns) -> tuple[list[str], Numbers]:
    """The different names of a file, and the number of its name for each label."""
    names = {name: code for code, name in enumerate(dict.fromkeys(label.name for label in columns.labels))}
    return list(names), np.array([names[label.name] for label in columns.labels] or [0], dtype=np.int64)
