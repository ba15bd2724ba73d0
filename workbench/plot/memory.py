"""Where the memory goes: one stacked bar per breakdown, what the allocator reserves and what lies outside of it, and what a device has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench import units
from workbench.device import Device
from workbench.memory.breakdown import MemoryBreakdown
from workbench.memory.log import GROUPS
from workbench.plot.canvas import prepared
from workbench.plot.colors import GROUPS as COLORS
from workbench.plot.colors import INK, text_on
from workbench.plot.stack import PALE, WIDTH, ends, height, legend, rows, scale_of_bytes, wrapped

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer

BESIDE = {"reserved, not allocated": "////", "outside the allocator": "...."}
"""What a device holds beside tensors → its hatch; without a colour, since it belongs to no group."""
_WIDE_ENOUGH = 0.06  # of the longest: a share is written into a piece from here on
_LETTER = 0.0145  # of the axis: the width of a letter
VISIBLE = 0.002
"""Of the longest bar, or the highest area: from here on a group is in the legend."""


def memory(
    result: MemoryBreakdown | Sequence[MemoryBreakdown],
    ax: Axes | None = None,
    *,
    device: str | Device | int | None = None,
    labels: Sequence[str] | None = None,
) -> Axes:
    """What the fullest moment is made of: one stacked bar per breakdown, groups in their colours, predictions beside measurements paler.

    Hatched: what the allocator has reserved and no tensor uses, and what the process takes outside of it; the range that is known of that
    is in the text at the bar's end.

    Args:
        result: one breakdown or several, drawn from top to bottom.
        ax: the Axes to draw into; None makes a figure.
        device: whose capacity is drawn as a line: a name, a Device or bytes; None: the device of the breakdowns, if they name one and the
            same.
        labels: of the bars; None: what sets the breakdowns apart.

    Raises:
        ValueError: nothing to draw, or an unknown device.
    """
    shown = [result] if isinstance(result, MemoryBreakdown) else list(result)
    if not shown:
        raise ValueError("no breakdown to draw: give one, or several to be drawn below each other")
    name, capacity = _capacity(shown, device)
    reaches = [_reach(one) for one in shown]
    scale, unit = scale_of_bytes(max(*reaches, capacity or 0))
    names = [wrapped(label) for label in labels or labels_of(shown)]
    ax = prepared(ax, WIDTH, height(names) + 0.25)
    mixed = len({one.kind for one in shown}) == 2
    drawn = _groups(ax, shown, scale, max(*reaches, capacity or 0), mixed) + _beside(ax, shown, scale)
    if capacity:
        drawn.append(_line(ax, capacity / scale, f"{name or 'limit'}: {units.bytes_(capacity)}"))
    texts = [_end(one) for one in shown]
    ends(ax, [reach / scale for reach in reaches], texts)
    ax.set_xlim(0, max(*(reach / scale / _share(text) for reach, text in zip(reaches, texts, strict=True)), 1.03 * (capacity or 0) / scale))
    rows(ax, names)
    ax.set_xlabel(f"memory at the peak, {' and '.join(sorted({one.kind for one in shown}))} ({unit})")
    legend(ax, drawn)
    return ax


def labels_of(shown: Sequence[MemoryBreakdown]) -> list[str]:
    """What sets the breakdowns apart: title, kind, device, rank, as far as they differ."""
    parts = [(one.title, one.kind, one.device, f"rank {one.rank}") for one in shown]
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    if not any(differ):
        return [one.title or one.kind for one in shown]
    return [", ".join(word for word, differs in zip(part, differ, strict=True) if differs) for part in parts]


def _reach(one: MemoryBreakdown) -> int:
    return max(one.total, one.device_used or one.reserved or 0)


def _end(one: MemoryBreakdown) -> str:
    """What all of it is together, with its range where one is known."""
    if one.outside is None or one.reserved is None:
        return units.bytes_(_reach(one))
    low, high = one.reserved + one.outside.low, one.reserved + one.outside.high
    text = units.bytes_(one.device_used)
    return text if units.bytes_(low) == units.bytes_(high) else f"{text}\n{units.bytes_(low)} … {units.bytes_(high)}"


def _share(text: str) -> float:
    """Of the axis, that a bar may take beside its text."""
    return 0.96 - _LETTER * max(map(len, text.splitlines()))


def _capacity(shown: Sequence[MemoryBreakdown], device: str | Device | int | None) -> tuple[str, int | None]:
    """Name and bytes of the line."""
    if device is None:
        names = {one.device for one in shown}
        if len(names) > 1 or names & {"cpu", "cuda"}:
            return "", None
        try:
            device = Device.named(names.pop())
        except ValueError:
            return "", None
    if isinstance(device, int):
        return "", device
    found = Device.named(device) if isinstance(device, str) else device
    return found.name, found.memory


def _groups(ax: Axes, shown: Sequence[MemoryBreakdown], scale: float, longest: float, mixed: bool) -> list[Artist | BarContainer]:
    """The groups that any of them has, stacked."""
    starts = [0.0] * len(shown)
    drawn: list[Artist | BarContainer] = []
    for group in GROUPS:
        widths = [getattr(one, group) / scale for one in shown]
        if not any(widths):
            continue
        bars = ax.barh(range(len(shown)), widths, left=starts, height=0.62, color=COLORS[group], label=group.replace("_", " "))
        for place, (start, width, one) in enumerate(zip(starts, widths, shown, strict=True)):
            if mixed and one.kind == "predicted":
                bars.patches[place].set_alpha(PALE)
            elif width >= _WIDE_ENOUGH * longest / scale:
                share = units.percent(getattr(one, group) / one.total)
                ax.text(start + width / 2, place, share, ha="center", va="center", fontsize=8.5, color=text_on(COLORS[group]))
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
        if any(getattr(one, group) >= VISIBLE * longest for one in shown):
            drawn.append(bars)
    return drawn


def _beside(ax: Axes, shown: Sequence[MemoryBreakdown], scale: float) -> list[Artist | BarContainer]:
    """What is reserved beyond the groups, and what is outside with its range: hatched, without a colour."""
    places = range(len(shown))
    ends_ = [one.total / scale for one in shown]
    pieces = (
        [max(0, (one.reserved or 0) - one.total) / scale for one in shown],
        [one.outside.mid / scale if one.outside and one.reserved is not None else 0.0 for one in shown],
    )
    drawn: list[Artist | BarContainer] = []
    for (label, hatch), widths in zip(BESIDE.items(), pieces, strict=True):
        if any(widths):
            drawn.append(
                ax.barh(places, widths, left=ends_, height=0.62, facecolor="none", edgecolor=INK, hatch=hatch, linewidth=0.8, label=label)
            )
        ends_ = [end + width for end, width in zip(ends_, widths, strict=True)]
    return drawn


def _line(ax: Axes, place: float, label: str) -> Artist:
    line: Artist = ax.axvline(place, color=INK, linestyle="--", linewidth=1.4, label=label)
    return line
