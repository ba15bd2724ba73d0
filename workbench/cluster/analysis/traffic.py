"""Traffic: all collectives of a training step of one rank, with their bytes; exact where a program's own calls were counted.

Lint of a step's collectives: padding, needless ones, small ones, ones that nothing hides, and parameters that get no gradient.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.cluster.analysis.cluster import NETWORK_LATENCY, Cluster
from workbench.cluster.analysis.collectives import CostError
from workbench.cluster.analysis.sent import PHASES, Sent
from workbench.cluster.analysis.traffic_time import TrafficTime, timed_on
from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

PADDED = 0.05
"""Share of padding from which on it is worth a word: as much as is won by many a careful change."""
PER_BLOCK = 4
"""All-reduces of activations that a transformer layer needs under tensor parallelism, 2 in the forward and 2 in the backward.
Source: Shoeybi et al. 2019, Megatron-LM, section 3."""
NETWORK = 400e9 / 8
"""Bytes per second of the network cards of present nodes (`cluster.CLUSTERS`)."""
FEW = 8
"""Collectives, up to which small ones are not worth a word."""
MOSTLY = 0.5
"""Share from which on something is the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to change."""

    kind: str
    """"unused", "padding", "needless", "small" or "waited"."""
    says: str
    """What was seen, with its figures."""
    tries: str
    """What to try."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.says}; {self.tries}"


def lint(traffic: "Traffic") -> tuple[Finding, ...]:
    """All findings, what would fail first."""
    return tuple(one for rule in (_unused, _padding, _tensor, _looking, _small, _waited) for one in rule(traffic))


def _unused(traffic: "Traffic") -> Iterator[Finding]:
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


def _padding(traffic: "Traffic") -> Iterator[Finding]:
    padded = [row for row in traffic.by_module() if row.padding]
    if traffic.padding < PADDED or not padded:
        return
    worst = max(padded, key=lambda row: row.size - row.size / (1 + row.padding))
    shards = max(one.ranks for one in worst.calls if one.padding)
    yield Finding(
        kind="padding",
        says=f"{units.percent(traffic.padding)} of padding: FSDP2 deals out whole rows to {units.count(shards)} ranks, and fills up what "
        f"is uneven (most in {worst.name or 'the model itself'})",
        tries='try parallel="hsdp" with fewer shard_ranks; in code of your own, shard_placement_fn',
    )


def _tensor(traffic: "Traffic") -> Iterator[Finding]:
    blocks = traffic.blocks
    reduced = [one for one in traffic.of("all_reduce", axis="tensor") if one.micro == 0]
    if not blocks or len(reduced) <= PER_BLOCK * blocks + PER_BLOCK:  # beside those of the layers there may be the head's
        return
    each = len(reduced) / blocks
    yield Finding(
        kind="needless",
        says=f"{each:.1f} all-reduces of activations for each of {blocks} blocks, and {PER_BLOCK} would do",
        tries="make one layer of those that read the same input (query, key and value; gate and up): each has one in the backward",
    )


def _looking(traffic: "Traffic") -> Iterator[Finding]:
    if traffic.looks_for_unused and not traffic.unused and traffic.parallel in ("ddp", "zero1") and traffic.world_size > 1:
        yield Finding(
            kind="needless",
            says="find_unused_parameters=True, and every parameter got a gradient: an all-reduce in each step, and a walk over the graph",
            tries="leave it out, if no step leaves a layer out",
        )


def small_below(ranks: int) -> float:
    """Bytes below which a collective over the network takes longer for its latencies than for its bytes, even as a tree.

    ⌈log₂ n⌉ α · bw, with NETWORK_LATENCY and NETWORK.
    """
    return math.ceil(math.log2(ranks)) * NETWORK_LATENCY * NETWORK if ranks > 1 else 0.0


def _small(traffic: "Traffic") -> Iterator[Finding]:
    own = [one for one in traffic if one.axis != "tensor" and one.ranks > 1]
    small = [one for one in own if one.size < small_below(one.ranks)]
    if len(small) <= FEW or len(small) < MOSTLY * len(own):
        return
    limit = small_below(max(one.ranks for one in small))
    yield Finding(
        kind="small",
        says=f"{len(small)} of {len(own)} collectives have less than {units.bytes_(limit)}, so that latency costs more than bytes",
        tries=_larger(traffic, small),
    )


def _larger(traffic: "Traffic", small: Sequence[Sent]) -> str:
    if any(one.kind == "broadcast" and one.phase == "optimizer" for one in small):
        return 'ZeRO-1 sends each parameter by itself: parallel="ddp" or "fsdp" send fewer and larger ones'
    if traffic.parallel in ("ddp", "zero1"):
        return "a larger bucket_cap_mb makes fewer of them"
    return "larger parts in each fully_shard make fewer of them, or fewer ranks that share"


def _waited(traffic: "Traffic") -> Iterator[Finding]:
    whole = traffic.sent()
    waited = [one for one in traffic if one.waited]
    share = sum(one.sent for one in waited) / whole if whole else 0.0
    if share < MOSTLY or not waited or traffic.world_size == 1:
        return
    sums: dict[tuple[str, str, str], float] = {}
    for one in waited:
        sums[one.axis, one.kind, one.phase] = sums.get((one.axis, one.kind, one.phase), 0.0) + one.sent
    axis, kind, phase = max(sums, key=lambda key: sums[key])
    if axis == "tensor":
        tries = "keep the ranks that split layers inside a node"
    elif phase == "optimizer":
        tries = 'nothing is left to compute in the optimizer\'s step: parallel="ddp" sends nothing there, "fsdp" while it computes'
    elif kind == "all_reduce" and axis == "data":
        tries = "a smaller bucket_cap_mb lets the first gradients go while others are computed"
    else:
        tries = "smaller parts in each fully_shard, or fewer ranks"
    yield Finding(kind="waited", says=f"nothing can be computed during {units.percent(share)} of the bytes", tries=tries)


SHOWN = 20
"""Rows of a table by module; what is smaller is one row. `to_frame` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Collectives that have something in common, summed."""

    name: str
    """What they have in common."""
    calls: tuple[Sent, ...]
    """They."""

    @property
    def count(self) -> int:
        """How many."""
        return len(self.calls)

    @property
    def size(self) -> int:
        """Their bytes, as `Sent.size`."""
        return sum(one.size for one in self.calls)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in them."""
        return sum(one.sent for one in self.calls)

    @property
    def padding(self) -> float:
        """Bytes of padding over those that are needed."""
        needed = sum(one.size if one.needed is None else one.needed for one in self.calls)
        return self.size / needed - 1 if needed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(display.Shown, JsonDataclass):
    """The collectives of one optimizer step of one rank, in their order. Get one from `wb.collectives`; iterates over its `Sent`.

    >>> one = Sent(kind="all_reduce", size=4 * 10**6, ranks=8, phase="backward", waited=True)
    >>> traffic = Traffic(calls=(one,), world_size=8, parameters=10**6)
    >>> traffic.count("all_reduce"), traffic.size(), traffic.sent()
    (1, 4000000, 7000000.0)
    """

    calls: tuple[Sent, ...]
    """In the order in which they are made; of a forward and backward for each micro-batch, and the optimizer's step."""
    world_size: int
    """Ranks."""
    parameters: int
    """Elements of the whole model."""
    title: str = ""
    """What was counted."""
    parallel: str = "ddp"
    """As `RunSpec.parallel`."""
    blocks: int = 0
    """Repeated blocks of the model, such as its layers; 0 = not known."""
    unused: tuple[str, ...] = ()
    """Parameters that want a gradient and got none."""
    looks_for_unused: bool = False
    """Does DDP look for them (`find_unused_parameters`)?"""
    notes: tuple[str, ...] = ()
    """What a reader should know."""

    def __iter__(self) -> Iterator[Sent]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def of(self, kind: str | None = None, *, phase: str | None = None, axis: str | None = None) -> tuple[Sent, ...]:
        """Those of a kind, a phase, an axis; None = any."""
        return tuple(one for one in self.calls if kind in (None, one.kind) and phase in (None, one.phase) and axis in (None, one.axis))

    def count(self, kind: str | None = None) -> int:
        """How many of a kind; None = all."""
        return len(self.of(kind))

    def size(self, kind: str | None = None) -> int:
        """Their bytes, as `Sent.size`."""
        return sum(one.size for one in self.of(kind))

    def sent(self, kind: str | None = None) -> float:
        """Bytes that a rank sends in them, in rings."""
        return sum(one.sent for one in self.of(kind))

    @property
    def padding(self) -> float:
        """Bytes of padding over those that are needed, of all collectives."""
        return Row(name="", calls=self.calls).padding

    @property
    def rows(self) -> tuple[Row, ...]:
        """By phase, kind, axis and ranks, in the order of a step."""

        def key(one: Sent) -> tuple[int, str, str, int]:
            return PHASES.index(one.phase), one.kind, one.axis, one.ranks

        return tuple(Row(name=name[1], calls=tuple(calls)) for name, calls in itertools.groupby(sorted(self.calls, key=key), key=key))

    def by_module(self, depth: int | None = None) -> tuple[Row, ...]:
        """By module, the one that sends most first.

        Args:
            depth: names of a module's path that count; None = all.
        """
        return self._by(lambda one: one.module if depth is None else ".".join(one.module.split(".")[:depth]))

    def by_kind(self) -> tuple[Row, ...]:
        """By kind, the one that sends most first."""
        return self._by(lambda one: one.kind)

    def _by(self, name: Callable[[Sent], str]) -> tuple[Row, ...]:
        found: dict[str, list[Sent]] = {}
        for one in self.calls:
            found.setdefault(name(one), []).append(one)
        return tuple(sorted((Row(name=what, calls=tuple(calls)) for what, calls in found.items()), key=lambda row: -row.sent))

    @property
    def lint(self) -> tuple[Finding, ...]:
        """What could be saved, or would fail."""
        return lint(self)

    def on(self, cluster: Cluster | str, *, algorithm: str = "best") -> TrafficTime:
        """Seconds of it on a cluster.

        Args:
            cluster: one, or the name of one in the catalogue.
            algorithm: "ring", "tree" or "best".

        Raises:
            CostError: an unknown name or algorithm.
        """
        known = Cluster.named(cluster) if isinstance(cluster, str) else cluster
        if not isinstance(known, Cluster):
            raise CostError(f"cluster={cluster!r}: a Cluster or the name of one is wanted, such as 'DGX-H100'")
        return timed_on(self.calls, known, title=self.title, world_size=self.world_size, algorithm=algorithm)

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

    def modules_table(self, depth: int | None = None) -> display.Table:
        """A row for each of the SHOWN modules that send most, and one for the rest."""
        rows = self.by_module(depth)
        shown, rest = rows[:SHOWN], rows[SHOWN:]
        if rest:
            shown = (*shown, Row(name=f"{len(rest)} others", calls=tuple(itertools.chain(*(row.calls for row in rest)))))
        cells = [
            [row.name or "(model)", units.count(row.count), units.bytes_(row.size), units.bytes_(row.sent), units.percent(row.padding)]
            for row in shown
        ]
        return display.Table(columns=("module", "calls", "bytes", "sent by a rank", "padding"), rows=cells)

    def to_frame(self) -> Any:
        """A DataFrame with one row per collective."""
        return display.frame([one.to_json() | {"sent": one.sent} for one in self.calls])

    plot = display.plot_method("traffic")

    def __repr__(self) -> str:
        return f"Traffic({self.title!r}, {len(self.calls)} collectives, {units.bytes_(self.sent())} sent by a rank)"
