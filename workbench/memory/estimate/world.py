"""World: many ranks in one process, of which this one is one; nobody else is there.

Chunks: FSDP2 cuts each parameter into one part per rank to keep one of them; here only that one is cut.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from workbench.memory.estimate import compat


class Chunks:
    """What `torch.chunk` gives, empty tensors behind it up to `count`; each made when it is asked for.

    >>> import torch
    >>> [len(one) for one in (Chunks(torch.zeros(10), 4, 0)[place] for place in range(4))]
    [3, 3, 3, 1]
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Tensor:
        if not 0 <= place < self._count:
            raise IndexError(place)
        size = self._tensor.size(self._dim)
        rows = -(-size // self._count)
        start = place * rows
        if start >= size and place:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(rows, size - start))


@contextlib.contextmanager
def made_when_asked() -> Iterator[None]:
    """Inside, FSDP2 takes no longer to deal a parameter out to 8,192 ranks than to 8; where torch has no such function, as always."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param as home
    except ImportError:
        yield
        return
    name = "_chunk_with_empty"
    usual: Any = getattr(home, name, None)
    if usual is None:
        yield
        return

    def chunks(tensor: Tensor, num_chunks: int, dim: int) -> Chunks:
        return Chunks(tensor, num_chunks, dim)

    setattr(home, name, chunks)
    try:
        yield
    finally:
        setattr(home, name, usual)


MOST_RANKS = 8192
"""Ranks, up to which the fake process group has been tried."""


class WorldError(ValueError):
    """A world that cannot be had; the message says why and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of a rank in the world."""

    rank: int
    """Its number."""
    world_size: int
    """Ranks."""
    device: torch.device
    """Where its tensors are made."""
    store: Any
    """A `torch.distributed` store of its own, in which nobody answers."""


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0, *, bucket_seen: Callable[[Tensor], None] = lambda bucket: None) -> Iterator[Place]:
    """Inside, this process is rank `rank` of `world_size`: collectives return at once, and DDP, ZeroRedundancyOptimizer and FSDP2 work.

    Args:
        world_size: ranks, 1 to 8192.
        rank: of this process.
        bucket_seen: called with each bucket of gradients that DDP reduces.

    Yields:
        The place of this rank.

    Raises:
        WorldError: the process has a process group already, or the numbers do not fit.
    """
    if dist.is_initialized():
        raise WorldError(
            "this process has a process group (torch.distributed is initialised), and an estimate needs one of its own: call it before "
            "init_process_group, after destroy_process_group, or in a process of its own"
        )
    if not 1 <= world_size <= MOST_RANKS:
        raise WorldError(f"world_size={world_size}: 1 to {MOST_RANKS} ranks are allowed")
    if not 0 <= rank < world_size:
        raise WorldError(f"rank={rank}: 0 to {world_size - 1} is allowed with world_size={world_size}")
    with (
        compat.fake_process_group(world_size, rank),
        compat.fake_data_parallel(bucket_seen),
        compat.real_device_meshes(),
        made_when_asked(),
    ):
        yield Place(rank=rank, world_size=world_size, device=torch.device("cpu"), store=HashStore())
