"""A law of scale: loss against compute, a line for each size, and the frontier of what compute can buy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core import units
from workbench.core.display.axes import WIDTH, prepared
from workbench.core.display.colors import INK, LARGEST, PHASES, SMALLEST
from workbench.scaling.analysis.law.fit import losses
from workbench.scaling.analysis.law.held_out import HeldOut
from workbench.scaling.analysis.law.law import ScalingLaw
from workbench.scaling.analysis.law.points import Points, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LINES = 6
"""Sizes that get a line and an entry of the legend; of more, these many are chosen from the smallest to the largest."""
BEYOND = 10.0
"""The frontier goes on to this many times the largest compute that is drawn."""
FRONTIER = PHASES["data_wait"]
"""Colour of the frontier: no size's."""


def scaling_law(result: ScalingLaw, ax: Axes | None = None, *, held_out: Any = None) -> Axes:
    """Loss against training compute, both on logarithmic scales.

    Dots are runs that were measured, lines what the fitted law gives each size from the fewest tokens to the most. The frontier is the loss
    of the best size for each compute, with its interval; that size and its tokens are named for its two marks. Hollow: runs that the law
    has not seen.

    Args:
        result: a fitted law.
        ax: the Axes to draw into; None makes a figure.
        held_out: runs it has not seen: rows of (parameters, tokens, loss), a DataFrame, or what `law.held_out()` gave.
    """
    ax = prepared(ax, WIDTH, 4.0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    unseen = _unseen(held_out)
    sizes = _chosen(sorted({*result.points.sizes, *(unseen.parameters if unseen else ())}))
    colors = dict(zip(sizes, _shades(len(sizes)), strict=True))
    span = _span(result, unseen)
    for size in sizes:
        tokens = np.geomspace(*span, 40)
        work = result.flops_per * size * tokens
        label = f"{units.count(size)} parameters"
        ax.plot(work, losses(result.five, size, tokens), color=colors[size], linewidth=1.2, label=label, zorder=2)
    for points, hollow in ((result.points, False), (unseen, True)):
        if points:
            _dots(ax, points, result.flops_per, colors, hollow=hollow)
    _frontier(ax, result, unseen)
    _axes(ax, result, unseen)
    return ax


def _unseen(held_out: Any) -> Points | None:
    if held_out is None:
        return None
    if isinstance(held_out, HeldOut):
        return Points.of([(one.parameters, one.tokens, loss) for one, loss in zip(held_out.forecasts, held_out.measured, strict=True)])
    return read(held_out)


def _chosen(sizes: Sequence[float]) -> list[float]:
    if len(sizes) <= LINES:
        return list(sizes)
    return [sizes[round(i * (len(sizes) - 1) / (LINES - 1))] for i in range(LINES)]


def _shades(count: int) -> list[str]:
    """Colours from few to many parameters."""
    ends = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in (SMALLEST, LARGEST)]
    mixes = [i / max(1, count - 1) for i in range(count)]
    return ["#" + "".join(f"{round(a + (b - a) * mix):02x}" for a, b in zip(*ends, strict=True)) for mix in mixes]


def _span(result: ScalingLaw, unseen: Points | None) -> tuple[float, float]:
    tokens = [*result.points.tokens, *(unseen.tokens if unseen else ())]
    return min(tokens), max(tokens)


def _dots(ax: Axes, points: Points, per: float, colors: dict[float, str], *, hollow: bool) -> None:
    nearest = [colors[min(colors, key=lambda one: abs(math.log(one / size)))] for size in points.parameters]
    ax.scatter(
        points.compute(per),
        points.loss,
        s=52 if hollow else 20,
        facecolors="none" if hollow else nearest,
        edgecolors=nearest,
        linewidths=1.6 if hollow else 0.6,
        label="not seen by the fit" if hollow else "_measured",
        zorder=4 if hollow else 3,
    )


def _frontier(ax: Axes, result: ScalingLaw, unseen: Points | None) -> None:
    work = [*result.compute, *(unseen.compute(result.flops_per) if unseen else ())]
    last = max(work)
    best = [result.allocation(float(one)) for one in np.geomspace(min(work), BEYOND * last, 30)]
    flops = [one.flops for one in best]
    ax.fill_between(flops, [one.loss.low for one in best], [one.loss.high for one in best], color=FRONTIER, alpha=0.18, linewidth=0)
    seen = [one for one in best if one.flops <= last * 1.0001]
    ax.plot(flops, [one.loss.mid for one in best], color=FRONTIER, linewidth=1.4, linestyle=":", zorder=2.5)
    label = f"best size for the compute ({units.percent(result.level)} band)"
    ax.plot([one.flops for one in seen], [one.loss.mid for one in seen], color=FRONTIER, linewidth=1.8, label=label, zorder=2.5)
    words = []
    for budget in (last, BEYOND * last):
        one = result.allocation(float(budget))
        ax.plot([one.flops], [one.loss.mid], marker="D", markersize=5, color=FRONTIER, zorder=5)
        words.append(f"◆ {budget:.2g} FLOPs: {units.count(one.parameters.mid)} parameters, {units.count(one.tokens.mid)} tokens")
    if not result.enough:
        words.append("these runs cannot tell the best size: see law.cannot_tell")
    ax.text(0.02, 0.03, "\n".join(words), transform=ax.transAxes, color=INK, fontsize=8, va="bottom")  # below the frontier nothing is


def _axes(ax: Axes, result: ScalingLaw, unseen: Points | None) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    ends = [*result.points.loss, *(unseen.loss if unseen else ())]
    work = max(*result.compute, *(unseen.compute(result.flops_per) if unseen else ()))
    low = min(*ends, result.allocation(BEYOND * work).loss.mid)
    ax.set_ylim(low * 0.94, max(ends) * 1.03)
    ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    ax.set_xlabel("training compute (FLOPs)")
    ax.set_ylabel("final loss")
    ax.grid(axis="y", color=INK, alpha=0.18, linewidth=0.8)
    ax.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 1.02), ncols=2)
