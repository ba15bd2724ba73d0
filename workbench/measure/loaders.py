"""Loaders, torch's DataLoader above all: copies that share no workers, an end without stray processes, state put back, why workers fail."""

import contextlib
import copy
import pickle
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

KNOWN_WARNINGS = (
    "This DataLoader will create",  # more workers than cores
    "'pin_memory' argument is set as true but",
    ".*use of fork\\(\\) may lead to deadlocks",
    "Got pickle error when attempting to start a worker",  # the error itself follows
)
"""What torch and Python say whenever a loader starts: the user knows it from training, and repeats of it would be ours."""


def shut_down(iterator: Any) -> None:
    """End an iterator over a loader and its worker processes now: left to the garbage collector, a forked child may do it, and complain."""
    for name in ("_shutdown_workers", "close"):  # a DataLoader's; a generator's, around one
        if callable(end := getattr(iterator, name, None)):
            with contextlib.suppress(Exception):
                end()
            return


def unshared(loader: Any) -> Any:
    """A DataLoader that shares all with this one but its running workers; other loaders are returned as they are."""
    if not isinstance(loader, DataLoader):
        return loader
    try:
        twin = copy.copy(loader)
    except Exception:  # a subclass that cannot be copied
        return loader
    twin._iterator = None
    return twin


def length_of(loader: Any) -> int | None:
    """Batches per pass, where the loader tells."""
    try:
        return len(unshared(loader)) or None  # a DataLoader over a stream remembers that it was asked, and warns later
    except Exception:  # no length, or one that fails: then it is counted
        return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says whenever workers start."""
    with warnings.catch_warnings():
        for message in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


def inner_loaders(loader: Any) -> list[Any]:
    """The DataLoaders inside a loader that is none itself."""
    if isinstance(loader, DataLoader):
        return []
    return [part for part in getattr(loader, "__dict__", {}).values() if isinstance(part, DataLoader)]


def parts(loader: Any) -> list[Any]:
    """The objects of a loader that remember where they are, or open files when they are first used: itself, samplers, datasets."""
    waiting: list[Any] = [one for one in (loader, *inner_loaders(loader)) if isinstance(one, DataLoader)]
    found: dict[int, Any] = {}
    while waiting:
        part = waiting.pop()
        if id(part) in found:
            continue
        found[id(part)] = part
        for value in getattr(part, "__dict__", {}).values():
            waiting += [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Dataset | Sampler)]
    return list(found.values())


class Kept:
    """The attributes of an object and the state of its random generators, to be put back."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._attributes = dict(getattr(part, "__dict__", {}))
        self._generators = [(value, state_of(value)) for value in self._attributes.values() if isinstance(value, GENERATORS)]

    def put_back(self) -> None:
        now = getattr(self._part, "__dict__", None)
        if now is not None:
            now.clear()
            now.update(self._attributes)
        for generator, state in self._generators:
            set_state_of(generator, state)


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def state_of(generator: Any) -> Any:
    """The state of a random generator: one of GENERATORS."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return (generator.getstate if isinstance(generator, random.Random) else generator.get_state)()


def set_state_of(generator: Any, state: Any) -> None:
    """Put it back."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


def why_no_worker(loader: Any, error: Exception) -> str:
    """What keeps a DataLoader's worker from starting or from making a batch, in one line."""
    if isinstance(error, TypeError | AttributeError | pickle.PicklingError):
        for what in ("dataset", "collate_fn", "worker_init_fn"):
            if why := unpicklable(getattr(loader, what, None)):
                return f"{what}{why}"
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def unpicklable(value: Any) -> str | None:
    """Which attribute of an object cannot be pickled, to be put behind its name; None if it can."""
    try:
        pickle.Pickler(_Nowhere()).dump(value)
    except Exception:
        for name, part in getattr(value, "__dict__", {}).items():
            if deeper := unpicklable(part):
                return f".{name}{deeper}"
        return f" (a {type(value).__name__}) cannot be pickled"
    return None
