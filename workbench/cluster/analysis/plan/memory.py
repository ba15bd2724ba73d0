"""Predicts the memory of layouts: bytes of the GPU that needs most, by group, with lower and upper ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from workbench.cluster.analysis.plan.layouts import SHARINGS, Floats, Layouts
from workbench.cluster.analysis.plan.ranges import HELD
from workbench.cluster.analysis.plan.workload import Workload
from workbench.core.statistics import Interval
from workbench.memory.analysis.non_pytorch import non_pytorch_memory

_STAGE = {sharing: stage for stage, sharing in enumerate(("ddp", "zero1", "zero2", "fsdp"))} | {"hsdp": 3}
"""Sharing → stage of ZeRO."""
_NORMAL = NormalDist()
_NINETY_FIFTH = _NORMAL.inv_cdf(0.95)
_below = np.frompyfunc(_NORMAL.cdf, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the GPU that needs most, for each layout."""

    groups: Mapping[str, Floats]
    """Group of `vocabulary.PLANNED` → bytes."""
    low: Floats
    """Total with the allocator's bytes and those outside of it both at their lower ends."""
    high: Floats
    """Total with both at their upper ends."""

    @property
    def total(self) -> Floats:
        """Bytes of all groups."""
        total: Floats = np.sum(list(self.groups.values()), 0)
        return total

    def chance(self, usable: float) -> Floats:
        """Probability that so many bytes suffice, if `low`, `total` and `high` are the 5th, 50th and 95th percentile of what is needed, and
        its logarithm is normal on either side of the middle.

        Args:
            usable: bytes of a GPU that may be used.
        """
        away = np.log(usable / self.total)
        widths = np.where(away < 0, np.log(self.total / self.low), np.log(self.high / self.total)) / _NINETY_FIFTH
        scores = np.where(widths > 0, away / np.where(widths > 0, widths, 1.0), np.where(away < 0, -np.inf, np.inf))
        probability: Floats = np.asarray(_below(scores), float)
        return probability


def memory(workload: Workload, layouts: Layouts, device: str, held: Interval = HELD) -> Memory:
    """Memory of the GPU that needs most: the first stage keeps the most micro-batches, the last has the logits.

    Model states per parameter as in `Workload.states`, split by ZeRO's stages (Rajbhandari et al. 2020, figure 1); with ZeRO-3 also the
    weights of two layers that are gathered, and one layer's gradients. Activations: a stage of 1F1B keeps those of min(p, m) micro-batches
    (Narayanan et al. 2021, section 2.2), an interleaved one (1 + (p−1)/(p v)) times all layers' (Korthikanti et al. 2022, section 4.2.3).
    All of that is held by PyTorch's allocator, in reality `held` times as much: fragmentation, and what no formula has. The CUDA context
    and NCCL's buffers come on top (`memory/analysis/non_pytorch.py`); they are known as a range.

    Args:
        workload: what is trained, with its layers and sizes.
        layouts: the layouts to predict, as columns.
        device: name of each GPU.
        held: what the allocator holds over the predicted bytes.
    """
    t = layouts.tensor
    own = ((workload.parameters - workload.shared) * layouts.share(workload.layers) + workload.shared) / t
    stage = np.array([_STAGE[sharing] for sharing in SHARINGS])[layouts.sharing]
    weights, gradients, states = workload.states
    layer: Floats = (workload.parameters - workload.shared) / workload.layers / t
    gathered = np.where((stage == 3) & (layouts.data > 1), layer * (2 * weights + gradients), 0.0)
    buckets = np.where((stage < 2) & ((layouts.data > 1) | workload.buckets_alone), own * workload.buckets, 0.0)
    alone, several = non_pytorch_memory(device, 1), non_pytorch_memory(device, 2)
    predicted = {
        "weights": own * weights / np.where(stage >= 3, layouts.shard, 1) + gathered,
        "gradients": own * gradients / np.where(stage >= 2, layouts.shard, 1) + buckets,
        "optimizer states": own * states / np.where(stage >= 1, layouts.shard, 1),
        "activations": _activations(workload, layouts, stage),
    }
    inside: Floats = np.sum(list(predicted.values()), 0)

    def outside(end: str) -> Floats:
        around: Floats = np.where(layouts.gpus > 1, float(getattr(several, end)), float(getattr(alone, end)))
        return around

    groups = {name: held.mid * size for name, size in predicted.items()}
    return Memory(
        groups={**groups, "outside": outside("mid")}, low=held.low * inside + outside("low"), high=held.high * inside + outside("high")
    )


def _activations(workload: Workload, layouts: Layouts, stage: Floats) -> Floats:
    kinds, t, p, v = list(workload.computed), layouts.tensor, layouts.pipeline, layouts.chunks
    if workload.counted:
        pairs = zip(layouts.checkpointing.tolist(), layouts.micro_batch.tolist(), strict=True)
        alone, whole_weights, gathered, update = np.array([workload.counted[kinds[kind]][size] for kind, size in pairs]).reshape(-1, 4).T
        sharded: Floats = np.maximum(np.where(stage == 3, gathered, whole_weights), update / layouts.shard)
        return np.where(stage == 0, alone, sharded)

    def per_sample(of: Mapping[str, float]) -> Floats:
        return np.array([of.get(kind, 0.0) for kind in kinds])[layouts.checkpointing]

    whole = per_sample(workload.whole)
    kept: Floats = whole + (per_sample(workload.kept) - whole) / t
    share = layouts.share(workload.layers)
    under_way = share * np.where(v > 1, p + (p - 1) / v, np.minimum(p, layouts.accumulation))
    first: Floats = kept * under_way + per_sample(workload.working) / t
    head = workload.head / (t if workload.split_head else 1)
    last: Floats = kept * share + np.maximum(per_sample(workload.working) / t, head)
    each: Floats = np.where(p > 1, np.maximum(first, last), last)
    most: Floats = each * layouts.micro_batch
    return most
