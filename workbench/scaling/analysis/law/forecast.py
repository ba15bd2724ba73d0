"""Results of a scaling law: Forecast of one run, Allocation of a compute budget, HeldOut test on larger runs."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.statistics import Interval


def flops(value: float) -> str:
    """A count of FLOPs as text, as papers write it: `5.76e+23 FLOPs`.

    >>> flops(5.76e23)
    '5.76e+23 FLOPs'
    """
    return f"{value:.3g} FLOPs"


def against(ratio: float) -> str:
    """A ratio, to be read before what it is a ratio to: `12.7×`, or `1/2,350 of` where `0.000×` would say nothing.

    >>> against(12.7), against(0.5), against(1 / 2350)
    ('12.7×', '0.500×', '1/2,350 of')
    """
    return units.times(ratio) if ratio > 0.1 else f"1/{units.times(1 / ratio).removesuffix('×')} of"


def _three(value: float) -> str:
    return f"{value:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(display.Shown, JsonDataclass):
    """The final loss that a law predicts for one run."""

    parameters: float
    """Of the model (N)."""
    tokens: float
    """It is trained on (D)."""
    flops: float
    """To train it."""
    loss: Interval
    """Predicted: where a single run of this kind ends, its random error included."""
    naive: float
    """The baseline: the best loss that was measured so far."""
    extrapolation: float
    """Its FLOPs over those of the largest run that the law was fitted to; above 1 it is outside of what was seen."""
    level: float
    """How often the band should hold what comes, 0 … 1."""
    notes: tuple[str, ...] = ()
    """Notes on the prediction."""

    @property
    def table(self) -> display.Table:
        """Two rows: the law, and the best loss so far."""
        rows = [
            ["predicted by the law", *self.loss.cells(_three)],
            ["best so far (naive)", f"{self.naive:.3f}", units.MISSING, units.MISSING],
        ]
        what = f"{units.count(self.parameters)} parameters, {units.count(self.tokens)} tokens, {flops(self.flops)}"
        note = f"{units.percent(self.level)} interval; {against(self.extrapolation)} the compute of the largest run measured"
        return display.Table(
            columns=("", "loss", "low", "high"), rows=rows, title=f"Predicted loss: {what}", note=display.notes([note, *self.notes])
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        loss = {"loss": self.loss.mid, "low": self.loss.low, "high": self.loss.high}
        own = {name: getattr(self, name) for name in ("parameters", "tokens", "flops", "naive", "extrapolation", "level")}
        return display.frame([{**own, **loss}])

    def __repr__(self) -> str:
        mid, low, high = self.loss.cells(_three)
        return f"Forecast({mid}, {low} … {high})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation(display.Shown, JsonDataclass):
    """The best use of a compute budget: how big a model, how much data."""

    flops: float
    """The budget."""
    parameters: Interval
    """Of the best model by the law."""
    tokens: Interval
    """To train it on."""
    loss: Interval
    """That the law then predicts, the random error of a single run left out."""
    naive: float
    """The best loss that was measured so far."""
    extrapolation: float
    """The budget over the FLOPs of the largest run that the law was fitted to."""
    level: float
    """Of the intervals, 0 … 1."""
    notes: tuple[str, ...] = ()
    """Notes; a "cannot tell" comes first."""

    @property
    def tokens_per_parameter(self) -> float:
        """D over N; about 20 in Hoffmann et al. 2022."""
        return self.tokens.mid / self.parameters.mid

    @property
    def table(self) -> display.Table:
        """Three rows: parameters, tokens, loss."""
        rows = [
            [name, *band.cells(show)]
            for name, band, show in (
                ("parameters", self.parameters, units.count),
                ("tokens", self.tokens, units.count),
                ("loss", self.loss, _three),
            )
        ]
        note = (
            f"{self.tokens_per_parameter:.3g} tokens per parameter; {units.percent(self.level)} intervals; "
            f"{against(self.extrapolation)} the compute of the largest run measured; best loss so far {self.naive:.3f}"
        )
        return display.Table(
            columns=("", "best", "low", "high"),
            rows=rows,
            title=f"Compute-optimal for {flops(self.flops)}",
            note=display.notes([*self.notes, note]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with a row for parameters, tokens and loss."""
        return display.frame([{"what": name, **asdict(getattr(self, name))} for name in ("parameters", "tokens", "loss")])

    def __repr__(self) -> str:
        return f"Allocation({units.count(self.parameters.mid)} parameters, {units.count(self.tokens.mid)} tokens)"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut(display.Shown, JsonDataclass):
    """Predicted beside measured, for runs larger than all that the law was fitted to."""

    limit: float
    """Most FLOPs of a run that the law was fitted to."""
    fitted: int
    """How many those were."""
    forecasts: tuple[Forecast, ...]
    """One for each run held out."""
    measured: tuple[float, ...]
    """Their losses."""

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted over measured, less 1."""
        return tuple(forecast.loss.mid / loss - 1 for forecast, loss in zip(self.forecasts, self.measured, strict=True))

    @property
    def error(self) -> float:
        """Mean size of the errors."""
        return sum(map(abs, self.errors)) / len(self.errors)

    @property
    def naive_error(self) -> float:
        """The same of the baseline, the best loss among the fitted runs."""
        off = [abs(forecast.naive / loss - 1) for forecast, loss in zip(self.forecasts, self.measured, strict=True)]
        return sum(off) / len(off)

    @property
    def covered(self) -> float:
        """Share of the runs whose loss is in its interval."""
        return sum(loss in forecast.loss for forecast, loss in zip(self.forecasts, self.measured, strict=True)) / len(self.measured)

    @property
    def table(self) -> display.Table:
        """A row per run held out, by compute."""
        pairs = sorted(zip(self.forecasts, self.measured, self.errors, strict=True), key=lambda row: row[0].flops)
        rows = [
            [
                flops(forecast.flops),
                units.count(forecast.parameters),
                units.count(forecast.tokens),
                *forecast.loss.cells("{:.3f}".format),
                f"{loss:.3f}",
                f"{100 * error:+.1f} %",
            ]
            for forecast, loss, error in pairs
        ]
        return display.Table(
            columns=("compute", "parameters", "tokens", "predicted", "low", "high", "measured", "error"),
            rows=rows,
            title="Held out: predicted from smaller runs, beside measured",
            note=f"law fitted to {self.fitted} runs of at most {flops(self.limit)}; {self.summary}",
        )

    @property
    def summary(self) -> str:
        """One line: the errors of the law and of the naive line, and how often the interval held."""
        errors = f"mean error {units.percent(self.error)}, naive {units.percent(self.naive_error)}"
        if not all(math.isfinite(forecast.loss.high - forecast.loss.low) for forecast in self.forecasts):
            return f"{errors}; no intervals, since no drawings were requested"
        return f"{errors}; {units.percent(self.covered)} inside their {units.percent(self.forecasts[0].level)} interval"

    def to_frame(self) -> Any:
        """A DataFrame with a row per run held out."""
        return display.frame(
            [
                {
                    "flops": forecast.flops,
                    "parameters": forecast.parameters,
                    "tokens": forecast.tokens,
                    "predicted": forecast.loss.mid,
                    "low": forecast.loss.low,
                    "high": forecast.loss.high,
                    "naive": forecast.naive,
                    "measured": loss,
                    "error": error,
                }
                for forecast, loss, error in zip(self.forecasts, self.measured, self.errors, strict=True)
            ]
        )

    def __repr__(self) -> str:
        return f"HeldOut({len(self.measured)} runs)"
