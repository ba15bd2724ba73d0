"""The learning-rate range test: losses over the learning rate, what each rule reads out of them, and the race that decided."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from workbench.batch.lr_range_found import LrFound, figure
from workbench.plot.canvas import prepared
from workbench.plot.colors import INK, LINE, PARTS
from workbench.plot.stack import WIDTH, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT = 4.6
_CURVES = 0.6  # share of the height that the curves have; above stand the rules
_BAND = (0.66, 0.97)
_RACE, _RULE = PARTS["data_wait"], PARTS["straggler"]


def lr_range(result: LrFound, ax: Axes | None = None) -> Axes:
    """Smoothed losses of all seeds (pale) and their median (blue) over the learning rate; diamonds are the race's mean losses.

    Above the curves each rule has a row: a dot for its median suggestion, a line from the smallest seed's to the largest. The dotted line
    is the learning rate that was chosen, the band those that did about as well.

    Raises:
        ValueError: there are no sweeps.
    """
    if not result.sweeps:
        raise ValueError(f"{result!r} has no sweeps to draw")
    ax = prepared(ax, WIDTH, _HEIGHT)
    ax.set_xscale("log")
    for number, sweep in enumerate(result.sweeps):
        ax.plot(sweep.lrs, sweep.smoothed, color=LINE, alpha=0.3, linewidth=1, label="smoothed loss of a seed" if not number else "_")
    at, middle = _median(result)
    ax.plot(at, middle, color=LINE, linewidth=2, label="median")
    ran = [(one.lr, one.mean(1)) for one in result.race if math.isfinite(one.mean(1))]
    if ran:
        ax.plot(
            *zip(*ran, strict=True), color=_RACE, marker="D", markersize=5, linewidth=1, label=f"race: loss over {result.race_steps} steps"
        )
    _limits(ax, result, [*middle, *(loss for _, loss in ran)])
    _rules(ax, result)
    if result.lr is not None:
        if result.low and result.high:
            ax.axvspan(result.low, result.high, color=INK, alpha=0.12, linewidth=0, label="about as good")
        ax.axvline(result.lr, color=INK, linestyle=":", linewidth=1.6, label=f"chosen: {figure(result.lr)}")
    ax.set_xlabel("learning rate")
    ax.set_ylabel("training loss", loc="bottom")
    handles, _ = ax.get_legend_handles_labels()
    legend(ax, handles)
    return ax


def _median(result: LrFound) -> tuple[list[float], list[float]]:
    """Median over the seeds at each learning rate that at least half of them reached."""
    longest = max(result.sweeps, key=lambda sweep: len(sweep.lrs))
    curves = [sweep.smoothed for sweep in result.sweeps]
    at, middle = [], []
    for place, lr in enumerate(longest.lrs):
        there = [curve[place] for curve in curves if place < len(curve) and math.isfinite(curve[place])]
        if 2 * len(there) >= len(curves):
            at.append(lr)
            middle.append(statistics.median(there))
    return at, middle


def _limits(ax: Axes, result: LrFound, losses: list[float]) -> None:
    """From the lowest loss to a little above the start: what explodes leaves the picture."""
    low, high = min(losses), result.start
    room = max(high - low, 1e-3 * abs(high), 1e-12)
    bottom, top = low - 0.08 * room, high + 0.2 * room
    ax.set_ylim(bottom, bottom + (top - bottom) / _CURVES)
    ax.set_yticks([tick for tick in ax.get_yticks() if bottom <= tick <= top])
    ax.set_xlim(min(sweep.lrs[0] for sweep in result.sweeps), max(sweep.lrs[-1] for sweep in result.sweeps))


def _rules(ax: Axes, result: LrFound) -> None:
    """A row per rule, above the curves."""
    left, right = ax.get_xlim()
    known = [one for one in result.suggestions if one.lr is not None]
    for row, one in enumerate(known):
        height = _BAND[1] - (_BAND[1] - _BAND[0]) * row / max(1, len(known) - 1)
        where = ax.get_xaxis_transform()
        assert one.lr is not None
        assert one.low is not None
        assert one.high is not None
        ax.plot([one.low, one.high], [height, height], color=_RULE, linewidth=1.4, transform=where, label="_")
        ax.plot([one.lr], [height], color=_RULE, marker="o", markersize=5, linestyle="none", transform=where, label="_" if row else "rules")
        on_left = math.log(one.lr) > (math.log(left) + math.log(right)) / 2
        ax.annotate(
            one.rule,
            (one.low if on_left else one.high, height),
            (-7 if on_left else 7, 0),
            xycoords=where,
            textcoords="offset points",
            ha="right" if on_left else "left",
            va="center",
            fontsize=8.5,
            color=INK,
        )
