"""Records what modules take that torch.compile has compiled: the programs that TorchInductor writes call no operator for it."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from workbench.memory.measure.module_tracker import ModuleTracker
from workbench.timeline.hooks import Patch

BUFFER = "a compiled kernel"
"""The operator of what a program of Inductor takes."""
TAKING = ("empty_strided_cpu", "empty_strided_cuda")
"""Functions of such a program that take memory."""


class Records(Protocol):
    """A Recorder."""

    tracker: ModuleTracker

    def track(self, tensor: Tensor, category: str | None = None, op: str = "") -> None: ...

    def pause(self) -> AbstractContextManager[None]: ...


@contextlib.contextmanager
def compiled_modules(recorder: Records, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, what compiled modules take is recorded, and they are called without the hooks that follow modules.

    These would be compiled, too.

    Args:
        recorder: of the training; its modules are known.
        around: makes the call of a compiled module another.
    """
    compiled = recorder.tracker.compiled()
    if not compiled:
        yield
        return
    from torch._inductor.codecache import PyCodeCache

    def wrap(module: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
        call = around(own or module._call_impl)

        def apart(*args: Any, **kwargs: Any) -> Any:
            with recorder.tracker.inside(module), _no_global_hooks():
                return call(*args, **kwargs)

        return apart

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
