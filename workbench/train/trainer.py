"""Trainer: the model, loader and optimizer that a RunSpec and a Task describe, on one rank, and the steps they take."""

import contextlib
import copy
import gc
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from workbench.harness.batches import map_tensors
from workbench.harness.deterministic import set_deterministic
from workbench.harness.tf32 import set_tf32
from workbench.runs.spec import SHARDED, RunSpec
from workbench.runs.task import Task, TaskError
from workbench.runs.training_knobs import parse_pipeline
from workbench.train import named_state, sharding
from workbench.train.activation_checkpointing import apply_checkpointing
from workbench.train.blocks import compile_parts
from workbench.train.expert_parallel import DividedExperts
from workbench.train.label_smoothing import LabelSmoothing
from workbench.train.loader import build_loader, micro_batches, to_device
from workbench.train.local_sgd import LocalSgd
from workbench.train.muon import hidden_names
from workbench.train.offload import activations_on_host, check_offload, host_computes, mark_on_host
from workbench.train.optimizers import build_optimizer, build_scheduler, place_optimizer, resume_scheduler
from workbench.train.precision import Precision, check_tf32
from workbench.train.random_numbers import random_state, restore_random_state, seed_all
from workbench.train.ranks import Layout, Ranks, changed_layout
from workbench.train.sample_order import go_on, position_of
from workbench.train.sharded_tensors import broadcast_parameters, keeping_attributes, local_part
from workbench.train.split_on_oom import MicroBatchSplitter
from workbench.train.stages import cut, keep_only
from workbench.train.step_weights import StepWeights
from workbench.train.tensor_parallel import split_layers
from workbench.train.weight_average import WeightAverage

if TYPE_CHECKING:
    from workbench.train.pipeline import Pipeline

COLLECT_EVERY = 1000
"""Steps between two garbage collections with gc=False: reference cycles of a model must be freed sometimes."""

Phase = Callable[[str], AbstractContextManager[None]]
_RESUMED = 1_000_003
"""A prime: distance between the seeds of a run that resumes, from a checkpoint without random numbers, at a step and at the next."""


class Trainer:
    """A model, its loader and its optimizer on one rank. The training loop and the experiments drive it.

    Attributes:
        module: the model itself; its parameters are this rank's part where the spec shards or splits them.
        model: the module to call: its DistributedDataParallel, or `module` itself where FSDP2 shards it.
        layout: process groups and meshes.
        splitter: takes micro-batches in parts when memory runs out; None = such an error is raised.
        warn: called with a warning about what the loader gives.
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
        split_on_oom: bool = False,
        passed: list[tuple[Tensor, ...]] | None = None,
    ) -> None:
        """Build everything, in an order that gives each rank the same model and other data.

        Args:
            group: the process group that reduces the gradients; None = that of all.
            alone: there are no other ranks: call the module without a wrapper, as a user's own loop does.
            split_on_oom: take a micro-batch in parts when memory runs out. Ignored where layers communicate in the forward ("zero2",
                "fsdp", "hsdp" and `tensor_parallel`): a rank cannot call them again alone.
            passed: what passes between the stages of a pipeline, in a dry run, in which no other rank says it.

        Raises:
            TaskError: the task's functions do not return what they should.
            SpecError: a knob does not fit this machine or this task, or micro_batch is still "auto".
        """
        _ = spec.global_batch  # refuses "auto"
        check_offload(spec, ranks.device)
        check_tf32(spec.tf32, ranks.device)
        self.spec, self.task, self.ranks = spec, task, ranks
        self._updates = 0
        self._random: dict[str, Any] | None = None
        self._compression: dict[str, Any] | None = None
        self._waiting: list[Any] = []
        self.phase: Phase = _unmarked
        self.warn: Callable[[str], None] = print
        self.apply_process_settings()
        self.layout = Layout.of(spec, ranks, group) if layout is None else layout
        sharded = spec.parallel in SHARDED
        self.precision = Precision(spec.precision, ranks.device, by_weights=sharded)
        seed_all(spec.seed)  # the same model on every rank
        self.module = build_model(task) if module is None else module
        readers = self.layout.readers
        own_seed = spec.seed * readers.world_size + readers.rank
        if any(map(nn.parameter.is_lazy, self.module.parameters())):
            raise TaskError(
                "the task's model() returned lazy modules, whose parameters have no shape yet: call the model once in it, as with "
                "model(torch.zeros(1, 16)), and return it then"
            )
        hidden = hidden_names(self.module)  # before it is cut or split: no rank then has all blocks
        apply_checkpointing(self.module, spec.checkpointing)
        self.pipeline = self._pipeline(own_seed, passed) if self.layout.pipeline else None
        if not sharded:  # FSDP2 moves block by block: the full model need not fit
            self.module = self.module.to(ranks.device)
        if spec.channels_last and not sharded:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with keeping_attributes(self.module):
            split_layers(self.module, task, self.layout, ranks.device)
            self._experts = DividedExperts(self.module, self.layout, ranks.device) if self.layout.experts else None
            compile_parts(self.module, spec.compile)
            if self.pipeline:
                self.model = self.module
                self.pipeline.wrap(self._distributed_stage, self.precision.autocast)
            else:
                self.model = self.module if alone else sharding.distribute(self.module, spec, self.layout, ranks.device)
        self.optimizer = place_optimizer(
            build_optimizer(self.module, task.optimizer, override=spec.optimizer, lr=spec.lr, decayed=spec.weight_decay_on, hidden=hidden),
            share=spec.parallel == "zero1",
            group=self.layout.data,
            on_host=spec.offload == "optimizer" and not sharded,
        )
        can_split = split_on_oom and spec.whole_models
        self.splitter = MicroBatchSplitter(self, self.layout.readers.world_size) if can_split else None
        self._local: LocalSgd | None = None
        if spec.local_sgd != "none" and isinstance(self.model, DistributedDataParallel):
            self._local = LocalSgd(self.model, spec.local_sgd, self.layout)
        self._weights = StepWeights(task, spec, self.layout, ranks.device, splits=can_split) if task.weight else None
        self._scheduler = build_scheduler(self.optimizer, spec)
        self._average = WeightAverage(self.module, spec.ema) if spec.ema else None
        self._smoothing = LabelSmoothing(spec.label_smoothing) if spec.label_smoothing else None
        seed_all(own_seed)  # other augmentation and dropout on each
        self.loader = build_loader(task, spec, readers, own_seed) if loader is None else loader

    def _pipeline(self, seed: int, passed: list[tuple[Tensor, ...]] | None) -> "Pipeline":
        """This rank's part of a pipeline; the module keeps its stages only."""
        from workbench.train.pipeline import Pipeline  # takes long

        assert self.layout.pipeline is not None
        stages = cut(self.module, self.task, self.spec)
        about: dict[str, Any] = {"seed": seed, "loss": self._loss, "passed": passed}
        made = Pipeline(self.spec, self.task, stages, self.layout.pipeline, self.ranks.device, **about)
        made.phase = lambda phase: self.phase(phase)
        keep_only(self.module, made.kept)
        return made

    def _distributed_stage(self, stage: nn.Module) -> nn.Module:
        if self.layout.readers.world_size == 1 or not any(weight.requires_grad for weight in stage.parameters()):
            return stage
        if self._reduces_afterwards:
            broadcast_parameters(stage, self.layout.data, self.ranks.device)
            return stage
        return sharding.distribute(stage, self.spec, self.layout, self.ranks.device)

    @property
    def _reduces_afterwards(self) -> bool:
        """Is the backward taken apart, so that DDP does not see when a gradient is complete?"""
        return self.layout.readers.world_size > 1 and parse_pipeline(self.spec.pipeline_schedule)[0] == "zero_bubble"

    def apply_process_settings(self) -> None:
        """Set threads, garbage collection, TF32 and deterministic algorithms of the process; another Trainer in it may have set others."""
        torch.set_num_threads(self.spec.threads)
        set_tf32(self.spec.tf32)
        set_deterministic(self.spec.deterministic)
        if self.spec.gc:
            gc.enable()
        else:
            gc.disable()

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._scheduler.get_last_lr()[0])

    @property
    def inference_module(self) -> nn.Module:
        """The whole model as it is called without gradients: where ranks have parts of it, its forward is a collective."""
        return self.pipeline.whole(self.module) if self.pipeline else self.module

    @property
    def entries_elsewhere(self) -> Collection[str]:
        """Names in the state_dict of the whole model of which other ranks may have the tensors: those of a pipeline."""
        return self.pipeline.entries if self.pipeline else ()

    @property
    def averages(self) -> dict[str, Tensor]:
        """Averages of the parameters by name; none without `spec.ema`."""
        return self._average.tensors if self._average else {}

    def batches(self, done: int = 0) -> Generator[Any, None, None]:
        """Endless micro-batches, without those of the first `done` steps; see `micro_batches`."""
        return micro_batches(self.loader, self.spec.accumulation, self.layout.readers, done, self.warn, ready=self._restore_random)

    def position(self, step: int) -> dict[str, int] | None:
        """Where the samples are after so many steps: epoch and samples of it that all ranks consumed; None = nobody knows."""
        return position_of(self.loader, step, self.spec.micro_batch * self.spec.accumulation * self.layout.readers.world_size)

    def random_state(self) -> dict[str, Any]:
        """The random numbers of this rank: with `state`, all that its next step depends on."""
        return random_state(self.ranks.device)

    def _restore_random(self) -> None:
        if self._random is not None:
            restore_random_state(self._random, self.ranks.device)
            self._random = None

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, as this rank has it: where ranks share the model or the optimizer, its part."""
        parts: dict[str, Any] = {
            "module": self.module,
            "optimizer": named_state.local_optimizer(self.optimizer),
            "scheduler": self._scheduler,
            "scaler": self.precision.scaler,
            **({"ema": self._average} if self._average else {}),
        }
        compression = sharding.compression_state(self.model)
        return {name: part.state_dict() for name, part in parts.items()} | ({"compression": compression} if compression else {})

    def load_state(self, state: dict[str, Any], source: named_state.Source | None = None) -> None:
        """Resume from a `state` after its `step` steps, with the `random` numbers of each rank; without these, they are seeded again.

        They get their values when `batches` gives the first batch: what is read to get there uses some. Where tensors are sharded here, or
        were sharded there, `source` has them by name.
        """
        if source:
            named_state.load(self, source)
        else:
            self.module.load_state_dict(named_state.versioned(state["module"], self.module))
            self.optimizer.load_state_dict(state["optimizer"])
            if self._average:
                self._average.load_state_dict(state["ema"])
        steps = (state.get("spec") or {}).get("steps", self.spec.steps)
        resume_scheduler(self._scheduler, state["scheduler"], anew=steps != self.spec.steps)
        if state["scaler"]:  # a run that begins with weights from elsewhere has none
            self.precision.scaler.load_state_dict(state["scaler"])
        self._updates = state["step"]
        if self._local:
            self._local.go_on(self._updates)
        go_on(self.loader, state)
        seed_all(self.resumed_seed(state["step"], self.layout.readers.rank))
        if self.pipeline:
            self.pipeline.steps = state["step"]
        if not changed_layout(self.spec, state.get("layout")):  # else the ranks have other parts of the work
            self._random = (state.get("random") or {}).get(self.ranks.rank)
            self._compression = source.compression(self.ranks.rank) if source and not sharding.changed_buckets(self.spec, state) else None

    def resumed_seed(self, done: int, rank: int) -> int:
        """Seed of a rank that goes on after so many steps without random numbers of its own."""
        return (self.spec.seed * self.layout.readers.world_size + rank + _RESUMED * done) % 2**32

    def step(self, batches: Sequence[Any]) -> Tensor:
        """One whole optimizer step of `spec.accumulation` micro-batches; its loss."""
        parts = (self.micro_step(batch, last=not left) for left, batch in zip(reversed(range(len(batches))), batches, strict=True))
        loss = sum(parts, torch.zeros((), device=self.ranks.device))
        sharding.check_reduced(self.model)
        self.update()
        return loss

    def micro_step(self, batch: Any, *, last: bool) -> Tensor:
        """Add the gradients of a micro-batch, reduced across the ranks after the `last` of a step; returns its part of the loss.

        In a pipeline all of them wait for the last, which then returns the loss of all.
        """
        if self.splitter is not None:
            return self.splitter.micro_step(batch, last=last)
        batch = self.placed(batch)
        if not self._weights:
            return self._micro_step(batch, last=last)
        with self.phase("forward"):
            self._weights.count(batch, last=last)
        loss = self._micro_step(batch, last=last)
        if not last:
            return self._weights.kept(loss)
        with self.phase("backward"):
            return self._weights.finish(self.module.parameters(), loss)

    def _micro_step(self, batch: Any, *, last: bool) -> Tensor:
        if self.pipeline:
            self._waiting.append(batch)
            if not last:
                return torch.zeros((), device=self.ranks.device)
            waiting, self._waiting = self._waiting, []
            total = self.pipeline.step(waiting)
            if self._reduces_afterwards:
                with self.phase("backward"):
                    sharding.reduce_gradients(self.module.parameters(), self.layout.data, self.spec.bucket_cap_mb)
            return total
        with sharding.accumulating(self.model, last=last):
            loss = self.forward(batch)
            self.backward(loss)
            if self._experts and last:
                with self.phase("backward"):
                    self._experts.finish_gradients()
        return loss.detach()

    @property
    def has_buckets(self) -> bool:
        """Does DDP put gradients into buckets, or something else that depends on the first step?"""
        return self.model is not self.module or (self.pipeline is not None and self.layout.readers.world_size > 1)

    @property
    def needs_rehearsal(self) -> bool:
        """Does a step after a resume depend on the buckets that DDP has only after its first step?"""
        return self.has_buckets and (self.ranks.world_size > 2 or self.compresses)

    @property
    def compresses(self) -> bool:
        """Does PowerSGD compress gradients, and keep something between two steps?"""
        return sharding.compression_state(self.model) is not None

    def rehearse(self, batch: Any) -> None:
        """Compute the gradients of a micro-batch and forget them: DDP then has the buckets that it has after its first step.

        It fills them anew in the order in which gradients arrive, and three ranks or more add a gradient in an order that depends on its
        place in a bucket. A resumed run that begins with this adds as the undisturbed one does. Buffers and random numbers stay.
        """
        random = self.random_state()
        kept = [
            (part, dict(part._buffers), {name: value.clone() for name, value in part._buffers.items() if value is not None})
            for part in self.module.modules()
        ]
        for _ in range(min(2, self._updates) if self.spec.static_graph else 1):  # a static graph has its buckets after two steps
            for left in reversed(range(self.spec.accumulation if self.pipeline else 1)):
                self.micro_step(copy.deepcopy(batch), last=not left)  # a loss may change its batch in place
        self.model.zero_grad()
        if self._local:
            self._local.go_on(self._updates)
        if self.pipeline:
            self.pipeline.steps -= 1  # the seed of the next step's random numbers
        with torch.no_grad():
            for part, buffers, values in kept:
                part._buffers.clear()
                part._buffers.update(buffers)  # a buffer may be made or replaced by the first forward
                for name, value in values.items():
                    buffers[name].copy_(value)  # type: ignore[union-attr]
        if self.compresses:
            sharding.restore_compression(self.model, self._compression or {"iter": self._updates}, self.ranks.device)
        restore_random_state(random, self.ranks.device)

    def placed(self, batch: Any) -> Any:
        """A batch on the device, in the spec's memory format."""
        with self.phase("h2d"):
            batch = to_device(batch, self.ranks.device, non_blocking=self.loader.pin_memory)
            return map_tensors(_channels_last, batch) if self.spec.channels_last else batch

    def forward(self, batch: Any) -> Tensor:
        """A micro-batch's part of the loss of a step."""
        with sharding.calling(self.model):
            return self._loss(self.model, batch)

    def _loss(self, model: Any, batch: Any) -> Tensor:
        smoothing = self._smoothing.in_forward() if self._smoothing else contextlib.nullcontext()
        kept = activations_on_host() if self.spec.offload == "activations" else contextlib.nullcontext()
        with self.phase("forward"), self.precision.autocast(), kept, smoothing:
            loss = loss_of(self.task, model, batch)
            return self._weights.scaled(loss, batch) if self._weights else loss / self.spec.accumulation

    @property
    def counted(self) -> Tensor | None:
        """What the samples of the last step counted on this rank; None without `Task.weight`."""
        return self._weights.counted if self._weights else None

    def divisor(self, batches: Sequence[Any]) -> float:
        """What the sum of the `forward` of some micro-batches is divided by to get the mean of their loss; 1 for those of a step."""
        return self._weights.divisor(batches) if self._weights else len(batches) / self.spec.accumulation

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss.

        Raises:
            TaskError: it depends on no parameter.
        """
        if not loss.requires_grad:
            raise TaskError(
                "the task's loss(model, batch) has no gradient: it depends on no parameter that is trained. Is it cut off by .detach(), "
                ".item(), torch.no_grad() or argmax, or is every parameter frozen?"
            )
        with self.phase("backward"):
            self.precision.backward(loss)

    def update(self) -> None:
        """Take the optimizer's step, and clear the gradients."""
        with self.phase("optimizer"), self._host_step():
            if self.precision.step(self.optimizer, self.model, clip_grad_norm=self.spec.clip_grad_norm, across=self.layout.pipeline):
                self._scheduler.step()
                if self._average:
                    self._average.update()
            if self._local:
                self._local.after_step(last=self._updates + 1 == self.spec.steps)
        self._updates += 1
        if not self.spec.gc and self._updates % COLLECT_EVERY == 0:
            gc.collect()

    @contextlib.contextmanager
    def _host_step(self) -> Iterator[None]:
        """Context of an optimizer step that FSDP2 offloads to the host, for dry runs."""
        if self.spec.offload != "optimizer" or self.spec.parallel not in SHARDED:
            yield
            return
        for weight in self.module.parameters():
            if weight.grad is not None:
                mark_on_host(local_part(weight.grad))
        with host_computes():
            yield

    def average_in_place(self) -> AbstractContextManager[None]:
        """Context in which the module has the averaged parameters, if there are any."""
        return self._average.in_place() if self._average else contextlib.nullcontext()

    def figures(self) -> dict[str, float]:
        """The task's evaluation on rank 0; an empty dict on the others. A collective where the model is sharded or split.

        Averaged parameters are evaluated, if there are any. A sharded or split model is gathered on rank 0, which evaluates the full one.

        Raises:
            TaskError: it did not return numbers by name.
        """
        sharded = not self.spec.whole_models
        first = self.ranks.rank == 0
        if not sharded:
            with self.average_in_place():
                return evaluate(self.task, self.module) if first else {}
        with self.average_in_place():
            own = sharding.gathered(self.module, keep=not self.layout.readers.rank if self.pipeline else first)
        weights = self.pipeline.gathered(own) if self.pipeline and own else own
        if not first:
            return {}
        full_model = build_model(self.task)
        full_model.load_state_dict(named_state.versioned(weights, full_model))
        return evaluate(self.task, full_model.to(self.ranks.device))


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _unmarked(phase: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def build_model(task: Task) -> nn.Module:
    """The task's model.

    Raises:
        TaskError: `model()` returned something else.
    """
    model = task.model()
    if not isinstance(model, nn.Module):
        hint = "; write model=Net, not model=lambda: Net" if isinstance(model, type) else ""
        raise TaskError(f"the task's model() returned a {type(model).__name__}; expected a torch.nn.Module{hint}")
    return model


def loss_of(task: Task, model: nn.Module, batch: Any) -> Tensor:
    """The task's loss of a batch.

    Raises:
        TaskError: it is not a tensor with one number.
    """
    loss = task.loss(model, batch)
    if not isinstance(loss, Tensor):
        hint = "; a Hugging Face model's output has it as .loss" if hasattr(loss, "loss") else ""
        raise TaskError(f"the task's loss(model, batch) returned a {type(loss).__name__}; expected a tensor with one number{hint}")
    if loss.numel() != 1:
        raise TaskError(
            f"the task's loss(model, batch) returned a tensor of shape {tuple(loss.shape)}; expected a tensor with one number, the mean "
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
        raise TaskError(f"the task's evaluate(model) returned {figures!r:.100}; expected numbers by name: {{'accuracy': 0.9}}") from None
