"""Stacked bars of a step: one per rank (`step_time`) or one per run (`compare`). The pieces of a bar add up to the mean step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench import units
from workbench.comparison import Comparison
from workbench.comparison import compare as compared
from workbench.plot.canvas import prepared
from workbench.plot.colors import INK, text_on
from workbench.plot.colors import PHASES as COLORS
from workbench.run import Run
from workbench.timeline import PHASES, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 7.6
_WIDE_ENOUGH = 0.07  # of the axis: a share is written into a piece from here on


def step_time(result: Run | Timeline | Sequence[Timeline], ax: Axes | None = None) -> Axes:
    """Where a step goes: one stacked bar per rank, in mean seconds per phase, warm-up left out.

    Args:
        result: a run, a timeline (measured or predicted) or several.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: there is no measured step to draw.
    """
    timelines = result.timelines if isinstance(result, Run) else [result] if isinstance(result, Timeline) else list(result)
    shown = [timeline for timeline in timelines if timeline.count]
    if not shown:
        raise ValueError(_nothing(result))
    kinds = {"predicted" if timeline.predicted else "measured" for timeline in shown}
    labels = [f"rank {t.rank}" + (f", {'predicted' if t.predicted else 'measured'}" if len(kinds) == 2 else "") for t in shown]
    means = [[timeline.mean(phase) for phase in PHASES] for timeline in shown]
    ends = [units.seconds(timeline.mean()) for timeline in shown]
    return _stacked(prepared(ax, WIDTH, _height(labels)), labels, means, ends, f"mean step, {' and '.join(sorted(kinds))}")


def compare(result: Comparison | Sequence[Run], ax: Axes | None = None) -> Axes:
    """The mean step of several runs on the same axes; the text at a bar's end is its throughput, and its speedup over the first.

    Raises:
        ValueError: fewer than two runs, or one without a measured step.
    """
    comparison = result if isinstance(result, Comparison) else compared(*result)
    means = list(zip(*(comparison.seconds(phase) for phase in PHASES), strict=True))
    ups = ["baseline", *(units.times(up) for up in comparison.speedups[1:])]
    ends = [f"{up}  ·  {units.rate(run.samples_per_sec)}" for run, up in zip(comparison.runs, ups, strict=True)]
    labels = [label.replace(", ", ",\n") for label in comparison.labels]
    return _stacked(prepared(ax, WIDTH, _height(labels)), labels, means, ends, "mean step over all ranks, measured")


def _stacked(ax: Axes, labels: Sequence[str], rows: Sequence[Sequence[float]], ends: Sequence[str], what: str) -> Axes:
    """Draw `rows` (seconds per phase) as horizontal bars from top to bottom, each with a text at its end."""
    longest = max(map(sum, rows))
    scale, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
    places = range(len(rows))
    starts = [0.0] * len(rows)
    for column, phase in enumerate(PHASES):
        widths = [row[column] * scale for row in rows]
        ax.barh(places, widths, left=starts, height=0.62, color=COLORS[phase], label=phase)
        for place, start, width, row in zip(places, starts, widths, rows, strict=True):
            if width >= _WIDE_ENOUGH * longest * scale:
                share = units.percent(row[column] / sum(row))
                ax.text(start + width / 2, place, share, ha="center", va="center", fontsize=8.5, color=text_on(COLORS[phase]))
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, start, text in zip(places, starts, ends, strict=True):
        ax.annotate(text, (start, place), (6, 0), textcoords="offset points", va="center", color=INK)
    ax.set_yticks(places, labels)
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.margins(x=0)
    ax.set_xlim(0, longest * scale * (1.1 + 0.012 * max(map(len, ends))))  # room for the text at the end of the longest bar
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"{what} ({unit})")
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(PHASES),
        frameon=False,
        labelcolor=INK,
        fontsize=9,
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.5,
        columnspacing=1.4,
        borderaxespad=0.2,
        borderpad=0.2,
    )
    return ax


def _height(labels: Sequence[str]) -> float:
    """Inches for bars with these labels, legend and axis included."""
    lines = max(label.count("\n") for label in labels) + 1
    return 1.05 + max(0.46, 0.1 + 0.19 * lines) * len(labels)


def _nothing(result: object) -> str:
    if isinstance(result, Run):
        hint = str(result.error) if result.error else "wait for its steps (run.wait()), or launch a script with watch=True"
        return f"{result!r} has no measured step to draw ({result.state}): {hint}"
    return f"{result!r} has no measured step to draw: a step is measured from the one after the warm-up on"
