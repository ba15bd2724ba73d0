"""What changes do to memory, one on top of another until a step fits a device: MemoryLadder."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench import display, units
from workbench.memory.breakdown import MemoryBreakdown
from workbench.memory.whatif import SAME, changes_in_words, needed


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRung:
    """One change on the way to a step that fits."""

    change: Mapping[str, Any]
    """Knobs that this rung turns."""
    breakdown: MemoryBreakdown
    """Predicted after it, with all rungs before it."""
    slowdown: float
    """Seconds per sample after it over those before, at the roofline of the device; nan where nothing can be said."""
    price: str
    """What it costs besides time."""

    @property
    def label(self) -> str:
        """The change in words."""
        return changes_in_words(self.change)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLadder(display.Shown):
    """The cheapest changes in time that make a step fit a device, one on top of another."""

    start: MemoryBreakdown
    """Without any change."""
    rungs: tuple[MemoryRung, ...]
    """In the order in which they are taken; the cheapest in time come first."""
    device: str
    """To be fitted."""
    capacity: int
    """Its bytes, less the margin."""
    margin: float
    """Share of the device that stays free."""
    tried: int = 0
    """Combinations that were estimated."""

    @property
    def end(self) -> MemoryBreakdown:
        """With all changes."""
        return self.rungs[-1].breakdown if self.rungs else self.start

    @property
    def fits(self) -> bool:
        """Does the step fit at the end?"""
        return needed(self.end) <= self.capacity

    @property
    def changes(self) -> dict[str, Any]:
        """All knobs that are turned: `spec.replace(**ladder.changes)`."""
        return {name: value for rung in self.rungs for name, value in rung.change.items()}

    @property
    def slowdown(self) -> float:
        """Seconds per sample at the end over those at the start."""
        return math.prod(rung.slowdown for rung in self.rungs)

    @property
    def word(self) -> str:
        """How it ends, in a line."""
        if not self.rungs and self.fits:
            return f"it fits {self.device} as it is, with {units.bytes_(self.capacity - needed(self.start))} to spare"
        if not self.fits:
            over = needed(self.end) - self.capacity
            return f"nothing tried makes it fit {self.device}: {units.bytes_(over)} too much with all of {self.tried} combinations"
        spare = units.bytes_(self.capacity - needed(self.end))
        return f"it fits {self.device} with {changes_in_words(self.changes)}: {spare} to spare, {_time(self.slowdown)}"

    @property
    def table(self) -> display.Table:
        """One row per rung."""
        rows = [[SAME, units.bytes_(needed(self.start)), "", "", self.start.peak_moment]]
        rows += [
            [rung.label, units.bytes_(needed(rung.breakdown)), _time(rung.slowdown), rung.price, rung.breakdown.peak_moment]
            for rung in self.rungs
        ]
        return display.Table(
            columns=("change", "needs", "time", "price", "where the peak lies"),
            rows=rows,
            title=f"What makes it fit {self.device} ({units.bytes_(self.capacity)}, {units.percent(self.margin)} kept free)",
            note=f"{self.word}; predicted; time at the device's roofline, communication left out",
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per rung, the start first."""
        start = {"change": SAME, "needed": needed(self.start), "total": self.start.total, "slowdown": 1.0, "price": ""}
        rows = [
            {"change": r.label, "needed": needed(r.breakdown), "total": r.breakdown.total, "slowdown": r.slowdown, "price": r.price}
            for r in self.rungs
        ]
        return display.frame([start, *rows])

    plot = display.plot_method("memory_ladder")

    def __repr__(self) -> str:
        return f"MemoryLadder({self.device!r}, {changes_in_words(self.changes) or SAME}, fits={self.fits})"


def _time(slowdown: float) -> str:
    if math.isnan(slowdown):
        return "time not predicted"
    return "same time" if abs(slowdown - 1) < 0.005 else f"{units.times(slowdown)} the time"


def combinations(moves: Iterable[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """All sets of moves of which no two turn the same knob, as places in `moves`, the empty one included.

    >>> combinations([{"precision": "amp_bf16"}, {"parallel": "zero1"}, {"parallel": "fsdp"}])
    [(), (0,), (1,), (0, 1), (2,), (0, 2)]
    """
    found: list[tuple[int, ...]] = [()]
    listed = list(moves)
    for place, move in enumerate(listed):
        found += [(*others, place) for others in found if not any(set(move) & set(listed[other]) for other in others)]
    return found
