"""Loader and step over the number of workers: two probes predict the whole curve, and measurements stand beside it."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from workbench.diagnosis.loader_curve import LoaderCurve
from workbench.plot.canvas import prepared
from workbench.plot.colors import INK, LINE, PARTS
from workbench.plot.stack import WIDTH, legend, scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TERMS = {"in turn": "load, then train", "workers": "workers", "cores": "cores", "hand-over": "hand-over", "compute": "training"}
"""What holds the step where it is, in few words, by what a CurvePoint says that binds."""


def loader_curve(result: LoaderCurve, ax: Axes | None = None) -> Axes:
    """Seconds per step (blue), and per batch of the loader alone (orange), over the number of workers: lines predicted, diamonds measured.

    The dashed line is the step on batches that are there already: no number of workers gets below it. The words at the top say what holds
    the step where it is; a ring marks the number of workers that is recommended.

    Raises:
        ValueError: the curve has no point.
    """
    points = result.points
    if not points:
        raise ValueError("a curve of no points: predict it for some numbers of workers first")
    ax = prepared(ax, WIDTH, 3.6)
    counts = [point.num_workers for point in points]
    seen = [value for p in points for value in (p.measured_step, p.measured_loader) if value is not None]
    highest = max(value for value in (*(p.step for p in points), *(p.loader for p in points), *seen) if math.isfinite(value))
    scale, unit = scale_of(highest)
    for name, color, predicted, measured in (
        ("step", LINE, [p.step for p in points], [p.measured_step for p in points]),
        ("loader alone, per batch", PARTS["data_wait"], [p.loader for p in points], [p.measured_loader for p in points]),
    ):
        ax.plot(counts, [scale * value for value in predicted], color=color, linewidth=1.8, marker="o", markersize=3.5, label=name)
        there = [(count, scale * value) for count, value in zip(counts, measured, strict=True) if value is not None]
        if there:
            ax.plot(
                *zip(*there, strict=True), color=color, linestyle="none", marker="D", markersize=7, label=f"{name.split(',')[0]}, measured"
            )
    ax.axhline(scale * result.compute, color=INK, linestyle="--", linewidth=1.2, label="step without loading")
    ax.set_xticks(counts)
    ax.set_xlim(counts[0] - 0.5, counts[-1] + 0.5)
    ax.set_ylim(0, 1.25 * scale * highest)  # room for the words
    ax.grid(axis="y", color=INK, alpha=0.18, linewidth=0.8)
    _terms(ax, result)
    _recommended(ax, result, scale)
    ax.set_xlabel("num_workers of each rank")
    ax.set_ylabel(f"predicted{' and measured' if seen else ''} ({unit})")
    legend(ax, [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")])
    return ax


def _terms(ax: Axes, result: LoaderCurve) -> None:
    """What holds the step where it is, above the numbers of workers it is true for."""
    for number, (term, group) in enumerate(itertools.groupby(result.points, key=lambda point: point.binds)):
        counts = [point.num_workers for point in group]
        left, right = counts[0] - 0.5, counts[-1] + 0.5
        ax.axvspan(left, right, color=INK, alpha=0.1 if number % 2 else 0.04, linewidth=0)
        words = TERMS.get(term, term)
        ax.annotate(
            words.replace(", ", ",\n") if len(counts) == 1 else words,
            ((left + right) / 2, 1),
            (0, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8.5,
            color=INK,
        )


def _recommended(ax: Axes, result: LoaderCurve, scale: float) -> None:
    """A ring around the step that is recommended, a square around the one there is now, each with its word."""
    for point in result.points:
        words = [word for word, count in (("now", result.current), ("recommended", result.recommended)) if count == point.num_workers]
        if words:
            here = (point.num_workers, scale * point.step)
            shape = "o" if "recommended" in words else "s"
            ax.plot(*here, marker=shape, markersize=13, markerfacecolor="none", markeredgecolor=INK, linestyle="none")
            ax.annotate(", ".join(words), here, (9, 7), textcoords="offset points", fontsize=9, color=INK)
