"""The fit of S = S_min (1 + B_crit / B) to steps that were measured or bounded from below: likelihood, and what is left unknown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.9
"""Share of the cases in which an interval here holds the truth."""
PRIOR_SCATTER, PRIOR_WEIGHT = 0.06, 2.0
"""How far points lie from the law, as a fraction, before any was seen, and how many points that knowledge counts for: else three points
that happen to lie on a curve would promise a certainty that nobody has."""
REACH = 1e3
"""B_crit is looked for from the smallest batch divided by this to the largest times it; beyond, points cannot tell."""
GRID, ROUNDS = 800, 120
"""Values of B_crit that are compared; rounds of the EM algorithm, which converges in some tens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Steps to a target at one batch."""

    batch: int | float
    """Samples per optimizer step."""
    steps: float
    """To the target; where `reached` is False, steps after which it was not reached."""
    reached: bool = True
    """False: the steps are a lower limit."""


@dataclass(frozen=True, slots=True)
class Fits:
    """The best s_min and scatter for each of many b_crit; batches are over `centre`, so that the fit does not depend on their unit."""

    log_b: Any
    """Logarithms of b_crit over the centre; the others belong to them."""
    log_s: Any
    """Logarithms of s_min."""
    sigma: Any
    """The scatter."""
    loss: Any
    """Negative logarithm of the likelihood, but for a constant."""
    weight: Any
    """Its probability; all sum to 1."""
    centre: float
    """In samples."""


def centre_of(points: Sequence[Point]) -> float:
    """The batches' geometric mean: batches over it do not depend on their unit."""
    return math.exp(sum(math.log(one.batch) for one in points) / len(points))


def grid_of(points: Sequence[Point], centre: float) -> Any:
    """Logarithms of B_crit over the centre, from far below the points to far above."""
    batches = [one.batch for one in points]
    return np.linspace(math.log(min(batches) / REACH / centre), math.log(max(batches) * REACH / centre), GRID)


def fits(points: Sequence[Point], log_b: Any, centre: float) -> Fits:
    """Maximum likelihood of s_min and the scatter at given b_crit: in closed form if all points were reached, else by the EM algorithm.

    Source of the latter: the normal distribution cut off from below, as in Tobin 1958.
    """
    from scipy.special import log_ndtr

    seen = np.array([one.reached for one in points])
    rest = np.log([one.steps for one in points]) - np.log1p(np.exp(log_b)[:, None] * centre / np.array([one.batch for one in points]))
    count, known = int(seen.sum()), PRIOR_WEIGHT * PRIOR_SCATTER**2
    log_s = rest[:, seen].mean(1)
    sigma = np.sqrt((np.square(rest[:, seen] - log_s[:, None]).sum(1) + known) / (count + PRIOR_WEIGHT))
    for _ in range(0 if seen.all() else ROUNDS):
        z = (rest - log_s[:, None]) / sigma[:, None]
        hazard = np.exp(-0.5 * z**2 - 0.5 * math.log(2 * math.pi) - log_ndtr(-z))
        variance = np.where(seen, 0.0, 1 + hazard * (z - hazard))
        z = np.where(seen, z, hazard)  # where a point that was not reached is expected to be
        log_s = log_s + sigma * z.mean(1)
        squares = np.square(sigma) * (np.square(z - z.mean(1)[:, None]) + variance).sum(1)
        sigma = np.sqrt((squares + known) / (len(points) + PRIOR_WEIGHT))
    z = (rest - log_s[:, None]) / sigma[:, None]
    loss = (count + PRIOR_WEIGHT) * np.log(sigma) + 0.5 * (np.where(seen, z**2, 0.0).sum(1) + known / sigma**2)
    loss = loss - np.where(seen, 0.0, log_ndtr(-z)).sum(1)
    # integrating over s_min takes one degree of freedom from the likelihood
    weight = np.exp(-(loss - loss.min()) * (count - 1 + PRIOR_WEIGHT) / (count + PRIOR_WEIGHT))
    return Fits(log_b, log_s, sigma, loss, weight / weight.sum(), centre)


def refined(points: Sequence[Point], centre: float) -> Fits:
    """The most likely b_crit, between two of the grid."""
    from scipy.optimize import minimize_scalar

    grid = grid_of(points, centre)
    place = int(fits(points, grid, centre).loss.argmin())
    around = grid[max(0, place - 1)], grid[min(GRID - 1, place + 1)]
    found = minimize_scalar(
        lambda b: float(fits(points, np.array([b]), centre).loss[0]), bounds=around, method="bounded", options={"xatol": 1e-9}
    )
    return fits(points, np.array([found.x]), centre)


def quantiles(where: Any, scale: Any, cloud: Fits, degrees: float) -> tuple[float, float]:
    """The ends of the interval of a mixture of t distributions, one for each b_crit."""
    from scipy.optimize import brentq
    from scipy.special import stdtr

    keep = cloud.weight > 1e-6
    where, scale, weight = where[keep], scale[keep], cloud.weight[keep] / cloud.weight[keep].sum()
    ends = float((where - 200 * scale).min()), float((where + 200 * scale).max())
    tail = (1 - LEVEL) / 2
    low, high = (brentq(lambda x, p=p: float(weight @ stdtr(degrees, (x - where) / scale)) - p, *ends, xtol=1e-6) for p in (tail, 1 - tail))
    return low, high
