"""Keeps a training from loading torch's compiler, `torch._dynamo`, until something compiles: it takes half as long to load as torch itself.

Optimizers and DistributedDataParallel import it when they are first used, only to keep the compiler out of some of their functions and to
ask for a setting. `defer` gives these functions code that does the same without it. Whatever imports the compiler after all, they get their
own code back first.

All this is private to torch (2.6 to 2.13). A function that differs from what is expected here stays as it is, and loads the compiler.
"""

import gc
import importlib
import sys
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import _compile
from torch.optim import optimizer

NAME = "torch._dynamo"
_IRRELEVANT = {NAME, "_dynamo", "torch", "cast", "Optimizer"}
"""Names in the code of torch's functions that ours does without, or that differ between versions of torch."""


def defer() -> None:
    """Replace the code of those functions that are loaded by now, unless the compiler is."""
    if NAME in sys.modules:
        return
    own = dict[FunctionType, CodeType]()
    for decorator, template, names in (
        (_compile._disable_dynamo, _without_disable, {"getattr", "disable", "__dynamo_disable"}),
        (optimizer._use_grad_for_differentiable, _without_break, {"is_grad_enabled", "set_grad_enabled", "defaults", "graph_break"}),
    ):
        theirs, ours = _decorated(decorator), _decorated(template)
        if theirs and ours and theirs.co_freevars == ours.co_freevars and {*theirs.co_names} - _IRRELEVANT == names:
            ours = ours.replace(co_filename=theirs.co_filename, co_name=theirs.co_name, co_firstlineno=theirs.co_firstlineno)  # in traces
            for function in [user for user in gc.get_referrers(theirs) if isinstance(user, FunctionType)]:
                own[function], function.__code__ = theirs, ours
    vars(torch)["_dynamo"] = _Later(NAME, utils=_Later(f"{NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"))  # the default
    sys.meta_path.insert(0, _Restorer(own))


def _decorated(decorator: Any) -> CodeType | None:
    """The code of the functions that a decorator makes."""
    return next((value for value in decorator.__code__.co_consts if isinstance(value, CodeType)), None)


def _without_disable(fn: Any, recursive: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        _ = recursive  # torch's own refers to it
        return fn(*args, **kwargs)

    return inner


def _without_break(func: Any) -> Any:
    def step(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return step


class _Later:
    """Stands for a module, which it imports when an attribute is read that is not known."""

    def __init__(self, module: str, **known: Any) -> None:
        vars(self).update(known, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


class _Restorer:
    """Is asked first where a module is, and gives functions their own code back when that is the compiler."""

    def __init__(self, own: dict[FunctionType, CodeType]) -> None:
        self._own = own

    def find_spec(self, name: str, *_: Any) -> None:
        if name == NAME:
            vars(torch).pop("_dynamo", None)
            for function, code in self._own.items():
                function.__code__ = code
            self._own = {}
