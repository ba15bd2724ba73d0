"""`doctor`: finds what in a data loader will break, give wrong data, or be very slow; tries what can be tried."""

import contextlib
import hashlib
import io
import itertools
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from workbench.core import units
from workbench.core.synonyms import accept_synonyms
from workbench.core.system_load import usable_cores
from workbench.data.analysis.loader_report import CHECKS, LoaderFinding, LoaderReport
from workbench.data.rank_batches import batches_of_ranks, in_words, samplers_of
from workbench.data.resumable_sampler import ResumableSampler

LARGE_PICKLE = 50_000_000
"""Bytes from which on each start of a worker that is not forked is slow: 0.1 s for each copy that is written and read."""
MANY_OBJECTS = 100_000
"""Python objects in a dataset from which on the reference counts of workers copy pages: 400,000 paths took 44 MB in each worker."""
GROWTH = 8 << 20
"""Bytes of private memory that a worker may gain while it reads the same batches again."""
BATCHES = 8
"""Batches that are read to try something."""
FUTURE = (3, 14)
"""The version of Python from which on Linux starts workers by a fork server, which are sent everything as a pickle."""


@accept_synonyms
def doctor(loader: "DataLoader[Any]", *, run: bool = True, shm: str = "/dev/shm", processes: bool = False) -> LoaderReport:
    """Look for what will break, return wrong data or be very slow in a loader, and say how to fix it.

    If all ranks of a process group call it, it also compares how many batches each of them gets.

    Args:
        loader: a torch DataLoader. Some of its batches are read, by separate workers that end afterwards.
        run: read batches; False = only examine how the loader is built.
        shm: folder of the shared memory.
        processes: also start a fresh Python that reads the pickle of the dataset, as a spawned worker does. Takes seconds.

    Raises:
        ValueError: not a DataLoader.
    """
    if not isinstance(loader, DataLoader):
        raise ValueError(f"doctor looks at a torch.utils.data.DataLoader, and this is a {type(loader).__name__}: give the loader itself")
    begun = time.monotonic()
    exam = _Exam(loader, run=run, shm=shm, processes=processes)
    findings = tuple(map(exam, CHECKS))
    kind = type(loader.dataset).__name__
    target = f"DataLoader of {kind}, batch_size={loader.batch_size}, num_workers={loader.num_workers}"
    return LoaderReport(target=target, findings=findings, seconds=time.monotonic() - begun)


class _Exam:
    def __init__(self, loader: "DataLoader[Any]", *, run: bool, shm: str, processes: bool) -> None:
        self.loader, self.run, self._shm, self._processes = loader, run, shm, processes
        self.workers = loader.num_workers
        context = loader.multiprocessing_context or multiprocessing
        self.method = str(context.get_start_method())
        self.stream = isinstance(loader.dataset, IterableDataset)
        self.first: Any = None

    def __call__(self, check: str) -> LoaderFinding:
        self._check = check
        try:
            found: LoaderFinding = getattr(self, check.replace(" ", "_").replace("-", "_"))()
        except Exception as error:  # of a user's dataset or sampler: the other checks go on
            return self._said("not judged", f"{type(error).__name__}: {error}"[:200])
        return found

    def _said(self, severity: str, figure: str, fix: str = "", *, proved: bool = False) -> LoaderFinding:
        return LoaderFinding(check=self._check, severity=severity, figure=figure, fix=fix, proved=proved)

    def runs(self) -> LoaderFinding:
        if not self.run:
            return self._said("not judged", "no batch was read")
        try:
            with _batches(self.loader) as batches:
                self.first = next(batches, None)
        except Exception as error:
            why = str(error).strip().splitlines()
            return self._said(
                "breaks",
                f"{type(error).__name__}: {why[-1] if why else ''}"[:200],
                "read dataset[0] here first; with workers, look at the checks below",
                proved=True,
            )
        if self.first is None:
            return self._said("wrong", "it has no batch", "a smaller batch_size, drop_last=False, or more samples", proved=True)
        return self._said("fine", "a batch was read", proved=True)

    def pickling(self) -> LoaderFinding:
        sent = {name: getattr(self.loader, name, None) for name in ("dataset", "collate_fn", "worker_init_fn")}
        for name, value in sent.items():
            size = _Size()
            try:
                pickle.Pickler(size, pickle.HIGHEST_PROTOCOL).dump(value)
            except Exception as error:
                place = _unpicklable(value, name)
                now = self.method != "fork" and self.workers > 0
                when = "with this start method" if now else f"under Python {FUTURE[0]}.{FUTURE[1]}, and on macOS and Windows"
                fix = "a function of a module instead of a lambda; paths instead of handles, opened in the worker at the first read"
                figure = f"{place} cannot be pickled ({error!s:.80}), which workers need {when}"
                return self._said("breaks" if self.workers else "fine", figure, fix if self.workers else "", proved=True)
            if name == "dataset" and size.bytes > LARGE_PICKLE:
                large = next((path for path, item in _attributes(value, name) if isinstance(item, np.memmap)), "")
                hint = f": {large} is a memory map, and is sent as a whole" if large else ""
                slow = self.workers > 0
                return self._said(
                    "slow" if slow else "fine",
                    f"the dataset is {units.bytes_(size.bytes)} as a pickle{hint}",
                    "keep the path, and open the file at the first read in each process" if slow else "",
                    proved=True,
                )
        return self._said("fine", "dataset, collate_fn and worker_init_fn can be pickled", proved=True)

    def main_class(self) -> LoaderFinding:
        named = {"dataset": type(self.loader.dataset), "collate_fn": self.loader.collate_fn, "worker_init_fn": self.loader.worker_init_fn}
        own = [name for name, value in named.items() if getattr(value, "__module__", "") == "__main__"]
        file = getattr(sys.modules["__main__"], "__file__", None)
        if own and not file:
            now = self.method != "fork" and self.workers > 0
            return self._said(
                "breaks" if now else "slow" if self.workers else "fine",
                f"{own[0]} is defined in a notebook or a prompt, which workers "
                f"{'cannot import' if now else f'cannot import under Python {FUTURE[0]}.{FUTURE[1]}'}",
                "write the class into a module (%%writefile data.py) and import it" if self.workers else "",
            )
        if self._processes and not own:
            data = pickle.dumps(self.loader.dataset)
            code = "import pickle, sys; pickle.load(sys.stdin.buffer)"
            done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, timeout=120, check=False)
            if done.returncode:
                why = done.stderr.decode(errors="replace").strip().splitlines()[-1][:150]
                return self._said("breaks", f"a fresh Python cannot read it: {why}", "make its module importable", proved=True)
            return self._said("fine", "a fresh Python reads the dataset", proved=True)
        return self._said("fine", "its classes come from modules")

    def open_handles(self) -> LoaderFinding:
        handles = list(_handles(self.loader.dataset))
        if not handles:
            return self._said("fine", "the dataset holds none")
        place, kind = handles[0]
        fix = "keep the path; open at the first read, in a dict by os.getpid() that __getstate__ leaves out; read by os.pread"
        if not self.workers:
            return self._said("fine", f"{place} is an open {kind}; without workers nothing shares it")
        if self.method != "fork":
            return self._said("breaks", f"{place} is an open {kind}, which cannot be sent to a worker", fix)
        wrong = self._shared_reads() if self.run and not self.stream else None
        if wrong and wrong[0]:
            return self._said(
                "wrong", f"{place} is an open {kind}: {wrong[0]} of {wrong[1]} reads of workers differ or fail", fix, proved=True
            )
        tried = f" ({wrong[1]} reads were right by luck)" if wrong is not None else ""
        return self._said("wrong", f"{place} is an open {kind}: forked workers share its position{tried}", fix)

    def _shared_reads(self) -> tuple[int, int] | None:
        """Samples that workers read otherwise than this process, or not at all; None = the dataset is not repeatable."""
        data: Any = self.loader.dataset
        count = min(len(data), 200)
        expected = [_digest(data[i]) for i in range(count)]
        if expected != [_digest(data[i]) for i in range(count)]:
            return None
        order = [i for _ in range(10) for i in range(count)]
        trial = _trial(data, batch_size=20, sampler=order, num_workers=4, collate_fn=_digests)
        given: list[bytes] = []
        with _batches(trial) as batches:
            for _ in range(len(trial)):
                try:
                    given += next(batches)
                except Exception:  # as where another worker has moved the position behind the end
                    if not all(worker.is_alive() for worker in batches._workers):
                        raise
                    given += [b""] * min(20, len(order) - len(given))
        wrong = sum(mine != expected[i] for i, mine in zip(order, given, strict=True))
        return wrong, len(order)

    def stream_parts(self) -> LoaderFinding:
        if not self.stream:
            return self._said("fine", "it is not a stream")
        if self.workers < 2 or not self.run:
            return self._said("not judged", f"num_workers={self.workers}")
        per_worker: list[list[bytes]] = [[] for _ in range(self.workers)]
        with _batches(self.loader) as batches:
            for number, batch in enumerate(itertools.islice(batches, 3 * self.workers)):
                per_worker[number % self.workers].append(_digest(batch))
        same = sum(each[:1] == per_worker[0][:1] for each in per_worker[1:] if each)
        if same:
            return self._said(
                "wrong",
                f"{same + 1} of {self.workers} workers give the same samples",
                "in __iter__: info = torch.utils.data.get_worker_info(), then itertools.islice(samples, info.id, None, info.num_workers)",
                proved=True,
            )
        return self._said("fine", "the first batches of all workers differ", proved=True)

    def padding(self) -> LoaderFinding:
        chain = list(samplers_of(self.loader).values())
        sampler = next((each for each in chain if hasattr(each, "total_size") or hasattr(each, "_tail")), None)
        total, samples = getattr(sampler, "total_size", None), None if self.stream else len(self.loader.dataset)  # type: ignore[arg-type]
        if total is not None and samples is not None and total > samples:
            return self._said(
                "wrong",
                f"the sampler repeats {total - samples} of {samples} samples, so that all ranks have equally many",
                "for an evaluation give each sample once (wb.RunSpec(evaluate=…) does), or take drop_last=True",
            )
        repeats = getattr(sampler, "tail_samples", 0) if getattr(sampler, "_tail", "") == "repeat" else 0
        return self._said("fine", f"{repeats} samples repeated, as declared" if repeats else "no sample is repeated")

    def equal_ranks(self) -> LoaderFinding:
        counts, how = batches_of_ranks(self.loader)
        if not counts:
            return self._said("not judged", how)
        if len(set(counts.values())) < 2:
            each = next(iter(counts.values()))
            said = f"{len(counts)} ranks have {in_words(each)} each{how}" if len(counts) > 1 else "its sampler is for one rank"
            return self._said("fine", said)
        (least, few), (most, many) = (pick(counts.items(), key=lambda pair: pair[1]) for pick in (min, max))
        return self._said(
            "breaks",
            f"rank {least} of {len(counts)} gets {in_words(few)} and rank {most} {many}{how}: "
            f"with DDP, rank {most} waits for it without an end",
            "sampler=wb.data.ResumableSampler(dataset) gives all ranks equally many; else end the epoch after the fewest, or train inside "
            "torch.distributed.algorithms.join.Join([model])",
        )

    def set_epoch(self) -> LoaderFinding:
        chain = {place: each for place, each in samplers_of(self.loader).items() if hasattr(each, "set_epoch")}
        place, sampler = next(((place, each) for place, each in chain.items() if getattr(each, "shuffle", False)), ("", None))
        if sampler is None:
            return self._said("fine", "its sampler needs no set_epoch")
        if isinstance(sampler, ResumableSampler):
            return self._said("fine", "its sampler's batches(loader) calls set_epoch for each epoch")
        once, again = (list(map(repr, itertools.islice(iter(sampler), 1000))) for _ in range(2))
        if once == again and len(set(once)) > 1:
            return self._said(
                "wrong",
                f"two passes have the same order (epoch {getattr(sampler, 'epoch', '?')})",
                f"call {place}.set_epoch(epoch) before each pass, if the training does not do it already",
                proved=True,
            )
        return self._said("fine", "two passes have different orders", proved=True)

    def in_order(self) -> LoaderFinding:
        if getattr(self.loader, "in_order", True) or not self.workers:
            return self._said("fine", "batches come in the order of the sampler")
        return self._said(
            "wrong",
            "in_order=False: batches come as workers finish them, and no run repeats another",
            "in_order=True, unless a few slow samples hold up the rest and repeatability is not needed",
        )

    def _batch_bytes(self) -> tuple[int, int]:
        tensors = list(_tensors(self.first))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors), len(tensors)

    def _ahead(self) -> int:
        return self.workers * int(self.loader.prefetch_factor or 2) + 1

    def shared_memory(self) -> LoaderFinding:
        size, _ = self._batch_bytes()
        if not self.workers or not size or not os.path.isdir(self._shm):
            return self._said("not judged" if self.workers else "fine", "no batch was read" if self.workers else "no workers")
        status = os.statvfs(self._shm)
        free, need = status.f_bavail * status.f_frsize, size * self._ahead()
        figure = f"{self._ahead()} batches of {units.bytes_(size)} take {units.bytes_(need)} of {units.bytes_(free)} in {self._shm}"
        if need > free:
            fix = "docker run --shm-size=8g, fewer workers, or a smaller prefetch_factor"
            return self._said("breaks", figure, fix)
        return self._said("fine", figure)

    def descriptors(self) -> LoaderFinding:
        _, tensors = self._batch_bytes()
        if not self.workers or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
            return self._said("fine", "no workers" if not self.workers else "tensors take none")
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 32
        need = tensors * self._ahead() + 4 * self.workers
        figure = f"{need} for {tensors} tensors in {self._ahead()} batches and the workers' pipes, {used} are open, {limit} allowed"
        if used + need > limit:
            fix = "ulimit -n 65536, or torch.multiprocessing.set_sharing_strategy('file_system'); keep no batch longer than a step"
            return self._said("breaks", figure, fix)
        return self._said("fine", figure)

    def copy_on_write(self) -> LoaderFinding:
        objects, place = _most_objects(self.loader.dataset)
        fix = "keep names as a numpy array of bytes (dtype 'S') or as one bytes object with offsets, numbers as arrays"
        if not self.workers:
            return self._said("fine", "no workers")
        if objects < MANY_OBJECTS or self.method != "fork":
            return self._said("fine", f"the largest container has {objects:,} objects" if objects else "it has no containers of objects")
        growth = self._growth() if self.run and not self.stream else None
        told = f"{place} has {objects:,} Python objects, whose reference counts copy pages in each worker"
        if growth is not None:
            told += f": private memory of a worker grew by {units.bytes_(max(growth, 0))}"
        return self._said("slow", told, fix, proved=growth is not None and growth > GROWTH)

    def _growth(self) -> int | None:
        """Bytes of private memory that a forked worker gains while it touches the dataset's objects, by looking all of them up."""
        data: Any = self.loader.dataset
        order = np.linspace(0, len(data) - 1, min(len(data), 20_000)).astype(int).tolist()
        trial = _trial(data, batch_size=max(1, min(100, len(order) // 20)), sampler=order, num_workers=1, collate_fn=_nothing)
        with _batches(trial) as batches:
            next(batches)
            before, last = _private(batches), None
            for _ in batches:
                last = _private(batches) or last
        return None if before is None or last is None else last - before

    def cores(self) -> LoaderFinding:
        cores, threads = usable_cores(), torch.get_num_threads()
        figure = f"{units.several(self.workers, 'worker')}, {units.several(threads, 'thread')} of the main process, {cores:g} cores"
        if self.workers > cores:
            return self._said("slow", figure, f"num_workers={max(1, int(cores) - 1)}; wb.diagnose(step, loader) finds how many help")
        if self.workers and self.workers + threads > cores + 1 and threads > 1 and not torch.cuda.is_available():
            fix = f"torch.set_num_threads({max(1, int(cores) - self.workers)}), since the training computes on the same cores"
            return self._said("slow", figure, fix)
        return self._said("fine", figure)

    def pin_memory(self) -> LoaderFinding:
        if not self.loader.pin_memory:
            return self._said("fine", "it is off")
        if not torch.accelerator.is_available():
            return self._said("slow", "it is on, and there is no accelerator: nothing is pinned, torch warns", "pin_memory=False here")
        pinned = [tensor.is_pinned() for tensor in _tensors(self.first)]
        if self.run and pinned and not any(pinned):
            fix = "give the batch's class a method pin_memory(), or return tensors, lists or dicts"
            return self._said("slow", "it is on, and no tensor of a batch is pinned", fix, proved=True)
        return self._said("fine", "tensors are pinned", proved=bool(pinned))


class _Size(io.RawIOBase):
    """Counts what is written to it."""

    bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size


@contextlib.contextmanager
def _batches(loader: "DataLoader[Any]") -> Iterator[Any]:
    """An iterator over a loader whose workers end with the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = iter(loader)
        try:
            yield batches
        finally:
            shutdown = getattr(batches, "_shutdown_workers", None)
            if shutdown and not loader.persistent_workers:
                shutdown()
            elif shutdown:
                shutdown()
                loader._iterator = None


def _trial(dataset: Any, **knobs: Any) -> "DataLoader[Any]":
    """A loader with forked workers, to try something; torch warns where there are fewer cores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DataLoader(dataset, multiprocessing_context="fork", **knobs)


def _digest(value: Any) -> bytes:
    total = hashlib.blake2b(digest_size=8)
    for tensor in _tensors(value):
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    total.update(repr(value).encode() if not any(True for _ in _tensors(value)) else b"")
    return total.digest()


def _digests(samples: list[Any]) -> list[bytes]:
    return [_digest(sample) for sample in samples]


def _nothing(samples: list[Any]) -> int:
    return len(samples)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _private(batches: Any) -> int | None:
    """Private dirty bytes of the first worker; None = it cannot be read."""
    with contextlib.suppress(OSError, IndexError, AttributeError, ValueError):
        text = Path(f"/proc/{batches._workers[0].pid}/smaps_rollup").read_text()
        return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_Dirty"))
    return None


def _attributes(value: Any, place: str, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """What a dataset holds, with the path to it."""
    held = getattr(value, "__dict__", None)
    items: Any = held.items() if isinstance(held, dict) and not isinstance(value, type) else ()
    if isinstance(value, Mapping):
        items = itertools.islice(((f"[{key!r}]", item) for key, item in value.items()), 20)
    elif isinstance(value, list | tuple):
        items = itertools.islice(((f"[{i}]", item) for i, item in enumerate(value)), 5)
    for name, item in items:
        path = f"{place}{name}" if str(name).startswith("[") else f"{place}.{name}"
        yield path, item
        if depth and not isinstance(item, torch.Tensor | np.ndarray | str | bytes):
            yield from _attributes(item, path, depth - 1)


def _unpicklable(value: Any, place: str) -> str:
    """The innermost thing in a value that cannot be pickled."""
    found = place
    for path, item in _attributes(value, place):
        try:
            pickle.Pickler(_Size(), pickle.HIGHEST_PROTOCOL).dump(item)
        except Exception:
            found = path
    return found


def _handles(dataset: Any) -> Iterator[tuple[str, str]]:
    """Open files and databases that a dataset holds, and what they are."""
    for path, item in _attributes(dataset, "dataset"):
        kind = type(item)
        module = kind.__module__.partition(".")[0]
        if isinstance(item, io.IOBase) and not isinstance(item, io.BytesIO | io.StringIO) and not item.closed:
            yield path, "file"
        elif module in ("h5py", "lmdb", "sqlite3", "_sqlite3", "zipfile", "tarfile", "socket") and kind.__name__ in (
            "File",
            "Environment",
            "Connection",
            "ZipFile",
            "TarFile",
            "socket",
            "Dataset",
            "Group",
        ):
            yield path, f"{module}.{kind.__name__}"


def _most_objects(dataset: Any) -> tuple[int, str]:
    """The number of Python objects in the largest list or dict of a dataset, about, and its place."""
    most = (0, "")
    for path, item in _attributes(dataset, "dataset"):
        if isinstance(item, list | tuple | dict) and len(item):
            first = next(iter(item.values() if isinstance(item, dict) else item))
            each = 1 + (len(first) if isinstance(first, list | tuple | dict) else 0)
            most = max(most, (len(item) * each, path))
    return most
