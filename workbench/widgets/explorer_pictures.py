"""Icicle and timeline of a breakdown, as HTML: who holds the peak, module by module, and what was held over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workbench import units
from workbench.display import escape
from workbench.memory.breakdown import MemoryBreakdown
from workbench.memory.holders import Holder
from workbench.memory.log import GROUPS
from workbench.memory.over_time import MemoryTimeline
from workbench.memory.shares import natural
from workbench.plot.colors import GROUPS as COLORS

DEPTH = 4
"""Names of a module's path that have a row of their own."""
_LEAST = 0.006  # of the whole: what is narrower is one cell with its neighbours
_LETTERS = 120  # that fit into the whole width, about
_COLUMNS = 240  # points of a timeline, at most
_HIGH = 130  # pixels of the timeline
NO_MODULE = "outside any module"
"""What was made while no module ran: optimizer states, the loss, gradients."""


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
        root.add(_path(holder), holder.group, holder.bytes)
    return f'<div class="wb-icicle">{_cell(root, root.bytes, root.bytes)}</div>' if root.bytes else ""


def _path(holder: Holder) -> list[str]:
    return holder.module.split(".")[:DEPTH] if holder.module else [NO_MODULE, holder.words]


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
    """The first of some texts that there is room for; empty if there is none."""
    return next((text for text in texts if len(text) <= room), "")


def timeline(result: MemoryTimeline) -> str:
    """Stacked columns over the events of the steps, each its fullest moment, with a line at the peak, and the phases below."""
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
    found = {max(range(begin, min(begin + width, len(total))), key=lambda i: total[i]) for begin in range(0, len(total), width)}
    return sorted(found | {peak})


def _phases(result: MemoryTimeline, kept: Sequence[int]) -> str:
    """A row of words: where each phase of each step is."""
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
