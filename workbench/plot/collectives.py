"""Pictures of what ranks send each other: a step's collectives by module, measured ones by size, and the timeline of DDP's twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import units
from workbench.cost.links import Links
from workbench.cost.traffic import Traffic
from workbench.cost.twin_run import TwinRun
from workbench.plot.canvas import prepared
from workbench.plot.colors import LINE, PARTS, PHASES
from workbench.plot.stack import WIDTH, height, rows, scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "all_reduce": PARTS["communication"],
    "all_gather": PHASES["forward"],
    "reduce_scatter": PHASES["backward"],
    "broadcast": PHASES["optimizer"],
    "all_to_all": PHASES["data_wait"],
    "reduce": PHASES["h2d"],
}
"""Collective → colour."""
MOST_BARS = 16
"""Modules that get a bar of their own."""


def traffic(result: Traffic, ax: Axes | None = None, *, depth: int | None = 2) -> Axes:
    """What a rank sends in a step, a stacked bar per module, in a colour per collective.

    Args:
        result: of `wb.collectives`.
        ax: the Axes to draw into; None makes a figure.
        depth: names of a module's path that count.

    Raises:
        ValueError: it sends nothing.
    """
    found = [row for row in result.by_module(depth) if row.sent]
    if not found:
        raise ValueError(f"{result!r}: nothing is sent, so there is nothing to draw; take world_size=2 or more")
    shown, rest = found[:MOST_BARS], found[MOST_BARS:]
    bars = [(row.name or "(model)", row.calls) for row in shown]
    if rest:
        bars.append((f"{len(rest)} others", tuple(one for row in rest for one in row.calls)))
    ax = prepared(ax, WIDTH, height([name for name, _ in bars]))
    left = [0.0] * len(bars)
    for kind in dict.fromkeys(one.kind for one in result):
        sent = [sum(one.sent for one in calls if one.kind == kind) / 2**20 for _, calls in bars]
        ax.barh(range(len(bars)), sent, left=left, height=0.72, color=COLORS.get(kind, PHASES["other"]), label=kind)
        left = [before + more for before, more in zip(left, sent, strict=True)]
    rows(ax, [name for name, _ in bars])
    ax.set_xlabel("sent by a rank in a step (MiB)")
    ax.legend(loc="lower right", frameon=False, labelcolor="linecolor")
    return ax


def links(result: Links, ax: Axes | None = None) -> Axes:
    """Seconds of each collective over its size, measured, and the line of latency and bandwidth.

    Args:
        result: of `wb.measure_collectives`.
        ax: the Axes to draw into; None makes a figure.
    """
    ax = prepared(ax, WIDTH, 3.6)
    for kind in result.kinds:
        points = [point for point in result.points if point.kind == kind]
        color = COLORS.get(kind, PHASES["other"])
        for point in points:
            ax.plot([point.size] * 2, [min(point.seconds), max(point.seconds)], color=color, linewidth=0.8, alpha=0.5)
        ax.plot([point.size for point in points], [point.median for point in points], "o", color=color, markersize=4, label=kind)
        link = result[kind].link
        ax.plot([p.size for p in points], [_fitted(kind, p.size, result.ranks, link) for p in points], color=color, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("size (bytes)")
    ax.set_ylabel("time (s)")
    ax.legend(frameon=False, labelcolor="linecolor")
    return ax


def twin(result: TwinRun, ax: Axes | None = None) -> Axes:
    """The backward above, and the buckets below it: when each was ready, and when the network had it.

    Args:
        result: of `wb.ddp_twin`.
        ax: the Axes to draw into; None makes a figure.
    """
    ax = prepared(ax, WIDTH, 1.2 + 0.26 * (1 + len(result.buckets)))
    end = max([result.backward, *(one.end for one in result.buckets)])
    scale, unit = scale_of(end)
    ax.barh(0, result.backward * scale, height=0.6, color=PHASES["backward"], label="backward")
    for place, one in enumerate(result.buckets, start=1):
        ax.barh(place, (one.end - one.start) * scale, left=one.start * scale, height=0.6, color=PARTS["communication"])
        ax.plot([one.ready * scale], [place], "|", color=LINE, markersize=9)
    ax.axvline(result.backward * scale, color=PHASES["other"], linewidth=0.8, zorder=0)
    rows(ax, ["computing", *(f"bucket {place}, {units.bytes_(one.size)}" for place, one in enumerate(result.buckets, start=1))])
    ax.set_xlabel(f"time since the backward began ({unit})")
    return ax


def _fitted(kind: str, size: float, ranks: int, link: object) -> float:
    from workbench.cost.collectives import Link, collective_seconds

    assert isinstance(link, Link)
    return collective_seconds(kind, size, ranks, link)
