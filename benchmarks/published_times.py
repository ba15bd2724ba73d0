"""Closed forms that others have published for the seconds of a step, with their sources, to be compared with. None runs anything.

3-D parallelism: T = (FLOPs / (GPUs · rate) + tensor-parallel bytes / bandwidth) · (1 + bubble). The two rates include what the formula
leaves out (element-wise work, which grows with the bytes; kernels below their peak), so they are calibrated on small runs, not read from
datasheets. Fitted to 22B parameters on 8 GPUs and 175B on 64 of a published table, it gives 530B on 280 and 1T on 512 within 4 %.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from volumes import volume

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_cost import CostError, checked_ranks, collective_seconds, non_negative_pair
from workbench.cluster.analysis.iteration import Overlap, bubble, buckets, overlap
from workbench.cluster.analysis.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Batch and degrees of parallelism of an iteration. GPUs = data × tensor × pipeline."""

    batch: int
    """Sequences per iteration."""
    micro_batch: int = 1
    """Sequences of a micro-batch."""
    data: int = 1
    """Copies of the model."""
    tensor: int = 1
    """Ranks that split each layer."""
    pipeline: int = 1
    """Stages."""
    chunks: int = 1
    """Pieces of the layers on each stage; above 1 the schedule is interleaved."""

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batch", "data", "tensor", "pipeline", "chunks"):
            try:
                checked_ranks(getattr(self, name))
            except CostError:
                raise CostError(f"{name}={getattr(self, name)!r}: expected a whole number of at least 1") from None
        if self.batch % (self.data * self.micro_batch):
            raise CostError(f"batch={self.batch} is not a multiple of data × micro_batch = {self.data} × {self.micro_batch}")

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.data * self.tensor * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an iteration and pipeline."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def bubble(self) -> float:
        """Idle over ideal time."""
        return bubble(self.pipeline, self.micro_batches, "interleaved" if self.chunks > 1 else "1f1b", self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of each GPU in an iteration."""

    flops: float
    """FLOPs computed."""
    bytes: float
    """Sent for tensor parallelism."""
    bubble: float
    """Idle over ideal time."""


def tensor_bytes(model: Transformer, samples: float, tensor: int, recompute: str = "none", element: float = 2) -> float:
    """Bytes that a rank sends for tensor parallelism, all layers, for `samples` sequences: 2(t−1)/t · s h per all-reduce and sequence.

    Sequence parallelism sends as much, as reduce-scatters and all-gathers. Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3;
    Korthikanti et al. 2022, section 4. Left out: embedding and output layer.

    Args:
        model: whose layers are split.
        samples: sequences.
        tensor: ranks that split each layer, t.
        recompute: "none", "selective" (taken with sequence parallelism, as in the source) or "full".
        element: bytes of one number.
    """
    all_reduce = 2 * (tensor - 1) / tensor * samples * model.sequence * model.hidden * element
    return model.exchanges(recompute) * all_reduce * model.layers


def work(model: Transformer, layout: Layout, recompute: str = "none") -> Work:
    """Work of each GPU; stages are assumed equal.

    Raises:
        CostError: an unknown kind of recomputation.
    """
    flops = model.flops(layout.batch, recompute) / layout.gpus
    sent = tensor_bytes(model, layout.batch / layout.data, layout.tensor, recompute) / layout.pipeline
    return Work(flops=flops, bytes=sent, bubble=layout.bubble)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Achieved rates of a GPU in this kind of program."""

    flops_per_sec: float
    """FLOP/s while it computes; infinite if bytes alone explain the measured iterations."""
    bandwidth: float
    """Bytes per second of tensor parallelism, and of work that grows with its bytes; infinite if it takes no time."""

    @classmethod
    def calibrated(cls, measured: Iterable[tuple[Work, float]]) -> "Rates":
        """The rates that fit measured iterations best.

        Args:
            measured: work of each GPU and seconds of the iteration; two or more, of different sizes.

        Raises:
            CostError: fewer than two, or seconds that are not above 0.
        """
        rows = list(measured)
        if len(rows) < 2 or any(not seconds > 0 for _, seconds in rows):
            raise CostError(f"{len(rows)} measured iterations: expected two or more, each with its seconds, to tell computing from sending")
        scaled = [(done.flops * (1 + done.bubble), done.bytes * (1 + done.bubble), seconds) for done, seconds in rows]
        per_flop, per_byte = non_negative_pair(scaled)
        return cls(flops_per_sec=1 / per_flop if per_flop else float("inf"), bandwidth=1 / per_byte if per_byte else float("inf"))

    def seconds(self, work: Work) -> float:
        """Seconds of an iteration."""
        return (work.flops / self.flops_per_sec + work.bytes / self.bandwidth) * (1 + work.bubble)


def gather_seconds(size: float, gpus: int, cluster: Cluster) -> float:
    """Seconds until all GPUs have all `size` bytes, of which each had a part; a reduce-scatter takes as long.

    Over k nodes of g GPUs, every node receives the (k−1)/k of it that others have through all its g network cards at once, and distributes
    it inside, (n−1)/n of it to each GPU; both overlap, so the slower counts. Latencies: a ring's. Written apart
    from `collective_call.group_seconds`, so that tests can hold the two against each other.

    Raises:
        CostError: the GPUs are not whole nodes.
    """
    nodes = cluster.nodes(gpus)
    if nodes == 1:
        return collective_seconds("all_gather", size, gpus, cluster.intra)
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
        CostError: seconds not above 0, or GPUs that are not whole nodes.
    """
    if not compute > 0:
        raise CostError(f"compute={compute!r}: expected seconds above 0")
    sent = volume(parameters, gpus, "fsdp", parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes)
    if not sent.total:
        return compute
    whole = gpus / (gpus - 1)  # volumes are bytes sent by a rank, collectives take the full size
    return max(compute, 2 * gather_seconds(sent.gathered / 2 * whole, gpus, cluster) + gather_seconds(sent.reduced * whole, gpus, cluster))


def timed(sizes: Sequence[int], backward: float, seconds_of: Callable[[float], float], cap: int | None = None) -> Overlap:
    """The overlap of a model whose gradients arrive at a steady rate of bytes, as those of equally wide layers do.

    Args:
        sizes: bytes of each gradient, in the order of the parameters.
        backward: seconds of the backward.
        seconds_of: of an all-reduce of so many bytes.
        cap: as in `buckets`.
    """
    whole = sum(sizes)
    amounts = [sum(sizes[index] for index in bucket) for bucket in buckets(sizes, cap)]
    ready = [backward * sum(amounts[: k + 1]) / whole for k in range(len(amounts))]
    return overlap(ready, [seconds_of(amount) for amount in amounts], backward)
