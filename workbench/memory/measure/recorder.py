"""Recorder: writes every allocation, resizing and free of a training step's storages into a MemoryLog, on real or fake tensors.

Gradients of a tensor that is used more than once are added up by autograd's engine. It does so in place if nothing else holds the first of
them and no dispatch mode is on; a Recorder is one, so the engine makes a new tensor for each sum, and holds one gradient too many.
GradientAccumulationProbe finds these sums, and the log counts them as in place. Source: `InputBuffer::accumulate`,
`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp; `isTensorSubclassLike` in aten/src/ATen/TensorSubclassLikeUtils.h.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from workbench.core import interrupts
from workbench.memory.analysis.log import ALLOC, FREE, MARK, RESIZE, Event, Mark, MemoryLog, Record
from workbench.memory.measure.module_tracker import ModuleTracker, compiled_modules

TRAINER_PHASES = {
    "h2d": ("data", "data"),
    "forward": ("forward", "forward"),
    "backward": ("backward", "between"),
    "optimizer": ("optimizer", "end"),
}
"""Phase of a Trainer → the phase of the log that begins with it, and the one that begins after it."""


_name = functools.cache(str)
"""Of an operator."""
NO_AVERAGES: Mapping[str, Tensor] = MappingProxyType({})
"""Of a training that averages no parameters."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage while it is active; enter it, and `hooks()` inside of it.

    Say where the steps are with `mark`, or let a Trainer say it (`trainer.phase = recorder.phase`). Between steps count `step` up. Garbage
    collection should be off (`core.gc.collected_before`): storages that die in cycles would do so at moments that differ from run to run.

    Attributes:
        log: what has been written so far.
        step: optimizer step, from 0.
        micro: forward and backward, counted over all steps; `phase` counts it up.
        tracker: which module is running; where an error came from.
    """

    def __init__(self, model: nn.Module | None = None, *, device: str | None = None, host_counters: bool = False) -> None:
        """Begin a log.

        Args:
            model: whose modules are named and whose parameters and buffers are recognised; may be given later, by `attach`.
            device: only storages on devices of this type ("cuda") are recorded; None = all.
            host_counters: leave out the optimizers' step counters: those of an ordinary optimizer stay in the host's memory, and where
                fake CPU tensors replace a GPU's, they cannot be recognised by their device.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = MemoryLog()
        self.step = self.micro = 0
        self.tracker = ModuleTracker()
        self._device, self._host_counters = device, host_counters
        self._phase = "init"
        self._live: dict[int, int] = {}  # address of a storage → index of its record
        self._sizes: list[int] = []  # bytes of each record now
        self._parameters: list[nn.Parameter] = []
        self._owners: dict[int, str] = {}  # id of a parameter → name of the first module that has it
        self._hooks: Sequence[tuple[Any, Any]] = ()
        self._elsewhere: set[int] = set()
        self._paused = 0
        self._closed = False
        self._mode = fake_mode()
        self._accumulation = GradientAccumulationProbe()
        if model is not None:
            self.attach(model)

    def attach(self, model: nn.Module, averages: Mapping[str, Tensor] = NO_AVERAGES, hooks: Sequence[tuple[Any, Any]] = ()) -> None:
        """Register a model's modules, parameters and buffers; call it again after they were replaced.

        Args:
            model: the model that is trained.
            averages: of its parameters, by their names; they count as buffers of their modules.
            hooks: DDP's communication hooks, with their states. What they keep is made in threads of the communication, where no operator
                is seen, so it is looked for after each backward and each step.
        """
        self._hooks = [*self._hooks, *hooks]
        self.log.modules.update(self.tracker.name(model))
        self._parameters = list(model.parameters())
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), name)
                self.track(parameter, "parameter", module=self._owners[id(parameter)])
            for buffer in module.buffers(recurse=False):
                self.track(buffer, "buffer", module=name)
        for name, average in averages.items():
            self.track(average, "buffer", module=name.rpartition(".")[0])

    def track(self, tensor: Tensor, category: str | None = None, op: str = "", module: str | None = None) -> None:
        """Record the storages of a tensor, unless they are known, and their `category`, if given.

        Args:
            tensor: of any kind; of a DTensor, its local part.
            category: a key of `vocabulary.CATEGORIES`; None = as before, or to be decided when the log is read.
            op: the operator that made it.
            module: whose it is, by name; None = as before, or the one at work.
        """
        for storage in storages(tensor):
            address, size = storage._cdata, storage.nbytes()
            index = self._live.get(address)
            if index is None:
                if self._paused or self._device not in (None, storage.device.type):
                    continue
                index = self._follow(storage, self.charge(size, category, op))
            record = self.log.records[index]
            record.category = category or record.category
            record.module = record.module if module is None else module
            self._resized(index, size)

    def charge(self, size: int, category: str | None = None, op: str = "") -> int:
        """Record bytes that are allocated now and belong to no known tensor, such as a workspace. Returns their record's index."""
        log, module = self.log, self.tracker.forward
        if category is None and self._phase == "backward":
            module, recomputed = self.tracker.backward()
            category = "recompute" if recomputed else "temp_backward"
        index = len(log.records)
        log.records.append(Record(size, category, self._phase, self.step, self.micro, module, op, len(log.events)))
        log.events.append(Event(ALLOC, index, size))
        self._sizes.append(size)
        return index

    def leave_out(self, tensor: Tensor) -> None:
        """Take the storages of a tensor out of the count, from their allocation on and until `bring`: they are elsewhere."""
        for storage in storages(tensor):
            index = self._live.get(storage._cdata)
            if index is None:
                index = self._follow(storage, self.charge(0, "other"))
            self._elsewhere.add(index)
            record = self.log.records[index]
            record.size = self._sizes[index] = 0
            self.log.events[record.allocated_at] = Event(ALLOC, index, 0)

    def bring(self, tensor: Tensor) -> None:
        """Count the storages of a tensor, which have been left out, from now on."""
        for storage in storages(tensor):
            if (index := self._live.get(storage._cdata)) in self._elsewhere:
                self._elsewhere.remove(index)
                self._resized(index, storage.nbytes())

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Has it been left out?"""
        return any(self._live.get(storage._cdata) in self._elsewhere for storage in storages(tensor))

    @property
    def now(self) -> str:
        return self._phase

    def mark(self, phase: str) -> None:
        """Begin a phase (of `memory.log.PHASES`) of the present step and micro-step, unless it has begun."""
        mark = Mark(phase, self.step, self.micro)
        if self.log.marks and mark == self.log.marks[-1]:
            return
        if phase in ("between", "optimizer", "end"):
            for parameter in self._parameters:
                self._has_gradient(parameter)
            self._find_kept_by_hooks()
        interrupts.deliver_interrupt()
        if phase == "forward":
            self.tracker.begin_forward()
        self._phase = phase
        self.log.events.append(Event(MARK, len(self.log.marks), 0))
        self.log.marks.append(mark)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of a Trainer ("h2d", "forward", "backward", "optimizer"), marked at both ends; a backward's end ends a micro-step."""
        begins, then = TRAINER_PHASES[name]
        self.mark(begins)
        yield
        self.mark(then)
        self.micro += name == "backward"

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no allocation is recorded; frees still are."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled modules run as they are compiled. With False, torch would run them eagerly under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorded(func, types, args, kwargs)

    def recorded(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and record what it has made."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of tensors unwraps itself: those come back here
        in_place = self._phase in ("init", "backward") and self._accumulation.in_place(func, args, kwargs)
        out = self.call(func, args, kwargs or {})
        if in_place:
            self._hand_over(args[0], out)
        if not self._paused and fake_mode() is self._mode:
            for value in tree_leaves(out):
                if isinstance(value, Tensor):
                    self.track(value, op=_name(func))
        return out

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        with self.pause():
            self._accumulation.learn()
        return entered

    def _hand_over(self, tensor: Tensor, heir: Tensor) -> None:
        """Transfer a tensor's storage record to the tensor that replaces it."""
        if (index := self._live.pop(tensor.untyped_storage()._cdata, None)) is not None:
            self._follow(heir.untyped_storage(), index)

    def around_compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a compiled module; a subclass may return another."""
        return call

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; a subclass may return another result."""
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, modules, gradients, optimizer steps and resizings are recorded."""
        outer: list[str] = []  # a stack: ZeroRedundancyOptimizer steps the optimizer inside of it

        def begin(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            outer.append(self._phase)
            self.mark("optimizer")
            self._paused += self._on_host(optimizer)

        def end(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            self._recognise_states(optimizer)
            self._paused -= self._on_host(optimizer)
            self.mark(outer.pop())

        handles: list[Any] = [*self.tracker.hooks(), register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
        for parameter in self._parameters:
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._has_gradient))  # type: ignore[no-untyped-call]
        try:
            with resizes(self._resize), propagations(self.pause), compiled_modules(self, around=self.around_compiled):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def recognise_unsharded(self, model: nn.Module) -> None:
        """Say which storages hold FSDP2's gathered parameters: call it while they are known, such as after the last step."""
        for tensor in unsharded(model):
            for storage in storages(tensor):
                if (index := self._live.get(storage._cdata)) is not None:
                    self.log.records[index].category = "unsharded_parameter"

    def forget(self, events: int) -> None:
        """Leave out all from a position of the log's events on, as of a step that was interrupted."""
        gone = self.log.events[events:]
        rows: dict[int, list[Any]] = {ALLOC: self.log.records, MARK: self.log.marks}
        del self.log.events[events:]
        for kind, those in rows.items():
            del those[min((event.index for event in gone if event.kind == kind), default=len(those)) :]
        self._live = {address: index for address, index in self._live.items() if index < len(self.log.records)}
        for record in self.log.records:
            record.freed_at = None if (record.freed_at or 0) >= events else record.freed_at

    def close(self) -> None:
        """End the steps: later frees do not belong to them."""
        self._closed = True

    def _has_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if self._elsewhere and self.is_elsewhere(parameter):
            self.leave_out(parameter.grad)
        else:
            self.track(parameter.grad, "gradient", module=self._owners.get(id(parameter)))

    def _find_kept_by_hooks(self) -> None:
        for _, state in self._hooks:
            for kept in (getattr(state, name, {}) for name in ("error_dict", "p_memory_dict", "q_memory_dict")):
                for tensor in kept.values():
                    self.track(tensor, "temp_backward")

    def _on_host(self, optimizer: Optimizer) -> bool:
        """Does it update tensors that are left out, so that its results are as well?"""
        return any(self.is_elsewhere(parameter) for group in optimizer.param_groups for parameter in group["params"][:1])

    def _recognise_states(self, optimizer: Optimizer) -> None:
        on_device = {name for group in optimizer.param_groups for name in ("fused", "capturable") if group.get(name)}
        for parameter, state in list(optimizer.state.items()):
            for value in tree_leaves(state):
                if not isinstance(value, Tensor):
                    continue
                if self._host_counters and not on_device and value is state.get("step"):
                    self.leave_out(value)
                else:
                    self.track(value, "optimizer_state", module=self._owners.get(id(parameter)))

    def _resize(self, storage: torch.UntypedStorage) -> None:
        if (index := self._live.get(storage._cdata)) is not None:
            self._resized(index, storage.nbytes())

    def _resized(self, index: int, size: int) -> None:
        if size != self._sizes[index] and index not in self._elsewhere:
            self._sizes[index] = size
            record = self.log.records[index]
            record.size = max(record.size, size)
            self.log.events.append(Event(RESIZE, index, size))

    def _follow(self, storage: torch.UntypedStorage, index: int) -> int:
        """Note when a storage is freed, whose record this is. Python keeps a finalizer, and all it knows of, for as long as the storage."""
        self._live[storage._cdata] = index
        weakref.finalize(storage, _freed, weakref.ref(self), storage._cdata, index).atexit = False
        return index


def fake_mode() -> Any:
    """The mode that makes tensors fake here; None = they are real."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _freed(recorder: "weakref.ref[Recorder]", address: int, index: int) -> None:
    writer = recorder()
    if writer is not None and writer._live.get(address) == index and not writer._closed:
        del writer._live[address]
        writer.log.records[index].freed_at = len(writer.log.events)
        writer.log.events.append(Event(FREE, index, 0))


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The plain storages behind a tensor: one, or those of the tensors that it is made of (a DTensor has its local part)."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from storages(inner)
    elif tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout == torch.sparse_coo:
        yield from (part.untyped_storage() for part in (tensor._indices(), tensor._values()))


Holders = tuple[int, int, int]
NOBODY: Holders = (0, 0, 0)
"""Value if this torch does not report it."""


def holders_of(tensor: Any) -> Holders:
    """How many hold a tensor in C++, its storage, and the tensor in Python, as seen from the handling of an operator."""
    if not (hasattr(tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")):
        return NOBODY
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), sys.getrefcount(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Are its elements contiguous, in any order of dimensions?

    >>> is_dense(torch.zeros(2, 3).t()), is_dense(torch.zeros(2, 1).expand(2, 3))
    (True, False)
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class GradientAccumulationProbe:
    """Finds the sums that autograd's engine makes, and which of them would be in place."""

    def __init__(self) -> None:
        self._alone: Holders | None = None  # holders of a gradient that only the engine has
        self._learning = False

    def learn(self) -> None:
        """Count the holders of gradients once, in a graph where nothing else holds them; outside of operators, and not recorded."""
        if self._alone is not None:
            return
        self._learning = True
        with torch.enable_grad():
            used_twice = torch.zeros(2, 2, requires_grad=True) * 1.0
            ((used_twice * 2) + (used_twice * 3)).sum().backward()  # type: ignore[no-untyped-call]
        self._learning = False
        self._alone = self._alone or NOBODY

    def in_place(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Would the engine add the second argument to the first in place? Ask in a backward, before the operator runs."""
        if func is not torch.ops.aten.add.Tensor or kwargs or len(args) != 2 or torch.is_grad_enabled():
            return False
        first, second = args
        if not (isinstance(first, Tensor) and isinstance(second, Tensor)) or first.shape != second.shape or first.dtype != second.dtype:
            return False
        if self._learning:
            self._alone = self._alone or holders_of(first)
            return False
        if first.layout != torch.strided or self._alone in (None, NOBODY):
            return False
        return holders_of(first) == self._alone and is_dense(first)


@contextlib.contextmanager
def resizes(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `seen` is called after each `storage.resize_()`: FSDP2 frees and takes its gathered parameters so, and no operator runs."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        seen(storage)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextlib.contextmanager
def propagations(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, `around` is entered while a DTensor works out how a result is sharded: it does so on fake tensors of the *global* shape."""
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator.propagate_op_sharding_non_cached

    def apart(*args: Any, **kwargs: Any) -> Any:
        with around():
            return propagate(*args, **kwargs)

    ShardingPropagator.propagate_op_sharding_non_cached = apart  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator.propagate_op_sharding_non_cached = propagate  # type: ignore[method-assign]


def unsharded(model: nn.Module) -> Iterator[Tensor]:
    """The tensors into which FSDP2 gathers the parameters of a model."""
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state: Any = getattr(module, "_get_fsdp_state")()  # noqa: B009 (mypy takes an unknown attribute of a module for a tensor)
        group = state._fsdp_param_group
        for parameter in group.fsdp_params if group else ():
            yield from getattr(parameter, "all_gather_outputs", ())
