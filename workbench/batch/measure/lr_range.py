"""Runs the learning-rate range test on a user's step in this process: sweeps with several seeds, then a race.

The learning rate is set from outside before each optimizer step. Afterwards weights, optimizer, generators and loader are restored.
"""

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from workbench.batch.analysis.lr_budget import MORE_ROUNDS, LrBudget
from workbench.batch.analysis.lr_race import STEPS, OutOfBatches, cannot_tell, conclude, first_candidates, race
from workbench.batch.analysis.lr_range import (
    BETA,
    DIVERGED,
    DIVERGES,
    END,
    ITERATIONS,
    NOT_FINITE,
    SWEEPS,
    Candidate,
    LrFound,
    LrRangeError,
    LrSweep,
    check_options,
    geometric,
    is_flat,
    lr_text,
    suggestions_over_seeds,
)
from workbench.batch.measure.lr_control import LrControl, frozen_schedules
from workbench.harness.blocks import StepFailed
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.observe import check_arguments, discover_training, samples_of
from workbench.harness.peers import Peers
from workbench.harness.restore import SavedState

MAX_SKIPPED = 40
"""Calls in a row without an optimizer step: a GradScaler halves its scale from 65536 to nothing in fewer."""
LOWEST, HIGHEST = 1e-7, 1e3
"""Range of the first sweep, which finds where the loss explodes."""
DECADES = 5
"""The sweeps begin this many decades below the learning rate at which the loss explodes."""
BEYOND = 3.0
"""They would end this many times above it."""
MOST_BYTES, MIN_BATCHES = 2**30, 8
"""The race keeps the batches of its rounds so that all candidates see the same: at most so many bytes, but this many batches a round."""
NEGLIGIBLE = 1e-3
"""This share of a sweep's smallest learning rate changes nothing."""
TIMED = 3
"""Steps after which it is known how long they take; the first, which starts workers and the device and compiles, does not count."""
RACE_SEED = 1000
"""Random numbers of the race differ from those of the sweeps."""

Progress = Callable[[int, int, float, float], object]
"""(steps taken, steps in all as far as known, learning rate, loss) → anything."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C came where the launch is awaited, and all ranks know it."""


class StepDriver:
    """Takes steps at given learning rates, and averages their loss over the ranks; an error on one rank is raised on all."""

    def __init__(
        self,
        step: Callable[[Any], Any],
        feed: Feed,
        control: LrControl,
        peers: Peers,
        progress: Progress | None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self._stop = stop
        self.feed, self.peers, self.planned = feed, peers, 0
        self.taken = 0
        """Steps so far."""
        self.last: Any = None
        """The last batch."""
        self.elapsed = 0.0
        """Seconds since the search began, on the rank that has taken longest."""
        self.first = 0.0
        """Of these, the seconds until the end of the first step."""
        self._began = time.monotonic()
        self._step, self._control, self._progress = step, control, progress

    def take(self, lr: float, batch: Any = None) -> float:
        """Take one optimizer step; its loss, the mean over the ranks, infinite if the gradients overflow in every try (fp16).

        Args:
            lr: learning rate of the optimizer's first group.
            batch: None = the feed's next.

        Raises:
            StepFailed: step() raised an error on this rank.
            LrRangeError: it returned no loss, here or on another rank, or no optimizer stepped.
            Exhausted: the feed ended.
            Stopped: a rank was told to stop.
        """
        for _ in range(MAX_SKIPPED):
            self.last = self.feed.next() if batch is None else batch
            self._control.lr, self._control.stepped = lr, False
            self._control.set()
            loss, error = self._call(self.last)
            if isinstance(error, StepFailed):
                raise error  # at once: other ranks may wait inside of their step for what this one did not send
            stop = self._stop is not None and self._stop()
            trouble = str(error) if error else ""
            answers = self.peers.gather((loss, self._control.stepped, trouble, time.monotonic() - self._began, stop))
            self.elapsed = max(answer[3] for answer in answers)
            if any(answer[4] for answer in answers):
                raise Stopped
            if error:
                raise error
            for rank, (_, _, trouble, *_) in enumerate(answers):
                if trouble:
                    raise LrRangeError(f"rank {rank} failed: {trouble}")
            mean = sum(value for value, *_ in answers) / len(answers)
            if all(stepped for _, stepped, *_ in answers):
                self.taken += 1
                self.first = self.first or self.elapsed
                if self._progress:
                    self._progress(self.taken, max(self.planned, self.taken), lr, mean)
                return mean
            if not math.isfinite(mean):
                return mean
        if self.taken:
            return math.inf
        raise LrRangeError(
            f"in {MAX_SKIPPED} calls of step() the optimizer never stepped. Does step(batch) call optimizer.step()? If a GradScaler "
            "skipped it each time, the gradients are not finite at any scale: look for NaN in the inputs"
        )

    def _call(self, batch: Any) -> tuple[float, Exception | None]:
        try:
            value = self._step(batch)
        except Exception as error:
            failed = StepFailed(self.taken + 1, error)
            failed.__cause__ = error
            return math.nan, failed
        try:
            return loss_in(value), None
        except LrRangeError as error:
            return math.nan, error


def loss_in(value: Any) -> float:
    """The loss that a step has returned: a number, a tensor with one number, or either under the name "loss".

    Raises:
        LrRangeError: it returned something else.
    """
    if isinstance(value, Mapping):
        value = value.get("loss")
    elif not isinstance(value, Tensor) and hasattr(value, "loss"):
        value = value.loss
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # of numpy
        return float(value.item())
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    shown = "nothing" if value is None else shown
    raise LrRangeError(
        f"step() returned {shown}: the search for a learning rate needs its loss. End step(batch) with `return loss` "
        '(a number, a tensor with one number, or a dictionary that has it as "loss")'
    )


def not_finite_message(loss: float, lr: float, step: int = 1) -> str:
    """The error text for a loss that is NaN or infinite though nothing was trained."""
    which = "the first step" if step == 1 else f"step {step}"
    return (
        f"the loss is {loss} in {which}, at a learning rate of {lr_text(lr)}, which changes nothing yet: no learning rate "
        "fixes that. Look for NaN or infinite values in the inputs (torch.isfinite(batch).all()) and in the weights, for log(0), "
        "0/0 or sqrt(0) in the loss, for labels that are all ignored, for targets out of range; in fp16 also for values beyond 65504. "
        "torch.autograd.set_detect_anomaly(True) names the operator"
    )


def find(
    step: Callable[[Any], Any],
    loader: Any,
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    low: float | None = None,
    high: float | None = None,
    sweeps: int = SWEEPS,
    iterations: int = ITERATIONS,
    race_steps: int = STEPS,
    accumulation: int = 1,
    budget_s: float | None = None,
    progress: Progress | None = None,
    known: Callable[[str], object] = str,
    stop: Callable[[], bool] | None = None,
) -> LrFound:
    """Find a learning rate for a step, and restore weights, optimizer, random generators and loader.

    A first sweep finds where the loss explodes; `sweeps` more, each from the same weights with other batches, give the suggestions of six
    published rules; these and learning rates beside the best of them then run a race over equal batches. Where a process group is
    initialised, all of its ranks have to call this: their losses are averaged, and they decide alike.

    Args:
        step: `step(batch)` does one optimizer step and returns the loss. With `accumulation` it gets a tuple of so many batches.
        loader: gives the batches; a DataLoader or any iterable.
        model: the module that is trained, or several; None = those that the step's closure, `self` or globals hold.
        optimizer: likewise. Groups keep the ratios of their learning rates; the result is that of the first group.
        low: learning rate at which sweeps begin; None = by the first sweep.
        high: where they end; None = by the first sweep.
        sweeps: number of sweeps, each with a seed of its own.
        iterations: steps of a sweep.
        race_steps: of each candidate in each round of the race; 0 = no race.
        accumulation: batches per step.
        budget_s: seconds that it may take, about: sweeps and rounds become fewer and shorter, and the result says so; None = no limit.
        progress: called after every step.
        known: told after every sweep what is known, in words.
        stop: asked in every step whether to stop with what is known, on any of the ranks.

    Raises:
        LrRangeError: the step returns no loss, takes no optimizer step, or the loss is NaN or infinite from the first step on.
        DiagnoseError: step() cannot be called so, or raised an error.
        ValueError: the loader is empty, or no loader; an option out of range.
    """
    check_arguments(step, 1.0, accumulation)
    check_options(low=low, high=high, sweeps=sweeps, iterations=iterations, race_steps=race_steps)
    notes: list[str] = []
    training = discover_training(step, model, optimizer, loader, notes)
    if not training.optimizers:
        raise LrRangeError("no optimizer was found behind step, so there is no learning rate to set: give it as optimizer=…")
    with Peers.join() as peers, contextlib.ExitStack() as undo:
        control = LrControl(training.optimizers, notes)
        undo.enter_context(frozen_schedules(training.objects, notes))
        undo.enter_context(control.hooked())  # before the state is kept, so that restoring it keeps the hooks
        keep = SavedState(training)
        undo.callback(keep.restore)
        feed = undo.enter_context(Feed(loader, accumulation))
        if peers.world_size > 1 and max(peers.gather(feed.kind == "once")):
            raise LrRangeError(
                "the loader can be read only once, and there are several ranks: if it ended on one of them, the others would wait for it "
                "for ever. Give a list, a DataLoader or another iterable that can be read again"
            )
        driver = StepDriver(step, feed, control, peers, progress, stop)
        budget = LrBudget(seconds=None if budget_s is None else peers.agree(budget_s, min))
        search = _Search(driver, keep, notes, low, high, sweeps, iterations, race_steps, budget, known)
        result = peers.gather(search.run())[0]
    left_out = [f"could not be restored: {'; '.join(keep.left_out[:3])}"] if keep.left_out else []
    return replace(result, notes=(*result.notes, *left_out))


@dataclass
class _Search:
    """First sweep, sweeps and race on one rank; all ranks see the same losses, so they decide alike. Arguments as those of `find`."""

    driver: StepDriver
    keep: SavedState
    notes: list[str]
    low: float | None
    high: float | None
    sweeps: int
    iterations: int
    race_steps: int
    budget: LrBudget
    known: Callable[[str], object]
    _batches: dict[int, list[Any]] = field(default_factory=dict)

    def run(self) -> LrFound:
        """The whole search; it is shorter if the loader ends."""
        ahead = (2 if self.low is None or self.high is None else 1) * self.iterations + (self.sweeps - 1) * self.iterations
        self.driver.planned = ahead + 16 * self.race_steps
        low, high = self._range()
        done: list[LrSweep] = []
        for seed in range(self.sweeps):
            if done and not self.budget.has_time_to_sweep(self.driver.elapsed, self.iterations * self._step()):
                self.notes.append(
                    f"{len(done)} of {self.sweeps} sweeps were made, since there was no time for more: a larger budget_s= verifies more"
                )
                break
            try:
                done.append(self._sweep(geometric(low, high, self.iterations), seed))
                self.known(f"{len(done)} of {self.sweeps} sweeps are made")
                if self.low is not None and self.high is not None:  # else done for the first sweep
                    self._check_not_finite(done[-1])
            except Exhausted:
                self._short(f"{len(done)} of {self.sweeps} sweeps")
                break
            except KeyboardInterrupt as error:
                if not done or not self._all_know(error):
                    raise
                self.notes.append(f"stopped by Ctrl-C after {len(done)} of {self.sweeps} sweeps: the result was not verified by a race")
                self.race_steps = 0
                break
        if not done:
            raise LrRangeError(
                f"the loader could be read only once, and gave {self.driver.feed.batches} batches: too few for one sweep of "
                f"{self.iterations} steps. Give a list, a DataLoader or another iterable that can be read again"
            )
        ran: Sequence[Candidate] = ()
        candidates = () if cannot_tell(done) else first_candidates(suggestions_over_seeds(done))
        if candidates:
            self._fit_race(len(candidates))
        if candidates and self.race_steps:
            self.driver.planned = self.driver.taken + (len(candidates) + MORE_ROUNDS) * self.race_steps
            ran = race(candidates, self._round)
        return conclude(
            done, ran, race_steps=self.race_steps, batch=self._samples(), steps=self.driver.taken, notes=tuple(dict.fromkeys(self.notes))
        )

    def _all_know(self, error: KeyboardInterrupt) -> bool:
        """Does Ctrl-C end this on all ranks in the same step?"""
        return isinstance(error, Stopped) or self.driver.peers.world_size == 1

    def _step(self) -> float:
        """Mean seconds of a step so far, without the first, if there are more."""
        if self.driver.taken < 2:
            return self.driver.elapsed
        return (self.driver.elapsed - self.driver.first) / (self.driver.taken - 1)

    def _fitting(self, lrs: Sequence[float]) -> Sequence[float]:
        """The learning rates of the first sweep, of which TIMED were taken: fewer where steps take long. Later sweeps have as many."""
        fit = self.budget.iterations(self.iterations, self._step())
        if fit == self.iterations:
            return lrs
        assert self.budget.seconds is not None
        self.notes.append(f"sweeps have {fit} steps instead of {self.iterations}, to keep to the budget of {self.budget.seconds:.0f} s")
        self.iterations = fit
        return [*lrs[:TIMED], *geometric(lrs[TIMED], lrs[-1], fit - TIMED)]

    def _fit_race(self, candidates: int) -> None:
        """Shorter rounds, or no race, where there is no time for more."""
        fit = self.budget.race_steps(self.race_steps, self.driver.elapsed, self._step(), candidates)
        if fit < self.race_steps:
            kept = f"to keep to the budget of {self.budget.seconds:.0f} s: a larger budget_s= makes the result surer"
            fewer = f"rounds of the race have {fit} steps instead of {self.race_steps}, {kept}"
            self.notes.append(fewer if fit else f"there was no race, so the result is not verified, {kept}")
        self.race_steps = fit

    def _range(self) -> tuple[float, float]:
        """The range of the sweeps, by a first sweep over every learning rate that makes sense."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        try:
            scout = self._sweep(geometric(self.low or LOWEST, self.high or HIGHEST, self.iterations), self.sweeps)
        except Exhausted:
            raise LrRangeError(
                f"the loader could be read only once, and gave {self.driver.feed.batches} batches: too few to look where the loss "
                "explodes. Give a list, a DataLoader or another iterable that can be read again, or low= and high="
            ) from None
        self._check_not_finite(scout)
        stop = scout.lrs[-1]
        if scout.stopped == END and self.high is None:
            finite = [loss if math.isfinite(loss) else math.inf for loss in scout.smoothed]
            lowest = scout.lrs[min(range(len(finite)), key=finite.__getitem__)]
            stop = min(stop, 100 * lowest)  # a loss that cannot explode
        high = self.high or BEYOND * stop
        low = self.low or high / BEYOND / 10**DECADES
        if low >= high:
            raise LrRangeError(
                f"low={lr_text(self.low)}: the loss explodes at {lr_text(stop)} already; try low={lr_text(stop / 10**DECADES)}"
            )
        return low, high

    def _check_not_finite(self, sweep: LrSweep) -> None:
        """Check that a loss that became NaN or infinite without growing stays finite at far smaller learning rates."""
        if sweep.stopped != NOT_FINITE or not is_flat(sweep.losses[:-1]):
            return
        far = sweep.lrs[0] * NEGLIGIBLE
        try:
            again = self._sweep(geometric(far / 10, far, self.iterations), self.sweeps + 1)
        except Exhausted:
            return
        if again.stopped == NOT_FINITE:
            raise LrRangeError(not_finite_message(again.losses[-1], again.lrs[-1], len(again.losses)))

    def _sweep(self, lrs: Sequence[float], seed: int) -> LrSweep:
        """A sweep from the original weights, with the loader's next batches."""
        self._rewind(seed)
        losses: list[float] = []
        mean, best, stopped = 0.0, math.inf, END
        for k in range(len(lrs)):
            if self.driver.taken == TIMED:
                lrs = self._fitting(lrs)
            if k == len(lrs):
                break
            lr = lrs[k]
            loss = self.driver.take(lr)
            if not k and not math.isfinite(loss):
                raise LrRangeError(not_finite_message(loss, lr))
            losses.append(loss)
            if not math.isfinite(loss):
                stopped = NOT_FINITE
                break
            mean = BETA * mean + (1 - BETA) * loss
            smoothed = mean / (1 - BETA ** (k + 1))
            best = min(best, smoothed)
            if smoothed > (DIVERGED * best if best > 0 else losses[0] + DIVERGED * abs(losses[0] - best) + 1e-12):
                stopped = DIVERGES
                break
        return LrSweep(lrs=tuple(lrs[: len(losses)]), losses=tuple(losses), planned=len(lrs), seed=seed, stopped=stopped)

    def _round(self, lr: float, number: int) -> float:
        """Mean loss of the second half of the steps of one candidate, over the batches of its round. After Ctrl-C the race ends."""
        try:
            return self._mean_loss(lr, number)
        except KeyboardInterrupt as error:
            if not self._all_know(error):
                raise
            self.notes.append("stopped by Ctrl-C during the race: this is the result so far")
            raise OutOfBatches from None

    def _mean_loss(self, lr: float, number: int) -> float:
        batches = self._round_batches(number)
        if self.budget.is_spent(self.driver.elapsed):
            self.notes.append("the budget was spent during the race: a larger budget_s= makes the result surer")
            raise OutOfBatches
        self._rewind(RACE_SEED + number)
        losses: list[float] = []
        for batch in batches:
            losses.append(self.driver.take(lr, batch))
            if not math.isfinite(losses[-1]):
                return math.inf
        return statistics.fmean(losses[len(losses) // 2 :])

    def _round_batches(self, number: int) -> list[Any]:
        """The batches of a round, the same for all candidates, so that they differ in the learning rate only."""
        if number not in self._batches:
            try:
                self._rewind(RACE_SEED + number)  # also a new pass
                self._batches[number] = self._collect()
            except Exhausted:
                self._short("a race" if not number else f"{number} rounds of the race")
                raise OutOfBatches from None
        return self._batches[number]

    def _collect(self) -> list[Any]:
        """Batches for a round; where they are too large to keep all, some of them repeatedly."""
        kept: list[Any] = []
        free = MOST_BYTES // 3  # the race has three rounds
        while len(kept) < self.race_steps and (free > 0 or len(kept) < MIN_BATCHES):
            kept.append(self.driver.feed.next())
            free -= sum(leaf.nbytes for leaf in tree_leaves(kept[-1]) if isinstance(leaf, torch.Tensor))
            free = min(self.driver.peers.gather(free))
        if len(kept) < self.race_steps:
            self.notes.append(f"batches are large: a round of the race goes through {len(kept)} of them again and again")
        return [kept[i % len(kept)] for i in range(self.race_steps)]

    def _rewind(self, seed: int) -> None:
        self.keep.restore()
        sampler: Any = getattr(self.driver.feed.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):  # else each pass has the same order
            sampler.set_epoch(seed)
            self.driver.feed.restart()
        seed = seed * self.driver.peers.world_size + self.driver.peers.rank
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def _short(self, what: str) -> None:
        self.notes.append(
            f"the loader could be read only once and ended after {self.driver.feed.batches} batches, during {what}; a DataLoader, or a "
            "list, has no such limit"
        )

    def _samples(self) -> int | None:
        """Samples of a step over all ranks."""
        counts = self.driver.peers.gather(samples_of(self.driver.last, self.driver.feed))
        return None if any(count is None for count in counts) else sum(count or 0 for count in counts)
