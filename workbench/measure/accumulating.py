"""Sums of gradients: in place in an ordinary run, where one that is recorded makes a new tensor for each.

The gradients of a tensor that is used more than once are added up by autograd's engine. It does so in place if nobody else holds the first
of them and no dispatch mode is on; a recorder is one, so the engine makes a new tensor for each sum, and holds one gradient too many.

Source: `InputBuffer::accumulate`, `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp; `isTensorSubclassLike` in
aten/src/ATen/TensorSubclassLikeUtils.h.
"""

import sys
from typing import Any

import torch
from torch import Tensor

Holders = tuple[int, int, int]
NOBODY: Holders = (0, 0, 0)
"""Where this torch does not say."""


def holders_of(tensor: Any) -> Holders:
    """How many hold a tensor in C++, its storage, and the tensor in Python, as seen from the handling of an operator."""
    if not (hasattr(tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")):
        return NOBODY
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), sys.getrefcount(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Do its elements lie side by side, in any order?

    >>> is_dense(torch.zeros(2, 3).t()), is_dense(torch.zeros(2, 1).expand(2, 3))
    (True, False)
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Sums:
    """Tells the sums that autograd's engine makes, and which of them would be in place."""

    def __init__(self) -> None:
        self._alone: Holders | None = None  # holders of a gradient that only the engine has
        self._learning = False

    def learn(self) -> None:
        """See once, in a graph whose gradients nobody else holds, how many hold them; outside of operators, with nothing recorded."""
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
