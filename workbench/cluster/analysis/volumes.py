"""Bytes that a rank sends per step under DDP, ZeRO, FSDP and HSDP, and the seconds of a fully sharded step on a cluster."""

from dataclasses import dataclass

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_cost import CostError, all_gather, checked_ranks
from workbench.core.checks import choice

SHARINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Bytes that each rank sends, and as many receives, per optimizer step."""

    gathered: float
    """Bytes in all-gathers of parameters."""
    reduced: float
    """Bytes in reduce-scatters (or the first half of all-reduces) of gradients."""
    returned: float
    """Bytes in the second half of all-reduces of gradients."""

    @property
    def total(self) -> float:
        """All bytes."""
        return self.gathered + self.reduced + self.returned


def volume(
    parameters: float,
    ranks: int,
    sharing: str = "ddp",
    *,
    parameter_bytes: float = 4,
    gradient_bytes: float = 4,
    shard_ranks: int | None = None,
) -> Volume:
    """Bytes per rank and step, in rings, for Ψ parameters on n ranks; per element times (n−1)/n:

    * ddp: 2Ψ, an all-reduce of the gradients.
    * zero1, zero2: 2Ψ, their reduce-scatter and an all-gather of the new parameters. (torch's ZeroRedundancyOptimizer, which is what
      `RunSpec(parallel="zero1")` uses, all-reduces the gradients instead: 3Ψ.)
    * zero3, fsdp: 3Ψ, an all-gather each for forward and backward, and a reduce-scatter.
    * hsdp: 3Ψ inside a group of `shard_ranks`, and an all-reduce of the shard, 2Ψ/g · (k−1)/k, with the k other groups.

    Source: Rajbhandari et al. 2020, ZeRO, section 7; Zhao et al. 2023, PyTorch FSDP. Left out: padding, buffers, and that FSDP keeps the
    root's parameters from forward to backward.

    Args:
        parameters: Ψ, of the model.
        ranks: n that work on different samples.
        sharing: one of "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp".
        parameter_bytes: per element of what is gathered (2 in bf16).
        gradient_bytes: per element of what is reduced (4 in fp32).
        shard_ranks: of hsdp.

    Raises:
        CostError: an unknown kind of sharing, or ranks that the groups do not divide.

    >>> volume(1e9, 8, "fsdp", parameter_bytes=2).total / volume(1e9, 8, "ddp").total
    1.0
    """
    choice("sharing", sharing, SHARINGS, error=CostError)
    if not parameters > 0:
        raise CostError(f"parameters={parameters!r}: expected a number above 0")
    group = checked_ranks(ranks)
    if sharing == "hsdp":
        group = checked_ranks(shard_ranks if shard_ranks is not None else min(8, ranks))
        if ranks % group:
            raise CostError(f"shard_ranks={group} does not divide the {ranks} ranks: expected groups of one size")
    share = (group - 1) / group
    gradients, weights = gradient_bytes * parameters, parameter_bytes * parameters
    if sharing == "ddp":
        return Volume(gathered=0.0, reduced=gradients * share, returned=gradients * share)
    if sharing in ("zero1", "zero2"):
        return Volume(gathered=weights * share, reduced=gradients * share, returned=0.0)
    copies = ranks // group
    between = gradients / group * (copies - 1) / copies
    return Volume(gathered=2 * weights * share, reduced=gradients * share + between, returned=between)


def gather_seconds(size: float, gpus: int, cluster: Cluster) -> float:
    """Seconds until all GPUs have all `size` bytes, of which each had a part; a reduce-scatter takes as long.

    Over k nodes of g GPUs, every node receives the (k−1)/k of it that others have through all its g network cards at once, and distributes
    it inside, (n−1)/n of it to each GPU; both overlap, so the slower counts. Latencies: a ring's.

    Raises:
        CostError: the GPUs are no whole nodes.
    """
    nodes = cluster.nodes(gpus)
    if nodes == 1:
        return all_gather(size, gpus, cluster.intra)
    between = (nodes - 1) / nodes * size / (cluster.gpus_per_node * cluster.inter.bandwidth)
    inside = (gpus - 1) / gpus * size / cluster.intra.bandwidth
    hops = (nodes - 1) * cluster.inter.latency + (cluster.gpus_per_node - 1) * cluster.intra.latency
    return hops + max(between, inside)


def sharded_step(
    compute: float, parameters: float, gpus: int, cluster: Cluster, *, parameter_bytes: float = 2, gradient_bytes: float = 4
) -> float:
    """Seconds of a step under ZeRO-3 or FSDP: the longer of computing and sending, which overlap layer by layer.

    Sending: two all-gathers of the parameters and a reduce-scatter of the gradients (`volume`). Source: Rajbhandari et al. 2020, ZeRO,
    section 7.2; Zhao et al. 2023, PyTorch FSDP, section 3.3. Left out: the first layer's gather, which nothing hides, memory traffic, and
    latencies of every layer beyond the first. A lower bound; links by datasheet make it lower still.

    Args:
        compute: seconds of computing of the step.
        parameters: of the model.
        gpus: that shard it.
        cluster: where.
        parameter_bytes: per element of what is gathered (2 in bf16).
        gradient_bytes: per element of what is reduced (4 in fp32).

    Raises:
        CostError: seconds not above 0, or GPUs that are no whole nodes.
    """
    if not compute > 0:
        raise CostError(f"compute={compute!r}: expected seconds above 0")
    sent = volume(parameters, gpus, "fsdp", parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes)
    if not sent.total:
        return compute
    whole = gpus / (gpus - 1)  # volumes are bytes sent by a rank, collectives take the full size
    return max(compute, 2 * gather_seconds(sent.gathered / 2 * whole, gpus, cluster) + gather_seconds(sent.reduced * whole, gpus, cluster))
