"""Sets the learning rate of a user's optimizer from outside, while its schedules rest."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from workbench.batch.analysis.lr_range import LrRangeError, lr_text
from workbench.harness.ablations import temporary_attribute


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
            raise LrRangeError(
                "the first parameter group has a learning rate of 0 and another group has not, so their ratio is not known: "
                "give every group a learning rate above 0"
            )
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
                    f"step() added a parameter group: its learning rate stays {lr_text(ratios[-1])} times that of the first group"
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
