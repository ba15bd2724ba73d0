"""Captured: what is known of a trace that its file does not say, above all what the profiler cost. It lies beside the file."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench import units

DEAR = 0.5
"""Slowdown from which on it is said that small operators look dearer than they are."""


@dataclass(slots=True, kw_only=True)
class Captured:
    """Where a trace was written, and what it cost."""

    path: Path
    traced: float = math.nan
    """Seconds per step under the profiler."""
    plain: float = math.nan
    """Seconds per step of the same run without it, from before and after."""
    compared: int = 0
    """Steps behind that."""
    notes: list[str] = field(default_factory=list)
    """What the capture has to say about itself."""

    @property
    def slowdown(self) -> float:
        """How much longer a traced step takes: 0.1 = 10 %; nan where it is not known."""
        return self.traced / self.plain - 1 if self.plain > 0 else math.nan

    @property
    def said(self) -> tuple[str, ...]:
        """The notes, and what follows from the slowdown."""
        if not self.slowdown > DEAR:
            return tuple(self.notes)
        dear = f"the profiler slows these steps down by {units.percent(self.slowdown)}: small operators look dearer than they are"
        return (*self.notes, dear)

    @staticmethod
    def beside(trace: Path) -> Path:
        """The file that says this of a trace: `….pt.trace.json.gz` → `….capture.json`."""
        return trace.with_name(trace.name.partition(".pt.trace.json")[0].removesuffix(".capture.json") + ".capture.json")

    @classmethod
    def of(cls, trace: Path) -> "Captured | None":
        """What lies beside a trace; None without, or where it cannot be read."""
        try:
            return cls.from_json(json.loads(cls.beside(trace).read_text(encoding="utf-8")), trace)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; seconds."""
        known = {name: None if math.isnan(value := getattr(self, name)) else value for name in ("traced", "plain")}
        return {"file": self.path.name, **known, "compared": self.compared, "notes": self.notes}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], path: Path) -> "Captured":
        """Inverse of `to_json`."""
        times = {name: math.nan if value[name] is None else float(value[name]) for name in ("traced", "plain")}
        return cls(path=path, compared=int(value["compared"]), notes=[str(note) for note in value["notes"]], **times)


def notes_in(folder: Path) -> tuple[str, ...]:
    """What captures that left no trace in a folder say of why."""
    found = (Captured.of(path) for path in sorted(folder.glob("*.capture.json")))
    return tuple(note for one in found if one for note in one.notes)
