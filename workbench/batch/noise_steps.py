"""Two norms of each step, and what they tell: tr Σ and |G|² step by step, the interval of their ratio, and how many more steps it takes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from workbench.batch.noise_interval import Numbers, beginning, block_length, blocks, fieller, quantile, relative_error
from workbench.checks import is_whole, whole_number
from workbench.codec import OrInf

ENOUGH = 0.08
"""Half the width of the interval, as a fraction of the estimate, below which it is good enough: then 19 of 20 estimates are within 10 % of
the truth."""
FEWEST = 20
"""Steps below which it is never enough: how wide an interval is itself is hardly known, and one that looks narrow is so by chance."""
BLOCKS = 10
"""Stretches at most, over which the noise scale is followed."""
STEPS_OF_BLOCK = 10
"""In one of them, at least."""


class NoiseScaleError(ValueError):
    """The norms cannot be made into a noise scale; the message says why and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseBlock:
    """The noise scale over a stretch of the training."""

    first: int
    """Its first step, from 1."""
    last: int
    """Its last one."""
    b_simple: OrInf
    """Samples; inf where the true gradient was lost in the noise."""
    low: float
    """Lower end of the interval."""
    high: OrInf
    """Upper end of it; inf where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSteps:
    """tr Σ and |G|², unbiased, of each step whose gradients are numbers."""

    trace: Numbers
    """tr Σ."""
    squares: Numbers
    """|G|²; of a single step it may come out below 0."""
    numbers: tuple[int, ...]
    """Of the steps, from 1."""
    lost: int
    """Steps whose gradients were no numbers."""
    start: int
    """How many at the beginning had gradients of another size."""
    level: float
    """Share of intervals that hold the truth."""
    every: int = 1
    """Only each so many-th step of the training was looked at."""

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[float, float]],
        *,
        micro_batch: int,
        groups: int,
        level: float,
        dataset_size: int | None,
        every: int = 1,
    ) -> Self:
        """From the two norms; arguments as those of `NoiseScale.of`.

        Raises:
            NoiseScaleError: fewer than two groups or two steps, or no step has gradients that are numbers.
        """
        _check(micro_batch, groups, level, dataset_size)
        whole = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
        good = np.isfinite(whole).all(1) & (whole > 0).all(1)
        _check_steps(len(whole), int(good.sum()))
        small, big = whole[good].T
        squares = (groups * big - small) / (groups - 1)
        trace = micro_batch * groups / (groups - 1) * (small - big)
        if dataset_size:
            squares, trace = squares + trace / dataset_size, trace * (1 - 1 / dataset_size)
        return cls(
            trace=trace,
            squares=squares,
            numbers=tuple(every * int(place) + 1 for place in np.flatnonzero(good)),
            lost=len(whole) - len(small),
            start=beginning(small),
            level=level,
            every=every,
        )

    def over(self, first: int, end: int) -> NoiseBlock:
        """The estimate over steps, counted from 0, `end` left out; two or more."""
        trace, squares = self.trace[first:end], self.squares[first:end]
        top, bottom = float(trace.mean()), float(squares.mean())
        length = block_length(trace, squares)
        low, high = fieller(blocks(trace, length), blocks(squares, length), self.level)
        value = max(0.0, top / bottom) if bottom > 0 else math.inf
        return NoiseBlock(first=self.numbers[first], last=self.numbers[end - 1], b_simple=value, low=min(low, value), high=max(high, value))

    def needed(self) -> int:
        """Steps of the training that are missing until the interval is narrow enough: its width goes with 1 / √steps. 0 = none.

        Where the signal is lost in the noise it is taken to be as large as it can be, so that at least so many are missing.
        """
        return self.every * self._looks_needed()

    def _looks_needed(self) -> int:
        now = self.over(self.start, len(self.trace))
        if relative_width(now) <= ENOUGH:
            return max(0, FEWEST - (len(self.trace) - self.start))
        trace, squares = self.trace[self.start :], self.squares[self.start :]
        length = block_length(trace, squares)
        top, bottom = blocks(trace, length), blocks(squares, length)
        if math.isfinite(now.high):
            error = relative_error(top, bottom)
        else:
            spread = float(np.std(bottom, ddof=1)) / math.sqrt(len(bottom))
            largest = max(0.0, float(bottom.mean())) + quantile(self.level, len(bottom)) * spread
            error = spread / largest if largest else math.inf
        if not math.isfinite(error):
            return len(trace)
        many = quantile(self.level, 1000)  # by then there are
        return max(1, math.ceil(len(trace) * (many * error / ENOUGH) ** 2) - len(trace))

    def stretches(self) -> tuple[NoiseBlock, ...]:
        """Equal parts of the training, each with an estimate of its own."""
        count = min(BLOCKS, len(self.trace) // STEPS_OF_BLOCK)
        ends = [round(len(self.trace) * part / count) for part in range(count + 1)] if count else []
        return tuple(self.over(first, end) for first, end in pairwise(ends))

    def running(self, points: int) -> tuple[NoiseBlock, ...]:
        """The estimate over more and more steps, from the first that counts."""
        count = len(self.trace) - self.start
        ends = sorted({self.start + round(count * (point + 1) / points) for point in range(points)})
        return tuple(self.over(self.start, end) for end in ends if end - self.start >= 2)


def relative_width(block: NoiseBlock) -> float:
    """Half the width of an interval, as a fraction of its estimate; inf where it has no upper end."""
    if not (math.isfinite(block.high) and 0 < block.b_simple < math.inf):
        return math.inf
    return (block.high - block.low) / 2 / block.b_simple


def _check(micro_batch: int, groups: int, level: float, dataset_size: int | None) -> None:
    if not is_whole(groups, least=2):
        raise NoiseScaleError(
            f"groups={groups!r}: noise shows in the difference between groups of samples, so a step needs 2 or more: several ranks, "
            "or accumulation of 2 or more micro-batches (half as large, for the same batch)"
        )
    for name, value in (("micro_batch", micro_batch), ("dataset_size", dataset_size)):
        if value is not None:
            whole_number(name, value, least=1, what="a whole number of samples", error=NoiseScaleError)
    if dataset_size is not None and dataset_size < 2:
        raise NoiseScaleError(f"dataset_size={dataset_size}: of one sample there is no noise")
    if not 0 < level < 1:
        raise NoiseScaleError(f"level={level!r}: a share between 0 and 1 is allowed, such as 0.9")


def _check_steps(count: int, good: int) -> None:
    if count and not good:
        raise NoiseScaleError(
            f"none of {count} steps has gradients that are numbers above 0: the loss is NaN or inf from the first step on, or nothing is "
            "trained. Look at run.metrics; a smaller lr, a warm-up or clip_grad_norm may help"
        )
    if good < 2:
        raise NoiseScaleError(f"{good} step{'s' * (good != 1)} to go by: at least 2 are needed, and some 100 for an estimate worth having")
