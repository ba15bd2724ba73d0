"""Columns: the events of a trace as arrays, with each name, lane and shape stored once; nanoseconds from the first event on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from workbench.core.gc import without_gc
from workbench.traces.analysis.event_schema import NO_ARGS, NO_SHAPES, Args, Bare, Event, Number
from workbench.traces.analysis.intervals import Numbers, Spans

B = TypeVar("B", bound=Bare)

LATEST, LONGEST = 3e15, 1e15
"""Microseconds since 1970, and of one event: later and longer times are none (nanoseconds of them would not fit 64 bits)."""


class Lane(NamedTuple):
    """One thread of the host, or one stream of a device."""

    process: object
    thread: object
    name: str


class Label(NamedTuple):
    """The name and category of an event."""

    name: str
    category: str
    """As Kineto has it: "cpu_op", "user_annotation", "kernel", "cuda_runtime", …"""
    collective: bool
    """Does it carry the arguments of a collective?"""


class Message(NamedTuple):
    """An event that says what it moved."""

    event: int
    """Its number."""
    args: Args


class Codes(dict[Any, int]):
    """A number for each key, in the order in which the keys first occur."""

    def __missing__(self, key: Any) -> int:
        self[key] = code = len(self)
        return code


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Complete events, one place each in every array."""

    labels: tuple[Label, ...]
    lanes: tuple[Lane, ...]
    shapes: tuple[str, ...]
    """Shapes of inputs as the file writes them; the first is that of events without."""
    label: NDArray[np.int32]
    lane: NDArray[np.int32]
    shape: NDArray[np.int32]
    start: Numbers
    """Nanoseconds from the first event of the file on."""
    end: Numbers
    correlation: Numbers
    """Joins the call that launches work and the work; -1 = none."""
    external: Numbers
    """Joins an operator and the work that it launched; -1 = none."""
    messages: tuple[Message, ...]
    origin: float | None = None
    """Microseconds at which the first event begins, on the file's own clock; ranks of one machine share it. None where it is not known."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def spans(self) -> Spans:
        """Start and end of each event, in two columns."""
        return np.stack([self.start, self.end], axis=1)

    @property
    def lengths(self) -> Numbers:
        """Nanoseconds that each event takes."""
        return self.end - self.start

    def name(self, event: int) -> str:
        """The name of an event."""
        label: Label = self.labels[self.label[event]]
        return label.name

    def where(self, test: Callable[[Label], bool]) -> NDArray[np.bool_]:
        """Which events have a label that passes a test, which is made once per label."""
        return np.array([test(label) for label in self.labels] or [False], dtype=np.bool_)[self.label]


class ColumnsBuilder:
    """Builds columns from batches of events."""

    def __init__(self) -> None:
        self._labels, self._lanes, self._shapes = Codes(), Codes(), Codes({b"": 0})
        self._names: dict[tuple[object, object], str] = {}
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._messages: list[Message] = []
        self._origin: float | None = None
        self._count = 0
        self.impossible = 0
        """Events with invalid times: not a number, negative, or out of range."""
        self.unpaired = 0
        """Events that are a beginning or an end only; torch.profiler writes none."""

    def add(self, batch: Sequence[Event]) -> None:
        """Add some events."""
        events = [e for e in batch if e.ph == "X"]
        if len(events) < len(batch):
            self._rest(batch)
        whole = len(events)
        events, start, dur = with_valid_times(events)
        self.impossible += whole - len(events)
        if not events:
            return
        if self._origin is None:
            self._origin = float(start.min())  # before arithmetic: microseconds since 1970 leave a double few digits
        args = [e.args or NO_ARGS for e in events]
        begin = np.rint((start - self._origin) * 1e3).astype(np.int64)
        size = len(events)
        names, categories = [e.name for e in events], [e.cat for e in events]
        collective = [a.collective is not None for a in args]
        self._parts.append(
            (
                _codes(self._labels, zip(names, categories, collective, strict=True), size),
                _codes(self._lanes, zip([e.pid for e in events], [e.tid for e in events], strict=True), size),
                _codes(self._shapes, [b"" if a.shapes is NO_SHAPES else bytes(a.shapes) for a in args], size),
                begin,
                begin + np.rint(dur * 1e3).astype(np.int64),
                integers([a.correlation for a in args]),
                integers([a.external for a in args]),
            )
        )
        self._messages += [Message(self._count + i, a) for i, a in enumerate(args) if a.collective is not None or a.bytes is not None]
        self._count += size

    def _rest(self, batch: Sequence[Event]) -> None:
        for event in batch:
            if event.ph == "M" and event.name == "thread_name" and event.args and event.args.label is not None:
                self._names[event.pid, event.tid] = str(event.args.label)
            elif event.ph in ("B", "E"):
                self.unpaired += 1

    def columns(self) -> Columns:
        """The columns of all events that were added."""
        empty = tuple(np.empty(0, dtype=kind) for kind in (np.int32, np.int32, np.int32, *[np.int64] * 4))
        parts = [np.concatenate(column) for column in zip(*self._parts, strict=True)] if self._parts else list(empty)
        self._parts.clear()
        label, lane, shape, start, end, correlation, external = parts
        first = int(start.min()) if len(start) else 0
        return Columns(
            labels=tuple(Label(str(name), str(cat or ""), collective) for name, cat, collective in self._labels),
            lanes=tuple(Lane(pid, tid, self._names.get((pid, tid), f"{pid} {tid}")) for pid, tid in self._lanes),
            shapes=tuple(text.decode("utf-8", "replace") for text in self._shapes),
            label=label,
            lane=lane,
            shape=shape,
            start=start - first,
            end=end - first,
            correlation=correlation,
            external=external,
            messages=tuple(self._messages),
            origin=None if self._origin is None else self._origin + first / 1e3,
        )


def with_valid_times(events: list[B]) -> tuple[list[B], NDArray[np.float64], NDArray[np.float64]]:
    """The events with valid times, and their beginnings and lengths in microseconds."""
    start, dur = floats([e.ts for e in events]), floats([e.dur for e in events])
    with np.errstate(invalid="ignore"):
        sound = (np.abs(start) < LATEST) & (dur >= 0) & (dur < LONGEST)
    if sound.all():
        return events, start, dur
    return [e for e, good in zip(events, sound.tolist(), strict=True) if good], start[sound], dur[sound]


def gather_columns(batches: Iterable[list[Event]]) -> ColumnsBuilder:
    """Build columns of all batches, without the garbage collector, which would visit hundreds of thousands of objects again and again."""
    gathering = ColumnsBuilder()
    with without_gc():
        for batch in batches:
            gathering.add(batch)
            batch.clear()  # now, not when the next one is there
    return gathering


def _codes(codes: Codes, keys: Iterable[Any], count: int) -> NDArray[np.int32]:
    return np.fromiter(map(codes.__getitem__, keys), dtype=np.int32, count=count)


def floats(values: Sequence[Number]) -> NDArray[np.float64]:
    """The values as an array; nan for what is missing or no number.

    >>> floats([1.5, None, "N/A", "2"]).tolist()
    [1.5, nan, nan, 2.0]
    """
    try:
        return np.array(values, dtype=np.float64)
    except ValueError:
        return np.array([_float(value) for value in values], dtype=np.float64)


def _float(value: Number) -> float:
    try:
        return np.nan if value is None else float(value)
    except ValueError:
        return np.nan


def integers(values: list[int | None]) -> Numbers:
    """The values as an array; -1 for what is missing or does not fit."""
    try:
        return np.array([-1 if value is None else value for value in values], dtype=np.int64)
    except OverflowError:
        return np.array([-1 if value is None or abs(value) >= 2**63 else value for value in values], dtype=np.int64)
