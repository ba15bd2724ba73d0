"""Copies of a trace: bytes per second over time, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench import units
from workbench.plot.canvas import prepared
from workbench.plot.colors import PARTS, PHASES
from workbench.plot.stack import WIDTH, legend, scale_of
from workbench.traces.copies import Copies
from workbench.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (PHASES["h2d"], PHASES["forward"], PHASES["data_wait"], PHASES["optimizer"], PARTS["communication"])
"""Of the kinds that take longest; others are not drawn."""


def copies(result: Trace | Copies, ax: Axes | None = None) -> Axes:
    """Bytes per second from the first copy to the end of the last, pauses included, a curve for each kind of copy.

    Args:
        result: a trace, or its copies.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: nothing is copied, or the file tells no bytes.
    """
    found = result.copies() if isinstance(result, Trace) else result
    shown = [(row, curve) for row, curve in zip(found.rows, found.curves, strict=True) if row.bytes]
    if not shown:
        raise ValueError(f"{found!r} has nothing to draw: {'; '.join(found.notes) or 'no bytes are copied'}")
    ax = prepared(ax, WIDTH, 3.2)
    times = np.array(found.times)
    scale, unit = scale_of(float(times[-1] - times[0]) or 1.0)
    places = (times - times[0]) * scale
    drawn = []
    for (row, curve), color in zip(shown, COLORS, strict=False):
        name = f"{row.kind} ({row.memory})" if row.memory else row.kind
        label = f"{name}: {units.count(row.bandwidth, 'B/s')} while it copies"
        drawn.append(ax.stairs(np.array(curve) / 1e9, places, baseline=None, color=color, linewidth=1.1, label=label))
    ax.set_xlim(0, float(places[-1]) or 1.0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"time since the first copy ({unit})")
    ax.set_ylabel("copied (GB/s)")
    legend(ax, drawn)
    return ax
