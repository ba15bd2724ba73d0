"""Notices loops that train on the same samples several times: in workers, on ranks, or in each epoch in the same order.

A look at the first batches of a training loop is enough: a digest of their first bytes, the sampler, and whether there is a process group.
What one rank sees alone becomes a warning among its notes; what takes a comparison of ranks goes into its file, for `Run.notes`.
"""

import contextlib
import hashlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from workbench.core.checks import number_or_default

FIRST_BYTES = 1 << 16
"""Bytes of each tensor that a digest is of."""
MAX_TENSORS = 8
"""Tensors of a batch that a digest is of."""
SPLIT_BY_WORKER = (
    "in its __iter__: info = torch.utils.data.get_worker_info(), then itertools.islice(samples, info.id if info else 0, None, "
    "info.num_workers if info else 1)"
)
"""How a stream gives each worker its part."""
_SPLITTERS = frozenset({"get_worker_info", "sharding_filter", "apply_sharding", "split_by_worker", "WorkerInfo"})
"""Names in the code of a stream that gives each worker its part: torch's own, of its data pipes, and of webdataset."""


def digest(batch: Any) -> tuple[str, bool]:
    """A digest of the first bytes of a batch's CPU tensors, and whether its samples differ. ("", False) of a batch without tensors."""
    torch: Any = sys.modules.get("torch")
    tensors = list(_tensors(batch, torch)) if torch else []
    hashed, differ = hashlib.blake2b(digest_size=8), False
    for tensor in tensors:
        try:
            flat = tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1)
            differ = differ or (len(flat) > 1 and not bool((flat[:1, :1024] == flat[:64, :1024]).all()))
            rows = max(1, FIRST_BYTES // max(1, flat[:1].nbytes))
            hashed.update(flat[:rows].contiguous().reshape(-1).view(torch.uint8)[:FIRST_BYTES].numpy().data)
        except Exception:  # a layout or a type without bytes, or a tensor of somebody's own: no reason to end the loop
            return "", False
    return (hashed.hexdigest(), differ) if tensors else ("", False)


def _tensors(value: Any, torch: Any, depth: int = 3) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided and value.numel():
            yield value
    elif depth and isinstance(value, Mapping | list | tuple):
        for part in [*(value.values() if isinstance(value, Mapping) else value)][:MAX_TENSORS]:
            yield from _tensors(part, torch, depth - 1)


def is_stream(loader: Any) -> bool:
    """Is it a DataLoader over an IterableDataset?"""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(loader, data.DataLoader) and is_stream_dataset(loader.dataset)


def is_stream_dataset(dataset: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(dataset, data.IterableDataset)


def may_split(loader: Any) -> bool:
    """Does the code of a stream, or of its loader, seem to give each worker its own part?"""
    init = loader.worker_init_fn
    return (init is not None and getattr(init, "splits_streams", True)) or _mentions_splitting(loader.dataset, 4)


def _mentions_splitting(value: Any, depth: int) -> bool:
    """Does the class of an object, or that of what it holds, name something of `_SPLITTERS`?"""
    modules = {inspect.getmodule(kind) for kind in type(value).__mro__ if not kind.__module__.startswith(("torch.", "builtins", "typing"))}
    functions = [*inspect.getmembers(type(value), inspect.isfunction)]
    for _, function in functions:
        if _named(function.__code__) & _SPLITTERS:
            return True
        called = (function.__globals__.get(name) for name in _named(function.__code__))  # helpers of the same module
        if any(
            _named(helper.__code__) & _SPLITTERS for helper in called if inspect.isfunction(helper) and inspect.getmodule(helper) in modules
        ):
            return True
    if not depth:
        return False
    inner = [part for part in getattr(value, "__dict__", {}).values() if hasattr(type(part), "__iter__") and hasattr(part, "__dict__")]
    return any(_mentions_splitting(part, depth - 1) for part in inner)


def _named(code: Any) -> set[str]:
    names = set(code.co_names) | set(code.co_freevars)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            names |= _named(constant)
    return names


class FirstBatches:
    """Looks at the first batches of the training loops of a process.

    It looks while the loop waits for its batch, at some µs per look, and at three batches of a pass at most.
    """

    def __init__(self, *, warn: Callable[[str], None], say: Callable[[dict[str, Any]], None], steps: Callable[[], int]) -> None:
        """Look at nothing yet.

        Args:
            warn: called with a warning.
            say: called with a row for the file of the rank.
            steps: gives the optimizer steps so far. (A pass without any is an evaluation, which may read the same on all ranks.)
        """
        self._warn, self._say, self._steps = warn, say, steps
        self._reported = number_or_default("WORLD_SIZE", 1) < 2
        """Is this rank's reading reported already, or not needed?"""
        self._epochs = weakref.WeakKeyDictionary[Any, Any]()  # sampler -> its epoch in the first training pass
        self._warned: set[str] = set()

    def of(self, loader: Any, batches: Iterable[Any] | None = None) -> Iterator[Any]:
        """The batches of a pass over a loader."""
        source = iter(loader if batches is None else batches)
        workers = getattr(loader, "num_workers", 0) if is_stream(loader) else 0
        first, before, sampler = "", self._steps(), _sampler(loader)
        epoch = getattr(sampler, "epoch", None)
        for count, batch in enumerate(source, 1):
            if workers > 1 if count == 2 else count == 1 and (workers > 1 or not self._reported):
                read, differ = digest(batch)
                if count == 1:
                    first = read
                elif read and read == first and differ:
                    self._once(
                        f"the {workers} workers of the loader give the same samples, as each reads the whole stream. Split it by worker, "
                        f"{SPLIT_BY_WORKER}"
                    )
            yield batch
            if self._steps() > before and (count > 1 or workers < 2):
                self._report(loader, first, sampler, epoch)
                break
        yield from source

    def without_loader(self) -> None:
        """A training loop was seen that reads no DataLoader."""
        if not self._reported:
            self._reported = True
            self._say({"reads": {"first": "", "group": _in_group(), "split": None, "data": ""}})

    def _report(self, loader: Any, first: str, sampler: Any, epoch: Any) -> None:
        if not self._reported:
            self._reported = True
            data = ""
            with contextlib.suppress(Exception):  # whatever a dataset raises is no reason to end the loop
                data = _identity(loader.dataset)
            self._say({"reads": {"first": first, "group": _in_group(), "split": _is_split(loader), "data": data}})
        if hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", False) and epoch is not None:
            with contextlib.suppress(TypeError):  # a sampler without a hash, such as a dataclass
                self._compare(sampler, epoch)

    def _compare(self, sampler: Any, epoch: Any) -> None:
        if sampler not in self._epochs:
            self._epochs[sampler] = epoch
        elif self._epochs[sampler] == epoch:
            self._once("each epoch has the samples in the same order: call loader.sampler.set_epoch(epoch) before each pass")
        else:
            self._epochs[sampler] = object()  # it is set: never to be said

    def _once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)


def _sampler(loader: Any) -> Any:
    """The sampler with the order of the samples."""
    sampler = getattr(loader, "sampler", None)
    return sampler if hasattr(sampler, "set_epoch") else getattr(getattr(loader, "batch_sampler", None), "sampler", sampler)


def _is_split(loader: Any) -> bool:
    """Does a sampler of the loader know of ranks? torch's has `num_replicas`, others `process_index`, `data_parallel_rank`, …"""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None), getattr(batches, "batch_sampler", None))
    names = [name for sampler in samplers for name in getattr(sampler, "__dict__", {})]
    return any(word in name for name in names for word in ("rank", "replica", "process", "shard", "world"))


def _identity(dataset: Any) -> str:
    """A digest of what a dataset with a length is made of: its numbers, texts, and the ends of its lists and tensors; "" where it has none.

    Datasets of which each rank gets a part of its own differ in it.
    """
    if is_stream_dataset(dataset) or not hasattr(dataset, "__len__"):
        return ""
    parts = list(_parts(dataset, 3))
    return hashlib.blake2b("\n".join([str(len(dataset)), *parts]).encode("utf-8", "replace"), digest_size=8).hexdigest() if parts else ""


def _parts(value: Any, depth: int) -> Iterator[str]:
    torch: Any = sys.modules.get("torch")
    if isinstance(value, str | bytes | int | float):
        yield repr(value)[:1000]
    elif torch and isinstance(value, torch.Tensor):
        yield f"{tuple(value.shape)} {digest(value)[0]}"
    elif isinstance(value, Mapping):
        yield from _parts(list(value.items()), depth)
    elif isinstance(value, list | tuple | range):
        yield str(len(value))
        for part in (*value[:3], *value[-3:]):
            yield from _parts(part, depth - 1)
    elif hasattr(value, "dtype") and hasattr(value, "shape"):  # numpy
        yield f"{value.shape} {value.ravel()[:50]!r:.1000}"
    elif depth > 0:
        for name, part in sorted(getattr(value, "__dict__", {}).items()):
            yield name
            yield from _parts(part, depth - 1)


def _in_group() -> bool:
    """Is this process in a process group, of torch or of something else that is loaded?"""
    dist = sys.modules.get("torch.distributed")
    joined = dist is not None and dist.is_available() and dist.is_initialized()
    return joined or any(name in sys.modules for name in ("horovod", "mpi4py", "byteps", "ray"))


def rank_notes(reads: Mapping[int, Mapping[str, Any]], world_size: int) -> list[str]:
    """Notes on ranks that train apart from each other, or on the same samples."""
    if world_size < 2 or len(reads) < 2:
        return []
    first = [read.get("first") for _, read in sorted(reads.items())]
    same = bool(first[0]) and len(set(first)) == 1
    if not any(read.get("group") for read in reads.values()):
        on = ", all on the same samples: nothing is gained by more ranks" if same else ", and none of them learns from the others"
        return [
            f"the {world_size} ranks are in no process group, so each trains a model of its own{on}. To train one model: "
            "torch.distributed.init_process_group(), the model in DistributedDataParallel, a DistributedSampler in the loader"
        ]
    if same:
        how = (
            "its DistributedSampler has the same rank on all"
            if any(read.get("split") for read in reads.values())
            else ("DataLoader(…, sampler=DistributedSampler(dataset)), or for a stream itertools.islice(samples, rank, None, world_size)")
        )
        return [f"all {len(reads)} ranks train on the same samples, so more ranks teach the model nothing new: {how}"]
    data = [read.get("data") for read in reads.values()]
    if data[0] and len(set(data)) == 1 and not any(read.get("split") for read in reads.values()):
        return [
            f"no loader has a DistributedSampler: each of the {len(reads)} ranks reads the whole dataset in an order of its own, so an "
            f"epoch has each sample {len(reads)} times: DataLoader(…, sampler=DistributedSampler(dataset))"
        ]
    return []
