"""Splits a micro-batch when memory runs out, and adds up the gradients and the loss of its parts.

Each part's loss counts by its share of the samples, so the parts add up to the whole wherever the loss is a mean over independent samples.
Batch norms see a part only: their statistics are those of fewer samples, and running ones move once per part. Parts get smaller when they
do not fit, and never grow again.

An error in a forward leaves the gradients as they are, and the remaining samples are taken in smaller parts. An error in a backward leaves
the part in some gradients and not in others: all are dropped, and the step starts again with its first micro-batch. This is why the
batches of a step are kept until its end.

All ranks make the same number of reductions, however each splits its micro-batches: DDP prepares a reduction only after the forward of a
step's very last part. An error in the backward after that is final, since the other ranks wait in the reduction.
"""

import contextlib
import gc
import math
import traceback
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.harness.batches import map_samples
from workbench.runs.errors import is_out_of_memory
from workbench.timeline.loops import samples_in


class StepParts(Protocol):
    """The parts of a micro-step; a Trainer."""

    module: nn.Module
    model: nn.Module

    def placed(self, batch: Any) -> Any:
        """The batch on the device."""

    def forward(self, batch: Any) -> Tensor:
        """Its part of the step's loss."""

    def backward(self, loss: Tensor) -> None:
        """Add its gradients."""


class MicroBatchSplitter:
    """Takes micro-steps, in parts once memory has run out.

    Attributes:
        largest: most samples of a part; None = whole micro-batches, as long as they fit.
    """

    def __init__(self, steps: StepParts, world_size: int) -> None:
        """
        Args:
            steps: the parts of a micro-step. Gradients are reduced only if its `model` is a DistributedDataParallel.
            world_size: ranks that reduce their gradients.
        """
        self._steps, self._alone = steps, world_size == 1
        self.largest: int | None = None
        self._batches: list[Any] = []
        if isinstance(ddp := steps.model, DistributedDataParallel) and not self._alone:
            ddp.module.register_forward_pre_hook(lambda *_: _skip_buffer_broadcast(ddp))

    def micro_step(self, batch: Any, *, last: bool) -> Tensor:
        """Add the gradients of a micro-batch, reduced after the `last` of a step; returns its part of the step's loss.

        Raises:
            RuntimeError: memory has run out and the batch cannot be split further.
        """
        self._batches.append(batch)
        loss = self._micro_batch(batch, last=last)
        while loss is None:
            self._steps.module.zero_grad(set_to_none=True)
            for earlier in self._batches:
                loss = self._micro_batch(earlier, last=last and earlier is batch)
                if loss is None:
                    break
        if last:
            self._batches.clear()
        return loss

    def _micro_batch(self, batch: Any, *, last: bool) -> Tensor | None:
        """Its loss; None if a backward has failed, so that the step must start again."""
        steps, count, start = self._steps, samples_in(batch) or 1, 0
        total: Tensor | None = None
        part: Any = None
        placed: Any = None
        loss: Any = None
        while start < count:
            left = count - start  # parts are as equal as possible
            stop = start + (left if self.largest is None else math.ceil(left / math.ceil(left / self.largest)))
            reduces = last and stop == count
            part = batch if stop - start == count else rows(batch, start, stop, count)
            try:
                placed = steps.placed(part)
                with steps.model.no_sync() if isinstance(steps.model, DistributedDataParallel) else contextlib.nullcontext():
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
                    loss = _prepare_reduction(steps.model, loss)
                steps.backward(loss)
            except RuntimeError as error:
                self._check(error, batch, count, stop - start, others_wait=reduces and not self._alone)
                part = placed = loss = None
                self._shrink(error, count, stop - start)
                self._leave_reducer()
                return None
            total = loss.detach() if total is None else total + loss.detach()
            part = placed = loss = None
            start = stop
        assert total is not None
        return total

    def _check(self, error: RuntimeError, batch: Any, count: int, failed: int, *, others_wait: bool = False) -> None:
        """Raise the error if smaller parts do not help, or if other ranks wait in a reduction."""
        collective = isinstance(error, dist.DistError)  # its peers are not called again, and NCCL's communicator is broken
        if collective or not is_out_of_memory(error) or failed < 2 or rows(batch, 0, 1, count) is None:
            raise error
        if others_wait:
            error.add_note('micro_batch="auto" cannot split it: other ranks wait in the reduction of gradients. Give a smaller number.')
            raise error

    def _shrink(self, error: RuntimeError, count: int, failed: int) -> None:
        """Halve the size of the parts, from the one that failed."""
        self.largest = math.ceil(failed / 2)
        parts = math.ceil(count / self.largest)
        size = f"{self.largest}" if count == parts * self.largest else f"up to {self.largest}"
        print(f"out of memory with {failed} samples: split into {parts} × {size} from now on", flush=True)
        traceback.clear_frames(error.__traceback__)  # they keep tensors of the failed part alive
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _leave_reducer(self) -> None:
        """Remove DDP after a failed backward on a single rank: it waits for the rest of its gradients, and has nothing to reduce anyway."""
        if self._alone and isinstance(self._steps.model, DistributedDataParallel):
            self._steps.model.reducer._remove_autograd_hooks()
            self._steps.model = self._steps.module


def _prepare_reduction(model: nn.Module, loss: Tensor) -> Tensor:
    """Let the next backward reduce all gradients. DDP prepares this at the end of the model's forward, when the loss may still fail."""
    if not isinstance(model, DistributedDataParallel):
        return loss
    model.reducer.prepare_for_forward()
    prepared: Tensor = model._post_forward(loss)  # type: ignore[no-untyped-call]
    return prepared


def _skip_buffer_broadcast(ddp: DistributedDataParallel) -> None:
    """Called before the module's forward: buffers were just broadcast, and are again in the next step only."""
    ddp.require_forward_param_sync = False


def rows(batch: Any, start: int, stop: int, count: int) -> Any | None:
    """The samples `start` to `stop` (excluded) of a batch; None if it is not known how they are arranged in it."""
    return map_samples(lambda part: part[start:stop], batch, count)
