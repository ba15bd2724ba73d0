"""Holds what the trace explorer shows: events in rows, steps, and answers for parts of the traces. No widgets, no HTML."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.traces.analysis.breakdown import Breakdown
from workbench.traces.analysis.event_kinds import KINDS
from workbench.traces.analysis.layout import Layout, lay_out, tiles
from workbench.traces.analysis.operators import Ranked, Ranking, Which
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet

WORDS = {
    "step": "a step's mark",
    "data_wait": "waiting for data",
    "operator": "operator",
    "optimizer": "optimizer",
    "backward": "node of the backward graph",
    "host_communication": "collective on the CPU",
    "collective_call": "call of a collective",
    "runtime": "call that launches",
    "wait": "waiting for the device",
    "range": "range",
    "kernel": "kernel",
    "communication": "collective",
    "h2d": "copy to the device",
    "copy": "copy",
}
"""Kind of event → words."""

ALL = "all"
"""The choice of no single step."""
AROUND = 0.25
"""Of a window: how much more is drawn at both sides, so that a page has it when the reader moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A step, as the layout has it."""

    number: int
    start: int
    """Nanoseconds of the layout."""
    end: int

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return (self.end - self.start) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Facts about one event, for the page."""

    name: str
    kind: str
    seconds: float
    own: float
    """Seconds without what it calls."""
    step: int | None
    """Of the step it begins in."""
    at: float
    """Seconds from the beginning of that step, or of the file."""
    lane: str
    rank: int | None
    shapes: str
    calls: int
    """Of its name, in the same step; in all of the file where it is in none."""


class Explored:
    """Traces by rank; the one trace of a process that has none is under None."""

    def __init__(self, traces: Mapping[int | None, Trace]) -> None:
        self.traces = dict(traces)
        self._rankings: dict[int | None, Ranking] = {}
        self._breakdowns: dict[int | None, Breakdown] = {}

    @classmethod
    def of(cls, given: Any) -> "Explored":
        """From a trace, a set of traces, or a path.

        Raises:
            ValueError: something else was given.
            TraceError: the path has no trace that can be read.
        """
        if isinstance(given, str | os.PathLike):
            loaded = TraceSet.load(given) if Path(given).is_dir() else Trace.load(given)
            given = next(iter(loaded.values())) if isinstance(loaded, TraceSet) and len(loaded) == 1 else loaded
        if isinstance(given, Trace):
            return cls({None: given})
        if isinstance(given, TraceSet):
            return cls(dict(given.items()))
        raise ValueError(
            f"{type(given).__name__} given: allowed are a Trace, such as wb.trace(step, loader) or wb.Trace.load(path) gives, a TraceSet, "
            "or the path of a file or directory that torch.profiler wrote"
        )

    @cached_property
    def layout(self) -> Layout:
        """All events, in rows."""
        if len(self.traces) == 1:
            return lay_out(next(iter(self.traces.values())))
        return lay_out({rank: trace for rank, trace in self.traces.items() if rank is not None})

    @property
    def device(self) -> bool:
        """Does a device compute?"""
        return any(trace.kinds.device for trace in self.traces.values())

    @property
    def first(self) -> int | None:
        """The lowest rank."""
        return next(iter(self.traces))

    @property
    def title(self) -> str:
        """The traces in a line."""
        events = sum(len(trace.columns) for trace in self.traces.values())
        first = self.traces[self.first]
        name = first.path.name if len(self.traces) == 1 else f"{len(self.traces)} ranks"
        return f"{name} · {events:,} events · {units.several(len(first.steps), 'step')}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what is missing from the files, what the profiler cost, and what cannot be compared."""
        notes = dict.fromkeys(note for trace in self.traces.values() for note in (*trace.windows.notes, *trace.notes))
        slowest = max((trace.slowdown for trace in self.traces.values() if trace.slowdown is not None), default=None)
        known = slowest is None or any("the profiler slows" in note for note in notes)
        slowed = [] if known else [f"a step under the profiler took {units.times(1 + (slowest or 0.0))} the time of one without it"]
        several = (
            ["the ranks' clocks are not compared: the first step that all ranks have is drawn in one place"] if len(self.traces) > 1 else []
        )
        ahead = ["steps are the device's; the host runs ahead, so its marks are at other times"] if self.device else []
        return (*slowed, *several, *ahead, *notes)

    def _shift(self, rank: int | None) -> int:
        return self.layout.shifts[list(self.traces).index(rank)]

    def steps(self, rank: int | None) -> tuple[Stretch, ...]:
        windows, shift = self.traces[rank].windows, self._shift(rank)
        rows = zip(windows.numbers.tolist(), (windows.spans + shift).tolist(), strict=True)
        return tuple(Stretch(number=number, start=start, end=end) for number, (start, end) in rows)

    def choices(self, rank: int | None) -> list[tuple[str, int | str]]:
        """Label and number of each step of a rank; first the choice of all steps."""
        return [("all steps", ALL), *((f"step {step.number} · {units.seconds(step.seconds)}", step.number) for step in self.steps(rank))]

    def usual(self, rank: int | None) -> int | str:
        """The step of middle length; ALL where there are no marks of steps."""
        steps = sorted(self.steps(rank), key=lambda step: step.seconds)
        return steps[len(steps) // 2].number if steps and self.traces[rank].windows.marked else ALL

    def step(self, rank: int | None, number: int | None) -> Stretch:
        """A step, or everything from the first event to the last."""
        chosen = next((step for step in self.steps(rank) if step.number == number), None)
        start, end = self.layout.span
        return chosen or Stretch(number=-1, start=start, end=end)

    def breakdown(self, rank: int | None, number: int | None) -> Breakdown:
        if rank not in self._breakdowns:
            self._breakdowns[rank] = self.traces[rank].breakdown()
        whole = self._breakdowns[rank]
        if number is None:
            return whole
        return dataclasses.replace(whole, steps=tuple(step for step in whole.steps if step.step == number))

    def ranked(self, rank: int | None, number: int | None, which: Which) -> tuple[Ranked, ...]:
        """Operators or kernels that begin in a step, or all.

        A device works later than the host that launches: kernels are those of the step as the device has it, operators those of its mark.
        """
        if number is None:
            return self._ranking(rank).within(0, float("inf"), which)
        step, shift = self.step(rank, number), self._shift(rank)
        if which == "operator" and self.device and (mark := self._mark(rank, number)):
            return self._ranking(rank).within(*mark)
        return self._ranking(rank).within(step.start - shift, step.end - shift, which)

    def _mark(self, rank: int | None, number: int) -> tuple[int, int] | None:
        """Start and end of the host's mark of a step, in nanoseconds of its own file."""
        columns, marks = self.traces[rank].columns, self.traces[rank].kinds.where("step").nonzero()[0].tolist()
        events = [event for event in marks if columns.name(event).endswith(f"#{number}")]
        return (int(columns.start[events[0]]), int(columns.end[events[0]])) if events else None

    def _ranking(self, rank: int | None) -> Ranking:
        if rank not in self._rankings:
            self._rankings[rank] = Ranking(self.traces[rank].columns, self.traces[rank].kinds)
        return self._rankings[rank]

    def drawn(self, window: Mapping[str, Any], lit: Iterable[str], *, choosing: bool) -> dict[str, Any]:
        """What a page draws for a window (`TraceView.window`), in the format of `TraceView.tiles`.

        Args:
            window: the part of the trace that is shown.
            lit: names that are highlighted.
            choosing: is anything highlighted? With no name in `lit`, all events are pale.
        """
        layout = self.layout
        margin = AROUND * (window["end"] - window["start"])
        start = int(window["start"] - margin)
        made = tiles(
            layout,
            start,
            max(int(window["end"] + margin), start + 1),
            rows=(window["first"], window["rows"]),
            bins=int(window["dots"] * (1 + 2 * AROUND)),
            chosen=layout.chosen(layout.called(lit)) if choosing else None,
        )
        return {**made.packed(layout), "choosing": choosing}

    def described(self, place: int) -> Described:
        """The event at a place of the layout."""
        layout = self.layout
        source, event, start = int(layout.source[place]), int(layout.event[place]), int(layout.start[place])
        rank = list(self.traces)[source]
        columns = self.traces[rank].columns
        step = next((candidate for candidate in self.steps(rank) if candidate.start <= start < candidate.end), None)
        whole = step or Stretch(number=-1, start=layout.span[0], end=layout.span[1] + 1)
        alike = (layout.name == layout.name[place]) & (layout.source == source) & (layout.start >= whole.start) & (layout.start < whole.end)
        return Described(
            name=layout.names[int(layout.name[place])],
            kind=WORDS.get(KINDS[int(layout.kind[place])], ""),
            seconds=(int(layout.end[place]) - start) / 1e9,
            own=self._ranking(rank).own(event),
            step=step.number if step else None,
            at=(start - whole.start) / 1e9,
            lane=columns.lanes[int(columns.lane[event])].name,
            rank=rank,
            shapes=" ".join(columns.shapes[int(columns.shape[event])].split()),
            calls=int(alike.sum()),
        )
