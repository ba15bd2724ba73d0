"""Result types of experiments on a training step, without torch: times of a variant, and places in the user's code."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from workbench.core.statistics import Interval, interval_of, repeated_interval, student_t

MANY_PAIRS = 6
"""Pairs from which on a bootstrap interval is wide enough. (By simulation, its 90 % are 63 % with 3 pairs, and 76 % with 5.)"""
OUTSIDE = 0.06
"""Part of the cases that an interval of few pairs may miss. Chosen: with a tenth, up to 12 % were missed where a budget ended the pairs,
since there are fewer of them where they are slow."""

NOT_FINITE, UNTRAINED = "NaN or infinite", "step() changed no weight"
"""Words of notes that put a whole measurement in doubt: numbers that are none, and a step that trains nothing."""

BUSY, OTHERS = "the machine was busy", "other processes had the cores"
"""Words of notes that say that times may be those of other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantTimes:
    """How long a training step takes with one part switched off or changed, timed in blocks that alternate with those of a baseline."""

    name: str
    """Of the variant: a name in `diagnosis.analysis.evidence.ARMS`, or "changed"."""
    baseline: str
    """The name of the variant that it was paired with: "full", "cached", …"""
    pairs: tuple[tuple[float, float], ...]
    """Seconds per step, (baseline, variant), of neighbouring blocks; single steps that stalled are left out."""
    samples: float = 1.0
    """Samples per step, relative to the baseline's."""
    note: str | None = None
    """What is special about it."""

    @property
    def seconds(self) -> float:
        """Mean seconds per step."""
        return statistics.fmean(changed for _, changed in self.pairs)

    @property
    def saved(self) -> Interval:
        """Fraction of the baseline's step that it saves; negative if it costs time."""
        return interval_of(self.pairs, lambda base, changed: 1 - changed / base)

    @property
    def saved_at_few_pairs(self) -> Interval:
        """`saved`, with an interval that is at least Student's where there are less than MANY_PAIRS; see `repeated_interval`."""
        saved, ratios = self.saved, [math.log(changed / base) for base, changed in self.pairs if base > 0 < changed]
        if len(self.pairs) >= MANY_PAIRS or not ratios:
            return saved
        wide = repeated_interval(ratios, looks=1).of(lambda ratio: 1 - math.exp(ratio))
        return Interval(low=min(saved.low, wide.low), mid=saved.mid, high=max(saved.high, wide.high))

    @property
    def surely_saved(self) -> Interval:
        """`saved`, with an interval as that of `speedup`."""
        return self._sure(lambda ratio: 1 - ratio)

    @property
    def speedup(self) -> Interval:
        """Throughput in samples over that of the baseline, with an interval that holds the truth nine times of ten however noisy the
        machine is: Student's, by what these pairs alone differ by, and no narrower than that of `saved_at_few_pairs`. That of a single
        pair has no ends.
        """
        return self._sure(lambda ratio: self.samples / ratio)

    def _sure(self, of: Callable[[float], float]) -> Interval:
        """An interval of a function of the time of the variant's step over the baseline's."""
        ratios, mid = [math.log(changed / base) for base, changed in self.pairs if base > 0 < changed], of(1 - self.saved.mid)
        if len(ratios) < 2:
            return Interval(low=-math.inf, mid=mid, high=math.inf)
        half = student_t(OUTSIDE, len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
        few, own = self.saved_at_few_pairs, [math.exp(statistics.fmean(ratios) + side * half) for side in (-1, 1)]
        ends = of(min(1 - few.high, own[0])), of(max(1 - few.low, own[1]))
        return Interval(low=min(mid, *ends), mid=mid, high=max(mid, *ends))


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the user's code the training thread was when its stack was sampled."""

    line: str
    """The innermost line of the user's: "train.py:41 save_checkpoint"."""
    kind: str | None = None
    """"checkpoint", "evaluation", "drawing", "logging", "optimizer" or None, as the functions on the stack show."""
