"""CurveFit: several laws held against one curve, each scored on the last point by the others, and what they say together.

Trying: the laws against a curve's own points: how noisy these are, how well each law foretells the last one, what noise does to each.

Doubt: what stands against a prediction of throughput, and which measurement would narrow its interval.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import numpy as np

from workbench.core import units
from workbench.core.display import table as display
from workbench.scaling.analysis.curve.forecast import CurveForecast, times
from workbench.scaling.analysis.curve.forms import (
    COMMUNICATION,
    FORMULAS_ARE,
    LINEAR,
    NAIVE,
    NOTHING,
    Data,
    Form,
    How,
    Kind,
    Law,
    at,
    forms,
    rates,
)
from workbench.scaling.analysis.curve.point import CONTRADICTION, CurveError, ScalingPoint, checked_size

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


FAR = 4.0
"""Extrapolation from which on it is said loudly: published curves are known to about twice their measured part."""


def too_few(points: tuple[ScalingPoint, ...]) -> str:
    """Why a curve of fewer than two points is not fitted."""
    if not points:
        return "the curve has no usable point: all are oversubscribed or have failed. Measure at two or more numbers of processes that fit"
    one = points[0]
    return (
        f"a curve of one point ({one.world_size} processes, {units.rate(one.samples_per_sec)}): how throughput changes with the number of "
        f"processes cannot be told from it. Measure {2 * one.world_size} processes as well; failed and oversubscribed points do not count"
    )


def check_possible(points: tuple[ScalingPoint, ...]) -> None:
    """Refuse points that no machine can have given; those of runs that differ in nothing else are noisy at worst.

    Raises:
        CurveError: throughput per process doubles from one point to the next.
    """
    for before, after in itertools.pairwise(points):
        if after.per_process > CONTRADICTION * before.per_process and not (before.of_one_spec and after.of_one_spec):
            more = units.times(after.per_process / before.per_process)
            raise CurveError(
                f"the points contradict each other: {before.world_size} processes reach {units.rate(before.samples_per_sec)} and "
                f"{after.world_size} reach {units.rate(after.samples_per_sec)}, {more} as much each. "
                "The throughput of all processes together is wanted in every point, of one model, batch and precision"
            )


def notes(fit: "CurveFit", size: int) -> tuple[str, ...]:
    """What to keep in mind about a prediction for `size` processes."""
    largest = fit.points[-1].world_size
    found = []
    if size / largest >= FAR:
        found.append(
            f"far outside of what was measured ({times(size / largest)} the largest): "
            "another switch, another algorithm of the collectives or a slow node are in no law"
        )
    if fit.points[-1].samples_per_sec < fit.points[0].samples_per_sec:
        mixed = "if these are rates per process, multiply them by their number"
        slower = "what they do for each other costs more than they bring"
        found.append(f"all processes together do less than the fewest did: {slower if _of_one_spec(fit) else mixed}")
    if len(fit.points) == 2:
        found.append(f"two points: {_through(fit)}, and none could be tried")
    if _rises(fit):
        found.append("throughput per process rises with their number somewhere: no law carries that on; look at batch sizes and caches")
    return tuple(found)


def _of_one_spec(fit: "CurveFit") -> bool:
    return all(point.of_one_spec for point in fit.points)


def _through(fit: "CurveFit") -> str:
    """How many laws pass through all points."""
    count = sum(
        all(math.isclose(at(one.law, point.world_size), point.samples_per_sec, rel_tol=1e-6) for point in fit.points) for one in fit.fitted
    )
    if not count:
        return "no law passes through both"
    return "every law passes through both" if count == len(fit.fitted) else f"{count} of {len(fit.fitted)} laws pass through both"


def _rises(fit: "CurveFit") -> bool:
    return any(after.per_process > before.per_process * (1 + 2 * fit.noise) for before, after in itertools.pairwise(fit.points))


def narrowing(fit: "CurveFit", size: int) -> tuple[str, ...]:
    """Measurements that would narrow the interval, the most useful first."""
    largest = fit.points[-1].world_size
    if size <= largest:
        return () if fit.noise_source != "assumed" else ("measure each point twice or more: the noise is an assumption",)
    laws = {one.form.name: one.law for one in fit.fitted}
    apart = {n: abs(math.log(at(laws[NAIVE], n) / at(laws[LINEAR], n))) for n in (2 * largest, size)}
    found = []
    if size > 2 * largest and apart[size] > 2 * fit.noise:
        found.append(
            f"measure {2 * largest} processes: the laws lie {units.percent(math.expm1(apart[2 * largest]))} apart there, "
            f"the noise of a measurement is {units.percent(fit.noise)}"
        )
    elif len(fit.points) == 2:
        found.append("measure a third number of processes, so that each law can be tried on the last point")
    if COMMUNICATION not in laws:
        known = any(point.exposed is not None for point in fit.points)
        where = "two or more numbers of processes above 1" if known else "each point"
        found.append(f"measure the exposed communication of {where} (steps with and without no_sync, interleaved)")
    if fit.noise_source == "assumed" or apart[size] <= 2 * fit.noise:
        found.append(
            f"repeat each measurement: {'the noise is an assumption' if fit.noise_source == 'assumed' else 'noise is most of the interval'}"
        )
    return tuple(found)


_SOURCES = {"repeats": "as repeats tell", "given": "as given", "assumed": "assumed: no point was measured twice"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedForm:
    """One law, fitted."""

    form: Form
    """Which."""
    law: Law
    """Processes → seconds per sample and process."""
    error: float
    """Predicted over measured of the largest point, less 1, when fitted to all others; nan where too few are left for it."""
    weight: float
    """Its part in the middle of a prediction; all together 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFit(display.Shown):
    """What a curve says of numbers of processes that were not measured. Get one from `ScalingCurve.fit`."""

    points: tuple[ScalingPoint, ...]
    """What was fitted: usable points by ascending number of processes."""
    kind: Kind
    """ "weak" or "strong"."""
    level: float
    """How often an interval should hold what is measured later, 0 … 1."""
    noise: float
    """Standard deviation of one measurement, as a fraction of it."""
    noise_source: Literal["repeats", "given", "assumed"]
    """Where it is from: told by repeats of a point, given to `fit`, or `trying.NOISE`, an assumption."""
    fitted: tuple[FittedForm, ...]
    """The laws, the naive line first."""
    drawn: tuple[tuple[Law, ...], ...] = field(repr=False)
    """For each law of `fitted`, the same law fitted to points that noise has moved."""
    grows: How = NOTHING
    """What the processes do, as the curve says."""

    @property
    def measured_noise(self) -> bool:
        """Was the noise told by repeats?"""
        return self.noise_source == "repeats"

    def predict(self, n: int) -> CurveForecast:
        """Throughput of `n` processes, with its interval, and the naive line beside it.

        The middle is the laws' weighted geometric mean. The interval holds their spread, the noise of the points, and that of the
        measurement to come, which has as much of it.

        Raises:
            CurveError: `n` is no whole number of at least 1.
        """
        return self.forecasts([n])[0]

    def forecasts(self, sizes: Sequence[int]) -> list[CurveForecast]:
        """The prediction for each of several numbers of processes.

        Raises:
            CurveError: one is no whole number of at least 1.
        """
        import numpy as np

        wanted = np.array([float(checked_size(size)) for size in sizes])
        said = {one.form.name: rates(one.law, wanted) for one in self.fitted}
        mids = np.exp(sum(one.weight * np.log(said[one.form.name]) for one in self.fitted))
        lows, highs = self._interval(wanted)
        return [
            self._forecast(int(size), {name: float(values[i]) for name, values in said.items()}, *map(float, (lows[i], mids[i], highs[i])))
            for i, size in enumerate(wanted)
        ]

    def _forecast(self, size: int, by_form: Mapping[str, float], low: float, mid: float, high: float) -> CurveForecast:
        return CurveForecast(
            world_size=size,
            low=min(low, mid),
            mid=mid,
            high=max(high, mid),
            naive=by_form[NAIVE],
            linear=by_form[LINEAR],
            extrapolation=size / self.points[-1].world_size,
            efficiency=mid / size / self.points[0].per_process,
            base=self.points[0].world_size,
            level=self.level,
            by_form=by_form,
            narrow=narrowing(self, size),
            notes=notes(self, size),
        )

    def _interval(self, sizes: "np.ndarray[Any, Any]") -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
        """Quantiles over laws × noise, each law as often as its weight says; the same draws each time: no chance in a result."""
        import numpy as np

        chance = np.random.default_rng(1)
        values = np.stack([rates(law, sizes) for laws in self.drawn for law in laws])  # draw × size
        weights = np.repeat([one.weight for one in self.fitted], [len(laws) for laws in self.drawn])
        values = values * np.exp(self.noise * chance.standard_normal(len(values)))[:, None]
        order = values.argsort(0)
        reached = weights[order].cumsum(0) / weights.sum()
        ends = []
        for share in ((1 - self.level) / 2, (1 + self.level) / 2):
            place = np.minimum((reached < share).sum(0), len(values) - 1)
            ends.append(np.take_along_axis(values, np.take_along_axis(order, place[None], 0), 0)[0])
        return ends[0], ends[1]

    @property
    def best(self) -> FittedForm | None:
        """The law that has foretold the last point best; None where the points are too few to tell."""
        scored = [one for one in self.fitted if not math.isnan(one.error)]
        return min(scored, key=lambda one: abs(one.error), default=None)

    @property
    def table(self) -> display.Table:
        """A row per law: how well it foretold the largest point from the others, its weight, its word on twice as many processes."""
        largest = self.points[-1].world_size
        rows = [
            [
                one.form.name,
                one.form.words,
                units.MISSING if math.isnan(one.error) else f"{100 * one.error:+.1f} %",
                units.percent(one.weight),
                units.rate(at(one.law, 2 * largest)),
            ]
            for one in self.fitted
        ]
        return display.Table(
            columns=(
                "law",
                FORMULAS_ARE[self.kind],
                f"error at {largest}, fitted without it",
                "weight",
                f"at {2 * largest} processes",
            ),
            rows=rows,
            title=f"Laws of {self.kind} scaling, fitted to {len(self.points)} points",
            note=f"noise of a measurement {units.percent(self.noise)} ({_SOURCES[self.noise_source]})",
        )

    def to_frame(self) -> Any:
        """A DataFrame with a row per law."""
        return display.frame([{"law": one.form.name, "error": one.error, "weight": one.weight} for one in self.fitted])

    plot = display.plot_method("scaling")

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values: the points and how they were fitted; the rest follows from them."""
        noise = self.noise if self.noise_source == "given" else None
        how = {"kind": self.kind, "grows": self.grows.to_json()}
        return {"points": [one.to_json() for one in self.points], **how, "level": self.level, "noise": noise}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "CurveFit":
        """Inverse of `to_json`."""
        points = tuple(ScalingPoint.from_json(one) for one in value["points"])
        return fit(points, value["kind"], How.from_json(value.get("grows", {})), level=value["level"], noise=value["noise"])

    def __repr__(self) -> str:
        return f"CurveFit({self.kind}, {len(self.points)} points, {len(self.fitted)} laws)"


def fit(points: tuple[ScalingPoint, ...], kind: Kind, how: How = NOTHING, *, level: float = 0.9, noise: float | None = None) -> CurveFit:
    """Fit all laws. See `ScalingCurve.fit`.

    Raises:
        CurveError: fewer than two usable points of different size, points that contradict each other, or a level or noise outside of 0 … 1.
    """
    for name, value in (("level", level), ("noise", noise)):
        if value is not None and not (isinstance(value, Real) and 0 < value < 1):
            raise CurveError(f"{name}={value!r}: a fraction between 0 and 1 is wanted, such as {0.9 if name == 'level' else NOISE}")
    level, noise = float(level), None if noise is None else float(noise)
    if len(points) < 2:
        raise CurveError(too_few(points))
    check_possible(points)
    told = measured_noise(points)
    given = told if noise is None else noise
    spread = NOISE if given is None else given
    data = data_of(points, spread)
    ready = [form for form in forms(kind, how) if form.fits(data)]
    errors = [foretold(form, data) for form in ready]
    laws = [form.fit(data) for form in ready]
    weights = weights_of(errors, spread)
    return CurveFit(
        points=points,
        kind=kind,
        level=level,
        noise=spread,
        noise_source="given" if noise is not None else "assumed" if told is None else "repeats",
        fitted=tuple(
            FittedForm(form=form, law=law, error=error, weight=weight)
            for form, law, error, weight in zip(ready, laws, errors, weights, strict=True)
        ),
        drawn=drawn(ready, data, points, spread),
        grows=how,
    )
