"""Trainer: what a spec and a Task become on one rank, ready to take optimizer steps; the loop and the experiments drive it."""

import contextlib
import gc
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from workbench.harness.batches import map_tensors
from workbench.runs.spec import SHARDED, RunSpec
from workbench.runs.task import Task, TaskError
from workbench.train.checkpointing import apply_checkpointing
from workbench.train.layout import Layout
from workbench.train.loader import build_loader, micro_batches, to_device
from workbench.train.offload import activations_on_host, check_offload, on_host, told
from workbench.train.optimizers import build_optimizer, place_optimizer
from workbench.train.precision import Precision
from workbench.train.ranks import Ranks
from workbench.train.schedule import build_scheduler
from workbench.train.sharded_tensors import local
from workbench.train.sharding import accumulating, distribute, gathered
from workbench.train.split_on_oom import Halving
from workbench.train.tensor_parallel import split_layers

COLLECT_EVERY = 1000
"""Steps between two garbage collections with gc=False: what a model leaves in cycles must go at some time."""

Phase = Callable[[str], AbstractContextManager[None]]
_RESUMED = 1_000_003
"""A prime: so many seeds lie between those of a run that goes on from one step and from the next."""


class Trainer:
    """The model, its loader and its optimizer on one rank, and the steps they take.

    Attributes:
        module: the model itself; its parameters are this rank's part of them where the spec shares or splits them.
        model: the module to call: in its DistributedDataParallel, or `module` itself where FSDP2 shards it.
        layout: which ranks do what.
        optimizer: as the spec or the task wants it.
        loader: of this rank.
        halving: takes micro-batches in parts where memory runs out; None = such an error is raised.
        phase: entered around each phase of a step; a `StepTimer`, or nothing.
    """

    def __init__(
        self,
        spec: RunSpec,
        task: Task,
        ranks: Ranks,
        group: dist.ProcessGroup | None = None,
        *,
        module: nn.Module | None = None,
        loader: "DataLoader[Any] | None" = None,
        layout: Layout | None = None,
        alone: bool = False,
        halving: bool = False,
    ) -> None:
        """Build everything, in an order that gives each rank the same model and other data.

        Args:
            spec: every knob.
            task: what is trained.
            ranks: this process among the others.
            group: the process group that reduces the gradients; None = that of all.
            module: the task's model, if it is built already.
            loader: the batches, if they do not come from the task's dataset.
            layout: of the ranks, if it is made already.
            alone: there are no other ranks, and the module is called as it is, as a loop of one's own does.
            halving: take a micro-batch for which memory runs out in parts; see `halving`. Not where layers communicate in the forward
                ("zero2", "fsdp", "hsdp" and `tensor_parallel`): a rank cannot call them again alone.

        Raises:
            TaskError: the task's functions do not return what they should.
            SpecError: a knob does not fit this machine or this task, or micro_batch is still "auto".
        """
        _ = spec.global_batch  # refuses "auto"
        check_offload(spec, ranks.device)
        self.spec, self.task, self.ranks = spec, task, ranks
        self._updates = 0
        self.phase: Phase = _unmarked
        self.take_over()
        self.layout = Layout.of(spec, ranks, group) if layout is None else layout
        sharded = spec.parallel in SHARDED
        self.precision = Precision(spec.precision, ranks.device, by_weights=sharded)
        seed_all(spec.seed)  # the same model on every rank
        self.module = build_model(task) if module is None else module
        if not sharded:  # else block by block, when each is dealt out: the whole need not fit
            self.module = self.module.to(ranks.device)
        if spec.channels_last and not sharded:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        apply_checkpointing(self.module, spec.checkpointing)
        split_layers(self.module, task, self.layout, ranks.device)
        self.model = self.module if alone else distribute(self.module, spec, self.layout, ranks.device)
        self.optimizer = place_optimizer(
            build_optimizer(self.module, task.optimizer, override=spec.optimizer, lr=spec.lr),
            share=spec.parallel == "zero1",
            group=self.layout.data,
            on_host=spec.offload == "optimizer" and not sharded,
        )
        can_halve = halving and not sharded and spec.tensor_parallel == 1
        self.halving = Halving(self, self.layout.readers.world_size) if can_halve else None
        self._scheduler = build_scheduler(self.optimizer, spec)
        readers = self.layout.readers
        own_seed = spec.seed * readers.world_size + readers.rank
        seed_all(own_seed)  # other augmentation and dropout on each
        self.loader = build_loader(task, spec, readers, own_seed) if loader is None else loader

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

    def batches(self, done: int = 0) -> Generator[Any, None, None]:
        """Micro-batches without end, those of the first `done` steps left out; see `micro_batches`."""
        return micro_batches(self.loader, self.spec.accumulation, self.layout.readers, done)

    def state(self) -> dict[str, Any]:
        """What the next step depends on, random numbers aside; where no rank shares or splits anything."""
        parts: dict[str, Any] = {
            "module": self.module,
            "optimizer": self.optimizer,
            "scheduler": self._scheduler,
            "scaler": self.precision.scaler,
        }
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state`, whose `step` steps have been taken; draw other random numbers than those before."""
        parts: dict[str, Any] = {"module": self.module, "optimizer": self.optimizer, "scheduler": self._scheduler}
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self.precision.scaler.load_state_dict(state["scaler"])
        readers = self.layout.readers
        seed_all((self.spec.seed * readers.world_size + readers.rank + _RESUMED * state["step"]) % 2**32)

    def step(self, batches: Sequence[Any]) -> Tensor:
        """One whole optimizer step of `spec.accumulation` micro-batches; its loss."""
        loss = torch.zeros((), device=self.ranks.device)
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            loss = loss + self.micro_step(batch, last=not left)
        self.update()
        return loss

    def micro_step(self, batch: Any, *, last: bool) -> Tensor:
        """Add the gradients of a micro-batch; they are reduced across the ranks after the `last` of a step. Its part of the loss."""
        if self.halving is not None:
            return self.halving.micro_step(batch, last=last)
        batch = self.placed(batch)
        with accumulating(self.model, last=last):
            loss = self.forward(batch)
            self.backward(loss)
        return loss.detach()

    def placed(self, batch: Any) -> Any:
        """A batch on the device, as the spec wants it there."""
        with self.phase("h2d"):
            batch = to_device(batch, self.ranks.device, non_blocking=self.loader.pin_memory)
            return map_tensors(_channels_last, batch) if self.spec.channels_last else batch

    def forward(self, batch: Any) -> Tensor:
        """A micro-batch's part of the loss of a step."""
        with self.phase("forward"), self.precision.autocast(), self._saving():
            return loss_of(self.task, self.model, batch) / self.spec.accumulation

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of it."""
        with self.phase("backward"):
            self.precision.backward(loss)

    def update(self) -> None:
        """Let the optimizer use the gradients, and clear them."""
        with self.phase("optimizer"), self._stepping():
            if self.precision.step(self.optimizer, self.model, clip_grad_norm=self.spec.clip_grad_norm):
                self._scheduler.step()
        self._updates += 1
        if not self.spec.gc and self._updates % COLLECT_EVERY == 0:
            gc.collect()

    def _saving(self) -> AbstractContextManager[Any]:
        return activations_on_host() if self.spec.offload == "activations" else contextlib.nullcontext()

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Around an optimizer's step that FSDP2 has put on the host, for dry runs."""
        if self.spec.offload != "optimizer" or self.spec.parallel not in SHARDED:
            yield
            return
        for weight in self.module.parameters():
            if weight.grad is not None:
                told(local(weight.grad))
        with on_host():
            yield

    def figures(self) -> dict[str, float]:
        """The task's evaluation, on rank 0; the others get none. All ranks have to come here where the model is shared or split.

        A shared or split model is gathered on rank 0: it evaluates a whole one, as it is without.

        Raises:
            TaskError: it did not return numbers by name.
        """
        dealt = self.spec.parallel in SHARDED or self.layout.tensor is not None
        first = self.ranks.rank == 0
        if not dealt:
            return evaluate(self.task, self.module) if first else {}
        weights = gathered(self.module, keep=first)
        if not first:
            return {}
        whole = build_model(self.task)
        whole.load_state_dict(weights)
        return evaluate(self.task, whole.to(self.ranks.device))


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


def evaluate(task: Task, module: nn.Module) -> dict[str, float]:
    """The task's evaluation of a whole model: in evaluation mode, without gradients, in fp32.

    Raises:
        TaskError: it did not return numbers by name.
    """
    assert task.evaluate is not None
    module.eval()
    with torch.no_grad():
        figures = task.evaluate(module)
    try:
        return {str(name): float(value) for name, value in figures.items()}
    except (AttributeError, TypeError, ValueError):
        raise TaskError(f"the task's evaluate(model) returned {figures!r:.100}; numbers by name are wanted: {{'accuracy': 0.9}}") from None
