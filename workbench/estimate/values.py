"""Values: what a dry run knows of tensors that follow from the batch's whole numbers, such as its lengths and its masks."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from workbench.estimate.compat import real_tensors

LIMIT = 2**18
"""Elements of a tensor up to which its values are kept: more would make a dry run slow."""
GREATEST = 2**31
"""From here on a whole number is what lay in memory, as in `torch.empty`."""


def tells(example: Tensor) -> bool:
    """Has a tensor of a batch values that may decide what a program does? Zeros only, and what lay in memory, stand for a shape."""
    if example.is_meta or example.is_floating_point() or example.is_complex() or not 0 < example.numel() <= LIMIT:
        return False
    low, high = int(example.min()), int(example.max())
    return (low, high) != (0, 0) and -GREATEST < low <= high < GREATEST


class Values:
    """The values of fake tensors that a program's own operators compute of what is known: whole numbers and truth values of the batch."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def know(self, fake: Tensor, example: Tensor) -> None:
        """Learn that a fake tensor stands for an example, if that tells anything."""
        with real_tensors():
            told = type(example) is Tensor and tells(example)
        if told:
            self._known[fake] = _copy(example)

    def of(self, tensor: Any) -> Tensor | None:
        """What a tensor holds; None = not known."""
        if type(tensor) is Tensor:
            return tensor if tensor.layout == torch.strided and tensor.numel() <= LIMIT else None
        known: Tensor | None = self._known.get(tensor)
        if known is None and (constant := getattr(tensor, "constant", None)) is not None:  # such as torch.tensor(3)
            known = self._known[tensor] = _copy(constant)
        return known

    def number(self, tensor: Any) -> int | float | bool | complex | None:
        """What a fake tensor with one element holds, as a number; None = not known."""
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

        How much a mask picks is known with it: those operators, which have no result without values, have one then.
        """
        if func is torch.ops.aten.index.Tensor:
            args = args[0], self._positions(args[1]), *args[2:]
        found = self._found(func, args, kwargs)
        if found is not None and torch.Tag.dynamic_output_shape in func.tags and (known := _computed(func, *found)) is not None:
            out = tree_map_only(Tensor, _fake_of, known)
        else:
            out = plainly(func, args, kwargs)
            known = _computed(func, *found) if found is not None and _is_small(out, found) else None
        if known is not None:
            self._learn(out, known)
        elif self._known and func._schema.is_mutable:
            self._forget(func, args)
        return out

    def _found(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with values in them, if all are known and they alone decide what comes out."""
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if first is not None and self.of(first) is None:
            return None  # most operators: their first argument comes of weights
        chance = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.__name__
        if chance or not isinstance(func, OpOverload) or func.namespace != "aten":
            return None
        leaves, tree = tree_flatten((args, kwargs))
        values = [self.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(value is None and leaf is not None for value, leaf in zip(values, leaves, strict=True)):
            return None
        if func._schema.is_mutable:  # what is real is not written to
            values = [_copy(leaf) if type(leaf) is Tensor else value for value, leaf in zip(values, leaves, strict=True)]
        found: tuple[Any, Any] = tree_unflatten(values, tree)
        return found

    def _positions(self, parts: Any) -> list[Any]:
        """Masks that are known, as the positions that they pick, of which there is a number."""
        found: list[Any] = []
        for part in parts:
            mask = self.of(part) if part is not None and part.dtype == torch.bool else None
            found += [part] if mask is None else self.call(torch.ops.aten.nonzero.default, (part,), {}, _as_it_is).unbind(1)
        return found

    def _learn(self, out: Any, known: Any) -> None:
        for tensor, values in zip(tree_flatten(out)[0], tree_flatten(known)[0], strict=True):
            if isinstance(tensor, Tensor):
                self._known[tensor] = values

    def _forget(self, func: Any, args: Any) -> None:
        """Something unknown was written: nor is known what it was written to, by whatever view that is seen."""
        written = {
            tensor.untyped_storage()._cdata
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_flatten(value)[0]
            if isinstance(tensor, FakeTensor) and tensor.layout == torch.strided
        }
        for tensor in [tensor for tensor in self._known if tensor.untyped_storage()._cdata in written]:
            del self._known[tensor]


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    with real_tensors(), contextlib.suppress(Exception):  # whatever it is, the program goes on without values, as it would have
        return func(*args, **kwargs)
    return None


def _is_small(out: Any, found: tuple[Any, Any]) -> bool:
    """Is it worth knowing? What is made of nothing, such as a mask or positions, only where it is of whole numbers."""
    made = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
    derived = any(isinstance(leaf, Tensor) for leaf in tree_flatten(found)[0])
    return bool(made) and all(leaf.numel() <= LIMIT and (derived or not leaf.is_floating_point()) for leaf in made)


def _copy(tensor: Tensor) -> Tensor:
    with real_tensors():
        return tensor.detach().to("cpu", copy=True)


def _fake_of(values: Tensor) -> Tensor:
    return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)


def _as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)
