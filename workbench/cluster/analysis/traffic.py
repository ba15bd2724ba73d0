"""`Traffic`: the collectives of one training step of a rank, with their bytes; their seconds on a cluster, and findings about waste."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.cluster.analysis.cluster import NETWORK_LATENCY, Cluster
from workbench.cluster.analysis.collective_call import MESSAGES, PHASES, CollectiveCall
from workbench.cluster.analysis.collective_cost import BUS_FACTORS, CostError
from workbench.cluster.analysis.iteration import overlap
from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Sums over collectives that share a module or a kind."""

    name: str
    """Name of the module or kind."""
    calls: tuple[CollectiveCall, ...]
    """Its collectives."""

    @property
    def count(self) -> int:
        """Number of collectives."""
        return len(self.calls)

    @property
    def size(self) -> int:
        """Their bytes, as `CollectiveCall.size`."""
        return sum(call.size for call in self.calls)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in them."""
        return sum(call.sent for call in self.calls)

    @property
    def padding(self) -> float:
        """Bytes of padding over those that are needed."""
        needed = sum(call.size if call.needed is None else call.needed for call in self.calls)
        return self.size / needed - 1 if needed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(display.Shown, JsonDataclass):
    """The collectives of one optimizer step of one rank, in their order. Get one from `wb.collectives`; iterates over its `CollectiveCall`.

    >>> call = CollectiveCall(kind="all_reduce", size=4 * 10**6, ranks=8, phase="backward", waited=True)
    >>> traffic = Traffic(calls=(call,), world_size=8, parameters=10**6)
    >>> traffic.count("all_reduce"), traffic.size(), traffic.sent()
    (1, 4000000, 7000000.0)
    """

    calls: tuple[CollectiveCall, ...]
    """In order: forward and backward of each micro-batch, then the optimizer's step."""
    world_size: int
    """Number of ranks."""
    parameters: int
    """Elements of the whole model."""
    title: str = ""
    """Title: the program that was counted."""
    parallel: str = "ddp"
    """As `RunSpec.parallel`."""
    blocks: int = 0
    """Repeated blocks of the model, such as its layers; 0 = not known."""
    unused: tuple[str, ...] = ()
    """Trainable parameters without a gradient."""
    looks_for_unused: bool = False
    """`find_unused_parameters` of DDP, or a `static_graph` that leaves some out."""
    notes: tuple[str, ...] = ()
    """Notes for the reader."""

    def __iter__(self) -> Iterator[CollectiveCall]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def of(self, kind: str | None = None, *, phase: str | None = None, axis: str | None = None) -> tuple[CollectiveCall, ...]:
        """Those of a kind, a phase, an axis; None = any."""
        return tuple(call for call in self.calls if kind in (None, call.kind) and phase in (None, call.phase) and axis in (None, call.axis))

    def count(self, kind: str | None = None) -> int:
        """How many of a kind; None = all."""
        return len(self.of(kind))

    def size(self, kind: str | None = None) -> int:
        """Their bytes, as `CollectiveCall.size`."""
        return sum(call.size for call in self.of(kind))

    def sent(self, kind: str | None = None) -> float:
        """Bytes that a rank sends in them, in rings."""
        return sum(call.sent for call in self.of(kind))

    @property
    def padding(self) -> float:
        """Bytes of padding over those that are needed, of all collectives."""
        return Row(name="", calls=self.calls).padding

    @property
    def rows(self) -> tuple[Row, ...]:
        """By phase, kind, axis and ranks, in the order of a step."""

        def key(call: CollectiveCall) -> tuple[int, str, str, int]:
            return PHASES.index(call.phase), call.kind, call.axis, call.ranks

        return tuple(Row(name=name[1], calls=tuple(calls)) for name, calls in itertools.groupby(sorted(self.calls, key=key), key=key))

    def by_module(self, depth: int | None = None) -> tuple[Row, ...]:
        """By module, the one that sends most first.

        Args:
            depth: names of a module's path that count; None = all.
        """
        groups: dict[str, list[CollectiveCall]] = {}
        for call in self.calls:
            groups.setdefault(".".join(call.module.split(".")[:depth]), []).append(call)
        return tuple(sorted((Row(name=what, calls=tuple(calls)) for what, calls in groups.items()), key=lambda row: -row.sent))

    @property
    def lint(self) -> "tuple[Finding, ...]":
        """Waste, and what would fail."""
        return lint(self)

    def on(self, cluster: Cluster | str, *, algorithm: str = "best") -> "TrafficTime":
        """Seconds of the collectives on a cluster.

        Args:
            cluster: a Cluster, or its name in the catalogue.
            algorithm: "ring", "tree" or "best".

        Raises:
            CostError: an unknown name or algorithm.
        """
        known = Cluster.named(cluster) if isinstance(cluster, str) else cluster
        if not isinstance(known, Cluster):
            raise CostError(f"cluster={cluster!r}: expected a Cluster or the name of one, such as 'DGX-H100'")
        return _seconds_on_cluster(self.calls, known, title=self.title, world_size=self.world_size, algorithm=algorithm)

    @property
    def table(self) -> display.Table:
        """A row for each phase, kind and group of ranks."""
        rows = [
            [
                row.calls[0].phase,
                row.name,
                row.calls[0].axis,
                units.count(row.calls[0].ranks),
                units.count(row.count),
                units.bytes_(row.size),
                units.bytes_(row.sent),
                units.percent(row.padding),
            ]
            for row in self.rows
        ]
        return display.Table(
            columns=("phase", "collective", "among", "ranks", "calls", "bytes", "sent by a rank", "padding"),
            rows=rows,
            title=f"Collectives of a step: {self.title}" if self.title else "Collectives of a step",
            note="\n".join(
                [f"{units.count(self.parameters)} parameters, {units.count(self.world_size)} ranks", *self.notes, *map(str, self.lint)]
            ),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per collective."""
        return display.frame([call.to_json() | {"sent": call.sent} for call in self.calls])

    plot = display.plot_method("traffic")

    def __repr__(self) -> str:
        return f"Traffic({self.title!r}, {len(self.calls)} collectives, {units.bytes_(self.sent())} sent by a rank)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficTime(display.Shown):
    """Seconds of a step's collectives on a cluster. Get one from `Traffic.on`."""

    calls: tuple[CollectiveCall, ...]
    """The collectives in order."""
    each: tuple[float, ...]
    """Seconds of each collective."""
    cluster: Cluster
    """The cluster."""
    title: str = ""
    """The traffic."""
    notes: tuple[str, ...] = ()
    """What the numbers leave out."""

    @property
    def seconds(self) -> float:
        """Seconds of all collectives, one after the other."""
        return sum(self.each)

    @property
    def waited(self) -> float:
        """Seconds of the collectives that the rank waits for."""
        return sum(seconds for call, seconds in zip(self.calls, self.each, strict=True) if call.waited)

    def exposed(self, *, forward: float, backward: float) -> float:
        """Exposed seconds of a rank that computes for so long; a lower bound.

        DDP's buckets: the closed form of `overlap`, with gradients that arrive at a steady rate of bytes. Others: those that the rank waits
        for, and what exceeds the computing of their phase. Left out: that copies and reductions slow computing down.

        Args:
            forward: seconds of computing of all micro-batches' forwards.
            backward: seconds of its backwards in a step.

        Raises:
            CostError: seconds below 0.
        """
        if min(forward, backward) < 0:
            raise CostError(f"forward={forward!r}, backward={backward!r}: expected seconds of at least 0")
        pairs = list(zip(self.calls, self.each, strict=True))
        buckets, rest = [pair for pair in pairs if _is_bucket(pair[0])], [pair for pair in pairs if not _is_bucket(pair[0])]
        total = sum(seconds for call, seconds in rest if call.waited or call.phase == "optimizer") + _exposed_buckets(buckets, backward)
        for phase, compute in (("forward", forward), ("backward", backward)):
            total += max(0.0, sum(seconds for call, seconds in rest if call.phase == phase and not call.waited) - compute)
        return total

    @property
    def table(self) -> display.Table:
        """A row for each phase, kind and group of ranks."""
        rows: dict[tuple[int, str, str, int], list[tuple[CollectiveCall, float]]] = {}
        for call, seconds in zip(self.calls, self.each, strict=True):
            rows.setdefault((PHASES.index(call.phase), call.kind, call.axis, call.ranks), []).append((call, seconds))
        cells = [
            [
                PHASES[phase],
                kind,
                axis,
                units.count(ranks),
                units.count(len(pairs)),
                units.seconds(sum(seconds for _, seconds in pairs)),
                units.seconds(sum(seconds for call, seconds in pairs if call.waited)),
            ]
            for (phase, kind, axis, ranks), pairs in sorted(rows.items())
        ]
        kind = self.cluster.how
        note = "\n".join(
            [f"predicted: {units.seconds(self.seconds)} in all, {units.seconds(self.waited)} that nothing hides; {kind}", *self.notes]
        )
        return display.Table(
            columns=("phase", "collective", "among", "ranks", "calls", "seconds", "that nothing hides"),
            rows=cells,
            title=f"{self.title} on {self.cluster.name}".strip(),
            note=note,
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per collective."""
        return display.frame([call.to_json() | {"seconds": seconds} for call, seconds in zip(self.calls, self.each, strict=True)])

    def __repr__(self) -> str:
        return f"TrafficTime({self.title!r}, {self.cluster.name!r}, {units.seconds(self.seconds)})"


def _seconds_on_cluster(
    calls: Sequence[CollectiveCall], cluster: Cluster, *, title: str, world_size: int, algorithm: str = "best"
) -> TrafficTime:
    """Seconds of collectives on a cluster, one by one."""
    each = tuple(call.seconds(cluster, algorithm) for call in calls)
    notes = []
    if unknown := sorted({call.kind for call in calls} - {*BUS_FACTORS, *MESSAGES}):
        notes.append(f"no formula for {', '.join(unknown)}: taken as no time")
    if world_size > cluster.gpus_per_node and world_size % cluster.gpus_per_node:
        notes.append(f"{world_size} ranks do not fill whole nodes of {cluster.gpus_per_node}")
    return TrafficTime(calls=tuple(calls), each=each, cluster=cluster, title=title, notes=tuple(notes))


def _is_bucket(call: CollectiveCall) -> bool:
    return call.axis == "data" and call.kind == "all_reduce" and call.phase == "backward"


def _exposed_buckets(buckets: Sequence[tuple[CollectiveCall, float]], backward: float) -> float:
    """Seconds of DDP's buckets after the end of the backward; gradients are reduced in the last micro-batch only."""
    if not buckets:
        return 0.0
    share = backward / (buckets[-1][0].micro + 1)
    whole = sum(call.size for call, _ in buckets) or 1
    ready, size = [], 0
    for call, _ in buckets:
        size += call.size
        ready.append(share * size / whole)
    return overlap(ready, [seconds for _, seconds in buckets], share).exposed


MIN_PADDING = 0.05
"""Least share of padding that is reported."""
PER_BLOCK = 4
"""All-reduces of activations that a transformer layer needs under tensor parallelism, 2 in the forward and 2 in the backward.
Source: Shoeybi et al. 2019, Megatron-LM, section 3."""
NETWORK_BANDWIDTH = 400e9 / 8
"""Bytes per second of the network cards of current nodes (`cluster.CLUSTERS`)."""
MAX_SMALL_CALLS = 8
"""Number of small collectives up to which they are not reported."""
MAJORITY = 0.5
"""Least share that counts as most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Advice about a program's collectives."""

    kind: str
    """"unused", "padding", "needless", "small" or "waited"."""
    says: str
    """The observation, with its figures."""
    tries: str
    """What to try."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.says}; {self.tries}"


def lint(traffic: Traffic) -> tuple[Finding, ...]:
    """All findings; what would fail comes first."""
    rules = (_unused, _padding, _tensor_all_reduces, _find_unused, _small, _waited)
    return tuple(finding for rule in rules for finding in rule(traffic))


def _unused(traffic: Traffic) -> Iterator[Finding]:
    count = len(traffic.unused)
    if not count or traffic.world_size == 1:
        return
    named = ", ".join(traffic.unused[:3]) + (f" and {count - 3} more" if count > 3 else "")
    says = f"{units.count(count)} parameter{'s' * (count > 1)} got no gradient: {named}"
    if traffic.parallel not in ("ddp", "zero1"):
        yield Finding(kind="unused", says=f"{says}; they are gathered for nothing", tries="set requires_grad=False, or leave them out")
    elif not traffic.looks_for_unused:
        tries = "set requires_grad=False, leave them out of the model, or find_unused_parameters=True"
        yield Finding(kind="unused", says=f"{says}: DDP fails in its second step", tries=tries)


def _padding(traffic: Traffic) -> Iterator[Finding]:
    padded = [row for row in traffic.by_module() if row.padding]
    if traffic.padding < MIN_PADDING or not padded:
        return
    worst = max(padded, key=lambda row: row.size - row.size / (1 + row.padding))
    shards = max(call.ranks for call in worst.calls if call.padding)
    yield Finding(
        kind="padding",
        says=f"{units.percent(traffic.padding)} of padding: FSDP2 gives whole rows to {units.count(shards)} ranks, and fills up what "
        f"is uneven (most in {worst.name or 'the model itself'})",
        tries='try parallel="hsdp" with fewer shard_ranks; in code of your own, shard_placement_fn',
    )


def _tensor_all_reduces(traffic: Traffic) -> Iterator[Finding]:
    blocks = traffic.blocks
    reduced = [call for call in traffic.of("all_reduce", axis="tensor") if call.micro == 0]
    if not blocks or len(reduced) <= PER_BLOCK * blocks + PER_BLOCK:  # the head may have some, too
        return
    each = len(reduced) / blocks
    yield Finding(
        kind="needless",
        says=f"{each:.1f} all-reduces of activations for each of {blocks} blocks, and {PER_BLOCK} would do",
        tries="make one layer of those that read the same input (query, key and value; gate and up): each has one in the backward",
    )


def _find_unused(traffic: Traffic) -> Iterator[Finding]:
    if traffic.looks_for_unused and not traffic.unused and traffic.parallel in ("ddp", "zero1") and traffic.world_size > 1:
        yield Finding(
            kind="needless",
            says="find_unused_parameters=True, and every parameter got a gradient: an all-reduce in each step, and a walk over the graph",
            tries="leave it out, if no step leaves a layer out",
        )


def small_below(ranks: int) -> float:
    """Bytes below which a collective over the network takes longer for its latencies than for its bytes, even as a tree.

    ⌈log₂ n⌉ α · bw, with NETWORK_LATENCY and NETWORK_BANDWIDTH.
    """
    return math.ceil(math.log2(ranks)) * NETWORK_LATENCY * NETWORK_BANDWIDTH if ranks > 1 else 0.0


def _small(traffic: Traffic) -> Iterator[Finding]:
    own = [call for call in traffic if call.axis not in ("tensor", "pipeline") and call.ranks > 1]
    small = [call for call in own if call.size < small_below(call.ranks)]
    if len(small) <= MAX_SMALL_CALLS or len(small) < MAJORITY * len(own):
        return
    limit = small_below(max(call.ranks for call in small))
    yield Finding(
        kind="small",
        says=f"{len(small)} of {len(own)} collectives have less than {units.bytes_(limit)}, so that latency costs more than bytes",
        tries=_larger(traffic, small),
    )


def _larger(traffic: Traffic, small: Sequence[CollectiveCall]) -> str:
    if any(call.kind == "broadcast" and call.phase == "optimizer" for call in small):
        return 'ZeRO-1 sends each parameter by itself: parallel="ddp" or "fsdp" send fewer and larger ones'
    if traffic.parallel in ("ddp", "zero1"):
        return "a larger bucket_cap_mb makes fewer of them"
    return "larger parts in each fully_shard make fewer of them, or fewer ranks that share"


def _waited(traffic: Traffic) -> Iterator[Finding]:
    whole = traffic.sent()
    waited = [call for call in traffic if call.waited]
    share = sum(call.sent for call in waited) / whole if whole else 0.0
    if share < MAJORITY or not waited or traffic.world_size == 1:
        return
    sums: dict[tuple[str, str, str], float] = {}
    for call in waited:
        key = (call.axis, call.kind, call.phase)
        sums[key] = sums.get(key, 0.0) + call.sent
    axis, kind, phase = max(sums, key=lambda key: sums[key])
    if axis == "tensor":
        tries = "keep the ranks that split layers inside a node"
    elif axis == "expert":
        tries = "keep the ranks that divide experts inside a node, or take a smaller expert_parallel"
    elif axis == "copy":
        tries = "divide the experts among more ranks: fewer copies of each are reduced"
    elif phase == "optimizer" and kind == "all_reduce":
        tries = "a larger period in local_sgd averages less often"
    elif phase == "optimizer":
        tries = 'nothing is left to compute in the optimizer\'s step: parallel="ddp" sends nothing there, "fsdp" while it computes'
    elif kind == "all_reduce" and axis == "data":
        tries = "a smaller bucket_cap_mb lets the first gradients go while others are computed"
    else:
        tries = "smaller parts in each fully_shard, or fewer ranks"
    yield Finding(kind="waited", says=f"nothing can be computed during {units.percent(share)} of the bytes", tries=tries)
