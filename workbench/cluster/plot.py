"""Draws plans and communication.

Plans: what a step's time and memory are made of, and step time against GPUs. Communication: a step's collectives by module, measured
collectives by size, and the timeline of a simulated DDP step.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from workbench.cluster.analysis.links import Links
from workbench.cluster.analysis.operator_time import KINDS
from workbench.cluster.analysis.plan.plans import Plan, Plans
from workbench.cluster.analysis.step_time import StepTime
from workbench.cluster.analysis.traffic import Traffic
from workbench.cluster.analysis.twin_run import TwinRun
from workbench.core import units
from workbench.core.display.axes import (
    DASHES,
    WIDTH,
    Bar,
    band,
    draw_bars,
    end_labels,
    halo,
    height,
    ink,
    kinds,
    legend,
    limit,
    marker_look,
    prepared,
    rows,
    scale_of,
    scale_of_bytes,
    stacked,
    wrapped,
)
from workbench.core.display.colors import GROUPS, LINE, OUTSIDE, PARTS, PHASES, SERIES
from workbench.core.vocabulary import PLANNED

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PLAN_COLORS = {"compute": PARTS["compute"], "communication": PARTS["communication"], "bubble": PARTS["stalls"]}
"""Part of a planned step → colour; communication is the exposed part."""
HELD = {name: OUTSIDE if name == "outside" else GROUPS[part] for name, part in PLANNED.items()}
"""Part of a plan's memory → colour."""


def plan(result: Plan | Plans, ax: Axes | None = None) -> Axes:
    """A bar per plan: computing, exposed communication and pipeline bubble, with a line from the low to the high end of the step. Thinner
    lines below, from the start of each part, show the ranges of communication and bubble.

    Args:
        result: a short list, or one plan.
        ax: where to draw; None = a new figure.
    """
    plans = _plans(result)
    bars = [
        Bar(
            label=wrapped(_label(candidate)),
            pieces=[candidate.parts[name] for name in PLAN_COLORS],
            end=f"{units.seconds(candidate.seconds.mid)}, {candidate.bound}",
            reach=candidate.seconds.high,
            predicted=True,
        )
        for candidate in plans
    ]
    ax = prepared(ax, WIDTH, height([bar.label for bar in bars]) + 0.3)
    scale = stacked(ax, bars, "predicted step", PLAN_COLORS)
    look: dict[str, Any] = {"color": ink(ax), "path_effects": halo(ax)}
    for place, candidate in enumerate(plans):
        span = (scale * candidate.seconds.low, scale * candidate.seconds.high)
        ax.plot(span, (place, place), linewidth=1.4, marker="|", markersize=9, label="_range", **look)
        start = 0.0
        for name in PLAN_COLORS:
            if name != "compute" and candidate.spans[name].high > 0:
                reach = (scale * (start + candidate.spans[name].low), scale * (start + candidate.spans[name].high))
                ax.plot(reach, (place + 0.22, place + 0.22), linewidth=0.9, marker="|", markersize=5, label=f"_{name}", **look)
            start += candidate.parts[name]
    legend(ax, list(ax.containers))
    return ax


def plan_memory(result: Plan | Plans, ax: Axes | None = None) -> Axes:
    """A bar per plan: memory of the fullest GPU, by part, with a line from the low to the high end; the red line is a GPU's memory.

    Args:
        result: a short list, or one plan.
        ax: where to draw; None = a new figure.
    """
    plans = _plans(result)
    capacity = plans[0].capacity
    scale, unit = scale_of_bytes(max(capacity, *(candidate.needed.high for candidate in plans)))
    labels = [wrapped(_label(candidate)) for candidate in plans]
    ax = prepared(ax, WIDTH, height(labels) + 0.3)
    rows(ax, labels)
    starts = [0.0] * len(plans)
    for name, color in HELD.items():
        widths = [candidate.memory[name] / scale for candidate in plans]
        draw_bars(ax, widths, starts, color, label=name, predicted=True)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    line = limit(ax, capacity / scale, f"may be used: {units.bytes_(capacity)}")
    for place, candidate in enumerate(plans):
        span = (candidate.needed.low / scale, candidate.needed.high / scale)
        ax.plot(span, (place, place), color=ink(ax), path_effects=halo(ax), linewidth=1.4, marker="|", markersize=9, label="_range")
    texts = [units.percent(candidate.bytes / capacity) + ", tight" * candidate.tight for candidate in plans]
    end_labels(ax, [max(capacity, candidate.needed.high) / scale for candidate in plans], texts)
    ax.set_xlabel(f"predicted memory of the fullest GPU ({unit})")
    legend(ax, [*ax.containers, line])
    return ax


def plan_front(result: Plans, ax: Axes | None = None) -> Axes:
    """The fastest plan for every number of GPUs: seconds of a step against GPUs, both logarithmic, with the range. The dotted line is
    perfect scaling from the fewest GPUs. Diamonds are on the short list. A letter says what limits a plan: c(ompute), n(etwork), b(ubble)
    or m(emory).

    Args:
        result: result of `wb.plan` without `gpus`.
        ax: where to draw; None = a new figure.
    """
    ax = prepared(ax, WIDTH, 4.0)
    front = result.front
    gpus = [candidate.gpus for candidate in front]
    band(ax, gpus, [candidate.seconds.low for candidate in front], [candidate.seconds.high for candidate in front], LINE)
    ax.plot(gpus, [candidate.seconds.mid for candidate in front], marker="o", label="fastest plan", **marker_look(ax, LINE, predicted=True))
    first = front[0]
    ax.plot(gpus, [first.seconds.mid * first.gpus / size for size in gpus], color=ink(ax), linestyle=":", label="naive: as the fewest GPUs")
    ax.plot(
        [candidate.gpus for candidate in result.plans],
        [candidate.seconds.mid for candidate in result.plans],
        marker="D",
        markersize=8,
        label="short list",
        **marker_look(ax, LINE, predicted=True) | {"linestyle": "none"},
    )
    for candidate in front:
        ax.annotate(
            _LETTERS[candidate.bound],
            (candidate.gpus, candidate.seconds.mid),
            (0, 9),
            textcoords="offset points",
            ha="center",
            color=ink(ax),
            path_effects=halo(ax),
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
    return f"{candidate.gpus:,} GPUs: {candidate.layout}, " + candidate.batch.replace(" × ", "\u00a0×\u00a0")  # on one line


TIME_COLORS = {
    "update": PARTS["optimizer"],
    "launch gaps": PARTS["stalls"],
    "pipeline idle": PARTS["stalls"],
    "exposed communication": PARTS["communication"],
}
"""Part of an estimated step → colour; all others compute."""


def estimated_time(result: StepTime, ax: Axes | None = None) -> Axes:
    """The predicted seconds of a step by kind of operator, launch gaps, idle stages and exposed communication, longest first; a line from
    the low to the high end of each kind.

    Args:
        result: the result of `wb.estimate_time`.
        ax: the Axes to draw into; None makes a figure.
    """
    parts = sorted(((name, seconds) for name, seconds in result.parts.items() if seconds), key=lambda item: -item[1])
    names = [wrapped(KINDS.get(name, name)) for name, _ in parts]
    ax = prepared(ax, WIDTH, height(names))
    scale, unit = scale_of(parts[0][1])
    draw_bars(
        ax, [seconds * scale for _, seconds in parts], None, [TIME_COLORS.get(name, PARTS["compute"]) for name, _ in parts], predicted=True
    )
    rows(ax, names)
    reaches = []
    for place, (name, seconds) in enumerate(parts):
        ends = [result.exposed.low, result.exposed.high] if name == "exposed communication" else [seconds, seconds]
        if name in KINDS and result.calibration is None:
            ends = [result.computing(end)[name] for end in ("low", "high")]
        reaches.append(max(ends[1], seconds) * scale)
        if ends[1] > ends[0]:
            ax.plot(
                [end * scale for end in ends], [place] * 2, linewidth=1.4, marker="|", markersize=9, color=ink(ax), path_effects=halo(ax)
            )
    whole = result.seconds.mid
    end_labels(ax, reaches, [f"{units.seconds(seconds)}, {units.percent(seconds / whole)}" for _, seconds in parts])
    ax.set_xlabel(f"predicted time of a step ({unit})")
    return ax


TRAFFIC_COLORS = dict(zip(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"), SERIES, strict=True))
"""Collective → colour."""
MOST_BARS = 16
"""Most modules with a bar of their own."""


def traffic(result: Traffic, ax: Axes | None = None, *, depth: int | None = 2) -> Axes:
    """What a rank sends in a step, a stacked bar per module, in a colour per collective.

    Args:
        result: the result of `wb.collectives`.
        ax: the Axes to draw into; None makes a figure.
        depth: number of names in a module's path to distinguish.

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
        draw_bars(ax, sent, left, TRAFFIC_COLORS.get(kind, PHASES["other"]), label=kind, height=0.72)
        left = [before + more for before, more in zip(left, sent, strict=True)]
    rows(ax, [name for name, _ in bars])
    ax.set_xlabel("sent by a rank in a step (MiB)")
    legend(ax, list(ax.containers))
    return ax


def links(result: Links, ax: Axes | None = None) -> Axes:
    """Measured seconds of each collective against its size; a dashed line shows what latency and bandwidth predict.

    Args:
        result: the result of `wb.measure_collectives`.
        ax: the Axes to draw into; None makes a figure.
    """
    ax = prepared(ax, WIDTH, 3.6)
    for kind, marker in zip(result.kinds, itertools.cycle("osD^v"), strict=False):
        swept = [point for point in result.points if point.kind == kind]
        color = TRAFFIC_COLORS.get(kind, OUTSIDE)
        for point in swept:
            ax.plot([point.size] * 2, [min(point.seconds), max(point.seconds)], color=color, linewidth=1.2)
        ax.plot([p.size for p in swept], [p.median for p in swept], color=color, marker=marker, markersize=5, linestyle="none", label=kind)
        link = result[kind].link
        ax.plot(
            [p.size for p in swept], [_fitted(kind, p.size, result.ranks, link) for p in swept], color=color, linewidth=1, linestyle=DASHES
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("size (bytes)")
    ax.set_ylabel("time (s)")
    shown = [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]
    legend(ax, [*shown, *kinds(ax, of_lines=True)])
    return ax


def twin(result: TwinRun, ax: Axes | None = None) -> Axes:
    """The backward, and below it the buckets: when each was ready, and when the network sent it.

    Args:
        result: the result of `wb.ddp_twin`.
        ax: the Axes to draw into; None makes a figure.
    """
    ax = prepared(ax, WIDTH, 1.2 + 0.26 * (1 + len(result.buckets)))
    end = max([result.backward, *(bucket.end for bucket in result.buckets)])
    scale, unit = scale_of(end)
    drawn = [draw_bars(ax, [result.backward * scale], None, PHASES["backward"], label="backward", predicted=True, height=0.6)]
    places, sizes = range(1, len(result.buckets) + 1), [(bucket.end - bucket.start) * scale for bucket in result.buckets]
    starts, color = [bucket.start * scale for bucket in result.buckets], PARTS["communication"]
    drawn.append(draw_bars(ax, sizes, starts, color, label="all-reduce, predicted", predicted=True, height=0.6, rows=places))
    ready = [bucket.ready * scale for bucket in result.buckets]
    marks = ax.plot(ready, places, "|", color=ink(ax), markersize=13, markeredgewidth=2, path_effects=halo(ax), label="gradients ready")
    ax.axvline(result.backward * scale, color=ink(ax), linewidth=0.8, linestyle=":", zorder=0)
    rows(ax, ["computing", *(f"bucket {place}, {units.bytes_(bucket.size)}" for place, bucket in enumerate(result.buckets, start=1))])
    ax.set_xlabel(f"time since the backward began ({unit})")
    legend(ax, [*drawn, *marks])
    return ax


def _fitted(kind: str, size: float, ranks: int, link: object) -> float:
    from workbench.cluster.analysis.collective_cost import Link, collective_seconds

    assert isinstance(link, Link)
    return collective_seconds(kind, size, ranks, link)
