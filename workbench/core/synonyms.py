"""Lets public functions take their arguments by other usual names, and says of calls that do not fit what is missing or was meant."""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from workbench.core import late
from workbench.core.checks import did_you_mean, nearest, shown, unknown_names

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
EXAMPLES: Mapping[str, str] = {
    "device": '"H100"', "cluster": '"DGX-H100"', "network": '"DGX-H100"', "world_size": "8", "changes": '[{"micro_batch": 64}]',
    "budgets": '{"step": "120 ms"}', "to": '"tensorboard"', "good": '"v1.2"', "image": '"registry/image:tag"', "lr": "1e-3",
    "batch": "256", "to_batch": "1024", "samples": "(10_000, 40_000, 160_000)", "length": "2048", "batch_size": "32", "classes": "10",
    "seed": "0", "count": "1_000_000", "payload": "100e9", "run": '"runs/NAME"', "run_a": '"runs/NAME"', "run_b": '"runs/OTHER"',
    "folder": '"exported"', "path": '"FOLDER"', "out": '"FOLDER"',
}  # fmt: skip
"""Argument without a default → what an example call gives it; those that are not here are variables of the user, such as spec or loader."""


def accept_synonyms(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function take SYNONYMS of its arguments, and say of a call that does not fit what is missing, or which name is near.

    Functions and methods have it where they are defined: put on later, it would make another object, which cannot be pickled.

    >>> @accept_synonyms
    ... def wait(run: str, *, budget_s: float = 60.0) -> float:
    ...     return budget_s
    >>> wait("a", timeout=5.0)
    5.0
    >>> wait("a", budgets=5.0)
    Traceback (most recent call last):
    ...
    TypeError: wait(budgets=…): did you mean 'budget_s'? It takes run, budget_s
    >>> wait(budget_s=5.0)
    Traceback (most recent call last):
    ...
    TypeError: wait(budget_s=…): missing: run. For example: wb.wait("runs/NAME")
    """
    parameters = inspect.signature(function).parameters
    others = next((name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD), "")
    names = [name for name, parameter in parameters.items() if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)]
    places = [name for name in names if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    needed = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    most = math.inf if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()) else len(places)
    meant = {word: name for name in names for word in SYNONYMS.get(name, ()) if word not in names}

    @functools.wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        said = f"{function.__name__}({', '.join([*map(shown, args), *(f'{name}=…' for name in given)])})"
        for word in [word for word in given if word not in names]:
            if name := meant.get(word):
                if name in given:
                    raise TypeError(f"{function.__name__}({name}=…, {word}=…): both names are of one argument; give {name} alone")
                given[name] = given.pop(word)
            elif not others:
                takes = ", ".join(name for name in names if name != "self") or "no argument by name"
                raise TypeError(f"{function.__name__}({word}=…): {did_you_mean(word, names, cutoff=0.5)}It takes {takes}")
            elif (near := nearest(word, [*names, *_knobs()], cutoff=0.75)) in names:
                more = "the knobs of RunSpec" if others == "knobs" else f"other options: help({_public_name(function)})"
                raise TypeError(f"{function.__name__}({word}=…): did you mean {near!r}? It also takes {more}")
        if len(args) > most:
            rest = ", ".join(f"{name}=…" for name in names if name not in places)
            raise TypeError(
                f"{said}: only {_described(function, places) or 'nothing'} {'is' if len(places) < 2 else 'are'} given by place"
                f"{f'; all else by name: {rest}' * bool(rest)}"
            )
        if twice := [name for name in places[: len(args)] if name in given]:
            raise TypeError(f"{said}: {twice[0]} is given by place and by name; give it once")
        if missing := [name for name in needed if name not in given and name not in places[: len(args)]]:
            raise TypeError(f"{said}: missing: {_described(function, missing)}. For example: {_example(function, needed)}")
        return function(*args, **given)

    return call


def _knobs() -> list[str]:
    """Names of knobs of RunSpec, here and elsewhere."""
    return [name for knob, about in late.load("KNOBS").items() for name in (knob, *about.elsewhere)]


def _described(function: Callable[..., Any], names: list[str]) -> str:
    """The arguments, each with what its docstring begins with."""
    texts = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(function) or "", re.MULTILINE))
    said = {name: re.split(r"[.;]\s|\.$", " ".join(texts[name].split()))[0] for name in names if name in texts}
    return ", ".join(f"{name} ({re.sub(r' [(][^)]*$', '', said[name])})" if name in said else name for name in names)


def _example(function: Callable[..., Any], needed: list[str]) -> str:
    """A call of a public function with the arguments that it needs."""
    parameters = inspect.signature(function).parameters
    given = [
        f"{name}=" * (parameters[name].kind is inspect.Parameter.KEYWORD_ONLY) + EXAMPLES.get(name, name)
        for name in needed
        if name != "self"
    ]
    return f"{_public_name(function) if 'self' not in needed else function.__name__}({', '.join(given)})"


def _public_name(function: Callable[..., Any]) -> str:
    """What a user calls a public function."""
    return f"{'wb.data' if function.__module__.startswith('workbench.data.') else 'wb'}.{function.__name__}"


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
