"""The order of a rank's samples: it begins anywhere in an epoch without reading what came before, and gives each batch of a worker a seed.

A resumed run so gets the batches that the undisturbed one would have got, with the same augmentation, however many samples came before.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, get_worker_info
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
