"""Seconds of collectives by latency and bandwidth (the α–β model), and a `Link` fitted to measured ones.

The model: every message takes α seconds plus its bytes over the bandwidth; all ranks send and receive at once. It is exact for rings of
large messages; over all sizes from 32 KiB to 16 GiB of one published sweep (8 GPUs) it errs by 10 % in the median and 37 % at most.
Left out: achieved bandwidth falls with the number of nodes, so a bandwidth measured on few nodes is an upper bound.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.checks import choice, is_whole
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

BUS_FACTORS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
"""Collectives whose bus bandwidth is defined."""


class CostError(ValueError):
    """An argument that a formula does not accept; the message says what was given, what is allowed and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(display.Shown, JsonDataclass):
    """A connection between ranks: a message of S bytes takes latency + S / bandwidth.

    >>> link = Link(latency=3.4e-6, bandwidth=450e9)
    >>> units.seconds(all_reduce(2**30, 8, link))
    '4.22 ms'
    """

    latency: float
    """Seconds of an empty message, from rank to rank (α)."""
    bandwidth: float
    """Bytes per second that one rank sends while it receives as many (1/β)."""
    bandwidths: tuple[float, float] | None = None
    """Interval of the bandwidth, if repeats were measured; None = unknown."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise CostError(f"latency={self.latency!r}: expected seconds of at least 0, such as 5e-6")
        if not self.bandwidth > 0:
            raise CostError(f"bandwidth={self.bandwidth!r}: expected bytes per second above 0, such as 50e9 for 400 Gbit/s")
        if self.bandwidths is not None and not 0 < self.bandwidths[0] <= self.bandwidths[1] < math.inf:
            raise CostError(f"bandwidths={self.bandwidths!r}: expected (low, high) in bytes per second, or None")

    @classmethod
    def from_sweep(cls, points: Iterable[tuple[float, float]], *, ranks: int, collective: str = "all_reduce") -> "Link":
        """The link that fits measured (bytes, seconds) of one collective best, as a ring, in relative errors.

        It serves for other numbers of ranks; for sizes between measured ones, interpolate the `Sweep` itself.

        Raises:
            CostError: fewer than two sizes, values not above 0, or seconds that do not grow with the bytes.
        """
        rows = list(points)
        if len({size for size, _ in rows}) < 2 or any(not size > 0 or not seconds > 0 for size, seconds in rows):
            raise CostError(f"{rows!r:.80}: expected (bytes, seconds) above 0 of at least two different sizes")
        terms = [_ring(collective, size, checked_ranks(ranks, least=2)) for size, _ in rows]
        latency, per_byte = non_negative_pair([(hops, sent, seconds) for (hops, sent), (_, seconds) in zip(terms, rows, strict=True)])
        if per_byte <= 0:
            raise CostError("the seconds do not grow with the bytes: measure larger messages, up to a few hundred MiB")
        return cls(latency=latency, bandwidth=1 / per_byte)

    def send(self, size: float) -> float:
        """Seconds of one message, from rank to rank."""
        return self.latency + size / self.bandwidth

    @property
    def table(self) -> display.Table:
        """Latency and bandwidth."""
        rows = [["latency", units.seconds(self.latency)], ["bandwidth", units.count(self.bandwidth, "B/s")]]
        return display.Table(columns=("link", ""), rows=rows)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        interval = {} if self.bandwidths is None else {"bandwidths": list(self.bandwidths)}
        return {"latency": self.latency, "bandwidth": self.bandwidth, **interval}


def all_reduce(size: float, ranks: int, link: Link, algorithm: str = "ring") -> float:
    """Seconds of a sum over ranks of `size` bytes that each has.

    ring: 2(n−1) α + 2(n−1)/n · S/bw. tree: 2 ⌈log₂ n⌉ α and the same bytes (recursive halving, then doubling).
    Source: Thakur, Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH (the sum itself left out).
    """
    return collective_seconds("all_reduce", size, ranks, link, algorithm)


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over size / seconds; bus bandwidth is comparable between numbers of ranks.

    2(n−1)/n of an all-reduce, (n−1)/n of reduce-scatter, all-gather and all-to-all, 1 of broadcast and reduce.
    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md. It bounds rings only: reductions in the switch (NVLS) can exceed the link.

    >>> bus_factor("all_reduce", 8)
    1.75
    """
    _, sent = _ring(collective, 1.0, checked_ranks(ranks))
    return sent


def collective_seconds(collective: str, size: float, ranks: int, link: Link, algorithm: str = "ring") -> float:
    """Seconds of a collective by its name, one of BUS_FACTORS, for `size` bytes of all ranks' parts together, S.

    All-gather, reduce-scatter and all-to-all: (n−1) α, or ⌈log₂ n⌉ α as a tree, + (n−1)/n · S/bw. Broadcast, passed on in small pieces:
    as many α + S/bw. All-reduce: see `all_reduce`.

    Raises:
        CostError: another name, algorithm, number of ranks or bytes.
    """
    if algorithm not in ("ring", "tree"):
        raise CostError(f'algorithm={algorithm!r}: allowed are "ring" and "tree"; over several nodes hierarchical_all_reduce')
    if not 0 <= size < math.inf:
        raise CostError(f"size={size!r}: expected bytes of at least 0")
    hops, sent = _ring(collective, size, checked_ranks(ranks))
    if algorithm == "tree" and ranks > 1:
        hops = hops // (ranks - 1) * math.ceil(math.log2(ranks))
    return hops * link.latency + sent / link.bandwidth


def _ring(collective: str, size: float, ranks: int) -> tuple[int, float]:
    """Consecutive messages, and bytes that each rank sends, in a ring."""
    choice("collective", collective, BUS_FACTORS, error=CostError)
    if ranks == 1:
        return 0, 0.0
    if collective in ("broadcast", "reduce"):
        return ranks - 1, size
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * (ranks - 1), rounds * (ranks - 1) / ranks * size


def checked_ranks(ranks: Any, least: int = 1) -> int:
    """The number of ranks, checked.

    Raises:
        CostError: not a whole number of at least `least`.
    """
    if not is_whole(ranks, least=least):
        raise CostError(f"{ranks!r} ranks: expected a whole number of at least {least}")
    return ranks


def non_negative_pair(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Least squares for x, y ≥ 0 in a·x + b·y ≈ seconds of each row (a, b, seconds), in relative errors.

    Exact: the unconstrained solution; if one of the two is negative, it is 0 and the other is fitted alone.
    """
    scaled = [(a / seconds, b / seconds) for a, b, seconds in rows]
    aa, ab, bb = (sum(p * q for p, q in ((row[i], row[j]) for row in scaled)) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in scaled) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
    alone = [(a / aa, 0.0)] if aa else []
    alone += [(0.0, b / bb)] if bb else []
    return min(alone, key=lambda pair: sum((pair[0] * p + pair[1] * q - 1) ** 2 for p, q in scaled), default=(0.0, 0.0))


def hierarchical_all_reduce(size: float, *, nodes: int, per_node: int, intra: Link, inter: Link, algorithm: str = "ring") -> float:
    """Seconds of an all-reduce inside each node and, of each GPU's part, with its counterparts in the other nodes, piece by piece at once:
    the slower of the two counts, and the latencies of both.

    Bytes per GPU: 2(g−1)/g · S inside, 2(k−1)/k · S/g between; every GPU has a network card, and all of them work at once. AWS p5 (8 H100,
    cards of 400 GB/s together) reaches 320 to 350 GB/s of bus bandwidth on 3 to 16 nodes (Hugging Face 2025, The Smol Training Playbook);
    one after the other, its datasheets would allow 231 at most.

    Args:
        size: bytes that each GPU has.
        nodes: number of nodes, k.
        per_node: GPUs of each, g.
        intra: the link of two GPUs of a node.
        inter: the link of two GPUs of different nodes.
        algorithm: between the nodes, "ring" or "tree".

    Raises:
        CostError: a number of nodes or GPUs below 1, or a size below 0.
    """
    for name, value in (("nodes", nodes), ("per_node", per_node)):
        try:
            checked_ranks(value)
        except CostError as error:
            raise CostError(f"{name}: {error}") from None
    latencies = all_reduce(0.0, per_node, intra), all_reduce(0.0, nodes, inter, algorithm)
    both = all_reduce(size, per_node, intra), all_reduce(size / per_node, nodes, inter, algorithm)
    return sum(latencies) + max(whole - latency for whole, latency in zip(both, latencies, strict=True))
