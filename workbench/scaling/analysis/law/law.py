"""ScalingLaw: L(N, D) = E + A/N^α + B/D^β through measured runs, with intervals, and what it predicts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.statistics import Interval
from workbench.scaling.analysis.law import identifiability
from workbench.scaling.analysis.law.fit import DELTA, Columns, Five, best, bootstrap, check_options, exponent, losses, optimum
from workbench.scaling.analysis.law.forecast import Allocation, Forecast, HeldOut, flops
from workbench.scaling.analysis.law.points import MIN_POINTS, Points, PointsError, points_of, positive, read_points

PARTS = ("E", "A", "B")
"""Numbers that the table shows as 0 where they are negligible: the fit works in logarithms, and finds 1e-7 where a part is not needed."""


FLOPS_PER = 6.0
"""Training FLOPs per parameter and token: 2 in the forward, 4 in the backward (Kaplan et al. 2020). Attention over the context and
recomputation are left out, and the embedding's parameters, which multiply nothing, are counted."""
NAMES = ("E", "A", "B", "alpha", "beta")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLaw(display.Shown, JsonDataclass):
    """A law of the final loss of a model with N parameters trained on D tokens: E + A/N^α + B/D^β (Hoffmann et al. 2022).

    E is the irreducible loss, A/N^α the loss from too small a model, B/D^β the loss from too little data.
    """

    E: float
    """Irreducible loss, in the unit of the points' loss."""
    A: float
    """With alpha: the part that size takes away."""
    B: float
    """With beta: the part that data take away."""
    alpha: float
    """Exponent of the parameters."""
    beta: float
    """Exponent of the tokens."""
    wanted: int = 200
    """Drawings that were requested."""
    level: float = 0.9
    """Of all intervals, 0 … 1."""
    by: str = "pairs"
    """What was drawn: "pairs" = each point by itself, "run" = all points of a run together."""
    delta: float = DELTA
    """Of the Huber loss, in log loss."""
    flops_per: float = FLOPS_PER
    """Training FLOPs per parameter and token."""
    seed: int = 0
    """Of the drawings."""
    points: Points
    """What it was fitted to."""
    draws: tuple[Five, ...] = field(repr=False)
    """(E, A, B, alpha, beta) of each bootstrap drawing: every interval comes from them."""
    notes: tuple[str, ...] = ()
    """Notes on the points."""

    # --- how one is made

    @classmethod
    def fit(
        cls,
        points: Any,
        *,
        draws: int = 200,
        level: float = 0.9,
        by: str | None = None,
        flops_per: float = FLOPS_PER,
        delta: float = DELTA,
        seed: int = 0,
        notes: Sequence[str] = (),
    ) -> "ScalingLaw":
        """Fit the law to measured runs. Deterministic: the same points and seed give the same law.

        Args:
            points: rows of (parameters, tokens, loss), a DataFrame or a mapping with these columns, or the path of a CSV file. All losses
                must be of one kind, from runs that were trained to the end of their learning-rate schedule.
            draws: number of bootstrap samples for the intervals.
            level: level of the intervals, between 0 and 1.
            by: "pairs" resamples single points, "run" all points of a run together; None = "run" if a run has several points.
            flops_per: training FLOPs per parameter and token.
            delta: threshold of the Huber loss.
            seed: seed of the bootstrap.
            notes: notes on the points.

        Raises:
            PointsError: fewer than 5 points, only one size or one amount of data, a missing column, or a value that is not a number above
                0.
        """
        measured = read_points(points).check()
        if by is None:
            by = "run" if len(set(measured.run)) < len(measured) else "pairs"
        draws, level, seed = check_options(draws, level, by, seed)
        flops_per, delta = positive(flops_per, "flops_per"), positive(delta, "delta")
        columns = Columns.of(measured.parameters, measured.tokens, measured.loss)
        law = columns.outward(best(columns, delta=delta))
        drawn = bootstrap(measured, law, count=draws, by=by, seed=seed, delta=delta)
        options = {"wanted": draws, "level": level, "by": by, "delta": delta, "flops_per": flops_per, "seed": seed}
        return cls(**dict(zip(NAMES, law, strict=True)), **options, points=measured, draws=drawn, notes=tuple(notes))  # type: ignore[arg-type]

    @classmethod
    def from_runs(
        cls,
        runs: Iterable[Any],
        *,
        parameters: Mapping[str, float] | Sequence[float] | None = None,
        tokens_per_sample: float = 1.0,
        loss: str | None = None,
        **options: Any,
    ) -> "ScalingLaw":
        """Fit the law to finished runs of specs.

        Args:
            runs: finished runs of different models and numbers of steps.
            parameters: number of parameters of each run's model, in the order of the runs, or by task name; None = the figure "parameters"
                of the runs' evaluation.
            tokens_per_sample: tokens in a sample; 1 = the law counts samples.
            loss: name of the evaluation's figure that is the loss; None = the figure whose name ends in "loss", or else the mean training
                loss of the last tenth of the steps.
            **options: arguments of `fit`.

        Raises:
            PointsError: a run has no loss, or its parameters are not known; or as in `fit`.
        """
        points, notes = points_of(list(runs), parameters=parameters, tokens_per_sample=tokens_per_sample, loss=loss)
        return cls.fit(points, notes=(*notes, *options.pop("notes", ())), **options)

    # --- what it is

    @property
    def five(self) -> Five:
        """E, A, B, alpha, beta."""
        return self.E, self.A, self.B, self.alpha, self.beta

    @property
    def intervals(self) -> dict[str, Interval]:
        """Name → number with its interval."""
        columns = zip(*self.draws, strict=True) if self.draws else [()] * len(NAMES)
        return {name: self.band(mid, drawn) for name, mid, drawn in zip(NAMES, self.five, columns, strict=True)}

    @property
    def exponent(self) -> Interval:
        """a = β/(α+β): the best N grows as C^a, the best D as C^(1-a)."""
        return self.band(exponent(self.five), [exponent(five) for five in self.draws])

    @property
    def compute(self) -> tuple[float, ...]:
        """FLOPs of each point."""
        return self.points.compute(self.flops_per)

    @property
    def residuals(self) -> tuple[float, ...]:
        """log measured − log fitted loss of each point: 0.01 = the run ended 1 % above the law."""
        fitted = losses(self.five, self.points.parameters, self.points.tokens)
        return tuple(float(residual) for residual in np.log(self.points.loss) - np.log(fitted))

    @property
    def cannot_tell(self) -> tuple[str, ...]:
        """What these points do not determine, and which runs would; empty = the law may be used."""
        return identifiability.not_identified(
            self.points, self.intervals, self.exponent, draws=self.draws, wanted=self.wanted, residuals=self.residuals
        )

    @property
    def enough(self) -> bool:
        """Whether the points determine the law."""
        return not self.cannot_tell

    def band(self, mid: float, drawn: Iterable[float]) -> Interval:
        """A number with the interval that contains `level` of its bootstrap samples."""
        values = [value for value in drawn if math.isfinite(value)]
        if not values:
            return Interval(low=-math.inf, mid=mid, high=math.inf)
        low, high = np.percentile(values, [50 * (1 - self.level), 50 * (1 + self.level)])
        return Interval(low=float(min(low, mid)), mid=mid, high=float(max(high, mid)))

    # --- what it says

    def predict(self, parameters: float, tokens: float) -> Forecast:
        """Predict the final loss of a run, with the interval in which a single run should end.

        Args:
            parameters: number of parameters of the model.
            tokens: number of tokens that it is trained on.

        Raises:
            PointsError: not numbers above 0.
        """
        parameters, tokens = positive(parameters, "parameters"), positive(tokens, "tokens")
        budget = self.flops_per * parameters * tokens
        drawn = np.log([float(losses(five, parameters, tokens)) for five in self.draws])
        extrapolation = budget / max(self.compute)
        return Forecast(
            parameters=parameters,
            tokens=tokens,
            flops=budget,
            loss=self.band(float(losses(self.five, parameters, tokens)), np.exp(np.add.outer(drawn, self._scatter).ravel())),
            naive=min(self.points.loss),
            extrapolation=extrapolation,
            level=self.level,
            notes=(*self._warning, *identifiability.extrapolation_notes(parameters, tokens, extrapolation, self.points)),
        )

    def allocation(self, flops: float) -> Allocation:
        """The best use of a compute budget: N = G·(C/6)^a, D = (C/6)/N with a = β/(α+β), G = (αA/βB)^(1/(α+β)).

        Args:
            flops: training FLOPs to spend.

        Raises:
            PointsError: not a number above 0.
        """
        flops = positive(flops, "flops")
        work = flops / self.flops_per
        drawn = [optimum(five, work) for five in self.draws]
        parameters, tokens, loss = (self.band(mid, [place[i] for place in drawn]) for i, mid in enumerate(optimum(self.five, work)))
        extrapolation = flops / max(self.compute)
        return Allocation(
            flops=flops,
            parameters=parameters,
            tokens=tokens,
            loss=loss,
            naive=min(self.points.loss),
            extrapolation=extrapolation,
            level=self.level,
            notes=(*self._warning, *identifiability.extrapolation_notes(parameters.mid, tokens.mid, extrapolation, self.points)),
        )

    def held_out(self, fraction: float = 0.3, *, flops: float | None = None) -> HeldOut:
        """Fit to the smaller runs, predict the larger ones, and compare the predictions with the measurements.

        Args:
            fraction: fit to runs of at most this share of the largest run's compute.
            flops: instead, fit to runs of at most this many FLOPs.

        Raises:
            PointsError: too few runs are left on either side.
        """
        limit = flops if flops is not None else fraction * max(self.compute)
        small = [compute <= limit for compute in self.compute]
        if sum(small) < MIN_POINTS or all(small):
            raise PointsError(
                f"{sum(small)} of {len(small)} runs have at most {limit:.3g} FLOPs: at least {MIN_POINTS} are needed for the fit, and "
                f"at least one larger to hold out; the runs have {min(self.compute):.3g} … {max(self.compute):.3g} FLOPs"
            )
        fitted = self.refitted(self.points.where(small))
        rest = self.points.where(not fits for fits in small)
        forecasts = tuple(fitted.predict(n, d) for n, d in zip(rest.parameters, rest.tokens, strict=True))
        return HeldOut(limit=max(fitted.compute), fitted=len(fitted.points), forecasts=forecasts, measured=rest.loss)

    def refitted(self, points: Any) -> "ScalingLaw":
        """Fit other points in the same way.

        Raises:
            PointsError: as `fit` does.
        """
        options = {"draws": self.wanted, "level": self.level, "flops_per": self.flops_per, "delta": self.delta, "seed": self.seed}
        return ScalingLaw.fit(points, by=self.by, notes=self.notes, **options)  # type: ignore[arg-type]

    @property
    def _scatter(self) -> Any:
        """Residuals, as wide as those of points that the law was not fitted to: five numbers have followed these."""
        count = len(self.points)
        return np.asarray(self.residuals) * math.sqrt(count / max(1, count - 5))

    @property
    def _warning(self) -> tuple[str, ...]:
        return () if self.enough else (f"cannot tell: {self.cannot_tell[0]}",)

    # --- how it shows itself

    @property
    def table(self) -> display.Table:
        """A row for each of the five numbers, and for the exponents of the best size and the best amount of data."""
        size, negligible = self.exponent, 1e-5 * min(self.points.loss)
        rows = {**self.intervals, "N_opt ∝ C^": size, "D_opt ∝ C^": Interval(low=1 - size.high, mid=1 - size.mid, high=1 - size.low)}
        what = (
            f"fitted to {len(self.points)} runs of {len(self.points.sizes)} sizes, {min(self.compute):.2g} … {flops(max(self.compute))}; "
            f"{units.percent(self.level)} intervals from {len(self.draws)} drawings of {'points' if self.by == 'pairs' else 'runs'}; "
            f"typical residual {units.percent(float(np.median(np.abs(self.residuals))))}"
        )

        def show(name: str, value: float) -> str:
            return "0" if name in PARTS and value < negligible else f"{value:.4g}"

        warning = f"CANNOT TELL: {'; '.join(self.cannot_tell)}" if self.cannot_tell else ""
        return display.Table(
            columns=("", "fitted", "low", "high"),
            rows=[[name, *interval.cells(partial(show, name))] for name, interval in rows.items()],
            title="Loss = E + A/parameters^alpha + B/tokens^beta",
            note=display.notes(filter(None, [warning, what, *self.notes])),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per point: measured and fitted loss."""
        fitted = losses(self.five, self.points.parameters, self.points.tokens)
        rows = zip(self.points.rows, self.compute, fitted, self.residuals, strict=True)
        return display.frame(
            [
                {"parameters": n, "tokens": d, "flops": c, "loss": loss, "fitted": float(fit), "residual": off, "run": run}
                for (n, d, loss, run), c, fit, off in rows
            ]
        )

    plot = display.plot_method("scaling_law")

    def __repr__(self) -> str:
        return f"ScalingLaw(E={self.E:.3g}, alpha={self.alpha:.2f}, beta={self.beta:.2f}, {len(self.points)} runs)"
