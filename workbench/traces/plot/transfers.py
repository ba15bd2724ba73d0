"""Copies of a trace: bytes per second over time, by kind.

Launches of a trace: how many wait in the queue of each stream, over time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.core import units
from workbench.core.display.axes import curves_over_time
from workbench.core.display.colors import PARTS, PHASES
from workbench.traces.analysis.copies import Copies, Copy
from workbench.traces.analysis.launch_queue import Launches
from workbench.traces.analysis.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COPY_COLORS = (PHASES["h2d"], PHASES["forward"], PHASES["data_wait"], PHASES["optimizer"], PARTS["communication"])
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
    curves = [(_label(row), np.array(curve) / 1e9) for row, curve in shown]
    ax, unit = curves_over_time(ax, found.times, curves, COPY_COLORS)
    ax.set_xlabel(f"time since the first copy ({unit})")
    ax.set_ylabel("copied (GB/s)")
    return ax


def _label(row: Copy) -> str:
    name = f"{row.kind} ({row.memory})" if row.memory else row.kind
    return f"{name}: {units.count(row.bandwidth, 'B/s')} while it copies"


LAUNCH_COLORS = (PARTS["compute"], PARTS["communication"], PHASES["h2d"], PHASES["optimizer"], PHASES["data_wait"])
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
    ax, unit = curves_over_time(ax, found.times, list(zip(labels, found.queues, strict=False)), LAUNCH_COLORS)
    ax.set_xlabel(f"time of the steps ({unit})")
    ax.set_ylabel("launches that wait")
    return ax
