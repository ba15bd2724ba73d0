"""`plan_proof`: the loss against the samples under two plans, with the loss at which they are compared."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workbench import units
from workbench.batching.proof import PlanProof
from workbench.plot.canvas import prepared
from workbench.plot.colors import INK, LINE, PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"old": PHASES["data_wait"], "new": LINE}
"""Plan → colour."""


def plan_proof(result: PlanProof, ax: Axes | None = None) -> Axes:
    """The loss of each plan over the samples it has seen: thin lines for the seeds, a thick one that never rises through their mean.
    The dotted line is the loss that the old plan ends with; a diamond marks where the new one was predicted to reach it.
    """
    ax = prepared(ax, 7.0, 3.4)
    for name, plan in (("old", result.old), ("new", result.new)):
        mean = result.mean(name)
        label = f"{name}: batch {plan.global_batch:,}, {units.rate(mean.samples_per_sec)}"
        ax.plot(*zip(*mean.falling, strict=True), color=COLORS[name], linewidth=2.0, label=label)
        for course in result.of(name):
            ax.plot(course.samples, course.losses, color=COLORS[name], linewidth=0.7, alpha=0.5)
    ax.axhline(result.target, color=INK, linestyle=":", linewidth=1.2)
    if math.isfinite(result.predicted.samples):
        there = result.predicted.samples * result.mean("old").reaches(result.target)
        ax.plot([there], [result.target], marker="D", color=COLORS["new"], markerfacecolor="none", linestyle="none", label="new, predicted")
    ax.set_xlabel("samples")
    ax.set_ylabel("loss")
    ax.legend(frameon=False, labelcolor=INK)
    return ax
