"""Space: all layouts of a model on some numbers of GPUs, as columns of numbers, so that a hundred thousand cost a fraction of a second."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.plan.ranges import PlanError
from workbench.cluster.analysis.plan.subject import Subject
from workbench.core.checks import whole_number

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SHARINGS = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
"""What ranks with different samples share: nothing; optimizer's states (ZeRO-1); gradients too (ZeRO-2); weights too (ZeRO-3); weights too,
inside of a node only. All as `RunSpec(parallel=…)` has it, but ZeRO-1 of a Transformer, which is Megatron's (`Subject.broadcasts`)."""
MEGATRON = (
    "zero1 is Megatron's distributed optimizer here, as published runs of such sizes have it: gradients are reduced to their owners, and "
    'new weights gathered. RunSpec(parallel="zero1") is torch\'s ZeroRedundancyOptimizer, which sends more; a Task or a RunSpec is planned '
    "with that"
)
"""Said where it is so."""


WASTE = 0.15
"""Of a pipeline's time that stages may wait for the one with most layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Columns of equal length, a layout each. gpus = data × tensor × pipeline; micro_batch × accumulation × data = the batch."""

    gpus: Ints
    data: Ints
    tensor: Ints
    pipeline: Ints
    chunks: Ints
    micro_batch: Ints
    accumulation: Ints
    sharing: Ints
    """Place in SHARINGS."""
    checkpointing: Ints
    """Place in the subject's `computed`."""
    shard: Ints
    """Ranks that share one copy of the states."""
    inside: Ints
    """Ranks of a data-parallel group that sit in one node."""

    def __len__(self) -> int:
        return len(self.gpus)

    def chosen(self, places: "Ints | NDArray[np.bool_]") -> "Layouts":
        """Some of them."""
        return Layouts(**{name: getattr(self, name)[places] for name in self.__slots__})

    def share(self, layers: int) -> Floats:
        """Of all layers that the fullest stage has: 1/p where they divide evenly; others wait for it."""
        pieces = self.pipeline * self.chunks
        found: Floats = -(-layers // pieces) * self.chunks / layers
        return found

    @property
    def nodes(self) -> Ints:
        """Nodes over which a data-parallel group stretches."""
        return self.data // self.inside


def layouts(subject: Subject, cluster: Cluster, gpus: Sequence[int], batch: int, sharings: Sequence[str], only: Counter[str]) -> Layouts:
    """All of them. Tensor parallelism stays within a node, beside it lie the ranks with other samples, pipelines go across nodes.

    Args:
        subject: what is trained.
        cluster: on what.
        gpus: numbers of them.
        batch: samples per step, of all GPUs.
        sharings: some of SHARINGS.
        only: counts what is left out, by its reason.
    """
    rows: list[tuple[int, ...]] = []
    for count in gpus:
        for tensor in subject.tensors:
            for pipeline in subject.stages:
                rows += _of(subject, cluster, count, tensor, pipeline, batch, only)
    if not rows:
        return Layouts(**{name: np.zeros(0, np.int64) for name in Layouts.__slots__})
    kinds = len(subject.computed)
    ways = np.array([(SHARINGS.index(sharing), kind) for sharing in sharings for kind in range(kinds)])
    table = np.repeat(np.array(rows, np.int64), len(ways), 0)
    ways = np.tile(ways, (len(rows), 1))
    count, data, tensor, pipeline, chunks, micro, accumulation = table.T
    whole_nodes = np.gcd(data, np.maximum(1, cluster.gpus_per_node // tensor))
    inside = np.where(count <= cluster.gpus_per_node, data, whole_nodes)
    hybrid = ways[:, 0] == SHARINGS.index("hsdp")
    found = Layouts(
        gpus=count,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks,
        micro_batch=micro,
        accumulation=accumulation,
        sharing=ways[:, 0],
        checkpointing=ways[:, 1],
        shard=np.where(hybrid, inside, data),
        inside=inside,
    )
    real = np.where(data == 1, ways[:, 0] == SHARINGS.index(sharings[0]), True)  # alone there is nothing to share
    real &= np.where(hybrid, (inside > 1) & (inside < data), True)  # in one node that is fsdp
    return found.chosen(real)


def waste(layers: int, pipeline: int, chunks: int) -> float:
    """Share of a step that stages wait for the one with most layers.

    >>> waste(80, 8, 2), round(waste(126, 16, 1), 3)
    (0.0, 0.016)
    """
    pieces = pipeline * chunks
    return -(-layers // pieces) * pieces / layers - 1


def _of(subject: Subject, cluster: Cluster, gpus: int, tensor: int, pipeline: int, batch: int, only: Counter[str]) -> list[tuple[int, ...]]:
    data, rest = divmod(gpus, tensor * pipeline)
    if rest or not data:
        only["GPUs that tensor × pipeline does not divide"] += 1
        return []
    if batch % data:
        only[f"a batch of {batch:,} that its copies do not divide"] += 1
        return []
    found: list[tuple[int, ...]] = []
    for micro in subject.micro_batches:
        if (batch // data) % micro:
            continue
        accumulation = batch // data // micro
        for chunks in subject.chunks if pipeline > 1 else (1,):
            if waste(subject.layers, pipeline, chunks) > WASTE:
                continue
            if chunks > 1 and accumulation % pipeline:
                only["an interleaved pipeline whose micro-batches are no multiple of its stages"] += 1
                continue
            found.append((gpus, data, tensor, pipeline, chunks, micro, accumulation))
    return found


def checked_gpus(cluster: Cluster, gpus: int | None, most: int) -> list[int]:
    """The numbers of GPUs to look at: the one that was given, or doublings up to `most`.

    Raises:
        PlanError: no whole number, or more than a node and no whole nodes.
    """
    if gpus is None:
        sizes = [one for one in range(1, min(most, cluster.gpus_per_node) + 1) if cluster.gpus_per_node % one == 0]
        while sizes[-1] * 2 <= most and sizes[-1] >= cluster.gpus_per_node:
            sizes.append(sizes[-1] * 2)
        return sizes
    whole_number("gpus", gpus, least=1, also=", or None for any", error=PlanError)
    if gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node:
        whole = gpus // cluster.gpus_per_node * cluster.gpus_per_node
        raise PlanError(
            f"gpus={gpus}: {cluster.name} has {cluster.gpus_per_node} in a node, and past one node whole nodes are planned: "
            f"try {whole} or {whole + cluster.gpus_per_node}"
        )
    return [gpus]
