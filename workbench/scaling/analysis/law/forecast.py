"""What a law says: a number with its band, the loss of one run, the best use of a compute budget."""

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
    """Predicted: where a single run of this kind ends, its own luck included."""
    naive: float
    """The naive line: the best loss that was measured so far."""
    extrapolation: float
    """Its FLOPs over those of the largest run that the law was fitted to; above 1 it is outside of what was seen."""
    level: float
    """How often the band should hold what comes, 0 … 1."""
    notes: tuple[str, ...] = ()
    """What to keep in mind."""

    @property
    def table(self) -> display.Table:
        """Two rows: the law, and the naive line."""
        rows = [
            ["predicted by the law", *self.loss.cells(_three)],
            ["best so far (naive)", f"{self.naive:.3f}", units.MISSING, units.MISSING],
        ]
        what = f"{units.count(self.parameters)} parameters, {units.count(self.tokens)} tokens, {flops(self.flops)}"
        note = f"{units.percent(self.level)} interval; {against(self.extrapolation)} the compute of the largest run measured"
        return display.Table(
            columns=("", "loss", "low", "high"), rows=rows, title=f"Predicted loss: {what}", note="; ".join([note, *self.notes])
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
    """Of the model that a law thinks best."""
    tokens: Interval
    """To train it on."""
    loss: Interval
    """That the law then predicts, the luck of a single run left out."""
    naive: float
    """The best loss that was measured so far."""
    extrapolation: float
    """The budget over the FLOPs of the largest run that the law was fitted to."""
    level: float
    """Of the intervals, 0 … 1."""
    notes: tuple[str, ...] = ()
    """What to keep in mind; a "cannot tell" stands first."""

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
            note="; ".join([*self.notes, note]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with a row for parameters, tokens and loss."""
        return display.frame([{"what": name, **asdict(getattr(self, name))} for name in ("parameters", "tokens", "loss")])

    def __repr__(self) -> str:
        return f"Allocation({units.count(self.parameters.mid)} parameters, {units.count(self.tokens.mid)} tokens)"
