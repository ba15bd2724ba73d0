"""Kernels of a trace: how long each takes, and whether on tensor cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import units
from workbench.plot.canvas import prepared
from workbench.plot.colors import PHASES
from workbench.plot.stack import WIDTH, Bar, height, legend, stacked
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
            label=_label(one.name),
            pieces=[one.seconds, 0.0] if one.tensor_cores else [0.0, one.seconds],
            end=f"occupancy {units.percent(one.occupancy)}" if one.occupancy is not None else units.seconds(one.seconds),
        )
        for one in found.rows[:MOST]
    ]
    ax = prepared(ax, WIDTH, height([bar.label for bar in bars]) * 0.75 + 0.3)
    stacked(ax, bars, "all launches", COLORS)
    for text in list(ax.texts):
        if text.get_text() == "100 %":  # a bar has one colour only
            text.remove()
    legend(ax, ax.containers)
    return ax


def _label(name: str) -> str:
    short = brief(name)
    return short if len(short) <= 34 else f"{short[:20]}…{short[-13:]}"
