"""World: many ranks in one process, of which this one is one; nobody else is there."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from workbench.estimate import chunks, compat

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
        chunks.made_when_asked(),
    ):
        yield Place(rank=rank, world_size=world_size, device=torch.device("cpu"), store=HashStore())
