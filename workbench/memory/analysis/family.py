"""Interpolates logs of one program exactly along a number in which they differ: batch size, sequence length or image side.

Within one program every storage's size is a polynomial of that number: a line in the batch, a parabola in the sequence where attention is
explicit. Replaying the sizes gives the exact peak of any value. A line through *peaks* is not exact: the moment of the peak moves.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from workbench.core.vocabulary import CATEGORIES, GROUPS
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.caching_allocator import CachingAllocator
from workbench.memory.analysis.log import ALLOC, FREE, MARK, RESIZE, Event, MemoryLog
from workbench.memory.analysis.replay import Numbers, Replay, canonical, changes, classify, columns, predecessors, rounded

_KINDS = {MARK: "begins", ALLOC: "makes", FREE: "frees", RESIZE: "resizes"}
_FARTHEST = 2**40


class Family:
    """Some logs of the same program.

    Args:
        logs: value of the number → the log of a run with it. `degree + 1` of them make the polynomials, the others check them. Avoid the
            value 1: programs treat it specially.
        degree: of the polynomials: 1 (lines) or 2 (parabolas).

    Raises:
        ValueError: too few logs for the degree; the runs did not do the same operations (it says where they part); or a size is no such
            polynomial.
    """

    def __init__(self, logs: Mapping[int, MemoryLog], degree: int = 1) -> None:
        if degree not in (1, 2):
            raise ValueError(f"degree={degree}: 1 (each storage is a line) or 2 (a parabola)")
        if len(logs) <= degree:
            raise ValueError(f"{len(logs)} logs at {sorted(logs)}: degree={degree} needs runs with at least {degree + 1} different values")
        self.values = sorted(logs)
        self.degree = degree
        events = {x: canonical(log.events) for x, log in logs.items()}
        tables = {x: columns(found) for x, found in events.items()}
        for x in self.values[1:]:
            _same(self.values[0], logs[self.values[0]], events[self.values[0]], x, logs[x], events[x])
        lowest = logs[self.values[0]]
        self._log = dataclasses.replace(lowest, events=events[self.values[0]])
        classify(self._log)
        self._table = tables[self.values[0]]
        self._before = predecessors(self._table)
        self._mid = self.values[len(self.values) // 2]
        nodes = [self.values[0], self.values[-1]] if degree == 1 else [self.values[0], self._mid, self.values[-1]]
        self._nodes = nodes
        self._factors = _newton(nodes, [tables[x][:, 2].astype(np.float64) for x in nodes])
        self._changing = (self._table[:, 0] == ALLOC) | (self._table[:, 0] == RESIZE)
        for x in self.values:
            if x not in nodes:
                self._check(x, tables[x][:, 2])

    def _check(self, x: int, sizes: Numbers) -> None:
        wrong = np.flatnonzero(self.sizes(x) != np.where(self._changing, sizes, 0))
        if len(wrong):
            what = _storage(self._log.events[wrong[0]], self._log)
            hint = "try degree=2 with three runs" if self.degree == 1 else "use one run per value instead"
            raise ValueError(
                f"{what} has {sizes[wrong[0]]:,} bytes at {x}, where {self._nodes} make it {self.sizes(x)[wrong[0]]:,} (event "
                f"{wrong[0]}): no polynomial of degree {self.degree}; {hint}"
            )

    def sizes(self, x: int, granularity: int = 1) -> Numbers:
        """Bytes of each event's storage from there on, at the value `x`; 0 for frees and marks."""
        if x < 1:
            raise ValueError(f"{x}: a size from 1 on")
        size = self._factors[-1]
        for node, factor in zip(reversed(self._nodes[: len(self._factors) - 1]), reversed(self._factors[:-1]), strict=True):
            size = factor + (x - node) * size
        return rounded(np.where(self._changing, np.maximum(0, np.rint(size)), 0).astype(np.int64), granularity)

    def log(self, x: int) -> MemoryLog:
        """The log that a run with the value `x` would write."""
        sizes = self.sizes(x)
        largest = np.zeros(len(self._log.records), np.int64)
        at = np.flatnonzero(self._changing)
        np.maximum.at(largest, self._table[at, 1], sizes[at])
        records = [dataclasses.replace(record, size=size) for record, size in zip(self._log.records, largest.tolist(), strict=True)]
        return dataclasses.replace(self._log, records=records, events=self._events(sizes))

    def _events(self, sizes: Numbers) -> list[Event]:
        made = self._log.events.copy()
        for position in np.flatnonzero(sizes != self._lowest).tolist():
            kind, index, _ = made[position]
            made[position] = Event(kind, index, int(sizes[position]))
        return made

    @cached_property
    def _lowest(self) -> Numbers:
        return np.where(self._changing, self._table[:, 2], 0)

    def _totals(self, x: int, granularity: int) -> tuple[Numbers, Numbers]:
        delta = changes(self.sizes(x, granularity), self._before)
        return delta, delta.cumsum()

    def peak(self, x: int, granularity: int = 1) -> int:
        """Bytes in live tensors at the peak; `allocator(x).peak_allocated` has what CUDA does not split off, too.

        Args:
            x: the value of the quantity that the family varies.
            granularity: bytes that each storage is rounded up to a multiple of.
        """
        return int(self._totals(x, granularity)[1].max())

    def held(self, x: int, granularity: int = 1) -> dict[str, int]:
        """Group → bytes at that moment."""
        delta, total = self._totals(x, granularity)
        until = int(total.argmax()) + 1
        sums = np.bincount(self._groups[:until], weights=delta[:until], minlength=len(GROUPS))
        return {group: int(held) for group, held in zip(GROUPS, sums.tolist(), strict=True)}

    @cached_property
    def _groups(self) -> Numbers:
        codes = np.array([GROUPS.index(CATEGORIES[record.category or "other"]) for record in self._log.records], np.int64)
        return np.where(self._table[:, 0] == MARK, 0, codes[np.where(self._table[:, 0] == MARK, 0, self._table[:, 1])])

    def beside_states(self, x: int, granularity: int = 512) -> tuple[int, int, int]:
        """Peak bytes of what is no parameter, gradient or optimizer state: before the optimizer's step; likewise, but only of what grows
        with the value, which copies of weights do not; and in the optimizer's step.
        """
        delta, _ = self._totals(x, granularity)
        record = np.where(self._table[:, 0] == MARK, 0, self._table[:, 1])
        late = np.array([each.phase == "optimizer" for each in self._log.records])[record]
        growing = np.zeros(len(self._log.records), bool)
        growing[record[self._changing & np.any(self._factors[1:], axis=0)]] = True
        loose = ~np.isin(self._groups, [GROUPS.index(name) for name in ("parameters", "gradients", "optimizer_states")])
        kinds = (loose & ~late, loose & ~late & growing[record], loose & late)
        return tuple(int(np.where(kind, delta, 0).cumsum().max()) for kind in kinds)  # type: ignore[return-value]

    def moment(self, x: int, granularity: int = 1) -> str:
        """That moment, in words."""
        return self._replay.moment(int(self._totals(x, granularity)[1].argmax()))

    @cached_property
    def _replay(self) -> Replay:
        return Replay(self._log)

    def allocator(self, x: int, **options: Any) -> CachingAllocator:
        """CUDA's allocator after the run.

        Raises:
            OutOfMemory: it does not fit under a limit that is among the options.
        """
        allocator = CachingAllocator(**options).run(self._events(self.sizes(x)))
        if allocator.failure:
            raise allocator.failure
        return allocator

    def reserved(self, x: int, **options: Any) -> int:
        """Peak of the segments that CUDA's allocator would take; arguments and errors as of `allocator`."""
        return self.allocator(x, **options).peak_reserved

    def breakdown(self, x: int, **fields: Any) -> MemoryBreakdown:
        """The breakdown at the value `x`.

        Args:
            x: the value of the quantity that the family varies.
            fields: of `MemoryBreakdown.from_log`; `kind` is "predicted" unless said otherwise.
        """
        log = dataclasses.replace(self._log, events=self._events(self.sizes(x)))  # only the events' sizes are read: no records are made
        return MemoryBreakdown.from_log(log, **{"kind": "predicted", **fields})

    def largest(self, limit: int, of: Callable[[int], int] | None = None) -> int:
        """The largest value whose bytes stay within a limit, by doubling and bisection; 0 if not even 1 does.

        Args:
            limit: bytes that may be used.
            of: value → bytes, growing with it; None: the peak as CUDA rounds it.

        Raises:
            ValueError: memory does not grow with the value.
        """
        held = of or (lambda x: self.peak(x, 512))
        low, high = 0, 1
        while held(high) <= limit:
            low, high = high, 2 * high
            if high > _FARTHEST:
                raise ValueError(f"memory does not grow with this number: {held(high):,} bytes at {high:,} are still below {limit:,}")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if held(middle) <= limit else (low, middle)
        return low

    def __repr__(self) -> str:
        return f"Family({len(self._log.events)} events at {self.values}, degree {self.degree})"


def _newton(nodes: list[int], sizes: list[Any]) -> list[Any]:
    """Newton's divided differences, one column per power."""
    rows = list(sizes)
    factors = [rows[0]]
    for order in range(1, len(nodes)):
        rows = [(b - a) / (nodes[i + order] - nodes[i]) for i, (a, b) in enumerate(pairwise(rows))]
        factors.append(rows[0])
    return factors


def _same(x: int, one: MemoryLog, events: list[Event], y: int, two: MemoryLog, others: list[Event]) -> None:
    """Do two runs have the same events, apart from sizes?"""
    advice = "They are not one family: the program depends on this number. Make a run per value, or take values on one side of the change"
    for position, (a, b) in enumerate(zip(events, others, strict=False)):
        if a[:2] != b[:2] or _what(a, one) != _what(b, two):
            raise ValueError(f"the runs at {x} and {y} part at event {position}: {x} {_words(a, one)}, {y} {_words(b, two)}. {advice}")
    if len(events) != len(others):
        longer, log, rest = (x, one, events) if len(events) > len(others) else (y, two, others)
        at = min(len(events), len(others))
        raise ValueError(f"the runs at {x} and {y} part at event {at}: only {longer} goes on, and {_words(rest[at], log)}. {advice}")


def _what(event: Event, log: MemoryLog) -> object:
    if event.kind == MARK:
        return log.marks[event.index]
    record = log.records[event.index]
    return record.op, record.module, record.phase


def _words(event: Event, log: MemoryLog) -> str:
    if event.kind == MARK:
        mark = log.marks[event.index]
        return f"begins {mark.phase} of step {mark.step + 1}"
    return f"{_KINDS[event.kind]} {_storage(event, log)}"


def _storage(event: Event, log: MemoryLog) -> str:
    record = log.records[event.index]
    where = f" in {record.module}" if record.module else ""
    return f"a storage of {record.op or 'no operator'}{where} ({record.phase}, step {record.step + 1})"
