"""Timing of layouts: seconds of a step, in parts that add up: computing, communication that nothing hides, and the pipeline's bubble."""

from dataclasses import dataclass

import numpy as np

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collectives import Link
from workbench.cluster.analysis.plan.layouts import SHARINGS, Floats, Ints, Layouts
from workbench.cluster.analysis.plan.subject import ELEMENT, Subject

PARTS = ("compute", "communication", "bubble")
_BACKWARD = 2 / 3
"""Share of a micro-batch that its backward takes: two of three products."""
UPDATE = 30
"""Bytes that an Adam step moves per parameter: gradient 4, weights 4 + 4, moments 8 + 8, weights in 16 bit 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of each layout's step."""

    compute: Floats
    communication: Floats
    """That nothing hides."""
    bubble: Floats
    hidden: Floats
    """Of communication beside computing; not in the sum."""

    @property
    def total(self) -> Floats:
        """Of the step."""
        return self.compute + self.communication + self.bubble


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What hardware reaches."""

    flops_per_sec: float
    """Of a GPU while it computes."""
    memory: float
    """Bytes per second of its memory."""
    intra: Link
    inter: Link

    @classmethod
    def of(cls, cluster: Cluster, peak: float, efficiency: float, links: float | tuple[float, float]) -> "Pace":
        """A cluster's, at shares of its peaks; that of its links for both, or inside nodes and between them."""
        shares = links if isinstance(links, tuple) else (links, links)
        intra, inter = (
            Link(latency=one.latency, bandwidth=one.bandwidth * share)
            for one, share in zip((cluster.intra, cluster.inter), shares, strict=True)
        )
        return cls(flops_per_sec=peak * efficiency, memory=cluster.device.bandwidth, intra=intra, inter=inter)


def seconds(subject: Subject, found: Layouts, pace: Pace, per_node: int) -> Seconds:
    """Of a step of each layout.

    Computing: FLOPs over what a GPU reaches; the optimizer's step at the memory's bandwidth. Tensor parallelism: the all-reduces of every
    micro-batch, as rings in a node, none hidden (Shoeybi et al. 2019). Pipelines: (p−1)/(m v) of both (Narayanan et al. 2021), and one
    message per boundary, chunk and direction. Data parallelism, per micro-batch with ZeRO-2 and 3, else once a step: what the backward of
    that micro-batch does not hide, and at least its last bucket or layer (`cost.overlap`); ZeRO-1 and 2 gather the new weights, which
    nothing hides (torch's own ZeRO-1 broadcasts them one by one, after a whole all-reduce); under ZeRO-3 gathers and reductions hide
    behind the whole micro-batch, but the first layer's (`cost.sharded_step`).
    Stages with fewer layers wait for the fullest. Left out: what stages have beside layers, stragglers, the loader, checkpoints on disk.
    """
    kinds = list(subject.computed)
    t, p, m, b = found.tensor, found.pipeline, found.accumulation, found.micro_batch
    share = found.share(subject.layers)
    flops, fixed = (np.array([of.get(kind, 0.0) for kind in kinds])[found.checkpointing] for of in (subject.computed, subject.once))
    unit = (flops * b + fixed) * share / (t * pace.flops_per_sec)  # a micro-batch on one stage
    sent = _tensor_parallel(subject, found, pace)
    handed = _handed_on(subject, found, pace, per_node)
    working = unit + sent
    often, once, hidden = _data_parallel(subject, found, pace, working)
    busy = m * (working + often) + handed
    idle = np.where(p > 1, (p - 1) / (m * found.chunks), 0.0)
    return Seconds(
        compute=m * unit + _update(subject, found, pace),
        communication=m * (sent + often) + handed + once,
        bubble=idle * busy,
        hidden=hidden,
    )


def _tensor_parallel(subject: Subject, found: Layouts, pace: Pace) -> Floats:
    kinds = list(subject.computed)
    count, size = (np.array([subject.exchanged.get(kind, (0, 0.0))[i] for kind in kinds], float)[found.checkpointing] for i in (0, 1))
    times: Floats = subject.layers * found.share(subject.layers) * count
    return times * ring(found.tensor, size * found.micro_batch, pace.intra, 2)


def _handed_on(subject: Subject, found: Layouts, pace: Pace, per_node: int) -> Floats:
    """Forward and back, once per chunk; each of the ranks that split a layer sends its part."""
    size = subject.boundary * found.micro_batch / found.tensor
    far = found.gpus > per_node
    one = np.where(far, pace.inter.latency + size / pace.inter.bandwidth, pace.intra.latency + size / pace.intra.bandwidth)
    return np.where(found.pipeline > 1, 2 * found.accumulation * found.chunks * one, 0.0)


def _data_parallel(subject: Subject, found: Layouts, pace: Pace, working: Floats) -> tuple[Floats, Floats, Floats]:
    """Seconds that nothing hides: of each micro-batch, and of the step; and those of the step that something hides."""
    layers = subject.layers * found.share(subject.layers)
    own = ((subject.parameters - subject.shared) * found.share(subject.layers) + subject.shared) / found.tensor
    weights, gradients = own * ELEMENT[subject.precision], own * subject.states[1]
    inside, nodes, several = found.inside, found.nodes, found.data > 1
    backward = _BACKWARD * working

    def gathered(size: Floats, pieces: Floats | float) -> Floats:
        """Until all have `size` bytes, of which each had a part; a reduction takes as long. As `cost.gather_seconds`."""
        between = (nodes - 1) / nodes * size / (inside * pace.inter.bandwidth)
        within = (found.data - 1) / found.data * size / pace.intra.bandwidth
        hops = (nodes - 1) * pace.inter.latency + (inside - 1) * pace.intra.latency
        return pieces * hops + np.where(nodes > 1, np.maximum(between, within), within)

    reduced = ring(inside, gradients, pace.intra, 2) + tree_or_ring(nodes, gradients / inside, pace.inter)
    scattered, collected = gathered(gradients, 1), gathered(weights, 1)
    piece = 1 / layers
    # ZeRO-3: two gathers and a reduction of every micro-batch, layer by layer
    streams = 2 * gathered(weights, layers) + gathered(gradients, layers)
    sharded = np.maximum(0.0, streams - working) + collected * piece
    # the same inside of a node, and an all-reduce of the shard between nodes
    near = 2 * ring(inside, weights, pace.intra, 1, layers) + ring(inside, gradients, pace.intra, 1, layers)
    hybrid = np.maximum(0.0, near - working) + ring(inside, weights, pace.intra, 1) * piece
    between = tree_or_ring(nodes, gradients / inside, pace.inter)
    further = np.maximum(between * piece, np.maximum(0.0, near + between - working) - np.maximum(0.0, near - working))

    def beside_backward(size: Floats) -> Floats:
        return np.maximum(size * piece, size - backward)

    zero = np.zeros_like(working)
    often = np.stack([zero, zero, beside_backward(scattered), sharded, hybrid])
    first, updated = (reduced, _broadcasts(subject, found, own, pace)) if subject.broadcasts else (scattered, collected)
    once = np.stack([beside_backward(reduced), beside_backward(first) + updated, collected, zero, further])
    m = found.accumulation
    all_of_it = np.stack([reduced, first + updated, m * scattered + collected, m * streams, m * near + between])
    which = (found.sharing, np.arange(len(found)))
    often, once, whole = (np.where(several, one[which], 0.0) for one in (often, once, all_of_it))
    return often, once, np.maximum(0.0, whole - m * often - once)


def _broadcasts(subject: Subject, found: Layouts, own: Floats, pace: Pace) -> Floats:
    """Of torch's ZeroRedundancyOptimizer: each tensor of the new weights from its owner to all, by a tree over the slowest link."""
    far = found.nodes > 1
    hops = subject.broadcasts * np.ceil(np.log2(found.data)) * np.where(far, pace.inter.latency, pace.intra.latency)
    sent: Floats = hops + own * subject.states[0] / np.where(far, pace.inter.bandwidth, pace.intra.bandwidth)
    return sent


def ring(ranks: Ints, size: Floats, link: Link, rounds: int, pieces: Floats | float = 1.0) -> Floats:
    """Seconds of a ring of so many rounds: 2 an all-reduce, 1 a gather. As `cost.all_reduce` and `all_gather`, for columns.

    Args:
        ranks: that take part.
        size: bytes that each has in the end.
        link: between them.
        rounds: of n−1 messages.
        pieces: collectives that the bytes are sent in.
    """
    found: Floats = rounds * (pieces * (ranks - 1) * link.latency + (ranks - 1) / ranks * size / link.bandwidth)
    return found


def tree_or_ring(ranks: Ints, size: Floats, link: Link) -> Floats:
    """Seconds of an all-reduce by the better of both."""
    hops = np.minimum(ranks - 1, np.ceil(np.log2(ranks)))
    found: Floats = 2 * (hops * link.latency + (ranks - 1) / ranks * size / link.bandwidth)
    return found


def _update(subject: Subject, found: Layouts, pace: Pace) -> Floats:
    own = ((subject.parameters - subject.shared) * found.share(subject.layers) + subject.shared) / found.tensor
    alone = found.sharing == SHARINGS.index("ddp")
    updated: Floats = own / np.where(alone, 1, found.shard) * UPDATE / pace.memory
    return updated
