"""Trial: one training until its target, and how it ended; Target: what is to be reached.

Mark: what the seeds of one configuration say about the steps to a target at one batch.

What to try next, to find the steps to a target at several batches: pure decisions about trials, from those that are done.

A rule's learning rate is tried with each seed. "tuned" searches: candidates around a centre with the first seed, further ones while the
best is the outermost, then the other seeds at the best. Batches are tuned from the one nearest the base outwards, each around the rate that
was best for its neighbour, times the square root of the ratio: between what small batches want (its first power) and large ones (none).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.core import units
from workbench.core.codec import JsonDataclass

Outcome = Literal["reached", "stopped", "diverged", "capped"]
"""How a trial ended: at the target; given up, for it took much longer than the best; not a number, or far above where it began; or at the
largest number of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a model is to reach.

    >>> str(Target(name="loss", value=0.5)), Target(name="accuracy", value=0.8, rises=True).met(0.81)
    ('loss 0.5', True)
    """

    name: str
    """"loss", on a fixed part of the training data; or a figure of the task's evaluation."""
    value: float
    """Where it is reached."""
    rises: bool | None = None
    """Is more better? None = the untrained model tells: a figure that begins below the target has to rise."""
    start: float | None = None
    """What the untrained model has; None = nobody has looked yet."""

    def met(self, value: float) -> bool:
        """Is it reached?"""
        return value >= self.value if self.rises else value <= self.value

    def crossing(self, before: tuple[int, float], after: tuple[int, float]) -> float:
        """Steps at which the line between two looks (steps, value) meets the target; the second has met it, the first has not."""
        (start, low), (end, high) = before, after
        return start + (end - start) * (self.value - low) / (high - low) if high != low else float(end)

    def rank(self, trial: "Trial") -> tuple[bool, bool, float]:
        """To order trials by, best first: steps, where the target was reached; else how near it came, what diverged last."""
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
    """What gave it its learning rate: a rule, or "tuned"."""
    lr: float
    """Peak learning rate."""
    optimizer: str
    """As a spec writes it."""
    seed: int
    """Of the model's weights and the samples' order."""
    steps: float | None
    """Optimizer steps to the target, interpolated between two looks; None = it was not reached."""
    after: int
    """Optimizer steps that were taken."""
    outcome: Outcome
    """How it ended."""
    best: float | None
    """The value nearest the target that was seen; None = none was a number."""
    seconds: float = 0.0
    """It took."""

    @property
    def samples(self) -> float | None:
        """Samples to the target; None = it was not reached."""
        return None if self.steps is None else self.steps * self.batch

    @property
    def at_once(self) -> bool:
        """Was it not a number from the first step on?"""
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


TUNED = "tuned"
"""The rule's name of learning rates that were searched for."""
FURTHER = 8
"""Candidates beyond the given ones that a search goes on to at most."""
RUNNERS_UP, CLOSE = 3, 1.15
"""Candidates that are tried with the other seeds too at most: the best of the first seed, those that needed hardly more steps, which one
seed cannot tell apart, and the next ones where a seed has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A trial to be done."""

    batch: int
    rule: str
    optimizer: str
    lr: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(JsonDataclass):
    """What is wanted of an experiment."""

    target: Target
    """When a trial is over."""
    batches: tuple[int, ...]
    """Global batches, in samples."""
    rules: tuple[str, ...]
    """Rules that give each batch its learning rate."""
    optimizers: tuple[str, ...]
    """As a spec writes them; "" = the spec's own."""
    retune: tuple[float, ...]
    """Factors around the centre that are tried at each batch; empty = rules only."""
    seeds: int
    """Trials of each configuration."""
    base_batch: int
    """Where the optimizers' own learning rates belong."""
    patience: float | None
    """A trial is given up after this times the steps that the best so far needed; None = never."""
    max_steps: int
    """Optimizer steps of a trial at most."""
    probe: int
    """Samples that the loss is measured on."""
    budget_s: float | None
    """Seconds after which no further trial begins; None = all are done."""
    noise_scale: float | None
    critical_batch: float | None
    """For the rules that use them, in samples."""


class Agenda:
    """Which trials there are to do.

    Args:
        order: what is wanted.
        rates: (optimizer, rule, batch) → learning rate, for the rules; (optimizer, "none", base batch) for the search.
    """

    def __init__(self, order: Order, rates: Mapping[tuple[str, str, int], float]) -> None:
        self.order, self.rates = order, rates
        self.batches = sorted(order.batches, key=lambda batch: abs(math.log(batch / order.base_batch)))

    def wanted(self, done: Iterable[Trial]) -> list[Job]:
        """Trials that can be begun, most useful first; what depends on others follows when they are done. Empty = all is done."""
        known = {_key(trial): trial for trial in done}
        found: list[Job] = []
        for optimizer in self.order.optimizers:
            waiting: set[int] = set()
            for batch in self.batches:
                if self.order.retune and (near := self.neighbour(batch)) not in waiting:
                    search = _Search(self, optimizer, batch, near, known)
                    jobs = search.jobs()
                    found += jobs
                    if jobs:
                        waiting.add(batch)
                elif self.order.retune:
                    waiting.add(batch)
                for rule in self.order.rules:
                    lr = self.rates[optimizer, rule, batch]
                    found += self._seeds(known, batch=batch, rule=rule, optimizer=optimizer, lr=lr)
        return found

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
        """How many trials there will be, about: searches that are not over may go on, and of what is hopeless no other seed is tried."""
        order, wanted = self.order, self.wanted(done)
        seeds = order.seeds - 1 if order.patience is not None else 0  # that follow where the first one has hope
        known = len(done) + len(wanted) + seeds * sum(job.rule != TUNED and job.seed == 0 for job in wanted)
        if not order.retune:
            return known
        searching = {(job.optimizer, job.batch) for job in wanted if job.rule == TUNED and job.seed == 0}
        both: list[Trial | Job] = [*done, *wanted]
        begun = {(one.optimizer, one.batch) for one in both if one.rule == TUNED}
        unknown = len(order.optimizers) * len(order.batches) - len(begun)
        return known + unknown * len(order.retune) + (unknown + len(searching)) * (order.seeds - 1)

    def neighbour(self, batch: int) -> int | None:
        """The batch that is tuned before this one: the next towards the base; None = this is the first."""
        place = self.batches.index(batch)
        before = self.batches[:place]
        return min(before, key=lambda other: abs(math.log(other / batch))) if before else None

    def _seeds(self, known: Mapping[Any, Trial], **job: Any) -> Iterator[Job]:
        """The seeds of a configuration that are left; none after a hopeless one."""
        for seed in range(self.order.seeds):
            one = Job(**job, seed=seed)
            trial = known.get(_key(one))
            if trial is None:
                yield one
                if seed == 0 and self.order.patience is not None:
                    return  # it may be hopeless, and so the others
            elif trial.steps is None and self.order.patience is not None:
                return


class _Search:
    """The learning rate at one batch."""

    def __init__(self, agenda: Agenda, optimizer: str, batch: int, near: int | None, known: Mapping[Any, Trial]) -> None:
        self._agenda, self._known = agenda, known
        self._job: dict[str, Any] = {"batch": batch, "optimizer": optimizer, "rule": TUNED}
        order = agenda.order
        if near is None:
            lr, near = agenda.rates[optimizer, "none", order.base_batch], order.base_batch
        else:
            tried = [trial for trial in known.values() if (trial.rule, trial.optimizer, trial.batch) == (TUNED, optimizer, near)]
            lr = mark_of_best(tried, order.target).lr
        centre = lr * math.sqrt(batch / near)
        self._given = [_short(centre * factor) for factor in sorted(order.retune, key=lambda factor: (abs(math.log(factor)), factor))]
        self._first = self._followed()
        self._reachable = any(trial.steps is not None and trial.optimizer == optimizer for trial in known.values())

    def jobs(self) -> list[Job]:
        """What is to be tried now."""
        if candidates := self._open():
            return [Job(**self._job, lr=lr, seed=0) for lr in candidates]
        ranking = sorted((one for one in self._first.values() if one.steps is not None), key=self._agenda.order.target.rank)
        sound, found = 0, []
        for place, one in enumerate(ranking[:RUNNERS_UP]):
            assert one.steps is not None
            assert ranking[0].steps is not None
            if place and sound and one.steps > CLOSE * ranking[0].steps:
                break
            found += list(self._agenda._seeds(self._known, **self._job, lr=one.lr))
            seeds = [self._known.get(_key(Job(**self._job, lr=one.lr, seed=seed))) for seed in range(self._agenda.order.seeds)]
            sound += all(trial is None or trial.steps is not None for trial in seeds)
        return found

    def _followed(self) -> dict[float, Trial]:
        """The trials of the first seed, by learning rate."""
        return {
            trial.lr: trial
            for trial in self._known.values()
            if trial.seed == 0 and all(getattr(trial, name) == value for name, value in self._job.items())
        }

    def _open(self) -> list[float]:
        """Candidates that have to be tried before the best is known."""
        if missing := [lr for lr in self._given if lr not in self._first]:
            return missing
        if len(self._first) >= len(self._given) + FURTHER:
            return []
        tried = sorted(self._first)
        best = min(self._first.values(), key=self._agenda.order.target.rank).lr
        if len(tried) > 1 and best == tried[0]:
            return [_short(best * tried[0] / tried[1])]
        if len(tried) > 1 and best == tried[-1]:
            return [_short(best * tried[-1] / tried[-2])]
        if len(tried) > 1 and self._reachable and all(trial.steps is None for trial in self._first.values()):
            return [_short(tried[0] * tried[0] / tried[1])]  # smaller ones are slower, and safer
        return []


def _key(one: Job | Trial) -> tuple[Any, ...]:
    return one.batch, one.rule, one.optimizer, one.lr, one.seed


def _short(lr: float) -> float:
    """Six significant digits: the same number wherever it is computed."""
    return float(f"{lr:.6g}")
