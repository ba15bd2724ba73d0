"""Fits an ensemble of scaling forms to a curve, and predicts throughput for numbers of processes that were not measured.

Each form is fitted to all points but the largest and weighed by its error there. The noise of the measurements, moved onto the points
again and again, gives the interval.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Literal

import numpy as np

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.scaling.analysis.curve.forms import (
    COMMUNICATION,
    FORMULAS_ARE,
    LINEAR,
    NAIVE,
    NOTHING,
    Data,
    Floats,
    Form,
    How,
    Kind,
    Law,
    at,
    forms,
    rates,
)
from workbench.scaling.analysis.curve.point import CONTRADICTION, CurveError, ScalingPoint, checked_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveForecast(display.Shown, JsonDataclass):
    """Predicted samples per second of all processes together."""

    world_size: int
    """Processes."""
    low: float
    """Lower end of the interval."""
    mid: float
    """The ensemble: the weighted geometric mean of all forms."""
    high: float
    """Upper end of the interval."""
    naive: float
    """Linear extrapolation: each process is as fast as in the largest measured point. As a rule a little too high."""
    linear: float
    """The law whose loss grows with every process, t = a + b(n−1); mostly too low. `naive` and it bracket most published curves."""
    extrapolation: float
    """Processes over those of the largest measured point; above 1 it is outside of what was seen."""
    efficiency: float
    """Predicted throughput per process over that of the smallest measured point."""
    base: int
    """Processes of that point."""
    level: float
    """How often the interval should hold what is measured, 0 … 1."""
    by_form: Mapping[str, float]
    """The prediction of each law alone."""
    narrow: tuple[str, ...] = ()
    """Measurements that would narrow the interval, the most useful first."""
    notes: tuple[str, ...] = ()
    """What to keep in mind."""
    unit: str = "samples"
    """As `ScalingCurve.unit`."""

    def __contains__(self, samples_per_sec: float) -> bool:
        return self.low <= samples_per_sec <= self.high

    @property
    def width(self) -> float:
        """Of the interval, as a fraction of the middle."""
        return (self.high - self.low) / self.mid

    @property
    def table(self) -> display.Table:
        """Three rows: the ensemble, the linear extrapolation, and the linear loss."""
        rows = [
            ["ensemble", *(units.rate(rate, self.unit) for rate in (self.mid, self.low, self.high)), units.percent(self.efficiency)],
            *(
                [name, units.rate(value, self.unit), units.MISSING, units.MISSING, units.percent(self.efficiency * value / self.mid)]
                for name, value in (("naive: as the last point", self.naive), ("loss with every process", self.linear))
            ),
        ]
        note = f"{units.percent(self.level)} interval; {times(self.extrapolation)} the largest number measured"
        advice = f"to narrow it: {'; '.join(self.narrow)}" if self.narrow else ""
        return display.Table(
            columns=("predicted", "throughput", "low", "high", f"efficiency (of {self.base})"),
            rows=rows,
            title=f"{_many(self.world_size)} processes",
            note=display.notes(filter(None, [note, *self.notes, advice])),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        left_out = ("by_form", "narrow", "notes", "unit")
        return display.frame([{name: value for name, value in asdict(self).items() if name not in left_out}])

    def __repr__(self) -> str:
        rates = ", ".join(f"{name}={units.rate(getattr(self, name), self.unit)}" for name in ("low", "mid", "high", "naive"))
        return f"CurveForecast({self.world_size}, {rates})"


def _many(size: float) -> str:
    """Whole below a million, then with a prefix, then as a power of ten."""
    if size < 1e6:
        return f"{size:,}"
    return units.count(size) if size < 1e18 else f"{size:.2e}"


def times(ratio: float) -> str:
    """A ratio as `units.times` has it, where it can be read."""
    return units.times(ratio) if ratio < 1e6 else f"{_many(ratio)}×"


ASSUMED_NOISE = 0.02
"""Standard deviation of a throughput without repeats; points of published curves lie 0.5 to 2.5 % off their trend (not outliers)."""
MIN_NOISE = 0.005
"""Least standard deviation that is taken from few repeats: two that happen to agree to the last digit prove nothing."""
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
    return max(MIN_NOISE, math.sqrt(pooled))


def last_point_error(form: Form, data: Data) -> float:
    """Predicted over measured throughput of the largest point, less 1, when fitted to all others; nan where too few are left."""
    others = Data(sizes=data.sizes[:-1], times=data.times[:-1], exposed=data.exposed[:-1], noise=data.noise)
    if len(others.sizes) < 2 or not form.fits(others):
        return math.nan
    return at(form.fit(others), data.sizes[-1]) * float(data.times[-1] / data.sizes[-1]) - 1


def law_weights(errors: list[float], noise: float) -> list[float]:
    """The larger the error of a law at the last point, the smaller its weight; what noise alone explains (√2 of it) does not count.

    A law that could not be tried has the average weight of those that were; if none could be tried, all weights are equal.
    """
    noise_error = math.sqrt(2) * noise
    tried = [1 / (error**2 + noise_error**2) for error in errors if not math.isnan(error)]
    average = sum(tried) / len(tried) if tried else 1.0
    raw = [average if math.isnan(error) else 1 / (error**2 + noise_error**2) for error in errors]
    return [weight / sum(raw) for weight in raw]


def refit_with_noise(ready: list[Form], data: Data, points: tuple[ScalingPoint, ...], noise: float) -> tuple[tuple[Law, ...], ...]:
    chance = np.random.default_rng(0)
    each = np.array([noise / math.sqrt(len(point.rates)) for point in points])
    shaken = [data.shaken(chance, each) for _ in range(DRAWS)]
    return tuple(tuple(form.fit(moved) for moved in shaken) for form in ready)


FAR_EXTRAPOLATION = 4.0
"""Extrapolation from which on a note warns: published curves are known to about twice their measured part."""


def too_few(points: tuple[ScalingPoint, ...]) -> str:
    """The error for a curve of fewer than two points."""
    if not points:
        return "the curve has no usable point: all are oversubscribed or have failed. Measure at two or more numbers of processes that fit"
    only = points[0]
    return (
        f"a curve of one point ({only.world_size} processes, {units.rate(only.samples_per_sec)}): how throughput changes with the number "
        f"of processes is not known from it. Measure {2 * only.world_size} processes as well; failed and oversubscribed points are not used"
    )


def check_possible(points: tuple[ScalingPoint, ...]) -> None:
    """Refuse points that no machine can produce; those of runs that differ in nothing else are noisy at worst.

    Raises:
        CurveError: throughput per process doubles from one point to the next.
    """
    for before, after in itertools.pairwise(points):
        if after.per_process > CONTRADICTION * before.per_process and not (before.of_one_spec and after.of_one_spec):
            more = units.times(after.per_process / before.per_process)
            raise CurveError(
                f"the points contradict each other: {before.world_size} processes reach {units.rate(before.samples_per_sec)} and "
                f"{after.world_size} reach {units.rate(after.samples_per_sec)}, {more} as much each. "
                "The throughput of all processes together is needed in every point, of one model, batch and precision"
            )


def notes(fit: "CurveFit", size: int) -> tuple[str, ...]:
    """Notes on a prediction for `size` processes."""
    largest = fit.points[-1].world_size
    notes = []
    if fit.slots and size > fit.slots:
        notes.append(f"assumes machines with a core (or GPU) for each of {size:,} processes; the measured one has {fit.slots:,}")
    if size / largest >= FAR_EXTRAPOLATION:
        notes.append(
            f"far outside of what was measured ({times(size / largest)} the largest): "
            "another switch, another algorithm of the collectives or a slow node are in no law"
        )
    if fit.points[-1].samples_per_sec < fit.points[0].samples_per_sec:
        one_spec = all(point.of_one_spec for point in fit.points)
        mixed = "if these are rates per process, multiply them by their number"
        slower = "what they do for each other costs more than they bring"
        notes.append(f"all processes together do less than the fewest did: {slower if one_spec else mixed}")
    if len(fit.points) == 2:
        notes.append(f"two points: {_through(fit)}, and none could be tried")
    if any(after.per_process > before.per_process * (1 + 2 * fit.noise) for before, after in itertools.pairwise(fit.points)):
        notes.append("throughput per process rises with their number somewhere: no law carries that on; look at batch sizes and caches")
    return tuple(notes)


def _through(fit: "CurveFit") -> str:
    """How many laws pass through all points."""
    count = sum(
        all(math.isclose(at(fitted.law, point.world_size), point.samples_per_sec, rel_tol=1e-6) for point in fit.points)
        for fitted in fit.fitted
    )
    if not count:
        return "no law passes through both"
    return "every law passes through both" if count == len(fit.fitted) else f"{count} of {len(fit.fitted)} laws pass through both"


def useful_measurements(fit: "CurveFit", size: int) -> tuple[str, ...]:
    """Measurements that would narrow the interval, the most useful first."""
    largest = fit.points[-1].world_size
    if size <= largest:
        return () if fit.noise_source != "assumed" else ("measure each point twice or more: the noise is an assumption",)
    laws = {fitted.form.name: fitted.law for fitted in fit.fitted}
    apart = {n: abs(math.log(at(laws[NAIVE], n) / at(laws[LINEAR], n))) for n in (2 * largest, size)}
    advice = []
    if size > 2 * largest and apart[size] > 2 * fit.noise:
        advice.append(
            f"measure {2 * largest} processes: the laws lie {units.percent(math.expm1(apart[2 * largest]))} apart there, "
            f"the noise of a measurement is {units.percent(fit.noise)}"
        )
    elif len(fit.points) == 2:
        advice.append("measure a third number of processes, so that each law can be tried on the last point")
    if COMMUNICATION not in laws:
        known = any(point.exposed is not None for point in fit.points)
        where = "two or more numbers of processes above 1" if known else "each point"
        advice.append(f"measure the exposed communication of {where} (steps with and without no_sync, interleaved)")
    if fit.noise_source == "assumed" or apart[size] <= 2 * fit.noise:
        advice.append(
            f"repeat each measurement: {'the noise is an assumption' if fit.noise_source == 'assumed' else 'noise is most of the interval'}"
        )
    return tuple(advice)


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
    """Its weight in the middle of a prediction; all weights sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFit(display.Shown):
    """The laws fitted to a curve, and their predictions for other numbers of processes. Get one from `ScalingCurve.fit`."""

    points: tuple[ScalingPoint, ...]
    """What was fitted: usable points by ascending number of processes."""
    kind: Kind
    """ "weak" or "strong"."""
    level: float
    """How often an interval should hold what is measured later, 0 … 1."""
    noise: float
    """Standard deviation of one measurement, as a fraction of it."""
    noise_source: Literal["repeats", "given", "assumed"]
    """Where it is from: repeats of a point, given to `fit`, or `ASSUMED_NOISE`."""
    fitted: tuple[FittedForm, ...]
    """The laws, the naive line first."""
    drawn: tuple[tuple[Law, ...], ...] = field(repr=False)
    """For each law of `fitted`, the same law fitted to points that noise has moved."""
    grows: How = NOTHING
    """What the processes do, as the curve says."""
    unit: str = "samples"
    """As `ScalingCurve.unit`."""
    slots: int | None = None
    """As `ScalingCurve.slots`."""

    @property
    def measured_noise(self) -> bool:
        """Whether the noise was measured from repeats."""
        return self.noise_source == "repeats"

    def predict(self, n: int) -> CurveForecast:
        """Throughput of `n` processes, with its interval, and the linear extrapolation beside it.

        The middle is the laws' weighted geometric mean. The interval holds their spread, the noise of the points, and that of the
        measurement to come, which has as much of it.

        Raises:
            CurveError: `n` is not a whole number of at least 1.
        """
        return self.forecasts([n])[0]

    def forecasts(self, sizes: Sequence[int]) -> list[CurveForecast]:
        """The prediction for each of several numbers of processes.

        Raises:
            CurveError: one is not a whole number of at least 1.
        """
        processes = np.array([float(checked_size(size)) for size in sizes])
        by_form = {fitted.form.name: rates(fitted.law, processes) for fitted in self.fitted}
        mids = np.exp(sum(fitted.weight * np.log(by_form[fitted.form.name]) for fitted in self.fitted))
        lows, highs = self._interval(processes)
        return [
            self._forecast(
                int(size), {name: float(values[i]) for name, values in by_form.items()}, *map(float, (lows[i], mids[i], highs[i]))
            )
            for i, size in enumerate(processes)
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
            narrow=useful_measurements(self, size),
            notes=notes(self, size),
            unit=self.unit,
        )

    def _interval(self, sizes: Floats) -> tuple[Floats, Floats]:
        """Quantiles over laws × noise, each law as often as its weight says; the same draws each time: no chance in a result."""
        chance = np.random.default_rng(1)
        values = np.stack([rates(law, sizes) for laws in self.drawn for law in laws])  # draw × size
        weights = np.repeat([fitted.weight for fitted in self.fitted], [len(laws) for laws in self.drawn])
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
        """The law that predicts the last point best; None where the points are too few."""
        scored = [fitted for fitted in self.fitted if not math.isnan(fitted.error)]
        return min(scored, key=lambda fitted: abs(fitted.error), default=None)

    @property
    def table(self) -> display.Table:
        """A row per law: its error at the largest point when fitted to the others, its weight, its prediction for twice as many."""
        largest = self.points[-1].world_size
        rows = [
            [
                fitted.form.name,
                fitted.form.words,
                units.MISSING if math.isnan(fitted.error) else f"{100 * fitted.error:+.1f} %",
                units.percent(fitted.weight),
                units.rate(at(fitted.law, 2 * largest), self.unit),
            ]
            for fitted in self.fitted
        ]
        return display.Table(
            columns=("law", FORMULAS_ARE[self.kind], f"error at {largest}, fitted without it", "weight", f"at {2 * largest} processes"),
            rows=rows,
            title=f"Laws of {self.kind} scaling, fitted to {len(self.points)} points",
            note=f"noise of a measurement {units.percent(self.noise)} ({_SOURCES[self.noise_source]})",
        )

    def to_frame(self) -> Any:
        """A DataFrame with a row per law."""
        return display.frame([{"law": fitted.form.name, "error": fitted.error, "weight": fitted.weight} for fitted in self.fitted])

    plot = display.plot_method("scaling")

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values: the points and how they were fitted; the rest follows from them."""
        noise = self.noise if self.noise_source == "given" else None
        how = {"kind": self.kind, "grows": self.grows.to_json(), "level": self.level, "noise": noise}
        return {"points": [point.to_json() for point in self.points], **how, "unit": self.unit, "slots": self.slots}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "CurveFit":
        points = tuple(ScalingPoint.from_json(point) for point in value["points"])
        how, unit = How.from_json(value.get("grows", {})), value.get("unit", "samples")
        return replace(fit(points, value["kind"], how, level=value["level"], noise=value["noise"], unit=unit), slots=value.get("slots"))

    def __repr__(self) -> str:
        return f"CurveFit({self.kind}, {len(self.points)} points, {len(self.fitted)} laws)"


def fit(
    points: tuple[ScalingPoint, ...],
    kind: Kind,
    how: How = NOTHING,
    *,
    level: float = 0.9,
    noise: float | None = None,
    unit: str = "samples",
) -> CurveFit:
    """Fit all laws. See `ScalingCurve.fit`.

    Raises:
        CurveError: fewer than two usable points of different size, points that contradict each other, or a level or noise outside of 0 … 1.
    """
    for name, value in (("level", level), ("noise", noise)):
        if value is not None and not (isinstance(value, Real) and 0 < value < 1):
            raise CurveError(f"{name}={value!r}: a fraction between 0 and 1 is needed, such as {0.9 if name == 'level' else ASSUMED_NOISE}")
    level, noise = float(level), None if noise is None else float(noise)
    if len(points) < 2:
        raise CurveError(too_few(points))
    check_possible(points)
    repeated = measured_noise(points)
    given = repeated if noise is None else noise
    spread = ASSUMED_NOISE if given is None else given
    data = data_of(points, spread)
    ready = [form for form in forms(kind, how) if form.fits(data)]
    errors = [last_point_error(form, data) for form in ready]
    laws = [form.fit(data) for form in ready]
    weights = law_weights(errors, spread)
    return CurveFit(
        points=points,
        kind=kind,
        level=level,
        noise=spread,
        noise_source="given" if noise is not None else "assumed" if repeated is None else "repeats",
        fitted=tuple(
            FittedForm(form=form, law=law, error=error, weight=weight)
            for form, law, error, weight in zip(ready, laws, errors, weights, strict=True)
        ),
        drawn=refit_with_noise(ready, data, points, spread),
        grows=how,
        unit=unit,
    )
