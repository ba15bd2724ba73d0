"""Overlap: which of DDP's buckets are reduced while the backward goes on, and how long the step waits for the rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.cost.collectives import CostError

CAP, FIRST = 25 * 2**20, 2**20
"""Bytes at which torch 2.13 closes a bucket, and its first one, where `bucket_cap_mb` is not given; a cap that is given is for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """When each bucket is reduced. Seconds since the backward began."""

    starts: tuple[float, ...]
    """Of each bucket's all-reduce."""
    ends: tuple[float, ...]
    """Of the same."""
    backward: float
    """Length of the backward."""

    @property
    def communication(self) -> float:
        """Seconds in which the network is busy."""
        return sum(end - start for start, end in zip(self.starts, self.ends, strict=True))

    @property
    def exposed(self) -> float:
        """Seconds that the step waits after its backward."""
        return max(0.0, max(self.ends, default=0.0) - self.backward)

    @property
    def hidden(self) -> float:
        """Seconds of communication that cost nothing."""
        return self.communication - self.exposed


def overlap(ready: Sequence[float], seconds: Sequence[float], backward: float) -> Overlap:
    """One bucket after the other on one stream: each starts when its gradients are there and the one before has ended.

    start_k = max(ready_k, end_{k−1}); exposed = max(0, end of the last − end of the backward).
    Source: Li et al. 2020, PyTorch Distributed, section 3.2. Left out: copies into buckets, and compute that communication slows down.

    Args:
        ready: seconds into the backward at which each bucket's gradients are complete, in the order of their reduction.
        seconds: of each bucket's all-reduce.
        backward: seconds of the whole backward.

    Raises:
        CostError: lists of different length, or times below 0.

    >>> overlap([0.2, 0.6, 1.0], [0.5, 0.5, 0.5], backward=1.0).ends
    (0.7, 1.2, 1.7)
    """
    if len(ready) != len(seconds):
        raise CostError(
            f"{len(ready)} times at which buckets are ready and {len(seconds)} times of reductions: one of each is wanted per bucket"
        )
    if min([*ready, *seconds, backward]) < 0:
        raise CostError("times below 0: seconds since the backward began are wanted")
    starts: list[float] = []
    ends: list[float] = []
    for when, length in zip(ready, seconds, strict=True):
        starts.append(max(when, ends[-1] if ends else 0.0))
        ends.append(starts[-1] + length)
    return Overlap(starts=tuple(starts), ends=tuple(ends), backward=backward)


def buckets(sizes: Sequence[int], cap: int | None = None) -> list[list[int]]:
    """How DDP puts gradients into buckets after its first step: in the order in which they come (the last parameter first), each bucket
    closed by the gradient that reaches its limit.

    Args:
        sizes: bytes of each gradient, in the order of the parameters.
        cap: bytes at which a bucket is closed; None = torch's own, 1 MiB for the first and 25 MiB for the others.

    Returns:
        For each bucket, by its turn, the places of its parameters.
    """
    if cap is not None and cap < 1:
        raise CostError(f"cap={cap!r}: bytes of at least 1 are wanted, or None")
    found: list[list[int]] = [[]]
    filled = 0
    for place in reversed(range(len(sizes))):
        found[-1].append(place)
        filled += sizes[place]
        if filled >= (cap or (FIRST if len(found) == 1 else CAP)):
            found.append([])
            filled = 0
    return [one for one in found if one]


def timed(sizes: Sequence[int], backward: float, seconds_of: Callable[[float], float], cap: int | None = None) -> Overlap:
    """The overlap of a model whose gradients come at a steady pace of bytes, which is what matrix products of like width give.

    Args:
        sizes: bytes of each gradient, in the order of the parameters.
        backward: seconds of the backward.
        seconds_of: of an all-reduce of so many bytes.
        cap: as in `buckets`.
    """
    whole = sum(sizes)
    amounts = [sum(sizes[place] for place in one) for one in buckets(sizes, cap)]
    ready = [backward * sum(amounts[: k + 1]) / whole for k in range(len(amounts))]
    return overlap(ready, [seconds_of(amount) for amount in amounts], backward)
