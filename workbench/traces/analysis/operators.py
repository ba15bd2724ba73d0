"""Ranks operators or kernels of a trace, or of any part of it: calls, own time, time with what they call, input shapes."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.event_kinds import DEVICE, Kinds
from workbench.traces.analysis.intervals import Numbers, Spans, inside
from workbench.traces.analysis.nesting import name_numbers, nest_events

Which = Literal["operator", "kernel"]
SHOWN = 15
"""Rows of a table; a frame has all."""
LONGEST = 60
"""Characters of a name in a table."""
CALLERS = ("operator", "optimizer", "backward", "data_wait", "range", "host_communication", "collective_call", "runtime", "wait")
"""Kinds on the host that take time of their own out of what calls them."""
HOST = ("operator", "host_communication", "collective_call", "optimizer", "backward")
"""Kinds that count as operators of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """All calls of one operator or kernel."""

    name: str
    shapes: str
    """Of the inputs, as the file writes them; empty where they were not recorded, or rows are not by shape."""
    count: int
    self_seconds: float
    """Without what it calls."""
    total_seconds: float
    """With it; calls inside a call of the same name count once in their caller and once by themselves."""
    device_seconds: float
    """Work of a device that it launched; its own time for a kernel."""
    share: float
    """Fraction 0..1 of all `self_seconds` (of all `device_seconds` for kernels)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators(display.Shown, JsonDataclass):
    """Operators or kernels, those with the most self time first. Get them from `trace.ops()`."""

    rows: tuple[Operator, ...]
    which: Which
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> display.Table:
        """The first 15."""
        shaped, on_device = any(row.shapes for row in self.rows), any(row.device_seconds for row in self.rows)
        cells = [
            [
                short_name(row.name),
                *([short_name(row.shapes)] if shaped else []),
                f"{row.count:,}",
                units.seconds(row.self_seconds),
                units.percent(row.share),
                units.seconds(row.total_seconds),
                *([units.seconds(row.device_seconds)] if on_device else []),
            ]
            for row in self.rows[:SHOWN]
        ]
        more = [f"{len(self.rows) - SHOWN} more in to_frame()"] if len(self.rows) > SHOWN else []
        note = display.notes([*more, *self.notes]) or None
        columns = (self.which, *(["shapes"] if shaped else []), "calls", "self", "share", "total", *(["device"] if on_device else []))
        title = f"{self.which.capitalize()}s by self time: sums, not per step; share: of the self time of all {self.which}s"
        return display.Table(columns=columns, rows=cells, title=title, note=note)

    to_frame = display.frame_method("rows", Operator)

    def __repr__(self) -> str:
        return f"Operators({len(self.rows)} {self.which}s)"


def short_name(name: str) -> str:
    """A name that fits a table: on one line, and shortened in the middle."""
    name = " ".join(name.split())
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 16]}…{name[-15:]}"


def ops(columns: Columns, kinds: Kinds, which: Which, by_shape: bool, steps: Spans | None = None) -> Operators:
    """Operators (`cpu_op` and the like), or kernels and copies, of a whole file; or with `steps` those that begin in one of them.

    Raises:
        ValueError: `which` has another value.
    """
    if which not in ("operator", "kernel"):
        raise ValueError(f"ops({which!r}): allowed are 'operator' (of the host) and 'kernel' (of the device)")
    chosen = np.flatnonzero(kinds.where(*(DEVICE if which == "kernel" else HOST)))
    if steps is not None:
        chosen = chosen[inside(columns.start[chosen] if which == "operator" else columns.end[chosen] - 1, steps)]
    lengths = columns.lengths
    own = lengths[chosen] if which == "kernel" else self_times(columns, kinds)[chosen]
    device = lengths[chosen] if which == "kernel" else _launched(columns, kinds)[chosen]
    shape = columns.shape[chosen] if by_shape else np.zeros(len(chosen), dtype=np.int32)
    names, codes = name_numbers(columns)
    name = codes[columns.label[chosen]]
    keys, at = np.unique(name * len(columns.shapes) + shape, return_inverse=True)

    def summed(values: Numbers) -> NDArray[np.float64]:
        return np.bincount(at, weights=values, minlength=len(keys)) / 1e9

    counts, selfs, totals, devices = np.bincount(at, minlength=len(keys)), summed(own), summed(lengths[chosen]), summed(device)
    whole = selfs.sum() or 1.0
    rows = tuple(
        Operator(
            name=names[keys[i] // len(columns.shapes)],
            shapes=columns.shapes[keys[i] % len(columns.shapes)],
            count=int(counts[i]),
            self_seconds=float(selfs[i]),
            total_seconds=float(totals[i]),
            device_seconds=float(devices[i]),
            share=float(selfs[i] / whole),
        )
        for i in np.argsort(-selfs, kind="stable")
    )
    notes = []
    if not rows:
        notes.append("the trace has no work of a device" if which == "kernel" else "the trace has no operators of the host")
    if by_shape and rows and not any(row.shapes for row in rows):
        notes.append("shapes were not recorded: profile with record_shapes=True")
    return Operators(rows=rows, which=which, notes=tuple(notes))


def self_times(columns: Columns, kinds: Kinds) -> Numbers:
    """Nanoseconds of each event of the host less those of the events directly inside it, on its own thread."""
    calls = nest_events(columns, kinds.where(*CALLERS))
    inner = calls.parent >= 0
    events, callers = calls.events[inner], calls.events[calls.parent[inner]]
    own = columns.lengths
    lost = np.zeros(len(own), dtype=np.int64)
    np.add.at(lost, callers, np.minimum(columns.end[events], columns.end[callers]) - columns.start[events])
    result: Numbers = np.maximum(own - lost, 0)
    return result


def _launched(columns: Columns, kinds: Kinds) -> Numbers:
    """Nanoseconds of the device's work that each operator launched, by "External id"."""
    launched = np.zeros(len(columns), dtype=np.int64)
    work = kinds.where(*DEVICE) & (columns.external >= 0)
    callers = np.flatnonzero(kinds.where("operator") & (columns.external >= 0))
    if not work.any() or not len(callers):
        return launched
    keys, at = np.unique(columns.external[work], return_inverse=True)
    sums = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sums, at, columns.lengths[work])
    place = np.minimum(np.searchsorted(keys, columns.external[callers]), len(keys) - 1)
    launched[callers] = np.where(keys[place] == columns.external[callers], sums[place], 0)
    return launched


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """All calls of one name that begin in a part of a trace."""

    name: str
    count: int
    self_seconds: float
    """Without what it calls."""
    total_seconds: float
    """With it."""
    share: float
    """Fraction 0..1 of all `self_seconds` in that part."""


class Ranking:
    """Ranks operators or kernels of any part of a trace; their own times are computed once."""

    def __init__(self, columns: Columns, kinds: Kinds) -> None:
        self._start, self._kinds = columns.start, kinds
        self._names, codes = name_numbers(columns)
        self._name = codes[columns.label]
        self._length = columns.lengths
        self._own = np.where(kinds.where(*DEVICE), self._length, self_times(columns, kinds))

    def own(self, event: int) -> float:
        """Seconds of an event without what it calls."""
        return float(self._own[event]) / 1e9

    def within(self, start: float, end: float, which: Which = "operator") -> tuple[Ranked, ...]:
        """Rank the calls that begin in a part of the time, in nanoseconds from the first event on.

        Args:
            start: nanoseconds at which the part begins.
            end: nanoseconds at which it ends.
            which: "operator" (of the host) or "kernel" (of the device, with its copies).
        """
        chosen = self._kinds.where(*(DEVICE if which == "kernel" else HOST)) & (self._start >= start) & (self._start < end)
        name, size = self._name[chosen], len(self._names)
        counts = np.bincount(name, minlength=size)
        own = np.bincount(name, weights=self._own[chosen], minlength=size) / 1e9
        total = np.bincount(name, weights=self._length[chosen], minlength=size) / 1e9
        whole = own.sum() or 1.0
        return tuple(
            Ranked(
                name=self._names[i],
                count=int(counts[i]),
                self_seconds=float(own[i]),
                total_seconds=float(total[i]),
                share=float(own[i] / whole),
            )
            for i in np.argsort(-own, kind="stable").tolist()
            if counts[i]
        )
