"""ResumableSampler: an order of samples that resumes anywhere in an epoch, on other ranks, workers or batches. Mixture: several sources."""

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

from workbench.core.checks import choice, whole_number
from workbench.data.analysis.orders import AsStored, InBlocks, Mixed, Order, Shuffled, block_sizes

CHUNK = 4096
"""Indices that are computed at once."""
TAILS = ("drop", "repeat")


class SampleIndex(int):
    """The index of a sample, with a seed for its random numbers, which travels with it to a worker."""

    seed: int

    @classmethod
    def of(cls, index: int, seed: int) -> "SampleIndex":
        """An index with a seed."""
        made = cls(index)
        made.seed = seed
        return made


class ResumableSampler(Sampler[int]):
    """The order of a rank's samples, whose whole state is (seed, epoch, consumed).

    All ranks share one order per epoch; each takes every `world_size`-th of the remaining samples. So a training may stop after any step
    and continue with another number of ranks or workers, or another batch size: no sample of the epoch is lost or repeated, and nothing is
    read or drawn again. All ranks get equally many samples, so DDP never waits for a rank that has no batch.

        sampler = wb.data.ResumableSampler(dataset, seed=1)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        sampler.load_state_dict(checkpoint["sampler"])           # if there is one
        while sampler.epoch < epochs:
            for batch in sampler.batches(loader):                # counts what is trained on, and begins the next epoch
                …
                checkpoint["sampler"] = sampler.state_dict()     # after optimizer.step()

    Attributes:
        seed: of the order.
        epoch: the current epoch, from 0.
        consumed: samples of this epoch that all ranks together have trained on. A loader reads ahead, so only the training knows: it
            counts with `batches` or `advance`.
        rank: rank of this process.
        world_size: number of ranks.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        blocks: int | Sequence[int] | None = None,
        window: int = 8,
        tail: str = "drop",
        seeded: bool = False,
    ) -> None:
        """Stand at the beginning of epoch 0.

        Args:
            dataset: whose samples are ordered, a `Mixture`, or just their number.
            rank: of this process; None = as in torch.distributed, or 0.
            world_size: number of ranks; None = as in torch.distributed, or 1.
            seed: seed of the order, the same on all ranks.
            shuffle: give another random order in each epoch; else that of the indices.
            blocks: for formats that are read in sequence: the samples of each block (shard, row group), or of all but the last. Random
                blocks are mixed, `window` at a time.
            window: blocks that are mixed.
            tail: what happens to the samples that the ranks cannot share evenly, less than `world_size`. "drop" leaves them out of this
                epoch, "repeat" gives as many of this epoch's first samples again. `tail_samples` says how many.
            seeded: give each index as a `SampleIndex`: with a seed that follows from seed, epoch and sample.

        Raises:
            ValueError: the ranks or the blocks do not fit.
        """
        there = dist.is_available() and dist.is_initialized()
        self.world_size = whole_number("world_size", (dist.get_world_size() if there else 1) if world_size is None else world_size, least=1)
        self.rank = whole_number("rank", (dist.get_rank() if there else 0) if rank is None else rank, least=0, most=self.world_size - 1)
        self.seed, self.shuffle = whole_number("seed", seed, least=0), shuffle
        choice("tail", tail, TAILS)
        self._tail = tail
        self.order: Order = _order(dataset, shuffle, blocks, whole_number("window", window, least=1))
        self.seeded = seeded
        self.epoch = self.consumed = 0

    @property
    def samples(self) -> int:
        """Samples of all ranks in an epoch."""
        return self.order.samples

    @property
    def tail_samples(self) -> int:
        """Samples that the rest of this epoch leaves out or repeats, since the ranks cannot share them evenly."""
        left = (self.samples - self.consumed) % self.world_size
        return left if self._tail == "drop" or not left else self.world_size - left

    @property
    def left(self) -> int:
        """Samples left for this rank in this epoch."""
        left = max(0, self.samples - self.consumed)
        return left // self.world_size if self._tail == "drop" else -(-left // self.world_size)

    def __len__(self) -> int:
        return self.left

    def __iter__(self) -> Iterator[int]:
        # `consumed` moves while a loader reads: what is given is fixed here
        epoch, begin, count = self.epoch, self.consumed, self.left
        for first in range(0, count, CHUNK):
            positions = begin + np.arange(first, min(first + CHUNK, count), dtype=np.int64) * self.world_size + self.rank
            indices = self.order.indices(positions % self.samples, self.seed, epoch).tolist()
            if not self.seeded:
                yield from indices
            else:
                yield from map(SampleIndex.of, indices, sample_seeds(indices, self.seed, epoch))

    def batches(self, loader: "DataLoader[Any]") -> Iterator[Any]:
        """Iterate over the remaining batches of this epoch and count them; after the last, the next epoch begins.

        Therefore save `state_dict` after the optimizer's step, not between a batch and its step.

        Args:
            loader: a DataLoader with this sampler.

        Raises:
            ValueError: the loader has another sampler, or no batches.
        """
        if loader.sampler is not self or not loader.batch_size:
            raise ValueError(
                f"this loader has a {type(loader.sampler).__name__} and batch_size={loader.batch_size}: "
                "try DataLoader(dataset, batch_size=…, sampler=this sampler)"
            )
        left = self.left
        for batch in loader:
            size = min(int(loader.batch_size), left)
            left -= size
            self.advance(size * self.world_size)
            yield batch
        self.set_epoch(self.epoch + 1)

    def advance(self, samples: int) -> None:
        """Count samples that all ranks together have trained on: micro_batch × accumulation × world_size for a step.

        Raises:
            ValueError: the epoch does not have so many left.
        """
        most = self.samples - self.consumed + (self.tail_samples if self._tail == "repeat" else 0)
        self.consumed = min(self.samples, self.consumed + whole_number("samples", samples, least=0, most=most, numpy=True))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; for the current one, `consumed` stays."""
        if whole_number("epoch", epoch, least=0) != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The whole state: seed, epoch and consumed; and the name of the order, so that another order refuses it."""
        return {"seed": self.seed, "epoch": self.epoch, "consumed": self.consumed, "samples": self.samples, "order": self.order.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved, on any number of ranks.

        Raises:
            ValueError: the state is of another order: other samples, blocks or shares.
        """
        if missing := [name for name in ("seed", "epoch", "consumed", "samples", "order") if name not in state]:
            raise ValueError(f"this is not the state of a ResumableSampler: it has no {missing[0]!r}; it has {', '.join(map(str, state))}")
        mine = {"samples": self.samples, "order": self.order.name}
        for name, value in mine.items():
            if state[name] != value:
                raise ValueError(
                    f"the state is of another order: its {name} is {state[name]!r}, this sampler's is {value!r}; build the sampler as "
                    "it was, or begin a new epoch with set_epoch"
                )
        seed, epoch = (whole_number(name, state[name], least=0) for name in ("seed", "epoch"))
        self.consumed = whole_number("consumed", state["consumed"], least=0, most=self.samples)
        self.seed, self.epoch = seed, epoch


def sample_seeds(indices: Sequence[int], seed: int, epoch: int) -> list[int]:
    """The seeds of samples in an epoch, of 63 bits: the same on whichever rank or worker a sample comes."""
    with np.errstate(over="ignore"):
        z = np.asarray(indices, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for number in (seed, epoch):
            z = (z ^ np.uint64(number % 2**64)) * np.uint64(0xBF58476D1CE4E5B9)
            z ^= z >> np.uint64(29)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(32)
    seeds: list[int] = (z >> np.uint64(1)).tolist()
    return seeds


def _order(dataset: Sized | int, shuffle: bool, blocks: int | Sequence[int] | None, window: int) -> Order:
    if isinstance(dataset, Mixture):
        if blocks is not None or not shuffle:
            raise ValueError("a Mixture has an order of its own: leave out shuffle and blocks")
        return dataset.order
    if not isinstance(dataset, int | Sized):
        raise ValueError(f"a dataset with a length, or the number of samples, is needed; this is a {type(dataset).__name__}")
    samples = whole_number("dataset", dataset if isinstance(dataset, int) else len(dataset), least=1, also=" (samples)")
    if blocks is None:
        return Shuffled(samples) if shuffle else AsStored(samples)
    if not shuffle:
        raise ValueError("blocks are for shuffling; samples as they are stored need none: leave out blocks or shuffle=False")
    return InBlocks(block_sizes(blocks, samples), window)


class Mixture(Dataset[Any]):
    """Several map-style datasets as one, from which a `ResumableSampler` draws fixed shares.

    In each `period` of samples the shares are exact. A source repeats a sample only after all its samples were drawn, also across epochs.
    So a small source with a large weight is repeated, and `repeats` says how often.
    """

    def __init__(self, sources: Mapping[str, Any], weights: Mapping[str, float], *, samples: int | None = None, period: int = 1000) -> None:
        """
        Args:
            sources: name → dataset with a length.
            weights: name → share, to any sum.
            samples: in an epoch; None = as many as the sources have together.
            period: samples in which the shares are exact, and the unit to which they are rounded.

        Raises:
            ValueError: a source is empty, or weights do not fit the sources.
        """
        self.sources = dict(sources)
        sizes = {name: len(source) for name, source in self.sources.items()}
        total = sum(sizes.values())
        self.order = Mixed(
            sizes, weights, whole_number("samples", total if samples is None else samples, least=1), whole_number("period", period, least=1)
        )
        self._names = list(sizes)
        self._ends = list(itertools.accumulate(sizes.values()))

    def __len__(self) -> int:
        """Samples of all sources."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        name, place = self.source_of(index)
        return self.sources[name][place if type(index) is int else _at(place, index)]

    def source_of(self, index: int) -> tuple[str, int]:
        """The source of a sample, and its index in it.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = bisect.bisect_right(self._ends, index)
        return self._names[source], int(index) - (self._ends[source - 1] if source else 0)

    @property
    def repeats(self) -> dict[str, float]:
        """How often an epoch draws each sample of a source."""
        shares = ((name, count / self.order.period) for name, count in self.order.counts.items())
        return {name: share * self.order.samples / len(self.sources[name]) for name, share in shares}


def _at(place: int, index: int) -> int:
    return SampleIndex.of(place, index.seed) if isinstance(index, SampleIndex) else place
