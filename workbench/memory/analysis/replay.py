"""Replay: reads a MemoryLog from begin to end: bytes of each group after every event, the peak, and its moment in words."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.core.vocabulary import CATEGORIES, GROUPS
from workbench.memory.analysis.log import ALLOC, FREE, MARK, RESIZE, Event, Mark, MemoryLog

Numbers = NDArray[np.int64]

BEGIN = Mark("init", 0, 0)
"""Mark of the events before the first mark."""
EDGE = 0.1
"""The first and last tenth of a phase's events are its start and its end."""
_TIMES = {
    "init": "while the model is built",
    "data": "while a batch is fetched",
    "between": "after backward",
    "optimizer": "optimizer step",
    "end": "after the step",
}
_BY_PHASE = {"data": "input", "backward": "temp_backward", "between": "temp_optimizer", "optimizer": "temp_optimizer"}


def classify(log: MemoryLog) -> None:
    """Decide, in place, the categories that follow only from the whole log; known ones are kept.

    Allocated with the batch, before the model is called: an input, such as a copy of it or what a stage of a pipeline will receive.
    Allocated in forward: an activation if it is alive when the backward of the same micro-step begins (or always, where there is none),
    else a temporary. Allocated in backward: recomputed if a module's forward was running, else a temporary. Allocated later, until the
    gradients are cleared (clipping, unscaling, the optimizer): a temporary of the optimizer. All else: other.
    """
    backward: dict[int, int] = {}
    for position, (kind, index, _) in enumerate(log.events):
        if kind == MARK and log.marks[index].phase == "backward":
            backward.setdefault(log.marks[index].micro, position)
    for record in log.records:
        if record.category is not None:
            continue
        if record.phase == "forward":
            begin = backward.get(record.micro)
            kept = record.freed_at is None or (begin is not None and record.freed_at > begin)
            record.category = "activation" if kept else "temp_forward"
        elif record.phase == "backward" and record.module:
            record.category = "recompute"
        else:
            record.category = _BY_PHASE.get(record.phase, "other")


def canonical(events: Iterable[Event]) -> list[Event]:
    """The events with each run of consecutive frees in the order of their allocation.

    Caches that are hash maps (autocast's copies of weights) die in a random order; only so do two equal runs give equal logs.
    """
    listed = list(events)
    return [listed[position] for position in _order(columns(listed)).tolist()]


def _order(table: Numbers) -> Numbers:
    """Positions of the events in canonical order."""
    free = table[:, 0] == FREE
    return np.lexsort((np.where(free, table[:, 1], -1), (~free).cumsum()))


def columns(events: Sequence[Event]) -> Numbers:
    """The events as int64 [event, (kind, index, size)]."""
    return np.fromiter(chain.from_iterable(events), np.int64, 3 * len(events)).reshape(-1, 3)


def predecessors(table: Numbers) -> Numbers:
    """Position of the event before it of the same storage, for every event; -1 where there is none, and for marks."""
    positions = np.flatnonzero(table[:, 0] != MARK)
    order = positions[np.argsort(table[positions, 1], kind="stable")]
    before = np.full(len(table), -1, np.int64)
    same = table[order[1:], 1] == table[order[:-1], 1]
    before[order[1:][same]] = order[:-1][same]
    return before


def changes(sizes: Numbers, before: Numbers) -> Numbers:
    """Bytes that each event adds: its storage's size from now on, less its size until then."""
    return sizes - np.where(before >= 0, sizes[before], 0)


def rounded(sizes: Numbers, granularity: int) -> Numbers:
    """Each size up to the next multiple of `granularity` bytes."""
    return sizes if granularity == 1 else -(-sizes // granularity) * granularity


class Replay:
    """A log in columns, in canonical order; the log's late categories are decided on the way (`classify`).

    Attributes:
        log: what was replayed.
        granularity: bytes that each storage is rounded up to a multiple of.
        sizes: int64 [event], bytes of the event's storage from there on, rounded; 0 for marks.
        held: int64 [event, group], bytes per group of GROUPS after each event.
        total: int64 [event], bytes after each event.
        peak: position of the first event at which the total is largest.

    Raises:
        ValueError: the granularity is not positive, or the log holds nothing.
    """

    def __init__(self, log: MemoryLog, granularity: int = 1) -> None:
        if granularity < 1:
            raise ValueError(f"granularity={granularity}: bytes to round each storage up to; 512 on CUDA, 1 (no rounding) on CPU")
        if not any(event.kind == ALLOC for event in log.events):
            raise ValueError("the log holds no storage: nothing was run, or what was run made no tensor that the recorder saw")
        classify(log)
        self.log, self.granularity = log, granularity
        table = columns(log.events)
        self._table = table[_order(table)]
        kinds = self._table[:, 0]
        self.sizes = rounded(np.where((kinds == ALLOC) | (kinds == RESIZE), self._table[:, 2], 0), granularity)
        delta = changes(self.sizes, predecessors(self._table))
        codes = {category: GROUPS.index(group) for category, group in CATEGORIES.items()}
        groups = np.array([codes[record.category or "other"] for record in log.records], np.int64)
        moved = np.flatnonzero(kinds != MARK)
        spread = np.zeros((len(kinds), len(GROUPS)), np.int64)
        spread[moved, groups[self._table[moved, 1]]] = delta[moved]
        self.held: Numbers = spread.cumsum(0)
        self.total: Numbers = delta.cumsum()
        self.peak = int(self.total.argmax())

    @cached_property
    def events(self) -> list[Event]:
        """The events in canonical order: all positions are in these."""
        return canonical(self.log.events)

    @cached_property
    def mark_positions(self) -> Numbers:
        """Positions of the marks."""
        return np.flatnonzero(self._table[:, 0] == MARK)

    @cached_property
    def stretches(self) -> list[tuple[int, int, Mark]]:
        """(first position, position behind the last, mark) of each stretch between two marks, none empty."""
        borders = [0, *self.mark_positions.tolist(), len(self.total)]
        marks = [BEGIN, *(self.log.marks[i] for i in self._table[self.mark_positions, 1].tolist())]
        return [(a, b, mark) for (a, b), mark in zip(pairwise(borders), marks, strict=True) if b > a]

    def stretch_of(self, position: int) -> tuple[int, int, Mark]:
        """The stretch that holds a position."""
        return next(stretch for stretch in self.stretches if stretch[0] <= position < stretch[1])

    def phase_of(self, position: int) -> Mark:
        """Phase, step and micro-step at a position."""
        return self.stretch_of(position)[2]

    @property
    def steps(self) -> dict[int, int]:
        """Step → its peak, in bytes."""
        return self.peaks("step", self.total)

    @property
    def phases(self) -> dict[str, int]:
        """Phase → its peak over all steps, in bytes."""
        return self.peaks("phase", self.total)

    def peaks(self, key: str, counted: Numbers) -> dict[Any, int]:
        """Step, phase or micro-batch (`key`) → the largest of some bytes that were counted after each event."""
        largest: dict[Any, int] = {}
        for a, b, mark in self.stretches:
            name = getattr(mark, key)
            largest[name] = max(largest.get(name, 0), int(counted[a:b].max()))
        return largest

    def alive(self, position: int) -> dict[int, int]:
        """Index of each record that holds bytes after the event at `position` → those bytes, rounded."""
        moved = np.flatnonzero(self._table[: position + 1, 0] != MARK)
        now = np.zeros(len(self.log.records), np.int64)
        now[self._table[moved, 1]] = self.sizes[moved]  # of a storage's events the last one counts
        return {int(index): int(now[index]) for index in np.flatnonzero(now)}

    def moment(self, position: int) -> str:
        """The moment in words, such as "start of backward, step 2". Steps count from 1; one of several micro-steps is named."""
        a, b, mark = self.stretch_of(position)
        when = _TIMES.get(mark.phase)
        if when is None:
            share = (position - a) / max(1, b - a - 1)
            when = f"{'start' if share <= EDGE else 'end' if share >= 1 - EDGE else 'middle'} of {mark.phase}"
        if mark.phase == "init":
            return when
        of_step = sorted({m.micro for m in self.log.marks if m.step == mark.step and m.phase == "forward"})
        if mark.micro in of_step and len(of_step) > 1 and mark.phase in ("data", "forward", "backward", "between"):
            when += f" of micro-step {of_step.index(mark.micro) + 1} of {len(of_step)}"
        return f"{when}, step {mark.step + 1}"
