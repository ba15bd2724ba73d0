"""Replay: batches that a step was trained on, held to be trained on again without a loader.

The prefetch queue of a loader with workers: emptied before what it would hide, full before what it would disturb.
"""

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from workbench.core.system_load import cpu_of
from workbench.harness.batches import bytes_of, map_tensors, tensors_of
from workbench.harness.feed import Feed

MOST_BATCHES = 8
"""More are not held, unless they differ in shape."""
MOST_VARIED = 64
"""Of batches that differ in shape: they take different times, so many are needed for a fair mean."""
MOST_BYTES = 2**28
"""Nor more bytes, except for a single batch."""


class Replay:
    """Some batches, given again and again, each time in new containers: a step may take things out of its batch."""

    def __init__(self, *, written: bool = False) -> None:
        """Hold nothing yet.

        Args:
            written: does the step write into the tensors of its batch? Then it is given copies.
        """
        self.written = written
        self._held: list[Any] = []
        self._changed: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def first(self) -> Any:
        """One of them."""
        return self.give(1)[0]

    @property
    def varied(self) -> bool:
        """Do they differ in shape?"""
        return len({tuple(tuple(tensor.shape) for tensor in tensors_of(batch)) for batch in self._held}) > 1

    def hold(self, batches: Sequence[Any]) -> None:
        """Hold these instead, as far as they fit. Tensors in shared memory are copied: each takes a file descriptor of a worker's."""
        self._held, self._changed = [], {}
        taken = 0
        for batch in reversed(batches):
            size = bytes_of(batch)
            if self._held and taken + size > MOST_BYTES:
                break
            taken += size
            self._held.append(map_tensors(lambda tensor: tensor.clone() if tensor.is_shared() else tensor, batch))  # type: ignore[no-untyped-call]
        self._held.reverse()
        if not self.varied:
            del self._held[:-MOST_BATCHES]

    def give(self, count: int, change: Callable[[Any], Any] | None = None) -> list[Any]:
        """So many batches, the first of them always the same.

        Args:
            count: how many.
            change: what is made of each, once.
        """
        held = self._held
        if change is not None:
            if id(change) not in self._changed:
                self._changed = {id(change): [change, *map(change, held)]}  # one at a time: they may be twice as large
            held = self._changed[id(change)][1:]
        copied = torch.clone if self.written else _same
        return [map_tensors(copied, batch) for batch in islice(cycle(held), count)]

    def fitting(self, count: int) -> int:
        """How many of `count` batches may be given at a time, if copies are needed."""
        if not self.written or not self._held:
            return count
        return max(1, min(count, MOST_BYTES // max(1, bytes_of(self._held[0]))))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def versions(batch: Any) -> list[int]:
    """Grows when somebody writes into a tensor of the batch."""
    return [tensor._version for tensor in tensors_of(batch) if not tensor.is_inference()]


QUIET = 0.02
"""Seconds between two looks; with less work of the workers than WORK of it, they are taken to wait for room in their queue."""
WORK = 0.05
PATIENCE = 2.0
"""Seconds that a queue is given to fill, at most."""


def drain(feed: Feed) -> None:
    """Take what lies ready: a full queue hides a slow loader for a while."""
    taken = 0
    while taken < feed.queue:
        depth = feed.depth()
        if depth == 0:
            return
        start = time.perf_counter()
        feed.next()
        taken += feed.accumulation
        if depth is None and time.perf_counter() - start > QUIET:
            return


def settle(feed: Feed, seconds: float) -> None:
    """Wait until the queue is full, so that the workers rest: they would take cores from what does not need them.

    Args:
        feed: whose workers.
        seconds: that the loader takes for a step's batches, about.
    """
    if not (pids := feed.worker_pids):
        return
    limit = time.perf_counter() + min(PATIENCE, 1.5 * feed.queue * seconds / feed.accumulation + 2 * QUIET)
    cpu = sum(map(cpu_of, pids))
    while feed.depth() != feed.queue and time.perf_counter() < limit:
        time.sleep(QUIET)
        before, cpu = cpu, sum(map(cpu_of, pids))
        if cpu - before < WORK * QUIET and feed.depth() != 0:  # the last batches of a pass leave the queue half empty
            return
