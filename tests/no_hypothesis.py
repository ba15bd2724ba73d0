"""Stands in for hypothesis where it is not installed: tests that it would feed with values are skipped, all others run."""

import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

REASON = "needs hypothesis (pip install hypothesis)"


class Anything:
    """A strategy, health check or profile of no content: whatever is asked of it gives itself."""

    def __getattr__(self, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> "Anything":
        return self

    __or__ = __getitem__ = __call__


def given(*fed: Any, **fed_by_name: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Skip the test."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        names = [name for name in signature.parameters if name not in fed_by_name]
        left = names[: len(names) - len(fed)]  # of pytest: hypothesis feeds the last ones
        vars(test)["__signature__"] = signature.replace(parameters=[signature.parameters[name] for name in left])
        return pytest.mark.skip(reason=REASON)(test)

    return decorate


def settings(*_: Any, **__: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Leave the test as it is."""
    return lambda test: test


def install() -> None:
    """Let `import hypothesis` find this."""
    module, strategies = ModuleType("hypothesis"), ModuleType("hypothesis.strategies")
    module.__spec__, module.__path__ = ModuleSpec("hypothesis", None), []  # torch asks for it
    vars(strategies)["__getattr__"] = Anything().__getattr__
    vars(module).update(given=given, settings=settings, strategies=strategies, HealthCheck=Anything(), assume=Anything())
    sys.modules |= {"hypothesis": module, "hypothesis.strategies": strategies}
