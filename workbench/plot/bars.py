"""Stacked bars of a step: one per rank (`step_time`) or one per run (`compare`). The pieces of a bar add up to the mean step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench import units
from workbench.comparison import Comparison
from workbench.comparison import compare as compared
from workbench.plot.colors import PHASES as COLORS
from workbench.plot.stack import Bar, bar_chart
from workbench.run import Run
from workbench.timeline import PHASES, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    bars = [
        Bar(
            label=f"rank {t.rank}" + (f", {'predicted' if t.predicted else 'measured'}" if len(kinds) == 2 else ""),
            pieces=[t.mean(phase) for phase in PHASES],
            end=units.seconds(t.mean()),
            pale=t.predicted and len(kinds) == 2,
        )
        for t in shown
    ]
    return bar_chart(ax, bars, f"mean step, {' and '.join(sorted(kinds))}", COLORS)


def compare(result: Comparison | Sequence[Run], ax: Axes | None = None) -> Axes:
    """The mean step of several runs on the same axes; the text at a bar's end is its throughput, and its speedup over the first.

    Raises:
        ValueError: fewer than two runs, or one without a measured step.
    """
    comparison = result if isinstance(result, Comparison) else compared(*result)
    means = zip(*(comparison.seconds(phase) for phase in PHASES), strict=True)
    ups = ["baseline", *(units.times(up) for up in comparison.speedups[1:])]
    ends = [f"{up}  ·  {units.rate(run.samples_per_sec)}" for run, up in zip(comparison.runs, ups, strict=True)]
    labels = [label.replace(", ", ",\n") for label in comparison.labels]
    bars = [Bar(label=label, pieces=mean, end=end) for label, mean, end in zip(labels, means, ends, strict=True)]
    return bar_chart(ax, bars, "mean step over all ranks, measured", COLORS)


def _nothing(result: object) -> str:
    if isinstance(result, Run):
        hint = str(result.error) if result.error else "wait for its steps (run.wait()), or launch a script with watch=True"
        return f"{result!r} has no measured step to draw ({result.state}): {hint}"
    return f"{result!r} has no measured step to draw: a step is measured from the one after the warm-up on"
