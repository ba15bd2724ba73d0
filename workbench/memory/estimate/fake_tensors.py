"""Makes torch run on fake tensors (shapes without values): each context manager changes torch and puts it back at the end."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from workbench.memory.estimate.cuda.overrides import replaced

_DEVICE, _META = torch.ops.prim.device.default, torch.device("meta")


def asked_device(func: Any, args: Any) -> torch.device | None:
    """The answer where a fake tensor is asked for its device, as it would give it; None = something else is called.

    Torch asks for it twice as often as it calls operators. A mode that answers at once spares the modes below it.
    """
    if func is not _DEVICE or type(args[0]) is not FakeTensor:
        return None
    return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device


class _HiddenFakeTensor(type):
    """Makes a substitute for the class of fake tensors, of which tensors are instances only for torch itself."""

    def __instancecheck__(cls, instance: object) -> bool:
        asks = str(sys._getframe(1).f_globals.get("__name__", ""))
        hidden = torch._subclasses.FakeTensor is cls and asks.partition(".")[0] != "torch"
        return isinstance(instance, FakeTensor) and not hidden

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, FakeTensor)


@contextlib.contextmanager
def hidden_from_isinstance() -> Iterator[None]:
    """Inside, `isinstance(tensor, torch._subclasses.FakeTensor)` is False, except where torch itself asks."""
    torch._subclasses.FakeTensor = _HiddenFakeTensor("FakeTensor", (), {})  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch._subclasses.FakeTensor = FakeTensor  # type: ignore[misc]


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors have a shape and a type but no values; real ones, such as a mask that a module keeps, may take part.

    To code that checks for fake tensors they look like plain ones (see `hidden_from_isinstance`).
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        no_autocast(),
        quiet(),
        formatted(),
        hidden_from_isinstance(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Inside, autocast is off, whatever the caller has set."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch does not write a traceback to stderr where the shapes of an operator do not fit: the error itself has it."""

    def wanted(record: logging.LogRecord) -> bool:
        return "failed while attempting to run" not in str(record.msg)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


@contextlib.contextmanager
def formatted() -> Iterator[None]:
    """Inside, `f"{loss:.3f}"` works on fake tensors: formatting takes the tensor's value."""
    usual = Tensor.__format__

    def answer(self: Tensor, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else str(usual(self, spec))  # type: ignore[no-untyped-call]

    with replaced(FakeTensor, "__format__", answer):
        yield


def real_tensors() -> AbstractContextManager[Any]:
    """Inside, within `fake_tensors`, tensors have values again."""
    return unset_fake_temporarily()


@contextlib.contextmanager
def movable_modules() -> Iterator[None]:
    """Inside, `module.to(…)` and the like work on fake parameters, which torch wants to swap with others and, being referred to, cannot."""
    apply = nn.Module._apply

    def replace(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        made: dict[int, nn.Parameter] = {}
        for module in self.modules() if recurse else (self,):
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    with torch.no_grad():
                        moved = fn(tensor)
                    if moved is not tensor and isinstance(tensor, nn.Parameter):
                        moved = made.setdefault(id(tensor), nn.Parameter(moved, requires_grad=tensor.requires_grad))
                    table[name] = moved  # type: ignore[assignment]
        return self

    nn.Module._apply = replace  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


@contextlib.contextmanager
def foreach_on_fakes() -> Iterator[None]:
    """Inside, gradient clipping and optimizers take multi-tensor operators for fake tensors where they would for real ones."""
    homes = [sys.modules[name] for name in ("torch.utils._foreach_utils", torch.optim.Optimizer.__module__)]
    lists = {id(home._foreach_supported_types): home._foreach_supported_types for home in homes}
    for types in lists.values():
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in lists.values():
            types.remove(FakeTensor)
