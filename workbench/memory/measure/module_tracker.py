"""ModuleTracker: names the module that is running: in forward by its calls, in backward by the module that made the autograd node.

Compiled modules are followed as a whole, and what they take is recorded: the programs that TorchInductor writes call no operator for it.
"""

import bisect
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from workbench.core import interrupts
from workbench.memory.analysis.log import MemoryLog
from workbench.timeline.hooks import Patch

BUFFER = "a compiled kernel"
"""The operator of what a program of Inductor takes."""
TAKING = ("empty_strided_cpu", "empty_strided_cuda")
"""Functions of such a program that take memory."""
UNSEEN = (
    "a program that Inductor wrote in C++ (cpp_wrapper) is loaded, and what such a program takes is not seen: if the step runs it, the "
    "activations that it keeps count as temporaries"
)
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
        if torch.compiler.is_compiling():
            return  # it would become a part of the graph
        interrupts.deliver_interrupt()
        self._stack.append(self._names.get(module, self._stack[-1]))
        self._note()

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
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


class Records(Protocol):
    """A Recorder."""

    tracker: ModuleTracker
    log: MemoryLog

    def track(self, tensor: Tensor, category: str | None = None, op: str = "") -> None: ...

    def pause(self) -> AbstractContextManager[None]: ...


@contextlib.contextmanager
def compiled_modules(recorder: Records, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, what compiled modules and functions take is recorded, and these modules are called without the hooks that follow modules.

    These would be compiled, too.

    Args:
        recorder: of the training; its modules are known. Others that `torch.compile(module)` returned are followed as well.
        around: makes the call of a compiled module another.
    """
    compiled = recorder.tracker.compiled()
    if not compiled and "torch._inductor.codecache" not in sys.modules:  # torch.compile loads it
        yield
        return
    from torch._dynamo.eval_frame import OptimizedModule
    from torch._inductor.codecache import PyCodeCache

    def wrap(module: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
        call = around(own or module._call_impl)

        def apart(*args: Any, **kwargs: Any) -> Any:
            with recorder.tracker.inside(module), _no_global_hooks():
                return call(*args, **kwargs)

        return apart

    def unregistered(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.tracker.inside(wrapper._orig_mod), _no_global_hooks():
            return around(wrapper._call_impl)(*args, **kwargs)

    def taking(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def taken(*args: Any) -> Tensor:
            with recorder.pause():
                tensor = function(*args)
            recorder.track(tensor, op=BUFFER)
            return tensor

        return taken

    followed = dict[int, ModuleType]()

    def follow(program: ModuleType) -> None:
        own = vars(program)
        if id(program) in followed:
            return
        followed[id(program)] = program
        if "cpp_wrapper_src" in own and UNSEEN not in recorder.log.notes:
            recorder.log.notes.append(UNSEEN)
        for name in TAKING:
            if name in own:
                undo.callback(own.update, {name: own[name]})
                own[name] = taking(own[name])

    load = vars(PyCodeCache)["load_by_key_path"]

    def loading(cls: Any, *args: Any, **kwargs: Any) -> ModuleType:
        program: ModuleType = load.__get__(None, cls)(*args, **kwargs)
        follow(program)
        return program

    with contextlib.ExitStack() as undo:
        for program in PyCodeCache.modules:
            follow(program)
        undo.callback(setattr, PyCodeCache, "load_by_key_path", load)
        PyCodeCache.load_by_key_path = classmethod(loading)
        for module in compiled:
            undo.callback(Patch(module, "_compiled_call_impl", functools.partial(wrap, module)).remove)
        undo.callback(Patch(OptimizedModule, "_compiled_call_impl", lambda _: unregistered).remove)
        yield


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Inside, hooks that are registered for all modules are not called."""
    tables: Any = torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.update(before)
