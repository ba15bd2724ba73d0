"""Copies and reconfigures DataLoaders, shuts their workers down, and explains why a worker fails."""

import contextlib
import copy
import pickle
import warnings
from collections.abc import Iterator
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

KNOWN_WARNINGS = (
    "This DataLoader will create",  # more workers than cores
    "'pin_memory' argument is set as true but",
    ".*use of fork\\(\\) may lead to deadlocks",
    "Got pickle error when attempting to start a worker",  # the error itself follows
)
"""Warnings of torch and Python whenever a loader starts. The user knows them from training; repeats would come from us."""
KNOBS = {"num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "batch_size", "in_order", "timeout", "worker_init_fn"}
"""Options of a DataLoader that a copy may change."""


def shut_down(iterator: Any) -> None:
    """End an iterator over a loader and its worker processes now: left to the garbage collector, a forked child may do it, and complain."""
    for name in ("_shutdown_workers", "close"):  # a DataLoader's; a generator's, around one
        if callable(end := getattr(iterator, name, None)):
            with contextlib.suppress(Exception):
                end()
            return


def copy_without_workers(loader: Any) -> Any:
    """A DataLoader that shares all with this one but its running workers; other loaders are returned as they are."""
    if (name := _inner_name(loader)) is not None:
        return _around(loader, name, copy_without_workers(vars(loader)[name]))
    if not isinstance(loader, DataLoader):
        return loader
    try:
        twin = copy.copy(loader)
    except Exception:  # a subclass that cannot be copied
        return loader
    twin._iterator = None
    return twin


WRAPPED = ("base_dataloader", "_dataloader")
"""The attributes in which the loaders of Accelerate (and so of Hugging Face's Trainer) and of Fabric have the DataLoader that they read."""


def _inner_name(loader: Any) -> str | None:
    own = getattr(loader, "__dict__", {})
    return next((name for name in WRAPPED if isinstance(own.get(name), DataLoader)), None)


def data_loader_of(loader: Any) -> "DataLoader[Any] | None":
    """The DataLoader that makes the batches: the loader itself, or the one in a wrapper; None if there is none."""
    if (name := _inner_name(loader)) is not None:
        return data_loader_of(vars(loader)[name])
    return loader if isinstance(loader, DataLoader) else None


def shared_numbers(dataset: Any) -> Iterator[Any]:
    """The numbers that a dataset, or the one inside of it, keeps in shared memory, where its workers see them change."""
    for part in (dataset, getattr(dataset, "__dict__", {}).get("dataset")):
        for value in list(getattr(part, "__dict__", {}).values()):
            if isinstance(value, Tensor) and value.numel() == 1 and value.is_shared():  # type: ignore[no-untyped-call]
                yield value.item()
            elif isinstance(value, SynchronizedBase) and hasattr(value, "value"):
                yield value.value


def misses_epochs(loader: Any) -> bool:
    """Has a loader's dataset a `set_epoch` that persistent workers would not see, since no number of it is in shared memory?"""
    inner = data_loader_of(loader)
    return inner is not None and hasattr(inner.dataset, "set_epoch") and next(shared_numbers(inner.dataset), None) is None


def _around(wrapper: Any, name: str, inner: Any) -> Any:
    """A copy of a wrapper that reads another DataLoader. Fabric's has all attributes of the DataLoader, too."""
    twin = object.__new__(type(wrapper))
    shared = {key: value for key, value in vars(inner).items() if key in vars(wrapper)}
    vars(twin).update({**vars(wrapper), **shared, name: inner})
    return twin


def with_knobs(loader: Any, **knobs: Any) -> "DataLoader[Any]":
    """The same DataLoader with other knobs: dataset, sampler, collate function and random generator are shared, workers are not.

    Args:
        loader: a DataLoader.
        knobs: those of `DataLoader`: num_workers, prefetch_factor, persistent_workers, pin_memory, batch_size, in_order, timeout,
            worker_init_fn.

    Raises:
        ValueError: no DataLoader; a knob that cannot be turned, or not so.
    """
    if (name := _inner_name(loader)) is not None:
        return _around(loader, name, with_knobs(vars(loader)[name], **knobs))  # type: ignore[no-any-return]
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"the loader is a {type(loader).__name__}: only the knobs of a torch.utils.data.DataLoader can be turned, "
            f"here {', '.join(knobs)}"
        )
    if unknown := set(knobs) - KNOBS:
        raise ValueError(f"{', '.join(sorted(unknown))} is not a knob of a loader: it has {', '.join(sorted(KNOBS))}")
    twin: DataLoader[Any] = copy_without_workers(loader)
    if twin is loader:
        raise ValueError(f"{type(loader).__name__} cannot be copied, so its knobs cannot be turned")
    if (size := knobs.pop("batch_size", None)) is not None:
        if type(loader.batch_sampler) is not BatchSampler or size < 1:
            raise ValueError(
                f"batch_size={size}: it can be changed to 1 or more, in a loader that has a batch_size of its own; this one has "
                f"{'a batch_sampler' if loader.batch_sampler is not None else 'no batches: batch_size=None'}"
            )
        knobs |= {"batch_size": size, "batch_sampler": BatchSampler(loader.sampler, size, loader.drop_last)}
    workers = knobs.get("num_workers", loader.num_workers)
    if workers < 0:
        raise ValueError(f"num_workers={workers}: it has to be 0 or more")
    if workers == 0:
        if knobs.get("prefetch_factor") or knobs.get("persistent_workers"):
            raise ValueError("prefetch_factor and persistent_workers need workers: try num_workers=1 or more")
        knobs |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
        twin.multiprocessing_context = None
    elif (knobs.get("prefetch_factor") or loader.prefetch_factor) is None:
        knobs["prefetch_factor"] = 2  # torch's default
    vars(twin).update(knobs)  # past DataLoader.__setattr__, which guards some of them
    return twin


def length_of(loader: Any) -> int | None:
    """Batches per pass; None where the loader does not know."""
    try:
        return len(copy_without_workers(loader)) or None  # a DataLoader over a stream remembers that it was asked, and warns later
    except Exception:  # no length, or one that fails: then it is counted
        return None


@contextlib.contextmanager
def without_known_warnings() -> Iterator[None]:
    """Without what torch says whenever workers start."""
    with warnings.catch_warnings():
        for message in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


def inner_loaders(loader: Any) -> list[Any]:
    """The DataLoaders inside a loader that is not a DataLoader itself."""
    if data_loader_of(loader) is loader:
        return []
    return [part for part in getattr(loader, "__dict__", {}).values() if isinstance(part, DataLoader)]


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


def worker_error(loader: Any, error: Exception) -> str:
    """What keeps a DataLoader's worker from starting or from making a batch, in one line."""
    if isinstance(error, TypeError | AttributeError | pickle.PicklingError):
        for what in ("dataset", "collate_fn", "worker_init_fn"):
            if why := unpicklable_attribute(getattr(loader, what, None)):
                return f"{what}{why}"
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def unpicklable_attribute(value: Any) -> str | None:
    """The attribute of an object that cannot be pickled, as text to go behind the object's name; None if it can be pickled."""
    try:
        pickle.Pickler(_Nowhere()).dump(value)
    except Exception:
        for name, part in getattr(value, "__dict__", {}).items():
            if deeper := unpicklable_attribute(part):
                return f".{name}{deeper}"
        return f" (a {type(value).__name__}) cannot be pickled"
    return None
