"""The waterfall from N × one rank down to what N ranks give: `why_not_linear`. Measured parts are filled, predicted ones hatched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.display.axes import WIDTH, draw_bars, end_labels, height, ink, kinds, legend, prepared, rows, wrapped
from workbench.core.display.colors import IDLE, LINE, OUTSIDE, PARTS, PHASES
from workbench.diagnosis.analysis.gap import UNEXPLAINED, GapPart
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "micro-batch": PARTS["host"],
    "cores": PARTS["compute"],
    "memory": PARTS["transfer"],
    "loaders": PARTS["data_wait"],
    **dict.fromkeys(("slow rank", "uneven data", "uneven steps", "rare long steps"), PARTS["straggler"]),
    **dict.fromkeys(("many reductions", "large gradients", "waits and reduction"), PARTS["communication"]),
    "other processes": IDLE,
    "epochs": PARTS["data_wait"],
    UNEXPLAINED: PHASES["other"],
}
"""Part of the gap → colour."""
SHOWN = 0.005
"""Fraction of N × one below which a part has no row of its own, unless it is what is not explained."""


def why_not_linear(result: WhyNotLinear, ax: Axes | None = None) -> Axes:
    """Throughput from N × one rank, part by part, down to N ranks. A part that is a gain extends to the right.

    Each part's share of the lost throughput is proportional to its seconds, so that the parts add up. Filled bars are measured, hatched
    bars predicted. Parts below SHOWN have no row: the first connecting line slants by their sum.

    Args:
        result: an answer of `wb.why_not_linear`, for the ranks that were measured or for more (`result.at(64)`).
        ax: the Axes to draw into; None makes a figure.
    """
    gap, n, samples = result.gap, result.world_size, result.samples
    full, got = samples / gap.linear.mid, samples / gap.step.mid
    parts = [part for part in gap.parts if abs(gap.cost(part.cause, samples)) >= SHOWN * full or part.cause == UNEXPLAINED]
    rest = sum(gap.cost(part.cause, samples) for part in gap.parts if part not in parts)
    labels = [f"{n} × one", *(wrapped(part.cause) for part in parts), f"{n} ranks"]
    widths, starts, ends = [full], [0.0], [units.rate(full, result.unit)]
    now = full - rest
    for part in parts:
        lost = gap.cost(part.cause, samples)
        widths.append(abs(lost))
        starts.append(min(now, now - lost))
        ends.append(_said(part, lost, gap.step.mid))
        now -= lost
    widths.append(got)
    starts.append(0.0)
    ends.append(f"{units.rate(got, result.unit)}: {units.percent(gap.efficiency)}")
    ax = prepared(ax, WIDTH, height(labels))
    rows(ax, labels)
    colors = [LINE, *(COLORS.get(part.cause, OUTSIDE) for part in parts), LINE]
    guessed = [False, *(part.predicted for part in parts), gap.predicted]
    draw_bars(ax, widths, starts, colors, predicted=guessed)
    level = full
    for place, part in enumerate(parts, 1):
        edges = [starts[place], starts[place] + widths[place]]
        begin, end = edges[::-1] if gap.cost(part.cause, samples) >= 0 else edges
        ax.plot([level, begin], [place - 0.69, place - 0.31], color=ink(ax), linewidth=0.8, alpha=0.5)
        ax.plot([begin, begin], [place - 0.31, place + 0.31], color=ink(ax), linewidth=0.8, alpha=0.5)
        level = end
    ax.plot([level, level], [len(parts) + 0.31, len(parts) + 0.69], color=ink(ax), linewidth=0.8, alpha=0.5)
    end_labels(ax, [start + width for start, width in zip(starts, widths, strict=True)], ends)
    ax.set_xlabel(f"throughput ({result.unit}/s)")
    shown = kinds(ax)
    legend(ax, shown if gap.predicted else shown[:1])
    return ax


def _said(part: GapPart, lost: float, step: float) -> str:
    sign = "–" if lost >= 0 else "+"
    return f"{sign}{units.percent(abs(part.seconds.mid) / step)} of the step"
