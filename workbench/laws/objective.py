"""The robust fit of L(N, D) = E + A/N^α + B/D^β: what is minimised, from where, and the best that is found.

Minimised is the *sum* over the points of the Huber loss of log L̂ − log L, where log L̂ is a log-sum-exp of log E, log A − α·log N and
log B − β·log D (Hoffmann et al. 2022, appendix D.3, arXiv 2203.15556). Source of the two traps that are avoided here: Besiroglu et al. 2024
(arXiv 2404.10102). A mean instead of the sum makes every slope so small that L-BFGS stops at its default tolerance long before the
minimum, and says "convergence"; and one start finds one of many hollows.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

DELTA = 1e-3
"""Where the Huber loss turns from squares to absolute values, in log loss: a run that is off by more than 0.1 % pulls no harder."""
EXPONENTS = (0.03, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
"""Starts of α and of β: all pairs are tried; E, A and B then follow by linear least squares."""
BOUNDS = (1e-3, 4.0)
"""Smallest and largest exponent that is looked for."""
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

    def outward(self, found: Any) -> tuple[float, float, float, float, float]:
        """(log A, log B, log E, α, β) around the means → (E, A, B, α, β)."""
        a, b, e, alpha, beta = (float(one) for one in found)
        return float(np.exp(e)), float(np.exp(a + alpha * self.mean_n)), float(np.exp(b + beta * self.mean_d)), alpha, beta

    def inward(self, law: tuple[float, float, float, float, float]) -> Any:
        """Inverse of `outward`."""
        e, a, b, alpha, beta = law
        return np.array([np.log(a) - alpha * self.mean_n, np.log(b) - beta * self.mean_d, np.log(e), alpha, beta])


def misfit(place: Any, columns: Columns, delta: float = DELTA) -> tuple[float, Any]:
    """What is minimised, and its gradient.

    Args:
        place: log A, log B, log E, α, β.
        columns: the points.
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
    """log A, log B, log E, α and β with the least misfit that is found.

    Args:
        columns: the points.
        delta: see `DELTA`.
        near: a place to begin at as well.
        starts: how many pairs of `EXPONENTS` are followed.
    """
    places = [*([] if near is None else [near]), *(grid(columns)[:starts] if starts else ())]
    found = [_down(place, columns, delta) for place in places]
    return min(found, key=lambda one: one.fun).x


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
    return [place for _, place in sorted(places, key=lambda one: one[0])]


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
