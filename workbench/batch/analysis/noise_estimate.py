"""Two norms of each step, and what they tell: tr Σ and |G|² step by step, the interval of their ratio, and how many more steps it takes.

How far a ratio of two means may be trusted: its interval, over steps that resemble their neighbours, some of them only a beginning.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from workbench.core.checks import is_whole, whole_number
from workbench.core.codec import OrInf

Numbers = NDArray[np.float64]

MOST_LEFT_OUT = 0.5
"""Of the steps: a beginning that is longer is no beginning."""
FEWEST_STEPS = 20
"""Of which a beginning can be told."""
CUTS = 16
"""Places at which the beginning may end."""
CLEARER = 2.0
"""Times by which the steps must agree better without the beginning, before it is left out: by chance they hardly ever do."""
FEWEST_BLOCKS = 16
"""Blocks that are always kept: with fewer the interval is wide for lack of blocks alone."""
ALIKE = 1.28
"""Standard deviations of chance by which neighbours may resemble each other before blocks are made longer (one in ten does by chance)."""


def beginning(small: Numbers) -> int:
    """Steps at the start whose gradients are not yet of the size that they have later; 0 = there is no such beginning.

    White's marginal standard error rule (MSER, Simulation 69(6), 1997), on the logarithm of the squared gradients of single groups: it has
    little noise, and no unit.

    Args:
        small: mean square of a group's gradient, step by step, above 0.
    """
    sizes, count = np.log(small), len(small)
    if count < FEWEST_STEPS:
        return 0
    cuts = sorted({round(count * MOST_LEFT_OUT * cut / CUTS) for cut in range(CUTS + 1)})
    errors = {cut: float(np.var(sizes[cut:])) / (count - cut) for cut in cuts}
    best = min(cuts, key=lambda cut: errors[cut])
    return best if errors[0] > CLEARER * errors[best] else 0


def block_length(trace: Numbers, squares: Numbers) -> int:
    """Steps that make up a block, so that blocks do not resemble their neighbours; 1 where steps do not.

    Doubled until neighbours differ as by chance (Flyvbjerg & Petersen, J. Chem. Phys. 91, 1989); FEWEST_BLOCKS of them stay.

    Args:
        trace: numerator, step by step.
        squares: denominator.
    """
    mean = float(squares.mean())
    rest = trace - float(trace.mean()) / mean * squares if mean > 0 else squares
    length = 1
    while len(rest) // (2 * length) >= FEWEST_BLOCKS and _likeness(blocks(rest, length)) > ALIKE / math.sqrt(len(rest) // length):
        length *= 2
    return length


def blocks(values: Numbers, length: int) -> Numbers:
    """Means of neighbouring steps, some of them of one step more than `length`."""
    return np.array([part.mean() for part in np.array_split(values, max(1, len(values) // length))])


def _likeness(values: Numbers) -> float:
    """Correlation of neighbours."""
    rest = values - values.mean()
    whole = float(rest @ rest)
    return float(rest[1:] @ rest[:-1]) / whole if whole > 0 else 0.0


def fieller(trace: Numbers, squares: Numbers, level: float) -> tuple[float, float]:
    """The interval of mean(trace) / mean(squares), two numbers that are not negative: all ratios that the values do not contradict.

    A ratio r is contradicted where mean(trace − r · squares) differs from 0 in a t-test (Fieller, J. R. Stat. Soc. B 16, 1954). So it is
    also right where it is not known whether the denominator is above 0: then the interval has no upper end.

    Args:
        trace: numerator, two or more values that do not depend on each other.
        squares: denominator.
        level: share of intervals that hold the truth, such as 0.9.

    Returns:
        Its ends; 0 and inf where nothing is known.
    """
    spread = np.cov(trace, squares) / len(trace)
    beyond = quantile(level, len(trace)) ** 2
    top, bottom = float(trace.mean()), float(squares.mean())
    a = bottom**2 - beyond * float(spread[1, 1])
    b = top * bottom - beyond * float(spread[0, 1])
    c = top**2 - beyond * float(spread[0, 0])
    inside = b**2 - a * c  # a r² − 2 b r + c ≤ 0
    if a > 0:
        root = math.sqrt(max(0.0, inside))
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    if a == 0 or inside <= 0 or c <= 0:
        return 0.0, math.inf
    return max((b - math.sqrt(inside)) / a, (b + math.sqrt(inside)) / a), math.inf


def quantile(level: float, count: int) -> float:
    """Standard errors from the middle to an end of an interval for the mean of `count` values (Student's t)."""
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, 0.5 + level / 2))


def relative_error(trace: Numbers, squares: Numbers) -> float:
    """Standard error of the ratio of the means, as a fraction of it (delta method); inf where the denominator is not above 0.

    Args:
        trace: numerator, two or more values that do not depend on each other.
        squares: denominator.
    """
    top, bottom = float(trace.mean()), float(squares.mean())
    if top <= 0 or bottom <= 0:
        return math.inf
    return float(np.std(trace / top - squares / bottom, ddof=1)) / math.sqrt(len(trace))


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
