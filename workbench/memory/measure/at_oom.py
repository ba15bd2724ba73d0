"""Describes what tensors this process holds when memory runs out, and which of them autograd keeps for a backward."""

import contextlib
import re
import resource
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from workbench.core import gc as collector
from workbench.core.package import is_users
from workbench.memory.measure.recorder import storages
from workbench.runs.errors import LIBRARY_FAILED, OUT_OF_DEVICE_MEMORY
from workbench.runs.out_of_memory import Held, HeldBy

MOST_HOLDERS = 40
"""Holders that are recorded, the largest."""


def held(error: BaseException) -> Held:
    """Describe all live tensors: parameters, gradients, optimizer states, what autograd keeps, and all other tensors.

    Args:
        error: that memory has run out; it still keeps alive what lived then.
    """
    device = "cpu" if on_host(error) else "cuda"
    modules, optimizers, tensors = _living()
    stock = _Stock(device)
    names = _names(modules)
    owners: dict[int, str] = {}
    for module, name in names.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = name
                stock.add(parameter, "parameters", name)
                stock.add(parameter.grad, "gradients", name)
        for buffer in module._buffers.values():
            stock.add(buffer, "buffers", name)
    for optimizer in optimizers:
        for weight, state in list(optimizer.state.items()):
            for value in tree_leaves(state):
                if isinstance(value, Tensor):
                    stock.add(value, "optimizer_states", owners.get(id(weight), type(optimizer).__name__))
    for node, tensor in saved(tensors):
        stock.add(tensor, "activations", name_of(node))
    for tensor in tensors:
        stock.add(tensor, "activations" if tensor.grad_fn is not None else "other", _shape(tensor))
    phase, running, line = _where(error, names)
    return Held(
        groups=stock.groups,
        holders=stock.holders[:MOST_HOLDERS],
        module=running,
        phase=phase,
        line=line,
        available=_available() if device == "cpu" else None,
    )


def on_host(error: BaseException) -> bool:
    """Is it main memory that ran out, and not a device's?"""
    return not isinstance(error, torch.OutOfMemoryError) and re.search(f"{OUT_OF_DEVICE_MEMORY}|{LIBRARY_FAILED}", str(error)) is None


class _Stock:
    """Storages, each counted once, under the first name that it is given."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._seen: set[int] = set()
        self._held: dict[tuple[str, str], list[int]] = defaultdict(list)

    def add(self, tensor: Tensor | None, group: str, name: str) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # kinds of tensor that have no storage
            for storage in storages(tensor) if tensor is not None else ():
                if storage._cdata not in self._seen and storage.device.type == self._device:
                    self._seen.add(storage._cdata)
                    self._held[group, name].append(storage.nbytes())

    @property
    def groups(self) -> dict[str, int]:
        sizes_of: dict[str, int] = defaultdict(int)
        for (group, _), sizes in self._held.items():
            sizes_of[group] += sum(sizes)
        return {group: size for group, size in sizes_of.items() if size}

    @property
    def holders(self) -> list[HeldBy]:
        held = [HeldBy(group=group, name=name, bytes=sum(sizes), count=len(sizes)) for (group, name), sizes in self._held.items()]
        return sorted((holder for holder in held if holder.bytes), key=lambda holder: -holder.bytes)


def _living() -> tuple[list[nn.Module], list[Optimizer], list[Tensor]]:
    modules: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    tensors: list[Tensor] = []
    for value in collector.live_objects():
        kind = type(value)  # not isinstance, which asks proxies what they are
        if issubclass(kind, Tensor):
            tensors.append(value)
        elif issubclass(kind, nn.Module):
            modules.append(value)
        elif issubclass(kind, Optimizer):
            optimizers.append(value)
    return modules, optimizers, [tensor for tensor in tensors if not tensor.is_meta]


def _names(modules: list[nn.Module]) -> dict[nn.Module, str]:
    """A module's name in the outermost one that it is part of; wrappers such as DDP's do not show."""
    inner = {id(child) for module in modules for child in module._modules.values()}
    names: dict[nn.Module, str] = {}
    for module in modules:
        if id(module) not in inner:
            for name, part in module.named_modules():
                if names.get(part) is None:
                    names[part] = name.removeprefix("module.") if name != "module" else ""
    return {module: name or type(module).__name__ for module, name in names.items()}


def _where(error: BaseException, names: dict[nn.Module, str]) -> tuple[str | None, str | None, str | None]:
    """Phase, innermost module, and line of the user's code."""
    phase = module = None
    for frame in _frames(error):
        owner = frame.f_locals.get("self")
        name = frame.f_code.co_name
        if isinstance(owner, Optimizer) and name == "step":
            phase = "optimizer"
        elif name == "backward" and "autograd" in frame.f_code.co_filename:
            phase = "backward"
        elif (
            isinstance(owner, nn.Module)
            and name == "forward"
            and type(owner).__name__ not in ("DistributedDataParallel", "OptimizedModule")
        ):
            phase = phase or "forward"
            kind, known = type(owner).__name__, names.get(owner)
            module = kind if known in (None, kind) else f"{known} ({kind})"
    return phase, module, _line(error)


def _frames(error: BaseException) -> Iterator[FrameType]:
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame
        at = at.tb_next


def _line(error: BaseException) -> str | None:
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(entry.filename) and not entry.filename.startswith("<"):
            return f"{Path(entry.filename).name}:{entry.lineno}: {entry.line}"
    return None


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _available() -> int | None:
    """Main memory that is left, of the machine or of this process's limit, whichever is less."""
    left: list[int] = []
    facts: dict[str, str] = {}
    for place in ("/proc/meminfo", "/proc/self/status"):
        with contextlib.suppress(OSError):
            for line in Path(place).read_text().splitlines():
                name, _, value = line.partition(":")
                facts[name] = value
    if "MemAvailable" in facts:
        left.append(1024 * int(facts["MemAvailable"].split()[0]))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and "VmSize" in facts:
        left.append(limit - 1024 * int(facts["VmSize"].split()[0]))
    return max(0, min(left)) if left else None


MOST_NODES = 200_000
"""Most nodes of a graph that are visited."""
_RAW = "_raw_saved_"

_saved_names: dict[type, tuple[str, ...]] = {}
"""Kind of node → its attributes with saved tensors."""


def saved(roots: Iterable[Tensor]) -> Iterator[tuple[Any, Tensor]]:
    """Each node behind these tensors, with a tensor that it keeps. Nothing is computed again: of checkpointing there is only a recipe."""
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set()
    while todo and len(seen) < MOST_NODES:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions if before is not None]
        for tensor in kept_by(node):
            yield node, tensor


def kept_by(node: Any) -> Iterator[Tensor]:
    """The tensors that one node keeps."""
    if type(node) not in _saved_names:
        _saved_names[type(node)] = tuple(name for name in dir(node) if name.startswith(_RAW))
    for name in _saved_names[type(node)]:
        try:
            value = getattr(node, name)
            for item in value if isinstance(value, list | tuple) else (value,):
                tensor = getattr(item, "data", None)
                if isinstance(tensor, Tensor):
                    yield tensor
        except RuntimeError:  # the backward has been there, and has let it go
            continue


def name_of(node: Any) -> str:
    """The operator whose backward a node is.

    >>> import torch
    >>> name_of(torch.ones(2, requires_grad=True).relu().grad_fn)
    'relu'
    """
    words = str(node.name()).removesuffix("Backward").rstrip("0123456789").removesuffix("Backward")
    return words[:1].lower() + words[1:]
