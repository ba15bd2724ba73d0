"""KnownValues: tracks integer and boolean values in a dry run that follow from the batch, such as lengths and masks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from workbench.memory.estimate.fake_tensors import real_tensors

LIMIT = 2**22
"""Most elements of a tensor of the batch, or of one that follows from it, whose values are kept: more would slow a dry run."""
MADE = 2**18
"""The same for tensors made of no other, such as positions or a triangle of ones: every layer may make one."""
GREATEST = 2**31
"""Integers from here on count as uninitialised memory, as of `torch.empty`."""
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_aten = torch.ops.aten
_AS_LONG_AS_THEY_ARE = (_aten.nonzero.default, _aten._unique2.default, _aten.unique_dim.default, _aten.unique_consecutive.default)
"""Operators whose result's length depends on values, and is at most that of their argument."""


def tells(example: Tensor) -> bool:
    """Has a tensor of a batch values that may decide what a program does? Zeros only, and what lay in memory, stand for a shape."""
    if example.layout != torch.strided or example.is_meta or example.dtype not in WHOLE or not 0 < example.numel() <= LIMIT:
        return False
    low, high = int(example.min()), int(example.max())
    return (low, high) != (0, 0) and -GREATEST < low <= high < GREATEST


class _Known(NamedTuple):
    """The values of a fake tensor, as long as it is in the storage that it was in."""

    values: Tensor
    storage: int


class KnownValues:
    """Values of fake tensors that the program's own operators compute from known ones: integers and booleans of the batch.

    Nothing that the program has itself is ever written to: what is computed with is a copy.
    """

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()
        self._storages: set[int] = set()  # addresses, those of the dead among them

    def know(self, fake: Tensor, example: Tensor) -> None:
        """Keep the values of the example that a fake tensor replaces, if they matter."""
        with real_tensors():
            values_matter = type(example) is Tensor and tells(example)
        if values_matter:
            self._keep(fake, _copy(example))

    def of(self, tensor: Any) -> Tensor | None:
        """What a fake tensor holds, or a copy of a real one; None = not known."""
        if tensor.layout != torch.strided or tensor.numel() > LIMIT:
            return None
        if type(tensor) is Tensor:
            return _copy(tensor)
        known: _Known | None = self._known.get(tensor)
        if known is not None:
            same = known.storage == tensor.untyped_storage()._cdata and known.values.shape == tensor.shape
            return known.values if same else None
        constant = getattr(tensor, "constant", None)  # such as torch.tensor(3)
        return None if constant is None else self._keep(tensor, _copy(constant))

    def number(self, tensor: Any) -> int | float | bool | complex | None:
        """What a tensor with one element holds, as a number; None = not known."""
        known = self.of(tensor)
        with real_tensors():
            return None if known is None else known.item()

    def same(self, one: Any, other: Any) -> bool | None:
        """Are two tensors equal? None = not known."""
        first, second = self.of(one), self.of(other)
        with real_tensors():
            return None if first is None or second is None else torch.equal(first, second)

    def call(self, func: Any, args: Any, kwargs: Any, plainly: Callable[[Any, Any, Any], Any]) -> Any:
        """Run an operator on fake tensors by `plainly`, and on their values where these are known.

        How much a known mask picks is known with it: `x[mask]`, `masked_select` and `nonzero` have a result then.
        """
        if func is _aten.masked_select.default and args[0].shape == args[1].shape and self.of(args[1]) is not None:
            func, args = _aten.index.Tensor, (args[0], [args[1]])
        if func is _aten.index.Tensor:
            args = args[0], self._positions(args[1], plainly), *args[2:]
        values = self._found(func, args, kwargs)
        if values is not None and _is_sized_by_values(func, values) and (known := _computed(func, *values)) is not None:
            out = tree_map_only(Tensor, _fake_of, known)
        else:
            out = plainly(func, args, kwargs)
            known = _computed(func, *values) if values is not None and _is_small(out, values) else None
        if known is None:
            self._forget(func, args, kwargs)
        else:
            self._learn(out, known)
        return out

    def _found(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with values in them, if all are known and they alone decide what comes out."""
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if first is not None and self.of(first) is None:
            return None  # most operators: their first argument comes of weights
        if not isinstance(func, OpOverload) or func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if "empty" in func.__name__ or "resize" in func.__name__:
            return None
        leaves, tree = tree_flatten((args, kwargs))
        values = [self.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(value is None and leaf is not None for value, leaf in zip(values, leaves, strict=True)):
            return None
        found: tuple[Any, Any] = tree_unflatten(values, tree)
        return found

    def _positions(self, parts: Any, plainly: Callable[[Any, Any, Any], Any]) -> list[Any]:
        """Replace known masks by the positions that they select, whose number is known."""
        positions: list[Any] = []
        for part in parts:
            known = part is not None and part.dtype == torch.bool and self.of(part) is not None
            positions += self.call(_aten.nonzero.default, (part,), {}, plainly).unbind(1) if known else [part]
        return positions

    def _learn(self, out: Any, known: Any) -> None:
        for tensor, values in zip(tree_flatten(out)[0], tree_flatten(known)[0], strict=True):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._keep(tensor, values)

    def _keep(self, tensor: Tensor, values: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        self._known[tensor] = _Known(values, storage)
        self._storages.add(storage)
        return values

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of a storage to which something unknown was written, for all views of it."""
        if not self._storages:
            return
        written = {
            tensor.untyped_storage()._cdata
            for value in _written(func, args, kwargs)
            for tensor in tree_flatten(value)[0]
            if isinstance(tensor, FakeTensor) and tensor.layout == torch.strided
        }
        if not self._storages.isdisjoint(written):
            for tensor in [tensor for tensor, found in self._known.items() if found.storage in written]:
                del self._known[tensor]
            self._storages -= written


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operator writes to; of a collective all, as it does not say."""
    if func.namespace == "c10d":
        yield from (args, kwargs)
    elif func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield args[place] if place < len(args) else kwargs.get(argument.name)


def _is_sized_by_values(func: Any, values: tuple[Any, Any]) -> bool:
    """Is the length of the result known by values alone, and not too large?"""
    if func is _aten.repeat_interleave.Tensor:
        with real_tensors():
            return int(values[0][0].sum()) <= LIMIT
    return func in _AS_LONG_AS_THEY_ARE


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    with real_tensors(), contextlib.suppress(Exception):  # whatever it is, the program goes on without values, as it would have
        return func(*args, **kwargs)
    return None


def _is_small(out: Any, values: tuple[Any, Any]) -> bool:
    """Is a tensor worth tracking? One that is made of no other tensor only if it has integers."""
    made = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
    if any(isinstance(leaf, Tensor) for leaf in tree_flatten(values)[0]):
        return bool(made) and all(leaf.numel() <= LIMIT for leaf in made)
    return bool(made) and all(leaf.numel() <= MADE and leaf.dtype in WHOLE for leaf in made)


def _copy(tensor: Tensor) -> Tensor:
    with real_tensors():
        return tensor.detach().to("cpu", copy=True)


def _fake_of(values: Tensor) -> Tensor:
    return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)
