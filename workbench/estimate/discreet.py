"""Discreet: a dry run does not show. Libraries that ask whether a tensor is a fake one are told that it is none.

They ask to find tracing, and then leave out what depends on values: such as to drop a mask that masks nothing, which an ordinary run does.
"""

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor


class _Discreet(type):
    """Makes a stand-in for the class of fake tensors, which knows its own among strangers only when torch asks."""

    def __instancecheck__(cls, instance: object) -> bool:
        asks = str(sys._getframe(1).f_globals.get("__name__", ""))
        hidden = torch._subclasses.FakeTensor is cls and asks.partition(".")[0] != "torch"
        return isinstance(instance, FakeTensor) and not hidden

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, FakeTensor)


@contextlib.contextmanager
def unrecognised() -> Iterator[None]:
    """Inside, `isinstance(tensor, torch._subclasses.FakeTensor)` is False, except where torch itself asks."""
    torch._subclasses.FakeTensor = _Discreet("FakeTensor", (), {})  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch._subclasses.FakeTensor = FakeTensor  # type: ignore[misc]
