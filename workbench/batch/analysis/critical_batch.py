"""CriticalBatch: the law of steps against batch, S(B) = S_min (1 + B_crit / B), fitted to measured steps, with its uncertainty.

Source: McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11: (S/S_min - 1)(E/E_min - 1) = 1 with E = B S samples, E_min = B_crit S_min. It
describes the best learning rate at each batch; with a fixed one the curve is another. Left out: batches so large that a step sees most of
the data, and regularising effects of noise on validation figures. Known error: 7 % at most over six batches of a small perceptron.

The fit is by maximum likelihood on a grid of B_crit, to steps that were measured, or bounded from below where a target was not reached.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.codec import JsonDataclass, OrInf
from workbench.core.display import table as display

LEVEL = 0.9
"""Share of intervals that contain the true value."""
PRIOR_SCATTER, PRIOR_WEIGHT = 0.06, 2.0
"""Prior scatter of points around the law, as a fraction, and the number of points that it counts for: without it, three points that happen
to lie on a curve would give far too narrow intervals."""
RANGE = 1e3
"""The grid of B_crit goes from the smallest batch divided by this to the largest times this."""
GRID, ROUNDS = 800, 120
"""Values of B_crit on the grid; rounds of the EM algorithm, which converges in some tens."""
UNBOUNDED = 0.03
"""Probability at an end of the grid from which there is no limit on that side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Steps to a target at one batch."""

    batch: int | float
    """Samples per optimizer step."""
    steps: float
    """Steps to the target, or, where `reached` is False, steps without reaching it."""
    reached: bool = True
    """False = the steps are a lower limit."""


@dataclass(frozen=True, slots=True)
class GridFit:
    """The best s_min and scatter for each b_crit of a grid. Batches are relative to `centre`, so that their unit does not matter."""

    log_b: Any
    """Logarithms of b_crit over the centre."""
    log_s: Any
    """Logarithms of s_min, for each b_crit."""
    sigma: Any
    """Scatter."""
    loss: Any
    """Negative log-likelihood, up to a constant."""
    weight: Any
    """Probabilities, whose sum is 1."""
    centre: float
    """In samples."""


def geometric_mean(points: Sequence[Point]) -> float:
    """The geometric mean of the batches."""
    return math.exp(sum(math.log(point.batch) for point in points) / len(points))


def grid_of(points: Sequence[Point], centre: float) -> Any:
    """The grid: logarithms of B_crit over the centre."""
    batches = [point.batch for point in points]
    return np.linspace(math.log(min(batches) / RANGE / centre), math.log(max(batches) * RANGE / centre), GRID)


def fit_at(points: Sequence[Point], log_b: Any, centre: float) -> GridFit:
    """Maximum likelihood of s_min and scatter at given b_crit: in closed form if all points were reached, else by the EM algorithm.

    Source of the latter: the censored normal distribution, Tobin 1958.
    """
    from scipy.special import log_ndtr

    seen = np.array([point.reached for point in points])
    batches = np.array([point.batch for point in points])
    rest = np.log([point.steps for point in points]) - np.log1p(np.exp(log_b)[:, None] * centre / batches)
    count, known = int(seen.sum()), PRIOR_WEIGHT * PRIOR_SCATTER**2
    log_s = rest[:, seen].mean(1)
    sigma = np.sqrt((np.square(rest[:, seen] - log_s[:, None]).sum(1) + known) / (count + PRIOR_WEIGHT))
    for _ in range(0 if seen.all() else ROUNDS):
        z = (rest - log_s[:, None]) / sigma[:, None]
        hazard = np.exp(-0.5 * z**2 - 0.5 * math.log(2 * math.pi) - log_ndtr(-z))
        variance = np.where(seen, 0.0, 1 + hazard * (z - hazard))
        z = np.where(seen, z, hazard)  # expected value of a censored point
        log_s = log_s + sigma * z.mean(1)
        squares = np.square(sigma) * (np.square(z - z.mean(1)[:, None]) + variance).sum(1)
        sigma = np.sqrt((squares + known) / (len(points) + PRIOR_WEIGHT))
    z = (rest - log_s[:, None]) / sigma[:, None]
    loss = (count + PRIOR_WEIGHT) * np.log(sigma) + 0.5 * (np.where(seen, z**2, 0.0).sum(1) + known / sigma**2)
    loss = loss - np.where(seen, 0.0, log_ndtr(-z)).sum(1)
    # integrating over s_min takes one degree of freedom from the likelihood
    weight = np.exp(-(loss - loss.min()) * (count - 1 + PRIOR_WEIGHT) / (count + PRIOR_WEIGHT))
    return GridFit(log_b, log_s, sigma, loss, weight / weight.sum(), centre)


def best_fit(points: Sequence[Point], centre: float) -> GridFit:
    """The fit at the most likely b_crit, between two of the grid."""
    from scipy.optimize import minimize_scalar

    grid = grid_of(points, centre)
    lowest = int(fit_at(points, grid, centre).loss.argmin())
    bounds = grid[max(0, lowest - 1)], grid[min(GRID - 1, lowest + 1)]
    minimum = minimize_scalar(
        lambda b: float(fit_at(points, np.array([b]), centre).loss[0]), bounds=bounds, method="bounded", options={"xatol": 1e-9}
    )
    return fit_at(points, np.array([minimum.x]), centre)


def quantiles(where: Any, scale: Any, fit: GridFit, degrees: float) -> tuple[float, float]:
    """Quantiles of a mixture of t distributions, one per b_crit."""
    from scipy.optimize import brentq
    from scipy.special import stdtr

    keep = fit.weight > 1e-6
    where, scale, weight = where[keep], scale[keep], fit.weight[keep] / fit.weight[keep].sum()
    ends = float((where - 200 * scale).min()), float((where + 200 * scale).max())
    tail = (1 - LEVEL) / 2
    low, high = (brentq(lambda x, p=p: float(weight @ stdtr(degrees, (x - where) / scale)) - p, *ends, xtol=1e-6) for p in (tail, 1 - tail))
    return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Steps to a target at a batch, by the law."""

    batch: float
    """Samples per optimizer step."""
    low: float
    """Lower end of the 90 % interval of a measurement."""
    mid: float
    """Steps by the law."""
    high: float
    """Its upper end."""

    @property
    def samples(self) -> tuple[float, float, float]:
        """Low, mid and high in samples."""
        return self.batch * self.low, self.batch * self.mid, self.batch * self.high

    def __str__(self) -> str:
        return f"{units.count(round(self.mid))} steps at batch {units.count(self.batch)} ({between(self.low, self.high)})"


@dataclass(frozen=True, kw_only=True)
class CriticalBatch(display.Shown, JsonDataclass):
    """The fitted law. Below `b_crit` a larger batch saves steps nearly in proportion; above it, hardly any.

    At `b_crit` training takes twice the minimal steps and twice the minimal samples.
    """

    s_min: float
    """Least steps at any batch."""
    b_crit: float
    """The critical batch, in samples."""
    s_min_low: float
    s_min_high: float
    """90 % interval of `s_min`."""
    b_crit_low: float
    b_crit_high: OrInf
    """90 % interval of `b_crit`; 0 or infinite where the points set no limit."""
    scatter: float
    """Scatter of points around the curve: standard deviation of logarithms."""
    points: tuple[Point, ...]
    """Measured points."""

    @classmethod
    def fit(cls, points: Sequence[Point] | Mapping[int, float]) -> "CriticalBatch":
        """Fit in logarithms; points that were not reached are lower limits (Tobit likelihood).

        Intervals integrate over b_crit and s_min, both flat in logarithms, and the scatter with its prior: Student's t for each b_crit,
        weighted by its likelihood. With points that were not reached that is an approximation.

        Args:
            points: at least two batches at which the target was reached; or batch → steps.

        Raises:
            ValueError: too few points, or numbers that are not above 0.
        """
        if isinstance(points, Mapping):
            points = [Point(batch=batch, steps=steps) for batch, steps in points.items()]
        points = tuple(sorted(points, key=lambda point: (point.batch, point.steps)))
        _check(points)
        centre = geometric_mean(points)
        best = best_fit(points, centre)
        base = cls(
            s_min=math.exp(best.log_s[0]),
            b_crit=centre * math.exp(best.log_b[0]),
            scatter=float(best.sigma[0]),
            points=points,
            **dict.fromkeys(("s_min_low", "s_min_high", "b_crit_low", "b_crit_high"), math.nan),
        )
        low_b, high_b = base._b_limits()
        low_s, high_s = quantiles(base._grid.log_s, base._spread(0.0), base._grid, base.degrees)
        return dataclasses.replace(
            base,
            b_crit_low=min(low_b, base.b_crit),
            b_crit_high=max(high_b, base.b_crit),
            s_min_low=min(math.exp(low_s), base.s_min),
            s_min_high=max(math.exp(high_s), base.s_min),
        )

    def steps(self, batch: float) -> float:
        """Steps to the target on the curve."""
        return self.s_min * (1 + self.b_crit / batch)

    def samples(self, batch: float) -> float:
        """Samples to the target on the curve: batch × steps."""
        return self.s_min * (batch + self.b_crit)

    def predict(self, batch: float) -> Predicted:
        """Steps at a batch, with the 90 % interval of a measurement.

        Raises:
            ValueError: not a number above 0.
        """
        if not (isinstance(batch, int | float) and 0 < batch < math.inf):
            raise ValueError(f"predict({batch!r}): a batch in samples above 0 is allowed")
        grid = self._grid
        where = grid.log_s + np.log1p(np.exp(grid.log_b) * grid.centre / batch)
        low, high = quantiles(where, self._spread(1.0), grid, self.degrees)
        mid = self.steps(batch)
        return Predicted(batch=batch, low=min(math.exp(low), mid), mid=mid, high=max(math.exp(high), mid))

    @property
    def degrees(self) -> float:
        """Degrees of freedom of the intervals: points that were reached, less one, plus the prior's weight."""
        return sum(point.reached for point in self.points) - 1 + PRIOR_WEIGHT

    @property
    def words(self) -> str:
        """The critical batch with its interval: `28 (25–31)`."""
        return f"{units.count(_rounded(self.b_crit))} ({between(self.b_crit_low, self.b_crit_high)})"

    @property
    def advice(self) -> str:
        """What to measure where the points do not limit b_crit; else empty."""
        if self.b_crit_high == math.inf:
            return f"steps still fall in proportion at batch {units.count(self.points[-1].batch)}: measure larger ones to find b_crit"
        if self.b_crit_low == 0:
            return f"steps hardly fall from batch {units.count(self.points[0].batch)} on: measure smaller ones to find b_crit"
        return ""

    @property
    def table(self) -> display.Table:
        """Two rows: s_min, b_crit."""
        rows = [
            ["s_min", *(units.count(_rounded(steps)) for steps in (self.s_min, self.s_min_low, self.s_min_high)), "steps"],
            ["b_crit", units.count(_rounded(self.b_crit)), _limit(self.b_crit_low), _limit(self.b_crit_high), "samples"],
        ]
        batches = ", ".join(units.count(point.batch) for point in self.points)
        note = f"S(B) = s_min (1 + b_crit / B), fitted to batches {batches}; points lie {units.percent(self.scatter)} off"
        return display.Table(
            columns=("", "value", "low", "high", "unit"),
            rows=rows,
            title="Critical batch",
            note=display.notes(filter(None, [note, self.advice])),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        return display.frame([{**self.to_json(), "points": len(self.points)}])

    plot = display.plot_method("critical_batch")

    def __repr__(self) -> str:
        return f"CriticalBatch(s_min={_rounded(self.s_min):g}, b_crit={_rounded(self.b_crit):g})"

    @functools.cached_property
    def _grid(self) -> GridFit:
        """The fit at every b_crit of the grid."""
        centre = geometric_mean(self.points)
        return fit_at(self.points, grid_of(self.points, centre), centre)

    def _spread(self, new: float) -> Any:
        """Scale of the t distribution of the curve (new = 0) or of a measurement (1), for each b_crit."""
        count = self.degrees + 1 - PRIOR_WEIGHT
        return self._grid.sigma * math.sqrt((count + PRIOR_WEIGHT) / self.degrees * (new + 1 / count))

    def _b_limits(self) -> tuple[float, float]:
        grid = self._grid
        total = np.cumsum(grid.weight)
        tail = (1 - LEVEL) / 2
        low, high = (grid.centre * math.exp(np.interp(share, total, grid.log_b)) for share in (tail, 1 - tail))
        end = GRID // 20
        return (0.0 if total[end] > UNBOUNDED else low), (math.inf if 1 - total[-end] > UNBOUNDED else high)


def _check(points: Sequence[Point]) -> None:
    for point in points:
        if not (0 < point.batch < math.inf and 0 < point.steps < math.inf):
            raise ValueError(f"{point!r}: a batch and steps above 0 are allowed; a run that did not reach the target has reached=False")
    batches = sorted({point.batch for point in points if point.reached})
    if len(batches) < 2:
        where = f"reached at batch {units.count(batches[0])} only" if batches else "reached at no batch"
        raise ValueError(
            f"the law of steps against batch needs two batches at which the target is reached, better four, and it was {where}: "
            "try a target that is easier to reach, more steps, or other batches"
        )


def between(low: float, high: float) -> str:
    """Two numbers as a range."""
    return f"{_limit(low)}–{_limit(high)}"


def _limit(value: float) -> str:
    return "any" if math.isinf(value) else units.count(_rounded(value))


def _rounded(value: float) -> float:
    """Rounded to three significant digits, without a fraction from 10 on."""
    if not value or not math.isfinite(value):
        return value
    return round(value, max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) < 10 else 0)
