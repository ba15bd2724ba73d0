"""Plan: the complete configuration of an estimate, built from a RunSpec, a Task, a module or a function."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from workbench.core.checks import whole_number
from workbench.core.device import Device
from workbench.memory.analysis.fit import device_name
from workbench.memory.analysis.non_pytorch import cublas_workspace
from workbench.memory.estimate.building import copied
from workbench.memory.estimate.dry_run import Gpu
from workbench.memory.estimate.errors import EstimateError
from workbench.memory.estimate.examples import DefaultLoss, resized, sample_batch
from workbench.runs import combinations
from workbench.runs import task as tasks
from workbench.runs.spec import SHARDED, RunSpec, check_names
from workbench.runs.target import ARGUMENTS, read_program, shown
from workbench.runs.task import Task
from workbench.timeline.loops import samples_in

PRECISIONS = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
"""Precision → dtype of autocast, unless FSDP2's own policy replaces it."""
STEPS = 2
"""Optimizer steps of an estimate: the optimizer makes its states in the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The complete configuration of an estimate."""

    spec: RunSpec
    """All knobs; nnodes × nproc_per_node is the world size."""
    task: Task
    """The model, loss and optimizer."""
    example: Any
    """A batch; only its shapes count."""
    device: str
    """"cpu", "cuda" (any GPU) or a device's name: whose memory behaviour."""
    typed: str = ""
    """How the device was named."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU; None = not known."""
    rank: int | None = None
    """Rank that is reported; None = the one with the most."""
    steps: int = STEPS
    """Optimizer steps."""
    own_loop: bool = False
    """The loop is the user's own, without DDP on one rank."""

    @property
    def world_size(self) -> int:
        return self.spec.world_size

    @property
    def gpu(self) -> Gpu | None:
        """The GPU to emulate; None = a CPU."""
        if self.device == "cpu":
            return None
        precision = None if self.spec.parallel in SHARDED else PRECISIONS[self.spec.precision]
        return Gpu(precision=precision, capability=self.capability, workspace=cublas_workspace(self.capability))

    @property
    def in_ddp(self) -> bool:
        """Is the model called through DistributedDataParallel, as a launched run calls it on one rank, too?"""
        return not self.own_loop and self.spec.parallel not in SHARDED

    @property
    def title(self) -> str:
        """What is estimated, in one line."""
        spec, optimizer = self.spec, self.spec.optimizer or getattr(self.task.loss, "optimizer", "") or self.task.optimizer
        words = [self.task.name or spec.task, f"{spec.micro_batch} samples"]
        words += [f"{spec.accumulation} micro-batches"] if spec.accumulation > 1 else []
        words += [spec.precision, optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "own optimizer")]
        words += [f"checkpointing {spec.checkpointing}"] if spec.checkpointing != "none" else []
        words += [f"{spec.parallel} on {self.world_size} ranks"] if self.world_size > 1 else ["DDP, 1 rank"] if self.in_ddp else []
        words += [f"a pipeline of {spec.pipeline_parallel}, {spec.pipeline_schedule}"] if spec.pipeline_parallel > 1 else []
        return ", ".join(words)


def plan_of(
    target: Any,
    batch: Any = None,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: str | Callable[[Any], Any] | None = None,
    device: str | Device = "cuda",
    steps: int = STEPS,
    world_size: int | None = None,
    rank: int | None = None,
    sequence: int | None = None,
    image: int | None = None,
    asked: str = "estimate_memory",
    **knobs: Any,
) -> Plan:
    """The Plan for the arguments of `workbench.memory.api.estimate_memory`; see there. `asked`: the function that the user called."""
    check_names(RunSpec, knobs, ARGUMENTS)
    for what, value, least in (("steps", steps, 1), ("rank", rank, 0), ("sequence", sequence, 1), ("image", image, 1)):
        if value is not None:
            whole_number(what, value, least=least)
    name = device_name(device)
    gpu = device if isinstance(device, Device) else Device.known(name)
    if world_size is not None:
        knobs |= {"nproc_per_node": world_size, "nnodes": 1}
    target = read_program(asked, target, batch)
    spec, task = _spec_and_task(target, loss, optimizer, knobs)
    if isinstance(target, RunSpec):
        combinations.check_task(spec)
        if name == "cpu" and (why := combinations.on_cpu(spec)):
            raise EstimateError(why)
    if batch is None:
        batch = sample_batch(task, spec.micro_batch)
    batch = resized(batch, samples=knobs.get("micro_batch"), sequence=sequence, image=image)
    count = samples_in(batch)
    if count and count != spec.micro_batch:
        spec = spec.replace(micro_batch=count)
    own_loop = not isinstance(target, RunSpec | Task) and spec.world_size == 1
    return Plan(
        spec=spec,
        task=task,
        example=batch,
        device=name,
        typed=device if isinstance(device, str) else name,
        capability=gpu.capability if gpu else None,
        rank=rank,
        steps=steps,
        own_loop=own_loop,
    )


def _spec_and_task(target: Any, loss: Any, optimizer: Any, knobs: dict[str, Any]) -> tuple[RunSpec, Task]:
    chosen: dict[str, Any] = {"optimizer": optimizer} if isinstance(optimizer, str) else {}
    if isinstance(target, RunSpec):
        spec, task = target.replace(**knobs, **chosen), tasks.resolve(target.task)
    elif isinstance(target, Task):
        spec, task = RunSpec(task=target.name or "task", **knobs, **chosen), target
    else:
        spec, task = RunSpec(task="model", **knobs, **chosen), _task_of(target)
    changes: dict[str, Any] = {} if loss is None else {"loss": checked(loss)}
    if optimizer is not None and not chosen:
        changes["optimizer"] = optimizer
        spec = spec.replace(optimizer=None)
    return spec, dataclasses.replace(task, **changes)


def _task_of(target: Any) -> Task:
    name, make = shown(target), target
    if isinstance(target, nn.Module):
        make = lambda: copied(target) if target.training else copied(target).train()  # noqa: E731
    name = "" if name == "<lambda>" else name
    return Task(model=make, dataset=list, loss=DefaultLoss(), name=name)


def checked(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss, which is not a criterion.

    Raises:
        EstimateError: it takes an output and a target.
    """
    try:
        names = tuple(inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters)
    except (TypeError, ValueError):
        names = ()
    if isinstance(loss, _Loss) or names[:2] in (("input", "target"), ("inputs", "targets"), ("output", "target"), ("outputs", "targets")):
        name = getattr(loss, "__name__", "") or f"{type(loss).__name__}()"
        raise EstimateError(
            f"loss={name} takes an output and a target; expected a function of the model and a batch: write "
            "loss=lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    return loss
