"""Loader and step over the number of workers: two probes predict the whole curve, and measurements stand beside it.

How many times faster is a step on data that was prepared beforehand? It depends on the step: a contour, and where you are on it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from workbench.core.display.axes import WIDTH, legend, prepared, scale_of
from workbench.core.display.axes import prepared as ground
from workbench.core.display.colors import INK, LINE, PARTS
from workbench.diagnosis.analysis.loader_curve import LoaderCurve
from workbench.diagnosis.analysis.loader_model import Feeding

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


LEVELS = (1.1, 1.5, 2, 3, 5, 7, 10, 20)
CLAIM = 7
"""The claim that is often heard: "not preprocessing offline costs 7 times". Its contour is the bold one."""
_POINTS = 60


def unprepared(raw: Feeding, prepared: Feeding, *, num_workers: int = 0, ax: Axes | None = None) -> Axes:
    """Predicted speedup of a step by preparing its data beforehand, over the time to train on a batch and the time to make one.

    The contours are `raw.step / prepared.step` by the formulas of `Feeding`, both with `num_workers` workers. The diamond is the step that
    was measured. Nothing but time is compared: prepared data take more room, and their augmentation is frozen.

    Args:
        raw: of the loader that does all the work in each epoch.
        prepared: of one that reads what was prepared.
        num_workers: of both.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: making a batch takes no time, so there is nothing to prepare.
    """
    cost = raw.cpu + raw.blocked
    if not cost > 0 or not raw.compute > 0:
        raise ValueError(f"making a batch takes {cost} s and training on it {raw.compute} s: both have to be measured, and above 0")
    ax = ground(ax, 7.0, 4.2)
    computes = np.geomspace(min(1e-3, raw.compute / 4), max(0.2, 4 * raw.compute), _POINTS)
    costs = np.geomspace(min(1e-3, cost / 4), max(0.4, 4 * cost), _POINTS)
    ratio = np.array([[_speedup(raw, prepared, num_workers, compute, made / cost) for compute in computes] for made in costs])
    levels = [level for level in LEVELS if ratio.min() < level < ratio.max()]
    lines = ax.contour(
        1e3 * computes, 1e3 * costs, ratio, levels=levels, colors=LINE, linewidths=[2.6 if level == CLAIM else 1.0 for level in levels]
    )
    ax.clabel(lines, fmt=lambda level: f"{level:g}×", fontsize=9)
    ax.plot([1e3 * raw.compute], [1e3 * cost], marker="D", markersize=8, color=INK, linestyle="none", label="measured here")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("training on a batch (ms)")
    ax.set_ylabel("making a batch (ms of one core)")
    workers = f"{num_workers} worker{'s' * (num_workers != 1)}" if num_workers else "no workers"
    ax.set_title(f"predicted speedup by data prepared beforehand, {workers}", fontsize=10, color=INK, loc="left")
    ax.legend(loc="lower right", frameon=False, labelcolor=INK, fontsize=9)
    return ax


def _speedup(raw: Feeding, prepared: Feeding, num_workers: int, compute: float, times: float) -> float:
    """Of one place on the plane: another compute time, and making a batch from raw data `times` as expensive as measured."""
    busy = 1.0 if raw.compute_cpu is None else raw.compute_cpu / raw.compute
    worker = None if raw.worker_cpu is None else raw.worker_cpu + (times - 1) * raw.cpu
    slow = dataclasses.replace(
        raw,
        cpu=raw.cpu * times,
        blocked=raw.blocked * times,
        worker_cpu=None if worker is None else max(worker, 0.0),
        compute=compute,
        compute_cpu=compute * busy,
    )
    fast = dataclasses.replace(prepared, compute=compute, compute_cpu=compute * busy)
    return slow.step(num_workers, persistent_workers=True) / fast.step(num_workers, persistent_workers=True)
