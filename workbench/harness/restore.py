"""Saves the state of a step or a loader and restores it bit for bit, in place, so that references to tensors stay valid."""

import contextlib
import gc
import io
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from workbench.harness.discover import ReachableState, discover, in_slots

MAX_ITEMS = 1_000_000
"""Containers with more items are not restored: they hold data."""
MAX_BYTES = 2**30
"""Tensors and arrays beyond so many bytes in all are not restored. Weights, and what optimizers hold, always are."""

Undo = Callable[[], object]


class SavedState:
    """A copy of reachable state, made when it is created; `restore` puts everything back.

    Saved are, of modules, the parameters, buffers, gradients (also that there was none) and the training mode; of optimizers the state and
    the options of the groups; the values of objects' attributes and slots, of the variables around the step and of the globals that it
    assigns to (what did not exist is removed again); the contents of containers, tensors and arrays; random generators.
    """

    def __init__(self, state: ReachableState, *, most_bytes: int = MAX_BYTES) -> None:
        """Save.

        Args:
            state: what to save.
            most_bytes: of tensors and arrays that are neither weights nor held by an optimizer.
        """
        self.left_out: list[str] = []
        """What cannot be restored, in words."""
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._undo: list[Undo] = []
        self._seen: dict[tuple[Any, int], Any] = {}  # the objects, too: an id is that of one of them only while it lives
        self._bytes_left = most_bytes
        self.add(state)

    def add(self, state: ReachableState) -> None:
        """Save more state. What was saved before is not saved again."""
        self.left_out += state.unread
        modules = [part for root in state.modules for part in root.modules()]
        weights = [weight for part in modules for weight in (*part._parameters.values(), *part._buffers.values()) if weight is not None]
        weights += [weight for optimizer in state.optimizers for group in optimizer.param_groups for weight in group["params"]]
        optimizers = [value for value in state.objects if isinstance(value, Optimizer)]  # also those within others
        states = {id(leaf) for optimizer in optimizers for leaf in tree_leaves(list(optimizer.state.values()))}
        self._save(self._weight, weights)
        self._save(self._tensor, [tensor for tensor in state.tensors if id(tensor) in states])
        self._save(self._data, [*state.tensors, *state.arrays])
        self._save(_mode, modules)
        self._save(_contents, state.containers)
        self._save(_attributes, state.objects)
        self._save(lambda cell: partial(setattr, cell, "cell_contents", cell.cell_contents), state.cells)
        self._save(_generator, state.generators)
        self._undo += [partial(names.__setitem__, name, names[name]) for names, name in state.names]

    def restore_weights(self) -> None:
        """Put back the values of parameters and buffers only, so that experiments do not train the model until numbers are denormal."""
        with torch.no_grad():
            for tensor, value in self._weights:
                tensor.copy_(value)

    def restore(self) -> None:
        """Put everything back. Where that fails for something, the rest is restored all the same, and a warning names it."""
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
        for thing in things:
            if (how.__name__, id(thing)) in self._seen:
                continue
            self._seen[how.__name__, id(thing)] = thing
            try:
                with torch.no_grad():
                    self._undo.append(how(thing))
            except Exception as error:
                self.left_out.append(f"a {type(thing).__name__} ({error})")

    def _weight(self, tensor: torch.Tensor) -> Undo:
        return self._tensor(tensor, weight=True)

    def _data(self, values: "torch.Tensor | np.ndarray[Any, Any]") -> Undo:
        """Save a tensor or an array, as long as the limit of bytes allows it."""
        if ("_memory", id(values)) in self._seen:
            return _nothing
        size = values.nbytes if getattr(values, "layout", torch.strided) == torch.strided else 0
        if size > self._bytes_left:
            raise ValueError(f"of {size / 2**20:.0f} MiB: too large")
        self._bytes_left -= size
        return self._tensor(values) if isinstance(values, torch.Tensor) else _array(values)

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
    for undo in undos:
        undo()


def _mode(module: torch.nn.Module) -> Undo:
    """Whether it trains or is evaluated: of each part by itself."""
    return partial(vars(module).__setitem__, "training", module.training)


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


def _is(left: Any, right: Any) -> bool:
    return left is right or (isinstance(left, tuple) and len(left) == 2 == len(right) and left[0] is right[0] and left[1] is right[1])


def _attributes(owner: Any) -> Undo:
    """What its attributes and slots stand for; those that it did not have vanish."""
    before, held = dict(getattr(owner, "__dict__", {})), in_slots(owner)

    def undo() -> None:
        now = getattr(owner, "__dict__", {})
        for name in now.keys() - before.keys():
            del now[name]
        for name, value in before.items():
            if now.get(name, _nothing) is not value and not (isinstance(value, io.IOBase) and value.closed):  # a new file took its place
                now[name] = value
        for slot in in_slots(owner).keys() - held.keys():
            slot.__delete__(owner)
        for slot, value in held.items():
            slot.__set__(owner, value)

    return undo


def _generator(generator: Any) -> Undo:
    """The state of a random generator of torch, numpy or Python."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


@contextlib.contextmanager
def process_settings() -> Iterator[None]:
    """Inside, a Trainer may set threads, garbage collection and random numbers."""
    threads, collects, keep = torch.get_num_threads(), gc.isenabled(), SavedState(discover())
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        (gc.enable if collects else gc.disable)()
        keep.restore()
