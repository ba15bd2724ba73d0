"""Finds the critical path of each step: the chain of work, launches and waits that its length consists of."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.event_kinds import DEVICE, KINDS, Kinds, callers
from workbench.traces.analysis.idle import training_lane
from workbench.traces.analysis.intervals import Numbers, Spans, covered, union
from workbench.traces.analysis.nesting import Nesting, name_numbers, nest_events
from workbench.traces.analysis.operators import SHOWN, short_name
from workbench.traces.analysis.windows import Windows

WAYS = {
    "data_wait": "blocked in next(loader)",
    "h2d": "copies to the device",
    "compute": "kernels; on a CPU operators",
    "communication": "collectives, with the wait for other ranks that is in them",
    "copy": "copies and memsets on the device",
    "host": "operators and calls that launch, on the host of a device",
    "python": "no recorded event: Python, locks, I/O or sleep",
    "launch": "from the call that launches to the work, which nothing else holds up",
    "queue": "between two pieces of work of a stream, or of one that waits for another stream",
    "waking": "from the end of what the host waits for to the end of its call",
}
"""Part of the path → what that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPart:
    """One part of the path; mean seconds per step."""

    part: str
    seconds: float
    share: float
    """Fraction 0..1 of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPath:
    """All calls of an operator or kernel; seconds per step."""

    name: str
    part: str
    """"compute", "host", "communication", …"""
    seconds: float
    """On the path: what the step would be shorter by if it took no time, unless another chain is nearly as long."""
    own_seconds: float
    """In all of the step, without what it calls."""

    @property
    def on_path(self) -> float:
        """Fraction 0..1 of its time; the rest has something longer beside it, and making that faster gains nothing."""
        return min(1.0, self.seconds / self.own_seconds) if self.own_seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPath:
    """The path of one step."""

    step: int
    parts: Mapping[str, float]
    """Part → seconds; they add up to the step."""
    handovers: int
    """How often it goes from one thread or stream to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath(display.Shown, JsonDataclass):
    """What each step's length consists of, from its end back to its beginning. Get it from `trace.critical_path()`.

    Of all that a piece of work waited for, the path goes on with what came last: the piece of work before it in its stream, its launch, or
    what another stream did; for a host that waits, the work it waits for. So it says what was critical in this trace. It is no prediction:
    with less on the path another chain may become the longest.
    """

    parts: tuple[PathPart, ...]
    """Mean of the steps, the longest first."""
    rows: tuple[OnPath, ...]
    """Operators and kernels, those with most time on the path first."""
    steps: tuple[StepPath, ...]
    step_seconds: float
    device: str
    """Who computes: "device" or "cpu"."""
    notes: tuple[str, ...] = ()

    def share(self, part: str) -> float:
        """Fraction 0..1 of the step.

        Raises:
            ValueError: there is no such part.
        """
        if part not in WAYS:
            raise ValueError(f"no part {part!r}: there are {', '.join(WAYS)}")
        return next((row.share for row in self.parts if row.part == part), 0.0)

    @property
    def table(self) -> display.Table:
        """The parts, then the 15 operators and kernels with most time on the path."""
        rows = [[part.part, units.seconds(part.seconds), units.percent(part.share), WAYS[part.part]] for part in self.parts]
        for row in self.rows[:SHOWN]:
            share = row.seconds / self.step_seconds if self.step_seconds else None
            text = f"{row.part}; {units.percent(row.on_path)} of its {units.seconds(row.own_seconds)} is on the path"
            rows.append([short_name(row.name), units.seconds(row.seconds), units.percent(share), text])
        title = f"The critical path of the step of {units.seconds(self.step_seconds)}"
        return display.Table(
            columns=("on the path", "time", "share", "what"), rows=rows, title=title, note=display.notes(self.notes) or None
        )

    to_frame = display.frame_method("rows", OnPath, "on_path")

    plot = display.plot_method("critical_path")

    def __repr__(self) -> str:
        first = f", {self.parts[0].part} {units.percent(self.parts[0].share)}" if self.parts else ""
        return f"CriticalPath({units.seconds(self.step_seconds)}{first})"


HOST = ("operator", "optimizer", "backward", "data_wait", "host_communication", "collective_call", "runtime", "wait")
"""Kinds of the host that are on the path; what is in none of them is Python."""
PAUSE = 100_000
"""Nanoseconds: only a longer pause of a thread is taken for waiting for another one; shorter ones are what Python takes between operators,
in which another thread may end something by chance."""
PARTS = {
    "kernel": "compute",
    "communication": "communication",
    "h2d": "h2d",
    "copy": "copy",
    "data_wait": "data_wait",
    "host_communication": "communication",
}
"""Kind → part of the path; others of the host are "host", or "compute" where a CPU computes."""


@dataclass(slots=True)
class Thread:
    """Pieces of time in order, each in its innermost event; time outside of all events has no piece."""

    start: list[int]
    end: list[int]
    event: list[int]

    def before(self, time: int) -> int:
        """The piece that begins last before a time; -1 = none."""
        return bisect_left(self.start, time) - 1


def threads(columns: Columns, calls: Nesting, loader: NDArray[np.bool_]) -> dict[int, Thread]:
    """Each thread, by its number.

    Args:
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
    by_lane = {}
    for number in np.unique(lanes[kept]).tolist():
        here = kept & (lanes == number)
        inner = np.where(holder[then[here]] >= 0, holder[then[here]], then[here])
        by_lane[number] = Thread(times[here].tolist(), until[here].tolist(), calls.events[inner].tolist())
    return by_lane


@dataclass(slots=True)
class PathFinder:
    """The events of a trace, indexed to follow the critical path backwards."""

    lanes: dict[int, Thread]
    """Thread → what it is in."""
    kind: list[str]
    """Of each event."""
    start: list[int]
    end: list[int]
    lane: list[int]
    call: dict[int, int]
    """Work of a device → the call that launched it; -1 = not known."""
    ahead: dict[int, int]
    """Work → the piece of work before it in its stream; -1 = none."""
    done: list[int]
    """Work by its end."""
    ends: Numbers
    """Ends of these."""
    barriers: Numbers
    """When the host had a stream wait for another."""
    blocking: set[int]
    """Calls that copy, and return when that is over."""
    main: int
    """The thread that marks the steps."""
    cpu: bool

    def step(self, start: int, end: int) -> Iterator[tuple[int, str, int]]:
        """Event (-1: none), part and nanoseconds of each piece of the path, from the end on; together they are the step."""
        time, at, lane = end, -1, self.main
        place = int(np.searchsorted(self.ends, end, side="right")) - 1
        if place >= 0 and self.ends[place] == end:
            at = self.done[place]
        while time > start:
            if at >= 0:
                yield from self._piece(at, PARTS[self.kind[at]], max(start, self.start[at]), time)
                time = min(time, self.start[at])
                at, reached, part, lane = self._held_up(at, lane)
                yield from self._piece(-1, part, max(start, reached), time)
                time = min(time, reached)
            else:
                at, reached, part, event, lane = self._on_host(lane, time, start)
                yield from self._piece(event, part, max(start, reached), time)
                time = min(time, reached)

    @staticmethod
    def _piece(event: int, part: str, start: int, end: int) -> Iterator[tuple[int, str, int]]:
        if end > start:
            yield event, part, end - start

    def _held_up(self, work: int, lane: int) -> tuple[int, int, str, int]:
        """What a piece of work waited for last: the next piece of work (-1: the host), from when on, as what, and the host's thread."""
        begin, ahead, call = self.start[work], self.ahead[work], self.call[work]
        before = min(self.end[ahead], begin) if ahead >= 0 else -1
        waits = call >= 0 and (self.kind[call] == "wait" or call in self.blocking)  # it launches, and then waits for what it launched
        launched = min(self.start[call] if waits else self.end[call], begin) if call >= 0 else -1
        other = self._other_stream(work, max(before, launched))
        if other >= 0:
            return other, self.end[other], "queue", lane
        if ahead >= 0 and before >= launched:
            return ahead, before, "queue", lane
        if call >= 0:
            return -1, launched, "launch", self.lane[call]
        return -1, begin, "launch", lane

    def _other_stream(self, work: int, since: int) -> int:
        """Work of another stream that ended last before the beginning, and after `since`, if the host had this stream wait; else -1."""
        begin, ahead, call = self.start[work], self.ahead[work], self.call[work]
        if call < 0 or not len(self.barriers):
            return -1
        after = self.start[self.call[ahead]] if ahead >= 0 and self.call[ahead] >= 0 else -1
        low, high = np.searchsorted(self.barriers, [after, self.start[call]])
        place = int(np.searchsorted(self.ends, begin, side="right")) - 1
        if low >= high or place < 0 or self.ends[place] <= since or self.lane[self.done[place]] == self.lane[work]:
            return -1
        return self.done[place]

    def _on_host(self, lane: int, time: int, first: int) -> tuple[int, int, str, int, int]:
        """What a thread did up to a time: next work (-1: the host), from when on, as what, the event of that, and the next thread."""
        pieces = self.lanes.get(lane)
        at = pieces.before(time) if pieces else -1
        if pieces is None or at < 0 or pieces.end[at] < time:
            return self._paused(lane, time, pieces.end[at] if pieces and at >= 0 else -1, first)
        event, begin = pieces.event[at], pieces.start[at]
        if self.kind[event] == "wait" or event in self.blocking:
            place = int(np.searchsorted(self.ends, time, side="right")) - 1
            if place >= 0 and self.ends[place] > begin:
                return self.done[place], int(self.ends[place]), "waking", event, lane
        return -1, begin, self._part(self.kind[event]), event, lane

    def _part(self, kind: str) -> str:
        if kind == "collective_call" and self.cpu:
            return "communication"
        return PARTS.get(kind, "compute" if self.cpu else "host")

    def _paused(self, lane: int, time: int, own: int, first: int) -> tuple[int, int, str, int, int]:
        """A thread that is in nothing waited, maybe, for the thread that was in something last."""
        last, to = max(own, first), lane
        for other, pieces in self.lanes.items() if time - own > PAUSE else ():
            at = pieces.before(time) if other != lane else -1
            if at >= 0 and pieces.end[at] > time:  # it goes on: nothing waited for that
                at -= 1
            if at >= 0 and pieces.end[at] > last:
                last, to = pieces.end[at], other
        return -1, last, "python", -1, to


def path_finder(columns: Columns, kinds: Kinds) -> PathFinder:
    """Index the events of a trace."""
    calls = nest_events(columns, kinds.where(*HOST))
    lengths = columns.lengths
    work = np.flatnonzero(kinds.where(*DEVICE) & (lengths > 0))
    order = work[np.lexsort((columns.start[work], columns.lane[work]))]
    same = np.append(False, columns.lane[order[1:]] == columns.lane[order[:-1]]) if len(order) else np.empty(0, dtype=np.bool_)
    ahead = np.where(same, np.roll(order, 1), -1)
    call = callers(columns, kinds, work)
    done = work[np.argsort(columns.end[work], kind="stable")]
    waits = columns.where(lambda label: "StreamWaitEvent" in label.name)
    copies = columns.where(lambda label: "Memcpy" in label.name)
    over = (call >= 0) & (columns.end[work] <= columns.end[call]) & copies[call]
    return PathFinder(
        lanes=threads(columns, calls, kinds.where("data_wait")),
        kind=[KINDS[code] for code in kinds.codes.tolist()],
        start=columns.start.tolist(),
        end=columns.end.tolist(),
        lane=columns.lane.tolist(),
        call=dict(zip(work.tolist(), call.tolist(), strict=True)),
        ahead=dict(zip(order.tolist(), ahead.tolist(), strict=True)),
        done=done.tolist(),
        ends=columns.end[done],
        barriers=np.sort(columns.start[waits & kinds.where("runtime")]),
        blocking=set(call[over].tolist()),
        main=training_lane(columns, kinds),
        cpu=not kinds.device,
    )


def critical_path(columns: Columns, kinds: Kinds, windows: Windows, notes: Sequence[str] = ()) -> CriticalPath:
    """Walk each step back from its end."""
    ready = path_finder(columns, kinds)
    count = max(1, len(windows.spans))
    steps: list[StepPath] = []
    whole: dict[str, int] = defaultdict(int)
    taken: dict[tuple[int, str], int] = defaultdict(int)
    for number, (start, end) in zip(windows.numbers.tolist(), windows.spans.tolist(), strict=True):
        parts: dict[str, int] = defaultdict(int)
        turns, before = 0, None
        for event, part, length in ready.step(start, end):
            parts[part] += length
            if event >= 0 and part != "waking":
                taken[event, part] += length
                turns += before is not None and before != ready.lane[event]
                before = ready.lane[event]
        for part, length in parts.items():
            whole[part] += length
        steps.append(StepPath(step=number, parts={part: length / 1e9 for part, length in parts.items()}, handovers=turns))
    total = sum(whole.values())
    rows = sorted(whole.items(), key=lambda item: -item[1])
    remarks = list(windows.notes)
    if kinds.device and not kinds.unrecorded and all(call < 0 for call in ready.call.values()):
        remarks.append("the file does not link work of the device to the calls that launch it: the path does not come back to the host")
    return CriticalPath(
        parts=tuple(PathPart(part=part, seconds=length / 1e9 / count, share=length / total) for part, length in rows),
        rows=_named(columns, kinds, ready, taken, windows.spans),
        steps=tuple(steps),
        step_seconds=total / 1e9 / count,
        device="cpu" if ready.cpu else "device",
        notes=(*remarks, *notes),
    )


def _named(columns: Columns, kinds: Kinds, ready: PathFinder, taken: dict[tuple[int, str], int], spans: Spans) -> tuple[OnPath, ...]:
    """By name, with all the time that each has in the steps by itself."""
    names, codes = name_numbers(columns)
    cover, count = union(spans), max(1, len(spans))
    work = np.flatnonzero(kinds.where(*DEVICE))
    own = np.zeros(len(names), dtype=np.int64)
    np.add.at(own, codes[columns.label[work]], covered(cover, columns.spans[work]))
    for thread in ready.lanes.values():
        np.add.at(own, codes[columns.label[thread.event]], covered(cover, np.stack([thread.start, thread.end], axis=1)))
    sums: dict[tuple[int, str], int] = defaultdict(int)
    for (event, part), length in taken.items():
        sums[int(codes[columns.label[event]]), part] += length
    rows = (
        OnPath(name=names[code], part=part, seconds=length / 1e9 / count, own_seconds=float(own[code]) / 1e9 / count)
        for (code, part), length in sums.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.seconds))
