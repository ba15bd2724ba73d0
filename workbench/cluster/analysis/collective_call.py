"""`CollectiveCall`: one collective of a training step, with its bytes and ranks, and its seconds on a cluster."""

import math
from dataclasses import dataclass

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_cost import (
    BUS_FACTORS,
    CostError,
    bus_factor,
    checked_ranks,
    collective_seconds,
    hierarchical_all_reduce,
)
from workbench.core.checks import choice, whole_number
from workbench.core.codec import JsonDataclass

PHASES = ("forward", "backward", "optimizer")
"""When collectives happen, in the order of a step."""
MESSAGES = ("send", "recv")
"""Kinds that are a message from one rank to another, as between the stages of a pipeline."""
ALGORITHMS = ("best", "ring", "tree")
"""How consecutive messages are counted; "best": the faster of the two, as libraries choose by size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall(JsonDataclass):
    """One collective of a rank in a step.

    >>> call = CollectiveCall(kind="all_gather", size=2**20, ranks=8, phase="forward")
    >>> call.sent == 7 / 8 * 2**20, call.padding
    (True, 0.0)
    """

    kind: str
    """One of BUS_FACTORS or of MESSAGES; or a name of torch's, such as "barrier", for what has no formula here."""
    size: int
    """Bytes of the message: what each rank has (all_reduce, broadcast), or all ranks' parts together (all_gather, reduce_scatter)."""
    ranks: int
    """Ranks that take part."""
    phase: str
    """One of PHASES."""
    stride: int = 1
    """Distance between two of these ranks: 1 = neighbours, which fill a node first."""
    module: str = ""
    """Module whose parameters or activations are sent; "" = the model itself."""
    axis: str = "data"
    """The kind of group: "data" (copies of the model), "shard" (ranks of one sharded copy), "replica" (copies of a shard), "tensor" (ranks
    that split layers), "expert" and "copy" (ranks that divide experts, copies of an expert), "pipeline" (stages of one copy)."""
    micro: int = 0
    """Micro-batch of the step, from 0."""
    needed: int | None = None
    """Bytes of `size` without padding; None = all."""
    waited: bool = False
    """Does the rank wait for it? Others can be hidden behind computing, if that takes long enough."""
    every: int = 1
    """Steps from one such collective to the next; `size` is a step's part of its message."""

    def __post_init__(self) -> None:
        checked_ranks(self.ranks)
        checked_ranks(self.stride)
        choice("phase", self.phase, PHASES, error=CostError)
        whole_number("every", self.every, least=1, error=CostError)
        whole_number("size", self.size, least=0, what="a whole number of bytes", error=CostError)
        if self.needed is not None and not 0 <= self.needed <= self.size:
            raise CostError(f"needed={self.needed!r}: 0 to {self.size} bytes, the size, are allowed")

    @property
    def sent(self) -> float:
        """Bytes that a rank sends, and as many receives, in a ring; of a broadcast the whole; of a "recv" none."""
        if self.kind == "recv":
            return 0.0
        return bus_factor(self.kind, self.ranks) * self.size if self.kind in BUS_FACTORS else float(self.size)

    @property
    def padding(self) -> float:
        """Bytes of padding over those that are needed."""
        needed = self.size if self.needed is None else self.needed
        return self.size / needed - 1 if needed else 0.0

    def seconds(self, cluster: Cluster, algorithm: str = "best") -> float:
        """On a cluster whose nodes are filled with neighbouring ranks; nothing for a kind that has no formula. See `group_seconds`.

        Of a collective that is not in each step: a step's part of its seconds, latency included.
        """
        if self.kind in MESSAGES:
            return (cluster.intra if placed(cluster, self.ranks, self.stride)[0] == 1 else cluster.inter).send(self.size)
        if self.kind not in BUS_FACTORS:
            return 0.0
        whole = group_seconds(self.kind, self.size * self.every, cluster, ranks=self.ranks, stride=self.stride, algorithm=algorithm)
        return whole / self.every


def placed(cluster: Cluster, ranks: int, stride: int = 1) -> tuple[int, int]:
    """Nodes of a group's ranks, and how many are in each, where neighbouring ranks fill the nodes.

    >>> placed(Cluster.named("DGX-H100"), 16), placed(Cluster.named("DGX-H100"), 16, stride=8), placed(Cluster.named("DGX-H100"), 4)
    ((2, 8), (16, 1), (1, 4))
    """
    per_node = min(checked_ranks(ranks), max(1, cluster.gpus_per_node // checked_ranks(stride)))
    return -(-ranks // per_node), per_node


def group_seconds(kind: str, size: float, cluster: Cluster, *, ranks: int, stride: int = 1, algorithm: str = "best") -> float:
    """Seconds of a collective of `size` bytes of some ranks of a cluster, `stride` apart.

    Inside a node: by its link. All-reduces over nodes: `hierarchical_all_reduce`. All-gathers, reduce-scatters and all-to-alls over k
    nodes of g: a node receives (k−1)/k of the message through all its network cards at once while it is distributed inside, so that
    the slower of the two counts, and the latencies of both. Broadcasts and reduces over nodes: by the link between them.

    Left out: that other groups of the same ranks send at the same time, and that achieved bandwidth falls with the number of nodes.

    Raises:
        CostError: something else was given.
    """
    choice("algorithm", algorithm, ALGORITHMS, error=CostError)
    ways = ("ring", "tree") if algorithm == "best" else (algorithm,)
    return min(_one_way(kind, size, cluster, ranks, stride, way) for way in ways)


def _one_way(kind: str, size: float, cluster: Cluster, ranks: int, stride: int, way: str) -> float:
    nodes, per_node = placed(cluster, ranks, stride)
    if nodes == 1:
        return collective_seconds(kind, size, ranks, cluster.intra, way)
    if kind == "all_reduce":
        return hierarchical_all_reduce(size, nodes=nodes, per_node=per_node, intra=cluster.intra, inter=cluster.inter, algorithm=way)
    if kind in ("broadcast", "reduce"):
        return collective_seconds(kind, size, ranks, cluster.inter, way)
    collective_seconds(kind, size, ranks, cluster.inter, way)  # refuses unknown kinds
    hops = [count - 1 if way == "ring" else math.ceil(math.log2(count)) for count in (nodes, per_node)]
    between = (nodes - 1) / nodes * size / (per_node * cluster.inter.bandwidth)
    inside = (ranks - 1) / ranks * size / cluster.intra.bandwidth if per_node > 1 else 0.0
    if kind == "all_to_all":  # a rank's own bytes, not forwarded by its neighbours
        between = (ranks - per_node) / ranks * size / cluster.inter.bandwidth
    return hops[0] * cluster.inter.latency + hops[1] * cluster.intra.latency + max(between, inside)
