"""Slow: the slowest rank beside a typical one."""

import math
from dataclasses import dataclass

from workbench.diagnosis.evidence import RankEvidence

ODD_ONE_OUT = 0.5
"""Of its wait: a rank that waits by so much longer than the others is why the step waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """The slowest rank beside a typical one, in seconds per step without reductions."""

    ranks: tuple[int, ...]
    """Those that are slow."""
    input: float
    """What it waits longer for data."""
    compute: float
    """What it computes longer."""
    alone: float
    """Its step."""
    typical: float
    """The step of the others."""
    odd: float = 0.0
    """Of its wait for data: the fraction by which it exceeds that of the others; 0 if it waits hardly longer than they do. Were it not for
    that, the step would wait no longer than they do."""

    @property
    def excess(self) -> float:
        return self.input + self.compute


def slowest(ranks: tuple[RankEvidence, ...]) -> Slow | None:
    """Who is slow; None with one rank, if all are equal, or if they were not timed apart.

    The others are represented by their lower median, so that half of the ranks may be slow without setting the standard.
    """
    known = sorted((one for one in ranks if math.isfinite(one.alone)), key=lambda one: one.alone)
    if len(known) < 2:
        return None
    worst, typical = known[-1], known[(len(known) - 1) // 2]
    excess = worst.alone - typical.alone
    if excess <= 0:
        return None
    waits = [0.0 if math.isnan(one.wait) else one.wait for one in (worst, typical)]
    by_input = max(0.0, waits[0] - waits[1])
    by_compute = max(0.0, (worst.alone - waits[0]) - (typical.alone - waits[1]))
    both = by_input + by_compute or 1.0
    odd = by_input / waits[0] if waits[0] > 0 and by_input > by_compute else 0.0
    limit = typical.alone + excess / 2
    return Slow(
        ranks=tuple(sorted(one.rank for one in known if one.alone > limit)),
        input=excess * by_input / both,
        compute=excess * by_compute / both,
        alone=worst.alone,
        typical=typical.alone,
        odd=odd if odd >= ODD_ONE_OUT else 0.0,
    )
