"""Memory of layouts: bytes of the fullest GPU, by what holds them, and between which ends they lie."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workbench.cluster.analysis.plan.layouts import SHARINGS, Floats, Layouts
from workbench.cluster.analysis.plan.ranges import HELD
from workbench.cluster.analysis.plan.subject import Subject
from workbench.core.statistics import Interval
from workbench.memory.analysis.non_pytorch import non_pytorch_memory

_STAGE = {sharing: stage for stage, sharing in enumerate(("ddp", "zero1", "zero2", "fsdp"))} | {"hsdp": 3}
"""Sharing → stage of ZeRO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of each layout's fullest GPU."""

    groups: Mapping[str, Floats]
    """Of `vocabulary.PLANNED` → bytes."""
    low: Floats
    """All of it at least: the allocator's and what lies outside of it, both at their lower ends."""
    high: Floats
    """All of it at most: both at their upper ends."""

    @property
    def total(self) -> Floats:
        """All of it."""
        total: Floats = np.sum(list(self.groups.values()), 0)
        return total


def memory(subject: Subject, found: Layouts, device: str, held: Interval = HELD) -> Memory:
    """What the fullest GPU holds: on the first stage most micro-batches are under way, on the last one are the logits.

    Model states per parameter as in `Subject.states`, split by ZeRO's stages (Rajbhandari et al. 2020, figure 1); with ZeRO-3 also the
    weights of two layers that are gathered, and one layer's gradients. Activations: a stage of 1F1B keeps those of min(p, m) micro-batches
    (Narayanan et al. 2021, section 2.2), an interleaved one (1 + (p−1)/(p v)) times all layers' (Korthikanti et al. 2022, section 4.2.3).
    All of that is PyTorch's allocator's, and in truth `held` times as much, for fragmentation and what no formula has. Beside lie the
    context and NCCL's buffers (`memory.outside`), which are known as a range.

    Args:
        subject: what is trained.
        found: its layouts.
        device: name of each GPU.
        held: what the allocator holds over what is reckoned.
    """
    t = found.tensor
    own = ((subject.parameters - subject.shared) * found.share(subject.layers) + subject.shared) / t
    stage = np.array([_STAGE[sharing] for sharing in SHARINGS])[found.sharing]
    weights, gradients, states = subject.states
    layer: Floats = (subject.parameters - subject.shared) / subject.layers / t
    gathered = np.where((stage == 3) & (found.data > 1), layer * (2 * weights + gradients), 0.0)
    buckets = np.where((stage < 2) & (found.data > 1), own * subject.buckets, 0.0)
    alone, several = non_pytorch_memory(device, 1), non_pytorch_memory(device, 2)
    reckoned = {
        "weights": own * weights / np.where(stage >= 3, found.shard, 1) + gathered,
        "gradients": own * gradients / np.where(stage >= 2, found.shard, 1) + buckets,
        "optimizer states": own * states / np.where(stage >= 1, found.shard, 1),
        "activations": _activations(subject, found),
    }
    inside: Floats = np.sum(list(reckoned.values()), 0)

    def outside(end: str) -> Floats:
        around: Floats = np.where(found.gpus > 1, float(getattr(several, end)), float(getattr(alone, end)))
        return around

    groups = {name: held.mid * size for name, size in reckoned.items()}
    return Memory(
        groups={**groups, "outside": outside("mid")},
        low=held.low * inside + outside("low"),
        high=held.high * inside + outside("high"),
    )


def _activations(subject: Subject, found: Layouts) -> Floats:
    kinds, t, p, v = list(subject.computed), found.tensor, found.pipeline, found.chunks
    if subject.counted:
        pairs = zip(found.checkpointing.tolist(), found.micro_batch.tolist(), strict=True)
        return np.array([subject.counted[kinds[kind]][size] for kind, size in pairs])

    def per_sample(of: Mapping[str, float]) -> Floats:
        return np.array([of.get(kind, 0.0) for kind in kinds])[found.checkpointing]

    whole = per_sample(subject.whole)
    kept: Floats = whole + (per_sample(subject.kept) - whole) / t
    share = found.share(subject.layers)
    under_way = share * np.where(v > 1, p + (p - 1) / v, np.minimum(p, found.accumulation))
    first: Floats = kept * under_way + per_sample(subject.working) / t
    head = subject.head / (t if subject.split_head else 1)
    last: Floats = kept * share + np.maximum(per_sample(subject.working) / t, head)
    each: Floats = np.where(p > 1, np.maximum(first, last), last)
    most: Floats = each * found.micro_batch
    return most
