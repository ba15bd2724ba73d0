"""Draws what was measured beside what was predicted, and beside what a rule of thumb or a linear extrapolation would have said."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from workbench.core.display.axes import WIDTH, area, halo, ink, legend, marker_look, prepared
from workbench.core.display.colors import LINE
from workbench.core.statistics import Interval


def reveal(
    measured: float | Interval,
    predicted: float | Interval,
    others: Mapping[str, float],
    what: str = "speedup (×)",
    ax: Axes | None = None,
    *,
    beside: Mapping[str, float] | None = None,
) -> Axes:
    """Draw a bar for each answer to one question: measured is solid, predicted is hatched, and what others say is hollow.

    Args:
        measured: the figure, or its interval.
        predicted: what this notebook predicted before, or its interval.
        others: what else one might have said, by who says it: `{"rule of thumb: twice the workers, half the step": 2.0}`.
        what: the label of the axis, with its unit.
        ax: where to draw; a new figure if there is none.
        beside: what else was measured, for comparison, by name: solid, too, and pale.
    """
    answers = [("measured", measured), ("predicted here", predicted)]
    rows = [*answers, *(beside or {}).items(), *others.items()]
    ax = prepared(ax, WIDTH, 0.7 + 0.42 * len(rows))
    for place, (name, value) in enumerate(rows):
        middle = value.mid if isinstance(value, Interval) else value
        if place < len(rows) - len(others):
            look = area(ax, LINE, predicted=place == 1, pale=name in (beside or {}))
        else:
            look = {"facecolor": "none", "edgecolor": ink(ax), "linewidth": 0.8}
        ax.barh(place, middle, height=0.62, **look)
        end = middle
        if isinstance(value, Interval):
            ax.plot([value.low, value.high], [place, place], color=ink(ax), linewidth=1.6)
            end = max(middle, value.high)
        words = f"{middle:,.0f}" if middle >= 1000 else f"{middle:.3g}"
        text = ax.annotate(words, (end, place), xytext=(5, 0), textcoords="offset points", va="center", color=ink(ax), fontsize=9)
        text.set_path_effects(halo(ax))  # the line of the measurement may run through it
    ax.axvline(rows[0][1].mid if isinstance(measured, Interval) else measured, color=LINE, linewidth=0.9, linestyle=":")
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.invert_yaxis()
    ax.set_xlabel(what)
    ax.margins(x=0.12)
    ax.set_xlim(left=0)
    return ax


def curve(
    measured: Mapping[float, float],
    predicted: Mapping[float, float],
    others: Mapping[str, Mapping[float, float]],
    across: str,
    up: str,
    *,
    beside: Mapping[str, Mapping[float, float]] | None = None,
) -> Axes:
    """Draw answers that depend on something: measured are dots, predicted is a dashed line with rings, and what others say is dotted.

    Args:
        measured: place → figure.
        predicted: the same.
        others: who says it → the same.
        across: label of the horizontal axis, with its unit.
        up: label of the vertical axis, with its unit.
        beside: what else was measured, for comparison, by name: filled squares on a solid line.
    """
    ax = prepared(None, WIDTH, 3.6)
    drawn = ax.plot(list(measured), list(measured.values()), "o", color=LINE, markersize=5, label="measured", zorder=3)
    look = marker_look(ax, LINE, predicted=True)
    drawn += ax.plot(list(predicted), list(predicted.values()), marker="o", linewidth=1.4, markersize=10, label="predicted here", **look)
    for name, answers in (beside or {}).items():
        drawn += ax.plot(list(answers), list(answers.values()), "s-", color=ink(ax), linewidth=1.0, markersize=5, label=name)
    for (name, answers), style in zip(others.items(), (":", "-.", "--"), strict=False):
        drawn += ax.plot(list(answers), list(answers.values()), style, color=ink(ax), linewidth=1.4, label=name)
    ax.set_ylim(bottom=0)
    ax.grid(axis="y", color=ink(ax), alpha=0.18, linewidth=0.8)
    ax.set_xlabel(across)
    ax.set_ylabel(up)
    legend(ax, drawn)
    return ax
