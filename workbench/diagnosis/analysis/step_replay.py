"""StepReplay: a step of a run that went wrong, repeated with changes, and what is to blame: data, learning rate or numerics."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workbench.core.brief import Briefed
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.runs.loss_faults import LEAST, relative_noise, spikes

VERDICTS: Mapping[str, str] = {
    "data": "the batch is to blame: with other samples and the same weights the step is an ordinary one",
    "learning rate": "updates are too large",
    "numerics": "the precision is to blame",
    "every batch": "with these weights no batch is ordinary: the model, the loss or all data are to blame, which wb.sanity tests",
    "earlier": "the weights were already bad before this step",
    "unclear": "the step is not ordinary, and none of these changes makes it ordinary",
    "nothing": "this step is an ordinary one",
}
"""Verdict → what it means."""
WITH_RATE = "with other samples and the same weights the step does far less harm, and still too much"
"""What "data" means beside "learning rate"."""
UNUSUAL = 30.0
"""Times the gradient of another batch, from which on a gradient is no ordinary one. Chosen, not measured."""
AS_HARMFUL = 0.1
"""Fraction of the rise of the loss of other batches from which on the update with another batch counts as just as harmful. The rise grows
with the square of the gradients. Chosen."""
WORSE = 0.2
"""Part of the loss of other batches by which an update raises it, from which on it has made them worse. Chosen, not measured."""
EARLY = 10.0
"""Times the largest loss before it, from which on a loss stands out where there are fewer than `FEW` before it.

Chosen: untrained models have losses within a few times of each other.
"""
FEW = 3
"""Losses before a step that suffice to tell how much they vary."""
DEVIATIONS = 4.0
"""Standard deviations by which a loss must stand out among the first ones. Chosen: by chance, few runs of a hundred have one."""
WINDOW = 20
"""Losses before a step that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(JsonDataclass):
    """A way to take the step."""

    name: str
    """What was changed."""
    loss: float
    """Of the batch; nan = not finite."""
    gradient: float
    """Norm of the gradient; nan = not finite."""
    others: float
    """Loss of other batches after the update; nan = not finite."""
    skipped: bool = False
    """The loss scaler has left the update out, since gradients overflowed at its scale."""

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplay(Briefed, display.Shown):
    """A step of a run, repeated."""

    run: str
    """Its directory."""
    asked: int
    """The step that was asked for, or that the run's losses show."""
    step: int
    """The step that is judged: an earlier one where that has spoilt the weights."""
    verdict: str
    """A key of `VERDICTS`."""
    samples: tuple[int, ...]
    """Indices of the samples to blame, of a stream their places in the step's batch, from 0; empty = none by itself."""
    usual: float
    """Loss of other batches before the step."""
    recorded: float | None
    """Loss of the step in the run; None = not written."""
    trials: tuple[Trial, ...]
    """The step as it was, and with changes."""
    why: str = ""
    """What in the trials the verdict follows from."""
    also: tuple[str, ...] = ()
    """Other verdicts that hold beside it."""
    start: str
    """From where the run was repeated: a checkpoint, or "the first step"."""
    notes: tuple[str, ...] = ()
    """What the reader should know."""

    @property
    def table(self) -> display.Table:
        """A row per trial, and the verdict."""
        rows = [(trial.name, *map(text, (trial.loss, trial.gradient, trial.others))) for trial in self.trials]
        blamed = f"; samples {', '.join(map(str, self.samples))}" if self.samples else ""
        where = f"step {self.step}" + (f" (asked for: {self.asked})" if self.step != self.asked else "")
        verdicts = " and ".join([self.verdict, *self.also])
        meaning = WITH_RATE if self.verdict == "data" and "learning rate" in self.also else VERDICTS[self.verdict]
        note = [f"{where}, {verdicts}{blamed}: {meaning}{f': {self.why}' * bool(self.why)}"]
        note.append(f"before it, other batches had {'no finite loss' if self.usual != self.usual else f'a loss of {text(self.usual)}'}")
        columns = ("the step", "loss", "norm of the gradient", "others' loss after it")
        return display.Table(columns=columns, rows=rows, title=f"Replay from {self.start}", note="\n".join([*note, *self.notes]))

    def __repr__(self) -> str:
        return f"StepReplay(step={self.step}, verdict={self.verdict!r}, samples={self.samples})"


def text(value: float) -> str:
    """A loss or a norm, in words where it is not finite."""
    return "not finite" if value != value else f"{value:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What is usual with the weights before a step."""

    others: float
    """Loss of other batches."""
    rest: float
    """Loss of those other batches that no trial is taken with."""
    largest: float
    """Largest loss of an ordinary batch."""
    gradient: float
    """Norm of the gradient of another batch; inf = not known."""
    drift: float
    """Change of the loss between two steps before it: half of the changes are larger."""

    def ordinary(self, trial: Trial) -> bool:
        """Whether the loss and the gradient of a trial are finite, and not far above those of other batches."""
        return trial.finite and trial.loss <= self.largest and trial.gradient <= UNUSUAL * self.gradient

    def worse(self, after: float, before: float | None = None) -> bool:
        """Whether an update has made other batches worse, beyond what is usual: their loss `after` it and `before` it (None = of all)."""
        before = self.others if before is None else before
        return not math.isfinite(after) or after - before > max(WORSE * abs(before), 2 * self.drift)

    def sound(self, known: Sequence[float], first: float) -> bool:
        """Whether other batches have a finite loss, not far above the losses before and, if few are known, theirs some steps before."""
        beside = [*known, first] if len(known) < FEW and math.isfinite(first) else known
        return math.isfinite(self.others) and not (beside and self.others > limit(beside))

    def harms_alike(self, other: Trial, plain: Trial) -> bool:
        """Whether the update with another batch harms as the plain one does, and raises the loss of others beyond an ordinary one.

        A batch whose own loss or gradient is not finite, or far above that of others, is to blame by itself, whatever the learning rate is.
        """
        far = plain.loss - self.others > EARLY * max(abs(self.others), 1e-6) or plain.gradient > UNUSUAL * self.gradient
        if not plain.finite or far:
            return False
        if not math.isfinite(other.others) or not math.isfinite(plain.others):
            return not math.isfinite(other.others)
        return other.others > self.largest and other.others - self.rest >= AS_HARMFUL * (plain.others - self.others)

    def cures(self, trial: Trial, plain: Trial) -> bool:
        """Whether a change keeps an update from making other batches worse, and their loss rises by less than half as much."""
        rise = math.inf if math.isnan(plain.others) else plain.others - self.others
        return not self.worse(trial.others) and trial.others - self.others < 0.5 * rise

    def mends(self, higher: Trial, plain: Trial, known: Sequence[float]) -> bool:
        """Whether a higher precision makes an ordinary step of one that is none, beside the losses known before it."""
        if not plain.finite and higher.finite and higher.loss <= max([self.largest, *known]):
            return True
        return self.ordinary(higher) and higher.loss < 0.5 * plain.loss


def ordinary_losses(losses: Mapping[int, float], before: int) -> list[float]:
    """The losses of at most `WINDOW` steps before a step, without those that stand out.

    Losses that stand out for `WINDOW` steps are a new level, and ordinary.

    >>> ordinary_losses({1: 2.0, 2: 1.9, 3: 1.8, 4: 9.0, 5: 1.7, 6: 1.6}, 6)
    [2.0, 1.9, 1.8, 1.7]
    """
    known, apart = list[float](), list[float]()
    for step, loss in sorted(losses.items()):
        if step >= before:
            break
        if not stands_out(loss, known):
            known, apart = [*known, loss][-WINDOW:], []
        elif math.isfinite(loss):
            apart = [*apart, loss]
            if len(apart) == WINDOW:
                known, apart = apart, []
    return known


def drift(known: Sequence[float]) -> float:
    """The median change between losses that follow each other; 0 where there are fewer than `FEW`."""
    return statistics.median(abs(b - a) for a, b in pairwise(known)) if len(known) >= FEW else 0.0


def first_bad_step(losses: Mapping[int, float]) -> int | None:
    """The step of a run to repeat: where its loss began to stand out and became NaN or infinite, or jumped; None = there is none.

    A loss that is not finite comes first, whatever jumped before it. From step `LEAST` on, `spikes` finds the jumps; it knows too few
    losses before that.

    >>> first_bad_step({1: 2.0, 2: 1.9, 3: 1.8, 4: 9.0, 5: 1.7})
    4
    >>> first_bad_step({1: 2.0, 2: 9.0, 3: 2.0, 4: 2.1, 5: 80.0, 6: math.nan})
    5
    """
    steps = sorted(losses)
    bad = next((place for place, step in enumerate(steps) if not math.isfinite(losses[step])), None)
    if bad is not None:
        while bad and stands_out(losses[steps[bad - 1]], [losses[step] for step in steps[max(0, bad - 1 - WINDOW) : bad - 1]]):
            bad -= 1  # it had risen in the steps before
        return steps[bad]
    noise = relative_noise([losses[step] for step in steps[: 2 * LEAST]]) or 0.0
    early = [place for place in range(min(LEAST, len(steps))) if _jumps([losses[step] for step in steps[: place + 1]], noise)]
    known = [(step, losses[step]) for step in steps]
    jumps = [spike.step for spike in spikes(known) or spikes(known, surely=False) if spike.step is not None]
    return min([*(steps[place] for place in early), *jumps], default=None)


def _jumps(losses: Sequence[float], noise: float) -> bool:
    """Whether the last of some losses stands out of those before, and not by the noise of all."""
    *before, loss = losses[-WINDOW - 1 :]
    usual = statistics.median(before) if before else 0.0
    return stands_out(loss, before) and (usual <= 0 or math.log(loss) - math.log(usual) > DEVIATIONS * noise)


def stands_out(loss: float, before: Sequence[float]) -> bool:
    """Whether a loss is not finite, or far above all of those before it."""
    if not math.isfinite(loss) or not before:
        return not math.isfinite(loss)
    return loss > (limit(before) if len(before) >= FEW else max(before) + (EARLY - 1) * max(abs(max(before)), 1e-6))


def limit(usual: Sequence[float]) -> float:
    """The loss from which on a batch is no ordinary one, beside others' losses: half as much again as the largest of them.

    Chosen: batches of one training differ by less at the same weights, unless they are tiny.
    """
    return max(usual) + 0.5 * max(abs(max(usual)), 1e-6)
