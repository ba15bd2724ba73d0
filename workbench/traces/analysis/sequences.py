"""Finds sequences of kernels (on a CPU: of operators) that come again and again, and the gaps inside them."""

import dataclasses
import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.event_kinds import DEVICE, Kinds, callers, calling_places
from workbench.traces.analysis.intervals import Numbers, Spans
from workbench.traces.analysis.nesting import Nesting, name_numbers, nest_events
from workbench.traces.analysis.operators import SHOWN, short_name

MIN_OCCURRENCES = 2
"""Times that a sequence has to occur."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One sequence of names, wherever it occurs."""

    names: tuple[str, ...]
    """In the order of their beginnings."""
    count: int
    seconds: float
    """Of the kernels or operators themselves, in all occurrences."""
    gaps: float
    """Seconds between them in which none of them runs: what starting them as one saves at most."""
    host_seconds: float | None
    """Of the host: of the operators whose sequence it is, or of the calls that launch it; None on a CPU, where that is `seconds`."""
    share: float
    """Fraction 0..1 of the time of all kernels (operators) that were looked at."""

    @property
    def ceiling(self) -> float:
        """Fraction 0..1 of its time that its gaps are."""
        return self.gaps / (self.seconds + self.gaps) if self.seconds + self.gaps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences(display.Shown, JsonDataclass):
    """Frequent sequences, those that take longest first. Get them from `trace.sequences()`.

    Gaps are a ceiling of what launching a sequence as one (a CUDA graph, `torch.compile`) saves, not a prediction: some gaps exist because
    the host is late. Fused kernels save more than gaps, since what one writes the next need not read; how much, no trace tells.
    """

    rows: tuple[Pattern, ...]
    operator: str | None
    """Whose sequences they are; None: of consecutive ones, wherever they come from."""
    device: str
    """Of what: "device" or "cpu"."""
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> display.Table:
        """The first 15."""
        what = "kernels" if self.device == "device" else "operators"
        rows = [
            [
                " › ".join(short_kernel_name(name) for name in fold_repeats(pattern.names)),
                f"{pattern.count:,}",
                units.seconds(pattern.seconds),
                units.percent(pattern.share),
                units.seconds(pattern.gaps),
                *([units.seconds(pattern.host_seconds)] if self.device == "device" else []),
            ]
            for pattern in self.rows[:SHOWN]
        ]
        title = f"{what.capitalize()} in sequence{f' of {self.operator}' if self.operator else ''}"
        more = [f"{len(self.rows) - SHOWN} more in to_frame()"] if len(self.rows) > SHOWN else []
        columns = (what, "times", "time", "share", "gaps between", *(["on the host"] if self.device == "device" else []))
        return display.Table(columns=columns, rows=rows, title=title, note=display.notes([*more, *self.notes]) or None)

    def to_frame(self) -> Any:
        """A DataFrame with one row per sequence; seconds."""
        rows = [{**dataclasses.asdict(row), "names": " › ".join(row.names), "ceiling": row.ceiling} for row in self.rows]
        return display.frame(rows, columns=[*(field.name for field in dataclasses.fields(Pattern)), "ceiling"])

    plot = display.plot_method("sequences")

    def __repr__(self) -> str:
        return f"Sequences({len(self.rows)} of {self.operator or 'consecutive ones'})"


def short_kernel_name(name: str) -> str:
    """The essential part of a kernel's name: without template arguments, parameters and namespaces."""
    times, _, rest = name.partition(" × ")
    if rest and times.isdigit():
        return f"{times} × {short_kernel_name(rest)}"
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    outer, _, inner = plain.partition("<")
    if outer.endswith("::Kernel") and inner:  # CUTLASS: what it is says its first argument
        outer = inner
    outer = re.split(r"[<(>,]", outer)[0]
    return short_name(outer.rpartition("::")[2] or outer)


def fold_repeats(names: Sequence[str]) -> list[str]:
    """The names, each run of equal names written as `n × name`."""
    runs: list[tuple[int, str]] = []
    for name in names:
        if runs and runs[-1][1] == name:
            runs[-1] = (runs[-1][0] + 1, name)
        else:
            runs.append((1, name))
    return [name if times == 1 else f"{times} × {name}" for times, name in runs]


MAX_SEQUENCES = 100
"""Sequences that are kept."""
NEAR = 8
"""Names that an error offers."""


def sequences(columns: Columns, kinds: Kinds, steps: Spans, operator: str | None, length: int) -> Sequences:
    """Find the sequences of a whole file.

    Without an operator: consecutive work of one stream (on a CPU consecutive outermost operators of one thread), exactly `length` of them,
    within one step. What takes longest is taken first, and no kernel is counted in two sequences, so that times and gaps add up. With an
    operator: all that each of its calls launches (on a CPU: the operators that it calls itself), if that is at least `length`.

    Raises:
        ValueError: the length is none, or no operator has that in its name.
    """
    if not isinstance(length, Integral) or length < 2:
        raise ValueError(f"sequences(length={length!r}): a whole number is allowed, from 2 on; try length=3")
    if operator is None:
        return _consecutive(columns, kinds, steps, length)
    if not isinstance(operator, str) or not operator:
        raise ValueError(
            f"sequences({operator!r}): a name or a part of one is allowed; try 'aten::linear', or None for all that is consecutive"
        )
    return _of_calls(columns, kinds, operator, length)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """Events that may be in a sequence, one after the other."""

    events: Numbers
    name: Numbers
    """Number of each one's name."""
    names: list[str]
    group: Numbers
    """Sequences do not go from one group into the next: another stream or thread, another step."""
    host: Numbers
    """Nanoseconds of the call that launched each."""


def _row(columns: Columns, kinds: Kinds, steps: Spans) -> _Row:
    names, codes = name_numbers(columns)
    if kinds.device:
        events = np.flatnonzero(kinds.where(*DEVICE))
        call = callers(columns, kinds, events)
        host = np.where(call >= 0, columns.lengths[call], 0)
    else:
        calls = nest_events(columns, kinds.where("operator"))
        events = calls.events[calls.parent < 0]
        host = np.zeros(len(events), dtype=np.int64)
    order = np.lexsort((columns.start[events], columns.lane[events]))
    events, host = events[order], host[order]
    step = np.searchsorted(steps[:, 0], columns.start[events], side="right")
    group = columns.lane[events] * (len(steps) + 1) + step
    return _Row(events=events, name=codes[columns.label[events]], names=names, group=group, host=host)


def _consecutive(columns: Columns, kinds: Kinds, steps: Spans, length: int) -> Sequences:
    row = _row(columns, kinds, steps)
    size = len(row.events) - length + 1
    device = "device" if kinds.device else "cpu"
    if size < MIN_OCCURRENCES:
        return Sequences(rows=(), operator=None, device=device, notes=("the trace has too little for a sequence",))
    start, end = columns.start[row.events], columns.end[row.events]
    at = row.name[:size]
    for i in range(1, length):
        _, at = np.unique(at * len(row.names) + row.name[i : size + i], return_inverse=True)
    whole = row.group[:size] == row.group[length - 1 :]
    took = np.concatenate([[0], np.cumsum(end - start)])
    seconds = took[length:] - took[:-length]
    used = np.zeros(len(row.events), dtype=np.bool_)
    rows = []
    for places in _greedy(at, whole, seconds, used, length):
        members = places[:, None] + np.arange(length)
        gaps = start[members[:, 1:]] - np.maximum.accumulate(end[members], axis=1)[:, :-1]
        rows.append(
            Pattern(
                names=tuple(row.names[code] for code in row.name[members[0]].tolist()),
                count=len(places),
                seconds=float(seconds[places].sum()) / 1e9,
                gaps=float(np.maximum(gaps, 0).sum()) / 1e9,
                host_seconds=float(row.host[members].sum()) / 1e9 if kinds.device else None,
                share=float(seconds[places].sum()) / max(1, int(took[-1])),
            )
        )
    notes = ("gaps are a ceiling of what starting them as one saves, not a forecast",) if rows else (f"no {length} in a row come twice",)
    return Sequences(rows=tuple(rows), operator=None, device=device, notes=notes)


def _greedy(at: Numbers, whole: NDArray[np.bool_], seconds: Numbers, used: NDArray[np.bool_], length: int) -> list[Numbers]:
    """Places of the sequences: of what is not used yet (`used`, of each event, is changed), that which takes longest, again and again.

    `at` is the number of the sequence that begins at each place, `whole`: does it lie in one group?
    """
    order = np.argsort(at, kind="stable")
    order = order[whole[order]]
    borders = np.flatnonzero(np.diff(at[order])) + 1
    groups = [places for places in np.split(order, borders) if len(places) >= MIN_OCCURRENCES]
    waiting = [(-int(seconds[places].sum()), number) for number, places in enumerate(groups)]
    heapq.heapify(waiting)
    chosen: list[Numbers] = []
    while waiting and len(chosen) < MAX_SEQUENCES:
        _, number = heapq.heappop(waiting)
        left = _apart(groups[number], used, length)
        if len(left) < MIN_OCCURRENCES:
            continue
        key = (-int(seconds[left].sum()), number)
        groups[number] = left
        if waiting and key > waiting[0]:  # others have taken some of it: it may not be the longest any more
            heapq.heappush(waiting, key)
            continue
        chosen.append(left)
        used[(left[:, None] + np.arange(length)).ravel()] = True
    return chosen


def _apart(places: Numbers, used: NDArray[np.bool_], length: int) -> Numbers:
    """Occurrences that are not used yet and do not overlap, from the first on."""
    free: Numbers = places[~used[places[:, None] + np.arange(length)].any(axis=1)]
    if not (np.diff(free) < length).any():
        return free
    kept, until = [], -1
    for place in free.tolist():
        if place >= until:
            kept.append(place)
            until = place + length
    return np.array(kept, dtype=np.int64)


def _of_calls(columns: Columns, kinds: Kinds, operator: str, length: int) -> Sequences:
    names, codes = name_numbers(columns)
    calls = nest_events(columns, kinds.where("operator", "backward", "optimizer", "collective_call", "runtime", "wait"))
    has = np.array([operator in name for name in names] or [False])[codes[columns.label[calls.events]]]
    allowed = ~kinds.where("runtime", "wait")[calls.events]
    matching = has & allowed
    if not matching.any():
        near = _nearest(operator, {names[code] for code in codes[columns.label[calls.events[allowed]]].tolist()})
        hint = f"the nearest that there are: {', '.join(near)}" if near else "the trace has none at all"
        raise ValueError(f"sequences({operator!r}): no operator has that in its name; {hint}")
    above = np.where(calls.parent >= 0, calls.nearest(matching)[calls.parent], -1)
    roots = matching & (above < 0)
    members = (
        _launched(columns, kinds, calls, roots)
        if kinds.device
        else _split(np.where((calls.parent >= 0) & roots[np.maximum(calls.parent, 0)], calls.parent, -1), calls.events)
    )
    sums_of: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    whole = 0
    for root, events in members.items():
        events = events[np.argsort(columns.start[events], kind="stable")]
        start, end = columns.start[events], columns.end[events]
        taken = int((end - start).sum())
        whole += taken
        if len(events) < length:
            continue
        sums = sums_of[int(codes[columns.label[calls.events[root]]]), *codes[columns.label[events]].tolist()]
        between = int(np.maximum(start[1:] - np.maximum.accumulate(end)[:-1], 0).sum())
        for i, value in enumerate((1, taken, between, int(calls.spans[root, 1] - calls.spans[root, 0]))):
            sums[i] += value
    rows = [
        Pattern(
            names=tuple(names[code] for code in key),
            count=count,
            seconds=taken / 1e9,
            gaps=between / 1e9,
            host_seconds=around / 1e9 if kinds.device else None,
            share=taken / max(1, whole),
        )
        for key, (count, taken, between, around) in sums_of.items()
    ]
    what = "launches" if kinds.device else "calls"
    note = "the first is the operator itself; gaps are a ceiling of what starting the others as one saves, not a forecast"
    notes = (note,) if rows else (f"none of its calls {what} {length} or more",)
    rows.sort(key=lambda row: (-row.seconds, row.names))
    return Sequences(rows=tuple(rows), operator=operator, device="device" if kinds.device else "cpu", notes=notes)


def _nearest(searched: str, names: Iterable[str]) -> list[str]:
    """The most similar names first, whatever their case."""
    match = SequenceMatcher(None, "", searched.lower())

    def unlike(name: str) -> tuple[float, str]:
        match.set_seq1(name.lower())
        return -match.ratio(), name

    return sorted(names, key=unlike)[:NEAR]


def _launched(columns: Columns, kinds: Kinds, calls: Nesting, roots: NDArray[np.bool_]) -> dict[int, Numbers]:
    """Place of each root → the work that it launched, itself or by what it calls."""
    work = np.flatnonzero(kinds.where(*DEVICE))
    at = calling_places(columns, kinds, calls, work)
    return _split(np.where(at >= 0, calls.nearest(roots)[np.maximum(at, 0)], -1), work)


def _split(owner: Numbers, events: Numbers) -> dict[int, Numbers]:
    order = np.argsort(owner, kind="stable")
    order = order[owner[order] >= 0]
    keys, first = np.unique(owner[order], return_index=True)
    return dict(zip(keys.tolist(), np.split(events[order], first[1:]), strict=True)) if len(keys) else {}
