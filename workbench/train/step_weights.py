"""Normalises a step whose micro-batches do not count the same: over the samples, or targets, of all micro-batches of all ranks.

A loss is the mean over its micro-batch. The mean of such means is that of the whole batch only if each goes over as many. Where the task
says what a micro-batch counts (`Task.weight`), its loss is multiplied by that, and when the last one is known, the reduced gradients are
divided by the mean over ranks of what they counted together. Nothing waits for the device.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.runs.spec import RunSpec
from workbench.runs.task import Task, TaskError
from workbench.train.ranks import Layout
from workbench.train.sharded_tensors import local_part


class StepWeights:
    """What the micro-batches of a step count."""

    def __init__(self, task: Task, spec: RunSpec, layout: Layout, device: torch.device, *, splits: bool = False) -> None:
        """Count nothing yet.

        Raises:
            TaskError: a knob takes it that all micro-batches count the same.
        """
        for clashes, what, tries in (
            (splits, 'micro_batch="auto"', "give a number"),
            (spec.local_sgd != "none", f'local_sgd="{spec.local_sgd}"', "leave one of them out"),
            (bool(spec.noise_scale), "noise_scale=True", "leave one of them out"),
        ):
            if clashes:
                raise TaskError(f"the task's weight with {what}, for which all micro-batches of a step count the same; {tries}")
        self._task, self._layout, self._device = task, layout, device
        self._usual = 2.0 ** math.ceil(math.log2(spec.global_batch // layout.readers.world_size))
        """What losses are divided by until the sum is known, a power of two: to multiply with it again is exact."""
        self.counted = torch.zeros((), device=device)
        """What the micro-batches of the last whole step counted on this rank."""
        self._counted = torch.zeros((), device=device)
        self._loss = torch.zeros((), device=device)
        self._known = torch.zeros((), device=device)
        """The mean loss of the last step in which this rank had a target: a step without one repeats it."""
        self._reduction: Any = None
        self._all = self._counted

    def scaled(self, loss: Tensor, batch: Any) -> Tensor:
        """The loss of a micro-batch as it is to be added to that of a step: 0 without any target, where the mean is NaN.

        The gradients of torch's losses with `ignore_index` are 0 then; those of a division by zero in the task are not.
        """
        weight = weight_of(self._task, batch, self._device)
        return torch.where(weight == 0, torch.zeros_like(loss), loss * (weight / self._usual))

    def divisor(self, batches: Iterable[Any]) -> float:
        """What the sum of the scaled losses of some micro-batches is divided by to get their mean."""
        return math.fsum(float(weight_of(self._task, batch)) for batch in batches) / self._usual

    def count(self, batch: Any, *, last: bool) -> None:
        """Count a micro-batch, before its forward. After the `last` of a step the sum of all ranks is under way: a collective."""
        self._counted = self._counted + weight_of(self._task, batch, self._device)
        if last:
            self._all = self._counted.clone()
            if self._layout.readers.world_size > 1:
                self._reduction = dist.all_reduce(self._all, group=self._layout.data, async_op=True)

    def kept(self, loss: Tensor) -> Tensor:
        """Keep the scaled loss of a micro-batch that is not the last; returns it."""
        self._loss = self._loss + loss
        return loss

    @torch.no_grad()
    def finish(self, weights: Iterable[nn.Parameter], loss: Tensor) -> Tensor:
        """Normalise the gradients of a step, which are reduced already; returns what its last loss adds to the mean of this rank."""
        if self._reduction is not None:
            self._reduction.wait()
        factor = torch.where(self._all == 0, 0.0, self._usual * self._layout.readers.world_size / self._all)
        for weight in weights:
            if weight.grad is not None:
                part = local_part(weight.grad)
                part.mul_(factor.to(part.device))
        total = self._loss + loss
        self._known = torch.where(self._counted == 0, self._known, total * (self._usual / self._counted))
        own = self._known - self._loss
        self.counted = self._counted
        self._reduction, self._counted, self._loss = None, torch.zeros_like(self._counted), torch.zeros_like(self._loss)
        return own


def weight_of(task: Task, batch: Any, device: torch.device | str = "cpu") -> Tensor:
    """What a batch counts, as a tensor without dimensions.

    Raises:
        TaskError: the task gave something else than a number.
    """
    assert task.weight
    value = task.weight(batch)
    try:
        return torch.as_tensor(value, dtype=torch.float32, device=device).detach().reshape(())
    except (TypeError, ValueError, RuntimeError):
        raise TaskError(
            f"the task's weight(batch) returned {value!r:.80}; expected a number, such as that of its samples, len(batch[0]), or of its "
            "targets that are not ignored, (batch[1] != -100).sum()"
        ) from None
