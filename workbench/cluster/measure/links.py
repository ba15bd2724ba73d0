"""Times collectives between the ranks of a process group. Kinds and sizes alternate, so that a disturbance affects all alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.cluster.analysis.links import LinkPoint
from workbench.harness.device_clock import synchronize

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
"""Collectives that can be timed: those that have a bus factor."""
MAX_COUNT = 1000
"""Most collectives of a timed block."""


def rounded(size: int, ranks: int) -> int:
    """Bytes of a message that all ranks can share: a multiple of 4 for each, not below `size`."""
    unit = 4 * ranks
    return -(-size // unit) * unit


def call_of(kind: str, size: int, device: torch.device) -> Callable[[], Any]:
    """A function that does a collective of fp32 numbers once.

    Args:
        kind: name of the collective, one of KINDS.
        size: bytes, of `rounded`; what each rank has, or all ranks' parts together.
        device: device on which its tensors lie.
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
    """Seconds per collective, of `count` that follow one another, on the slowest rank."""
    dist.barrier()
    synchronize(device)
    begin = clock()
    for _ in range(count):
        call()
    synchronize(device)
    return _slowest((clock() - begin) / count, device)


def _slowest(seconds: float, device: torch.device) -> float:
    slowest: Tensor = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


def time_links(
    kinds: Sequence[str],
    sizes: Sequence[int],
    *,
    device: torch.device,
    repeats: int,
    budget_s: float,
    seen: Callable[[int, int, list[LinkPoint]], None] = lambda done, all_, points: None,
) -> list[LinkPoint]:
    """Seconds of collectives, on each rank the same. All ranks have to call it.

    Args:
        kinds: names of the collectives, some of KINDS.
        sizes: bytes, which are rounded up.
        device: device of this rank, on which its tensors lie.
        repeats: timed blocks of each collective and size.
        budget_s: seconds for all blocks, about; one collective of each comes at least.
        seen: called after each round with the number of rounds done, of all rounds, and the points so far.
    """
    ranks = dist.get_world_size()
    plan = [(kind, size) for kind in kinds for size in sorted({rounded(size, ranks) for size in sizes})]
    timed: dict[tuple[str, int], list[float]] = {key: [] for key in plan}
    counts: dict[tuple[str, int], int] = {}
    share = budget_s / (repeats * len(plan))
    for number in range(repeats):
        for key in plan:
            call = call_of(*key, device)
            if key not in counts:
                block(call, 2, device)  # connections and buffers are made at the first
                counts[key] = max(1, min(MAX_COUNT, int(share / max(block(call, 3, device), 1e-9))))
            timed[key].append(block(call, counts[key], device))
        seen(number + 1, repeats, _points(timed))
    return _points(timed)


def _points(timed: Mapping[tuple[str, int], Sequence[float]]) -> list[LinkPoint]:
    return [LinkPoint(kind=kind, size=size, seconds=tuple(seconds)) for (kind, size), seconds in timed.items() if seconds]
