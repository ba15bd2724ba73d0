"""Draws memory: bars of breakdowns, bars of successive changes, and stacked areas over the steps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.device import Device
from workbench.core.display.axes import (
    HATCH,
    WIDTH,
    area,
    draw_bars,
    end_labels,
    height,
    ink,
    kinds,
    legend,
    limit,
    prepared,
    ring,
    rows,
    scale_of_bytes,
    share_beside,
    share_in,
    wrapped,
)
from workbench.core.display.colors import GROUPS as COLORS
from workbench.core.display.colors import OUTSIDE, RESERVED
from workbench.core.vocabulary import GROUPS
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.fit import usable_words
from workbench.memory.analysis.over_time import MemoryTimeline
from workbench.memory.analysis.whatif import SAME, MemoryLadder, needed

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer


BESIDE = {"reserved, not allocated": RESERVED, "outside the allocator": OUTSIDE}
"""What a device holds beside tensors → its grey, since it belongs to no group."""
_WIDE_ENOUGH = 0.06  # of the longest: a share is written into a piece from here on
VISIBLE = 0.002
"""Of the longest bar, or the highest area: from here on a group is in the legend."""


def memory(
    result: MemoryBreakdown | Sequence[MemoryBreakdown],
    ax: Axes | None = None,
    *,
    device: str | Device | int | None = None,
    labels: Sequence[str] | None = None,
) -> Axes:
    """The parts of the peak: one stacked bar per breakdown, groups in their colours, predictions hatched.

    Grey parts are memory that the allocator has reserved and no tensor uses, and memory outside the allocator; the text at the end of a bar
    gives the range of the latter.

    Args:
        result: one breakdown or several, drawn from top to bottom.
        ax: the Axes to draw into; None makes a figure.
        device: the device whose capacity is drawn as a line: a name, a Device or bytes; None = the device of the breakdowns, if they have
            the same one.
        labels: labels of the bars; None = what distinguishes the breakdowns.

    Raises:
        ValueError: nothing to draw, or an unknown device.
    """
    shown = [result] if isinstance(result, MemoryBreakdown) else list(result)
    if not shown:
        raise ValueError("no breakdown to draw: give one, or several to be drawn below each other")
    name, capacity = _capacity(shown, device)
    reaches = [_reach(breakdown) for breakdown in shown]
    scale, unit = scale_of_bytes(max(*reaches, capacity or 0))
    names = [wrapped(label) for label in labels or labels_of(shown)]
    ax = prepared(ax, WIDTH, height(names) + 0.25)
    mixed = len({breakdown.kind for breakdown in shown}) == 2
    rows(ax, names)
    drawn = _groups(ax, shown, scale, max(*reaches, capacity or 0)) + _beside(ax, shown, scale) + (kinds(ax) if mixed else [])
    if capacity:
        drawn.append(limit(ax, capacity / scale, f"{name or 'limit'}: {units.bytes_(capacity)}"))
    texts = [_end(breakdown) for breakdown in shown]
    end_labels(ax, [reach / scale for reach in reaches], texts)
    ax.set_xlim(
        0,
        max(*(reach / scale / share_beside(ax, text) for reach, text in zip(reaches, texts, strict=True)), 1.03 * (capacity or 0) / scale),
    )
    ax.set_xlabel(f"memory at the peak, {' and '.join(sorted({breakdown.kind for breakdown in shown}))} ({unit})")
    legend(ax, drawn)
    return ax


def labels_of(shown: Sequence[MemoryBreakdown]) -> list[str]:
    """What sets the breakdowns apart: title, kind, device, rank, as far as they differ."""
    parts = [(breakdown.title, breakdown.kind, breakdown.device, f"rank {breakdown.rank}") for breakdown in shown]
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    if not any(differ):
        return [breakdown.title or breakdown.kind for breakdown in shown]
    return [", ".join(word for word, differs in zip(part, differ, strict=True) if differs) for part in parts]


def _reach(breakdown: MemoryBreakdown) -> int:
    return max(breakdown.total, breakdown.device_used or breakdown.reserved or 0)


def _end(breakdown: MemoryBreakdown) -> str:
    """The total in words, with its range where one is known."""
    if breakdown.outside is None or breakdown.reserved is None:
        return units.bytes_(_reach(breakdown))
    low, high = breakdown.reserved + breakdown.outside.low, breakdown.reserved + breakdown.outside.high
    text = units.bytes_(breakdown.device_used)
    return text if units.bytes_(low) == units.bytes_(high) else f"{text}\n{units.bytes_(low)} … {units.bytes_(high)}"


def _capacity(shown: Sequence[MemoryBreakdown], device: str | Device | int | None) -> tuple[str, int | None]:
    """Name and bytes of the line."""
    if device is None:
        names = {breakdown.device for breakdown in shown}
        if len(names) > 1 or names & {"cpu", "cuda"}:
            return "", None
        try:
            device = Device.named(names.pop())
        except ValueError:
            return "", None
    if isinstance(device, int):
        return "", device
    known = Device.named(device) if isinstance(device, str) else device
    return known.name, known.memory


def _groups(ax: Axes, shown: Sequence[MemoryBreakdown], scale: float, longest: float) -> list[Artist | BarContainer]:
    """The groups that any of them has, stacked."""
    starts = [0.0] * len(shown)
    drawn: list[Artist | BarContainer] = []
    for group in GROUPS:
        widths = [getattr(breakdown, group) / scale for breakdown in shown]
        if not any(widths):
            continue
        bars = draw_bars(ax, widths, starts, COLORS[group], label=group.replace("_", " "), predicted=_guesses(shown))
        for place, (start, width, breakdown) in enumerate(zip(starts, widths, shown, strict=True)):
            if width >= _WIDE_ENOUGH * longest / scale:
                share = units.percent(getattr(breakdown, group) / breakdown.total)
                share_in(ax, bars.patches[place], start + width / 2, place, share)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
        if any(getattr(breakdown, group) >= VISIBLE * longest for breakdown in shown):
            drawn.append(bars)
    return drawn


def _beside(ax: Axes, shown: Sequence[MemoryBreakdown], scale: float) -> list[Artist | BarContainer]:
    """What is reserved beyond the groups, and what is outside: in greys."""
    ends_ = [breakdown.total / scale for breakdown in shown]
    pieces = (
        [max(0, (breakdown.reserved or 0) - breakdown.total) / scale for breakdown in shown],
        [breakdown.outside.mid / scale if breakdown.outside and breakdown.reserved is not None else 0.0 for breakdown in shown],
    )
    drawn: list[Artist | BarContainer] = []
    for (label, color), widths in zip(BESIDE.items(), pieces, strict=True):
        if any(widths):
            drawn.append(draw_bars(ax, widths, ends_, color, label=label, predicted=_guesses(shown)))
        ends_ = [end + width for end, width in zip(ends_, widths, strict=True)]
    return drawn


def _guesses(shown: Sequence[MemoryBreakdown]) -> list[bool]:
    return [breakdown.kind == "predicted" for breakdown in shown]


def memory_ladder(result: MemoryLadder, ax: Axes | None = None) -> Axes:
    """A stacked bar for the unchanged step and one after each further change; the line is the device's memory minus the margin.

    The text at the end of a bar says how much memory is needed, and what the change costs in time. Bars beyond the line do not fit.

    Args:
        result: result of `wb.memory_ladder`.
        ax: the Axes to draw into; None makes a figure.
    """
    shown = [result.start, *(rung.breakdown for rung in result.rungs)]
    labels = [SAME, *(wrapped(f"+ {rung.label}") for rung in result.rungs)]
    most = max(result.capacity, *map(needed, shown))
    scale, unit = scale_of_bytes(most)
    ax = prepared(ax, WIDTH, height(labels) + 0.25)
    rows(ax, labels)
    drawn = _bars(ax, shown, scale, most)
    line = limit(ax, result.capacity / scale, f"{result.device}: {usable_words(result.capacity, result.margin)}")
    end_labels(
        ax, [max(needed(breakdown), result.capacity) / scale for breakdown in shown], _texts(result)
    )  # behind the line, which would cross them
    ax.set_xlabel(f"memory needed at the peak, predicted ({unit})")
    legend(ax, [*drawn, line])
    return ax


def pieces(breakdown: MemoryBreakdown) -> dict[str, int]:
    """Name → bytes of what a device must hold: the groups, what is reserved beyond them, what is outside; they sum to `needed`."""
    sizes = {group.replace("_", " "): int(getattr(breakdown, group)) for group in GROUPS}
    slack, outside = BESIDE
    reserved = breakdown.reserved if breakdown.device_used is not None else None
    sizes[slack] = 0 if reserved is None else max(0, reserved - breakdown.total)
    sizes[outside] = needed(breakdown) - sum(sizes.values())
    return sizes


def _bars(ax: Axes, shown: list[MemoryBreakdown], scale: float, most: float) -> list[Artist | BarContainer]:
    columns = [pieces(breakdown) for breakdown in shown]
    starts = [0.0] * len(shown)
    drawn: list[Artist | BarContainer] = []
    for name in columns[0]:
        widths = [column[name] / scale for column in columns]
        if not any(widths):
            continue
        color = BESIDE.get(name) or COLORS[name.replace(" ", "_")]
        bars = draw_bars(ax, widths, starts, color, label=name, predicted=_guesses(shown))
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
        if any(column[name] >= VISIBLE * most for column in columns):
            drawn.append(bars)
    return drawn


def _texts(result: MemoryLadder) -> list[str]:
    """The bytes that each row needs, the time that its change costs, and at the end the bytes left."""
    texts = [units.bytes_(needed(result.start))]
    for rung in result.rungs:
        time = "" if math.isnan(rung.slowdown) else f"  ·  {units.times(rung.slowdown)} time"
        texts.append(f"{units.bytes_(needed(rung.breakdown))}{time}")
    spare = result.capacity - needed(result.end)
    texts[-1] += f"  ·  {units.bytes_(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"
    return texts


SHADES = {"forward": 0.05, "backward": 0.16, "optimizer": 0.28}
"""Phase → how dark it is shaded; the others are short and stay white."""
_ROOM = 1.45  # of the highest: for the words above
_TIMELINE_LETTER = 0.0098  # of the axis: the width of a letter; a phase has its name where that has room
_LETTERS = 46


def memory_timeline(result: MemoryBreakdown | MemoryTimeline, ax: Axes | None = None) -> Axes:
    """The memory of each group from event to event, stacked; phases are shaded and named, and the peak is marked and described.

    The horizontal axis counts allocations and frees, since a prediction has no seconds.

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
    predicted = isinstance(result, MemoryBreakdown) and result.kind == "predicted"
    areas = ax.stackplot(
        timeline.position,
        *([held / scale for held in timeline.held[group]] for group in groups),
        colors=[area(ax, COLORS[group], predicted=predicted)["facecolor"] for group in groups],
        labels=[group.replace("_", " ") for group in groups],
        step="post",
        edgecolor=ink(ax),
        linewidth=0.2,
    )
    for shape in areas if predicted else ():
        shape.set_hatch(HATCH)
    ax.set_xlim(timeline.position[0], max(timeline.position[-1], timeline.position[0] + 1))
    ax.set_ylim(0, _ROOM * max(total) / scale)
    _phases(ax, timeline)
    moment = result.peak_moment if isinstance(result, MemoryBreakdown) else timeline.moment
    ring(ax, timeline.position[timeline.peak], total[timeline.peak] / scale, textwrap.fill(f"peak: {moment}", _LETTERS), size=9)
    ax.set_xlabel("allocations and frees, in the order of the program")
    kind = f", {result.kind}" if isinstance(result, MemoryBreakdown) else ""
    ax.set_ylabel(f"allocated{kind} ({unit})")
    legend(ax, [shape for shape, group in zip(areas, groups, strict=True) if max(timeline.held[group]) >= VISIBLE * max(total)])
    return ax


def _phases(ax: Axes, timeline: MemoryTimeline) -> None:
    """Shades behind the phases that compute, with their names above where they fit; a line where a step begins."""
    left, right = ax.get_xlim()
    seen: set[int] = set()
    widest: dict[tuple[str, int], tuple[float, float]] = {}
    for phase, step, first, last in timeline.spans:
        begin = timeline.position[first]
        end = timeline.position[min(last + 1, len(timeline.position) - 1)]
        if phase != "init" and step not in seen:
            seen.add(step)
            ax.axvline(begin, color=ink(ax), linewidth=0.8, linestyle=":")
            _word(ax, begin, f" step {step + 1}", "left", 1.0)
        if phase in SHADES:
            ax.axvspan(begin, end, color=ink(ax), alpha=SHADES[phase], linewidth=0, zorder=0)
            widest[phase, step] = max(widest.get((phase, step), (0.0, 0.0)), (end - begin, (begin + end) / 2))
    for (phase, _), (width, middle) in widest.items():
        if width >= _TIMELINE_LETTER * len(phase) * (right - left):
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
        color=ink(ax),
    )
