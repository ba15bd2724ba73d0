"""Trials of an experiment on steps to a target: what a `Trial` is, what its seeds say (`Mark`), and which to run next (`TrialScheduler`).

A rule's learning rate is tried with each seed. "tuned" searches: candidates around a centre with the first seed, further ones while the
best is the outermost, then the other seeds at the best. Batches are tuned from the one nearest the base outwards, each around its
neighbour's best rate times the square root of the ratio: small batches need its first power, large ones none.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.core import units
from workbench.core.codec import JsonDataclass

Outcome = Literal["reached", "stopped", "diverged", "capped", "cut"]
"""How a trial ended: at the target; given up, much slower than the best; NaN, infinite or far above its start; at the most steps; or with
the budget."""

TUNED = "tuned"
"""Rule of learning rates from a search."""
MAX_FURTHER = 8
"""Candidates that a search adds at most."""
MAX_RETRIED, CLOSE = 3, 1.15
"""Candidates that are tried with the other seeds too: the best of the first seed, those that needed hardly more steps, which one seed
cannot tell apart, and the next ones where a seed has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The loss or figure that a model has to reach.

    >>> str(Target(name="loss", value=0.5)), Target(name="accuracy", value=0.8, rises=True).met(0.81)
    ('loss 0.5', True)
    """

    name: str
    """"loss", on a fixed part of the training data; or a figure of the task's evaluation."""
    value: float
    """The value to reach."""
    rises: bool | None = None
    """Is more better? None = by the untrained model: a figure that begins below the target has to rise."""
    start: float | None = None
    """Value of the untrained model; None = not measured yet."""

    def met(self, value: float) -> bool:
        """Does a value reach the target?"""
        return value >= self.value if self.rises else value <= self.value

    def crossing(self, before: tuple[int, float], after: tuple[int, float]) -> float:
        """Steps at which the line between two measurements (steps, value) crosses the target; the second has reached it."""
        (start, low), (end, high) = before, after
        return start + (end - start) * (self.value - low) / (high - low) if high != low else float(end)

    def rank(self, trial: "Trial") -> tuple[bool, bool, float]:
        """Sort key of trials, best first: steps if the target was reached, else the distance to it, diverged ones last."""
        if trial.steps is not None:
            return False, False, trial.steps
        near = trial.best if trial.best is not None else math.inf
        return True, trial.outcome == "diverged", trial.lr if trial.outcome == "diverged" else -near if self.rises else near

    def __str__(self) -> str:
        return f"{self.name} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One training from the start until its target."""

    batch: int
    """Samples per optimizer step."""
    rule: str
    """Rule of its learning rate, or "tuned"."""
    lr: float
    """Peak learning rate."""
    optimizer: str
    """As in a RunSpec."""
    seed: int
    """Of the model's weights and the samples' order."""
    steps: float | None
    """Optimizer steps to the target, interpolated; None = not reached."""
    after: int
    """Optimizer steps taken."""
    outcome: Outcome
    """How it ended."""
    best: float | None
    """The value nearest the target; None = none was finite."""
    seconds: float = 0.0
    """Duration."""

    @property
    def samples(self) -> float | None:
        """Samples to the target; None = not reached."""
        return None if self.steps is None else self.steps * self.batch

    @property
    def at_once(self) -> bool:
        """Did it diverge at the first step?"""
        return self.outcome == "diverged" and self.after <= 1

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Trial":
        """From plain JSON values."""
        return cls(**{name: value[name] for name in cls.__slots__ if name in value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The trials of one batch, rule, optimizer and learning rate."""

    batch: int
    """Samples per optimizer step."""
    rule: str
    """Rule of the learning rate."""
    optimizer: str
    """As in a RunSpec."""
    lr: float
    """Peak learning rate."""
    steps: float
    """Median over the seeds (of two in the middle the geometric mean), where a seed that did not reach the target counts as infinite; the
    steps taken if the median did not reach it."""
    reached: bool
    """Did the median seed reach the target?"""
    low: float
    """Steps of the fastest seed, or `steps` where none reached the target."""
    high: float
    """Steps of the slowest seed; infinite if one did not reach the target."""
    seeds: int
    """Number of seeds."""
    diverged: bool
    """Was it not reached because trials diverged?"""

    @property
    def samples(self) -> float:
        """Samples to the target: batch × steps."""
        return self.batch * self.steps

    @property
    def text(self) -> str:
        """Steps, or how the trial ended: `315`, `> 300`, `∞`."""
        if self.reached:
            return units.count(round(self.steps))
        return "∞" if self.diverged else f"> {units.count(round(self.steps))}"


def mark_of(trials: Sequence[Trial]) -> Mark:
    """The mark of trials that differ in their seed only."""
    ordered = sorted(trials, key=lambda trial: (trial.steps is None, trial.steps if trial.steps is not None else trial.after))
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    took = [trial.steps if trial.steps is not None else max(1, trial.after) for trial in middle]
    reached = [trial.steps for trial in ordered if trial.steps is not None]
    steps = math.exp(sum(map(math.log, took)) / len(took))
    first = trials[0]
    return Mark(
        batch=first.batch,
        rule=first.rule,
        optimizer=first.optimizer,
        lr=first.lr,
        steps=steps,
        reached=all(trial.steps is not None for trial in middle),
        low=min(reached, default=steps),
        high=max(reached) if len(reached) == len(ordered) else math.inf,
        seeds=len(ordered),
        diverged=any(trial.outcome == "diverged" for trial in middle),
    )


def marks_of(trials: Iterable[Trial], target: Target) -> tuple[Mark, ...]:
    """The mark of the best configuration at each batch, smallest batch first.

    Of several learning rates (a search) those count that reached the target and were tried with the most seeds.
    """
    groups: dict[int, dict[tuple[str, float], list[Trial]]] = {}
    for trial in trials:
        groups.setdefault(trial.batch, {}).setdefault((trial.rule, trial.lr), []).append(trial)
    return tuple(_best(list(groups[batch].values()), target) for batch in sorted(groups))


def _best(groups: Sequence[Sequence[Trial]], target: Target) -> Mark:
    good = [group for group in groups if any(trial.steps is not None for trial in group)]
    if not good:
        return mark_of(min(groups, key=lambda group: min(map(target.rank, group))))
    most = max(map(len, good))
    marks = [mark_of(group) for group in good if len(group) == most]
    return min(marks, key=lambda mark: (not mark.reached, mark.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A trial to run."""

    batch: int
    rule: str
    optimizer: str
    lr: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentPlan(JsonDataclass):
    """The trials that a user requests."""

    target: Target
    """Where a trial ends."""
    batches: tuple[int, ...]
    """Global batches, in samples."""
    rules: tuple[str, ...]
    """Rules for the learning rate of each batch."""
    optimizers: tuple[str, ...]
    """As in a RunSpec; "" = the spec's own."""
    retune: tuple[float, ...]
    """Factors of the centre for a search at each batch; empty = rules only."""
    seeds: int
    """Trials per configuration."""
    base_batch: int
    """Batch of the optimizers' own learning rates."""
    patience: float | None
    """A trial is given up after this many times the steps of the best so far; None = never."""
    max_steps: int
    """Optimizer steps of a trial at most."""
    probe: int
    """Samples on which the loss is measured."""
    budget_s: float | None
    """Seconds after which no further trial begins; None = all run."""
    noise_scale: float | None
    critical_batch: float | None
    """For the rules that use them, in samples."""


class TrialScheduler:
    """Decides from the trials that have ended which to run next.

    Args:
        order: the requested trials: optimizers, rules and batches.
        rates: (optimizer, rule, batch) → learning rate, for the rules; (optimizer, "none", base batch) for the search.
    """

    def __init__(self, order: ExperimentPlan, rates: Mapping[tuple[str, str, int], float]) -> None:
        self.order, self.rates = order, rates
        self.batches = sorted(order.batches, key=lambda batch: abs(math.log(batch / order.base_batch)))

    def runnable(self, done: Iterable[Trial]) -> list[Job]:
        """Trials that can begin now, most useful first; those that depend on others follow later. Empty = all are done."""
        known = {_key(trial): trial for trial in done}
        jobs: list[Job] = []
        for optimizer in self.order.optimizers:
            waiting: set[int] = set()
            for batch in self.batches:
                if self.order.retune and (near := self.neighbour(batch)) not in waiting:
                    searched = _Search(self, optimizer, batch, near, known).jobs()
                    jobs += searched
                    if searched:
                        waiting.add(batch)
                elif self.order.retune:
                    waiting.add(batch)
                for rule in self.order.rules:
                    lr = self.rates[optimizer, rule, batch]
                    jobs += self._seeds(known, batch=batch, rule=rule, optimizer=optimizer, lr=lr)
        return jobs

    def limit(self, job: Job, done: Iterable[Trial]) -> int:
        """Steps after which a trial is hopeless.

        With the best learning rates a larger batch needs no more steps, and a smaller one no more samples. So each trial that has reached
        the target bounds what is reasonable at any batch, and `patience` times that is the limit.
        """
        if self.order.patience is None:
            return self.order.max_steps
        bounds = [
            trial.steps * max(1.0, trial.batch / job.batch)
            for trial in done
            if trial.steps is not None and trial.optimizer == job.optimizer
        ]
        return min([self.order.max_steps, *(math.ceil(self.order.patience * bound) for bound in bounds)])

    def total(self, done: Sequence[Trial]) -> int:
        """The expected number of trials: searches may go on, and a hopeless configuration is not tried with other seeds."""
        order, runnable = self.order, self.runnable(done)
        seeds = order.seeds - 1 if order.patience is not None else 0  # they follow the first one unless it is hopeless
        known = len(done) + len(runnable) + seeds * sum(job.rule != TUNED and job.seed == 0 for job in runnable)
        if not order.retune:
            return known
        searching = {(job.optimizer, job.batch) for job in runnable if job.rule == TUNED and job.seed == 0}
        known_trials: list[Trial | Job] = [*done, *runnable]
        begun = {(trial.optimizer, trial.batch) for trial in known_trials if trial.rule == TUNED}
        unknown = len(order.optimizers) * len(order.batches) - len(begun)
        return known + unknown * len(order.retune) + (unknown + len(searching)) * (order.seeds - 1)

    def neighbour(self, batch: int) -> int | None:
        """The batch that is tuned before this one, the next towards the base; None = this is the first."""
        before = self.batches[: self.batches.index(batch)]
        return min(before, key=lambda other: abs(math.log(other / batch))) if before else None

    def _seeds(self, known: Mapping[Any, Trial], **job: Any) -> Iterator[Job]:
        """The remaining seeds of a configuration; none after a hopeless one."""
        for seed in range(self.order.seeds):
            trial = known.get(_key(next_job := Job(**job, seed=seed)))
            if trial is None:
                yield next_job
                if seed == 0 and self.order.patience is not None:
                    return  # if it is hopeless, so are the others
            elif trial.steps is None and trial.outcome != "cut" and self.order.patience is not None:
                return


class _Search:
    """The search for the learning rate at one batch."""

    def __init__(self, scheduler: TrialScheduler, optimizer: str, batch: int, near: int | None, known: Mapping[Any, Trial]) -> None:
        self._scheduler, self._known = scheduler, known
        self._job: dict[str, Any] = {"batch": batch, "optimizer": optimizer, "rule": TUNED}
        order = scheduler.order
        if near is None:
            lr, near = scheduler.rates[optimizer, "none", order.base_batch], order.base_batch
        else:
            tried = [trial for trial in known.values() if (trial.rule, trial.optimizer, trial.batch) == (TUNED, optimizer, near)]
            lr = marks_of(tried, order.target)[0].lr
        centre = lr * math.sqrt(batch / near)
        self._given = [_rounded(centre * factor) for factor in sorted(order.retune, key=lambda factor: (abs(math.log(factor)), factor))]
        self._first = self._first_seed()
        self._reachable = any(trial.steps is not None and trial.optimizer == optimizer for trial in known.values())

    def jobs(self) -> list[Job]:
        """Trials that can begin now."""
        if candidates := self._untried():
            return [Job(**self._job, lr=lr, seed=0) for lr in candidates]
        ranking = sorted((trial for trial in self._first.values() if trial.steps is not None), key=self._scheduler.order.target.rank)
        reliable, jobs = 0, list[Job]()
        for position, first in enumerate(ranking[:MAX_RETRIED]):
            assert first.steps is not None
            assert ranking[0].steps is not None
            if position and reliable and first.steps > CLOSE * ranking[0].steps:
                break
            jobs += self._scheduler._seeds(self._known, **self._job, lr=first.lr)
            seeds = [self._known.get(_key(Job(**self._job, lr=first.lr, seed=seed))) for seed in range(self._scheduler.order.seeds)]
            reliable += all(trial is None or trial.steps is not None for trial in seeds)
        return jobs

    def _first_seed(self) -> dict[float, Trial]:
        """The trials of the first seed, by learning rate."""
        return {
            trial.lr: trial
            for trial in self._known.values()
            if trial.seed == 0 and all(getattr(trial, name) == value for name, value in self._job.items())
        }

    def _untried(self) -> list[float]:
        """Candidates to be tried before the best is known."""
        if missing := [lr for lr in self._given if lr not in self._first]:
            return missing
        if len(self._first) >= len(self._given) + MAX_FURTHER:
            return []
        tried = sorted(self._first)
        best = min(self._first.values(), key=self._scheduler.order.target.rank).lr
        if len(tried) > 1 and best == tried[0]:
            return [_rounded(best * tried[0] / tried[1])]
        if len(tried) > 1 and best == tried[-1]:
            return [_rounded(best * tried[-1] / tried[-2])]
        if len(tried) > 1 and self._reachable and all(trial.steps is None for trial in self._first.values()):
            return [_rounded(tried[0] * tried[0] / tried[1])]  # smaller ones are slower, but more stable
        return []


def _key(trial: Job | Trial) -> tuple[Any, ...]:
    return trial.batch, trial.rule, trial.optimizer, trial.lr, trial.seed


def _rounded(lr: float) -> float:
    """Six significant digits, so that it is the same number wherever it is computed."""
    return float(f"{lr:.6g}")
