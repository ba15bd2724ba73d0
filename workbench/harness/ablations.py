"""Switches one part of a training step off, or changes it, and undoes that: no optimizer, no gradient reduction, mixed precision, …"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils import checkpoint

from workbench.core.gc import without_gc
from workbench.core.system_load import usable_cores
from workbench.harness.batches import map_tensors
from workbench.harness.deterministic import deterministic
from workbench.harness.tf32 import tf32

Step = Callable[[Any], Any]
Switch = Callable[[], AbstractContextManager[Any]]

DTYPES = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
AUTOGRAD = (os.path.dirname(torch.autograd.__file__), checkpoint.__file__)
"""Where torch's code lies that runs a backward, or a forward once more."""
CUSTOM = ("decorate_fwd", "decorate_bwd")
"""Functions in which `torch.amp.custom_fwd` and `custom_bwd` call those of an autograd function."""


def unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A changed training step: how the change is switched on."""

    name: str
    """Of `diagnosis.analysis.evidence.ARMS`."""
    on: Switch = contextlib.nullcontext
    """A context in which the change is on; outside, all is as before. Entering and leaving are not timed."""
    wrap: Callable[[Step], Step] = unchanged
    """Makes the step that is called instead, for what has to happen in each step."""
    batch: Callable[[Any], Any] = unchanged
    """Makes the batch that the step is given instead."""
    samples: float = 1.0
    """Samples per step, relative to before."""
    note: str | None = None
    instead_of: str = ""
    """The variant whose place it takes: it is not tried where that one can be."""


@contextlib.contextmanager
def without_optimizer(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Inside, `optimizer.step()` does nothing. A closure is called all the same: it holds the forward and the backward."""

    def skip(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    with ExitStack() as undo:
        for optimizer in optimizers:
            function = partial(skip)
            function._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or schedulers warn that it was replaced, or not called
            undo.enter_context(temporary_attribute(optimizer, "step", function))
            undo.enter_context(temporary_attribute(optimizer, "_opt_called", True))
        yield


@contextlib.contextmanager
def overflows_skipped(optimizers: Sequence[Optimizer], precision: str) -> Iterator[None]:
    """Inside, in "amp_fp16", the optimizers skip steps whose gradients are not finite, as with a GradScaler and at its cost.

    Without this, the first overflow fills the weights and the optimizers' states with NaN for the rest of the experiment.
    """

    def step(optimizer: Optimizer, usual: Callable[..., Any], closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        if closure is not None:  # computes the gradients itself
            return usual(closure, **options)
        return usual(**options) if _finite(optimizer) else None

    with ExitStack() as undo:
        for optimizer in optimizers if precision == "amp_fp16" else ():
            function = partial(step, optimizer, optimizer.step)
            function._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or schedulers warn that it was replaced
            undo.enter_context(temporary_attribute(optimizer, "step", function))
            undo.enter_context(temporary_attribute(optimizer, "_opt_called", True))
        yield


def _finite(optimizer: Optimizer) -> bool:
    """Are all gradients of an optimizer finite? Looks as a GradScaler does, and waits for the device as it does."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        if weight.grad is not None:
            gradient = getattr(weight.grad, "_local_tensor", weight.grad)
            gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    bad = []
    for (device, _), gradients in alike.items():
        bad.append(torch.zeros(1, device=device))
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, bad[-1], torch.ones(1, device=device))
    return not any(flag.item() for flag in bad)


@contextlib.contextmanager
def without_reduction(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, no gradient is reduced and no buffer sent, by DDP or by the step's own all_reduce: each rank runs at its own pace."""
    with ExitStack() as undo:
        for part in [part for model in models for part in model.modules() if isinstance(part, DistributedDataParallel)]:
            undo.enter_context(temporary_attribute(part, "require_backward_grad_sync", False))
            undo.enter_context(temporary_attribute(part, "require_forward_param_sync", False))
        for module in (dist, dist.distributed_c10d):
            undo.enter_context(temporary_attribute(module, "all_reduce", _reduce_nothing))
            undo.enter_context(temporary_attribute(module, "barrier", _reduce_nothing))
        yield


class _Done:
    """The handle of an asynchronous reduction that is done already."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _reduce_nothing(*_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    return _Done() if async_op else None


def can_skip_reduction(models: Sequence[nn.Module]) -> bool:
    """Can each rank run at its own pace (see `without_reduction`)? Not where it needs the others' part of the weights (FSDP)."""
    return not any(_SHARDED & {kind.__name__ for kind in type(part).__mro__} for model in models for part in model.modules())


_SHARDED = {"FSDPModule", "FullyShardedDataParallel"}


@contextlib.contextmanager
def optimizer_implementation(optimizers: Sequence[Optimizer], name: str) -> Iterator[None]:
    """Inside, the optimizers use their "fused" or "foreach" implementation.

    The fused one counts its steps on the device, others on the host: there, each count on the device is a wait for it. A GradScaler leaves
    the unscaling of gradients to an optimizer that says it can, as the fused one does.
    """
    with ExitStack() as undo:
        for optimizer in optimizers:
            on_device = name == "fused" or any(group.get("capturable") for group in optimizer.param_groups)
            for group in optimizer.param_groups:
                for flag in ("fused", "foreach"):
                    if flag in group:
                        undo.enter_context(temporary_item(group, flag, flag == name))
            if any("fused" in group for group in optimizer.param_groups):
                undo.enter_context(temporary_attribute(optimizer, "_step_supports_amp_scaling", name == "fused"))
            for parameter, state in optimizer.state.items():
                if isinstance(count := state.get("step"), Tensor) and isinstance(parameter, Tensor):
                    place = parameter.device if on_device else torch.device("cpu")
                    undo.enter_context(temporary_item(state, "step", count.to(place, torch.float32 if name == "fused" else count.dtype)))
        yield


def has_unused_implementation(optimizers: Sequence[Optimizer], name: str) -> bool:
    """Do they have that implementation, and not use it? (An optimizer may still refuse it when it is tried.)"""
    if not optimizers or any(name not in group for optimizer in optimizers for group in optimizer.param_groups):
        return False
    return implementation_of(optimizers[0]) != name


def implementation_of(optimizer: Optimizer) -> str:
    """Which implementation an optimizer uses: "fused", "foreach", or "single" for a loop over tensors; "" if it has only one."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    if group.get("fused"):
        return "fused"
    if group.get("foreach"):
        return "foreach"
    if "foreach" not in group:
        return ""
    on_gpu = all(parameter.is_cuda for parameter in group["params"])
    return "foreach" if group["foreach"] is None and not group.get("fused") and on_gpu else "single"


@contextlib.contextmanager
def channels_last(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Inside, weights of 2d convolutions and the optimizer's states of them have the channels_last layout."""
    with ExitStack() as undo:
        for parameter in {weight for model in models for weight in model.parameters() if weight.ndim == 4}:
            undo.enter_context(_memory(parameter))
            for optimizer in optimizers:
                state = optimizer.state.get(parameter, {})
                for name, value in [*state.items()]:
                    if isinstance(value, Tensor) and value.ndim == 4:
                        undo.enter_context(temporary_item(state, name, value.contiguous(memory_format=torch.channels_last)))
        yield


@contextlib.contextmanager
def _memory(parameter: nn.Parameter) -> Iterator[None]:
    before, gradient = parameter.data, parameter.grad
    parameter.grad = None
    parameter.data = before.contiguous(memory_format=torch.channels_last)
    try:
        yield
    finally:
        parameter.grad = None
        parameter.data = before
        parameter.grad = gradient


def to_channels_last(batch: Any) -> Any:
    """The batch with its images in the channels_last layout."""
    return map_tensors(lambda value: value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value, batch)


def in_precision(step: Step, name: str, device: torch.device) -> Step:
    """The step in mixed precision. It is entered anew in each step: weights are converted once per step, as in training.

    A step often has an autocast of its own, switched off (`enabled=args.amp`). It is switched on, as its user would; one inside a module or
    a backward stays off, since it keeps some operators in fp32.
    """
    dtype = DTYPES[name]
    usual: Callable[[Any], Any] = torch.autocast.__enter__

    def enter(context: torch.autocast) -> Any:
        if context._enabled or context.device != device.type or _inside_a_module(sys._getframe(1)):
            return usual(context)
        with temporary_attribute(context, "_enabled", True), temporary_attribute(context, "fast_dtype", dtype):
            return usual(context)

    def mixed(batch: Any) -> Any:
        with temporary_attribute(torch.autocast, "__enter__", enter), torch.autocast(device.type, dtype=dtype):
            return step(batch)

    return mixed


def _inside_a_module(frame: FrameType | None) -> bool:
    """Was this called by a module, by autograd, or by what recomputes a forward?"""
    while frame is not None:
        code = frame.f_code
        if code is nn.Module._wrapped_call_impl.__code__ or code.co_name in CUSTOM or code.co_filename.startswith(AUTOGRAD):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, an operator on the CPU uses so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_counts() -> list[int]:
    """Numbers of threads to try: 1, 2, and the cores; not the present one."""
    cores = max(1, int(usable_cores()))
    return sorted({count for count in (1, 2, cores) if count <= cores} - {torch.get_num_threads()})


@contextlib.contextmanager
def frozen_schedules(objects: Sequence[Any]) -> Iterator[None]:
    """Inside, learning-rate schedules with a last step do not advance: experiments call the step more often than a training does."""
    with ExitStack() as undo:
        for schedule in objects:
            if isinstance(schedule, OneCycleLR):
                undo.enter_context(temporary_attribute(schedule, "step", _do_nothing))
        yield


def _do_nothing(*_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def temporary_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute has another value; afterwards the one it had, or none of its own."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def temporary_item(owner: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Inside, an item of a dictionary has another value."""
    before = owner[name]
    owner[name] = value
    try:
        yield
    finally:
        owner[name] = before


@contextlib.contextmanager
def changed_step(change: Mapping[str, Any], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Inside, the changes of a remedy that are no knobs of the loader are in force; `wrap_step` has those of each step."""
    with ExitStack() as undo:
        for name, value in change.items():
            if name == "optimizer":
                undo.enter_context(optimizer_implementation(optimizers, value))
            elif name == "precision":
                undo.enter_context(overflows_skipped(optimizers, value))
            elif name == "threads":
                undo.enter_context(threads(value))
            elif name == "channels_last" and value:
                undo.enter_context(channels_last(models, optimizers))
            elif name == "tf32" and value is not None:
                undo.enter_context(tf32(value))
            elif name == "deterministic" and value:
                undo.enter_context(deterministic())
            elif name == "gc" and not value:
                undo.enter_context(without_gc())
        yield


def wrap_step(step: Step, change: Mapping[str, Any], device: torch.device) -> Step:
    """The step with those changes that have to be made in each call."""
    if change.get("channels_last"):
        step = _after(to_channels_last, step)
    if change.get("precision", "fp32") != "fp32":
        step = in_precision(step, change["precision"], device)
    return step


def _after(first: Callable[[Any], Any], step: Step) -> Step:
    return lambda batch: step(first(batch))
