"""Bubbles of pipeline schedules, and the overlap of DDP's buckets with the backward."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.cluster.analysis.collective_cost import CostError, checked_ranks
from workbench.core.checks import choice

BUBBLES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
"""Schedules whose bubble is known."""


def bubble(stages: int, micro_batches: int, schedule: str = "1f1b", chunks: int = 1) -> float:
    """Idle time over the ideal time of a step, r; its share of the whole step is r / (1 + r).

    gpipe, 1f1b: (p−1)/m. interleaved, v chunks per stage: (p−1)/(m v). zb-h1: (p−1)/(3 m). zb-h2 (at twice the activations) and zb-v
    (at the activations of 1f1b, and twice the messages): about 0.
    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; Qi et al. 2023 and 2024, arXiv 2401.10241 and 2405.15362.
    Left out: messages between stages, uneven stages, and a norm of all gradients, which makes zero-bubble schedules wait after all.

    Args:
        stages: number of pipeline stages, p.
        micro_batches: m of a step and pipeline.
        schedule: one of "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v".
        chunks: model chunks per stage, v, of "interleaved".

    Raises:
        CostError: a schedule that is not known, or numbers that do not fit it.

    >>> bubble(8, 64, "interleaved", chunks=3) == 7 / 64 / 3
    True
    """
    p, m, v = (checked_ranks(value) for value in (stages, micro_batches, chunks))
    choice("schedule", schedule, BUBBLES, error=CostError)
    if v > 1 and schedule != "interleaved":
        raise CostError(f'chunks={v} with schedule="{schedule}": only "interleaved" has several chunks of layers on a stage')
    if schedule == "interleaved" and v > 1 and m % p:
        raise CostError(f'schedule="interleaved" takes micro-batches by groups of {p} (its stages), and {m} is not a multiple of it')
    if schedule in ("zb-h2", "zb-v"):
        return 0.0
    return (p - 1) / (m * v * (3 if schedule == "zb-h1" else 1))


CAP, FIRST = 25 * 2**20, 2**20
"""Bytes at which torch 2.13 closes a bucket, and its first one, without `bucket_cap_mb`; a given cap is for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """When each bucket is reduced. Seconds since the backward began."""

    starts: tuple[float, ...]
    """Of each bucket's all-reduce."""
    ends: tuple[float, ...]
    """Likewise."""
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
        """Seconds of communication behind the backward."""
        return self.communication - self.exposed


def overlap(ready: Sequence[float], seconds: Sequence[float], backward: float) -> Overlap:
    """The all-reduces of buckets on one stream: each starts when its gradients are complete and the one before has ended.

    start_k = max(ready_k, end_{k−1}); exposed = max(0, end of the last − end of the backward).
    Source: Li et al. 2020, PyTorch Distributed, section 3.2. Left out: copies into buckets, and compute that communication slows down.

    Args:
        ready: seconds into the backward at which each bucket's gradients are complete, in the order of their reduction.
        seconds: seconds of each bucket's all-reduce, in the order of `ready`.
        backward: seconds of the whole backward.

    Raises:
        CostError: lists of different length, or times below 0.

    >>> overlap([0.2, 0.6, 1.0], [0.5, 0.5, 0.5], backward=1.0).ends
    (0.7, 1.2, 1.7)
    """
    if len(ready) != len(seconds):
        raise CostError(
            f"{len(ready)} times at which buckets are ready and {len(seconds)} times of reductions: expected one of each per bucket"
        )
    if min([*ready, *seconds, backward]) < 0:
        raise CostError("times below 0: expected seconds since the backward began")
    starts: list[float] = []
    ends: list[float] = []
    for when, length in zip(ready, seconds, strict=True):
        starts.append(max(when, ends[-1] if ends else 0.0))
        ends.append(starts[-1] + length)
    return Overlap(starts=tuple(starts), ends=tuple(ends), backward=backward)


def buckets(sizes: Sequence[int], cap: int | None = None) -> list[list[int]]:
    """How DDP assigns gradients to buckets after its first step: in the order in which they arrive (the last parameter first); a bucket is
    closed by the gradient that reaches its limit.

    Args:
        sizes: bytes of each gradient, in the order of the parameters.
        cap: bytes at which a bucket is closed; None = torch's own, 1 MiB for the first and 25 MiB for the others.

    Returns:
        For each bucket, in the order of reduction, the indices of its parameters.
    """
    if cap is not None and cap < 1:
        raise CostError(f"cap={cap!r}: expected bytes of at least 1, or None")
    groups: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(sizes))):
        groups[-1].append(index)
        filled += sizes[index]
        if filled >= (cap or (FIRST if len(groups) == 1 else CAP)):
            groups.append([])
            filled = 0
    return [group for group in groups if group]
