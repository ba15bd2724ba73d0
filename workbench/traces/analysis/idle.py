"""Finds when the device (on a CPU: the training thread) has nothing to do, and what the host does meanwhile.

The pauses of single streams are classified by the rules of HolisticTraceAnalysis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.event_kinds import DEVICE, Kinds, callers
from workbench.traces.analysis.intervals import Numbers, Spans, covered, intersection, length, mean_seconds, subtract, union
from workbench.traces.analysis.operators import CALLERS, short_name
from workbench.traces.analysis.windows import Windows

GAP = 30e-6
"""Seconds: a shorter pause between two pieces of work of a stream, both launched in time, is what starting one takes (about 1 µs each on a
V100). Source: HolisticTraceAnalysis, `get_idle_time_breakdown(consecutive_kernel_delay=30)`: it says nanoseconds and compares with
microseconds; of 30 ns there would be none."""
WAITS = ("host_wait", "kernel_wait", "other")
"""Of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamIdle:
    """One stream, from the start of its first work to the end of its last; seconds between pieces of work."""

    stream: str
    seconds: float
    """From first to last."""
    host_wait: float
    """The next work had not been launched yet when the last one ended: the queue was empty."""
    kernel_wait: float
    """It had been launched, and started at once: within `gap`, 30 µs by default."""
    other: float
    """It had been launched, and did not start: it waited for another stream, an event or memory; or the file does not link it."""

    @property
    def idle(self) -> float:
        """The sum of all three."""
        return self.host_wait + self.kernel_wait + self.other


def streams(columns: Columns, kinds: Kinds, gap: int) -> tuple[StreamIdle, ...]:
    """The pauses of each stream; work that overlaps leaves none (HolisticTraceAnalysis counts a negative one).

    A pause of less than `gap` nanoseconds is `kernel_wait`.
    """
    work = np.flatnonzero(kinds.where(*DEVICE))
    call = callers(columns, kinds, work)
    rows = []
    for lane in np.unique(columns.lane[work]).tolist():
        here = np.flatnonzero(columns.lane[work] == lane)
        here = here[np.argsort(columns.start[work[here]], kind="stable")]
        start, end = columns.start[work[here]], np.maximum.accumulate(columns.end[work[here]])
        pause = np.maximum(start[1:] - end[:-1], 0)
        launch = call[here[1:]]
        late = (launch >= 0) & (columns.start[launch] > end[:-1])
        brief = ~late & (pause < gap)
        sums = [float(pause[which].sum()) / 1e9 for which in (late, brief, ~late & ~brief)]
        whole = float(end[-1] - start[0]) / 1e9
        name = columns.lanes[lane].name
        rows.append(StreamIdle(stream=name, seconds=whole, host_wait=sums[0], kernel_wait=sums[1], other=sums[2]))
    return tuple(sorted(rows, key=lambda row: -row.seconds))


LONGEST, SHOWN = 12, 5
"""Gaps that are kept, and that a table has."""
CAUSES = {
    "data": "blocked in next(loader)",
    "waiting": "the host waits for the device (it synchronises), and only then launches on",
    "communication": "a collective runs, or is waited for",
    "launching": "the host is in a call that launches",
    "operators": "the host is in an operator between launches",
    "python": "the host is in a recorded function or range of Python, and in no operator",
    "unrecorded": "no event at all: Python, locks, I/O or sleep",
}
"""Cause → what the host does while the device idles. Each moment counts for the first that applies."""
ON_DEVICE = (
    ("data", ("data_wait",)),
    ("waiting", ("wait",)),
    ("launching", ("runtime",)),
    ("operators", ("operator", "backward", "optimizer", "collective_call", "host_communication")),
    ("python", ("range",)),
)
ON_CPU = (("data", ("data_wait",)), ("communication", ("host_communication", "collective_call")), ("python", ("range",)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """An activity of the host while the device idles; mean seconds per step."""

    cause: str
    seconds: float
    share: float
    """Fraction 0..1 of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One pause of the device."""

    start: float
    """Seconds from the first event of the file on."""
    seconds: float
    cause: str
    """What takes most of it."""
    before: str
    after: str
    """Names of what ends where it begins, and of what begins where it ends."""
    inside: str
    """Name of what the host is in halfway, the innermost of the thread that trains; empty where nothing was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle(display.Shown, JsonDataclass):
    """The time in which nothing is computed. Get it from `trace.idle()`."""

    who: str
    """Who idles: "device", or the name of the thread that trains."""
    step_seconds: float
    causes: tuple[Cause, ...]
    """They exclude each other and add up to all idle time of the steps."""
    gaps: tuple[Gap, ...]
    """The longest."""
    streams: tuple[StreamIdle, ...] = ()
    """Of a device, each by itself; of a whole file."""
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Mean idle seconds per step."""
        return sum(cause.seconds for cause in self.causes)

    @property
    def share(self) -> float:
        """Fraction 0..1 of the step."""
        return self.seconds / self.step_seconds if self.step_seconds else float("nan")

    @property
    def table(self) -> display.Table:
        """Causes, then streams, then the longest gaps."""
        rows: list[list[object]] = [
            [cause.cause, units.seconds(cause.seconds), units.percent(cause.share), CAUSES[cause.cause]] for cause in self.causes
        ]
        for stream in self.streams:
            kinds = ", ".join(f"{name.replace('_', ' ')} {units.seconds(getattr(stream, name))}" for name in WAITS)
            rows.append(
                [stream.stream, units.seconds(stream.idle), units.percent(stream.idle / stream.seconds if stream.seconds else None), kinds]
            )
        for gap in self.gaps[:SHOWN]:
            inside = f" in {short_name(gap.inside)}" if gap.inside else ""
            around = f"{gap.cause}{inside}; {short_name(gap.before)} → {short_name(gap.after)}"
            rows.append([f"gap at {units.seconds(gap.start)}", units.seconds(gap.seconds), units.MISSING, around])
        title = f"{self.who} idles {units.percent(self.share)} of the step"
        note = display.notes(["causes per step, streams over the whole trace", *self.notes] if self.streams else self.notes) or None
        return display.Table(columns=("what", "time", "share", "meanwhile"), rows=rows, title=title, note=note)

    to_frame = display.frame_method("causes", Cause)

    plot = display.plot_method("idle")

    def __repr__(self) -> str:
        return f"Idle({self.who!r}, {units.percent(self.share)} of the step)"


def idle(columns: Columns, kinds: Kinds, windows: Windows, notes: Sequence[str] = (), gap: float = GAP) -> Idle:
    """Find the pauses within the steps, and what the host does meanwhile.

    On a device a pause is where no stream works. On a CPU it is where the thread that marks the steps is in no operator, node of the
    backward graph or optimizer's step; meanwhile other threads may well compute, such as autograd's.

    Raises:
        ValueError: gap is not a number of seconds.
    """
    if not isinstance(gap, Real) or not 0 <= gap < float("inf"):
        raise ValueError(f"gap={gap!r}: seconds are allowed, from 0 on; 30e-6 is what HolisticTraceAnalysis has in effect")
    spans = windows.spans
    if kinds.unrecorded:
        return Idle(who="device", step_seconds=float("nan"), causes=(), gaps=(), notes=(*windows.notes, *notes))
    cover, count = union(spans), max(1, len(spans))
    lane = training_lane(columns, kinds)
    who, busy, order = (
        ("device", np.flatnonzero(kinds.where(*DEVICE)), ON_DEVICE)
        if kinds.device
        else (columns.lanes[lane].name, np.flatnonzero(kinds.where("operator", "backward", "optimizer") & (columns.lane == lane)), ON_CPU)
    )
    pauses = subtract(cover, union(columns.spans[busy]))
    if not kinds.device:  # what the loader does in operators is waiting for it
        pauses = union(pauses, intersection(_of(columns, kinds, lane, ("data_wait",)), cover))
    left, causes, layers = pauses, [], {}
    for cause, layer in order:
        meanwhile = kinds.cover(*layer) if kinds.device else _of(columns, kinds, lane, layer)
        layers[cause] = intersection(left, meanwhile)
        left = subtract(left, meanwhile)
    layers["unrecorded"] = left
    whole = length(spans) or 1
    for cause, times in layers.items():
        taken = length(times)
        causes.append(Cause(cause=cause, seconds=taken / 1e9 / count, share=taken / whole))
    recorded = any(label.category == "python_function" for label in columns.labels)
    python_notes = [] if recorded else ["what Python does meanwhile was not recorded: profile with_stack=True"]
    return Idle(
        who=who,
        step_seconds=mean_seconds(spans),
        causes=tuple(part for part in causes if part.seconds),
        gaps=_gaps(columns, busy, np.flatnonzero(kinds.where(*CALLERS) & (columns.lane == lane)), pauses, layers),
        streams=streams(columns, kinds, round(gap * 1e9)) if kinds.device else (),
        notes=(*windows.notes, *python_notes, *notes),
    )


def training_lane(columns: Columns, kinds: Kinds) -> int:
    """Number of the lane that trains: it marks the steps or, without marks, calls most operators."""
    for chosen in (kinds.where("step"), kinds.where("operator"), np.ones(len(columns), dtype=np.bool_)):
        if chosen.any():
            return int(np.bincount(columns.lane[chosen]).argmax())
    return 0


def _of(columns: Columns, kinds: Kinds, lane: int, layer: tuple[str, ...]) -> Spans:
    """The time in which a thread is in an event of some kinds; collectives that the CPU runs have threads of their own."""
    of = kinds.where(*layer)
    if "host_communication" not in layer:
        of &= columns.lane == lane
    return union(columns.spans[of])


def _gaps(columns: Columns, busy: Numbers, host: Numbers, pauses: Spans, layers: dict[str, Spans]) -> tuple[Gap, ...]:
    """The longest pauses, with the names around them."""
    lengths = pauses[:, 1] - pauses[:, 0]
    longest = np.argsort(-lengths, kind="stable")[:LONGEST]
    chosen = pauses[longest]
    shares = np.array([covered(times, chosen) for times in layers.values()])
    ends, starts = busy[np.argsort(columns.end[busy], kind="stable")], busy[np.argsort(columns.start[busy], kind="stable")]
    before = np.searchsorted(columns.end[ends], chosen[:, 0], side="right") - 1
    after = np.searchsorted(columns.start[starts], chosen[:, 1], side="left")
    return tuple(
        Gap(
            start=float(start) / 1e9,
            seconds=float(end - start) / 1e9,
            cause=list(layers)[int(shares[:, i].argmax())],
            before=_name(columns, ends, int(before[i])),
            after=_name(columns, starts, int(after[i])),
            inside=_inside(columns, host, (start + end) // 2),
        )
        for i, (start, end) in enumerate(chosen.tolist())
    )


def _name(columns: Columns, events: Numbers, place: int) -> str:
    return columns.name(events[place]) if 0 <= place < len(events) else "the edge of the trace"


def _inside(columns: Columns, host: Numbers, time: int) -> str:
    """The event of the host that began last of those around a time."""
    around = host[(columns.start[host] <= time) & (columns.end[host] > time)]
    return columns.name(around[columns.start[around].argmax()]) if len(around) else ""
