"""Driving: a step of the user's is taken at a learning rate that is set from outside, and its loss is read, the same on all ranks."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from workbench.batch.lr_range import LrRangeError
from workbench.batch.lr_range_found import figure
from workbench.measure.arms import attribute
from workbench.measure.blocks import StepFailed
from workbench.measure.feed import Feed
from workbench.measure.found import Found
from workbench.measure.peers import Peers

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
def standing_still(found: Found, notes: list[str]) -> Iterator[None]:
    """Inside, learning-rate schedules stand still."""
    schedules = [one for one in found.objects if isinstance(one, LRScheduler)]
    with contextlib.ExitStack() as undo:
        for one in schedules:
            undo.enter_context(attribute(one, "step", _rest))
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
