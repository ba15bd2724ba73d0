"""Pauses of a device's streams, each by itself, and why it pauses, by the rules of HolisticTraceAnalysis."""

from dataclasses import dataclass

import numpy as np

from workbench.traces.columns import Columns
from workbench.traces.kinds import DEVICE, Kinds
from workbench.traces.launching import callers

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
    """It had been launched, and started at once: within 30 µs, if not told otherwise."""
    other: float
    """It had been launched, and did not start: it waited for another stream, an event or memory; or the file does not link it."""

    @property
    def idle(self) -> float:
        """All three."""
        return self.host_wait + self.kernel_wait + self.other


def streams(columns: Columns, kinds: Kinds, gap: int) -> tuple[StreamIdle, ...]:
    """Of each stream; work that overlaps leaves no pause (there it counts as a negative one).

    Args:
        columns: the events.
        kinds: what they are.
        gap: nanoseconds; shorter pauses are `kernel_wait`.
    """
    work = np.flatnonzero(kinds.where(*DEVICE))
    call = callers(columns, kinds, work)
    found = []
    for lane in np.unique(columns.lane[work]).tolist():
        here = np.flatnonzero(columns.lane[work] == lane)
        here = here[np.argsort(columns.start[work[here]], kind="stable")]
        start, end = columns.start[work[here]], np.maximum.accumulate(columns.end[work[here]])
        pause = np.maximum(start[1:] - end[:-1], 0)
        asked = call[here[1:]]
        late = (asked >= 0) & (columns.start[asked] > end[:-1])
        brief = ~late & (pause < gap)
        sums = [float(pause[which].sum()) / 1e9 for which in (late, brief, ~late & ~brief)]
        whole = float(end[-1] - start[0]) / 1e9
        name = columns.lanes[lane].name
        found.append(StreamIdle(stream=name, seconds=whole, host_wait=sums[0], kernel_wait=sums[1], other=sums[2]))
    return tuple(sorted(found, key=lambda one: -one.seconds))
