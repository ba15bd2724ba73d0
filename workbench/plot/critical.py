"""What holds a traced step back: how long each resource works, and how long it works alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import units
from workbench.plot.canvas import prepared
from workbench.plot.colors import PARTS
from workbench.plot.stack import PALE, WIDTH, ends, height, legend, rows, scale_of
from workbench.traces.critical import Critical
from workbench.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "data": PARTS["data_wait"],
    "host": PARTS["host"],
    "transfer": PARTS["transfer"],
    "device": PARTS["compute"],
    "communication": PARTS["communication"],
}
"""Resource → colour."""


def critical(result: Trace | Critical, ax: Axes | None = None) -> Axes:
    """A bar per resource, as long as it works in a mean step; its full part: nothing else works. The text is the step without it.

    Args:
        result: a trace, or its critical resource.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: no resource works within a step.
    """
    found = result.critical() if isinstance(result, Trace) else result
    if not found.rows:
        raise ValueError(f"{found!r} has nothing to draw: nothing works within a step; trace some with a schedule, wb.trace(step, loader)")
    labels = [one.name for one in found.rows]
    ax = prepared(ax, WIDTH, height(labels))
    scale, unit = scale_of(max(found.step_seconds, *(one.busy for one in found.rows)))
    colors = [COLORS[one.name] for one in found.rows]
    places = range(len(labels))
    alone = ax.barh(places, [one.alone * scale for one in found.rows], height=0.62, color=colors, label="alone")
    beside = ax.barh(
        places,
        [(one.busy - one.alone) * scale for one in found.rows],
        left=[one.alone * scale for one in found.rows],
        height=0.62,
        color=colors,
        alpha=PALE / 2,
        label="while another works too",
    )
    ends(ax, [one.busy * scale for one in found.rows], [f"step without it ≥ {units.seconds(one.ceiling)}" for one in found.rows])
    rows(ax, labels)
    ax.set_xlabel(f"at work in a mean step ({unit})")
    legend(ax, [alone, beside])
    return ax
