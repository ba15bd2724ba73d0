"""How many times faster is a step on data that was prepared beforehand? It depends on the step: a contour, and where you are on it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from workbench.diagnosis.feeding import Feeding
from workbench.plot.canvas import prepared as ground
from workbench.plot.colors import INK, LINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
