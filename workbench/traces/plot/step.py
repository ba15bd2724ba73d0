"""Draws what holds a traced step back: its resources, its critical path, and why it idles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.display.axes import (
    WIDTH,
    Bar,
    area,
    bar_chart,
    draw_bars,
    end_labels,
    height,
    legend,
    prepared,
    rows,
    scale_of,
    shortened,
)
from workbench.core.display.colors import OUTSIDE, PARTS, PHASES, TRACED
from workbench.traces.analysis.bottleneck import Bottleneck
from workbench.traces.analysis.critical_path import CriticalPath, OnPath
from workbench.traces.analysis.idle import Idle
from workbench.traces.analysis.trace import Trace

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


RESOURCE_COLORS = {
    "data": PARTS["data_wait"],
    "host": PARTS["host"],
    "transfer": PARTS["transfer"],
    "device": PARTS["compute"],
    "communication": PARTS["communication"],
}
"""Resource → colour."""


def critical(result: Trace | Bottleneck, ax: Axes | None = None) -> Axes:
    """A bar per resource, as long as it works in a mean step; in its full part nothing else works. The text is the step without it.

    Raises:
        ValueError: no resource works within a step.
    """
    answer = result.critical() if isinstance(result, Trace) else result
    if not answer.rows:
        raise ValueError(f"{answer!r} has nothing to draw: nothing works within a step; trace some with a schedule, wb.trace(step, loader)")
    labels = [row.name for row in answer.rows]
    ax = prepared(ax, WIDTH, height(labels))
    scale, unit = scale_of(max(answer.step_seconds, *(row.busy for row in answer.rows)))
    colors = [RESOURCE_COLORS[row.name] for row in answer.rows]
    rows(ax, labels)
    alone = [row.alone * scale for row in answer.rows]
    draw_bars(ax, alone, None, colors, label="alone")
    draw_bars(ax, [(row.busy - row.alone) * scale for row in answer.rows], alone, colors, label="while another works too", pale=True)
    end_labels(ax, [row.busy * scale for row in answer.rows], [f"step without it ≥ {units.seconds(row.ceiling)}" for row in answer.rows])
    ax.set_xlabel(f"at work in a mean step ({unit})")
    legend(ax, _keys(ax, "alone", "while another works too"))
    return ax


def _keys(ax: Axes, full: str, beside: str) -> list[Artist]:
    """A full and a pale patch, in a grey that stands for every colour."""
    from matplotlib.patches import Patch

    return [Patch(label=label, **area(ax, OUTSIDE, pale=label == beside)) for label in (full, beside)]


MOST = 10
"""Operators that are drawn: those with most time on the path."""
PATH_COLORS = {
    "data_wait": PARTS["data_wait"],
    "h2d": PARTS["transfer"],
    "compute": PARTS["compute"],
    "communication": PARTS["communication"],
    "copy": TRACED["copy"],
    "host": PARTS["host"],
    "python": TRACED["python"],
    "launch": TRACED["launch"],
    "queue": PARTS["straggler"],
    "waking": PHASES["other"],
}
"""Part of the path → colour."""


def critical_path(result: Trace | CriticalPath, ax: Axes | None = None) -> Axes:
    """The mean step as one bar of parts; below it a bar per operator, as long as its total time; its full part is on the critical path.

    The text is that time, and the share of it on the path if that is not all of it.

    Raises:
        ValueError: there is no step with a length.
    """
    answer = result.critical_path() if isinstance(result, Trace) else result
    if not answer.parts:
        raise ValueError(f"{answer!r} has no step with a length to draw: trace some with a schedule, wb.trace(step, loader)")
    most = answer.rows[:MOST]
    labels = ["the step", *(shortened(row.name.removeprefix("void ")) for row in most)]
    ax = prepared(ax, WIDTH, height(labels) * 0.75 + 0.3)
    scale, unit = scale_of(answer.step_seconds)
    rows(ax, labels)
    left, drawn = 0.0, {}
    for part in answer.parts:
        drawn[part.part] = draw_bars(ax, [part.seconds * scale], [left], PATH_COLORS[part.part], label=part.part)
        left += part.seconds * scale
    for place, row in enumerate(most, 1):
        draw_bars(ax, [row.seconds * scale], None, PATH_COLORS[row.part], rows=[place])
        beside = max(0.0, row.own_seconds - row.seconds) * scale
        draw_bars(ax, [beside], [row.seconds * scale], PATH_COLORS[row.part], rows=[place], pale=True)
    reaches = [left, *(max(row.own_seconds, row.seconds) * scale for row in most)]
    end_labels(ax, reaches, [units.seconds(answer.step_seconds), *map(_on_path, most)])
    beside = any(row.on_path < ALL for row in most)
    ax.set_xlabel(f"mean traced step ({unit}); {'pale: beside the path' if beside else 'all of it is on the critical path'}")
    legend(ax, list(drawn.values()))
    return ax


ALL = 0.9995
"""Share that is written as 100 %."""


def _on_path(row: OnPath) -> str:
    own = units.seconds(max(row.own_seconds, row.seconds))
    return own if row.on_path >= ALL else f"{own}, {units.percent(row.on_path)} on the path"


IDLE_COLORS = {
    "data": PARTS["data_wait"],
    "waiting": PARTS["straggler"],
    "communication": PARTS["communication"],
    "launching": TRACED["launch"],
    "operators": PARTS["host"],
    "python": TRACED["python"],
    "unrecorded": PHASES["other"],
    "something is computed": PARTS["compute"],
}
"""Cause → colour; the last one is the rest of the step."""


def idle(result: Trace | Idle, ax: Axes | None = None) -> Axes:
    """The mean step in one bar: what the host does while nothing is computed, and the time in which something is computed.

    Raises:
        ValueError: there is no step with a length.
    """
    answer = result.idle() if isinstance(result, Trace) else result
    if not answer.step_seconds > 0:
        raise ValueError(f"{answer!r} has no step with a length to draw: trace some with a schedule, wb.trace(step, loader)")
    seconds = {cause.cause: cause.seconds for cause in answer.causes}
    used = {name: color for name, color in IDLE_COLORS.items() if seconds.get(name)}
    rest = max(0.0, answer.step_seconds - answer.seconds)
    pieces = [*(seconds[name] for name in used), rest]
    end = f"idle {units.percent(answer.share)} of {units.seconds(answer.step_seconds)}"
    bars = [Bar(label="device" if answer.who == "device" else "the thread\nthat trains", pieces=pieces, end=end)]
    last = "something is computed"
    return bar_chart(ax, bars, "mean traced step", {**used, last: IDLE_COLORS[last]}, more=0.2)
