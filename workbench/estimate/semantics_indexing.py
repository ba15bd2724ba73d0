"""Indexing in backward: sorting scratch, and gradients written in place.

The derivatives of indexing write into zeros. For real tensors they do so in place; for fake ones they take another operator, which
returns a copy (`areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and aten TensorAdvancedIndexing.cpp): one tensor of
the size of the indexed one too many. Source of the scratch: aten/src/ATen/native/cuda/Indexing.cu, `index_put_with_sort_kernel`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.estimate.semantics_overrides import Overrides, exists, operator, temporary
from workbench.estimate.workspaces import SORTED

WRITERS = {
    "index_put": ("Index", "UnsafeIndex"),
    "scatter_add": ("Gather",),
    "index_add": ("IndexSelect",),
    "put": ("Take",),
    "scatter.src": ("Max", "Min", "Topk", "Sort", "Median", "Nanmedian", "Kthvalue", "Mode", "Cummax", "Cummin"),
}
"""Operator that returns a copy → derivatives that give it fresh zeros."""


def _in_derivative_of(names: Sequence[str]) -> bool:
    """Whether autograd is at one of these nodes, and not to be differentiated itself."""
    node = torch._C._current_autograd_node()
    return node is not None and not torch.is_grad_enabled() and node.name().rstrip("0123456789").removesuffix("Backward") in names


def _in_place(name: str) -> Callable[..., Any]:
    """A kernel that writes into the zeros it is given, where they are the derivative's own."""
    packet, _, overload = name.partition(".")
    there = operator(f"{packet}_.{overload}" if overload else f"{packet}_")
    nodes = WRITERS[name]

    def kernel(original: Callable[..., Any], zeros: Tensor, *args: Any, **kwargs: Any) -> Any:
        return there(zeros, *args, **kwargs) if _in_derivative_of(nodes) else original(zeros, *args, **kwargs)

    return kernel


def _sorting(original: Callable[..., Any], self: Tensor, indices: Sequence[Tensor | None], *args: Any, **kwargs: Any) -> Any:
    """Writing at indices: they are sorted where values are added up, as the derivative of indexing does."""
    accumulate = args[1] if len(args) > 1 else kwargs.get("accumulate", False)
    shapes = [index.shape for index in indices if index is not None]
    count = math.prod(torch.broadcast_shapes(*shapes)) if accumulate and shapes else 0  # type: ignore[no-untyped-call]
    held = temporary(SORTED, count, like=self, dtype=torch.int64) if count else None
    result = original(self, indices, *args, **kwargs)
    del held
    return result


def install(overrides: Overrides) -> None:
    """Lay them around torch's own."""
    for name in WRITERS:
        overrides.around(name, _in_place(name))
    for name in ("index_put_", "_index_put_impl_"):
        if exists(name):
            overrides.around(name, _sorting)
