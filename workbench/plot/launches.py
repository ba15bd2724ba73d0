"""Launches of a trace: how many wait in the queue of each stream, over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench import units
from workbench.plot.canvas import prepared
from workbench.plot.colors import PARTS, PHASES
from workbench.plot.stack import WIDTH, legend, scale_of
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
    ax = prepared(ax, WIDTH, 3.2)
    times = np.array(found.times)
    scale, unit = scale_of(float(times[-1] - times[0]) or 1.0)
    places = (times - times[0]) * scale
    drawn = []
    for row, curve, color in zip(found.rows, found.queues, COLORS, strict=False):
        label = f"{row.stream.strip()}: {units.count(row.queue_mean)} on average"
        drawn.append(ax.stairs(curve, places, baseline=None, color=color, linewidth=1.1, label=label))
    ax.set_xlim(0, float(places[-1]) or 1.0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"time of the steps ({unit})")
    ax.set_ylabel("launches that wait")
    legend(ax, drawn)
    return ax
