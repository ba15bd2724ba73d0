"""Draws the roofline of a trace: FLOP/s of each operator over its FLOPs per byte, under the limits of the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from workbench.core import units
from workbench.core.display.axes import WIDTH, halo, ink, legend, prepared
from workbench.core.display.colors import LIMIT, SERIES
from workbench.traces.analysis.flops import RoofPoint
from workbench.traces.analysis.roofline import Roofline
from workbench.traces.analysis.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


NAMED = 6
"""Points that have their name beside them: those that take longest."""
LARGEST = 900
"""Area of a point that takes all of the time, in square points."""


def roofline(result: Trace | Roofline, ax: Axes | None = None) -> Axes:
    """Each operator and shape as a point, as large as the time that it takes; lines for what the device can do, where it is known.

    Args:
        result: a trace (then of the device that it names), or its roofline.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: no operator has FLOPs, bytes and time.
    """
    answer = result.roofline() if isinstance(result, Trace) else result
    shown = [point for point in answer.points if point.intensity and point.seconds and point.flops]
    if not shown:
        raise ValueError(f"{answer!r} has no operator with FLOPs, bytes and time to draw: {'; '.join(answer.notes) or 'they take no time'}")
    ax = prepared(ax, WIDTH, 4.2)
    whole = math.fsum(point.seconds for point in shown)
    for matrix, color, label in ((True, SERIES[0], "matrices, convolutions, attention"), (False, SERIES[1], "elementwise")):
        points = [point for point in shown if point.matrix is matrix]
        if points:
            ax.scatter(
                [point.intensity or 0 for point in points],
                [point.flops_per_sec for point in points],
                s=[_size(point, whole) for point in points],
                color=color,
                alpha=0.75,
                linewidth=0.6,
                edgecolor=ink(ax),
                label=label,
            )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.margins(0.14)
    if answer.bandwidth:
        _roof(ax, answer, shown)
    _names(ax, shown, whole)
    ax.set_xlabel("intensity (FLOP per byte)")
    ax.set_ylabel("reached (FLOP/s)")
    legend(ax, ax.get_legend_handles_labels()[0], markerscale=0.5)
    return ax


def _roof(ax: Axes, answer: Roofline, shown: list[RoofPoint]) -> None:
    """Slanted: bandwidth; level: the peak of each number format that a point is in."""
    bandwidth = answer.bandwidth or 0.0
    left, right = ax.get_xlim()
    used = {point.dtype: point.peak for point in shown if point.peak} or dict(answer.peaks)
    right = max(right, 4 * max(used.values()) / bandwidth)
    for dtype, peak in used.items():
        x = np.geomspace(left, right, 200)
        ax.plot(x, np.minimum(peak or 0.0, x * bandwidth), color=LIMIT, linewidth=1.8, zorder=0, label="_limit")
        text = f"{dtype}: {units.count(peak, 'FLOP/s')}"
        ax.annotate(text, (right, peak or 0.0), (-2, 4), textcoords="offset points", ha="right", color=ink(ax), fontsize=8.5)
    start = math.sqrt(left * min(right, min(used.values()) / bandwidth))
    text = f"{answer.device}: {units.count(bandwidth, 'B/s')}"
    ax.annotate(text, (start, start * bandwidth), (-4, 4), textcoords="offset points", ha="right", color=ink(ax), fontsize=8.5)
    ax.set_xlim(left, right)


def _size(point: RoofPoint, whole: float) -> float:
    """Area of a point, in square points."""
    return max(9.0, LARGEST * point.seconds / whole)


def _names(ax: Axes, shown: list[RoofPoint], whole: float) -> None:
    """Beside the points that take longest; of several in one place the first."""
    taken: list[tuple[float, float]] = []
    low, high = (math.log10(operator) for operator in ax.get_ylim())
    left, right = (math.log10(operator) for operator in ax.get_xlim())
    for operator in sorted(shown, key=lambda point: -point.seconds):
        place = (math.log10(operator.intensity or 1) - left) / (right - left), (math.log10(operator.flops_per_sec) - low) / (high - low)
        if len(taken) == NAMED or any(abs(place[0] - x) < 0.2 and abs(place[1] - y) < 0.055 for x, y in taken):
            continue
        taken.append(place)
        side, beside = ("right" if place[0] > 0.75 else "left"), 4 + math.sqrt(_size(operator, whole)) / 2
        ax.annotate(
            operator.name.removeprefix("aten::"),
            (operator.intensity or 1, operator.flops_per_sec),
            (-beside if side == "right" else beside, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=8.5,
            color=ink(ax),
            path_effects=halo(ax),
        )
