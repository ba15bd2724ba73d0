"""Keep: the state of a training step, saved and put back bit for bit, in place, so that whoever holds a tensor holds the same one."""

import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from workbench.measure.found import Found
from workbench.measure.loaders import set_state_of, state_of

MOST_ITEMS = 10_000
"""Longer containers of the user's own are not put back: they hold data."""
MOST_BYTES = 2**26
"""Larger arrays are not put back either."""
MOST_DATA = 2**30
"""Nor larger tensors that are no weights: they hold data."""
MOST_DEPTH = 6
"""How deep containers are followed."""
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_CONTAINERS = (dict, list, set, deque)

Undo = Callable[[], None]


class Keep:
    """Saves when it is made; `restore` puts everything back.

    Kept are of modules the parameters, buffers, gradients (also that there was none) and the training mode; of optimizers the state (what
    did not exist vanishes) and the options of the groups; plain values, tensors and containers in the attributes of schedulers, scalers
    and the step's own objects, in variables around the step and in globals that it assigns to; random generators of torch, CUDA, numpy
    and Python.
    """

    def __init__(self, found: Found) -> None:
        """Save.

        Args:
            found: what to keep.
        """
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._undo: list[Undo] = []
        self._seen: set[int] = set()
        with torch.no_grad():
            for module in found.modules:
                self._keep_module(module)
            for optimizer in found.optimizers:
                self._keep_optimizer(optimizer)
            for tensor in found.tensors:
                self._keep_tensor(tensor)
            for container in found.containers:
                if len(container) <= MOST_ITEMS:
                    self._undo.append(self._saved(container))
            for one in found.objects:
                self._keep_object(one)
        self._undo += [_array(one) for one in found.arrays if one.nbytes <= MOST_BYTES and one.dtype != object]
        self._undo += [_setter(cell, "cell_contents", cell.cell_contents) for cell in found.cells]
        for names, name in found.names:
            self._undo.append(_item_setter(names, name, names[name]))
        self._undo += [_generator(one) for one in found.generators]
        self._undo.append(_random_state())

    def rewind(self) -> None:
        """Put back the values of parameters and buffers only: the experiments must not train a model to where numbers are denormal."""
        with torch.no_grad():
            for tensor, value in self._weights:
                tensor.copy_(value)

    def restore(self) -> None:
        """Put everything back. What cannot be does not keep the rest from being so; a warning names it."""
        failed: list[Exception] = []
        with torch.no_grad():
            for undo in reversed(self._undo):
                try:
                    undo()
                except Exception as error:
                    failed.append(error)
        if failed:
            warnings.warn(f"after the experiments {len(failed)} things could not be put back, the first: {failed[0]}", stacklevel=2)

    # Saving

    def _saved(self, value: Any, depth: int = 0) -> Undo:
        """How to give a value (a tensor, a container) the contents that it has now."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._seen or depth > MOST_DEPTH:
            return _nothing
        self._seen.add(id(value))
        if isinstance(value, tuple):
            inner = [self._saved(part, depth + 1) for part in value if isinstance(part, (torch.Tensor, tuple, *_CONTAINERS))]
            return _all(inner)
        assert isinstance(value, _CONTAINERS)
        parts = list(value.values()) if isinstance(value, dict) else list(value)
        if len(parts) > MOST_ITEMS:
            return _nothing
        inner = [self._saved(part, depth + 1) for part in parts if isinstance(part, (torch.Tensor, tuple, *_CONTAINERS))]
        before = value.copy()

        def undo() -> None:
            if not _same(value, before):
                value.clear()
                value.extend(before) if isinstance(value, list | deque) else value.update(before)
            for one in inner:
                one()

        return undo

    def _tensor(self, tensor: torch.Tensor, *, weight: bool = False) -> Undo:
        if id(tensor) in self._seen:
            return _nothing
        self._seen.add(id(tensor))
        if tensor.layout != torch.strided or tensor.is_meta:
            return _nothing
        if not weight and tensor.nbytes > MOST_DATA:
            return _nothing
        memory = tensor.detach()  # the same memory: an experiment may give the tensor another one for a while
        for axis in range(memory.ndim):
            if memory.stride(axis) == 0 and memory.shape[axis] > 1:  # expanded: what lies there once can be written once only
                memory = memory.narrow(axis, 0, 1)
        strides, shape = tensor.stride(), tensor.shape
        value = memory.to("cpu", copy=True)
        if weight:
            self._weights.append((tensor if memory.shape == tensor.shape else memory, value))

        def undo() -> None:
            if tensor.data_ptr() != memory.data_ptr() or tensor.stride() != strides or tensor.shape != shape:
                tensor.data = memory.expand(shape)
            if not torch.equal(memory.to("cpu"), value):  # else leave it alone: it may lie in a file that can only be read
                memory.copy_(value)

        return undo

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        self._undo.append(self._tensor(tensor))
        self._keep_gradient(tensor)

    def _keep_gradient(self, tensor: torch.Tensor) -> None:
        if not tensor.is_leaf:
            return
        gradient = tensor.grad
        if gradient is None:
            self._undo.append(_setter(tensor, "grad", None))
        elif gradient.layout != torch.strided:
            self._undo.append(_setter(tensor, "grad", gradient.clone()))
        else:
            self._undo += [_setter(tensor, "grad", gradient), self._tensor(gradient)]

    def _keep_module(self, root: nn.Module) -> None:
        for module in root.modules():
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            self._undo.append(_item_setter(vars(module), "training", module.training))
            if not type(module).__module__.startswith("torch."):  # DDP's reducer goes on, and its flags with it
                self._keep_attributes(vars(module), but=("training",))
                self._undo.append(_vanish(vars(module), set(vars(module))))
            for owner in (module._parameters, module._buffers):
                for name, tensor in owner.items():
                    self._undo.append(_item_setter(owner, name, tensor))
                    if tensor is not None:
                        self._undo.append(self._tensor(tensor, weight=True))
                        self._undo.append(_setter(tensor, "requires_grad", tensor.requires_grad) if tensor.is_leaf else _nothing)
                        self._keep_gradient(tensor)

    def _keep_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._seen:
                    self._undo.append(self._tensor(parameter, weight=True))
                    self._keep_gradient(parameter)
        self._undo.append(self._saved(optimizer.param_groups))
        self._undo.append(self._saved(optimizer.state))
        self._keep_attributes(vars(optimizer), but=("state", "param_groups", "defaults"))

    def _keep_object(self, one: Any) -> None:
        if id(one) not in self._seen:
            self._seen.add(id(one))
            attributes = vars(one)
            self._keep_attributes(attributes)
            self._undo.append(_vanish(attributes, set(attributes)))

    def _keep_attributes(self, attributes: dict[str, Any], but: Iterable[str] = ()) -> None:
        for name, value in attributes.items():
            if name in but or name in _NEVER:
                continue
            if isinstance(value, _PLAIN):
                self._undo.append(_item_setter(attributes, name, value))
            elif isinstance(value, torch.Tensor):
                self._undo += [_item_setter(attributes, name, value), self._tensor(value)]
            elif isinstance(value, _CONTAINERS) and len(value) <= MOST_ITEMS:
                self._undo += [_item_setter(attributes, name, value), self._saved(value)]


_NEVER = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")
"""Attributes of a module that are kept otherwise."""


def _same(value: Any, before: Any) -> bool:
    """Has a container the very same items?"""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        pairs = zip(value.items(), before.items(), strict=True)
        return all(a is b and x is y for (a, x), (b, y) in pairs)
    if isinstance(value, set):
        return bool(value == before)
    return all(a is b for a, b in zip(value, before, strict=True))


def _nothing() -> None:
    pass


def _all(undos: list[Undo]) -> Undo:
    def undo() -> None:
        for one in undos:
            one()

    return undo


def _setter(owner: Any, name: str, value: Any) -> Undo:
    def undo() -> None:
        if getattr(owner, name) is not value:
            setattr(owner, name, value)

    return undo


def _item_setter(owner: dict[str, Any], name: str, value: Any) -> Undo:
    def undo() -> None:
        if owner.get(name, types) is not value:
            owner[name] = value

    return undo


def _vanish(attributes: dict[str, Any], names: set[str]) -> Undo:
    """Values that were made on the way; anything else (a lazily opened file) stays."""

    def undo() -> None:
        for name in [name for name in attributes if name not in names]:
            if isinstance(attributes[name], (torch.Tensor, *_PLAIN, *_CONTAINERS)):
                del attributes[name]

    return undo


def _generator(generator: Any) -> Undo:
    state = state_of(generator)

    def undo() -> None:
        set_state_of(generator, state)

    return undo


def _array(array: "np.ndarray[Any, Any]") -> Undo:
    before = array.copy()

    def undo() -> None:
        if array.flags.writeable:
            array[...] = before

    return undo


def _random_state() -> Undo:
    """Of torch, of CUDA if it is in use (asking would start it), of numpy if it is loaded, and of Python."""
    host, python = torch.get_rng_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy else None

    def undo() -> None:
        torch.set_rng_state(host)
        random.setstate(python)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        if numpy:
            numpy.random.set_state(arrays)

    return undo
