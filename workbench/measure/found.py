"""What a step reaches: models, optimizers and other state behind its closure, defaults, `self` and the globals that it names."""

import dis
import functools
import inspect
import sys
import sysconfig
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

from workbench.measure.loaders import GENERATORS

MOST_OBJECTS = 20_000
"""So many objects are looked at; what lies beyond is not found."""
MOST_ITEMS = 1_000
"""Longer containers are no home of models: they hold data, and only themselves are kept."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is behind a step."""

    models: list[nn.Module] = field(default_factory=list)
    """Modules with parameters that are part of no other one found; DDP's wrapper rather than what it wraps."""
    modules: list[nn.Module] = field(default_factory=list)
    """All modules found that are part of no other one, losses included."""
    optimizers: list[Optimizer] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Tensors on their own."""
    objects: list[Any] = field(default_factory=list)
    """Objects of classes with attributes: schedulers, scalers, the user's own."""
    containers: list[Any] = field(default_factory=list)
    """Lists, dictionaries, sets and queues."""
    cells: list[types.CellType] = field(default_factory=list)
    """Variables of functions around the step."""
    names: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Global variables that the step's functions assign to."""
    generators: list[Any] = field(default_factory=list)
    """Random generators of torch, numpy and Python."""
    arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)


def find(*roots: Any, but: Iterable[Any] = ()) -> Found:
    """Everything that these objects reach, by walking over functions, containers and attributes; modules and optimizers end a path.

    Args:
        roots: the step, and what else is known.
        but: objects at which to stop, such as the loader.
    """
    found = Found()
    modules: list[nn.Module] = []
    seen = {id(one) for one in but}
    calls = [vars(kind).get("__call__") for root in roots if not isinstance(root, nn.Module) for kind in type(root).__mro__]
    todo: deque[Any] = deque([*roots, *(call for call in calls if isinstance(call, types.FunctionType))])
    alive: list[Any] = []  # an id is that of one object only while it lives
    while todo and len(seen) < MOST_OBJECTS:
        here = todo.popleft()
        if id(here) in seen or isinstance(here, _PLAIN):
            continue
        seen.add(id(here))
        alive.append(here)
        todo.extend(_visit(here, found, modules))
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    found.modules.extend(module for module in modules if id(module) not in inner)
    found.models.extend(module for module in found.modules if next(module.parameters(), None) is not None)
    return found


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


def _visit(here: Any, found: Found, modules: list[nn.Module]) -> Iterator[Any]:
    """Note one object, and give those behind it."""
    if isinstance(here, nn.Module):
        modules.append(here)
        yield from (value for name, value in vars(here).items() if not name.startswith("_"))
    elif isinstance(here, Optimizer):
        found.optimizers.append(here)
    elif isinstance(here, torch.Tensor):
        found.tensors.append(here)
    elif isinstance(here, GENERATORS):
        found.generators.append(here)
    elif isinstance(here, np.ndarray):
        found.arrays.append(here)
    elif isinstance(here, functools.partial):
        yield from (here.func, *here.args, *here.keywords.values())
    elif isinstance(here, types.MethodType):
        yield from (here.__self__, here.__func__)
    elif isinstance(here, types.FunctionType):
        yield from _behind_function(here, found)
    elif isinstance(here, Mapping | list | tuple | set | frozenset | deque):
        if isinstance(here, dict | list | set | deque):
            found.containers.append(here)
        if len(here) <= MOST_ITEMS:
            yield from here.values() if isinstance(here, Mapping) else here
    elif isinstance(here, DataLoader | Dataset | Sampler):
        pass  # the loader's state is kept by the Feed
    elif isinstance(getattr(here, "__dict__", None), dict) and _is_of_users(type(here)):
        found.objects.append(here)
        yield from vars(here).values()


def _behind_function(function: types.FunctionType, found: Found) -> Iterator[Any]:
    if not _is_users(function.__module__):
        return
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):
        yield function
        return
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        found.cells.append(cell)
        yield value
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in function.__globals__:
                yield function.__globals__[name]
            elif instruction.opname == "STORE_GLOBAL" and name in function.__globals__:
                found.names.append((function.__globals__, name))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_of_users(kind: type) -> bool:
    """Is it a class whose objects may hold training state? Those of torch are (schedulers, scalers); those of Python itself are not."""
    return _is_users(kind.__module__) or kind.__module__.startswith(("torch.optim", "torch.amp", "torch.cuda.amp"))


_LIBRARIES = tuple({path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(name))})
_STATEFUL = ("accelerate", "torchmetrics", "transformers", "lightning", "pytorch_lightning", "ema_pytorch", "timm")
"""Installed packages whose objects hold training state."""


@functools.cache
def _is_users(module: str | None) -> bool:
    """Is this module the user's own code, and not an installed package's?"""
    name = module or "__main__"
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return False
    if top in _STATEFUL or name.startswith("workbench.train"):
        return True
    if top == "workbench":  # clocks and files: what was measured or written stays
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or not str(file).startswith(_LIBRARIES)


def describe(value: Any) -> str:
    """A word for a note: the class of a model, of what it wraps, or of an optimizer.

    >>> describe(nn.Linear(2, 1))
    'Linear'
    """
    inner = getattr(value, "module", None)
    return f"{type(value).__name__}({type(inner).__name__})" if isinstance(inner, nn.Module) else type(value).__name__


def name_of(step: Callable[..., Any]) -> str:
    """How to call a step in a message."""
    return getattr(step, "__qualname__", None) or type(step).__name__
