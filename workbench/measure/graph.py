"""Graph: the tensors that autograd keeps for a backward, which no Python variable shows."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

MOST_NODES = 200_000
"""So many nodes of a graph are looked at."""
_RAW = "_raw_saved_"

_names: dict[type, tuple[str, ...]] = {}
"""Kind of node → its attributes with what it keeps."""


def saved(roots: Iterable[Tensor]) -> Iterator[tuple[Any, Tensor]]:
    """Each node behind these tensors, with a tensor that it keeps. Nothing is computed again: of checkpointing there is only a recipe.

    Args:
        roots: tensors that a graph leads to.
    """
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set()
    while todo and len(seen) < MOST_NODES:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions if before is not None]
        for tensor in kept_by(node):
            yield node, tensor


def kept_by(node: Any) -> Iterator[Tensor]:
    """The tensors that one node keeps."""
    if type(node) not in _names:
        _names[type(node)] = tuple(name for name in dir(node) if name.startswith(_RAW))
    for name in _names[type(node)]:
        try:
            value = getattr(node, name)
            for one in value if isinstance(value, list | tuple) else (value,):
                tensor = getattr(one, "data", None)
                if isinstance(tensor, Tensor):
                    yield tensor
        except RuntimeError:  # the backward has been there, and has let it go
            continue


def name_of(node: Any) -> str:
    """The operator whose backward a node is.

    >>> import torch
    >>> name_of(torch.ones(2, requires_grad=True).relu().grad_fn)
    'relu'
    """
    words = str(node.name()).removesuffix("Backward").rstrip("0123456789").removesuffix("Backward")
    return words[:1].lower() + words[1:]
