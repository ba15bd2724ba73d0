"""Judgement: what holds a step back, why we think so, and whether three independent sources agree on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench import display, units
from workbench.codec import JsonDataclass, fields_to_json
from workbench.statistics import Interval

VERDICTS = {
    "input-bound": "waiting for data",
    "transfer-bound": "copying batches to the device",
    "compute-bound": "forward and backward: it computes",
    "optimizer-bound": "the optimizer's step",
    "host-bound": "Python, launches, sleeping: no operator runs",
    "communication-bound": "reducing gradients over the ranks",
    "straggler": "one rank slower than the others",
    "stalled": "stops now and then",
    "inconclusive": "too much noise to tell",
}
"""What holds a step back, in one word, and in a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One part of the step as three independent sources see it: fractions of the step; None where a source cannot see it."""

    part: str
    """Of PARTS."""
    clocks: float | None = None
    """Time between marks in the loop, as `wb.watch` sees it."""
    arms: float | None = None
    """What the step saved when the part was taken away."""
    trace: float | None = None
    """Operators and Python stacks, from inside a cached step."""
    note: str = ""
    """Why they differ, where they do; which one counts."""

    @property
    def agree(self) -> bool | None:
        """Do the sources that can see it lie within AGREE of each other? None if there are fewer than two."""
        seen = [value for value in (self.clocks, self.arms, self.trace) if value is not None]
        return max(seen) - min(seen) <= AGREE if len(seen) > 1 else None


AGREE = 0.1
"""Fractions of the step this far apart still agree: blocks of one quiet machine differ by half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement(JsonDataclass):
    """What follows from evidence."""

    verdict: str
    """Of VERDICTS."""
    cause: str
    """In finer words."""
    why: str
    """One or two sentences with the numbers."""
    shares: Mapping[str, Interval] = field(default_factory=dict)
    """Part → the fraction of the step that its removal would save. A part that hides behind another one saves nothing."""
    sources: tuple[Source, ...] = ()
    """The parts as clocks, arms and trace see them."""
    notes: tuple[str, ...] = ()
    """What was close, or spoils the result."""

    @property
    def table(self) -> display.Table:
        """One row per part: clocks beside arms beside trace."""
        word = {None: "one source only", True: "they agree", False: "they differ"}
        rows = [
            [
                s.part,
                units.percent(s.clocks),
                units.percent(s.arms),
                units.percent(s.trace),
                "; ".join(filter(None, [word[s.agree], s.note])),
            ]
            for s in self.sources
        ]
        return display.Table(
            columns=("part", "clocks", "arms", "trace", ""),
            rows=rows,
            title="Three sources",
            note="share of the step as marks in the loop see it; saved when it is taken away; seen from inside a cached step. "
            "The verdict goes by what was saved",
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**fields_to_json(self), "shares": {part: saved.to_list() for part, saved in self.shares.items()}}

    def __str__(self) -> str:
        return f"{self.verdict} ({self.cause}): {self.why}\n\n{self.table}"

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{display.escape(text)}</p>" for text in (f"{self.verdict} ({self.cause})", self.why))
        return said + self.table._repr_html_()
