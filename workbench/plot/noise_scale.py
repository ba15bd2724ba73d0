"""The gradient noise scale: the estimate as it narrows, and how it moves over the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.batch.noise_scale import NoiseScale
from workbench.batch.noise_steps import ENOUGH, NoiseBlock, relative_width
from workbench.plot.canvas import prepared
from workbench.plot.colors import INK, LINE, PHASES
from workbench.plot.stack import WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ABOVE = 2.5  # times the largest estimate, where an interval without an end is cut
_STRETCH = PHASES["data_wait"]


def noise_scale(result: NoiseScale, ax: Axes | None = None) -> Axes:
    """The estimate over more and more steps in its band; stretches of the training, each by itself; where it is known well enough.

    Raises:
        ValueError: it was made from single samples at one moment, and has no steps to draw.
    """
    running = result.running()
    if not running:
        raise ValueError(f"{result!r} has no steps to draw: it is one number, of one moment")
    ax = prepared(ax, WIDTH, 3.4)
    top = _top(result, running)
    steps = [block.last for block in running]
    ax.fill_between(
        steps,
        [min(block.low, top) for block in running],
        [min(block.high, top) for block in running],
        color=LINE,
        alpha=0.22,
        linewidth=0,
        label=f"its {100 * result.level:.0f} % interval",
    )
    known = [block for block in running if block.b_simple <= top]
    ax.plot([block.last for block in known], [block.b_simple for block in known], color=LINE, linewidth=1.8, label="estimate so far")
    _draw_stretches(ax, result.over_time, top)
    _mark_enough(ax, running)
    ax.set_ylim(0, top)
    ax.set_xlim(left=0)
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("noise scale (samples)")
    ax.grid(axis="y", color=INK, alpha=0.18, linewidth=0.8)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, borderpad=0.2)
    return ax


def _draw_stretches(ax: Axes, blocks: Sequence[NoiseBlock], top: float) -> None:
    """Points with whiskers, at the middle of each stretch; one whose signal was lost in the noise has the whisker only."""
    shown = [block for block in blocks if block.low < top]
    middles = [(block.first + block.last) / 2 for block in shown]
    ax.vlines(middles, [block.low for block in shown], [min(block.high, top) for block in shown], color=_STRETCH, alpha=0.7)
    known = [(middle, block.b_simple) for middle, block in zip(middles, shown, strict=True) if block.b_simple <= top]
    if known:
        ax.plot(*zip(*known, strict=True), linestyle="none", marker="o", markersize=5, color=_STRETCH, label="a stretch by itself")


def _mark_enough(ax: Axes, running: Sequence[NoiseBlock]) -> None:
    """A dotted line from which on the interval is narrow enough."""
    late = [block for block in running if not relative_width(block) <= ENOUGH]
    enough = [block for block in running if not late or block.last > late[-1].last]
    if not enough:
        return
    first = enough[0].last
    ax.axvline(first, color=INK, linestyle=":", linewidth=1.2, label="_enough")
    left = first > running[-1].last / 2
    ax.annotate(
        f"enough, from step {first}",
        (first, 1),
        (-6 if left else 6, -2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        color=INK,
    )


def _top(result: NoiseScale, running: Sequence[NoiseBlock]) -> float:
    """Where the picture ends: well above the estimate, and above its last interval where that has an end."""
    if math.isfinite(result.high):
        return max(result.high * 1.1, _ABOVE * result.b_simple)
    known = [block.low for block in running if block.low > 0] + [block.b_simple for block in running[-1:] if math.isfinite(block.b_simple)]
    return _ABOVE * max(known, default=1.0)
