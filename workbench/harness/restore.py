"""Keep: the state of a step or of a loader, saved and put back bit for bit, in place, so that whoever holds a tensor holds the same one."""

import io
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from workbench.harness.discover import ReachableState, in_slots

MAX_ITEMS = 1_000_000
"""Longer containers are not put back: they hold data."""
MAX_BYTES = 2**30
"""Nor are tensors and arrays beyond so many bytes in all; weights, and what optimizers hold, are always."""

Undo = Callable[[], object]


class SavedState:
    """Saves when it is made; `restore` puts everything back.

    Kept are of modules the parameters, buffers, gradients (also that there was none) and the training mode; of optimizers the state and the
    options of the groups; what the attributes and slots of objects, the variables around the step and the globals that it assigns to stand
    for (what did not exist vanishes); the contents of containers, tensors and arrays; random generators.
    """

    def __init__(self, state: ReachableState, *, most_bytes: int = MAX_BYTES) -> None:
        """Save.

        Args:
            state: what to save.
            most_bytes: of tensors and arrays that are neither weights nor held by an optimizer.
        """
        self.left_out: list[str] = []
        """What cannot be put back, in words."""
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._undo: list[Undo] = []
        self._seen: dict[tuple[Any, int], Any] = {}  # the objects, too: an id is that of one of them only while it lives
        self._room = most_bytes
        self.add(state)

    def add(self, state: ReachableState) -> None:
        """Save more. What was saved before stays as it was then."""
        self.left_out += state.unread
        modules = [part for root in state.modules for part in root.modules()]
        weights = [one for part in modules for one in (*part._parameters.values(), *part._buffers.values()) if one is not None]
        weights += [one for optimizer in state.optimizers for group in optimizer.param_groups for one in group["params"]]
        optimizers = [one for one in state.objects if isinstance(one, Optimizer)]  # also those within others
        states = {id(leaf) for one in optimizers for leaf in tree_leaves(list(one.state.values()))}
        self._save(self._weight, weights)
        self._save(self._tensor, [one for one in state.tensors if id(one) in states])
        self._save(self._data, [*state.tensors, *state.arrays])
        self._save(_mode, modules)
        self._save(_contents, state.containers)
        self._save(_attributes, state.objects)
        self._save(_variable, state.cells)
        self._save(_generator, state.generators)
        self._undo += [partial(names.__setitem__, name, names[name]) for names, name in state.names]

    def restore_weights(self) -> None:
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

    # Saving: each of these gives the way back

    def _save(self, how: Callable[[Any], Undo], things: Iterable[Any]) -> None:
        for one in things:
            if (how.__name__, id(one)) in self._seen:
                continue
            self._seen[how.__name__, id(one)] = one
            try:
                with torch.no_grad():
                    self._undo.append(how(one))
            except Exception as error:
                self.left_out.append(f"a {type(one).__name__} ({error})")

    def _weight(self, tensor: torch.Tensor) -> Undo:
        return self._tensor(tensor, weight=True)

    def _data(self, one: "torch.Tensor | np.ndarray[Any, Any]") -> Undo:
        """A tensor or an array, as long as there is room for it."""
        if ("_memory", id(one)) in self._seen:
            return _nothing
        size = one.nbytes if getattr(one, "layout", torch.strided) == torch.strided else 0
        if size > self._room:
            raise ValueError(f"of {size / 2**20:.0f} MiB: too large")
        self._room -= size
        return self._tensor(one) if isinstance(one, torch.Tensor) else _array(one)

    def _tensor(self, tensor: torch.Tensor, *, weight: bool = False) -> Undo:
        """Its numbers, and its gradient."""
        undo = [self._memory(tensor, weight=weight)]
        if tensor.is_leaf:
            gradient, wanted = tensor.grad, tensor.requires_grad
            if gradient is not None and gradient.layout != torch.strided:
                gradient = gradient.clone()
            elif gradient is not None:
                undo.append(self._memory(gradient))
            undo += [partial(setattr, tensor, "grad", gradient), partial(tensor.requires_grad_, wanted)]
        return partial(_all, undo)

    def _memory(self, tensor: torch.Tensor, *, weight: bool = False) -> Undo:
        if ("_memory", id(tensor)) in self._seen or tensor.is_meta:
            return _nothing
        self._seen["_memory", id(tensor)] = tensor
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor: what lies here
        if tensor.layout != torch.strided:
            raise ValueError(f"its layout is {tensor.layout}")
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


def _nothing() -> None:
    pass


def _all(undos: list[Undo]) -> None:
    for one in undos:
        one()


def _mode(module: torch.nn.Module) -> Undo:
    """Whether it trains or is evaluated: of each part by itself."""
    return partial(vars(module).__setitem__, "training", module.training)


def _variable(cell: Any) -> Undo:
    return partial(setattr, cell, "cell_contents", cell.cell_contents)


def _array(array: "np.ndarray[Any, Any]") -> Undo:
    before = array.copy()

    def undo() -> None:
        if not np.array_equal(array, before):
            array[...] = before

    return undo


def _contents(container: Any) -> Undo:
    """Which items a list, dictionary, set or queue has."""
    if len(container) > MAX_ITEMS:
        return _nothing
    kind: Any = next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(container, kind))  # past what a subclass does
    fill, items = (kind.extend, iter) if kind in (list, deque) else (kind.update, kind.items if issubclass(kind, dict) else iter)
    before = list(items(container))

    def undo() -> None:
        now = list(items(container))
        if len(now) != len(before) or not all(map(_is, now, before)):
            kind.clear(container)
            fill(container, before)

    return undo


def _is(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, tuple) and len(one) == 2 == len(other) and one[0] is other[0] and one[1] is other[1])


def _attributes(one: Any) -> Undo:
    """What its attributes and slots stand for; those that it did not have vanish."""
    before, held = dict(getattr(one, "__dict__", {})), in_slots(one)

    def undo() -> None:
        now = getattr(one, "__dict__", {})
        for name in now.keys() - before.keys():
            del now[name]
        for name, value in before.items():
            if now.get(name, _nothing) is not value and not _closed(value):
                now[name] = value
        for slot in in_slots(one).keys() - held.keys():
            slot.__delete__(one)
        for slot, value in held.items():
            slot.__set__(one, value)

    return undo


def _closed(value: Any) -> bool:
    """Is it a file that was closed since? The one that took its place is of more use."""
    return isinstance(value, io.IOBase) and value.closed


def _generator(generator: Any) -> Undo:
    """The state of a random generator of torch, numpy or Python."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())
