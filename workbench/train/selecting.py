"""Selecting: results of some operators that a checkpointed block keeps in its forward and finds again in its second computation.

torch's own `create_selective_checkpoint_contexts` keeps the tensor itself; where the model writes into it later (`scores += bias`), the
second computation starts from the wrong numbers, unseen where a matmul is concerned (its result is an "unsafe" view). Here such a result
is copied before it is written to.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from workbench.train.dealt import local


def selecting(kept: Collection[Any]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A context for a block's forward, and one for its second computation.

    Args:
        kept: operators (overloads of torch.ops) whose results are kept.
    """
    results: dict[Any, deque[_Result]] = defaultdict(deque)
    return _Keeping(kept, results), _Using(results)


class _Result:
    """What one call of an operator has given."""

    def __init__(self, value: Any) -> None:
        self.value = tree_map_only(Tensor, torch.detach, value)

    @property
    def memories(self) -> list[int]:
        return [_memory(tensor) for tensor in tree_leaves(self.value) if isinstance(tensor, Tensor)]

    def copy(self) -> None:
        self.value = tree_map_only(Tensor, torch.clone, self.value)


def _memory(tensor: Tensor) -> int:
    return int(local(tensor).untyped_storage()._cdata)


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: Collection[Any], results: dict[Any, "deque[_Result]"]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._results = kept, results
        self._by_memory: dict[int, _Result] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs or {}):
                if result := self._by_memory.pop(_memory(tensor), None):
                    result.copy()
        output = func(*args, **(kwargs or {}))
        if func in self._kept:
            result = _Result(output)
            self._results[func].append(result)
            self._by_memory.update(dict.fromkeys(result.memories, result))
        return output


class _Using(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, results: dict[Any, "deque[_Result]"]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if results := self._results.get(func):
            return results.popleft().value
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        self._results.clear()  # it may have been told to stop early; should it begin once more, it computes all of it
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (one for one in tree_leaves(given) if isinstance(one, Tensor))
