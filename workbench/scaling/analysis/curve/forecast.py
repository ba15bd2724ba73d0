"""CurveForecast: the throughput of a number of processes that a fitted curve predicts, with the naive line beside it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveForecast(display.Shown, JsonDataclass):
    """Predicted samples per second of all processes together."""

    world_size: int
    """Processes."""
    low: float
    """Lower end of the interval."""
    mid: float
    """What the laws say together."""
    high: float
    """Upper end of the interval."""
    naive: float
    """The naive line: each process goes on as in the largest measured point. As a rule a little too high."""
    linear: float
    """The law whose loss grows with every process, t = a + b(n−1); mostly too low. The naive line and it bracket most published curves."""
    extrapolation: float
    """Processes over those of the largest measured point; above 1 it is outside of what was seen."""
    efficiency: float
    """Predicted throughput per process over that of the smallest measured point."""
    base: int
    """Processes of that point."""
    level: float
    """How often the interval should hold what is measured, 0 … 1."""
    by_form: Mapping[str, float]
    """What each law says by itself."""
    narrow: tuple[str, ...] = ()
    """Measurements that would narrow the interval, the most useful first."""
    notes: tuple[str, ...] = ()
    """What to keep in mind."""

    def __contains__(self, samples_per_sec: float) -> bool:
        return self.low <= samples_per_sec <= self.high

    @property
    def width(self) -> float:
        """Of the interval, as a fraction of the middle."""
        return (self.high - self.low) / self.mid

    @property
    def table(self) -> display.Table:
        """Three rows: the laws together, the naive line, and the linear loss."""
        rows = [
            ["laws together", *(units.rate(one) for one in (self.mid, self.low, self.high)), units.percent(self.efficiency)],
            *(
                [name, units.rate(value), units.MISSING, units.MISSING, units.percent(self.efficiency * value / self.mid)]
                for name, value in (("naive: as the last point", self.naive), ("loss with every process", self.linear))
            ),
        ]
        note = f"{units.percent(self.level)} interval; {times(self.extrapolation)} the largest number measured"
        advice = f"to narrow it: {'; '.join(self.narrow)}" if self.narrow else ""
        return display.Table(
            columns=("predicted", "throughput", "low", "high", f"efficiency (of {self.base})"),
            rows=rows,
            title=f"{_many(self.world_size)} processes",
            note="; ".join(filter(None, [note, *self.notes, advice])),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        left_out = ("by_form", "narrow", "notes")
        return display.frame([{name: value for name, value in asdict(self).items() if name not in left_out}])

    def __repr__(self) -> str:
        rates = ", ".join(f"{name}={units.rate(getattr(self, name))}" for name in ("low", "mid", "high", "naive"))
        return f"CurveForecast({self.world_size}, {rates})"


def _many(size: float) -> str:
    """Whole below a million, then with a prefix, then as a power of ten."""
    if size < 1e6:
        return f"{size:,}"
    return units.count(size) if size < 1e18 else f"{size:.2e}"


def times(ratio: float) -> str:
    """A ratio as `units.times` has it, where it can be read."""
    return units.times(ratio) if ratio < 1e6 else f"{_many(ratio)}×"
