"""Draws runs: the mean step as a stacked bar per rank (`step_time`) or per run (`compare`), and curves over the steps (`metrics`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.display.axes import WIDTH, Bar, bar_chart, ink, legend, note_beside, prepared, style_axes
from workbench.core.display.colors import LINE, SERIES
from workbench.core.display.colors import PHASES as COLORS
from workbench.core.run_directory import METRIC_KEYS
from workbench.core.vocabulary import PHASES
from workbench.runs.compare import Comparison
from workbench.runs.compare import compare as compared
from workbench.runs.rank_ends import extremes
from workbench.runs.run import Run
from workbench.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def step_time(result: Run | Timeline | Sequence[Timeline], ax: Axes | None = None) -> Axes:
    """Mean seconds per phase of a step, without warm-up: one stacked bar per rank.

    For a run with more than 128 ranks, only the first ranks and those with extreme values are drawn.

    Args:
        result: a run, a timeline (measured or predicted) or several.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: there is no measured step to draw.
    """
    if isinstance(result, Run):
        ranks = result.timelines
        timelines = [ranks[place] for place in extremes(result.rank_means)]
    else:
        timelines = [result] if isinstance(result, Timeline) else list(result)
    shown = [timeline for timeline in timelines if timeline.count]
    if not shown:
        raise ValueError(_nothing(result))
    kinds = {"predicted" if timeline.predicted else "measured" for timeline in shown}
    bars = [
        Bar(
            label=f"rank {t.rank}" + (f", {'predicted' if t.predicted else 'measured'}" if len(kinds) == 2 else ""),
            pieces=[t.mean(phase) for phase in PHASES],
            end=units.seconds(t.mean()),
            predicted=t.predicted,
        )
        for t in shown
    ]
    return bar_chart(ax, bars, f"mean step, {' and '.join(sorted(kinds))}", COLORS)


def compare(result: Comparison | Sequence[Run], ax: Axes | None = None) -> Axes:
    """The mean steps of several runs; the text at the end of a bar is the throughput, and the speedup over the first run.

    Launches of one program are one bar, of their mean.

    Raises:
        ValueError: fewer than two runs, or a run without a measured step.
    """
    comparison = result if isinstance(result, Comparison) else compared(*result)
    means = zip(*(comparison.seconds(phase) for phase in PHASES), strict=True)
    facts = comparison.facts()
    ups = [f"{units.times(fact['speedup'])}{' (within noise)' if fact['within_noise'] else ''}" for fact in facts]
    ups[0] = "baseline"
    ends = [f"{up}  ·  {units.rate(fact['samples_per_sec'])}" for up, fact in zip(ups, facts, strict=True)]
    labels = [re.sub(r", (?=[^()]*=)", ",\n", label) for label in comparison.labels]  # between knobs, not between numbers of launches
    bars = [Bar(label=label, pieces=mean, end=end) for label, mean, end in zip(labels, means, ends, strict=True)]
    return bar_chart(ax, bars, "mean step over all ranks, measured", COLORS)


def _nothing(result: object) -> str:
    if isinstance(result, Run):
        hint = str(result.error) if result.error else "wait for its steps (run.wait()), or launch a script with watch=True"
        return f"{result!r} has no measured step to draw ({result.state}): {hint}"
    return f"{result!r} has no measured step to draw: a step is measured from the one after the warm-up on"


def metrics(run: Run, ax: Axes | None = None) -> Axes:
    """The loss against the optimizer step; the learning rate on a second axis if it varies; evaluation figures at their step.

    Raises:
        ValueError: the run has not reported a loss.
    """
    rows = run.metric_rows
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    if not losses:
        hint = str(run.error) if run.error else "a script launched with watch=True has timelines only; a RunSpec reports its loss"
        raise ValueError(f"{run!r} has reported no loss to draw ({run.state}): {hint}")
    ax = prepared(ax, WIDTH, 3.0)
    ax.plot(*zip(*losses, strict=True), color=LINE, linewidth=1.8, label="loss", marker="o" if len(losses) < 3 else None)
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("training loss")
    ax.grid(axis="y", color=ink(ax), alpha=0.18, linewidth=0.8)
    ax.margins(x=0.01)
    _mark_evaluation(ax, rows)
    rates = [(row["step"], row["lr"]) for row in rows if row.get("lr") is not None]
    if len({rate for _, rate in rates}) > 1:
        _draw_rates(ax, rates)
    return ax


def _mark_evaluation(ax: Axes, rows: list[dict[str, float]]) -> None:
    """A dotted line where the model was evaluated, with the figures as text beside it."""
    last = max(row["step"] for row in rows if "step" in row)
    for row in rows:
        figures = {name: value for name, value in row.items() if name not in METRIC_KEYS}
        if not figures:
            continue
        text = "\n".join(f"{name} {value:.3g}" for name, value in figures.items())
        note_beside(ax, row["step"], text, left=row["step"] > last / 2)  # on the side that has room


def _draw_rates(ax: Axes, rates: list[tuple[float, float]]) -> None:
    """The learning rate, on an axis of its own at the right."""
    twin = style_axes(ax.twinx())
    twin.plot(*zip(*rates, strict=True), color=SERIES[1], linewidth=1.2, label="learning rate")
    twin.set_ylabel("learning rate")
    twin.set_ylim(bottom=0)
    twin.spines["right"].set_visible(True)
    twin.spines["left"].set_visible(False)
    legend(ax, [*ax.get_lines()[:1], *twin.get_lines()])
