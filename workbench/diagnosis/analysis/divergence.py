"""Divergence: where two trainings that should agree differ first, and whether that is rounding or a bug."""

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.core.brief import Briefed
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

VERDICTS: Mapping[str, str] = {
    "identical": "no difference, not even of a bit",
    "rounding": "the results differ by rounding: operators that add in another order, or in another precision",
    "bug": "the two compute different things: the difference is as large in fp64",
    "random": "random numbers are drawn in another order: compare without dropout, or in evaluation mode",
    "start": "the two begin with different weights or batches: give them the same seed and data",
}
"""Verdict → what it means."""
EXACT = 1e-9
"""Relative difference in fp64 that rounding does not reach. Chosen: it makes 1e-16 per operator, and a step amplifies that to 1e-12 at
most. A factor of two changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(JsonDataclass):
    """A result that both have, and how much it differs."""

    step: int
    """From 1; 0 = what they begin with."""
    phase: str
    """"start", "forward", "backward", "optimizer" or "after" (buffers, such as those of batch norm)."""
    module: str
    """The module that computed it, or the parameter."""
    operator: str
    """The operator, such as "aten.mm"; "" = the result of a module or a whole phase."""
    difference: float
    """Norm of the difference as a fraction of the result's; inf = only one of the two is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence(Briefed, display.Shown):
    """Where two trainings differ first."""

    a: str
    """What was compared."""
    b: str
    """With what."""
    verdict: str
    """A key of `VERDICTS`."""
    first: Point | None
    """Of a bug: the first point that differs in fp64; of rounding: the first that differs as they are; None = none."""
    exact: float | None
    """The largest relative difference in fp64; None = they do not run in fp64."""
    largest: float
    """The largest as they are."""
    compared: int
    """Results that were compared."""
    by: str
    """"operators", or "modules" where the two do not run the same operators."""
    notes: tuple[str, ...] = ()
    """What the reader should know."""

    @property
    def table(self) -> display.Table:
        """The first difference, and the verdict."""
        rows = [("largest difference", f"{self.largest:.2g}"), ("in fp64", "not known" if self.exact is None else f"{self.exact:.2g}")]
        if self.first:
            place = f"step {self.first.step}, {self.first.phase}" if self.first.step else "before the first step"
            rows = [
                ("first difference", place),
                ("module", self.first.module or "–"),
                ("operator", self.first.operator or "–"),
                ("difference there", f"{self.first.difference:.2g}"),
                *rows,
            ]
        rows.append(("compared", f"{self.compared} results, by {self.by}"))
        note = "\n".join([f"{self.verdict}: {VERDICTS[self.verdict]}", *self.notes])
        return display.Table(columns=("", "measured"), rows=rows, title=f"{self.a} and {self.b}", note=note)

    def __repr__(self) -> str:
        where = f", step={self.first.step}, phase={self.first.phase!r}, module={self.first.module!r}" if self.first else ""
        return f"Divergence({self.verdict!r}{where})"
