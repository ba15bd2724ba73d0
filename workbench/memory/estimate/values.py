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
"""Most elements of a tensor whose values are kept, if it is of the batch or computed from it. Larger ones would slow a dry run."""
MADE = 2**18
"""Most elements of a tensor that is computed from no other, such as positions or a causal mask. Every layer may make such a tensor."""
GREATEST = 2**31
"""Integers from here on, of either sign, count as uninitialised memory, such as that of `torch.empty`."""
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_aten = torch.ops.aten
_AS_LONG_AS_THEY_ARE = (_aten.nonzero.default, _aten._unique2.default, _aten.unique_dim.default, _aten.unique_consecutive.default)
"""Operators whose result has a length that depends on values and is at most that of the argument."""


def tells(example: Tensor) -> bool:
    """Can the values of a batch's tensor decide what a program does? All zeros and uninitialised memory only stand for a shape."""
    if example.layout != torch.strided or example.is_meta or example.dtype not in WHOLE or not 0 < example.numel() <= LIMIT:
        return False
    low, high = int(example.min()), int(example.max())
    return (low, high) != (0, 0) and -GREATEST < low <= high < GREATEST


class _Known(NamedTuple):
    """The values of a fake tensor. They are valid as long as the tensor has this storage."""

    values: Tensor
    storage: int


class KnownValues:
    """Values of fake tensors. They start as integers and booleans of the batch, and the program's own operators are run on them.

    All computing is done on copies, so no tensor of the program is written to.
    """

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()
        self._storages: set[int] = set()  # addresses, also of storages that were freed

    def know(self, fake: Tensor, example: Tensor) -> None:
        """Keep the values of the example that a fake tensor replaces, if they matter."""
        with real_tensors():
            values_matter = type(example) is Tensor and tells(example)
        if values_matter:
            self._keep(fake, _copy(example))

    def of(self, tensor: Any) -> Tensor | None:
        """The values of a fake tensor, or a copy of a real one. None = not known."""
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
        """The value of a tensor with one element, as a number. None = not known."""
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

        A known mask gives the number of elements that it selects. So `x[mask]`, `masked_select` and `nonzero` have a result of known size.
        """
        if func is _aten.masked_select.default and args[0].shape == args[1].shape and self.of(args[1]) is not None:
            func, args = _aten.index.Tensor, (args[0], [args[1]])
        if func is _aten.index.Tensor:
            args = args[0], self._positions(args[1], plainly), *args[2:]
        values = self._arguments(func, args, kwargs)
        if values is not None and _is_sized_by_values(func, values) and (known := _computed(func, *values)) is not None:
            out = tree_map_only(Tensor, lambda values: torch.empty_strided(values.shape, values.stride(), dtype=values.dtype), known)
        else:
            out = plainly(func, args, kwargs)
            known = _computed(func, *values) if values is not None and _is_small(out, values) else None
        if known is None:
            self._forget(func, args, kwargs)
        else:
            self._learn(out, known)
        return out

    def _arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with values in place of tensors; None if a value is not known, or if values do not determine the result."""
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if first is not None and self.of(first) is None:
            return None  # as for most operators, whose first argument depends on weights
        if not isinstance(func, OpOverload) or func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if "empty" in func.__name__ or "resize" in func.__name__:
            return None
        leaves, tree = tree_flatten((args, kwargs))
        values = [self.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(value is None and leaf is not None for value, leaf in zip(values, leaves, strict=True)):
            return None
        arguments: tuple[Any, Any] = tree_unflatten(values, tree)
        return arguments

    def _positions(self, parts: Any, plainly: Callable[[Any, Any, Any], Any]) -> list[Any]:
        """Replace each known mask by the positions that it selects."""
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
            for tensor in [tensor for tensor, known in self._known.items() if known.storage in written]:
                del self._known[tensor]
            self._storages -= written


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operator writes to. For a collective these are all, since its schema does not say which."""
    if func.namespace == "c10d":
        yield from (args, kwargs)
    elif func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield args[place] if place < len(args) else kwargs.get(argument.name)


def _is_sized_by_values(func: Any, values: tuple[Any, Any]) -> bool:
    """Do the values determine the length of the result, and is it not too large?"""
    if func is _aten.repeat_interleave.Tensor:
        with real_tensors():
            return int(values[0][0].sum()) <= LIMIT
    return func in _AS_LONG_AS_THEY_ARE


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    with real_tensors(), contextlib.suppress(Exception):  # the program goes on without values
        return func(*args, **kwargs)
    return None


def _is_small(out: Any, values: tuple[Any, Any]) -> bool:
    """Are all results small enough to keep? Results that depend on no tensor must also be integers or booleans."""
    made = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
    if any(isinstance(leaf, Tensor) for leaf in tree_flatten(values)[0]):
        return bool(made) and all(leaf.numel() <= LIMIT for leaf in made)
    return bool(made) and all(leaf.numel() <= MADE and leaf.dtype in WHOLE for leaf in made)


def _copy(tensor: Tensor) -> Tensor:
    with real_tensors():
        return tensor.detach().to("cpu", copy=True)
