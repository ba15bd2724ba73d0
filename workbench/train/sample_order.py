"""The order of a rank's samples: it begins anywhere in an epoch without reading what came before, and gives each batch of a worker a seed.

A resumed run so gets the batches that the undisturbed one would have got, with the same augmentation, however many samples came before.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from workbench.train.random_numbers import mixed_seed, seed_all


class SampleOrder(DistributedSampler[int]):
    """A DistributedSampler that can begin within an epoch.

    Attributes:
        start: samples of this rank that the next epoch leaves out; only that epoch.
        batch: samples of a batch where each batch of a worker gets a seed of its own; 0 = none does.
        given: where it is kept which samples were given: (epoch, position in the rank's part) → index; None = it is not.
    """

    start = 0
    batch = 0
    given: dict[tuple[int, int], int] | None = None

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        order = itertools.islice(super().__iter__(), start, None)
        return order if self.given is None and not self.batch else self._marked(order, self.epoch, start)

    def _marked(self, order: Iterator[int], epoch: int, start: int) -> Iterator[int]:
        for position, index in enumerate(order, start):
            if self.given is not None:
                self.given[epoch, position] = index
            first = self.batch and position % self.batch == 0
            yield SeededIndex.of(index, mixed_seed(self.seed, self.rank, epoch, position)) if first else index


class StepSamples:
    """Which samples a rank's steps have: their indices, as the sampler gave them."""

    def __init__(self, loader: "DataLoader[Any]", accumulation: int) -> None:
        """From now on the sampler keeps what it gives."""
        self._order = loader.sampler if isinstance(loader.sampler, SampleOrder) and loader.batch_size else None
        if self._order:
            self._order.given = {}
            self._whole, self._size = len(loader) // accumulation * accumulation, int(loader.batch_size or 1)
        self._accumulation, self._epoch = accumulation, 0
        self._last: tuple[int, list[int]] | None = None

    def of(self, step: int) -> list[int] | None:
        """Those of a step, from 1, when its batches were given; each step is asked for in its turn. None = they have no indices."""
        if self._order is None or self._order.given is None:
            return None
        if self._last is None or self._last[0] != step:
            epoch, first = divmod((step - 1) * self._accumulation, self._whole)
            if epoch != self._epoch:  # what an epoch's end has dropped
                self._epoch = epoch
                self._order.given = {key: index for key, index in self._order.given.items() if key[0] >= epoch}
            places = range(first * self._size, (first + self._accumulation) * self._size)
            self._last = step, [self._order.given.pop((epoch, place), -1) for place in places]
        return self._last[1]


class SeededIndex(int):
    """The index of a batch's first sample, with the seed of the batch."""

    seed: int

    @classmethod
    def of(cls, index: int, seed: int) -> "SeededIndex":
        """An index with a seed, which travels with it to a worker."""
        made = cls(index)
        made.seed = seed
        return made


class SeededBatches(Dataset[Any]):
    """A dataset whose random numbers begin anew with each batch, in a worker; everything else is that of the dataset inside."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        _seed(index)
        return self.dataset[int(index)]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        value = getattr(self.dataset, name)
        return _seeded(value) if name == "__getitems__" else value


def _seeded(several: Any) -> Any:
    def getitems(indices: list[int]) -> Any:
        _seed(indices[0])
        return several([int(index) for index in indices])

    return getitems


def _seed(index: int) -> None:
    if isinstance(index, SeededIndex) and get_worker_info() is not None:  # in the training process, a checkpoint has its generators
        seed_all(index.seed)
