"""How far a ratio of two means may be trusted: its interval, over steps that resemble their neighbours, some of them only a beginning."""

import math

import numpy as np
from numpy.typing import NDArray

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
