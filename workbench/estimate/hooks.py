"""Hooks of a model: found, bound to a copy of it, and what they write to put back after a dry run."""

import collections
import contextlib
import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

MANY = 4096
"""Items of a container up to which those within it are looked at, too."""


def hook_tables(module: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    """A module's tables of hooks, whatever kind, with their names."""
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            yield name, value


def rebound(hook: Any, memo: dict[int, Any]) -> Any:
    """A hook as it is for the copy: what `memo` has a copy of is replaced by it; objects are copied, plain functions are not."""
    if isinstance(hook, types.FunctionType):
        cells = hook.__closure__ or ()
        contents = [_content(cell) for cell in cells]
        if all(_twin(content, memo) is content for content in contents):
            return hook
        closure = tuple(
            cell if _twin(content, memo) is content else types.CellType(_twin(content, memo))
            for cell, content in zip(cells, contents, strict=True)
        )
        made = types.FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, closure)
        made.__kwdefaults__ = hook.__kwdefaults__
        made.__dict__.update(vars(hook))
        return made
    if type(hook) is functools.partial:
        named = {key: _twin(value, memo) for key, value in hook.keywords.items()}
        return functools.partial(rebound(hook.func, memo), *(_twin(value, memo) for value in hook.args), **named)
    return copy.deepcopy(hook, memo)


def _twin(value: Any, memo: dict[int, Any]) -> Any:
    return memo.get(id(value), value)


def _content(cell: types.CellType) -> Any:
    with contextlib.suppress(ValueError):  # an empty one
        return cell.cell_contents
    return None


def called(hook: Any) -> str:
    """A hook's name, for people."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))


@contextlib.contextmanager
def kept_by_hooks(model: nn.Module) -> Iterator[None]:
    """On leaving, the lists, dicts and sets that a model's hooks write to are as they were: those in closures, arguments and globals."""
    found: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        for _, table in hook_tables(module):
            for hook in table.values():
                for value in _reached(hook):
                    _remember(value, found)
    try:
        yield
    finally:
        for container, before in found.values():
            container.clear()
            (container.extend if isinstance(container, list | collections.deque) else container.update)(before)


def _reached(hook: Any) -> Iterator[Any]:
    if str(getattr(hook, "__module__", "")).partition(".")[0] in ("torch", "workbench"):
        return
    if isinstance(hook, types.FunctionType):
        yield from map(_content, hook.__closure__ or ())
        yield from hook.__defaults__ or ()
        yield from (hook.__globals__.get(name) for name in hook.__code__.co_names)
    elif type(hook) is functools.partial:
        yield from (*hook.args, *hook.keywords.values(), *_reached(hook.func))
    else:
        yield getattr(hook, "__self__", None)  # such as seen.append


def _remember(value: Any, found: dict[int, tuple[Any, Any]], deep: int = 2) -> None:
    if id(value) in found or not isinstance(value, list | dict | set | collections.deque):
        return
    found[id(value)] = value, dict(value) if isinstance(value, dict) else list(value)
    if deep and len(value) <= MANY:
        for item in value.values() if isinstance(value, dict) else value:
            _remember(item, found, deep - 1)
