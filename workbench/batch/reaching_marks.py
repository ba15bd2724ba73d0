"""Mark: what the seeds of one configuration say about the steps to a target at one batch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench import units
from workbench.batch.reaching_trial import Target, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The trials of one batch, rule, optimizer and learning rate."""

    batch: int
    """Samples per optimizer step."""
    rule: str
    """What gave the learning rate."""
    optimizer: str
    """As a spec writes it."""
    lr: float
    """Peak learning rate."""
    steps: float
    """Median over the seeds (of two in the middle the geometric mean), where a seed that did not reach the target counts as more than any;
    if the median did not reach it, the steps after which it was not reached."""
    reached: bool
    """Did the median seed reach the target?"""
    low: float
    """Steps of the fastest seed, or `steps` where none reached the target."""
    high: float
    """Steps of the slowest seed; infinite if one did not reach the target."""
    seeds: int
    """How many there were."""
    diverged: bool
    """Is divergence the reason why it was not reached?"""

    @property
    def samples(self) -> float:
        """Samples to the target: batch × steps."""
        return self.batch * self.steps

    @property
    def text(self) -> str:
        """Steps, or how it ended: `315`, `> 300`, `∞`."""
        if self.reached:
            return units.count(round(self.steps))
        return "∞" if self.diverged else f"> {units.count(round(self.steps))}"


def mark_of(trials: Sequence[Trial]) -> Mark:
    """What trials that differ in their seed only say."""
    ordered = sorted(trials, key=lambda one: (one.steps is None, one.steps if one.steps is not None else one.after))
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    took = [one.steps if one.steps is not None else max(1, one.after) for one in middle]
    reached = [one.steps for one in ordered if one.steps is not None]
    steps = math.exp(sum(map(math.log, took)) / len(took))
    first = trials[0]
    return Mark(
        batch=first.batch,
        rule=first.rule,
        optimizer=first.optimizer,
        lr=first.lr,
        steps=steps,
        reached=all(one.steps is not None for one in middle),
        low=min(reached, default=steps),
        high=max(reached) if len(reached) == len(ordered) else math.inf,
        seeds=len(ordered),
        diverged=any(one.outcome == "diverged" for one in middle),
    )


def marks_of(trials: Iterable[Trial], target: Target) -> tuple[Mark, ...]:
    """The best learning rate's mark at each batch, smallest batch first.

    Of several learning rates (a search) those count that have been tried with the most seeds, where one reached the target.
    """
    groups: dict[int, dict[tuple[str, float], list[Trial]]] = {}
    for trial in trials:
        groups.setdefault(trial.batch, {}).setdefault((trial.rule, trial.lr), []).append(trial)
    return tuple(_best(list(groups[batch].values()), target) for batch in sorted(groups))


best_marks = marks_of
"""The same over several rules."""


def mark_of_best(trials: Iterable[Trial], target: Target) -> Mark:
    """The mark of the best configuration among trials of one batch."""
    (found,) = marks_of(trials, target)
    return found


def _best(groups: Sequence[Sequence[Trial]], target: Target) -> Mark:
    good = [group for group in groups if any(trial.steps is not None for trial in group)]
    if not good:
        return mark_of(min(groups, key=lambda group: min(map(target.rank, group))))
    most = max(map(len, good))
    marks = [mark_of(group) for group in good if len(group) == most]
    return min(marks, key=lambda mark: (not mark.reached, mark.steps))
