"""Replay: batches that a step was trained on, held to be trained on again without a loader."""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from workbench.measure.batches import bytes_of, map_tensors, tensors_of

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
