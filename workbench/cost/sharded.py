"""Sharded: seconds of a step whose parameters lie in shards on all GPUs (ZeRO-3, FSDP), on a cluster."""

from workbench.cost.cluster import Cluster
from workbench.cost.collectives import CostError, all_gather
from workbench.cost.volumes import volume


def gather_seconds(size: float, gpus: int, cluster: Cluster) -> float:
    """Seconds until all GPUs have all `size` bytes, of which each had a part; a reduce-scatter takes as long.

    Over k nodes of g GPUs, every node takes in the (k−1)/k of it that others have through all its g network cards at once, and hands it
    round inside, (n−1)/n of it to each GPU; both go on together, so the slower counts. Latencies: a ring's.

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
    """Seconds of a step under ZeRO-3 or FSDP: the longer of computing and of sending, which go on side by side, layer by layer.

    Sending: two all-gathers of the parameters and a reduce-scatter of the gradients (`volume`). Source: Rajbhandari et al. 2020, ZeRO,
    section 7.2; Zhao et al. 2023, PyTorch FSDP, section 3.3. Left out: the first layer's gather, which nothing hides, memory traffic, and
    latencies of every layer beyond the first. A lower bound; links by datasheet make it lower still.

    Args:
        compute: seconds of the step on a GPU that waits for nobody.
        parameters: of the model.
        gpus: that share it.
        cluster: where.
        parameter_bytes: per element of what is gathered (2 in bf16).
        gradient_bytes: per element of what is reduced (4 in fp32).

    Raises:
        CostError: seconds not above 0, or GPUs that are no whole nodes.
    """
    if not compute > 0:
        raise CostError(f"compute={compute!r}: seconds above 0 are wanted")
    sent = volume(parameters, gpus, "fsdp", parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes)
    if not sent.total:
        return compute
    whole = gpus / (gpus - 1)  # volumes are what a rank sends, collectives are of what there is
    return max(compute, 2 * gather_seconds(sent.gathered / 2 * whole, gpus, cluster) + gather_seconds(sent.reduced * whole, gpus, cluster))
