"""Overlap: how much of the communication of a trace hides behind computing."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.breakdown import ON_CPU, ON_DEVICE
from workbench.traces.analysis.intervals import Spans, covered, union
from workbench.traces.analysis.kinds import Kinds
from workbench.traces.analysis.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverlap:
    """One step; seconds in which a collective, or a copy to the device, runs."""

    step: int
    communication: float
    """At least one collective runs."""
    overlapped: float
    """… and so does a kernel (on a CPU: an operator)."""
    exposed: float
    """… and no kernel does: communication = overlapped + exposed."""
    h2d: float
    """At least one copy from host to device runs."""
    h2d_exposed: float
    """… and no kernel does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap(display.Shown, JsonDataclass):
    """Communication of the steps of a trace. Get one from `trace.overlap()`."""

    steps: tuple[StepOverlap, ...]
    notes: tuple[str, ...] = ()

    def mean(self, part: str = "exposed") -> float:
        """Mean seconds per step of one of the columns.

        Raises:
            ValueError: no such column.
        """
        names = [field.name for field in dataclasses.fields(StepOverlap)][1:]
        if part not in names:
            raise ValueError(f"no column {part!r}: there are {', '.join(names)}")
        return sum(getattr(one, part) for one in self.steps) / len(self.steps) if self.steps else float("nan")

    @property
    def hidden(self) -> float:
        """Fraction 0..1 of the communication that computing hides; nan without any."""
        whole = self.mean("communication")
        return self.mean("overlapped") / whole if whole else float("nan")

    @property
    def table(self) -> display.Table:
        """One row per column: mean seconds per step."""
        rows = [[field.name, units.seconds(self.mean(field.name))] for field in dataclasses.fields(StepOverlap)[1:]]
        text = (
            f"{units.percent(self.hidden)} of the communication hides behind computing"
            if self.hidden == self.hidden
            else "no communication"
        )
        note = "; ".join([text, *self.notes])
        return display.Table(columns=("time in which it runs", "mean per step"), rows=rows, title="What hides behind computing", note=note)

    to_frame = display.frame_method("steps", StepOverlap)

    def __repr__(self) -> str:
        return f"Overlap({units.seconds(self.mean('communication'))} of communication a step, {units.seconds(self.mean())} exposed)"


WHAT_IT_CANNOT = (
    "exposed is not what communication costs: computing that runs beside it is slowed down, and a collective waits for the slowest rank"
)


def overlap(kinds: Kinds, windows: Windows, notes: Sequence[str] = ()) -> Overlap:
    """Of every step: exposed = |A ∪ B| − |B|, with A the communication and B the computing."""
    layers = dict(ON_DEVICE if kinds.device else ON_CPU)
    busy = kinds.cover(*layers["compute"])

    def both(of: Spans) -> tuple[list[float], list[float]]:
        """Seconds in which it runs, and in which it runs and no computing does."""
        total = covered(of, windows.spans)
        exposed = covered(union(of, busy), windows.spans) - covered(busy, windows.spans)
        return (total / 1e9).tolist(), (exposed / 1e9).tolist()

    total, exposed = both(kinds.cover(*layers["communication"]))
    copies, bare = both(kinds.cover("h2d"))
    hidden = (np.array(total) - np.array(exposed)).tolist()
    rows = zip(windows.numbers.tolist(), total, hidden, exposed, copies, bare, strict=True)
    names = [field.name for field in dataclasses.fields(StepOverlap)]
    steps = tuple(StepOverlap(**dict(zip(names, row, strict=True))) for row in rows)
    said = (WHAT_IT_CANNOT,) if any(total) else ()
    return Overlap(steps=steps, notes=(*windows.notes, *notes, *said))
