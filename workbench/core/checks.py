"""Checks arguments, numbers and choices, and raises errors that say what was given, what is allowed and what to try.

In all of them `name` is that of the argument and `value` what was given for it. `above`, `least`, `below` and `most` limit it; None = any.
`what` is what it has to be, such as "a whole number of bytes". `also` ends the message: what else is allowed, why, or what to try.
`error` is raised. `numpy`: a number of numpy counts, too; it cannot be written as JSON, so take the value that is returned.
"""

import contextlib
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

SHORT = 40
"""Characters of a value that a message shows; of a longer one it shows the type."""


def is_whole(value: Any, *, least: float = -math.inf, most: float = math.inf, numpy: bool = False) -> TypeGuard[int]:
    """Is it a whole number in the range? (True does not count as a number.)"""
    return isinstance(value, Integral if numpy else int) and not isinstance(value, bool) and least <= int(value) <= most


def is_number(
    value: Any,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    finite: bool = True,
    numpy: bool = False,
) -> TypeGuard[float]:
    """Is it a number in the range? (True and NaN do not count as numbers, nor does infinity unless `finite` is False.)"""
    if isinstance(value, bool) or not isinstance(value, Real if numpy else int | float):
        return False
    given: Any = value  # whole numbers may be too large for a float
    if given in (math.inf, -math.inf):
        return not finite and max(above, least) <= given <= min(below, most)
    return bool(above < given < below and least <= given <= most)


def whole_number(
    name: str,
    value: Any,
    *,
    least: int,
    most: int | None = None,
    what: str = "a whole number",
    also: str = "",
    error: type[ValueError] = ValueError,
    numpy: bool = False,
) -> int:
    """Return the value if it is a whole number in the range, else raise.

    >>> whole_number("steps", 0, least=1, also=", or None for all")
    Traceback (most recent call last):
    ...
    ValueError: steps=0: a whole number of at least 1 is allowed, or None for all
    """
    if is_whole(value, least=least, most=math.inf if most is None else most, numpy=numpy):
        return int(value)
    within = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise error(f"{name}={value!r:.80}: {what} {within} {_is(what)} allowed{also}")


def number_in_environment(name: str, default: int, *, least: int = 0) -> int:
    """Return the whole number in an environment variable, such as RANK, or the default where it is not set.

    Raises:
        ValueError: it holds something else.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) >= least:
        return int(text)
    raise ValueError(
        f"the environment variable {name} is {text!r:.80}: a whole number of at least {least} is allowed, as torchrun sets it. "
        f"Try: unset {name}"
    )


def folder_in_environment(name: str) -> Path | None:
    """Return the folder that an environment variable names, whether it is there or not; None = the variable is not set.

    Raises:
        ValueError: it holds something that is no absolute path, that no file system takes, or that cannot be printed.
    """
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isprintable():
        why = "has characters that cannot be printed"
    elif len(os.fsencode(text)) >= _LONGEST_PATH or any(len(os.fsencode(part)) > _LONGEST_NAME for part in text.split("/")):
        why = f"has {len(text):,} characters, and no file system takes such a path"
    elif not os.path.isabs(text):
        why = "depends on the folder that a process runs in"
    else:
        return Path(text)
    raise ValueError(f"the environment variable {name} is {text!r:.80}: an absolute path is allowed, and this {why}. Try: unset {name}")


_LONGEST_PATH, _LONGEST_NAME = 4096, 255
"""Bytes. Source: PATH_MAX and NAME_MAX of linux/limits.h."""


def number_or_default(name: str, default: int) -> int:
    """The whole number in an environment variable, of at least `default`; the default where it is not set or holds something else.

    For what only watches a training, and must not end it.
    """
    try:
        return number_in_environment(name, default, least=default)
    except ValueError:
        return default


def real_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    what: str = "a number",
    also: str = "",
    error: type[ValueError] = ValueError,
    finite: bool = True,
    numpy: bool = False,
) -> float:
    """Return the value if it is a number in the range, else raise.

    >>> real_number("share", 1, least=0, below=1, also="; try 0.1")
    Traceback (most recent call last):
    ...
    ValueError: share=1: a number from 0 to below 1 is allowed; try 0.1
    """
    low, start = -math.inf if above is None else above, -math.inf if least is None else least
    if is_number(value, above=low, least=start, below=math.inf if below is None else below, finite=finite, numpy=numpy):
        return float(value) if numpy else value
    within = f" above {above}" if above is not None else f" of at least {least}" if least is not None else ""
    if below is not None:
        within = (
            f" between {above} and {below}" if above is not None else f" from {least} to below {below}" if within else f" below {below}"
        )
    raise error(f"{name}={value!r:.80}: {what}{within} {_is(what)} allowed{also}")


def check_budget(budget_s: float | None, *, limited: bool = False, error: type[ValueError] = ValueError) -> None:
    """Check a budget of seconds; None = there is no limit, which `limited` refuses."""
    if limited or budget_s is not None:
        also = f"; try budget_s=60{', or None for no limit' * (not limited)}"
        real_number("budget_s", budget_s, above=0, what="seconds", also=also, error=error)


def choice(
    name: str,
    value: Any,
    allowed: Iterable[str],
    *,
    meant: Mapping[str, str] | None = None,
    also: str = "",
    error: type[ValueError] = ValueError,
) -> None:
    """Raise unless the value is one of some names; `meant` has other words for them.

    >>> choice("kind", "wide", ["strong", "weak"])
    Traceback (most recent call last):
    ...
    ValueError: kind='wide': allowed are 'strong', 'weak'
    >>> choice("kind", "week", ["strong", "weak"])
    Traceback (most recent call last):
    ...
    ValueError: kind='week': allowed are 'strong', 'weak'; did you mean "weak"?
    """
    names = list(allowed)
    if isinstance(value, str) and value in names:
        return
    other = (meant or {}).get(value) if isinstance(value, str) else None
    near = other if other in names else nearest(str(value), names)
    hint = f'; did you mean "{near}"?' if near else ""
    raise error(f"{name}={value!r:.80}: allowed are {', '.join(map(repr, names))}{also}{hint}")


def objects(argument: str, value: Any, kind: type, *, what: str, error: type[ValueError] = ValueError) -> list[Any]:
    """Return what is given as a list: None, a single object of a kind, or a list or tuple of them.

    >>> objects("model=", int, int, what="a number")
    Traceback (most recent call last):
    ...
    ValueError: model= was given the class int: it takes a number, or a list of them; leave it out if there is none
    """
    parts = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for part in parts:
        if not isinstance(part, kind):
            shown = f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
            raise error(f"{argument} was given {shown}: it takes {what}, or a list of them; leave it out if there is none")
    return parts


def path_of(name: str, value: Any, expected: str) -> Path:
    """An absolute path, of a text or a path.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str | os.PathLike):
        return Path(value).expanduser().absolute()
    text = repr(value)
    raise ValueError(f"{name}={text if len(text) <= SHORT else shown(value)}: expected {expected}")


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The name that a misspelt word resembles most; None = it resembles none, by `cutoff`, from 0 to 1."""
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)), None)


def near_folder(folder: Path, file: str) -> str:
    """What may be meant instead of a folder that does not exist: one beside it with nearly its name and this file in it, else the newest.

    Of these folders the names begin with the time. The newest is one with measured steps, which those of a sweep's launch lack. "" = none.
    """
    if (inside := folder.parent / "runs" / folder.name / file).is_file():
        return f'; did you mean "{inside.parent}"?'
    names = sorted(there.parent.name for there in folder.parent.glob(f"*/{file}"))
    if near := nearest(folder.name, names):
        return f'; did you mean "{folder.with_name(near)}"?'
    newest = next((there for name in reversed(names) if _has_steps(there := folder.with_name(name))), None)
    return f'; the newest there is "{newest}"' if newest else ""


def _has_steps(run_dir: Path) -> bool:
    with contextlib.suppress(OSError), open(run_dir / "rank0.jsonl", "rb") as lines:
        return any(b'"step"' in line for line in lines)
    return False


def near_script(path: Path) -> str:
    """What may be meant by the path of a Python file that does not exist: a file in its folder with a similar name, else all of them."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    there = {file.stem: file.name for file in sorted(path.parent.glob("*.py"))}
    if near := nearest(path.stem, there, cutoff=0.7):  # at 0.6, train is near strange
        return f'did you mean "{path.with_name(there[near])}"?'
    names = list(there.values())
    more = f" and {len(names) - 8} more" * (len(names) > 8)
    return f"the folder has {', '.join(names[:8])}{more}" if names else "the folder has no .py file"


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A question for the middle of a message, with the space behind it; "" where no name is near.

    >>> did_you_mean("num_worker", ["num_workers", "steps"])
    "did you mean 'num_workers'? "
    """
    near = nearest(word, known, cutoff=cutoff)
    return f"did you mean {near!r}? " if near else ""


def unknown_names(
    what: str, names: Iterable[str], known: Iterable[str], *, meant: Mapping[str, str] | None = None, listed: str = ""
) -> str:
    """The message about all names that are not known, each with the nearest that is; "" = all are known.

    >>> unknown_names("RunSpec has no knob", ["num_worker", "gpus"], ["num_workers", "nproc_per_node"], meant={"gpus": "nproc_per_node"})
    "RunSpec has no knobs 'num_worker': did you mean 'num_workers'? 'gpus': here it is called nproc_per_node"

    Args:
        what: how the message begins.
        names: the names as they were given.
        known: those that there are. Where a given one resembles none, the message names the three nearest if `listed` is given, else all.
        meant: other words for them.
        listed: where else they are listed.
    """
    known, meant = list(known), meant or {}
    strange = {name: nearest(name[:80], [*known, *meant]) for name in names if name not in known}
    if not strange:
        return ""
    hints = {
        name: f"here it is called {meant[near]}" if near in meant else f"did you mean {near!r}?" for name, near in strange.items() if near
    }
    told = "; ".join(f"{name[:80]!r}: {hints[name]}" if name in hints else repr(name[:80]) for name in strange).replace("?;", "?")
    alike = difflib.get_close_matches(next((name for name in strange if name not in hints), "")[:80], known, n=3, cutoff=0.3)
    near = f": the nearest are {', '.join(alike)}" if listed and alike else ""
    end = f" (all: {listed})" if listed else ""
    end = end if len(hints) == len(strange) else near + end if listed else f": It has {', '.join(known)}"
    return f"{what}{'s' * (len(strange) > 1)} {told}{end}"


def is_module(value: object) -> bool:
    """Is it a torch.nn.Module, or a class of them? (Without importing torch.)"""
    return hasattr(value, "state_dict") and hasattr(value, "parameters")


def shown(value: object) -> str:
    """A value in a message: the name of a function or class, else of its type."""
    return getattr(value, "__name__", type(value).__name__)


class NearestAttribute:
    """Base of a class that answers an attribute which it does not have with the nearest that it has."""

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            cls = type(self)
            if hasattr(cls, name):  # its property raised an AttributeError, which says more
                return object.__getattribute__(self, name)
            hint = did_you_mean(name, (known for known in dir(cls) if not known.startswith("_")))
            error = AttributeError(f"{cls.__name__!r} object has no attribute {name!r}" + (f": {hint.strip()}" if hint else ""))
            if hint:  # with both of these as they are, Python's traceback suggests the same once more
                error.name, error.obj = name, None
            raise error


def _is(what: str) -> str:
    return "is" if what.startswith("a ") else "are"
