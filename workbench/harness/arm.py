"""Arm: one variant of a training step, timed in blocks that alternate with those of its baseline."""

import statistics
from dataclasses import dataclass

from workbench.core.statistics import Interval, interval_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One thing taken away from the step (or changed in it), and how long the step takes then. Blocks alternate with the baseline's."""

    name: str
    """Of ARMS."""
    baseline: str
    """What it was paired with: "full" or another arm's name."""
    pairs: tuple[tuple[float, float], ...]
    """Seconds per step, (baseline, arm), of neighbouring blocks; single steps that stalled are left out."""
    samples: float = 1.0
    """Samples per step, relative to the baseline's."""
    note: str | None = None
    """What is special about it."""

    @property
    def seconds(self) -> float:
        """Mean seconds per step."""
        return statistics.fmean(arm for _, arm in self.pairs)

    @property
    def saved(self) -> Interval:
        """Fraction of the baseline's step that it saves; negative if it costs time."""
        return interval_of(self.pairs, lambda base, arm: 1 - arm / base)

    @property
    def speedup(self) -> Interval:
        """Throughput in samples over that of the baseline."""
        return interval_of(self.pairs, lambda base, arm: self.samples * base / arm)
