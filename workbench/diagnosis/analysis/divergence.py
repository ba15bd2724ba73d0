"""Divergence: where two trainings that should agree differ first, and whether that is rounding or a bug."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from workbench.core.brief import Briefed
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.runs.spec import RunSpec

VERDICTS: Mapping[str, str] = {
    "identical": "no difference, not even of a bit",
    "rounding": "the results differ by rounding: operators that add in another order, or in another precision",
    "bug": "the two compute different things: the difference remains in fp64",
    "design": "the two are meant to differ by what the notes say; whether they also differ by a bug is not known",
    "random": "random numbers are drawn in another order: compare without dropout, or in evaluation mode",
    "unrepeatable": "the first of the two differs there from itself; whether the two also differ by a bug is not known",
    "start": "the two begin with different weights or batches: give them the same seed and data",
}
"""Verdict → what it means."""
BY_DESIGN: Mapping[str, str] = {
    "local_sgd": "each rank trains alone between two averages",
    "gradient_compression": "ranks exchange gradients in fewer bits, or with a lower rank",
    **dict.fromkeys(("clip_grad_norm", "lr", "schedule", "warmup_steps", "weight_decay_on", "label_smoothing"), "the specs differ in it"),
}
"""Knob → why two trainings that differ in it do not agree."""
UNKNOWN = "probably the two compute different things: their first difference is larger than rounding would make it"
"""What "bug" means where the two were not run in fp64."""
LOSS, WHOLE = "the loss", "the model"  # as modules
EXACT = 1e-9
"""Relative difference in fp64 that rounding does not reach. Chosen: it makes 1e-16 per operator, and a step amplifies that to 1e-12 at
most. A factor of two changes nothing."""
VANISHED = 1e-5
"""Part of a difference that remains in fp64, up to which it was rounding, however large: fp64 rounds 5e8 times less than fp32. Chosen: Adam
divides a gradient that is only rounding by its own size, and what is left of it in fp64 reached 1e-6 of what it was in 30 steps."""
OUTLYING = 1e5
"""Times the median norm of a phase's results, beyond which a norm says nothing about the others, as that of a mask of -1e9. Chosen."""


def scale_of(norms: Collection[float]) -> float:
    """The largest of the norms of some results, without those of masks and the like: beyond `OUTLYING` times their median.

    >>> scale_of([0.0, 2.0, 3.0, 50.0, 1e9, 3e38])
    50.0
    """
    usual = sorted(norm for norm in norms if 0 < norm < math.inf)
    return max((norm for norm in usual if norm <= OUTLYING * usual[(len(usual) - 1) // 2]), default=0.0)


def in_other_modes(first: Mapping[str, bool], second: Mapping[str, bool]) -> list[str]:
    """Notes about the modules that are in training mode in one of two trainings only. What lies in such a module is not listed again.

    Args:
        first: module → whether it is in training mode, in the one.
        second: in the other.

    >>> in_other_modes({"b": True, "b.0": True, "c": True}, {"b": False, "b.0": False, "c": True})
    ['b is in training mode in the first of the two, and in evaluation mode in the second']
    """
    names = [name for name in first if first[name] != second.get(name, first[name])]
    outer = [WHOLE] if WHOLE in names else [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    modes = {True: "training", False: "evaluation"}
    text = "{} is in {} mode in the first of the two, and in {} mode in the second"
    return [text.format(name, modes[first[name]], modes[second[name]]) for name in outer]


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
        meaning = UNKNOWN if self.verdict == "bug" and self.exact is None else VERDICTS[self.verdict]
        note = "\n".join([f"{self.verdict}: {meaning}", *self.notes])
        return display.Table(columns=("", "measured"), rows=rows, title=f"{self.a} and {self.b}", note=note)

    def judged(self, a: RunSpec, b: RunSpec, norms: Collection[str]) -> "Divergence":
        """A "bug" as "design" where two specs, and the names of the batch norms in their model, explain its place."""
        assert self.first
        ranks = a.world_size != b.world_size
        knobs = [name for name in BY_DESIGN if getattr(a, name) != getattr(b, name)]
        knobs += [name for name in ("local_sgd", "gradient_compression") if ranks and getattr(a, name) == getattr(b, name) != "none"]
        if self.first.step == 1 and self.first.phase == "forward":  # no gradient, and no update, has come into it
            knobs = [name for name in knobs if name == "label_smoothing" and self.first.module == LOSS]
        notes = [f"{name}: {BY_DESIGN[name]}" for name in knobs]
        at_norm = any(f"{self.first.module}.".startswith(f"{name}.") for name in norms) or self.first.module in ("", LOSS)
        if norms and at_norm and (ranks or a.micro_batch != b.micro_batch):
            notes.append("batch norm: its statistics are those of one micro-batch on one rank")
        return dataclasses.replace(self, verdict="design", notes=(*notes, *self.notes)) if notes else self

    def __repr__(self) -> str:
        where = f", step={self.first.step}, phase={self.first.phase!r}, module={self.first.module!r}" if self.first else ""
        return f"Divergence({self.verdict!r}{where})"
