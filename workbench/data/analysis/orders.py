"""Orders of samples in which each position is computed independently: shuffled, shuffled in blocks, mixed from several sources.

An order maps positions in an epoch to indices of samples. Nothing is kept that grows with the number of samples, and nothing that came
before has to be read or drawn again, so a training begins anywhere in an epoch at once.
"""

import functools
import hashlib
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.core.checks import whole_number

Indices = NDArray[np.int64]

ROUNDS = 4
"""Rounds of the Feistel network: with fewer, neighbours stay visible."""
TABLE = 4096
"""Up to so many samples an order is drawn as a table. Below, a Feistel network does not reach all orders equally often."""


class Order(Protocol):
    """Which sample stands at which position of an epoch."""

    @property
    def samples(self) -> int:
        """Positions of an epoch."""

    @property
    def name(self) -> str:
        """What has to be the same for the same order, in words; a checkpoint keeps it."""

    def indices(self, positions: Indices, seed: int, epoch: int) -> Indices:
        """The indices of the samples at some positions (0 to `samples` - 1)."""


def permute(positions: Indices, n: int, *key: int) -> Indices:
    """The images of positions under a permutation of range(n), which a key of numbers chooses.

    A Feistel network over the next even number of bits, with cycle walking: a value that is n or more is mapped again. It takes 0.1 µs for
    a position and no memory. Up to `TABLE` samples a table is drawn instead.

    Source: M. Luby, C. Rackoff, How to construct pseudorandom permutations, SIAM J. Comput. 17 (1988); J. Black, P. Rogaway, Ciphers with
    arbitrary finite domains, CT-RSA 2002 (cycle walking).

    >>> permute(np.arange(5), 5, 0).tolist() != permute(np.arange(5), 5, 1).tolist()
    True
    >>> bool((np.sort(permute(np.arange(9000), 9000, 7)) == np.arange(9000)).all())
    True
    """
    if n <= TABLE:
        return _table(n, key)[positions]
    half = ((n - 1).bit_length() + 1) // 2
    keys = np.frombuffer(_digest(key, 8 * ROUNDS), "<u8")
    values = _feistel(positions.astype(np.uint64), keys, half)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(values[outside], keys, half)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


@functools.lru_cache(maxsize=64)
def _table(n: int, key: tuple[int, ...]) -> Indices:
    """A permutation as an array; the raw numbers of a bit generator stay the same with every numpy."""
    drawn = np.random.Philox(key=int.from_bytes(_digest(key, 16), "little")).random_raw(n)
    return np.argsort(drawn, kind="stable")


def _digest(key: Sequence[int], size: int) -> bytes:
    return hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=size).digest()


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half: int) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    with np.errstate(over="ignore"):
        for key in keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            mixed ^= mixed >> np.uint64(32)
            left, right = right, left ^ (mixed & mask)
    return (left << bits) | right


def uniforms(seeds: "Sequence[int] | NDArray[Any]", count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) that follow from the seed of each sample alone, wherever and with whatever others it is drawn: samples × count.

    Source: the finalizer of SplitMix64, G. Steele, D. Lea, C. Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.

    >>> bool((uniforms([3, 4], 5)[1] == uniforms([4], 5)[0]).all())
    True
    """
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = np.asarray(seeds, np.uint64)[:, None] + steps
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    drawn: NDArray[np.float64] = (z >> np.uint64(11)) * 2.0**-53
    return drawn


class AsStored:
    """Samples in the order in which they are stored."""

    name = "as stored"

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def indices(self, positions: Indices, seed: int, epoch: int) -> Indices:
        """The positions themselves."""
        return positions


class Shuffled:
    """All samples in a random order, another one in each epoch."""

    name = "shuffled"

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def indices(self, positions: Indices, seed: int, epoch: int) -> Indices:
        """The indices at some positions."""
        return permute(positions, self.samples, seed, epoch)


class InBlocks:
    """Random blocks, such as shards, and random samples within `window` blocks at a time: for formats that are read in sequence.

    A reader has at most `window` blocks open, and reads each of them once in an epoch. The samples of a batch come from these blocks
    alone, so classes that are stored together stay together unless the samples were shuffled before they were written;
    `wb.data.shuffle_quality` says how well an order mixes them. All ranks read in the same blocks at the same time.
    """

    def __init__(self, sizes: Sequence[int], window: int) -> None:
        """
        Args:
            sizes: samples in each block, in the order of their indices.
            window: blocks that are mixed.
        """
        self._sizes = np.asarray(sizes, np.int64)
        self._window = window
        self._kept: tuple[int, int, Indices, Indices] | None = None  # the order of the blocks in an epoch
        self._first = np.concatenate([[0], np.cumsum(self._sizes)])
        self.samples = int(self._first[-1])
        self.name = f"in {len(self._sizes)} blocks ({zlib.crc32(self._sizes.tobytes()):08x}), {window} at a time"

    def indices(self, positions: Indices, seed: int, epoch: int) -> Indices:
        """The indices at some positions."""
        if self._kept is None or self._kept[:2] != (seed, epoch):
            drawn = permute(np.arange(len(self._sizes)), len(self._sizes), seed, epoch)
            self._kept = seed, epoch, drawn, np.cumsum(self._sizes[drawn])
        blocks, ends = self._kept[2:]
        begins = np.concatenate([[0], ends])
        windows = np.searchsorted(ends, positions, side="right") // self._window
        mixed = np.empty_like(positions)
        for window in np.unique(windows):  # positions that follow each other are in one or two windows
            begin = begins[window * self._window]
            end = begins[min((window + 1) * self._window, len(blocks))]
            here = windows == window
            mixed[here] = begin + permute(positions[here] - begin, int(end - begin), seed, epoch, int(window))
        places = np.searchsorted(ends, mixed, side="right")
        indices: Indices = self._first[blocks[places]] + mixed - begins[places]
        return indices


class Mixed:
    """Samples of several sources in fixed shares, exact in each `period`. A source repeats a sample only after all of its samples came."""

    def __init__(self, sizes: Mapping[str, int], weights: Mapping[str, float], samples: int, period: int) -> None:
        """
        Args:
            sizes: samples of each source; their indices follow each other.
            weights: share of each source, to any sum.
            samples: positions of an epoch.
            period: positions in which the shares are exact.

        Raises:
            ValueError: a source is empty, or its weight is not positive or too small for the period.
        """
        if sizes.keys() != weights.keys() or not sizes:
            named, there = (", ".join(names) or "none" for names in (weights, sizes))
            raise ValueError(f"weights are of {named}, and the sources are {there}: name each")
        for name, weight in weights.items():
            if not weight > 0 or weight == float("inf"):
                raise ValueError(f"weights[{name!r}]={weight!r}: it has to be a number above 0; leave out a source that is not wanted")
            whole_number(f"samples of {name!r}", sizes[name], least=1)
        total = sum(weights.values())
        exact = [weights[name] / total * period for name in sizes]
        counts = [int(each) for each in exact]
        for place in sorted(range(len(counts)), key=lambda k: counts[k] - exact[k])[: period - sum(counts)]:
            counts[place] += 1
        for name, count in zip(sizes, counts, strict=True):
            if not count:
                raise ValueError(
                    f"weights[{name!r}] is {weights[name] / total:.2g} of all, less than a sample of {period}: try period={4 * period}, "
                    "or a larger weight"
                )
        self.samples, self.period = samples, period
        self.counts = dict(zip(sizes, counts, strict=True))
        """Source → samples of it in each period."""
        self._sizes = np.array(list(sizes.values()), np.int64)
        self._first = np.concatenate([[0], np.cumsum(self._sizes)[:-1]])
        self._counts = np.array(counts, np.int64)
        self._bounds = np.cumsum(self._counts)
        shares = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        self.name = f"of {period} samples {shares}; sizes {' '.join(map(str, self._sizes))}; {samples} in an epoch"

    def indices(self, positions: Indices, seed: int, epoch: int) -> Indices:
        """The indices at some positions; a source goes on in the next epoch where it was."""
        periods, within = np.divmod(positions + epoch * self.samples, self.period)
        sources, of_source = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(periods):
            here = periods == number
            drawn = np.searchsorted(self._bounds, permute(np.arange(self.period), self.period, seed, int(number), 1), side="right")
            before = np.zeros(self.period, np.int64)  # samples of the same source that came in this period
            for source, count in enumerate(self._counts):
                before[drawn == source] = np.arange(count)
            sources[here] = drawn[within[here]]
            of_source[here] = number * self._counts[sources[here]] + before[within[here]]
        rounds, places = np.divmod(of_source, self._sizes[sources])
        indices = np.empty_like(positions)
        for source, number in set(zip(sources.tolist(), rounds.tolist(), strict=True)):
            here = (sources == source) & (rounds == number)
            indices[here] = self._first[source] + permute(places[here], int(self._sizes[source]), seed, source, number, 2)
        return indices


def block_sizes(blocks: int | Sequence[int], samples: int) -> list[int]:
    """The sizes of blocks, from those of each or from that of all but the last.

    >>> block_sizes(4, 10), block_sizes([3, 7], 10)
    ([4, 4, 2], [3, 7])
    """
    if isinstance(blocks, int):
        whole_number("blocks", blocks, least=1)
        return [min(blocks, samples - first) for first in range(0, samples, blocks)]
    if any(size < 1 for size in blocks) or sum(blocks) != samples:
        told = ", ".join(map(str, itertools.islice(blocks, 5))) + ", …" * (len(blocks) > 5)
        raise ValueError(
            f"blocks=[{told}] have {sum(blocks)} samples, and the dataset has {samples}: give the samples of each shard, all ≥ 1"
        )
    return list(blocks)
