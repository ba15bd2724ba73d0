"""Halving: a micro-batch for which memory runs out is taken in parts, with the gradients and the loss of the whole.

Each part's loss counts by its share of the samples, so the parts add up to the whole wherever the loss is a mean over samples that do not
see each other. What sees the batch sees its part: the statistics of a batch norm are those of fewer samples, and its running ones move once
per part. The parts are as large as they were when they last fitted; they never grow again.

An error in a forward leaves the gradients as they are, and the samples that are left are taken in smaller parts. An error in a backward
leaves some gradients with the part's share and some without: all are dropped, and the step begins anew with its first micro-batch, which is
why the batches of a step are kept until its end.

Several ranks make the same number of reductions, in whatever parts each of them computes: DDP is told of a reduction only when the forward
of a step's very last part is over. An error in the backward after that cannot be made good, since the others wait in the reduction.
"""

import contextlib
import copy
import dataclasses
import gc
import math
import traceback
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.harness.batches import tensors_of
from workbench.timeline.loops import samples_in


class Steps(Protocol):
    """What a micro-step is made of; a Trainer."""

    module: nn.Module
    model: nn.Module

    def placed(self, batch: Any) -> Any:
        """The batch on the device."""

    def forward(self, batch: Any) -> Tensor:
        """Its part of the step's loss."""

    def backward(self, loss: Tensor) -> None:
        """Add its gradients."""


class Halving:
    """Micro-steps that go on when memory runs out.

    Attributes:
        largest: samples that a part has at most; None = the whole micro-batch, as long as that fits.
    """

    def __init__(self, steps: Steps, world_size: int) -> None:
        """
        Args:
            steps: what a micro-step is made of. Where it is not a DistributedDataParallel that is called, there is nothing to reduce.
            world_size: ranks that reduce their gradients.
        """
        self._steps, self._alone = steps, world_size == 1
        self.largest: int | None = None
        self._batches: list[Any] = []
        if isinstance(ddp := steps.model, DistributedDataParallel) and not self._alone:
            ddp.module.register_forward_pre_hook(lambda *_: _buffers_are_there(ddp))

    def micro_step(self, batch: Any, *, last: bool) -> Tensor:
        """Add the gradients of a micro-batch, reduced after the `last` of a step. Its part of the step's loss.

        Raises:
            RuntimeError: memory has run out and no smaller parts can be had.
        """
        self._batches.append(batch)
        loss = self._micro_batch(batch, last=last)
        while loss is None:
            self._steps.module.zero_grad(set_to_none=True)
            for again in self._batches:
                loss = self._micro_batch(again, last=last and again is batch)
                if loss is None:
                    break
        if last:
            self._batches.clear()
        return loss

    def _micro_batch(self, batch: Any, *, last: bool) -> Tensor | None:
        """Its loss; None where a backward has failed, so that the step must begin anew."""
        steps, count, start = self._steps, samples_in(batch) or 1, 0
        total: Tensor | None = None
        part: Any = None
        placed: Any = None
        loss: Any = None
        while start < count:
            stop = start + self._size(count - start)
            reduces = last and stop == count
            part = batch if stop - start == count else rows(batch, start, stop, count)
            try:
                placed = steps.placed(part)
                with _unreduced(steps.model):
                    loss = steps.forward(placed)
                if stop - start < count:
                    loss = loss * ((stop - start) / count)
            except RuntimeError as error:
                self._check(error, batch, count, stop - start)
                part = placed = loss = None
                self._shrink(error, count, stop - start)
                continue
            try:
                if reduces:
                    loss = _to_be_reduced(steps.model, loss)
                steps.backward(loss)
            except RuntimeError as error:
                self._check(error, batch, count, stop - start, awaited=reduces and not self._alone)
                part = placed = loss = None
                self._shrink(error, count, stop - start)
                self._leave_reducer()
                return None
            total = loss.detach() if total is None else total + loss.detach()
            part = placed = loss = None
            start = stop
        assert total is not None
        return total

    def _size(self, left: int) -> int:
        """Samples of the next part: as equal as they can be."""
        return left if self.largest is None else math.ceil(left / math.ceil(left / self.largest))

    def _check(self, error: RuntimeError, batch: Any, count: int, failed: int, *, awaited: bool = False) -> None:
        """Raise the error where smaller parts are no help, or others wait in a reduction."""
        if not is_out_of_memory(error) or failed < 2 or rows(batch, 0, 1, count) is None:
            raise error
        if awaited:
            error.add_note('micro_batch="auto" cannot split it: other ranks wait in the reduction of gradients. Give a smaller number.')
            raise error

    def _shrink(self, error: RuntimeError, count: int, failed: int) -> None:
        """Let parts be half as large as the one that failed."""
        self.largest = math.ceil(failed / 2)
        parts = math.ceil(count / self.largest)
        size = f"{self.largest}" if count == parts * self.largest else f"up to {self.largest}"
        print(f"out of memory with {failed} samples: split into {parts} × {size} from now on", flush=True)
        traceback.clear_frames(error.__traceback__)  # they hold what did not fit
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _leave_reducer(self) -> None:
        """After a backward that has failed on the only rank: DDP waits for the rest of its gradients, and has nothing to reduce anyway."""
        if self._alone and isinstance(self._steps.model, DistributedDataParallel):
            self._steps.model.reducer._remove_autograd_hooks()
            self._steps.model = self._steps.module


def is_out_of_memory(error: BaseException) -> bool:
    """Is it torch's error that a GPU, or main memory, has no room left?"""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def _unreduced(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def _to_be_reduced(model: nn.Module, loss: Tensor) -> Tensor:
    """Have the coming backward reduce all gradients. DDP else decides so at the end of the model's call, and the loss may yet fail."""
    if not isinstance(model, DistributedDataParallel):
        return loss
    model.reducer.prepare_for_forward()
    found: Tensor = model._post_forward(loss)  # type: ignore[no-untyped-call]
    return found


def _buffers_are_there(ddp: DistributedDataParallel) -> None:
    """Called when the module itself is: the first rank's buffers have come, and come again in the next step only."""
    ddp.require_forward_param_sync = False


class _InDoubt(Exception):
    """It cannot be told how the samples lie in this part."""


def rows(batch: Any, start: int, stop: int, count: int) -> Any | None:
    """The samples from `start` to before `stop` of a batch; None where it cannot be told how they lie in it.

    Understood are tensors and arrays whose first dimension is the sample, lists with one entry per sample, and what goes for the whole
    batch: numbers, texts, tensors without dimensions or with a first one of 1.

    Args:
        batch: of these, in any containers.
        start: first sample.
        stop: the one after the last.
        count: samples in the batch.
    """
    try:
        return _cut(batch, lambda part: part[start:stop], count)
    except (_InDoubt, RuntimeError, TypeError, ValueError):  # e.g. a nested or sparse tensor, which torch cannot cut
        return None


def _cut(part: Any, taken: Callable[[Any], Any], count: int) -> Any:
    if isinstance(part, Tensor) or hasattr(part, "__array_interface__"):
        if part.ndim == 0 or (part.shape[0] == 1 != count):
            return part
        if part.shape[0] != count:
            raise _InDoubt
        return taken(part)
    if isinstance(part, list | tuple):
        named = hasattr(part, "_fields")
        if len(part) == count and not named and not any(one.ndim and one.shape[0] == count for one in tensors_of(part)):
            return taken(part)
        values = [_cut(one, taken, count) for one in part]
        return type(part)(*values) if named else type(part)(values)
    if isinstance(part, MutableMapping):
        mapping = copy.copy(part)
        for key, value in part.items():
            mapping[key] = _cut(value, taken, count)
        return mapping
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        record = copy.copy(part)
        for field in dataclasses.fields(part):
            object.__setattr__(record, field.name, _cut(getattr(part, field.name), taken, count))  # frozen ones, too
        return record
    if part is not None and not isinstance(part, int | float | str | bytes):
        raise _InDoubt
    return part
