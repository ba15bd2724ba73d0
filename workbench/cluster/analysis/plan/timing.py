"""Predicts the step time of layouts as parts that add up: computing, exposed communication, and the pipeline's bubble."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_cost import Link
from workbench.cluster.analysis.plan.layouts import SHARINGS, Floats, Ints, Layouts
from workbench.cluster.analysis.plan.ranges import MESSAGE
from workbench.cluster.analysis.plan.workload import ELEMENT, Workload

PARTS = ("compute", "communication", "bubble")
_BACKWARD = 2 / 3
"""Share of a micro-batch that its backward takes: two of three products."""
UPDATE = 30
"""Bytes that an Adam step moves per parameter: gradient 4, weights 4 + 4, moments 8 + 8, weights in 16 bit 2."""
CLIP = 3
"""Times that clipping moves a gradient: read for the norm, read and written when they are scaled."""
BUCKET = 25 * 2**20
"""Bytes of gradients that are reduced at once: torch's DistributedDataParallel, `bucket_cap_mb`. Each pays the latency of its messages."""

CHECK_MESSAGES = 4
"""Messages between hosts, one after the other, for each other rank of a collective that PyTorch checks: a monitored barrier, in which the
first rank hears from every other and answers, and two gathers of fingerprints in a ring (ProcessGroupWrapper.cpp of PyTorch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of each layout's step."""

    compute: Floats
    communication: Floats
    """Exposed: not hidden by computing."""
    bubble: Floats
    hidden: Floats
    """Communication hidden behind computing; not in the sum."""

    @property
    def total(self) -> Floats:
        """Seconds of the step."""
        return self.compute + self.communication + self.bubble


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareRates:
    """What the hardware achieves."""

    flops_per_sec: float
    """FLOP/s of a GPU while it computes."""
    memory: float
    """Bytes per second of its memory."""
    intra: Link
    inter: Link
    host: float = 0.0
    """Seconds in which the host launches an operator."""
    message: float = MESSAGE.mid
    """Seconds of a small message between hosts."""
    late: float = 0.0
    """Naps by which a pass of a polling stage is longer than its messages make it; below 0, filling the pipeline takes none."""

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        peak: float,
        efficiency: float,
        links: float | tuple[float, float],
        host: float = 0.0,
        latency_factors: tuple[float, float] = (1.0, 1.0),
        message: float = MESSAGE.mid,
        late: float = 0.0,
    ) -> "HardwareRates":
        """A cluster's rates at shares of its peaks.

        Args:
            cluster: the cluster, with its links.
            peak: FLOP/s by the datasheet.
            efficiency: share of the peak that products reach, 0 to 1.
            links: share of their bandwidth, one for all, or (inside nodes, between them).
            host: seconds in which the host launches an operator.
            latency_factors: factor by which the links' latency is multiplied, inside nodes and between them.
            message: seconds of a small message between hosts.
            late: sleeps by which a pass of a polling stage is longer.
        """
        shares = links if isinstance(links, tuple) else (links, links)
        pairs = zip((cluster.intra, cluster.inter), shares, latency_factors, strict=True)
        intra, inter = (Link(latency=link.latency * factor, bandwidth=link.bandwidth * share) for link, share, factor in pairs)
        rate, memory = peak * efficiency, cluster.device.bandwidth
        return cls(flops_per_sec=rate, memory=memory, intra=intra, inter=inter, host=host, message=message, late=late)


def seconds(workload: Workload, layouts: Layouts, rates: HardwareRates, per_node: int) -> Seconds:
    """Seconds of a step of each layout.

    Computing: FLOPs over what a GPU achieves; under tensor parallelism what it does not split, at the memory's bandwidth; no less than what
    the host takes to launch the operators of a micro-batch, however small; the optimizer's step, clipping
    (`Workload.clips`), and adding up gradients where operators of their own do (`Workload.adding`), at the memory's bandwidth.
    Tensor parallelism: the all-reduces of every micro-batch, as rings in a node, all exposed (Shoeybi et al. 2019). Pipelines: (p−1)/(m
    v) of both (Narayanan et al. 2021), and one message per boundary, chunk and direction. Data parallelism, per micro-batch with ZeRO-2
    and 3, else once a step: what the backward of that micro-batch does not hide, and at least its last bucket or layer
    (`iteration.overlap`) or the embedding, whose gradient is ready last; all of it where gradients are not reduced meanwhile
    (`Workload.overlapped`); ZeRO-1 and 2 gather the new weights exposed (torch's own ZeRO-1 broadcasts them one by one, after a whole
    all-reduce); under ZeRO-3 gathers and reductions hide behind the whole micro-batch, except the first layer's.
    Gradients are reduced in buckets, each of which pays its latency. Under a pipeline the first and the last stage sum the gradient of a
    tied embedding. Stages with fewer layers wait for the longest, and all of them at least for the output layer, which is on one of them.
    What a trainer makes all wait for (`_waits`) is exposed communication.
    Left out: the other work of a pipeline's first and last stage outside their layers, stragglers, the loader, checkpoints on disk.
    """
    p, m = layouts.pipeline, layouts.accumulation
    unit, launched = _stage(workload, layouts, rates), np.zeros(len(layouts))
    sent = _tensor_parallel(workload, layouts, rates)
    added = _added(workload, layouts, rates)
    if workload.operators:
        launched = _of(workload, layouts, workload.operators) * layouts.share(workload.layers) * rates.host
        unit = np.maximum(unit, launched - sent)  # the host launches collectives, too
    slowest = np.maximum(unit, workload.output * layouts.micro_batch / (layouts.tensor * rates.flops_per_sec))
    handed = _pipeline_messages(workload, layouts, rates, per_node)
    working = unit + sent
    often, once, hidden = _data_parallel(workload, layouts, rates, working)
    busy = m * (working + often) + handed
    idle = np.where(p > 1, (p - 1) / (m * layouts.chunks), 0.0)
    waits = _waits(workload, layouts, rates, per_node, busy, launched)
    return Seconds(
        compute=m * slowest + (m - 1) * added + _update(workload, layouts, rates),
        communication=m * (sent + often) + handed + once + _tied(workload, layouts, rates, per_node) + waits,
        bubble=idle * busy,
        hidden=hidden,
    )


def _of(workload: Workload, layouts: Layouts, kinds: Mapping[str, float]) -> Floats:
    """A figure of each layout's kind of checkpointing."""
    found: Floats = np.array([kinds.get(kind, 0.0) for kind in workload.computed], float)[layouts.checkpointing]
    return found


def _stage(workload: Workload, layouts: Layouts, rates: HardwareRates) -> Floats:
    """Seconds in which the stage with most to do computes a micro-batch."""
    t, b = layouts.tensor, layouts.micro_batch
    share = layouts.share(workload.layers)
    flops = _of(workload, layouts, workload.computed) * b + _of(workload, layouts, workload.once)
    undivided = _of(workload, layouts, workload.undivided) * b * share * (t - 1) / t
    seconds: Floats = flops * share / (t * rates.flops_per_sec) + undivided / rates.memory
    return seconds


def _tensor_parallel(workload: Workload, layouts: Layouts, rates: HardwareRates) -> Floats:
    kinds = list(workload.computed)
    count, size = (np.array([workload.exchanged.get(kind, (0, 0.0))[i] for kind in kinds], float)[layouts.checkpointing] for i in (0, 1))
    times: Floats = workload.layers * layouts.share(workload.layers) * count
    return times * ring(layouts.tensor, size * layouts.micro_batch, rates.intra, 2)


def _pipeline_messages(workload: Workload, layouts: Layouts, rates: HardwareRates, per_node: int) -> Floats:
    """Seconds of the messages between stages, forward and back, once per chunk; each rank of a split layer sends its part."""
    size = workload.boundary * layouts.micro_batch / layouts.tensor
    far = layouts.gpus > per_node
    message = np.where(far, rates.inter.latency + size / rates.inter.bandwidth, rates.intra.latency + size / rates.intra.bandwidth)
    return np.where(layouts.pipeline > 1, 2 * layouts.accumulation * layouts.chunks * message, 0.0)


def _data_parallel(workload: Workload, layouts: Layouts, rates: HardwareRates, working: Floats) -> tuple[Floats, Floats, Floats]:
    """Exposed seconds of each micro-batch, exposed seconds once per step, and hidden seconds of the step."""
    layers = workload.layers * layouts.share(workload.layers)
    own = _own(workload, layouts)
    weights, gradients = own * ELEMENT[workload.precision], own * workload.states[1]
    inside, nodes, several = layouts.inside, layouts.nodes, layouts.data > 1
    backward = _BACKWARD * working

    def gathered(size: Floats, pieces: Floats | float) -> Floats:
        """Seconds until all have `size` bytes, of which each had a part; a reduction takes as long.

        As `collective_call.group_seconds` of an all-gather in rings.
        """
        between = (nodes - 1) / nodes * size / (inside * rates.inter.bandwidth)
        within = (layouts.data - 1) / layouts.data * size / rates.intra.bandwidth
        hops = (nodes - 1) * rates.inter.latency + (inside - 1) * rates.intra.latency
        return pieces * hops + np.where(nodes > 1, np.maximum(between, within), within)

    buckets = np.maximum(1.0, gradients / BUCKET)
    reduced = all_reduced(inside, nodes, gradients, rates, buckets)
    scattered, collected = gathered(gradients, buckets), gathered(weights, buckets)
    piece = 1 / layers
    # ZeRO-3: two gathers and a reduction of every micro-batch, layer by layer
    streams = 2 * gathered(weights, layers) + gathered(gradients, layers)
    sharded = np.maximum(0.0, streams - working) + gathered(weights, layers) * piece
    # HSDP: the same inside a node, and an all-reduce of the shard between nodes
    near = 2 * ring(inside, weights, rates.intra, 1, layers) + ring(inside, gradients, rates.intra, 1, layers)
    hybrid = np.maximum(0.0, near - working) + ring(inside, weights, rates.intra, 1) * piece
    between = tree_or_ring(nodes, gradients / inside, rates.inter)
    further = np.maximum(between * piece, np.maximum(0.0, near + between - working) - np.maximum(0.0, near - working))

    last = np.maximum(piece, workload.shared / layouts.tensor / own)  # the embedding's gradient comes at the very end of the backward

    def beside_backward(size: Floats) -> Floats:
        return np.maximum(size * last, size - backward) if workload.overlapped else size

    zero = np.zeros_like(working)
    often = np.stack([zero, zero, beside_backward(scattered), sharded, hybrid])
    first, updated = (reduced, _broadcasts(workload, layouts, own, rates)) if workload.broadcasts else (scattered, collected)
    if workload.whole_reduction:
        copied = workload.slices * layouts.share(workload.layers) * layouts.data * rates.host
        first, updated = all_reduced(inside, nodes, gradients, rates), gathered(weights, 1.0) + copied
    reduction = first if workload.whole_reduction else beside_backward(first)
    once = np.stack([beside_backward(reduced), reduction + updated, collected, zero, further])
    m = layouts.accumulation
    everything = np.stack([reduced, first + updated, m * scattered + collected, m * streams, m * near + between])
    which = (layouts.sharing, np.arange(len(layouts)))
    often, once, whole = (np.where(several, table[which], 0.0) for table in (often, once, everything))
    return often, once, np.maximum(0.0, whole - m * often - once)


def _broadcasts(workload: Workload, layouts: Layouts, own: Floats, rates: HardwareRates) -> Floats:
    """Seconds of torch's ZeroRedundancyOptimizer: each new weight tensor is broadcast by its owner, as a tree over the slowest link."""
    far = layouts.nodes > 1
    hops = workload.broadcasts * np.ceil(np.log2(layouts.data)) * np.where(far, rates.inter.latency, rates.intra.latency)
    sent: Floats = hops + own * workload.states[0] / np.where(far, rates.inter.bandwidth, rates.intra.bandwidth)
    return sent


def ring(ranks: Ints | int, size: Floats, link: Link, rounds: int, pieces: Floats | float = 1.0) -> Floats:
    """Seconds of a ring collective, for columns: 2 rounds are an all-reduce, 1 a gather, as in `collective_cost`.

    Args:
        ranks: number of ranks that take part.
        size: bytes that each has in the end.
        link: latency and bandwidth between two of them.
        rounds: rounds of n−1 messages each, for n ranks.
        pieces: collectives into which the bytes are divided.
    """
    total: Floats = rounds * (pieces * (ranks - 1) * link.latency + (ranks - 1) / ranks * size / link.bandwidth)
    return total


def all_reduced(inside: Ints, nodes: Ints, size: Floats, rates: HardwareRates, pieces: Floats | float = 1.0) -> Floats:
    """Seconds of all-reduces over nodes, of so many bytes together, for columns: as `collective_cost.hierarchical_all_reduce`."""
    within, across = ring(inside, size, rates.intra, 2, 0.0), tree_or_ring(nodes, size / inside, rates.inter, 0.0)
    hops = ring(inside, 0.0 * size, rates.intra, 2, pieces) + tree_or_ring(nodes, 0.0 * size, rates.inter, pieces)
    return hops + np.maximum(within, across)


def tree_or_ring(ranks: Ints, size: Floats, link: Link, pieces: Floats | float = 1.0) -> Floats:
    """Seconds of all-reduces by the faster of the two, of so many bytes together."""
    hops = np.minimum(ranks - 1, np.ceil(np.log2(ranks)))
    total: Floats = 2 * (pieces * hops * link.latency + (ranks - 1) / ranks * size / link.bandwidth)
    return total


def _update(workload: Workload, layouts: Layouts, rates: HardwareRates) -> Floats:
    alone = layouts.sharing == SHARINGS.index("ddp")
    bytes_ = UPDATE + CLIP * workload.states[1] * workload.clips
    updated: Floats = _own(workload, layouts) / np.where(alone, 1, layouts.shard) * bytes_ / rates.memory
    return updated


def _own(workload: Workload, layouts: Layouts) -> Floats:
    """Parameters of the fullest stage that a rank computes with."""
    own: Floats = ((workload.parameters - workload.shared) * layouts.share(workload.layers) + workload.shared) / layouts.tensor
    return own


def _added(workload: Workload, layouts: Layouts, rates: HardwareRates) -> Floats:
    """Seconds in which the gradients of a micro-batch, or a rank's shard of them, are added to those before."""
    shard = np.where(layouts.sharing >= SHARINGS.index("zero2"), layouts.shard, 1)
    added: Floats = _own(workload, layouts) / shard * workload.adding / rates.memory
    return added


def _waits(workload: Workload, layouts: Layouts, rates: HardwareRates, per_node: int, busy: Floats, launched: Floats) -> Floats:
    """Seconds by which a step takes longer where stages of a pipeline poll for messages, or PyTorch checks collectives.

    A stage sleeps at least once for each polled message, since it looks right after it has begun. Meanwhile it launches nothing, so that
    its forward takes whole sleeps, and so does its backward; the first sleep of each is that of a message. While the pipeline fills and
    drains, its stages sleep one after the other, but for the two messages that the sleeps of the stage with most of them hold already.

    Args:
        workload: what is trained, with its layers and sizes.
        layouts: how it is laid out over the GPUs, as columns.
        rates: FLOP/s, bandwidths and latencies of the hardware.
        per_node: GPUs of a node.
        busy: seconds in which a stage works on all its micro-batches.
        launched: those in which the host launches one of them.
    """
    if not workload.poll and not workload.checked:
        return np.zeros(len(layouts))
    p, chunks, pieces = layouts.pipeline, layouts.chunks, layouts.accumulation * layouts.chunks
    each = np.where((layouts.gpus > per_node) | workload.checked_in_node, CHECK_MESSAGES * rates.message, 0.0) * workload.checked
    calls = _of(workload, layouts, workload.collectives) * workload.layers * layouts.share(workload.layers) / chunks
    checked = each * calls * (layouts.tensor - 1)  # of a micro-batch on a piece of a stage
    once = each * (_data_parallel_calls(workload, layouts) + layouts.gpus - 1)  # and the norm of the gradients of all ranks
    waits: Floats = (pieces + p - 1) * checked + once
    if not workload.poll:
        return waits
    working = busy / pieces + checked
    whole = np.ceil(working / 3 / workload.poll) + np.ceil(working * 2 / 3 / workload.poll)
    beside = np.where(p == 2, 1, 2) * workload.polled - 2  # sleeps in which nothing is computed
    filling = np.maximum(0, p - 3) * (workload.polled - 2 + whole) + np.minimum(2, p - 1) * (whole - 2)
    sleeps = pieces * (beside + whole + 2 * max(0, rates.late)) + (filling if rates.late >= 0 else 0.0)
    polling = workload.poll * sleeps + pieces * (launched / chunks + checked) + once - busy * (1 + (p - 1) / pieces)
    return np.where(p > 1, polling, waits)


def _data_parallel_calls(workload: Workload, layouts: Layouts) -> Floats:
    """Collectives of a step in which copies of the model take part, each times the other ranks of it."""
    m, layers = layouts.accumulation, workload.layers * layouts.share(workload.layers)
    buckets = np.maximum(1.0, _own(workload, layouts) * workload.states[0] / BUCKET)
    zero1 = np.full(len(layouts), 2.0) if workload.whole_reduction else buckets + (workload.broadcasts or buckets)
    everywhere = np.stack([buckets, zero1, (m + 1) * buckets, 3 * m * layers, 0 * buckets])
    which = (layouts.sharing, np.arange(len(layouts)))
    hybrid: Floats = 3 * m * layers * (layouts.inside - 1) + layers * (layouts.nodes - 1)
    others = np.where(layouts.sharing == SHARINGS.index("hsdp"), hybrid, everywhere[which] * (layouts.data - 1))
    total: Floats = others + (layouts.data - 1.0)  # and the mean of the loss
    return total


def _tied(workload: Workload, layouts: Layouts, rates: HardwareRates, per_node: int) -> Floats:
    """Seconds in which the first and the last stage sum the gradient of the embedding that both use, after the last backward."""
    size = workload.tied * workload.states[1] / layouts.tensor
    far = layouts.gpus > per_node
    several = (layouts.pipeline > 1) & (workload.tied > 0)
    return np.where(several, np.where(far, ring(2, size, rates.inter, 2), ring(2, size, rates.intra, 2)), 0.0)
