"""Lets public functions take their arguments by other usual names, and asks "did you mean" about names that they do not have."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from workbench.core.checks import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "budget_s": ("budget", "seconds", "timeout"),
    "world_size": ("ranks",),
    "nproc_per_node": ("ranks", "gpus"),
    "repeat": ("repeats",),
    "runs_dir": ("into",),
}
"""Name of an argument → its other names, where a function has no other argument of that name. Documentation uses the first alone."""


def accept_synonyms(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function take SYNONYMS of its arguments, and name the nearest argument where it is given one that it does not have.

    >>> @accept_synonyms
    ... def wait(*, budget_s: float = 60.0) -> float:
    ...     return budget_s
    >>> wait(timeout=5.0)
    5.0
    >>> wait(budgets=5.0)
    Traceback (most recent call last):
    ...
    TypeError: wait(budgets=…): did you mean 'budget_s'? It takes budget_s
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = [name for name, parameter in parameters.items() if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)]
    meant = {word: name for name in names for word in SYNONYMS.get(name, ()) if word not in names}

    @functools.wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        for word in [word for word in given if word not in names]:
            if name := meant.get(word):
                if name in given:
                    raise TypeError(f"{function.__name__}({name}=…, {word}=…): both names are of one argument; give {name} alone")
                given[name] = given.pop(word)
            elif not takes_any:
                takes = ", ".join(name for name in names if name != "self")
                raise TypeError(f"{function.__name__}({word}=…): {did_you_mean(word, names, cutoff=0.5)}It takes {takes}")
        return function(*args, **given)

    return call
