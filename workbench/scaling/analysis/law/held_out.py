"""HeldOut: a law fitted to small compute, held against the larger runs that it has not seen."""

import math
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.scaling.analysis.law.forecast import Forecast, flops


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
        return tuple(one.loss.mid / loss - 1 for one, loss in zip(self.forecasts, self.measured, strict=True))

    @property
    def error(self) -> float:
        """Mean size of the errors."""
        return sum(map(abs, self.errors)) / len(self.errors)

    @property
    def naive_error(self) -> float:
        """The same of the naive line, the best loss among the runs fitted."""
        off = [abs(one.naive / loss - 1) for one, loss in zip(self.forecasts, self.measured, strict=True)]
        return sum(off) / len(off)

    @property
    def covered(self) -> float:
        """Share of the runs whose loss lies in its interval."""
        return sum(loss in one.loss for one, loss in zip(self.forecasts, self.measured, strict=True)) / len(self.measured)

    @property
    def table(self) -> display.Table:
        """A row per run held out, by compute."""
        pairs = sorted(zip(self.forecasts, self.measured, self.errors, strict=True), key=lambda row: row[0].flops)
        rows = [
            [
                flops(one.flops),
                units.count(one.parameters),
                units.count(one.tokens),
                *one.loss.cells("{:.3f}".format),
                f"{loss:.3f}",
                f"{100 * error:+.1f} %",
            ]
            for one, loss, error in pairs
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
        if not all(math.isfinite(one.loss.high - one.loss.low) for one in self.forecasts):
            return f"{errors}; no intervals, for no drawings were asked for"
        return f"{errors}; {units.percent(self.covered)} inside their {units.percent(self.forecasts[0].level)} interval"

    def to_frame(self) -> Any:
        """A DataFrame with a row per run held out."""
        return display.frame(
            [
                {
                    "flops": one.flops,
                    "parameters": one.parameters,
                    "tokens": one.tokens,
                    "predicted": one.loss.mid,
                    "low": one.loss.low,
                    "high": one.loss.high,
                    "naive": one.naive,
                    "measured": loss,
                    "error": error,
                }
                for one, loss, error in zip(self.forecasts, self.measured, self.errors, strict=True)
            ]
        )

    def __repr__(self) -> str:
        return f"HeldOut({len(self.measured)} runs)"
