"""Kernels of a trace: how long each takes, and whether on tensor cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import units
from workbench.plot.colors import PHASES
from workbench.plot.stack import Bar, bar_chart, shortened
from workbench.traces.kernels import Kernels
from workbench.traces.sequences import brief
from workbench.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 12
"""Kernels that are drawn: the longest."""
COLORS = {"on tensor cores": PHASES["forward"], "without": PHASES["backward"]}


def kernels(result: Trace | Kernels, ax: Axes | None = None) -> Axes:
    """A bar per kernel, as long as all its launches take; the text is how much of the device's multiprocessors they fill.

    Args:
        result: a trace, or its kernels.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: the trace has no kernels.
    """
    found = result.kernels() if isinstance(result, Trace) else result
    if not found.rows:
        raise ValueError(f"{found!r} has nothing to draw: {'; '.join(found.notes)}")
    bars = [
        Bar(
            label=shortened(brief(one.name)),
            pieces=[one.seconds, 0.0] if one.tensor_cores else [0.0, one.seconds],
            end=f"occupancy {units.percent(one.occupancy)}" if one.occupancy is not None else units.seconds(one.seconds),
        )
        for one in found.rows[:MOST]
    ]
    ax = bar_chart(ax, bars, "all launches", COLORS, row=0.75, more=0.3)
    for text in list(ax.texts):
        if text.get_text() == "100 %":  # a bar has one colour only
            text.remove()
    return ax
