"""Captured: facts about a trace that its file lacks, kept in a file beside it, mainly how much the profiler slowed the steps down."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.core.codec import NOT_STORED, fields_from_json, fields_to_json

SLOW = 0.5
"""Slowdown from which on a note warns that small operators look more expensive than they are."""
MAX_SPREAD = 0.25
"""If half of the steps without the profiler are further than this from their median, the cost of the profiler is not known."""
MIN_STEPS = 3
"""Steps without the profiler that it takes to know how much they vary."""

SLOWED = "the profiler slows these steps down"


@dataclass(slots=True, kw_only=True)
class Captured:
    """The place of a trace file, and the cost of the profiler."""

    path: Path = field(default=Path(), metadata=NOT_STORED)
    traced: float = math.nan
    """Seconds of a step under the profiler, without the wait for its batch: the median."""
    plain: float = math.nan
    """Seconds of a step of the same run without it, from before and after, likewise."""
    compared: int = 0
    """Steps behind that."""
    spread: float = math.nan
    """How far, as a fraction of their median, half of them lie off it: their own scatter, to which single long steps add nothing."""
    notes: list[str] = field(default_factory=list)
    """What the capture has to say about itself."""

    def compare(self, plain: Sequence[float], traced: Sequence[float]) -> None:
        """Set the times of steps without the profiler and under it.

        Medians are compared, since single steps take many times as long as the others: a pass of the loader begins, the model is evaluated.
        """
        self.compared = len(plain)
        self.plain = statistics.median(plain) if plain else math.nan
        self.traced = statistics.median(traced) if traced else math.nan
        self.spread = math.nan
        if self.plain > 0:
            self.spread = statistics.median(abs(seconds - self.plain) for seconds in plain) / self.plain

    @property
    def slowdown(self) -> float:
        """How much longer a traced step takes: 0.1 = 10 %; nan where it is not known; `all_notes` say why."""
        return math.nan if self._unknown else self.traced / self.plain - 1 if self.plain > 0 else math.nan

    @property
    def _unknown(self) -> str:
        """Why the slowdown is not known although both kinds of steps were timed."""
        if not (self.plain > 0 and self.traced > 0):
            return ""
        if self.compared < MIN_STEPS:
            return f"it takes {MIN_STEPS} steps without it to compare with, and there {'is one' if self.compared == 1 else 'are two'}"
        if self.spread > MAX_SPREAD:
            return f"half of the steps without it lie {units.percent(self.spread)} or more off their median"
        if self.traced < self.plain:
            return "the steps under it took no longer than those without"
        return ""

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes, with what the slowdown means."""
        if why := self._unknown:
            return (*self.notes, f"what the profiler costs is not known: {why}")
        if self.slowdown > SLOW:
            return (*self.notes, f"{SLOWED} by {units.percent(self.slowdown)}: small operators look more expensive than they are")
        return tuple(self.notes)

    @staticmethod
    def beside(trace: Path) -> Path:
        """The file of these facts beside a trace: `….pt.trace.json.gz` → `….capture.json`."""
        return trace.with_name(trace.name.partition(".pt.trace.json")[0].removesuffix(".capture.json") + ".capture.json")

    @classmethod
    def of(cls, trace: Path) -> "Captured | None":
        """Read the file beside a trace; None without one, or if it cannot be read."""
        try:
            return cls.from_json(json.loads(cls.beside(trace).read_text(encoding="utf-8")), trace)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; seconds."""
        return {"file": self.path.name, **fields_to_json(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], path: Path) -> "Captured":
        older = {"spread": None, **value}
        captured = fields_from_json(cls, {name: older[name] for name in ("traced", "plain", "compared", "spread", "notes")})
        captured.path = path
        return captured


def notes_in(folder: Path) -> tuple[str, ...]:
    """Why captures left no trace in a folder."""
    captures = []
    for path in sorted(folder.glob("*.capture.json")):
        trace = path.name.removesuffix(".capture.json") + ".pt.trace.json"
        if not any(path.with_name(trace + end).is_file() for end in ("", ".gz")):
            captures.append(Captured.of(path))
    return tuple(note for capture in captures if capture for note in capture.notes)
