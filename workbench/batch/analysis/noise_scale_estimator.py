"""Estimates the noise scale from two gradient norms per step: tr Σ and |G|², the interval of their ratio, and the steps still needed.

The interval allows for steps that are correlated with their neighbours, and an initial transient is left out.
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
from workbench.core.units import several

Numbers = NDArray[np.float64]

MAX_TRANSIENT = 0.5
"""Largest share of the steps that can be an initial transient."""
MIN_STEPS_TRANSIENT = 20
"""Steps needed to detect a transient."""
CUTS = 16
"""Places at which the transient may end."""
MIN_IMPROVEMENT = 2.0
"""Factor by which the error must shrink without the transient: by chance it hardly ever does."""
MIN_BLOCKS = 16
"""With fewer blocks the interval is wide for lack of blocks alone."""
MAX_CORRELATION = 1.28
"""Standard deviations of chance that neighbours' correlation may have before blocks are made longer (one in ten has it by chance)."""
ENOUGH = 0.08
"""Half the width of the interval, as a fraction of the estimate, that is good enough: 19 of 20 such estimates are within 10 %."""
MIN_STEPS = 20
"""Fewer steps are never enough: an interval that looks narrow may be so by chance."""
MAX_WINDOWS, MIN_STEPS_PER_WINDOW = 10, 10
"""Windows over which the noise scale is followed, at most, and steps of one, at least."""


def transient_length(small: Numbers) -> int:
    """Length of the initial transient: steps at the start whose gradients have another size than later ones; 0 = there is none.

    White's marginal standard error rule (MSER, Simulation 69(6), 1997), on the logarithm of the squared gradients of single groups, which
    has little noise, and no unit.

    Args:
        small: mean square of a group's gradient, step by step, above 0.
    """
    sizes, count = np.log(small), len(small)
    if count < MIN_STEPS_TRANSIENT:
        return 0
    cuts = sorted({round(count * MAX_TRANSIENT * cut / CUTS) for cut in range(CUTS + 1)})
    errors = {cut: float(np.var(sizes[cut:])) / (count - cut) for cut in cuts}
    best = min(cuts, key=errors.__getitem__)
    return best if errors[0] > MIN_IMPROVEMENT * errors[best] else 0


def block_length(trace: Numbers, squares: Numbers) -> int:
    """Steps per block such that neighbouring blocks are not correlated; 1 where neighbouring steps are not.

    Doubled until the correlation is one of chance (Flyvbjerg & Petersen, J. Chem. Phys. 91, 1989); MIN_BLOCKS of them stay.
    """
    mean = float(squares.mean())
    rest = trace - float(trace.mean()) / mean * squares if mean > 0 else squares
    length = 1
    while len(rest) // (2 * length) >= MIN_BLOCKS and _correlation(blocks(rest, length)) > MAX_CORRELATION / math.sqrt(len(rest) // length):
        length *= 2
    return length


def blocks(values: Numbers, length: int) -> Numbers:
    """Means of consecutive steps, some of one step more than `length`."""
    return np.array([part.mean() for part in np.array_split(values, max(1, len(values) // length))])


def _correlation(values: Numbers) -> float:
    """Correlation of neighbouring values."""
    rest = values - values.mean()
    whole = float(rest @ rest)
    return float(rest[1:] @ rest[:-1]) / whole if whole > 0 else 0.0


def fieller_interval(trace: Numbers, squares: Numbers, level: float) -> tuple[float, float]:
    """Fieller's interval of mean(trace) / mean(squares), two numbers that are not negative.

    It holds the ratios r for which mean(trace − r · squares) does not differ from 0 in a t-test (Fieller, J. R. Stat. Soc. B 16, 1954). So
    it is also right where the denominator may be 0: the interval then has no upper end.

    Args:
        trace: numerator, two or more independent values.
        squares: values of the denominator, one per step.
        level: share of intervals that contain the true value, such as 0.9.

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
    """Standard errors from the middle to an end of the interval of a mean of `count` values (Student's t)."""
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, 0.5 + level / 2))


def relative_error(trace: Numbers, squares: Numbers) -> float:
    """Standard error of the ratio of the means, as a fraction of it (delta method); inf where the denominator is not above 0."""
    top, bottom = float(trace.mean()), float(squares.mean())
    if top <= 0 or bottom <= 0:
        return math.inf
    return float(np.std(trace / top - squares / bottom, ddof=1)) / math.sqrt(len(trace))


class NoiseScaleError(ValueError):
    """The noise scale cannot be estimated; the message says why and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseBlock:
    """The noise scale over a window of the training."""

    first: int
    """First step, from 1."""
    last: int
    """Last step."""
    b_simple: OrInf
    """Samples; inf where the true gradient was lost in the noise."""
    low: float
    """Lower end of the interval."""
    high: OrInf
    """Upper end of the interval; inf = it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSteps:
    """tr Σ and |G|², unbiased, of each step whose gradients are numbers."""

    trace: Numbers
    """tr Σ."""
    squares: Numbers
    """|G|²; of a single step it may come out below 0."""
    numbers: tuple[int, ...]
    """Numbers of the steps, from 1."""
    not_finite: int
    """Steps that were left out since their gradients were NaN or infinite."""
    start: int
    """Length of the initial transient."""
    level: float
    """Share of intervals that contain the true value."""
    every: int = 1
    """Every how many-th step of the training was measured."""

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[float, float]], *, micro_batch: int, groups: int, level: float, dataset_size: int | None, every: int = 1
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
            not_finite=len(whole) - len(small),
            start=transient_length(small),
            level=level,
            every=every,
        )

    def window(self, first: int, end: int) -> NoiseBlock:
        """The estimate over two or more steps, counted from 0, without `end`."""
        trace, squares = self.trace[first:end], self.squares[first:end]
        top, bottom = float(trace.mean()), float(squares.mean())
        length = block_length(trace, squares)
        low, high = fieller_interval(blocks(trace, length), blocks(squares, length), self.level)
        value = max(0.0, top / bottom) if bottom > 0 else math.inf
        return NoiseBlock(first=self.numbers[first], last=self.numbers[end - 1], b_simple=value, low=min(low, value), high=max(high, value))

    def needed(self) -> int:
        """Further steps of the training until the interval is narrow enough: its width goes with 1 / √steps. 0 = none.

        Where the signal is lost in the noise, the largest possible signal is assumed, so that at least this many are needed.
        """
        return self.every * self._measured_steps_needed()

    def _measured_steps_needed(self) -> int:
        now = self.window(self.start, len(self.trace))
        if relative_width(now) <= ENOUGH:
            return max(0, MIN_STEPS - (len(self.trace) - self.start))
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
        many = quantile(self.level, 1000)  # as many steps as there will be
        return max(1, math.ceil(len(trace) * (many * error / ENOUGH) ** 2) - len(trace))

    def windows(self) -> tuple[NoiseBlock, ...]:
        """Windowed estimates: one for each of equal parts of the training."""
        count = min(MAX_WINDOWS, len(self.trace) // MIN_STEPS_PER_WINDOW)
        ends = [round(len(self.trace) * part / count) for part in range(count + 1)] if count else []
        return tuple(self.window(first, end) for first, end in pairwise(ends))

    def running(self, points: int) -> tuple[NoiseBlock, ...]:
        """The estimate over more and more steps, without the transient."""
        count = len(self.trace) - self.start
        ends = sorted({self.start + round(count * (point + 1) / points) for point in range(points)})
        return tuple(self.window(self.start, end) for end in ends if end - self.start >= 2)


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
        raise NoiseScaleError(f"{several(good, 'step')} to go by: at least 2 are needed, and some 100 for an estimate worth having")
