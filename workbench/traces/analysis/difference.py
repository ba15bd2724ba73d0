"""Compares two traces: what changed in each part of the step and in each operator."""

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.breakdown import PARTS, Breakdown
from workbench.traces.analysis.operators import SHOWN, short_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One part of the step, or one operator, in two traces: mean seconds per step."""

    what: str
    kind: str
    """"part", "operator" or "kernel"."""
    before: float
    after: float

    @property
    def change(self) -> float:
        """Seconds per step; negative = faster."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDifference(display.Shown, JsonDataclass):
    """A trace against another: `before.diff(after)`."""

    changes: tuple[Change, ...]
    """The parts in their order, then operators and kernels, the largest changes first."""
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        """Length of the traced step before, divided by that after."""
        total = self.changes[len(PARTS)]
        return total.before / total.after if total.after else float("nan")

    @property
    def table(self) -> display.Table:
        """The parts, the step and the operators that changed most."""
        rows = [
            [short_name(change.what), change.kind, units.seconds(change.before), units.seconds(change.after), units.seconds(change.change)]
            for change in self.changes[: len(PARTS) + 1 + SHOWN]
        ]
        note = display.notes([f"mean seconds per step; the traced step is {units.times(self.speedup)} as fast as before", *self.notes])
        return display.Table(
            columns=("what", "kind", "before", "after", "change"), rows=rows, title="What changed between two traces", note=note
        )

    to_frame = display.frame_method("changes", Change, "change")

    def __repr__(self) -> str:
        return f"TraceDifference({units.times(self.speedup)} as fast)"


Side = tuple[Breakdown, Mapping[str, float], Mapping[str, float]]
"""Breakdown; own seconds per step of operators and of kernels."""


def difference(before: Side, after: Side) -> TraceDifference:
    """Compare two traces, per step."""
    parts = [Change(what=part, kind="part", before=before[0].mean(part), after=after[0].mean(part)) for part in (*PARTS, "total")]
    rows: list[Change] = []
    for kind, sides in (("operator", (before[1], after[1])), ("kernel", (before[2], after[2]))):
        names = dict.fromkeys([*sides[0], *sides[1]])
        rows += [Change(what=name, kind=kind, before=sides[0].get(name, 0.0), after=sides[1].get(name, 0.0)) for name in names]
    notes = [] if before[0].device == after[0].device else ["one was taken on a CPU, the other on a device"]
    return TraceDifference(changes=(*parts, *sorted(rows, key=lambda change: -abs(change.change))), notes=tuple(notes))
