"""CriticalBatch: the law of steps against batch, S(B) = S_min (1 + B_crit / B), fitted to measured points, with what it does not know.

Source: McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11: (S/S_min - 1)(E/E_min - 1) = 1 with E = B S samples, E_min = B_crit S_min. It
describes the best learning rate at each batch; with a fixed one the curve is another. Left out: batches so large that a step sees most of
the data, and regularising effects of noise on validation figures. Known error: 7 % at most over six batches of a small perceptron.

The fit of S = S_min (1 + B_crit / B) to steps that were measured or bounded from below: likelihood, and what is left unknown.
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


_EDGE = 0.03
"""Of its probability at the end of that range: there is no limit on that side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Steps to a target at a batch, as the law has it."""

    batch: float
    """Samples per optimizer step."""
    low: float
    """A measurement lies above this in 19 of 20 cases."""
    mid: float
    """Steps on the curve."""
    high: float
    """A measurement lies below this in 19 of 20 cases."""

    @property
    def samples(self) -> tuple[float, float, float]:
        """The same in samples: low, mid, high."""
        return self.batch * self.low, self.batch * self.mid, self.batch * self.high

    def __str__(self) -> str:
        return f"{units.count(round(self.mid))} steps at batch {units.count(self.batch)} ({between(self.low, self.high)})"


@dataclass(frozen=True, kw_only=True)
class CriticalBatch(display.Shown, JsonDataclass):
    """The fitted law. Below `b_crit` a larger batch saves steps nearly in proportion; beyond, it buys little.

    At it, training takes twice the fewest steps and twice the fewest samples.
    """

    s_min: float
    """Steps that no batch gets below."""
    b_crit: float
    """The critical batch, in samples."""
    s_min_low: float
    s_min_high: float
    """Its 90 % interval."""
    b_crit_low: float
    b_crit_high: OrInf
    """The same of b_crit; 0 or infinite where the points set no limit on that side."""
    scatter: float
    """How far points lie from the curve, as a fraction: a standard deviation in logarithms."""
    points: tuple[Point, ...]
    """What it was fitted to."""

    @classmethod
    def fit(cls, points: Sequence[Point] | Mapping[int, float]) -> "CriticalBatch":
        """Fit in logarithms. A point that was not reached says that more steps are needed than it took (a Tobit likelihood).

        Intervals integrate over b_crit (flat in its logarithm), s_min (the same) and the scatter, of which PRIOR_SCATTER is known before:
        Student's t for each b_crit, weighted by its likelihood. With points that were not reached that is an approximation.

        Args:
            points: at least two batches at which the target was reached; or batch → steps. Their order does not matter.

        Raises:
            ValueError: too few, or figures that are none.
        """
        if isinstance(points, Mapping):
            points = [Point(batch=batch, steps=steps) for batch, steps in points.items()]
        points = tuple(sorted(points, key=lambda one: (one.batch, one.steps)))
        _check(points)
        centre = centre_of(points)
        best = refined(points, centre)
        base = cls(
            s_min=math.exp(best.log_s[0]),
            b_crit=centre * math.exp(best.log_b[0]),
            scatter=float(best.sigma[0]),
            points=points,
            **dict.fromkeys(("s_min_low", "s_min_high", "b_crit_low", "b_crit_high"), math.nan),
        )
        low_b, high_b = base._b_limits()
        low_s, high_s = quantiles(base._cloud.log_s, base._spread(0.0), base._cloud, base.degrees)
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
        """Steps that a measurement at a batch would need, with a 90 % interval.

        Raises:
            ValueError: a batch that is none.
        """
        if not (isinstance(batch, int | float) and 0 < batch < math.inf):
            raise ValueError(f"predict({batch!r}): a batch in samples above 0 is wanted")
        cloud = self._cloud
        where = cloud.log_s + np.log1p(np.exp(cloud.log_b) * cloud.centre / batch)
        low, high = quantiles(where, self._spread(1.0), cloud, self.degrees)
        mid = self.steps(batch)
        return Predicted(batch=batch, low=min(math.exp(low), mid), mid=mid, high=max(math.exp(high), mid))

    @property
    def degrees(self) -> float:
        """Degrees of freedom of the intervals: points that were reached less one, and what was known before."""
        return sum(one.reached for one in self.points) - 1 + PRIOR_WEIGHT

    @property
    def identified(self) -> bool:
        """Do the points limit b_crit on both sides?"""
        return self.b_crit_low > 0 and self.b_crit_high < math.inf

    @property
    def words(self) -> str:
        """The critical batch with its interval: `28 (25–31)`."""
        return f"{units.count(_rounded(self.b_crit))} ({between(self.b_crit_low, self.b_crit_high)})"

    @property
    def advice(self) -> str:
        """What would narrow the interval, where the points do not limit b_crit; else nothing."""
        if self.b_crit_high == math.inf:
            return f"steps still fall in proportion at batch {units.count(self.points[-1].batch)}: measure larger ones to find b_crit"
        if self.b_crit_low == 0:
            return f"steps hardly fall from batch {units.count(self.points[0].batch)} on: measure smaller ones to find b_crit"
        return ""

    @property
    def table(self) -> display.Table:
        """Two rows: s_min, b_crit."""
        rows = [
            [
                "s_min",
                units.count(_rounded(self.s_min)),
                units.count(_rounded(self.s_min_low)),
                units.count(_rounded(self.s_min_high)),
                "steps",
            ],
            ["b_crit", units.count(_rounded(self.b_crit)), _limit(self.b_crit_low), _limit(self.b_crit_high), "samples"],
        ]
        batches = ", ".join(units.count(one.batch) for one in self.points)
        note = f"S(B) = s_min (1 + b_crit / B), fitted to batches {batches}; points lie {units.percent(self.scatter)} off"
        return display.Table(
            columns=("", "value", "low", "high", "unit"),
            rows=rows,
            title="Critical batch",
            note="; ".join(filter(None, [note, self.advice])),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        return display.frame([{**self.to_json(), "points": len(self.points)}])

    plot = display.plot_method("critical_batch")

    def __repr__(self) -> str:
        return f"CriticalBatch(s_min={_rounded(self.s_min):g}, b_crit={_rounded(self.b_crit):g})"

    @functools.cached_property
    def _cloud(self) -> Fits:
        """Every b_crit that may be, with its likelihood."""
        centre = centre_of(self.points)
        return fits(self.points, grid_of(self.points, centre), centre)

    def _spread(self, new: float) -> Any:
        """Scale of the t distribution of the curve (new = 0) or of a measurement (1), for each b_crit."""
        count = self.degrees + 1 - PRIOR_WEIGHT
        return self._cloud.sigma * math.sqrt((count + PRIOR_WEIGHT) / self.degrees * (new + 1 / count))

    def _b_limits(self) -> tuple[float, float]:
        cloud = self._cloud
        total = np.cumsum(cloud.weight)
        tail = (1 - LEVEL) / 2
        low, high = (cloud.centre * math.exp(np.interp(share, total, cloud.log_b)) for share in (tail, 1 - tail))
        end = GRID // 20
        return (0.0 if total[end] > _EDGE else low), (math.inf if 1 - total[-end] > _EDGE else high)


def _check(points: Sequence[Point]) -> None:
    for one in points:
        if not (0 < one.batch < math.inf and 0 < one.steps < math.inf):
            raise ValueError(f"{one!r}: a batch and steps above 0 are wanted; a run that did not reach the target has reached=False")
    batches = sorted({one.batch for one in points if one.reached})
    if len(batches) < 2:
        there = f"reached at batch {units.count(batches[0])} only" if batches else "reached at no batch"
        raise ValueError(
            f"the law of steps against batch needs two batches at which the target is reached, better four, and it was {there}: "
            "try a target that is easier to reach, more steps, or other batches"
        )


def between(low: float, high: float) -> str:
    """Two numbers as a range."""
    return f"{_limit(low)}–{_limit(high)}"


def _limit(value: float) -> str:
    return "any" if math.isinf(value) else units.count(_rounded(value))


def _rounded(value: float) -> float:
    """Three significant digits, and no fraction from 10 on."""
    return (
        value
        if not value or not math.isfinite(value)
        else round(value, max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) < 10 else 0)
    )
