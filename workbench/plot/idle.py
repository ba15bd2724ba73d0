"""Idle time of a trace: what the host does while nothing is computed, and the pauses of each stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import units
from workbench.plot.colors import PARTS, PHASES
from workbench.plot.stack import Bar, bar_chart
from workbench.traces.idle import Idle
from workbench.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "data": PARTS["data_wait"],
    "waiting": PHASES["h2d"],
    "communication": PARTS["communication"],
    "launching": PARTS["optimizer"],
    "operators": PARTS["compute"],
    "python": PARTS["host"],
    "unrecorded": PARTS["stalls"],
    "something is computed": PHASES["other"],
}
"""Cause → colour; the last one is the rest of the step."""


def idle(result: Trace | Idle, ax: Axes | None = None) -> Axes:
    """The mean step in one bar: what the host does while nothing is computed, and the time in which something is.

    Args:
        result: a trace, or its idle time.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: there is no step with a length.
    """
    found = result.idle() if isinstance(result, Trace) else result
    if not found.step_seconds:
        raise ValueError(f"{found!r} has no step with a length to draw: trace some with a schedule, wb.trace(step, loader)")
    seconds = {one.cause: one.seconds for one in found.causes}
    used = {name: color for name, color in COLORS.items() if seconds.get(name)}
    rest = max(0.0, found.step_seconds - found.seconds)
    pieces = [*(seconds[name] for name in used), rest]
    end = f"idle {units.percent(found.share)} of {units.seconds(found.step_seconds)}"
    bars = [Bar(label="device" if found.who == "device" else "the thread\nthat trains", pieces=pieces, end=end)]
    last = "something is computed"
    return bar_chart(ax, bars, "mean traced step", {**used, last: COLORS[last]}, more=0.2)
