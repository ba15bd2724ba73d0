"""HTML of a step's memory, for the live explorer and its static form: bars, an icicle of modules, memory over the steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from workbench.core import units
from workbench.core.display import html as stack
from workbench.core.display.colors import GROUPS as COLORS
from workbench.core.display.colors import LIMIT, RESERVED
from workbench.core.display.colors import OUTSIDE as OUTSIDE_GREY
from workbench.core.display.table import escape
from workbench.core.vocabulary import GROUPS
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.fit import MARGIN, Fit, usable_words
from workbench.memory.analysis.holders import natural
from workbench.memory.analysis.over_time import MemoryTimeline

DEPTH = 4
"""Names of a module's path that have a row of their own."""
_LEAST = 0.006  # of the whole: what is narrower is one cell with its neighbours
_LETTERS = 120  # that fit into the whole width, about
_COLUMNS = 240  # points of a timeline, at most
_HIGH = 130  # pixels of the timeline
NO_MODULE = "outside any module"
"""Label of what was allocated while no module ran: optimizer states, the loss, gradients."""


@dataclass(slots=True)
class _Cell:
    """A module with all below it."""

    name: str
    held: dict[str, int] = field(default_factory=dict)
    below: dict[str, _Cell] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.held.values())

    def add(self, path: Sequence[str], group: str, size: int) -> None:
        self.held[group] = self.held.get(group, 0) + size
        if path:
            name = path[0] if self.name in ("", NO_MODULE) else f"{self.name}.{path[0]}"
            self.below.setdefault(path[0], _Cell(name)).add(path[1:], group, size)


def icicle(breakdown: MemoryBreakdown) -> str:
    """One row per level of modules, widths as bytes at the peak; a strip below each name has the colours of the groups."""
    root = _Cell("")
    for holder in breakdown.holders:
        root.add(holder.module.split(".")[:DEPTH] if holder.module else [NO_MODULE, holder.words], holder.group, holder.bytes)
    return f'<div class="wb-icicle">{_cell(root, root.bytes, root.bytes)}</div>' if root.bytes else ""


def _cell(cell: _Cell, above: int, whole: int) -> str:
    share = cell.bytes / whole
    name = cell.name or "all"
    words = ", ".join(f"{group.replace('_', ' ')} {units.bytes_(size)}" for group, size in _ordered(cell.held))
    title = f"{name}: {units.bytes_(cell.bytes)} ({units.percent(share)}): {words}"
    text = _fitting(f"{name} {units.bytes_(cell.bytes)}", name, name.rpartition(".")[2], room=share * _LETTERS)
    shown = [below for below in cell.below.values() if below.bytes >= _LEAST * whole]
    children = "".join(_cell(below, cell.bytes, whole) for below in sorted(shown, key=lambda below: (-below.bytes, natural(below.name))))
    row = f'<div style="display:flex">{children}</div>' if children else ""
    return (
        f'<div style="width:{100 * cell.bytes / above:.3f}%;overflow:hidden"><div class="wb-cell" title="{escape(title)}" '
        f'style="margin:0 1px 2px 0;height:24px;overflow:hidden;white-space:nowrap">'
        f'<div style="height:17px;line-height:17px;font-size:11px;overflow:hidden">{escape(text) or "&nbsp;"}</div>'
        f'<div style="height:7px;background-color:{COLORS[_ordered(cell.held)[0][0]]};{_strip(cell.held)}"></div></div>{row}</div>'
    )


def _ordered(held: Mapping[str, int]) -> list[tuple[str, int]]:
    """Groups with their bytes, the largest first."""
    return sorted(held.items(), key=lambda item: -item[1])


def _strip(held: Mapping[str, int], towards: str = "to right") -> str:
    """Groups side by side, as a background; empty for one."""
    total, at, stops = sum(held.values()), 0, []
    for group in GROUPS:
        if size := held.get(group):
            stops.append(f"{COLORS[group]} {100 * at / total:.1f}% {100 * (at + size) / total:.1f}%")
            at += size
    return f"background-image:linear-gradient({towards},{','.join(stops)})" if len(stops) > 1 else ""


def _fitting(*texts: str, room: float) -> str:
    """The first of some texts that fits the width; empty if none does."""
    return next((text for text in texts if len(text) <= room), "")


def timeline(result: MemoryTimeline) -> str:
    """Stacked columns over the events of the steps, each its peak, with a line at the peak, and the phases below."""
    kept = _kept(result.total, result.peak)
    most = max(1, *result.total)
    columns = [_column(result, point, most) + (_PEAK if point == result.peak else "") for point in kept]
    label = f"memory over the steps; the peak of {units.bytes_(result.total[result.peak])} is at the {result.moment}"
    return (
        f'<div class="wb-over-time" role="img" aria-label="{escape(label)}" style="display:flex;align-items:flex-end;height:{_HIGH}px">'
        f"{''.join(columns)}</div>{_phases(result, kept)}"
    )


_PEAK = '<div class="wb-peak" title="the peak" style="width:0;margin:0 -1px;height:100%;border-left:2px dashed;flex-shrink:0"></div>'


def _column(result: MemoryTimeline, point: int, most: int) -> str:
    held = {group: result.held[group][point] for group in GROUPS}
    total = sum(held.values())
    title = f"{result.phase[point]}, step {result.step[point] + 1}: {units.bytes_(total)}"
    color = f"background-color:{COLORS[_ordered(held)[0][0]]};{_strip(held, 'to top')}"
    high = 94 * total / most
    return f'<div title="{escape(title)}" style="flex:1 1 0;margin-right:-0.6px;height:{high:.1f}%;{color}"></div>'


def _kept(total: Sequence[int], peak: int) -> list[int]:
    """The largest point of each column, and the peak."""
    width = -(-len(total) // _COLUMNS)
    points = {max(range(begin, min(begin + width, len(total))), key=lambda i: total[i]) for begin in range(0, len(total), width)}
    return sorted(points | {peak})


def _phases(result: MemoryTimeline, kept: Sequence[int]) -> str:
    """A row with the name of each phase of each step."""
    runs: list[tuple[str, int, int]] = []
    for point in kept:
        key = (result.phase[point], result.step[point])
        if runs and runs[-1][:2] == key:
            runs[-1] = (*key, runs[-1][2] + 1)
        else:
            runs.append((*key, 1))
    made = "".join(_phase(phase, step, count / len(kept)) for phase, step, count in runs)
    return f'<div class="wb-what" style="display:flex;font-size:11px">{made}</div>'


def _phase(phase: str, step: int, share: float) -> str:
    words = phase if phase == "init" else f"{phase}, step {step + 1}"
    text = _fitting(words, phase, room=share * _LETTERS)
    return (
        f'<span title="{escape(words)}" style="width:{100 * share:.2f}%;overflow:hidden;white-space:nowrap;text-align:center;'
        f'border-left:1px solid #8886">{escape(text)}</span>'
    )


SLACK, OUTSIDE = "reserved, not allocated", "outside the allocator"
"""What a device holds beside tensors."""
BESIDE = {SLACK: RESERVED, OUTSIDE: OUTSIDE_GREY}
"""Their colours."""
_STYLES = {SLACK: "wb-slack", OUTSIDE: "wb-outside"}
_LABEL, _ROOM = 92, 92  # pixels at the left and at the right of a bar
_WIDE_ENOUGH = 0.07  # of the whole width: a share is written into a piece from here on
_SMALL = 0.3  # of the whole width: bars that are shorter are drawn once more, larger
_SEEN = 0.002  # of a bar: smaller groups are not in the legend


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A bar of memory."""

    label: str
    """Label at its left: "predicted", "measured"."""
    breakdown: MemoryBreakdown
    """Its pieces."""

    @property
    def pieces(self) -> dict[str, int]:
        """Name → bytes: the groups, what is reserved beyond them, what is outside."""
        held = {group.replace("_", " "): int(getattr(self.breakdown, group)) for group in GROUPS}
        if self.breakdown.reserved is not None:
            held[SLACK] = max(0, self.breakdown.reserved - self.breakdown.total)
            held[OUTSIDE] = self.breakdown.outside.mid if self.breakdown.outside else 0
        return {name: size for name, size in held.items() if size}

    @property
    def bytes(self) -> int:
        return sum(self.pieces.values())


def color_of(piece: str) -> str:
    """Colour of a piece of a bar."""
    return BESIDE.get(piece) or COLORS[piece.replace(" ", "_")]


def head(title: str) -> str:
    """Title: what is explored."""
    return f'<div class="wb-head"><strong class="wb-name">Memory explorer</strong><span class="wb-spec">{escape(title)}</span></div>'


def estimating() -> str:
    """Status: a dry run is being made."""
    return '<span class="wb-what" role="status">estimating…</span>'


def verdict(breakdown: MemoryBreakdown, fit: Fit | None) -> str:
    """Whether it fits, the bytes left, and the moment of the peak."""
    if fit is None:
        badge, text = "", f"{units.bytes_(breakdown.total)} in tensors at the peak; how much memory this machine has is not considered"
    else:
        tint, word = ("finished", "fits") if fit else ("stopped", "does not fit")
        badge, text = f'<span class="wb-badge wb-is-{tint}">{word}</span> ', fit.words.partition(": ")[2]
    peak = f'<div class="wb-said"><strong>Peak</strong> {escape(breakdown.peak_moment)}</div>'
    return f'<div class="wb-head">{badge}<span class="wb-fit">{escape(text)}</span></div>{peak}'


def bars(rows: Iterable[Row], capacity: int | None, device: str, *, stale: bool = False) -> str:
    """Stacked bars against the capacity of a device; once more and larger where they are small beside it.

    Args:
        rows: from top to bottom, on one scale; predictions are hatched.
        capacity: bytes of the device that may be used; None = not known.
        device: name of the device.
        stale: they are of another configuration than the knobs say: one that is still being estimated.
    """
    shown = list(rows)
    if not shown:
        return ""
    most = max(row.bytes for row in shown)
    whole = max(most, capacity or 0)
    drawn = "".join(_bar(row, whole, capacity, pale=row.breakdown.kind == "predicted") for row in shown)
    if capacity is not None:
        drawn += _scale(capacity, whole, device)
    if most < _SMALL * whole:
        times = units.times(whole / most).removesuffix(" ×").removesuffix("×").strip()
        drawn += f'<div class="wb-label" style="margin-top:8px">the same, {escape(times)} times as large</div>'
        drawn += "".join(_bar(row, most, None, pale=row.breakdown.kind == "predicted") for row in shown)
    seen = {name: color_of(name) for row in shown for name, size in row.pieces.items() if size >= _SEEN * row.bytes}
    order = [name for name in (*(group.replace("_", " ") for group in GROUPS), *BESIDE) if name in seen]
    dim = ' style="opacity:0.45"' if stale else ""
    legend = stack.legend({name: seen[name] for name in order}, _LABEL, _STYLES)
    return f'<div class="wb-memory"{dim}>{drawn}{legend}{difference(shown)}</div>'


def _bar(row: Row, whole: int, capacity: int | None, *, pale: bool) -> str:
    made, at = [], 0
    for name, size in row.pieces.items():
        for part in _cut(at, size, capacity):
            made.append(part if isinstance(part, str) else _piece(name, size, part, row.bytes, whole, predicted=pale))
        at += size
    if capacity is not None and at <= capacity:
        made.append(
            f'<div class="wb-free" title="free: {units.bytes_(capacity - at)}" style="width:{100 * (capacity - at) / whole:.3f}%"></div>'
        )
        made.append(_LINE)
    words = ", ".join(f"{name} {units.bytes_(size)}" for name, size in row.pieces.items())
    return stack.row(row.label, made, words, units.bytes_(row.bytes), pale=pale, wide=_LABEL, room=_ROOM, tall=22)


_LINE = f'<div class="wb-capacity" style="width:3px;margin:-4px -1px;background-color:{LIMIT};flex-shrink:0"></div>'


def _cut(at: int, size: int, capacity: int | None) -> list[int | str]:
    """A piece; if the line of the capacity crosses it, its part before, the line, and its part behind."""
    if capacity is None or not at <= capacity < at + size:
        return [size]
    return [capacity - at, _LINE, at + size - capacity]


def _piece(name: str, size: int, part: int, total: int, whole: int, *, predicted: bool) -> str:
    share = units.percent(size / total)
    text = share if part / whole >= _WIDE_ENOUGH and 2 * part >= size and name not in BESIDE else ""
    title = f"{name}: {units.bytes_(size)} ({share})"
    return stack.piece(part / whole, color_of(name), text, title=title, style=_STYLES.get(name, ""), predicted=predicted)


def _scale(capacity: int, whole: int, device: str) -> str:
    """The name of the line, below it."""
    words = f'<span style="white-space:nowrap">{escape(device)}: {usable_words(capacity, MARGIN)}</span>'
    place = f'<div style="width:{100 * capacity / whole:.3f}%;text-align:right">{words}</div>'
    margins = f"margin-top:3px;margin-left:{_LABEL}px;margin-right:{_ROOM}px"
    return f'<div class="wb-what" style="display:flex;{margins};font-size:12px">{place}</div>'


def difference(rows: Iterable[Row]) -> str:
    """The difference of prediction and measurement, in words."""
    kinds = {row.breakdown.kind: row.breakdown for row in rows}
    if len(kinds) < 2:
        return ""
    predicted, measured = kinds["predicted"], kinds["measured"]
    if predicted.device != measured.device:
        return (
            f'<div class="wb-what">measured on {escape(measured.device)}, predicted for {escape(predicted.device)}: '
            "tensors are allocated, rounded and kept in another way there</div>"
        )
    off = predicted.total / measured.total - 1
    words = "as measured" if not round(off, 4) else f"{units.percent(abs(off))} {'above' if off > 0 else 'below'} what was measured"
    sizes = f"{units.bytes_(predicted.total)}, {units.bytes_(measured.total)}"
    return f'<div class="wb-what">what tensors hold is predicted {words}: {sizes}</div>'


def details(breakdown: MemoryBreakdown, *, stale: bool = False) -> str:
    """The holders of the peak, and the memory over the steps."""
    dim = ' style="opacity:0.45"' if stale else ""
    modules = (
        f'<div class="wb-steps"><div class="wb-label">what holds the memory at the peak, by module</div>{icicle(breakdown)}</div>'
        if breakdown.holders
        else ""
    )
    over_time = (
        f'<div class="wb-steps"><div class="wb-label">{breakdown.kind} over the steps, in the order of the program; '
        "the line is the peak</div>"
        f"{timeline(breakdown.timeline)}</div>"
        if breakdown.timeline.position
        else ""
    )
    return f"<div{dim}>{modules}{over_time}</div>"


def static(title: str, rows: Iterable[Row], fit: Fit | None, capacity: int | None, device: str, problem: str) -> str:
    """The static form, which needs no kernel."""
    shown = list(rows)
    begin = f"<p><strong>Memory explorer</strong> · {escape(title)}"
    predicted = [row.breakdown for row in shown if row.breakdown.kind == "predicted"]
    if not predicted:
        return f"<div>{begin}<br><em>{escape(problem or 'nothing is estimated yet: run this cell')}</em></p></div>"
    breakdown = predicted[0]
    return f"<div>{begin}</p>{verdict(breakdown, fit)}{bars(shown, capacity, device)}{details(breakdown)}{breakdown._repr_html_()}</div>"
