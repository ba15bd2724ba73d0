"""Gives endless batches from any loader (Feed), counts its passes, times their start-up, and leaves the loader as it was."""

import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from workbench.core.system_load import cpu_of_process
from workbench.harness.discover import discover
from workbench.harness.loaders import (
    copy_without_workers,
    data_loader_of,
    inner_loaders,
    length_of,
    shut_down,
    without_known_warnings,
    worker_error,
)
from workbench.harness.restore import SavedState
from workbench.timeline.loops import batch_size_of

MAX_STATE_BYTES = 2**26
"""Most bytes of a tensor or array of a loader that is saved. A loader's position and order are smaller; its data may be larger."""

QUIET = 0.02
"""Seconds between two looks at the queue."""
WORK = 0.05
"""CPU time of all workers as a fraction of `QUIET`, below which the workers are assumed to wait for a free place in the queue."""
PATIENCE = 2.0
"""Most seconds to wait until a queue is full."""


class Exhausted(Exception):
    """An iterator that can be read only once has ended."""


class Feed:
    """Endless input of a training step from a loader. When a pass ends a new one begins, and its start-up is timed.

    A Feed iterates over a shallow copy of a DataLoader, so the DataLoader keeps its own persistent workers. The copy shares samplers,
    random generators and the dataset with it; `close` restores their state, and that of any other loader. Batches at the end of a pass
    that do not fill a step are skipped.
    """

    def __init__(self, loader: Iterable[Any], accumulation: int = 1, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Prepare the feed. No worker is started yet.

        Raises:
            ValueError: not an iterable.
        """
        if isinstance(loader, str | bytes) or not (hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")):
            raise ValueError(
                f"the loader is {loader!r}, which gives no batches: it has to be a DataLoader or any other iterable of batches, "
                "e.g. a list of tensors"
            )
        self.loader = loader
        self.accumulation = accumulation
        self.kind = "DataLoader" if data_loader_of(loader) is not None else "once" if isinstance(loader, Iterator) else "iterable"
        """"DataLoader", "iterable" (can be read again) or "once" (an iterator or generator)."""
        self.exhausted = False
        """Has a loader of kind "once" ended?"""
        self.epoch = length_of(loader)
        """Batches per pass; None until it is known."""
        self.batches = 0
        """Batches taken so far."""
        self.start_ups: list[float] = []
        """Seconds from `iter(loader)` to the first batch, of each pass."""
        self.ends: list[float] = []
        """Seconds of the last `next()`, of each pass that has ended. A loader shuts its workers down there."""
        self._clock = clock
        self._source: Any = copy_without_workers(loader)
        self._inner = [(inner, inner._iterator) for inner in inner_loaders(self._source)]
        reached = discover(loader, data=True)
        self.unread = reached.unread
        """The parts of the loader whose state cannot be restored, in words."""
        self._keep = SavedState(reached, most_bytes=MAX_STATE_BYTES)
        self._iterator: Iterator[Any] | None = None
        self._children: set[Any] = set()
        self._taken = 0  # batches of this pass

    @property
    def passes(self) -> int:
        """Number of passes that have begun."""
        return len(self.start_ups)

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch of the DataLoader; None if not known."""
        return batch_size_of(data_loader_of(self.loader))

    @property
    def num_workers(self) -> int:
        """The loader's number of workers; 0 if it is no DataLoader."""
        return int(getattr(self._source, "num_workers", 0) or 0) if self.kind == "DataLoader" else 0

    @property
    def forks(self) -> bool:
        """Does each pass fork workers? They share the pages of this process, so a page is copied when it is first written to."""
        context = getattr(self._source, "multiprocessing_context", None) or multiprocessing
        how = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        return self.num_workers > 0 and not getattr(self._source, "persistent_workers", False) and how == "fork"

    @property
    def queue(self) -> int:
        """Most batches that the workers prepare ahead."""
        return self.num_workers * int(getattr(self._source, "prefetch_factor", None) or 0)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers of this pass, as far as they are children of this process."""
        workers = getattr(self._iterator, "_workers", None)
        if workers is None:
            workers = [child for child in self._children if child.is_alive()] if self._iterator is not None else []
        return tuple(worker.pid for worker in workers if worker.pid)

    def next(self) -> Any:
        """The input of a step: a batch, or a tuple of batches if a step takes several.

        Raises:
            ValueError: the loader is empty.
            Exhausted: the loader can be read only once, and has ended.
        """
        if self.accumulation == 1:
            return self.batch()
        if self.epoch and self.epoch >= self.accumulation > self.epoch - self._taken:
            self.restart()
        return tuple(self.batch() for _ in range(self.accumulation))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self.next()
        except Exhausted:
            raise StopIteration from None

    def batch(self) -> Any:
        """The next batch.

        Raises:
            ValueError: the loader is empty.
            Exhausted: the loader can be read only once, and has ended.
        """
        if self._iterator is not None:
            start = self._clock()
            try:
                batch = next(self._iterator)
            except StopIteration:
                self.ends.append(self._clock() - start)
                self.epoch, self._iterator = self._taken, None  # gone before the next one comes, as in a for loop
            else:
                self._taken += 1
                self.batches += 1
                return batch
        return self._first()

    def _first(self) -> Any:
        if self.exhausted:
            raise Exhausted("the loader could be read only once, and it has ended")
        before = set(multiprocessing.active_children())
        start = self._clock()
        try:
            with without_known_warnings():
                self._iterator = iter(self._source)
                batch = next(self._iterator)
        except StopIteration:
            self._iterator = None
            if not self.batches:
                raise ValueError(
                    f"the loader is empty: {_description(self.loader)} gave no batch. Is its dataset empty, smaller than one batch with "
                    "drop_last=True, or a generator that was read before?"
                ) from None
            self.kind, self.exhausted = "once", True
            raise Exhausted("the loader could be read only once, and it has ended") from None
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            if self.num_workers and (why := worker_error(self.loader, error)) != str(error).strip():
                raise ValueError(
                    f"num_workers={self.num_workers}: no worker could be started: {why}. Workers that are not forked get their dataset "
                    "pickled: keep paths in it and open files at the first use, use functions of a module in place of lambdas, or try "
                    "num_workers=0"
                ) from error
            raise
        if self.kind == "once" and self.passes:
            self.kind = "iterable"  # an iterator that can be read again after all
        self.start_ups.append(self._clock() - start)
        self._children = set(multiprocessing.active_children()) - before
        self._taken = 1
        self.batches += 1
        return batch

    def depth(self) -> int | None:
        """Number of batches that are ready: in the queues, or received out of order. None = cannot be read."""
        source: Any = self._iterator
        try:
            ready = sum(len(task) == 2 for task in source._task_info.values())
            queues = {id(queue): queue for queue in (source._data_queue, source._worker_result_queue)}
            return ready + sum(int(queue.qsize()) for queue in queues.values())  # with pinned memory there are two
        except (AttributeError, NotImplementedError, OSError):  # no workers; torch's names changed; macOS cannot count; shut down
            return None

    def drain(self) -> None:
        """Take all batches that are ready, since a full queue hides a slow loader for some steps."""
        taken = 0
        while taken < self.queue:
            depth = self.depth()
            if depth == 0:
                return
            start = time.perf_counter()
            self.next()
            taken += self.accumulation
            if depth is None and time.perf_counter() - start > QUIET:
                return

    def wait_until_full(self, seconds: float) -> None:
        """Wait until the queue is full. Then the workers are idle, and take no cores from what is timed next."""
        if not (pids := self.worker_pids):
            return
        limit = time.perf_counter() + min(PATIENCE, 1.5 * self.queue * seconds / self.accumulation + 2 * QUIET)
        cpu = sum(map(cpu_of_process, pids))
        while self.depth() != self.queue and time.perf_counter() < limit:
            time.sleep(QUIET)
            before, cpu = cpu, sum(map(cpu_of_process, pids))
            if cpu - before < WORK * QUIET and self.depth() != 0:  # the last batches of a pass leave the queue half empty
                return

    def restart(self) -> None:
        """End this pass, so that the next batch begins a new one. Workers are shut down unless they are persistent."""
        if self._iterator is None or self.kind == "once":
            return
        start = self._clock()
        if not getattr(self._source, "persistent_workers", False):
            shut_down(self._iterator)
        self._iterator = None
        self.ends.append(self._clock() - start)

    def close(self) -> None:
        """Shut the workers down, and restore the state that the loader shares with its copy."""
        if self._iterator is not None and self.kind != "once":
            shut_down(self._iterator)
        for loader, before in self._inner:
            if loader._iterator is not before and loader._iterator is not None:
                shut_down(loader._iterator)
                loader._iterator = before
        if self._source is not self.loader and (running := getattr(self._source, "_iterator", None)) is not None:
            shut_down(running)
            self._source._iterator = None
        self._iterator = None
        self._keep.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _description(loader: Any) -> str:
    if data_loader_of(loader) is None or not hasattr(loader.dataset, "__len__"):
        return f"a {type(loader).__name__}"
    size = f" with batch_size={loader.batch_size}, drop_last={loader.drop_last}" if loader.batch_size else ""
    return f"a {type(loader).__name__} over {len(loader.dataset)} samples{size}"
