"""Whose: the module that is at work, in the forward by its calls, in the backward by the forward that made the autograd node which runs.

Graph: the tensors that autograd keeps for a backward, which no Python variable shows.
"""

import bisect
import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from workbench.core import interrupts
from workbench.memory.measure import private

LARGEST = 1 << 62
"""Above any number of a node that a forward makes; those that accumulate gradients have a larger one."""


class Whose:
    """The modules whose forward is running, innermost last.

    Autograd numbers its nodes in the order in which they are made. So it is enough to note at which number each module's forward began and
    ended: in the backward, the number of the node that runs says whose it is.
    """

    def __init__(self) -> None:
        self._failed = ("", 0)  # module whose forward an error left first; the error's id, as the error itself would keep its frames alive
        self._names: dict[nn.Module, str] = {}
        self._stack = [""]
        self._numbers, self._makers = [-1], [""]  # numbers of nodes, rising; the module that made those from there on

    def name(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Learn the names of a model's modules; gives each with its class."""
        for name, module in model.named_modules():
            self._names[module] = name
            yield name, type(module).__name__

    @property
    def forward(self) -> str:
        """The innermost module whose forward runs; "" = none, or the model itself."""
        return self._stack[-1]

    def backward(self) -> tuple[str, bool]:
        """The module whose backward runs; and whether it is forward that runs there, once more, because of checkpointing."""
        node = private.running_node()
        if node is not None and (len(self._stack) > 1 or torch.is_grad_enabled()):
            return self._stack[-1], True
        number = node._sequence_nr() if node is not None else -1
        if not 0 <= number < LARGEST:
            return "", False
        return self._makers[bisect.bisect_right(self._numbers, number) - 1], False

    def failed(self, error: BaseException | None) -> str | None:
        """The innermost module whose forward this error left, or the one that it came from; "" = the model itself, None = no module."""
        while error is not None:
            if self._failed[1] == id(error):
                return self._failed[0]
            error = error.__cause__ or error.__context__
        return None

    @contextlib.contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module's forward runs although it was not called: its own hooks are not, in a checkpoint."""
        self._enter(module, ())
        try:
            yield
        finally:
            self._leave(module, (), None)

    def begin_forward(self) -> None:
        """A micro-step begins: the nodes of the last one are gone."""
        del self._numbers[1:], self._makers[1:]

    def hooks(self) -> list[Any]:
        """Follow the calls of all modules, until the handles are removed."""
        return [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave, always_call=True)]

    def _enter(self, module: nn.Module, _args: Any) -> None:
        interrupts.here()
        self._stack.append(self._names.get(module, self._stack[-1]))
        self._note()

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        error = sys.exception()
        if error is not None and self._failed[1] != id(error):
            self._failed = self._stack[-1], id(error)
        if len(self._stack) > 1:
            self._stack.pop()
        self._note()

    def _note(self) -> None:
        number = private.next_node()
        if number is None or private.running_node() is not None:
            return
        if number == self._numbers[-1]:
            self._makers[-1] = self._stack[-1]
        else:
            self._numbers.append(number)
            self._makers.append(self._stack[-1])


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
