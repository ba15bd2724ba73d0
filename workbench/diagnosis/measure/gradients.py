"""Gradients: how many bytes the ranks reduce in how many pieces, and what a reduction costs here, by bare all-reduces."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.diagnosis.analysis.evidence import Gradients
from workbench.harness.peers import Peers

LARGE = 25 * 2**20
"""Bytes of the large reduction: a bucket of DDP's."""
TIMES = 9
"""Reductions of each size, the first of which warms up."""


def reductions(models: Sequence[nn.Module], peers: Peers) -> Gradients | None:
    """What all ranks reduce in a step. Collective. None if no model is parallel and none has gradients.

    Args:
        models: what is trained.
        peers: who takes part.
    """
    parallel = [part for model in models for part in model.modules() if isinstance(part, DistributedDataParallel)]
    weights = {id(weight): weight for model in parallel or models for weight in model.parameters() if weight.requires_grad}
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    if not size:
        return None
    group = parallel[0].process_group if parallel else None
    device = next(iter(weights.values())).device
    large = min(LARGE, max(size, 2**20))
    small = _seconds(1, device, group, peers)
    per_byte = max(0.0, _seconds(large // 4, device, group, peers) - small) / large
    buckets = sum(_buckets(model) for model in parallel) if parallel else len(weights)
    return Gradients(size=size, buckets=buckets, latency=small, per_byte=per_byte)


def _seconds(numbers: int, device: torch.device, group: Any, peers: Peers) -> float:
    values, times = torch.zeros(numbers, device=device), []
    for _ in range(TIMES):
        peers.barrier()
        start = time.perf_counter()
        dist.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return peers.agree(statistics.median(times[1:]))


def _buckets(model: DistributedDataParallel) -> int:
    """Pieces in which DDP reduces, as it logs them; else by their size."""
    try:
        data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
        if found := [part for part in sizes.split(",") if part.strip()]:
            return len(found)
    except (AttributeError, RuntimeError):
        pass
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    return max(1, -(-size // int(model.bucket_bytes_cap)))
