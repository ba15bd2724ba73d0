"""Choosing: which micro-batch × accumulation × ranks reaches a loss soonest, by throughput and by what a batch of that size is worth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workbench.batch.analysis.throughput import Throughput

SLACK = 0.05
"""Share of the best speed that is given up for a smaller batch: throughput varies by as much, and a noise scale is known far less well."""
ACCUMULATIONS = (1, 2, 4, 8, 16, 32)
"""Tried where the batch is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to make a batch, and how fast it gets anywhere."""

    micro_batch: int
    """Samples per rank at once."""
    accumulation: int
    """Micro-batches per step."""
    world_size: int
    """Ranks."""
    samples_per_sec: float
    """Of all ranks."""
    worth: float
    """What a sample brings towards a target loss, of what it brings in a tiny batch: 1/(1 + B/B_noise); nan where the noise is not known.
    Source: McCandlish and others 2018, arXiv 1812.06162, E(B) = E_min (1 + B/B_crit)."""

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def useful(self) -> float:
        """Samples per second, each counted by its worth: what Pollux (Qiao and others 2021) calls goodput; nan where that is not known."""
        return self.samples_per_sec * self.worth


def worth(batch: int, noise: float | None) -> float:
    """What a sample of a batch brings, of what it brings in a tiny one; nan without a noise scale.

    >>> worth(64, 64.0), worth(192, 64.0)
    (0.5, 0.25)
    """
    return float("nan") if noise is None else 1 / (1 + batch / noise)


def candidates(
    throughput: Throughput, *, world_size: int, noise: float | None, largest: int | None, most: int | None, batch: int | None
) -> list[Candidate]:
    """Every way that is allowed.

    Args:
        throughput: against the micro-batch.
        world_size: ranks there will be.
        noise: the noise scale, or critical batch, in samples; None = not known.
        largest: micro-batch that fits; None = no limit is known.
        most: samples that a step may take, of the dataset; None = any.
        batch: samples that a step has to take; None = as many as is best.
    """
    ways = _fixed(batch // world_size, largest) if batch else _free(throughput.micro_batches, largest)
    return [
        Candidate(
            micro_batch=micro,
            accumulation=accumulation,
            world_size=world_size,
            samples_per_sec=throughput.samples_per_sec(micro_batch=micro, accumulation=accumulation, world_size=world_size),
            worth=worth(micro * accumulation * world_size, noise),
        )
        for micro, accumulation in ways
        if most is None or micro * accumulation * world_size <= most
    ]


def _fixed(share: int, largest: int | None) -> Iterator[tuple[int, int]]:
    """Micro-batch and accumulation that make a rank's share of the batch."""
    for micro in range(1, share + 1):
        if share % micro == 0 and (largest is None or micro <= largest):
            yield micro, share // micro


def _free(places: Sequence[int], largest: int | None) -> Iterator[tuple[int, int]]:
    """Micro-batches that were measured, and the largest that fits."""
    allowed = {place for place in places if largest is None or place <= largest}
    if largest is not None and largest < places[-1]:
        allowed.add(largest)
    for micro in sorted(allowed):
        for accumulation in ACCUMULATIONS:
            yield micro, accumulation


def best(found: Sequence[Candidate]) -> Candidate:
    """The one that reaches a loss soonest; of those within SLACK of it, the smallest batch, and of the same batch the one with the least
    accumulation. Where nothing says what a sample is worth, throughput alone decides.

    Raises:
        ValueError: there is none.
    """
    if not found:
        raise ValueError("no way to make a batch is left")
    known = all(one.worth == one.worth for one in found)

    def speed(one: Candidate) -> float:
        return one.useful if known else one.samples_per_sec

    top = max(map(speed, found))
    near = [one for one in found if speed(one) >= (1 - SLACK) * top]
    return min(near, key=lambda one: (one.global_batch, one.accumulation))
