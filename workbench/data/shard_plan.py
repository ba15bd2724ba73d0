"""Plans shards: how many, so that all readers have equal shares, and in which order samples are written."""

import hashlib
import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from workbench.core import run_directory, units
from workbench.core.synonyms import accept_synonyms
from workbench.data.manifest import Array, imbalance

TARGET = 256 << 20
"""Bytes of a shard: large enough to be read in order at the speed of a disk, small enough to be sent again."""
SHARDS_PER_READER = 4
"""With fewer, readers that get one shard more than others have much more to read."""
MARGIN = 1.05
"""Of the predicted bytes, so much has to be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """How samples will be cut into shards."""

    count: int
    """Samples."""
    shards: int
    payload_bytes: int
    """Of all fields, estimated from some samples."""
    stored_bytes: int
    """Of all files, estimated."""
    readers: int
    """Ranks × workers that will read them."""
    imbalance: float
    """The slowest reader's samples over the mean."""

    @property
    def edges(self) -> list[int]:
        """Index of the first sample of each shard, and at the end the number of samples; shards are equal within one sample."""
        return [round(i * self.count / self.shards) for i in range(self.shards + 1)]

    def __str__(self) -> str:
        share = f"; on {self.readers} readers the slowest has {units.times(self.imbalance)} the mean" if self.readers > 1 else ""
        size = units.bytes_(self.stored_bytes / self.shards)
        return f"{self.count:,} samples in {self.shards} shards of {size}, {units.bytes_(self.stored_bytes)} in all{share}"


@accept_synonyms
def plan_shards(
    count: int, payload: float, *, target: int = TARGET, readers: int = 1, shards: int | None = None, stored: float = 0
) -> ShardPlan:
    """Plan how many shards to write: near the target size, and at least four for each reader, so that readers have equal shares.

    Args:
        count: number of samples.
        payload: bytes of all fields together.
        target: bytes per shard.
        readers: ranks × workers.
        shards: number of shards; None = by the rule above: a multiple of `readers` if there are enough samples.
        stored: bytes of all files; 0 = the same as the payload.

    >>> print(plan_shards(100_000, 2e9, readers=8))
    100,000 samples in 32 shards of 59.6 MiB, 1.86 GiB in all; on 8 readers the slowest has 1.00× the mean
    """
    if shards is None:
        shards = max(round(max(stored, payload) / target), SHARDS_PER_READER * readers if readers > 1 else 1)
        if readers > 1:
            shards = -(-shards // readers) * readers
    shards = max(1, min(count, shards))
    plan = ShardPlan(
        count=count, shards=shards, payload_bytes=round(payload), stored_bytes=round(stored or payload), readers=readers, imbalance=1.0
    )
    edges = plan.edges
    return replace(plan, imbalance=imbalance([b - a for a, b in itertools.pairwise(edges)], readers))


def shuffled(count: int, seed: int | None) -> Array:
    """A permutation that depends on the seed alone, and on no version of a library: the order of a 64-bit hash (splitmix64)."""
    if seed is None:
        return np.arange(count)
    with np.errstate(over="ignore"):
        start = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little")
        x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ x >> np.uint64(31), kind="stable")


def check_space(root: Path, plan: ShardPlan) -> None:
    """Raise if the predicted bytes do not fit."""
    free = os.statvfs(root)
    have, need = free.f_bavail * free.f_frsize, round(plan.stored_bytes * MARGIN)
    done = sum(path.stat().st_size for path in root.glob("shard-*") if path.is_file())  # of a writer that was killed
    if need - done > have:
        raise run_directory.DiskFullError(
            28, f"{root}: about {units.bytes_(need)} are needed and {units.bytes_(have)} are free: free some space, or give another folder"
        )
