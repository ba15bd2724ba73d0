"""Plans: what the step of each on the short list is made of; its memory beside what a GPU has; and GPUs against time or money."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import units
from workbench.planning import Plan, Plans
from workbench.plot.canvas import prepared
from workbench.plot.colors import GROUPS, INK, LINE, PARTS
from workbench.plot.memory import scale_of as scale_of_bytes
from workbench.plot.stack import PALE, WIDTH, Bar, ends, height, legend, rows, stacked, wrapped
from workbench.vocabulary import PLANNED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"compute": PARTS["compute"], "communication": PARTS["communication"], "bubble": PARTS["stalls"]}
"""Part of a planned step → colour; communication is that which nothing hides."""
HELD = {name: GROUPS[part] for name, part in PLANNED.items()}
"""What holds memory in a plan → colour."""


def plan(result: Plan | Plans, ax: Axes | None = None) -> Axes:
    """A bar per plan: computing, communication that nothing hides, the pipeline's bubble; a line from the low to the high end of the step.
    Below it, thinner and from where each begins, how far communication and bubble may reach.

    Args:
        result: a short list, or one plan.
        ax: where to draw; None = a new figure.
    """
    plans = _plans(result)
    bars = [
        Bar(label=wrapped(_label(one)), pieces=[one.parts[name] for name in COLORS], end=_end(one), reach=one.seconds.high) for one in plans
    ]
    ax = prepared(ax, WIDTH, height([bar.label for bar in bars]) + 0.3)
    scale = stacked(ax, bars, "predicted step", COLORS)
    for place, one in enumerate(plans):
        span = (scale * one.seconds.low, scale * one.seconds.high)
        ax.plot(span, (place, place), color=INK, linewidth=1.4, marker="|", markersize=9, label="_range")
        start = 0.0
        for name in COLORS:
            if name != "compute" and one.spans[name].high > 0:
                reach = (scale * (start + one.spans[name].low), scale * (start + one.spans[name].high))
                ax.plot(reach, (place + 0.22, place + 0.22), color=INK, linewidth=0.9, marker="|", markersize=5, label=f"_{name}")
            start += one.parts[name]
    legend(ax, list(ax.containers))
    return ax


def plan_memory(result: Plan | Plans, ax: Axes | None = None) -> Axes:
    """A bar per plan: the fullest GPU's memory by what holds it, a line from its low to its high end; dashed, what may be used of a GPU.

    Args:
        result: a short list, or one plan.
        ax: where to draw; None = a new figure.
    """
    plans = _plans(result)
    capacity = plans[0].capacity
    scale, unit = scale_of_bytes(max(capacity, *(one.needed.high for one in plans)))
    labels = [wrapped(_label(one)) for one in plans]
    ax = prepared(ax, WIDTH, height(labels) + 0.3)
    starts = [0.0] * len(plans)
    for name, color in HELD.items():
        widths = [one.memory[name] / scale for one in plans]
        ax.barh(range(len(plans)), widths, left=starts, height=0.62, color=color, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    limit = ax.axvline(capacity / scale, color=INK, linestyle="--", linewidth=1.4, label="may be used")
    for place, one in enumerate(plans):
        span = (one.needed.low / scale, one.needed.high / scale)
        ax.plot(span, (place, place), color=INK, linewidth=1.4, marker="|", markersize=9, label="_range")
    texts = [units.percent(one.bytes / capacity) + ", tight" * one.tight for one in plans]
    ends(ax, [max(capacity, one.needed.high) / scale for one in plans], texts)
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
    gpus = [one.gpus for one in front]
    ax.fill_between(gpus, [one.seconds.low for one in front], [one.seconds.high for one in front], color=LINE, alpha=PALE / 2, linewidth=0)
    ax.plot(gpus, [one.seconds.mid for one in front], color=LINE, marker="o", markersize=5, label="fastest plan")
    first = front[0]
    ax.plot(gpus, [first.seconds.mid * first.gpus / size for size in gpus], color=INK, linestyle=":", label="naive: as the fewest GPUs")
    ax.plot(
        [one.gpus for one in result.plans],
        [one.seconds.mid for one in result.plans],
        linestyle="none",
        marker="D",
        markersize=7,
        color=LINE,
        markerfacecolor="none",
        label="short list",
    )
    for one in front:
        ax.annotate(_LETTERS[one.bound], (one.gpus, one.seconds.mid), (0, 8), textcoords="offset points", ha="center", color=INK)
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


def _label(one: Plan) -> str:
    return f"{one.gpus:,} GPUs: {one.layout}, {one.batch}"


def _end(one: Plan) -> str:
    return f"{units.seconds(one.seconds.mid)}, {one.bound}"
