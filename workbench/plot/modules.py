"""Modules of a trace: bars of forward and backward, indented as the modules call each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import units
from workbench.plot.colors import PHASES
from workbench.plot.stack import Bar, bar_chart
from workbench.traces.modules import Modules
from workbench.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 24
"""Modules that are drawn: the longest."""
COLORS = {"forward": PHASES["forward"], "backward": PHASES["backward"]}
ON_DEVICE = {"on the device": PHASES["forward"]}


def modules(result: Trace | Modules, ax: Axes | None = None) -> Axes:
    """A bar per module with all that it calls: forward and backward on the host, or work of the device where one computes.

    Args:
        result: a trace, or its modules.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: the trace names no modules.
    """
    found = result.modules() if isinstance(result, Trace) else result
    if not found.rows:
        raise ValueError(f"{found!r} has nothing to draw: {'; '.join(found.notes) or 'no module was called within a step'}")
    device = any(one.device_seconds for one in found.rows)

    def pieces(at: int) -> list[float]:
        one = found.rows[at]
        return [one.device_seconds or 0.0] if device else [one.total_seconds, one.backward_seconds or 0.0]

    longest = sorted(range(len(found.rows)), key=lambda at: -sum(pieces(at)))[:MOST]
    bars = [
        Bar(label="  " * found.rows[at].depth + _short(found.rows[at].name), pieces=pieces(at), end=units.seconds(sum(pieces(at))))
        for at in sorted(longest)
    ]
    ax = bar_chart(ax, bars, "mean step, with all that is called", ON_DEVICE if device else COLORS, row=0.7, more=0.4)
    ax.set_yticks(ax.get_yticks(), [bar.label for bar in bars], ha="left")
    ax.tick_params(axis="y", pad=6 * max(len(bar.label) for bar in bars))
    return ax


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:27]}…"
