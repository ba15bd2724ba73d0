"""Trying: the laws against a curve's own points: how noisy these are, how well each law foretells the last one, what noise does to each."""

import math

import numpy as np

from workbench.scaling.data import Data, Law
from workbench.scaling.forms import Form, at
from workbench.scaling.point import ScalingPoint

NOISE = 0.02
"""Standard deviation of a throughput where no repeats tell; points of published curves lie 0.5 to 2.5 % off their trend (not outliers)."""
QUIETEST = 0.005
"""Least standard deviation that few repeats are believed: two that happen to agree to the last digit prove nothing."""
DRAWS = 300
"""Resamples of the measurement noise behind an interval."""


def data_of(points: tuple[ScalingPoint, ...], noise: float) -> Data:
    """The points as columns."""
    return Data(
        sizes=np.array([float(point.world_size) for point in points]),
        times=np.array([1 / point.per_process for point in points]),
        exposed=np.array([math.nan if point.exposed is None else point.exposed for point in points]),
        noise=noise,
    )


def measured_noise(points: tuple[ScalingPoint, ...]) -> float | None:
    """Standard deviation of one measurement, from all repeats together; None without any."""
    repeated = [(point.spread, len(point.rates) - 1) for point in points if point.spread is not None]
    if not repeated:
        return None
    pooled = sum(spread**2 * freedom for spread, freedom in repeated) / sum(freedom for _, freedom in repeated)
    return max(QUIETEST, math.sqrt(pooled))


def foretold(form: Form, data: Data) -> float:
    """Predicted over measured throughput of the largest point, less 1, when fitted to all others; nan where too few are left."""
    others = data.without_last()
    if len(others.sizes) < 2 or not form.fits(others):
        return math.nan
    return at(form.fit(others), data.sizes[-1]) * float(data.times[-1] / data.sizes[-1]) - 1


def weights_of(errors: list[float], noise: float) -> list[float]:
    """The worse a law has foretold the last point, the less it counts; what noise alone would do to both sides (√2 of it) is no fault.

    A law that could not be tried counts as the average of those that were: without a trial, all the same.
    """
    floor = math.sqrt(2) * noise
    tried = [1 / (error**2 + floor**2) for error in errors if not math.isnan(error)]
    average = sum(tried) / len(tried) if tried else 1.0
    raw = [average if math.isnan(error) else 1 / (error**2 + floor**2) for error in errors]
    return [one / sum(raw) for one in raw]


def drawn(ready: list[Form], data: Data, points: tuple[ScalingPoint, ...], noise: float) -> tuple[tuple[Law, ...], ...]:
    chance = np.random.default_rng(0)
    each = np.array([noise / math.sqrt(len(point.rates)) for point in points])
    shaken = [data.shaken(chance, each) for _ in range(DRAWS)]
    return tuple(tuple(form.fit(one) for one in shaken) for form in ready)
