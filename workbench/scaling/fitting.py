"""CurveFit: several laws held against one curve, each scored on the last point by the others, and what they say together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from workbench import display, units
from workbench.scaling import doubt, trying
from workbench.scaling.data import Kind, Law
from workbench.scaling.forecast import CurveForecast
from workbench.scaling.forms import FORMULAS_ARE, LINEAR, NAIVE, NOTHING, Form, at, forms, rates
from workbench.scaling.mechanisms import How
from workbench.scaling.point import CurveError, ScalingPoint, checked_size

if TYPE_CHECKING:
    import numpy as np

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
            narrow=doubt.narrowing(self, size),
            notes=doubt.notes(self, size),
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
            raise CurveError(f"{name}={value!r}: a fraction between 0 and 1 is wanted, such as {0.9 if name == 'level' else trying.NOISE}")
    level, noise = float(level), None if noise is None else float(noise)
    if len(points) < 2:
        raise CurveError(doubt.too_few(points))
    doubt.check_possible(points)
    told = trying.measured_noise(points)
    given = told if noise is None else noise
    spread = trying.NOISE if given is None else given
    data = trying.data_of(points, spread)
    ready = [form for form in forms(kind, how) if form.fits(data)]
    errors = [trying.foretold(form, data) for form in ready]
    laws = [form.fit(data) for form in ready]
    weights = trying.weights_of(errors, spread)
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
        drawn=trying.drawn(ready, data, points, spread),
        grows=how,
    )
