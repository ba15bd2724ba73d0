"""The critical path of a traced step: what its length consists of, and which operators are on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import units
from workbench.plot.canvas import prepared
from workbench.plot.colors import PARTS, PHASES
from workbench.plot.stack import PALE, WIDTH, ends, height, legend, rows, scale_of, shortened
from workbench.traces.path import CriticalPath
from workbench.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 10
"""Operators that are drawn: those with most time on the path."""
COLORS = {
    "data_wait": PARTS["data_wait"],
    "h2d": PARTS["transfer"],
    "compute": PARTS["compute"],
    "communication": PARTS["communication"],
    "copy": PHASES["backward"],
    "host": PARTS["host"],
    "python": PARTS["stalls"],
    "launch": PARTS["optimizer"],
    "queue": PARTS["straggler"],
    "waking": PHASES["other"],
}
"""Part of the path → colour."""


def critical_path(result: Trace | CriticalPath, ax: Axes | None = None) -> Axes:
    """The mean step as one bar of parts; below it a bar per operator, as long as all its time, of which the full part is on the path.

    Args:
        result: a trace, or its critical path.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: there is no step with a length.
    """
    found = result.critical_path() if isinstance(result, Trace) else result
    if not found.parts:
        raise ValueError(f"{found!r} has no step with a length to draw: trace some with a schedule, wb.trace(step, loader)")
    most = found.rows[:MOST]
    labels = ["the step", *(_short(one.name) for one in most)]
    ax = prepared(ax, WIDTH, height(labels) * 0.75 + 0.3)
    scale, unit = scale_of(found.step_seconds)
    left, drawn = 0.0, {}
    for part in found.parts:
        drawn[part.part] = ax.barh([0], [part.seconds * scale], left=[left], height=0.62, color=COLORS[part.part], label=part.part)
        left += part.seconds * scale
    for place, one in enumerate(most, 1):
        ax.barh([place], [one.seconds * scale], height=0.62, color=COLORS[one.part])
        beside = max(0.0, one.own_seconds - one.seconds) * scale
        ax.barh([place], [beside], left=[one.seconds * scale], height=0.62, color=COLORS[one.part], alpha=PALE / 2)
    reaches = [left, *(max(one.own_seconds, one.seconds) * scale for one in most)]
    ends(ax, reaches, [units.seconds(found.step_seconds), *(f"{units.percent(one.on_path)} on the path" for one in most)])
    rows(ax, labels)
    ax.set_xlabel(f"mean traced step ({unit}); pale: beside the path")
    legend(ax, list(drawn.values()))
    return ax


def _short(name: str) -> str:
    return shortened(name.removeprefix("void "))
