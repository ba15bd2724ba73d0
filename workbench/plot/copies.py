"""Copies of a trace: bytes per second over time, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench import units
from workbench.plot.colors import PARTS, PHASES
from workbench.plot.stack import curves_over_time
from workbench.traces.copies import Copies, Copy
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
    curves = [(_label(row), np.array(curve) / 1e9) for row, curve in shown]
    ax, unit = curves_over_time(ax, found.times, curves, COLORS)
    ax.set_xlabel(f"time since the first copy ({unit})")
    ax.set_ylabel("copied (GB/s)")
    return ax


def _label(row: Copy) -> str:
    name = f"{row.kind} ({row.memory})" if row.memory else row.kind
    return f"{name}: {units.count(row.bandwidth, 'B/s')} while it copies"
