"""Fits L(N, D) = E + A/N^α + B/D^β robustly, bootstraps the fit, and computes the optimum in closed form.

Minimised is the *sum* over the points of the Huber loss of log L̂ − log L, where log L̂ is a log-sum-exp of log E, log A − α·log N and
log B − β·log D (Hoffmann et al. 2022, appendix D.3, arXiv 2203.15556). Source of the two traps that are avoided here: Besiroglu et al. 2024
(arXiv 2404.10102). A mean instead of the sum makes every slope so small that L-BFGS stops at its default tolerance long before the
minimum, and reports convergence; and a single start finds one of many local minima.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from workbench.core.checks import choice, real_number, whole_number
from workbench.scaling.analysis.law.points import MIN_VARIED, Points, PointsError

DELTA = 1e-3
"""Where the Huber loss turns from squares to absolute values, in log loss: a run that is off by more than 0.1 % pulls no harder."""
EXPONENTS = (0.03, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
"""Starts of α and of β: all pairs are tried; E, A and B then follow by linear least squares."""
BOUNDS = (1e-3, 4.0)
"""Smallest and largest exponent that a fit may find."""
STARTS = 12
"""Of all pairs, this many are followed down to their minimum."""
_SCALE = 1e4  # of what is minimised: L-BFGS's tolerances are meant for numbers near 1
_TINY = 1e-7  # of the mean loss: where the logarithm of a part that least squares set to 0 begins


@dataclass(frozen=True, slots=True)
class Columns:
    """Logarithms of points, those of N and D around their means, where the five numbers pull least on each other."""

    n: Any
    """log N − its mean."""
    d: Any
    """log D − its mean."""
    loss: Any
    """log L."""
    mean_n: float
    """Mean of log N."""
    mean_d: float
    """Mean of log D."""

    @classmethod
    def of(cls, parameters: Any, tokens: Any, loss: Any) -> "Columns":
        """Of columns of numbers above 0."""
        n, d = np.log(np.asarray(parameters, float)), np.log(np.asarray(tokens, float))
        return cls(n - n.mean(), d - d.mean(), np.log(np.asarray(loss, float)), float(n.mean()), float(d.mean()))

    def outward(self, solution: Any) -> tuple[float, float, float, float, float]:
        """(log A, log B, log E, α, β) around the means → (E, A, B, α, β)."""
        a, b, e, alpha, beta = (float(value) for value in solution)
        return float(np.exp(e)), float(np.exp(a + alpha * self.mean_n)), float(np.exp(b + beta * self.mean_d)), alpha, beta

    def inward(self, law: tuple[float, float, float, float, float]) -> Any:
        """Inverse of `outward`."""
        e, a, b, alpha, beta = law
        return np.array([np.log(a) - alpha * self.mean_n, np.log(b) - beta * self.mean_d, np.log(e), alpha, beta])


def misfit(place: Any, columns: Columns, delta: float = DELTA) -> tuple[float, Any]:
    """What is minimised, and its gradient.

    Args:
        place: log A, log B, log E, α, β.
        columns: the points, a column per quantity.
        delta: see `DELTA`.
    """
    a, b, e, alpha, beta = place
    parts = np.stack([a - alpha * columns.n, b - beta * columns.d, np.full_like(columns.n, e)])
    top = parts.max(0)
    powers = np.exp(parts - top)
    total = powers.sum(0)
    off = top + np.log(total) - columns.loss
    size = np.abs(off)
    value = np.where(size <= delta, off * off / 2, delta * (size - delta / 2)).sum()
    pull = np.clip(off, -delta, delta) * powers / total
    slope = np.array([pull[0].sum(), pull[1].sum(), pull[2].sum(), -(pull[0] * columns.n).sum(), -(pull[1] * columns.d).sum()])
    return float(value), slope


def best(columns: Columns, *, delta: float = DELTA, near: Any = None, starts: int = STARTS) -> Any:
    """log A, log B, log E, α and β with the least misfit that is found from the best `starts` pairs of `EXPONENTS`, and from `near`."""
    places = [*([] if near is None else [near]), *(grid(columns)[:starts] if starts else ())]
    minima = [_down(place, columns, delta) for place in places]
    return min(minima, key=lambda minimum: minimum.fun).x


def grid(columns: Columns) -> list[Any]:
    """A place for every pair of `EXPONENTS`, the best first: with α and β fixed, the law is linear in E, A and B."""
    from scipy.optimize import nnls

    weight = np.exp(-columns.loss)  # errors relative to the loss
    least = _TINY * np.exp(columns.loss.mean())
    places = []
    for alpha, beta in product(EXPONENTS, EXPONENTS):
        shapes = np.stack([np.exp(-alpha * columns.n), np.exp(-beta * columns.d), np.ones_like(columns.n)], 1)
        solved, _ = nnls(shapes * weight[:, None], np.ones_like(weight))
        off = (shapes @ solved) * weight - 1
        places.append((float(np.abs(off).sum()), np.array([*np.log(np.maximum(solved, least)), alpha, beta])))
    return [place for _, place in sorted(places, key=lambda scored: scored[0])]


def _down(place: Any, columns: Columns, delta: float) -> Any:
    from scipy.optimize import minimize

    low, high = columns.loss.min() + np.log(_TINY), columns.loss.max()
    reach = BOUNDS[1] * max(np.ptp(columns.n), np.ptp(columns.d))  # of a part that is steep and lies off the middle
    bounds = [(low - reach, high + reach)] * 2 + [(low, high)] + [BOUNDS] * 2

    def scaled(at: Any) -> tuple[float, Any]:
        value, slope = misfit(at, columns, delta)
        return _SCALE * value, _SCALE * slope

    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-14, "gtol": 1e-9}
    return minimize(scaled, place, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


Five = tuple[float, float, float, float, float]
"""E, A, B, α, β."""
WAYS = ("pairs", "run")
"""What is drawn: each point by itself, or all points of a run together."""
_TRIES = 20  # drawings in which something varies are looked for this many times as long as needed


def bootstrap(points: Points, law: Five, *, count: int, by: str = "pairs", seed: int = 0, delta: float = DELTA) -> tuple[Five, ...]:
    """Laws fitted to points drawn with replacement.

    A drawing with only one size or one amount of data is drawn again: it does not determine the exponents.

    Args:
        points: what the law was fitted to.
        law: the fitted law; each fit begins there: other starts were never seen to end lower.
        count: number of drawings.
        by: one of `WAYS`.
        seed: seed of the drawings.
        delta: threshold of the Huber loss.

    Returns:
        `count` laws; fewer where hardly any drawing varies.
    """
    rng = np.random.default_rng(seed)
    table = np.array([points.parameters, points.tokens, points.loss])
    groups = _groups(points, by)
    laws: list[Five] = []
    for _ in range(_TRIES * count):
        if len(laws) == count:
            break
        drawn = np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))])
        parameters, tokens, loss = table[:, drawn]
        if min(len(set(parameters)), len(set(tokens))) < MIN_VARIED:
            continue
        columns = Columns.of(parameters, tokens, loss)
        laws.append(columns.outward(best(columns, delta=delta, near=columns.inward(law), starts=0)))
    return tuple(laws)


def _groups(points: Points, by: str) -> list[Any]:
    """Places of the points that are drawn together."""
    if by == "pairs":
        return [np.array([place]) for place in range(len(points))]
    return [np.array([place for place, run in enumerate(points.run) if run == name]) for name in dict.fromkeys(points.run)]


def check_options(count: Any, level: Any, by: Any, seed: Any) -> tuple[int, float, int]:
    """The number of drawings, the level and the seed as plain numbers.

    Raises:
        PointsError: a number of drawings, a level, a way or a seed that is not allowed.
    """
    choice("by", by, WAYS, error=PointsError)
    return (
        whole_number("draws", count, least=0, also=", 200 or more for intervals, 0 for none", error=PointsError, numpy=True),
        real_number("level", level, above=0, below=1, also=", such as 0.9", error=PointsError, numpy=True),
        whole_number("seed", seed, least=0, error=PointsError, numpy=True),
    )


_REACH = 300.0  # of the logarithm of N or D: a law with hardly an exponent puts its optimum beyond what a float holds


def losses(law: Five, parameters: Any, tokens: Any) -> Any:
    """E + A/N^α + B/D^β, of numbers or of columns."""
    e, a, b, alpha, beta = law
    return e + a * np.asarray(parameters, float) ** -alpha + b * np.asarray(tokens, float) ** -beta


def exponent(law: Five) -> float:
    """β/(α+β): the best N grows as this power of the compute.

    >>> round(exponent((1.69, 406.4, 410.7, 0.34, 0.28)), 3)
    0.452
    """
    return law[4] / (law[3] + law[4])


def optimum(law: Five, work: float) -> tuple[float, float, float]:
    """N, D and the loss of the best use of N · D = work: N = G · work^a, G = (αA/βB)^(1/(α+β)), a = β/(α+β) (Hoffmann et al. 2022, eq. 4).

    >>> n, d, loss = optimum((1.69, 406.4, 410.7, 0.34, 0.28), 5.76e23 / 6)
    >>> f"{n:.3g} {d:.3g} {loss:.3f}"
    '3.22e+10 2.98e+12 1.931'
    """
    _, a, b, alpha, beta = law
    log_g = (math.log(alpha * a) - math.log(beta * b)) / (alpha + beta)
    log_n = log_g + exponent(law) * math.log(work)
    log_d = math.log(work) - log_n
    n, d = (math.exp(min(max(log, -_REACH), _REACH)) for log in (log_n, log_d))
    with np.errstate(over="ignore"):
        return n, d, float(losses(law, n, d))
