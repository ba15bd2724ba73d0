"""Memory after one change on top of another, against what a device has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workbench import units
from workbench.memory.breakdown import MemoryBreakdown
from workbench.memory.ladder import MemoryLadder
from workbench.memory.log import GROUPS
from workbench.memory.whatif import SAME, needed
from workbench.plot.canvas import prepared
from workbench.plot.colors import GROUPS as COLORS
from workbench.plot.colors import INK, LIMIT
from workbench.plot.memory import BESIDE, VISIBLE, scale_of
from workbench.plot.stack import WIDTH, ends, height, legend, rows, wrapped

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer

"""The line of what may be used: a red that reads on white and on near-black."""


def memory_ladder(result: MemoryLadder, ax: Axes | None = None) -> Axes:
    """A stacked bar for the step as it is and one after each change, those before it kept; the line: what the device has, less the margin.

    A text at the end says what is needed, and what the change costs in time. Bars that reach beyond the line do not fit.

    Args:
        result: what `wb.memory_ladder` found.
        ax: the Axes to draw into; None makes a figure.
    """
    shown = [result.start, *(rung.breakdown for rung in result.rungs)]
    labels = [SAME, *(wrapped(f"+ {rung.label}") for rung in result.rungs)]
    most = max(result.capacity, *map(needed, shown))
    scale, unit = scale_of(most)
    ax = prepared(ax, WIDTH, height(labels) + 0.25)
    drawn = _bars(ax, shown, scale, most)
    line = ax.axvline(result.capacity / scale, color=LIMIT, linewidth=1.8, label=result.device)
    ends(ax, [max(needed(one), result.capacity) / scale for one in shown], _texts(result))  # behind the line, which would cross them
    rows(ax, labels)
    kept = f"; {units.percent(result.margin)} of the device kept free" if result.margin else ""
    ax.set_xlabel(f"memory needed at the peak, predicted ({unit}){kept}")
    legend(ax, [*drawn, line])
    return ax


def pieces(breakdown: MemoryBreakdown) -> dict[str, int]:
    """Name → bytes of what a device must hold: the groups, what is reserved beyond them, what is outside; they sum to `needed`."""
    found = {group.replace("_", " "): int(getattr(breakdown, group)) for group in GROUPS}
    slack, outside = BESIDE
    reserved = breakdown.reserved if breakdown.device_used is not None else None
    found[slack] = 0 if reserved is None else max(0, reserved - breakdown.total)
    found[outside] = needed(breakdown) - sum(found.values())
    return found


def _bars(ax: Axes, shown: list[MemoryBreakdown], scale: float, most: float) -> list[Artist | BarContainer]:
    columns = [pieces(one) for one in shown]
    starts = [0.0] * len(shown)
    drawn: list[Artist | BarContainer] = []
    for name in columns[0]:
        widths = [column[name] / scale for column in columns]
        if not any(widths):
            continue
        if name in BESIDE:
            look = {"facecolor": "none", "edgecolor": INK, "hatch": BESIDE[name], "linewidth": 0.8}
        else:
            look = {"color": COLORS[name.replace(" ", "_")]}
        bars = ax.barh(range(len(shown)), widths, left=starts, height=0.62, label=name, **look)  # type: ignore[arg-type]
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
        if any(column[name] >= VISIBLE * most for column in columns):
            drawn.append(bars)
    return drawn


def _texts(result: MemoryLadder) -> list[str]:
    """What each row needs, and what its change costs in time; at the end what is to spare."""
    found = [units.bytes_(needed(result.start))]
    for rung in result.rungs:
        time = "" if math.isnan(rung.slowdown) else f"  ·  {units.times(rung.slowdown)} time"
        found.append(f"{units.bytes_(needed(rung.breakdown))}{time}")
    spare = result.capacity - needed(result.end)
    found[-1] += f"  ·  {units.bytes_(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"
    return found
