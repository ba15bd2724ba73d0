"""Lists all layouts of a model on given numbers of GPUs, as columns of numbers, so that 100,000 take a fraction of a second."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.plan.ranges import PlanError
from workbench.cluster.analysis.plan.workload import Workload
from workbench.core.checks import whole_number

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SHARINGS = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
"""What data-parallel ranks share: nothing; optimizer states (ZeRO-1); gradients too (ZeRO-2); weights too (ZeRO-3); weights too, inside a
node only. As in `RunSpec(parallel=…)`, except that ZeRO-1 of a Transformer is Megatron's (`Workload.broadcasts`)."""
MAX_WASTE = 0.25
"""Share of a step that pipeline stages may wait for the one with most layers. Their time has it; this leaves out what can hardly be fast.
The fastest published layout of 80B on 128 H100 has 80 layers on 32 stages, a share of 0.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Columns of equal length, one row per layout. gpus = data × tensor × pipeline; micro_batch × accumulation × data = the batch."""

    gpus: Ints
    data: Ints
    tensor: Ints
    pipeline: Ints
    chunks: Ints
    micro_batch: Ints
    accumulation: Ints
    sharing: Ints
    """Index in SHARINGS."""
    checkpointing: Ints
    """Index in the workload's `computed`."""
    shard: Ints
    """Ranks that share one copy of the states."""
    inside: Ints
    """Ranks of a data-parallel group that are in one node."""

    def __len__(self) -> int:
        return len(self.gpus)

    def select(self, rows: "Ints | NDArray[np.bool_]") -> "Layouts":
        """Some of the rows."""
        return Layouts(**{name: getattr(self, name)[rows] for name in self.__slots__})

    def share(self, layers: int) -> Floats:
        """Share of all layers on the stage with most of them, for which the others wait: 1/p if they divide evenly."""
        pieces = self.pipeline * self.chunks
        share: Floats = -(-layers // pieces) * self.chunks / layers
        return share

    @property
    def nodes(self) -> Ints:
        """Nodes over which a data-parallel group extends."""
        return self.data // self.inside


def list_layouts(
    workload: Workload, cluster: Cluster, gpus: Sequence[int], batch: int, sharings: Sequence[str], ruled_out: Counter[str]
) -> Layouts:
    """All layouts. Tensor parallelism stays within a node, then come data-parallel ranks; pipelines go across nodes.

    Args:
        workload: what is trained.
        cluster: where.
        gpus: numbers of GPUs.
        batch: samples per step, of all GPUs.
        sharings: some of SHARINGS.
        ruled_out: counts layouts that are impossible, by their reason.
    """
    rows: list[tuple[int, ...]] = []
    for count in gpus:
        for tensor in workload.tensors:
            for pipeline in workload.stages:
                rows += _rows_of(workload, cluster, count, tensor, pipeline, batch, ruled_out)
    if not rows:
        return Layouts(**{name: np.zeros(0, np.int64) for name in Layouts.__slots__})
    kinds = len(workload.computed)
    ways = np.array([(SHARINGS.index(sharing), kind) for sharing in sharings for kind in range(kinds)])
    table = np.repeat(np.array(rows, np.int64), len(ways), 0)
    ways = np.tile(ways, (len(rows), 1))
    count, data, tensor, pipeline, chunks, micro, accumulation = table.T
    whole_nodes = np.gcd(data, np.maximum(1, cluster.gpus_per_node // tensor))
    inside = np.where(count <= cluster.gpus_per_node, data, whole_nodes)
    hybrid = ways[:, 0] == SHARINGS.index("hsdp")
    columns = Layouts(
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
    possible = np.where(data == 1, ways[:, 0] == SHARINGS.index(sharings[0]), True)  # a single rank shares nothing
    possible &= np.where(hybrid, (inside > 1) & (inside < data), True)  # within one node it is fsdp
    return columns.select(possible)


def waste(layers: int, pipeline: int, chunks: int) -> float:
    """Share of a step that stages wait for the one with most layers.

    >>> waste(80, 8, 2), round(waste(126, 16, 1), 3)
    (0.0, 0.016)
    """
    pieces = pipeline * chunks
    return -(-layers // pieces) * pieces / layers - 1


def _rows_of(
    workload: Workload, cluster: Cluster, gpus: int, tensor: int, pipeline: int, batch: int, ruled_out: Counter[str]
) -> list[tuple[int, ...]]:
    data, rest = divmod(gpus, tensor * pipeline)
    if rest or not data:
        ruled_out["GPUs that tensor × pipeline does not divide"] += 1
        return []
    if batch % data:
        ruled_out[f"a batch of {batch:,} that its copies do not divide"] += 1
        return []
    rows: list[tuple[int, ...]] = []
    for micro in workload.micro_batches:
        if (batch // data) % micro:
            continue
        accumulation = batch // data // micro
        for chunks in workload.chunks if pipeline > 1 else (1,):
            if waste(workload.layers, pipeline, chunks) > MAX_WASTE:
                continue
            if chunks > 1 and accumulation % pipeline:
                ruled_out["an interleaved pipeline whose micro-batches are not a multiple of its stages"] += 1
                continue
            rows.append((gpus, data, tensor, pipeline, chunks, micro, accumulation))
    return rows


def gpu_counts(cluster: Cluster, gpus: int | None, most: int) -> list[int]:
    """The numbers of GPUs to consider: the given one, or doublings up to `most`.

    Raises:
        PlanError: not a whole number, or several nodes of which one is incomplete.
    """
    if gpus is None:
        sizes = [size for size in range(1, min(most, cluster.gpus_per_node) + 1) if cluster.gpus_per_node % size == 0]
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
