"""Learning-rate range test in this process: sweeps of several seeds, then a race; and everything is left as it was.

Driving: a step of the user's is taken at a learning rate that is set from outside, and its loss is read, the same on all ranks.
"""

import contextlib
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from workbench.batch.analysis.lr_found import Candidate, LrFound, figure, says
from workbench.batch.analysis.lr_race import STEPS, SURVIVORS, NoMore, cannot_tell, field, judged, race
from workbench.batch.analysis.lr_range import (
    BETA,
    DIVERGED,
    DIVERGES,
    END,
    ITERATIONS,
    NOT_FINITE,
    LrRangeError,
    LrSweep,
    check_options,
    ladder,
    still,
)
from workbench.harness.ablations import temporary_attribute
from workbench.harness.blocks import StepFailed
from workbench.harness.discover import ReachableState
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.observe import check_arguments, discover_training, samples_of
from workbench.harness.peers import Peers
from workbench.harness.restore import SavedState

SKIPS = 40
"""Calls in a row without an optimizer step: a GradScaler halves its scale from 65536 to nothing in fewer."""


class Told:
    """Sets the learning rate of all groups right before an optimizer steps, whatever a schedule has set, and sees whether it does."""

    def __init__(self, optimizers: Sequence[Optimizer], notes: list[str]) -> None:
        """Note the ratios of the groups' learning rates.

        Args:
            optimizers: whose groups keep their ratios to the first group of the first.
            notes: get a line about groups that the step adds meanwhile.

        Raises:
            LrRangeError: the first group's learning rate is 0, and others' are not: there is no ratio.
        """
        self.lr = 0.0
        self.stepped = False
        self._optimizers = list(optimizers)
        self._notes = notes
        rates = [[_rate(group) for group in optimizer.param_groups] for optimizer in optimizers]
        self._first = rates[0][0]
        if not self._first and any(map(any, rates)):
            raise LrRangeError("the first group of the optimizer has a learning rate of 0 and another has not: give all groups one above 0")
        self._ratios = [[self._ratio(rate) for rate in own] for own in rates]

    @property
    def uneven(self) -> bool:
        """Do groups differ?"""
        return len({ratio for own in self._ratios for ratio in own}) > 1

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, optimizers are told."""
        handles = [optimizer.register_step_pre_hook(self._before) for optimizer in self._optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def set(self) -> None:
        """Give all groups their learning rate."""
        for optimizer, ratios in zip(self._optimizers, self._ratios, strict=True):
            for group in optimizer.param_groups[len(ratios) :]:  # that the step has added; by place, for in each sweep it is another object
                ratios.append(self._ratio(_rate(group)))
                self._notes.append(
                    f"step() added a parameter group: {figure(ratios[-1])} times the first group's learning rate, as when it began"
                )
            for group, ratio in zip(optimizer.param_groups, ratios, strict=False):  # after rewinding, those added are gone again
                rate = self.lr * ratio
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _ratio(self, rate: float) -> float:
        return rate / self._first if self._first else 1.0

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.set()
        overflow = getattr(optimizer, "found_inf", None)  # a fused optimizer leaves a step out by itself
        self.stepped |= not (isinstance(overflow, Tensor) and bool(overflow.item()))


def _rate(group: Mapping[str, Any]) -> float:
    """The learning rate of a group at its peak: a warm-up may have begun at 0."""
    return float(group["lr"]) or float(group.get("initial_lr", 0.0))


@contextlib.contextmanager
def standing_still(found: ReachableState, notes: list[str]) -> Iterator[None]:
    """Inside, learning-rate schedules stand still."""
    schedules = [one for one in found.objects if isinstance(one, LRScheduler)]
    with contextlib.ExitStack() as undo:
        for one in schedules:
            undo.enter_context(temporary_attribute(one, "step", _rest))
        if schedules:
            names = ", ".join(dict.fromkeys(type(one).__name__ for one in schedules))
            notes.append(f"the learning-rate schedule ({names}) stood still meanwhile: what is found is for its peak")
        yield


def _rest(*_: Any, **__: Any) -> None: ...


class Driver:
    """Takes steps, counts them and averages the loss over the ranks; an error on one of them is raised on all."""

    def __init__(
        self, step: Callable[[Any], Any], feed: Feed, told: Told, peers: Peers, progress: Callable[[int, int, float, float], object] | None
    ) -> None:
        """Nothing runs yet.

        Args:
            step: does one optimizer step and returns the loss.
            feed: where batches come from.
            told: of its optimizers.
            peers: who takes part.
            progress: is told after every step: taken, planned, learning rate, loss.
        """
        self.feed, self.peers, self.planned = feed, peers, 0
        self.taken = 0
        """Steps so far."""
        self.last: Any = None
        """The last batch."""
        self._step, self._told, self._progress = step, told, progress

    def take(self, lr: float, batch: Any = None) -> float:
        """One optimizer step; its loss, the mean over the ranks. Infinite where the gradients overflow in every try (fp16).

        Args:
            lr: of the first group; the others keep their ratio to it.
            batch: what it takes; None = the feed's next.

        Raises:
            StepFailed: step() raised an error, here or on another rank.
            LrRangeError: it returned no loss, or no optimizer stepped.
            Exhausted: the feed ended.
        """
        for _ in range(SKIPS):
            self.last = self.feed.next() if batch is None else batch
            self._told.lr, self._told.stepped = lr, False
            self._told.set()
            loss, error = self._call(self.last)
            answers = self.peers.gather((loss, self._told.stepped, str(error) if error else ""))
            if error:
                raise error
            for rank, (_, _, trouble) in enumerate(answers):
                if trouble:
                    raise LrRangeError(f"rank {rank} failed: {trouble}")
            mean = sum(value for value, _, _ in answers) / len(answers)
            if all(stepped for _, stepped, _ in answers):
                self.taken += 1
                if self._progress:
                    self._progress(self.taken, max(self.planned, self.taken), lr, mean)
                return mean
            if not math.isfinite(mean):
                return mean
        if self.taken:
            return math.inf
        raise LrRangeError(
            f"step() was called {SKIPS} times and the optimizer never stepped: does step(batch) call optimizer.step()? If it was left "
            "out by a GradScaler each time, the gradients are not finite at any scale: look for NaN in the inputs"
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
    """The number that a step has returned: a number, a tensor with one, or one under the name "loss".

    Raises:
        LrRangeError: there is none.
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
        f"step() returned {shown}: to find a learning rate its loss is needed. End step(batch) with `return loss` "
        '(a number, a tensor with one number, or a dictionary that has it as "loss")'
    )


def no_number(loss: float, lr: float, step: int = 1) -> str:
    """The complaint about a loss that is no number though nothing was trained.

    Args:
        loss: what it is.
        lr: the learning rate then.
        step: its number.
    """
    which = "the first step" if step == 1 else f"step {step}"
    return (
        f"the loss is {loss} in {which}, at a learning rate of {figure(lr)}, which changes nothing yet: no learning rate "
        "mends that. Look for NaN or infinite values in the inputs (torch.isfinite(batch).all()) and in the weights, for log(0), "
        "0/0 or sqrt(0) in the loss, for labels that are all ignored, for targets out of range; in fp16 also for values beyond 65504. "
        "torch.autograd.set_detect_anomaly(True) names the operator"
    )


SWEEPS = 5
"""Seeds. One is no measurement: the steepest slope moves by a factor of 19 between seeds, at a batch of 8."""
LOWEST, HIGHEST = 1e-7, 1e3
"""Where the first sweep looks, to find out where the loss explodes: from there on, no optimizer needs another range."""
DECADES = 5
"""Below the learning rate at which it explodes the sweeps begin so far."""
BEYOND = 3.0
"""And they would end so many times above it."""
MOST_BYTES, LEAST_BATCHES = 2**30, 8
"""The race keeps the batches of its rounds so that all candidates see the same: up to so many bytes, but so many a round at least."""
NOTHING = 1e-3
"""So much of a sweep's smallest learning rate certainly changes nothing."""
RACE_SEED = 1000
"""Random numbers of the race differ from those of the sweeps."""

Progress = Callable[[int, int, float, float], object]
"""(steps taken, steps in all as far as known, learning rate, loss) → anything."""


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
    progress: Progress | None = None,
) -> LrFound:
    """Find a learning rate for a step, and put everything back: weights, optimizer, random generators, loader.

    A first sweep finds where the loss explodes; `sweeps` more, each from the same weights with other batches, give the suggestions of six
    published rules; then learning rates around them run a race over equal batches. Where a process group is initialised, all of its ranks
    have to call it: their losses are averaged, and they take one decision.

    Args:
        step: `step(batch)` does one optimizer step and returns the loss. With `accumulation` it gets a tuple of so many batches.
        loader: gives the batches; a DataLoader or any iterable.
        model: the module that is trained, or several; None = those that the step's closure, `self` or globals hold.
        optimizer: likewise. Groups keep the ratios of their learning rates; what is found is that of the first group.
        low: learning rate at which sweeps begin; None = found out.
        high: where they end; None = found out.
        sweeps: seeds.
        iterations: steps of a sweep.
        race_steps: of each candidate in each round of the race; 0 = no race.
        accumulation: batches per step.
        progress: is told after every step.

    Raises:
        LrRangeError: the step returns no loss, takes no optimizer step, or the loss is no number from the first step on.
        DiagnoseError: step() cannot be called so, or raised an error.
        ValueError: the loader is empty, or is none; an option that cannot be.
    """
    check_arguments(step, 1.0, accumulation)
    check_options(low=low, high=high, sweeps=sweeps, iterations=iterations, race_steps=race_steps)
    notes: list[str] = []
    found = discover_training(step, model, optimizer, loader, notes)
    if not found.optimizers:
        raise LrRangeError("no optimizer was found behind step, so there is no learning rate to turn: give it as optimizer=…")
    with Peers.join() as peers, contextlib.ExitStack() as undo:
        told = Told(found.optimizers, notes)
        undo.enter_context(standing_still(found, notes))
        undo.enter_context(told.hooked())  # before all is kept, so that rewinding keeps the hooks
        keep = SavedState(found)
        undo.callback(keep.restore)
        feed = undo.enter_context(Feed(loader, accumulation))
        if peers.world_size > 1 and max(peers.gather(feed.kind == "once")):
            raise LrRangeError(
                "the loader can be read only once, and there are several ranks: if it ended on one of them, the others would wait for it "
                "for ever. Give a list, a DataLoader or another iterable that can be read again"
            )
        driver = Driver(step, feed, told, peers, progress)
        options = _Options(low=low, high=high, sweeps=sweeps, iterations=iterations, race_steps=race_steps)
        search = _Search(driver, keep, notes, options)
        result = peers.gather(search.run())[0]
    left_out = [f"could not be put back: {'; '.join(keep.left_out[:3])}"] if keep.left_out else []
    return replace(result, notes=(*result.notes, *left_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What the user wants; see `find`."""

    low: float | None
    high: float | None
    sweeps: int
    iterations: int
    race_steps: int


class _Search:
    """Scout, sweeps and race, on one rank; all ranks see the same losses, so they take the same way."""

    def __init__(self, driver: Driver, keep: SavedState, notes: list[str], options: _Options) -> None:
        self.driver, self.keep, self.notes = driver, keep, notes
        self.low, self.high, self.sweeps = options.low, options.high, options.sweeps
        self.iterations, self.race_steps = options.iterations, options.race_steps
        self._batches: dict[int, list[Any]] = {}

    def run(self) -> LrFound:
        """All of it; a loader that ends shortens it."""
        ahead = (2 if self.low is None or self.high is None else 1) * self.iterations + (self.sweeps - 1) * self.iterations
        self.driver.planned = ahead + 16 * self.race_steps
        low, high = self._range()
        done: list[LrSweep] = []
        for seed in range(self.sweeps):
            try:
                done.append(self._sweep(ladder(low, high, self.iterations), seed))
                if self.low is not None and self.high is not None:  # else the first look has seen to it
                    self._blame(done[-1])
            except Exhausted:
                self._short(f"{len(done)} of {self.sweeps} sweeps")
                break
        if not done:
            raise LrRangeError(
                f"the loader could be read only once, and gave {self.driver.feed.batches} batches: too few for one sweep of "
                f"{self.iterations} steps. Give a list, a DataLoader or another iterable that can be read again"
            )
        ran: Sequence[Candidate] = ()
        if not cannot_tell(done) and self.race_steps:
            fields = field(says(done))
            self.driver.planned = self.driver.taken + (len(fields) + SURVIVORS + 4) * self.race_steps
            ran = race(fields, self._round)
        return judged(
            done, ran, race_steps=self.race_steps, batch=self._samples(), steps=self.driver.taken, notes=tuple(dict.fromkeys(self.notes))
        )

    def _range(self) -> tuple[float, float]:
        """Where to sweep, from one sweep over everything."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        try:
            scout = self._sweep(ladder(self.low or LOWEST, self.high or HIGHEST, self.iterations), self.sweeps)
        except Exhausted:
            raise LrRangeError(
                f"the loader could be read only once, and gave {self.driver.feed.batches} batches: too few to look where the loss "
                "explodes. Give a list, a DataLoader or another iterable that can be read again, or low= and high="
            ) from None
        self._blame(scout)
        stop = scout.lrs[-1]
        if scout.stopped == END and self.high is None:
            finite = [loss if math.isfinite(loss) else math.inf for loss in scout.smoothed]
            lowest = scout.lrs[min(range(len(finite)), key=finite.__getitem__)]
            stop = min(stop, 100 * lowest)  # a loss that cannot explode
        high = self.high or BEYOND * stop
        low = self.low or high / BEYOND / 10**DECADES
        if low >= high:
            raise LrRangeError(f"low={figure(self.low)}: the loss explodes at {figure(stop)} already; try low={figure(stop / 10**DECADES)}")
        return low, high

    def _blame(self, sweep: LrSweep) -> None:
        """See whether a loss that was suddenly no number is the learning rate's doing: far smaller ones must not have it, too.

        Raises:
            LrRangeError: they have.
        """
        if sweep.stopped != NOT_FINITE or not still(sweep.losses[:-1]):
            return
        far = sweep.lrs[0] * NOTHING
        try:
            again = self._sweep(ladder(far / 10, far, self.iterations), self.sweeps + 1)
        except Exhausted:
            return
        if again.stopped == NOT_FINITE:
            raise LrRangeError(no_number(again.losses[-1], again.lrs[-1], len(again.losses)))

    def _sweep(self, lrs: Sequence[float], seed: int) -> LrSweep:
        """From the weights that were there, with the loader's next batches."""
        self._rewind(seed)
        losses: list[float] = []
        mean, best, stopped = 0.0, math.inf, END
        for k, lr in enumerate(lrs):
            loss = self.driver.take(lr)
            if not k and not math.isfinite(loss):
                raise LrRangeError(no_number(loss, lr))
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
        """Mean loss of the second half of the steps of one candidate, over the batches of its round."""
        batches = self._round_batches(number)
        self._rewind(RACE_SEED + number)
        losses: list[float] = []
        for batch in batches:
            losses.append(self.driver.take(lr, batch))
            if not math.isfinite(losses[-1]):
                return math.inf
        return statistics.fmean(losses[len(losses) // 2 :])

    def _round_batches(self, number: int) -> list[Any]:
        """The same for all candidates of a round: what is left between them is the learning rate's doing."""
        if number not in self._batches:
            try:
                self._rewind(RACE_SEED + number)  # also a new pass
                self._batches[number] = self._collected()
            except Exhausted:
                self._short("a race" if not number else f"{number} rounds of the race")
                raise NoMore from None
        return self._batches[number]

    def _collected(self) -> list[Any]:
        """Batches for a round; where they are too large to be kept all, some of them again and again."""
        kept: list[Any] = []
        room = MOST_BYTES // 3  # the race has three rounds
        while len(kept) < self.race_steps and (room > 0 or len(kept) < LEAST_BATCHES):
            kept.append(self.driver.feed.next())
            room -= sum(leaf.nbytes for leaf in tree_leaves(kept[-1]) if isinstance(leaf, torch.Tensor))
            room = min(self.driver.peers.gather(room))
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
            "list, tells more"
        )

    def _samples(self) -> int | None:
        """Samples of a step over all ranks."""
        counts = self.driver.peers.gather(samples_of(self.driver.last, self.driver.feed.accumulation))
        return None if any(count is None for count in counts) else sum(count or 0 for count in counts)
