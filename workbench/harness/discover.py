"""Discovers what a step or a loader reaches: models, optimizers and other state behind its closure, defaults, `self` and globals."""

import contextlib
import dis
import functools
import inspect
import io
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from workbench.core.package import is_users

MAX_OBJECTS = 50_000
"""The most objects that are visited."""
MAX_ITEMS = 1_000
"""Containers with more items hold data, not models: their items are not visited."""
CONTAINERS = (dict, list, set, deque)
"""Types of containers that can change."""
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


@dataclass(frozen=True, slots=True)
class ReachableState:
    """All that a step or a loader reaches and may change."""

    models: list[nn.Module] = field(default_factory=list)
    """Modules with parameters that are part of no other reached module; DDP's wrapper rather than what it wraps."""
    modules: list[nn.Module] = field(default_factory=list)
    """All modules that are part of no other reached module, losses included."""
    optimizers: list[Optimizer] = field(default_factory=list)
    """Optimizers that are part of no other one."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Tensors on their own, and those that optimizers hold."""
    objects: list[Any] = field(default_factory=list)
    """Objects with attributes or slots: schedulers, scalers, samplers, the user's own, modules of the user's classes."""
    containers: list[Any] = field(default_factory=list)
    """Lists, dictionaries, sets and queues."""
    cells: list[types.CellType] = field(default_factory=list)
    """Variables of functions around the step."""
    names: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Global variables that the step's functions assign to."""
    generators: list[Any] = field(default_factory=list)
    """Random generators of torch, numpy and Python."""
    arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Descriptions of what has a state that cannot be read."""


def discover(*roots: Any, but: Iterable[Any] = (), data: bool = False) -> ReachableState:
    """Everything that these objects reach, by walking over functions, containers, attributes and slots.

    Args:
        roots: the step, and what else is known; or a loader.
        but: objects at which to stop, such as the loader.
        data: the roots are loaders. Then datasets and samplers are walked over, and models, optimizers and functions are not; for a step
            it is the other way round, and the random generators that everybody shares belong to it.
    """
    state = ReachableState()
    modules: list[nn.Module] = []
    seen = {id(excluded) for excluded in but}
    calls = [vars(kind).get("__call__") for root in roots if not isinstance(root, nn.Module) for kind in type(root).__mro__]
    todo: deque[Any] = deque([*roots, *(call for call in calls if isinstance(call, types.FunctionType)), *([] if data else _shared())])
    alive: list[Any] = []  # an id is that of one object only while it lives
    while todo and len(seen) < MAX_OBJECTS:
        here = todo.popleft()
        if id(here) in seen or isinstance(here, _PLAIN):
            continue
        seen.add(id(here))
        alive.append(here)
        try:
            todo.extend(_visit(here, state, modules, data))
        except Exception as error:  # code of the user's that runs when one looks
            state.unread.append(f"a {type(here).__name__} ({type(error).__name__}: {error})")
    if todo:
        state.unread.append(f"everything beyond {MAX_OBJECTS} objects")
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    state.modules.extend(module for module in modules if id(module) not in inner)
    state.models.extend(module for module in state.modules if next(module.parameters(), None) is not None)
    wrapped = {id(value) for optimizer in state.optimizers for value in vars(optimizer).values()}  # ZeRO holds the optimizer that it shards
    state.optimizers[:] = [optimizer for optimizer in state.optimizers if id(optimizer) not in wrapped]
    return state


_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    type(None),
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
)


def _shared() -> list[Any]:
    """The random generators of torch, of CUDA if it is in use (asking would start it), of numpy and of Python."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *devices, np.random.mtrand._rand, random._inst]


def _visit(here: Any, state: ReachableState, modules: list[nn.Module], data: bool) -> Iterator[Any]:
    """Note an object, and yield those that it reaches."""
    if isinstance(here, torch.Tensor):
        state.tensors.append(here)
    elif isinstance(here, GENERATORS):
        state.generators.append(here)
    elif isinstance(here, np.ndarray):
        state.arrays.append(here)
    elif isinstance(here, functools.partial):
        yield from (here.func, *here.args, *here.keywords.values())
    elif isinstance(here, types.MethodType):
        yield from (here.__self__, here.__func__)
    elif isinstance(here, nn.Module | Optimizer | types.FunctionType):
        if not data:
            yield from _behind_training(here, state, modules)
    elif isinstance(here, DataLoader | Dataset | Sampler):
        if data:
            state.objects.append(here)
            yield from (value for name, value in attributes(here).items() if name != "_iterator")
    else:
        if isinstance(here, CONTAINERS):
            state.containers.append(here)
        if isinstance(here, (*CONTAINERS, tuple, frozenset, types.MappingProxyType)) and len(here) <= MAX_ITEMS:
            yield from here.values() if isinstance(here, Mapping) else here
        if _holds_state(type(here)):
            own = attributes(here)
            state.objects.append(here)
            yield from own.values()
        elif isinstance(here, Iterator) and not isinstance(here, io.IOBase):
            state.unread.append(f"a {type(here).__name__}" + (f" ({here.__qualname__})" if isinstance(here, types.GeneratorType) else ""))


def _behind_training(here: Any, state: ReachableState, modules: list[nn.Module]) -> Iterator[Any]:
    """A module, whose weights are not noted one by one; an optimizer, whose state is; a function."""
    if isinstance(here, nn.Module):
        modules.append(here)
        state.containers.extend(held for held in (here._parameters, here._buffers, here._modules) if isinstance(held, dict))
        yield from here.children()
        yield from (hook for name in _HOOKS for hook in getattr(here, name, {}).values())
        if not type(here).__module__.startswith("torch."):  # DDP's reducer goes on, and its flags with it
            state.objects.append(here)
            yield from (value for name, value in attributes(here).items() if name not in _OF_MODULES)
    elif isinstance(here, Optimizer):
        state.optimizers.append(here)
        state.objects.append(here)
        state.containers.extend((here.state, here.param_groups))
        yield from here.state.values()
        yield from here.param_groups
        yield from (value for name, value in attributes(here).items() if name not in ("state", "param_groups"))
    else:
        yield from _behind_function(here, state)


_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


_HOOKS = tuple(name for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks") if name in _OF_MODULES)
"""Attributes that have the hooks that are called in a step: functions that may reach what nothing else does."""


def _behind_function(function: types.FunctionType, state: ReachableState) -> Iterator[Any]:
    if not _is_users(function.__module__):
        return
    state.containers.append(vars(function))
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):
        yield function
        return
    yield from vars(function).values()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        state.cells.append(cell)
        yield value
    for code in _codes(function.__code__):
        loaded: Any = None  # a module of the user's whose attributes may be read next
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if isinstance(loaded, types.ModuleType) and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and _is_users(loaded.__name__):
                loaded = vars(loaded).get(name)
                yield loaded
                continue
            loaded = None
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in function.__globals__:
                loaded = function.__globals__[name]
                yield loaded
            elif instruction.opname == "STORE_GLOBAL" and name in function.__globals__:
                state.names.append((function.__globals__, name))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def attributes(owner: Any) -> dict[str, Any]:
    """What an object has of its own: in its dictionary and in its slots."""
    return {slot.__name__: value for slot, value in in_slots(owner).items()} | getattr(owner, "__dict__", {})


def in_slots(owner: Any) -> dict[types.MemberDescriptorType, Any]:
    """The slots of an object that are filled, and what with."""
    held = {}
    for slot in _slots(type(owner)):  # type: ignore[arg-type]
        with contextlib.suppress(AttributeError):  # not assigned
            held[slot] = slot.__get__(owner)
    return held


@functools.cache
def _slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Those that a class and its bases declare by `__slots__`, also where a name is mangled or an assignment is forbidden."""
    declaring = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    return tuple(value for base in declaring for value in vars(base).values() if isinstance(value, types.MemberDescriptorType))


def _holds_state(kind: type) -> bool:
    """Is it a class whose objects may hold training state? Those of torch are (schedulers, scalers); those of Python itself are not."""
    torchs = kind.__module__.startswith(("torch.optim", "torch.amp", "torch.cuda.amp"))
    return torchs or _is_users(kind.__module__) or hasattr(kind, "state_dict")


_STATEFUL = ("accelerate", "torchmetrics", "transformers", "lightning", "pytorch_lightning", "ema_pytorch", "timm")
"""Installed packages whose objects hold training state."""


@functools.cache
def _is_users(module: str | None) -> bool:
    """Is this module the user's own code, and not an installed package's?"""
    name = module or "__main__"
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return False
    if top in _STATEFUL or name.startswith(("workbench.train", "workbench.programs")):
        return True
    if top == "workbench":  # clocks and files: what was measured or written stays
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or is_users(str(file))


def describe(value: Any) -> str:
    """A name for notes: the class of a model (of the wrapped one, if it is a wrapper) or of an optimizer.

    >>> describe(nn.Linear(2, 1))
    'Linear'
    """
    inner = getattr(value, "module", None)
    return f"{type(value).__name__}({type(inner).__name__})" if isinstance(inner, nn.Module) else type(value).__name__


def is_compiled(model: nn.Module) -> bool:
    """Is this model, or a module in it, compiled as a whole?"""
    return any("_orig_mod" in part._modules or getattr(part, "_compiled_call_impl", None) for part in model.modules())


def name_of(step: Callable[..., Any]) -> str:
    return getattr(step, "__qualname__", None) or type(step).__name__
