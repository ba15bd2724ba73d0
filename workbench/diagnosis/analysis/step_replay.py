"""StepReplay: a step of a run that went wrong, repeated with changes, and what is to blame: data, learning rate or numerics."""

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.core.brief import Briefed
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

VERDICTS: Mapping[str, str] = {
    "data": "the batch is to blame: with other samples and the same weights the step is an ordinary one",
    "learning rate": "the update is too large: a tenth of the learning rate does not make other batches worse",
    "numerics": "the precision is to blame: in a higher one the same step is an ordinary one",
    "earlier": "the weights were bad before this step already, and no earlier one could be repeated: write checkpoints more often",
    "nothing": "this step is an ordinary one",
}
"""Verdict → what it means."""


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
    """Indices of the samples to blame; empty = none by itself."""
    usual: float
    """Loss of other batches before the step."""
    recorded: float | None
    """Loss of the step in the run; None = not written."""
    trials: tuple[Trial, ...]
    """The step as it was, and with changes."""
    start: str
    """From where the run was repeated: a checkpoint, or "the first step"."""
    notes: tuple[str, ...] = ()
    """What the reader should know."""

    @property
    def table(self) -> display.Table:
        """A row per trial, and the verdict."""
        rows = [(trial.name, *map(_text, (trial.loss, trial.gradient, trial.others))) for trial in self.trials]
        blamed = f"; samples {', '.join(map(str, self.samples))}" if self.samples else ""
        where = f"step {self.step}" + (f" (asked for: {self.asked})" if self.step != self.asked else "")
        note = [f"{where}, {self.verdict}{blamed}: {VERDICTS[self.verdict]}", f"before it, other batches had a loss of {_text(self.usual)}"]
        columns = ("the step", "loss", "norm of the gradient", "others' loss after it")
        return display.Table(columns=columns, rows=rows, title=f"Replay from {self.start}", note="\n".join([*note, *self.notes]))

    def __repr__(self) -> str:
        return f"StepReplay(step={self.step}, verdict={self.verdict!r}, samples={self.samples})"


def _text(value: float) -> str:
    return "not finite" if value != value else f"{value:.4g}"


def first_bad_step(losses: Mapping[int, float]) -> int | None:
    """The first step whose loss is not finite, or far above all of the twenty before it; None = there is none.

    >>> first_bad_step({1: 2.0, 2: 1.9, 3: 1.8, 4: 9.0, 5: 1.7})
    4
    """
    before: list[float] = []
    for step, loss in sorted(losses.items()):
        if loss != loss or abs(loss) == float("inf"):
            return step
        if len(before) >= 3 and loss > limit(before):
            return step
        before = [*before[-19:], loss]
    return None


def limit(usual: list[float]) -> float:
    """The loss from which on a batch is no ordinary one, beside others' losses: half as much again as the largest of them.

    Chosen: batches of one training differ by less at the same weights, unless they are tiny.
    """
    return max(usual) + 0.5 * max(abs(max(usual)), 1e-6)
