"""prove_resume in another layout: does a killed training go on with the same states and samples, and losses equal but for rounding?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import late
from workbench.core.brief import Briefed
from workbench.core.display import table as display
from workbench.core.units import several
from workbench.runs.launch.resume import LAYOUT_KNOBS
from workbench.runs.spec import RunSpec

STATES = {
    "weights": "the weights with which it goes on",
    "buffers": "the buffers with which it goes on",
    "optimizer": "the optimizer's state with which it goes on",
    "schedule": "the learning-rate schedule",
    "scaler": "the gradient scaler",
    "ema": "the averaged weights",
}
"""Parts of fingerprints that another number of ranks does not change, if each has them whole."""
NAMES = {"optimizer": "optimizer states", "schedule": "learning-rate schedule", "scaler": "gradient scaler", "ema": "averaged weights"}
"""What a sentence calls a part, where that is not its key."""
OTHERS = {
    "repeatable": "the training itself, before it is killed",
    "samples": "the samples of a step",
    "loss": "the loss of a step, by more than rounding",
    "final weights": "the weights at the end, by more than rounding",
}
HINTS = {
    "repeatable": "two trainings of the spec differ: wb.same_twice(spec) names the first part",
    "samples": "the order does not go on where it was: an iterable dataset, or one that orders its samples by itself",
    "loss": "dropout and augmentation draw other random numbers on other ranks, batch norm sees other micro-batches; where the task has "
    "none of them, the layouts compute different things: wb.diverge(spec, other) names the first module",
    "final weights": "the losses agree: the training amplifies rounding, or parameters that no loss shows differ",
}
ROUNDING: Mapping[str, float] = {"fp32": 1e-4, "amp_bf16": 2e-2, "amp_fp16": 5e-3}
"""By precision: part of a loss, or of the norm of the weights, that other orders of addition explain over a few dozen steps. Chosen: with
losses of about 5, `benchmarks/loss_equality.py` measures 1e-6 at most in fp32; steps at large rates amplify it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResumeProof(Briefed, display.Shown):
    """Whether a training that continues in another layout is the same up to rounding."""

    steps: int
    """Steps of each training."""
    ranks: tuple[int, int]
    """Ranks before the kill and after it."""
    layout: Mapping[str, Any]
    """Knobs with which it went on."""
    killed_in: int
    """The step in which a rank was killed, from 1."""
    resumed_from: int
    """Steps of the checkpoint from which it went on."""
    restart_s: float
    """Seconds from the call that resumed it to the first step that was computed."""
    part: str
    """What differs first, a key of STATES or OTHERS; "" = nothing."""
    step: int | None
    """The step in which it does; None = nothing differs."""
    losses: float
    """Largest difference of a step's loss over all its samples, as a part of it."""
    weights: float
    """Norm of the difference of the weights at the end over that of the weights."""
    tolerance: float
    """Of both."""
    compared: tuple[str, ...]
    """Parts that could be compared, keys of STATES and OTHERS."""
    not_compared: tuple[str, ...]
    """Parts that the training has and that could not."""
    undisturbed: str
    """Run directory of the training that was not killed."""
    resumed: str
    """Run directory of the one that went on."""

    @property
    def same(self) -> bool:
        """Whether everything that could be compared is the same, losses and final weights up to rounding."""
        return not self.part

    @property
    def verdict(self) -> str:
        """The answer in words, with what to do."""
        knobs, on = ", ".join(f"{name}={value!r}" for name, value in self.layout.items()), self.ranks[0]
        killed = f"killed in step {self.killed_in} on {several(on, 'rank')} and resumed from step {self.resumed_from} with {knobs}"
        figures = f"losses differ by {self.losses:.1g} of them at most, the weights at the end by {self.weights:.1g}"
        if self.same:
            parts = _listed([part for part in self.compared if part in STATES or part == "samples"])
            return (
                f"The same but for rounding: {killed}, the training goes on with the same {parts}; {figures} (rounding explains "
                f"{self.tolerance:g}). It is not the same bit for bit: other ranks add in another order.{self._left_out()}"
            )
        what, hint = (STATES | OTHERS)[self.part], HINTS.get(self.part, "the checkpoint does not restore what it has in another layout")
        return (
            f"Not the same: {killed}, the first difference is in step {self.step}: {what} ({hint}). {figures.capitalize()}."
            f"{self._left_out()}"
        )

    def _left_out(self) -> str:
        """A sentence of what could not be compared, and why; "" = nothing."""
        states = [part for part in self.not_compared if part in STATES]
        left_out = [f"{_listed(states)} right after the resume (ranks share the model or the optimizer)"] if states else []
        left_out += ["samples (they have no indices, like those of a stream)"] if "samples" in self.not_compared else []
        return f" Not compared: {'; '.join(left_out)}." if left_out else ""

    @property
    def table(self) -> display.Table:
        """What was compared, and the verdict."""
        order = ["repeatable", *STATES, *(part for part in OTHERS if part != "repeatable")]
        place, rows = order.index(self.part) if self.part else len(order), []
        for number, part in enumerate(order):
            if part in self.compared and number <= place:
                rows.append([(STATES | OTHERS)[part], "differs first" if number == place else "the same"])
            elif part in self.compared or part in self.not_compared:
                rows.append([(STATES | OTHERS)[part], "not compared"])
        return display.Table(columns=("part", "undisturbed and resumed"), rows=rows, title="Resumed in another layout", note=self.verdict)

    def __repr__(self) -> str:
        return f"LayoutResumeProof(same={self.same}, ranks={self.ranks}, part={self.part!r})"


def _listed(parts: Sequence[str]) -> str:
    *rest, last = [NAMES.get(part, part) for part in parts]
    return f"{', '.join(rest)} and {last}" if rest else last


def resumed_spec(spec: RunSpec, layout: Mapping[str, Any], checkpoint_every: int | None) -> RunSpec:
    """The spec with which a training goes on after it was killed.

    Args:
        checkpoint_every: as it was given; None = `spec` has one that was chosen.

    Raises:
        ValueError: no training can go on so, or none with a checkpoint before the kill and one at the end.
    """
    other, every = spec.replace(**layout), spec.checkpoint_every
    assert every is not None
    if not (changes := spec.changes(other)) or not changes.keys() <= set(LAYOUT_KNOBS):
        raise ValueError(f"resumed={dict(layout)!r}: expected another value of some of {', '.join(LAYOUT_KNOBS)}")
    if spec.global_batch != other.global_batch:
        raise ValueError(
            f"resumed={dict(layout)!r}: a step would have {other.global_batch} samples, and has {spec.global_batch} (micro_batch × "
            "accumulation × ranks that read different samples): change micro_batch or accumulation with it"
        )
    if spec.steps % every or every >= spec.steps:
        multiple, given = checkpoint_every or 6, f" with checkpoint_every={checkpoint_every}" if checkpoint_every else ""
        raise ValueError(
            f"steps={spec.steps}{given}: a checkpoint before the kill and one at the end are needed; try "
            f"steps={multiple * max(2, math.ceil(spec.steps / multiple))}, or a smaller checkpoint_every= that divides steps"
        )
    if spec.local_sgd != "none":
        raise ValueError(f'resumed= with local_sgd="{spec.local_sgd}": each rank has parameters of its own, and goes on in the same layout')
    return other


Rows = Mapping[tuple[int, int], Mapping[str, Any]]
"""(step, rank) → row of the fingerprints."""


def comparable(before: tuple[RunSpec, Rows], after: tuple[RunSpec, Rows]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parts of STATES and OTHERS that can be compared, and those that the training has and that cannot.

    Args:
        before: spec and rows of the undisturbed training.
        after: of the one that went on in another layout, from its first step.
    """
    (spec, mine), (other, its) = before, after
    first, last = _span(its)
    whole = all(each.whole_models and each.parallel == "ddp" for each in (spec, other))
    missing = {part for part in STATES if not whole and part not in ("schedule", "scaler")}
    if any(_samples(spec, mine, step) is None and _samples(other, its, step) is None for step in range(first, last + 1)):
        missing.add("samples")
    had = [part for part in STATES if part in mine[first, 0]["parts"] or part in its[first, 0]["parts"]]
    parts = ["repeatable", *had, "samples", "loss", "final weights"]
    return tuple(part for part in parts if part not in missing), tuple(part for part in parts if part in missing)


def first_difference(before: tuple[RunSpec, Rows], after: tuple[RunSpec, Rows], tolerance: float) -> tuple[str, int | None, float]:
    """What differs first where a training went on in another layout; in which step; and by what part the losses differ at most."""
    (spec, mine), (other, its) = before, after
    first, last = _span(its)
    found: list[tuple[str, int]] = []
    for part in comparable(before, after)[0]:
        if part in STATES and mine[first, 0]["parts"].get(part) != its[first, 0]["parts"].get(part):
            found.append((part, first))
            break
    worst = 0.0
    for step in range(first, last + 1):
        if not found and _samples(spec, mine, step) != _samples(other, its, step):
            found.append(("samples", step))
        one, two = (_loss(each, rows, step) for each, rows in (before, after))
        gap = 0.0 if str(one) == str(two) else abs(one - two) / max(abs(one), 1e-12)
        worst = gap if math.isnan(gap) else max(worst, gap)
        if not found and not gap <= (tolerance if step > first else tolerance / 10):
            found.append(("loss", step))
    return (*found[0], worst) if found else ("", None, worst)


def _span(rows: Rows) -> tuple[int, int]:
    """The first and the last step of a training; its last row is of no step."""
    return min(step for step, _ in rows), max(step for step, rank in rows if "value" in rows[step, rank])


def _samples(spec: RunSpec, rows: Rows, step: int) -> int | None:
    """Of all readers, in any order; None = they have no indices."""
    each = [rows[step, rank].get("samples") for rank in range(spec.world_size)]
    alike = spec.world_size // spec.data_ranks  # ranks that read the same samples
    return None if None in each else sum(int(sum_) for sum_ in each if sum_ is not None) // alike


def _loss(spec: RunSpec, rows: Rows, step: int) -> float:
    """The mean over all samples of a step, or over all that these count (`Task.weight`)."""
    of_ranks = [rows[step, rank] for rank in range(spec.world_size)]
    counts = [float(row.get("count", 1.0)) for row in of_ranks]
    total = math.fsum(float(row["value"]) * count for row, count in zip(of_ranks, counts, strict=True))
    return total / (math.fsum(counts) or 1.0)


def distance(one: Path, other: Path) -> float:
    """Norm of the difference of the weights in the last checkpoints of two run directories over that of the weights."""
    weights = late.load("last_weights")
    mine, its = weights(one), weights(other)
    square = whole = 0.0
    for name, value in mine.items():
        value = value.double()
        square += float((value - its[name].double()).square().sum())
        whole += float(value.square().sum())
    return math.sqrt(square / whole) if whole else math.sqrt(square)
