"""Memory over the steps: stacked areas of the groups, the phases behind them, and the peak with its moment in words."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from workbench.memory.breakdown import MemoryBreakdown
from workbench.memory.log import GROUPS
from workbench.memory.over_time import MemoryTimeline
from workbench.plot.canvas import prepared
from workbench.plot.colors import GROUPS as COLORS
from workbench.plot.colors import INK
from workbench.plot.memory import VISIBLE
from workbench.plot.stack import WIDTH, legend, scale_of_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHADES = {"forward": 0.05, "backward": 0.16, "optimizer": 0.28}
"""Phase → how dark it is shaded; the others are short and stay white."""
_ROOM = 1.45  # of the highest: for the words above
_LETTER = 0.0098  # of the axis: the width of a letter; a phase has its name where that has room
_LETTERS = 46


def memory_timeline(result: MemoryBreakdown | MemoryTimeline, ax: Axes | None = None) -> Axes:
    """What each group holds from event to event, stacked; the phases are shaded and named, the peak is marked with its moment in words.

    The horizontal axis counts births and deaths of storages: a prediction knows no seconds.

    Args:
        result: a breakdown, or its timeline.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: no timeline was recorded.
    """
    timeline = result.timeline if isinstance(result, MemoryBreakdown) else result
    if not timeline.position:
        raise ValueError(
            "no timeline to draw: this breakdown was measured without a log of the storages; measure it with one, or predict it"
        )
    ax = prepared(ax, WIDTH, 3.6)
    total = timeline.total
    scale, unit = scale_of_bytes(max(total))
    groups = [group for group in GROUPS if any(timeline.held[group])]
    areas = ax.stackplot(
        timeline.position,
        *([held / scale for held in timeline.held[group]] for group in groups),
        colors=[COLORS[group] for group in groups],
        labels=[group.replace("_", " ") for group in groups],
        step="post",
        linewidth=0,
    )
    ax.set_xlim(timeline.position[0], max(timeline.position[-1], timeline.position[0] + 1))
    ax.set_ylim(0, _ROOM * max(total) / scale)
    _phases(ax, timeline)
    moment = result.peak_moment if isinstance(result, MemoryBreakdown) else timeline.moment
    _peak(ax, timeline.position[timeline.peak], total[timeline.peak] / scale, f"peak: {moment}")
    ax.set_xlabel("births and deaths of tensors' memory, in the order of the program")
    kind = f", {result.kind}" if isinstance(result, MemoryBreakdown) else ""
    ax.set_ylabel(f"allocated{kind} ({unit})")
    legend(ax, [area for area, group in zip(areas, groups, strict=True) if max(timeline.held[group]) >= VISIBLE * max(total)])
    return ax


def _phases(ax: Axes, timeline: MemoryTimeline) -> None:
    """Shades behind the phases that compute, with their names above where there is room; a line where a step begins."""
    left, right = ax.get_xlim()
    seen: set[int] = set()
    widest: dict[tuple[str, int], tuple[float, float]] = {}
    for phase, step, first, last in timeline.spans:
        begin = timeline.position[first]
        end = timeline.position[min(last + 1, len(timeline.position) - 1)]
        if phase != "init" and step not in seen:
            seen.add(step)
            ax.axvline(begin, color=INK, linewidth=0.8, linestyle=":")
            _word(ax, begin, f" step {step + 1}", "left", 1.0)
        if phase in SHADES:
            ax.axvspan(begin, end, color=INK, alpha=SHADES[phase], linewidth=0, zorder=0)
            widest[phase, step] = max(widest.get((phase, step), (0.0, 0.0)), (end - begin, (begin + end) / 2))
    for (phase, _), (width, middle) in widest.items():
        if width >= _LETTER * len(phase) * (right - left):
            _word(ax, middle, phase, "center", 0.93)


def _word(ax: Axes, place: float, word: str, side: str, height: float) -> None:
    ax.annotate(
        word,
        (place, height),
        (0, -3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha=side,
        va="top",
        fontsize=8.5,
        color=INK,
    )


def _peak(ax: Axes, place: float, height: float, words: str) -> None:
    """A ring around the peak and its moment in words, on the side where there is room."""
    ax.plot([place], [height], marker="o", markersize=8, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.4)
    left, right = ax.get_xlim()
    on_the_left = place > (left + right) / 2
    ax.annotate(
        textwrap.fill(words, _LETTERS),
        (place, height),
        (-9 if on_the_left else 9, 3),
        textcoords="offset points",
        ha="right" if on_the_left else "left",
        va="bottom",
        fontsize=9,
        color=INK,
    )
