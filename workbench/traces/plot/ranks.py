"""Picture of the traces of several ranks: where the step of each goes, and who waits for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.display.axes import Bar, bar_chart
from workbench.traces.analysis.breakdown import PARTS
from workbench.traces.analysis.rank_breakdown import RankParts
from workbench.traces.analysis.trace_set import TraceSet
from workbench.traces.plot.timeline import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_BARS = 32
"""Ranks that get a bar."""


def ranks(result: TraceSet | RankParts, ax: Axes | None = None) -> Axes:
    """The mean step of each rank in parts that add up to it, one stacked bar per rank; stragglers are named beside theirs.

    Args:
        result: the traces of several ranks, or their breakdown.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: there is no step that all ranks have.
    """
    parts = result.breakdown() if isinstance(result, TraceSet) else result
    slow = result.stragglers().ranks if isinstance(result, TraceSet) else ()
    if not parts.steps:
        raise ValueError(f"{parts!r} has no step that all ranks have: trace the same ones on each, wb.trace(spec, ranks='all')")
    bars = [
        Bar(
            label=f"rank {rank}" + (" (straggler)" if rank in slow else ""),
            pieces=[parts.mean(rank, part) for part in PARTS],
            end=units.seconds(parts.mean(rank)),
        )
        for rank in parts.ranks[:MOST_BARS]
    ]
    return bar_chart(ax, bars, "traced step", COLORS)
