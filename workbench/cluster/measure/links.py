"""Timing collectives between the ranks of a process group: sizes and kinds take turns, so that what disturbs one disturbs all."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.cluster.analysis.links import LinkPoint

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
"""Collectives that can be timed: those that have a bus factor."""
MOST = 1000
"""Collectives of a block at most."""


def rounded(size: int, ranks: int) -> int:
    """Bytes of a message that all ranks can share: a multiple of 4 for each, not below `size`."""
    unit = 4 * ranks
    return -(-size // unit) * unit


def call_of(kind: str, size: int, device: torch.device) -> Callable[[], Any]:
    """A function that does a collective once, of fp32 numbers.

    Args:
        kind: one of KINDS.
        size: bytes, of `rounded`; what each rank has, or all ranks' parts together.
        device: where the tensors lie.
    """
    ranks, count = dist.get_world_size(), size // 4
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // ranks, device=device)
    calls: Mapping[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
    }
    return calls[kind]


def block(call: Callable[[], Any], count: int, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one of `count` collectives that follow one another, on the slowest rank.

    Args:
        call: does one.
        count: how many.
        device: where they run.
        clock: seconds.
    """
    dist.barrier()
    _settle(device)
    begin = clock()
    for _ in range(count):
        call()
    _settle(device)
    return _slowest((clock() - begin) / count, device)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, device: torch.device) -> float:
    found: Tensor = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())


def time_links(
    kinds: Sequence[str],
    sizes: Sequence[int],
    *,
    device: torch.device,
    repeats: int,
    budget_s: float,
    seen: Callable[[int, int, list[LinkPoint]], None] = lambda done, all_, points: None,
) -> list[LinkPoint]:
    """Seconds of collectives, on each rank the same. All ranks have to come here.

    Args:
        kinds: of KINDS.
        sizes: bytes, which are rounded up.
        device: of this rank.
        repeats: blocks of each.
        budget_s: seconds for all blocks, about; one collective of each comes at least.
        seen: told after each round how many are done, how many there will be, and what is known.
    """
    ranks = dist.get_world_size()
    plan = [(kind, size) for kind in kinds for size in sorted({rounded(size, ranks) for size in sizes})]
    found: dict[tuple[str, int], list[float]] = {one: [] for one in plan}
    counts: dict[tuple[str, int], int] = {}
    share = budget_s / (repeats * len(plan))
    for number in range(repeats):
        for one in plan:
            call = call_of(*one, device)
            if one not in counts:
                block(call, 2, device)  # connections and buffers are made at the first
                counts[one] = max(1, min(MOST, int(share / max(block(call, 3, device), 1e-9))))
            found[one].append(block(call, counts[one], device))
        seen(number + 1, repeats, _points(found))
    return _points(found)


def _points(found: Mapping[tuple[str, int], Sequence[float]]) -> list[LinkPoint]:
    return [LinkPoint(kind=kind, size=size, seconds=tuple(seconds)) for (kind, size), seconds in found.items() if seconds]
