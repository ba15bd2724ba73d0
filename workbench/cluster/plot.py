"""Draws plans and communication.

Plans: what a step's time and memory are made of, and step time against GPUs. Communication: a step's collectives by module, measured
collectives by size, and the timeline of a simulated DDP step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.cluster.analysis.links import Links
from workbench.cluster.analysis.plan.plans import Plan, Plans
from workbench.cluster.analysis.traffic import Traffic
from workbench.cluster.analysis.twin_run import TwinRun
from workbench.core import units
from workbench.core.display.axes import (
    PALE,
    WIDTH,
    Bar,
    end_labels,
    height,
    legend,
    prepared,
    rows,
    scale_of,
    scale_of_bytes,
    stacked,
    wrapped,
)
from workbench.core.display.colors import GROUPS, INK, LINE, PARTS, PHASES
from workbench.core.vocabulary import PLANNED

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PLAN_COLORS = {"compute": PARTS["compute"], "communication": PARTS["communication"], "bubble": PARTS["stalls"]}
"""Part of a planned step → colour; communication is the exposed part."""
HELD = {name: GROUPS[part] for name, part in PLANNED.items()}
"""Part of a plan's memory → colour."""


def plan(result: Plan | Plans, ax: Axes | None = None) -> Axes:
    """A bar per plan: computing, exposed communication, the pipeline's bubble; a line from the low to the high end of the step.
    Below it, thinner and from where each begins, how far communication and bubble may reach.

    Args:
        result: a short list, or one plan.
        ax: where to draw; None = a new figure.
    """
    plans = _plans(result)
    bars = [
        Bar(
            label=wrapped(_label(candidate)),
            pieces=[candidate.parts[name] for name in PLAN_COLORS],
            end=_end(candidate),
            reach=candidate.seconds.high,
        )
        for candidate in plans
    ]
    ax = prepared(ax, WIDTH, height([bar.label for bar in bars]) + 0.3)
    scale = stacked(ax, bars, "predicted step", PLAN_COLORS)
    for place, candidate in enumerate(plans):
        span = (scale * candidate.seconds.low, scale * candidate.seconds.high)
        ax.plot(span, (place, place), color=INK, linewidth=1.4, marker="|", markersize=9, label="_range")
        start = 0.0
        for name in PLAN_COLORS:
            if name != "compute" and candidate.spans[name].high > 0:
                reach = (scale * (start + candidate.spans[name].low), scale * (start + candidate.spans[name].high))
                ax.plot(reach, (place + 0.22, place + 0.22), color=INK, linewidth=0.9, marker="|", markersize=5, label=f"_{name}")
            start += candidate.parts[name]
    legend(ax, list(ax.containers))
    return ax


def plan_memory(result: Plan | Plans, ax: Axes | None = None) -> Axes:
    """A bar per plan: the memory of the GPU that needs most, by part, and a line from the low to the high end; dashed: what a GPU has.

    Args:
        result: a short list, or one plan.
        ax: where to draw; None = a new figure.
    """
    plans = _plans(result)
    capacity = plans[0].capacity
    scale, unit = scale_of_bytes(max(capacity, *(candidate.needed.high for candidate in plans)))
    labels = [wrapped(_label(candidate)) for candidate in plans]
    ax = prepared(ax, WIDTH, height(labels) + 0.3)
    starts = [0.0] * len(plans)
    for name, color in HELD.items():
        widths = [candidate.memory[name] / scale for candidate in plans]
        ax.barh(range(len(plans)), widths, left=starts, height=0.62, color=color, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    limit = ax.axvline(capacity / scale, color=INK, linestyle="--", linewidth=1.4, label="may be used")
    for place, candidate in enumerate(plans):
        span = (candidate.needed.low / scale, candidate.needed.high / scale)
        ax.plot(span, (place, place), color=INK, linewidth=1.4, marker="|", markersize=9, label="_range")
    texts = [units.percent(candidate.bytes / capacity) + ", tight" * candidate.tight for candidate in plans]
    end_labels(ax, [max(capacity, candidate.needed.high) / scale for candidate in plans], texts)
    rows(ax, labels)
    ax.set_xlabel(f"predicted memory of the fullest GPU ({unit})")
    legend(ax, [*ax.containers, limit])
    return ax


def plan_front(result: Plans, ax: Axes | None = None) -> Axes:
    """The fastest plan for every number of GPUs: seconds of a step against GPUs, both logarithmic, with its range; dotted: as the fewest
    GPUs go on. Diamonds are on the short list. Which limits a plan, a letter says: c(ompute), n(etwork), b(ubble), m(emory).

    Args:
        result: of `wb.plan` without `gpus`.
        ax: where to draw; None = a new figure.
    """
    ax = prepared(ax, WIDTH, 4.0)
    front = result.front
    gpus = [candidate.gpus for candidate in front]
    ax.fill_between(
        gpus,
        [candidate.seconds.low for candidate in front],
        [candidate.seconds.high for candidate in front],
        color=LINE,
        alpha=PALE / 2,
        linewidth=0,
    )
    ax.plot(gpus, [candidate.seconds.mid for candidate in front], color=LINE, marker="o", markersize=5, label="fastest plan")
    first = front[0]
    ax.plot(gpus, [first.seconds.mid * first.gpus / size for size in gpus], color=INK, linestyle=":", label="naive: as the fewest GPUs")
    ax.plot(
        [candidate.gpus for candidate in result.plans],
        [candidate.seconds.mid for candidate in result.plans],
        linestyle="none",
        marker="D",
        markersize=7,
        color=LINE,
        markerfacecolor="none",
        label="short list",
    )
    for candidate in front:
        ax.annotate(
            _LETTERS[candidate.bound], (candidate.gpus, candidate.seconds.mid), (0, 8), textcoords="offset points", ha="center", color=INK
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(gpus[:: -(-len(gpus) // 8)], [units.count(size) for size in gpus[:: -(-len(gpus) // 8)]])
    ax.minorticks_off()
    ax.set_xlabel("GPUs")
    ax.set_ylabel("predicted step (s)")
    handles, _ = ax.get_legend_handles_labels()
    legend(ax, handles)
    return ax


_LETTERS = {"compute": "c", "communication": "n", "bubble": "b", "memory": "m"}


def _plans(result: Plan | Plans) -> list[Plan]:
    return [result] if isinstance(result, Plan) else list(result.plans)


def _label(candidate: Plan) -> str:
    return f"{candidate.gpus:,} GPUs: {candidate.layout}, {candidate.batch}"


def _end(candidate: Plan) -> str:
    return f"{units.seconds(candidate.seconds.mid)}, {candidate.bound}"


TRAFFIC_COLORS = {
    "all_reduce": PARTS["communication"],
    "all_gather": PHASES["forward"],
    "reduce_scatter": PHASES["backward"],
    "broadcast": PHASES["optimizer"],
    "all_to_all": PHASES["data_wait"],
    "reduce": PHASES["h2d"],
}
"""Collective → colour."""
MOST_BARS = 16
"""Most modules with a bar of their own."""


def traffic(result: Traffic, ax: Axes | None = None, *, depth: int | None = 2) -> Axes:
    """What a rank sends in a step, a stacked bar per module, in a colour per collective.

    Args:
        result: of `wb.collectives`.
        ax: the Axes to draw into; None makes a figure.
        depth: how many names of a module's path are kept.

    Raises:
        ValueError: the step sends nothing.
    """
    modules = [row for row in result.by_module(depth) if row.sent]
    if not modules:
        raise ValueError(f"{result!r}: nothing is sent, so there is nothing to draw; take world_size=2 or more")
    shown, rest = modules[:MOST_BARS], modules[MOST_BARS:]
    bars = [(row.name or "(model)", row.calls) for row in shown]
    if rest:
        bars.append((f"{len(rest)} others", tuple(call for row in rest for call in row.calls)))
    ax = prepared(ax, WIDTH, height([name for name, _ in bars]))
    left = [0.0] * len(bars)
    for kind in dict.fromkeys(call.kind for call in result):
        sent = [sum(call.sent for call in calls if call.kind == kind) / 2**20 for _, calls in bars]
        ax.barh(range(len(bars)), sent, left=left, height=0.72, color=TRAFFIC_COLORS.get(kind, PHASES["other"]), label=kind)
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
        color = TRAFFIC_COLORS.get(kind, PHASES["other"])
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
    """The backward above, and the buckets below it: when each was ready, and when the network sent it.

    Args:
        result: of `wb.ddp_twin`.
        ax: the Axes to draw into; None makes a figure.
    """
    ax = prepared(ax, WIDTH, 1.2 + 0.26 * (1 + len(result.buckets)))
    end = max([result.backward, *(bucket.end for bucket in result.buckets)])
    scale, unit = scale_of(end)
    ax.barh(0, result.backward * scale, height=0.6, color=PHASES["backward"], label="backward")
    for place, bucket in enumerate(result.buckets, start=1):
        ax.barh(place, (bucket.end - bucket.start) * scale, left=bucket.start * scale, height=0.6, color=PARTS["communication"])
        ax.plot([bucket.ready * scale], [place], "|", color=LINE, markersize=9)
    ax.axvline(result.backward * scale, color=PHASES["other"], linewidth=0.8, zorder=0)
    rows(ax, ["computing", *(f"bucket {place}, {units.bytes_(bucket.size)}" for place, bucket in enumerate(result.buckets, start=1))])
    ax.set_xlabel(f"time since the backward began ({unit})")
    return ax


def _fitted(kind: str, size: float, ranks: int, link: object) -> float:
    from workbench.cluster.analysis.collective_cost import Link, collective_seconds

    assert isinstance(link, Link)
    return collective_seconds(kind, size, ranks, link)
