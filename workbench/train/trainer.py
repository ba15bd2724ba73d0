"""Trainer: what a spec and a Task become on one rank, ready to take optimizer steps; the loop and the experiments drive it."""

import contextlib
import gc
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.measure.batches import map_tensors
from workbench.spec import RunSpec
from workbench.task import Task, TaskError
from workbench.train.loader import build_loader, micro_batches, to_device
from workbench.train.optimizers import build_optimizer
from workbench.train.precision import Precision
from workbench.train.ranks import Ranks
from workbench.train.schedule import build_scheduler

COLLECT_EVERY = 1000
"""Steps between two garbage collections with gc=False: what a model leaves in cycles must go at some time."""

Phase = Callable[[str], AbstractContextManager[None]]


class Trainer:
    """The model, its loader and its optimizer on one rank, and the steps they take.

    Attributes:
        module: the model itself.
        model: the module in its DistributedDataParallel.
        optimizer: as the spec or the task wants it.
        loader: of this rank.
        phase: entered around each phase of a step; a `StepTimer`, or nothing.
    """

    def __init__(self, spec: RunSpec, task: Task, ranks: Ranks, group: dist.ProcessGroup | None = None) -> None:
        """Build everything, in an order that gives each rank the same model and other data.

        Args:
            spec: every knob.
            task: what is trained.
            ranks: this process among the others.
            group: the process group that reduces the gradients; None = that of all.

        Raises:
            TaskError: the task's functions do not return what they should.
            SpecError: a knob does not fit this machine or this task.
        """
        self.spec, self.task, self.ranks = spec, task, ranks
        self._updates = 0
        self.phase: Phase = _unmarked
        self.take_over()
        self.precision = Precision(spec.precision, ranks.device)
        seed_all(spec.seed)  # the same model on every rank
        self.module = build_model(task).to(ranks.device)
        if spec.channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = build_optimizer(self.module, task.optimizer, override=spec.optimizer, lr=spec.lr)
        self._scheduler = build_scheduler(self.optimizer, spec)
        own_seed = spec.seed * ranks.world_size + ranks.rank
        seed_all(own_seed)  # other augmentation and dropout on each
        self.loader = build_loader(task, spec, ranks, own_seed)
        on_gpu = ranks.device.type == "cuda"
        self.model = DistributedDataParallel(
            self.module,
            device_ids=[ranks.device.index] if on_gpu else None,
            bucket_cap_mb=spec.bucket_cap_mb,
            process_group=group,
            find_unused_parameters=spec.find_unused_parameters,
        )

    def take_over(self) -> None:
        """Set what this spec wants of the whole process; another Trainer in it may want something else."""
        torch.set_num_threads(self.spec.threads)
        if self.spec.gc:
            gc.enable()
        else:
            gc.disable()

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._scheduler.get_last_lr()[0])

    def batches(self) -> Generator[Any, None, None]:
        """Micro-batches without end; see `micro_batches`."""
        return micro_batches(self.loader, self.spec.accumulation, self.ranks)

    def step(self, batches: Sequence[Any]) -> Tensor:
        """One whole optimizer step of `spec.accumulation` micro-batches; its loss."""
        loss = torch.zeros((), device=self.ranks.device)
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            loss = loss + self.micro_step(batch, last=not left)
        self.update()
        return loss

    def micro_step(self, batch: Any, *, last: bool) -> Tensor:
        """Add the gradients of a micro-batch; they are reduced across the ranks after the `last` of a step. Its part of the loss."""
        with self.phase("h2d"):
            batch = to_device(batch, self.ranks.device, non_blocking=self.loader.pin_memory)
            if self.spec.channels_last:
                batch = map_tensors(_channels_last, batch)
        with contextlib.nullcontext() if last else self.model.no_sync():
            with self.phase("forward"), self.precision.autocast():
                loss = loss_of(self.task, self.model, batch) / self.spec.accumulation
            with self.phase("backward"):
                self.precision.backward(loss)
        return loss.detach()

    def update(self) -> None:
        """Let the optimizer use the gradients, and clear them."""
        with self.phase("optimizer"):
            if self.precision.step(self.optimizer, self.model, clip_grad_norm=self.spec.clip_grad_norm):
                self._scheduler.step()
        self._updates += 1
        if not self.spec.gc and self._updates % COLLECT_EVERY == 0:
            gc.collect()


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _unmarked(phase: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def build_model(task: Task) -> nn.Module:
    """The task's model.

    Raises:
        TaskError: `model()` returned something else.
    """
    model = task.model()
    if not isinstance(model, nn.Module):
        hint = "; write model=Net, not model=lambda: Net" if isinstance(model, type) else ""
        raise TaskError(f"the task's model() returned a {type(model).__name__}; a torch.nn.Module is wanted{hint}")
    return model


def loss_of(task: Task, model: nn.Module, batch: Any) -> Tensor:
    """The task's loss of a batch.

    Raises:
        TaskError: it is not a tensor with one number.
    """
    loss = task.loss(model, batch)
    if not isinstance(loss, Tensor):
        hint = "; a Hugging Face model's output has it as .loss" if hasattr(loss, "loss") else ""
        raise TaskError(f"the task's loss(model, batch) returned a {type(loss).__name__}; a tensor with one number is wanted{hint}")
    if loss.numel() != 1:
        raise TaskError(
            f"the task's loss(model, batch) returned a tensor of shape {tuple(loss.shape)}; a tensor with one number is wanted, the mean "
            "over the batch: try loss.mean()"
        )
    return loss.reshape(())
