"""Runs the learning-rate range test on a user's step in this process: sweeps with several seeds, then a race.

The learning rate is set from outside before each optimizer step. Afterwards weights, optimizer, generators and loader are restored.
"""

import contextlib
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from workbench.batch.analysis.lr_race import STEPS, SURVIVORS, OutOfBatches, cannot_tell, conclude, first_candidates, race
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
from workbench.harness.ablations import temporary_attribute
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
RACE_SEED = 1000
"""Random numbers of the race differ from those of the sweeps."""

Progress = Callable[[int, int, float, float], object]
"""(steps taken, steps in all as far as known, learning rate, loss) → anything."""


class LrControl:
    """Sets the learning rate of all parameter groups before each optimizer step, and records whether the optimizer stepped."""

    def __init__(self, optimizers: Sequence[Optimizer], notes: list[str]) -> None:
        """
        Args:
            optimizers: their groups keep the ratios of their learning rates to the first group's.
            notes: get a line for each group that the step adds.

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
        """Do the groups' learning rates differ?"""
        return len({ratio for own in self._ratios for ratio in own}) > 1

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside the `with` block every optimizer step uses the learning rate that was set."""
        handles = [optimizer.register_step_pre_hook(self._before) for optimizer in self._optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def set(self) -> None:
        """Give all groups their learning rate."""
        for optimizer, ratios in zip(self._optimizers, self._ratios, strict=True):
            for group in optimizer.param_groups[len(ratios) :]:  # added by the step: by position, since each sweep has other objects
                ratios.append(self._ratio(_rate(group)))
                self._notes.append(
                    f"step() added a parameter group: {lr_text(ratios[-1])} times the first group's learning rate, as when it began"
                )
            for group, ratio in zip(optimizer.param_groups, ratios, strict=False):  # restoring removes added groups
                rate = self.lr * ratio
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _ratio(self, rate: float) -> float:
        return rate / self._first if self._first else 1.0

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.set()
        overflow = getattr(optimizer, "found_inf", None)  # a fused optimizer skips a step by itself
        self.stepped |= not (isinstance(overflow, Tensor) and bool(overflow.item()))


def _rate(group: Mapping[str, Any]) -> float:
    """The peak learning rate of a group: a warm-up may have begun at 0."""
    return float(group["lr"]) or float(group.get("initial_lr", 0.0))


@contextlib.contextmanager
def frozen_schedules(objects: Iterable[Any], notes: list[str]) -> Iterator[None]:
    """Inside the `with` block the learning-rate schedules among some objects do not step."""
    schedules = [item for item in objects if isinstance(item, LRScheduler)]
    with contextlib.ExitStack() as undo:
        for schedule in schedules:
            undo.enter_context(temporary_attribute(schedule, "step", lambda *_, **__: None))
        if schedules:
            names = ", ".join(dict.fromkeys(type(schedule).__name__ for schedule in schedules))
            notes.append(f"the learning-rate schedule ({names}) was frozen during the search: the result is its peak")
        yield


class StepDriver:
    """Takes steps at given learning rates, and averages their loss over the ranks; an error on one rank is raised on all."""

    def __init__(self, step: Callable[[Any], Any], feed: Feed, control: LrControl, peers: Peers, progress: Progress | None) -> None:
        """
        Args:
            step: does one optimizer step and returns the loss.
            feed: gives the batches.
            control: of its optimizers.
            peers: the ranks that take part.
            progress: called after every step.
        """
        self.feed, self.peers, self.planned = feed, peers, 0
        self.taken = 0
        """Steps so far."""
        self.last: Any = None
        """The last batch."""
        self._step, self._control, self._progress = step, control, progress

    def take(self, lr: float, batch: Any = None) -> float:
        """Take one optimizer step; its loss, the mean over the ranks, infinite if the gradients overflow in every try (fp16).

        Args:
            lr: of the first group.
            batch: None = the feed's next.

        Raises:
            StepFailed: step() raised an error, here or on another rank.
            LrRangeError: it returned no loss, or no optimizer stepped.
            Exhausted: the feed ended.
        """
        for _ in range(MAX_SKIPPED):
            self.last = self.feed.next() if batch is None else batch
            self._control.lr, self._control.stepped = lr, False
            self._control.set()
            loss, error = self._call(self.last)
            answers = self.peers.gather((loss, self._control.stepped, str(error) if error else ""))
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
        f"step() returned {shown}: to find a learning rate its loss is needed. End step(batch) with `return loss` "
        '(a number, a tensor with one number, or a dictionary that has it as "loss")'
    )


def not_finite_message(loss: float, lr: float, step: int = 1) -> str:
    """The error text for a loss that is NaN or infinite though nothing was trained.

    Args:
        loss: the value.
        lr: the learning rate.
        step: its number.
    """
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
    progress: Progress | None = None,
) -> LrFound:
    """Find a learning rate for a step, and restore weights, optimizer, random generators and loader.

    A first sweep finds where the loss explodes; `sweeps` more, each from the same weights with other batches, give the suggestions of six
    published rules; learning rates around them then run a race over equal batches. Where a process group is initialised, all of its ranks
    have to call this: their losses are averaged, and they decide alike.

    Args:
        step: `step(batch)` does one optimizer step and returns the loss. With `accumulation` it gets a tuple of so many batches.
        loader: gives the batches; a DataLoader or any iterable.
        model: the module that is trained, or several; None = those that the step's closure, `self` or globals hold.
        optimizer: likewise. Groups keep the ratios of their learning rates; the result is that of the first group.
        low: learning rate at which sweeps begin; None = by the first sweep.
        high: where they end; None = by the first sweep.
        sweeps: seeds.
        iterations: steps of a sweep.
        race_steps: of each candidate in each round of the race; 0 = no race.
        accumulation: batches per step.
        progress: called after every step.

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
        driver = StepDriver(step, feed, control, peers, progress)
        search = _Search(driver, keep, notes, low, high, sweeps, iterations, race_steps)
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
    _batches: dict[int, list[Any]] = field(default_factory=dict)

    def run(self) -> LrFound:
        """The whole search; it is shorter if the loader ends."""
        ahead = (2 if self.low is None or self.high is None else 1) * self.iterations + (self.sweeps - 1) * self.iterations
        self.driver.planned = ahead + 16 * self.race_steps
        low, high = self._range()
        done: list[LrSweep] = []
        for seed in range(self.sweeps):
            try:
                done.append(self._sweep(geometric(low, high, self.iterations), seed))
                if self.low is not None and self.high is not None:  # else done for the first sweep
                    self._check_not_finite(done[-1])
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
            candidates = first_candidates(suggestions_over_seeds(done))
            self.driver.planned = self.driver.taken + (len(candidates) + SURVIVORS + 4) * self.race_steps
            ran = race(candidates, self._round)
        return conclude(
            done, ran, race_steps=self.race_steps, batch=self._samples(), steps=self.driver.taken, notes=tuple(dict.fromkeys(self.notes))
        )

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
        """Check that a loss that became NaN or infinite without growing stays finite at far smaller learning rates.

        Raises:
            LrRangeError: it is not finite there either.
        """
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
        for k, lr in enumerate(lrs):
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
        counts = self.driver.peers.gather(samples_of(self.driver.last, self.driver.feed.accumulation))
        return None if any(count is None for count in counts) else sum(count or 0 for count in counts)
