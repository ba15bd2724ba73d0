"""Launches of a trace: how many wait in the queue of each stream, over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import units
from workbench.plot.colors import PARTS, PHASES
from workbench.plot.stack import curves_over_time
from workbench.traces.launches import Launches
from workbench.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (PARTS["compute"], PARTS["communication"], PHASES["h2d"], PHASES["optimizer"], PHASES["data_wait"])
"""Of the streams with most launches; others are not drawn."""


def launches(result: Trace | Launches, ax: Axes | None = None) -> Axes:
    """The number of launches that wait for the device over time, a curve for each of the streams with most of them.

    Args:
        result: a trace, or its launches.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: nothing is launched.
    """
    found = result.launches() if isinstance(result, Trace) else result
    if not found.rows:
        raise ValueError(f"{found!r} has nothing to draw: {'; '.join(found.notes)}")
    labels = [f"{row.stream.strip()}: {units.count(row.queue_mean)} on average" for row in found.rows]
    ax, unit = curves_over_time(ax, found.times, list(zip(labels, found.queues, strict=False)), COLORS)
    ax.set_xlabel(f"time of the steps ({unit})")
    ax.set_ylabel("launches that wait")
    return ax
