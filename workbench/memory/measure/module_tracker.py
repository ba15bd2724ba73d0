"""ModuleTracker: names the module that is running: in forward by its calls, in backward by the module that made the autograd node."""

import bisect
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from workbench.core import interrupts

LARGEST = 1 << 62
"""Above any number of a node that a forward makes; those that accumulate gradients have a larger one."""


class ModuleTracker:
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
        """Register the names of a model's modules; returns each with its class."""
        for name, module in model.named_modules():
            self._names[module] = name
            yield name, type(module).__name__

    def compiled(self) -> list[nn.Module]:
        """The registered modules that torch.compile compiles."""
        return [module for module in self._names if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None)]

    @property
    def forward(self) -> str:
        """The innermost module whose forward runs; "" = none, or the model itself."""
        return self._stack[-1]

    def backward(self) -> tuple[str, bool]:
        """The module whose backward runs; and whether its forward is being recomputed, under checkpointing."""
        node = running_node()
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
        """Begin a micro-step: the nodes of the last one are gone."""
        del self._numbers[1:], self._makers[1:]

    def hooks(self) -> list[Any]:
        """Follow the calls of all modules, until the handles are removed."""
        return [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave, always_call=True)]

    def _enter(self, module: nn.Module, _args: Any) -> None:
        interrupts.deliver_interrupt()
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
        number = next_node()
        if number is None or running_node() is not None:
            return
        if number == self._numbers[-1]:
            self._makers[-1] = self._stack[-1]
        else:
            self._numbers.append(number)
            self._makers.append(self._stack[-1])


def next_node() -> int | None:
    """Number of the autograd node that this thread will make next; None = not known."""
    ask = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return None if ask is None else int(ask())


def running_node() -> Any:
    """The autograd node whose backward is running; None outside of a backward."""
    ask = getattr(torch._C, "_current_autograd_node", None)
    return None if ask is None else ask()
