"""Referrers: the Python variable that keeps a tensor alive, found by asking the garbage collector who refers to it."""

import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from workbench import collector
from workbench.package import ROOT

MOST_DEEP = 10
"""How many containers inside each other are followed."""
MOST_SEEN = 20_000
"""So many objects are asked about."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What keeps something alive."""

    words: str
    """The variable, its kind and where it is."""
    bounded: bool = False
    """Is it a queue with a largest length?"""
    graph: bool = False
    """Does what it holds lead to a graph, which lives as long as it does?"""


def living() -> list[Tensor]:
    """All tensors that Python knows of, without those that have no memory. What was frozen is thawed, and `Referrers` see it."""
    found = [one for one in collector.living() if issubclass(type(one), Tensor)]  # not isinstance, which asks proxies what they are
    return [one for one in found if not one.is_meta]


@dataclass(slots=True)
class _Trail:
    """How an object was come to, from the tensors that it keeps alive. Holds none of them: that would be a referrer as well."""

    roots: set[int]
    """The tensors, by id."""
    bounded: bool = False
    """Did it pass a queue with a largest length?"""
    kind: str = ""
    """Of what a dictionary or a variable stands for."""
    key: str = ""
    """Under which a dictionary has it."""
    place: int = -1
    """Of a variable among those that a function shares."""


class Referrers:
    """Answers who holds tensors. Make it where the variables of the user's functions still live, and ask it there.

    The garbage collector looks at everything that lives for one answer, so all tensors are asked about at once, level by level.
    """

    def __init__(self, names: Mapping[nn.Module, str] | None = None) -> None:
        """Look at the variables that there are.

        Args:
            names: of a model's modules.
        """
        self._names = names or {}
        self._modules = {id(vars(module)): name for name, module in list(sys.modules.items()) if isinstance(module, types.ModuleType)}
        self._locals: dict[int, tuple[str, str]] = {}
        for frame in _frames():
            if frame.f_code.co_name != "<module>":
                self._locals.update({id(value): (name, frame.f_code.co_name) for name, value in frame.f_locals.items()})

    def holdings(self, tensors: Iterable[Tensor]) -> dict[int, Holding]:
        """The nearest variable that leads to each tensor, by the tensor's id; those to which none leads are left out."""
        level: list[Any] = list(tensors)
        graphs = {id(tensor): tensor.grad_fn is not None for tensor in level}
        trails = {id(tensor): _Trail({id(tensor)}) for tensor in level}
        found: dict[int, Holding] = {}
        seen = {*trails, id(level)}
        for _ in range(MOST_DEEP):
            for one in level:
                if id(one) in self._locals:
                    name, function = self._locals[id(one)]
                    _resolve(found, trails[id(one)], f"{name} ({_kind(one)} in {function}())", graphs)
            level = [one for one in level if not trails[id(one)].roots <= found.keys()]
            if not level or len(seen) > MOST_SEEN:
                break
            seen.add(id(level))
            level, trails = self._above(level, trails, seen, found, graphs)
        return found

    def _above(
        self, level: list[Any], trails: dict[int, _Trail], seen: set[int], found: dict[int, Holding], graphs: dict[int, bool]
    ) -> tuple[list[Any], dict[int, _Trail]]:
        """The referrers of a level that have no name, and how they were come to."""
        above: dict[int, _Trail] = {}
        objects: list[Any] = []
        for referrer in gc.get_referrers(*level):
            if id(referrer) in seen or isinstance(referrer, types.FrameType | types.ModuleType) or _is_ours(referrer):
                continue
            for one in gc.get_referents(referrer):
                trail = trails.get(id(one))
                if trail is None:
                    continue
                if name := self._named(one, trail, referrer):
                    _resolve(found, trail, name, graphs)
                    continue
                if id(referrer) not in above:
                    above[id(referrer)] = _trail(one, trail, referrer)
                    objects.append(referrer)
                above[id(referrer)].roots |= trail.roots
        seen.update(above)
        return objects, above

    def _named(self, one: Any, trail: _Trail, referrer: Any) -> str | None:
        """The name that a referrer has for an object, if it is a variable or an attribute."""
        if isinstance(referrer, types.FunctionType):
            if referrer.__closure__ is one and trail.place >= 0 and not (referrer.__module__ or "").startswith("workbench."):
                return f"{referrer.__code__.co_freevars[trail.place]} ({trail.kind}, a variable around {referrer.__name__}())"
            return f"a default ({trail.kind}) of {referrer.__qualname__}()" if referrer.__defaults__ is one else None
        if isinstance(referrer, dict):
            module = self._modules.get(id(referrer))
            return None if module is None else f"{_key(referrer, one)} ({_kind(one)}, a global variable of {_file(module)})"
        attributes = getattr(referrer, "__dict__", None)
        if attributes is one:
            return f"{trail.key} ({trail.kind}, an attribute of {self._owner(referrer)})"
        if isinstance(attributes, dict) and (name := next((name for name, value in attributes.items() if value is one), None)):
            return f"{name} ({_kind(one)}, an attribute of {self._owner(referrer)})"
        return None

    def _owner(self, owner: Any) -> str:
        if isinstance(owner, type):
            return f"the class {owner.__name__}"
        name = self._names.get(owner) if isinstance(owner, nn.Module) else None
        return f"the module {name}, {_kind(owner)}" if name else _kind(owner)


def _resolve(found: dict[int, Holding], trail: _Trail, words: str, graphs: Mapping[int, bool]) -> None:
    for root in trail.roots - found.keys():
        found[root] = Holding(words, trail.bounded, graphs[root])


def _trail(one: Any, before: _Trail, referrer: Any) -> _Trail:
    trail = _Trail(set(before.roots), before.bounded or (isinstance(referrer, deque) and referrer.maxlen is not None), before.kind)
    if isinstance(referrer, dict):
        trail.key, trail.kind = _key(referrer, one), _kind(one)
    elif isinstance(one, types.CellType) and isinstance(referrer, tuple):
        trail.place = referrer.index(one)
    else:
        trail.kind = _kind(one)
    return trail


def _frames() -> Iterator[types.FrameType]:
    """Of the user's functions that are running."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(str(ROOT)):
            yield frame
        frame = frame.f_back


def _is_ours(one: Any) -> bool:
    return type(one).__module__.startswith("workbench.") and not isinstance(one, nn.Module)


def _key(names: dict[Any, Any], one: Any) -> str:
    return next((str(name) for name, value in names.items() if value is one), "?")


def _kind(one: Any) -> str:
    name = type(one).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _file(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).name if file else "the notebook" if module == "__main__" else module
