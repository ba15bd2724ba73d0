"""Lint of a step's collectives: padding, needless ones, small ones, ones that nothing hides, and parameters that get no gradient."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench import units
from workbench.cost.cluster import NETWORK_LATENCY
from workbench.cost.sent import Sent

if TYPE_CHECKING:
    from workbench.cost.traffic import Traffic

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
