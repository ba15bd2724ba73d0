"""Lets public functions take their arguments by other usual names, and asks "did you mean" about names that they do not have."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from workbench.core.checks import did_you_mean, shown, unknown_names

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

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
    by_place = sum(parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters.values())
    most = math.inf if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()) else by_place
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
        if len(args) > most:
            raise TypeError(
                f"{function.__name__}({', '.join(map(shown, args))}): only {', '.join(names[:by_place])} "
                f"{'is' if by_place == 1 else 'are'} given by place; all else by name: "
                + ", ".join(f"{name}=…" for name in names[by_place:])
            )
        return function(*args, **given)

    return call


def check_fields(
    error: type[ValueError], check_names: Callable[[type, Mapping[str, Any]], None] | None = None
) -> Callable[[type[T]], type[T]]:
    """Let a dataclass refuse arguments that are misspelt, missing or without a name, with messages that say what is allowed.

    Args:
        error: to raise.
        check_names: raises for names that the class does not have; None = the fields are all that there is to know.
    """

    def checked_class(cls: type[T]) -> type[T]:
        initialise, fields = cls.__init__, dataclasses.fields(cls)  # type: ignore[arg-type]
        names = [field.name for field in fields]
        needed = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]

        @functools.wraps(initialise)
        def checked(self: T, /, *args: Any, **given: Any) -> None:
            if args:
                raise error(f"{cls.__name__}({args[0]!r:.80}): its arguments are given by name, {cls.__name__}({needed[0]}=…)")
            if check_names:
                check_names(cls, given)
            elif told := unknown_names(f"{cls.__name__} has no argument", given, names):
                raise error(told)
            if missing := [f"{name}=…" for name in needed if name not in given]:
                raise error(f"{cls.__name__}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
            initialise(self, **given)

        cls.__init__ = checked  # type: ignore[method-assign,assignment]
        return cls

    return checked_class
