"""Measures how far the host is ahead of the device: delays from launch to work, and the length of the queue, per stream."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.event_kinds import DEVICE, Kinds, callers
from workbench.traces.analysis.intervals import Numbers, Spans, covered, union

POINTS = 600
"""Pieces of time that a curve of a queue has."""
BOUND = 0.5
"""Fraction of launches, and of time, from which on a stream is called bound by launching."""
NONE = "nothing is launched: the trace has no work of a device"
UNLINKED = "the file does not link work of the device to the calls that launch it (no correlation)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLaunches:
    """The launches into one stream; seconds."""

    stream: str
    launches: int
    call_seconds: float
    """Of the host, in all calls that launch."""
    work_seconds: float
    """Of the device, in all that they launch."""
    delay_median: float
    """From the end of the call to the start of the work; 0 where the work starts while the call still runs."""
    delay_p90: float
    delay_most: float
    short: int
    """Launches whose work takes no longer than the call that launches it (of a graph: all that the call launches)."""
    queue_mean: float
    """Launched and not yet started, over the time of the steps."""
    queue_most: int
    empty: float
    """Fraction 0..1 of the steps' time in which nothing waits in the queue."""

    @property
    def short_share(self) -> float:
        """Fraction 0..1 of the launches."""
        return self.short / self.launches


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches(display.Shown, JsonDataclass):
    """Launches by stream, that with most first. Get them from `trace.launches()`."""

    rows: tuple[StreamLaunches, ...]
    times: tuple[float, ...] = ()
    """Seconds from the first event on: where the pieces of the curves begin, and the end of the last."""
    queues: tuple[tuple[float, ...], ...] = ()
    """Mean length of the queue in each piece, a curve for each row."""
    notes: tuple[str, ...] = ()

    @property
    def bound(self) -> bool:
        """Is the device held up by launching? Most of what the busiest stream gets is shorter than its launch, and its queue mostly empty.

        A call that takes long because the queue is full, and the host has to wait, is no sign of that.
        """
        return bool(self.rows) and self.rows[0].short_share >= BOUND and self.rows[0].empty >= BOUND

    @property
    def table(self) -> display.Table:
        """One row per stream."""
        rows = [
            [
                row.stream,
                f"{row.launches:,}",
                units.seconds(row.call_seconds / row.launches),
                units.seconds(row.work_seconds / row.launches),
                units.percent(row.short_share),
                units.seconds(row.delay_median),
                units.seconds(row.delay_p90),
                units.count(row.queue_mean),
                f"{row.queue_most:,}",
                units.percent(row.empty),
            ]
            for row in self.rows
        ]
        verdict = ["most work is shorter than its launch, and the queue mostly empty: launching sets the pace"] if self.bound else []
        delays, queues = ("median delay", "90 %"), ("mean queue", "longest", "empty")
        columns = ("stream", "launches", "mean call", "mean work", "shorter than the call", *delays, *queues)
        return display.Table(columns=columns, rows=rows, title="Launches", note=display.notes([*verdict, *self.notes]) or None)

    to_frame = display.frame_method("rows", StreamLaunches)

    plot = display.plot_method("launches")

    def __repr__(self) -> str:
        return f"Launches({sum(row.launches for row in self.rows):,} into {len(self.rows)} streams)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """Each launch whose call and work are both in the file."""

    work: Numbers
    """Number of the event of the device."""
    call: Numbers
    """Number of the event of the host."""
    delay: Numbers
    """Nanoseconds."""


def pairs(columns: Columns, kinds: Kinds) -> Pairs:
    """Join calls and work."""
    work = np.flatnonzero(kinds.where(*DEVICE))
    call = callers(columns, kinds, work)
    work, call = work[call >= 0], call[call >= 0]
    return Pairs(work=work, call=call, delay=np.maximum(columns.start[work] - columns.end[call], 0))


def queue(called: Numbers, started: Numbers) -> tuple[Numbers, Numbers]:
    """Times at which the number of launches that wait changes, and the number from then on.

    A launch waits from the start of its call to the start of its work (so does HolisticTraceAnalysis count).

    >>> [one.tolist() for one in queue(np.array([0, 1, 5]), np.array([2, 3, 5]))]
    [[0, 1, 2, 3, 5], [1, 2, 1, 0, 0]]
    """
    times = np.concatenate([called, np.maximum(started, called)])
    step = np.repeat(np.array([1, -1]), [len(called), len(started)])
    order = np.argsort(times, kind="stable")
    length = np.cumsum(step[order])
    at, last = np.unique(times[order][::-1], return_index=True)
    return at, length[::-1][last]


def launches(columns: Columns, kinds: Kinds, spans: Spans, notes: Sequence[str] = ()) -> Launches:
    """Measure the launches of a whole file, and the queues over its steps."""
    if not kinds.device or kinds.unrecorded:
        return Launches(rows=(), notes=kinds.notes or (NONE,))
    joined = pairs(columns, kinds)
    if not len(joined.work):
        return Launches(rows=(), notes=(UNLINKED,))
    cover = union(spans)
    edges = np.linspace(cover[0, 0], cover[-1, 1], POINTS + 1).astype(np.int64) if len(cover) else np.zeros(POINTS + 1, dtype=np.int64)
    lanes, counts = np.unique(columns.lane[joined.work], return_counts=True)
    rows, curves = [], []
    for lane in lanes[np.argsort(-counts, kind="stable")].tolist():
        here = columns.lane[joined.work] == lane
        row, curve = _stream(columns, joined.work[here], joined.call[here], joined.delay[here], cover, edges)
        rows.append(row)
        curves.append(tuple(curve.tolist()))
    unlinked = int(kinds.where(*DEVICE).sum()) - len(joined.work)
    remarks = [f"{unlinked:,} pieces of the device's work have no call in the file: they are left out"] if unlinked else []
    times = tuple((edges / 1e9).tolist())
    return Launches(rows=tuple(rows), times=times, queues=tuple(curves), notes=(*remarks, *notes))


def _stream(
    columns: Columns, work: Numbers, call: Numbers, delay: Numbers, cover: Spans, edges: Numbers
) -> tuple[StreamLaunches, NDArray[np.float64]]:
    lengths = columns.lengths
    busy = lengths[work]
    calls, of = np.unique(call, return_inverse=True)  # a graph is launched by one call
    together = np.bincount(of, weights=busy).astype(np.int64)
    at, length = queue(columns.start[call], columns.start[work])
    waits = np.stack([at, np.append(at[1:], at[-1])], axis=1)
    inside = covered(cover, waits)
    whole = max(1, int((cover[:, 1] - cover[:, 0]).sum()))
    area = np.concatenate([[0], np.cumsum(length * (waits[:, 1] - waits[:, 0]))])
    place = np.searchsorted(at, edges, side="right")
    upto = area[np.maximum(place, 1) - 1] + np.where(place > 0, length[place - 1] * (edges - at[place - 1]), 0)
    curve = np.diff(upto) / np.maximum(np.diff(edges), 1)
    row = StreamLaunches(
        stream=columns.lanes[columns.lane[work[0]]].name,
        launches=len(work),
        call_seconds=float(lengths[calls].sum()) / 1e9,
        work_seconds=float(busy.sum()) / 1e9,
        delay_median=float(np.median(delay)) / 1e9,
        delay_p90=float(np.quantile(delay, 0.9)) / 1e9,
        delay_most=float(delay.max()) / 1e9,
        short=int((together <= lengths[calls])[of].sum()),
        queue_mean=float((length * inside).sum()) / whole,
        queue_most=int(length.max()),
        empty=1 - float(inside[length > 0].sum()) / whole,
    )
    return row, curve
