"""PlanProof: the predicted and the measured gain of a batch plan over the one it replaces.

`Gain` has the ratios, predicted or measured; `LossCurve` is the loss of one run against its samples.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from workbench.batch.analysis.plan import BatchPlan
from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The gain of one plan over another, as ratios, predicted or measured."""

    throughput: float = math.nan
    """Samples per second over those before; nan = not known."""
    samples: float = math.nan
    """Samples to the same loss over those before; nan = not known; infinite = not reached."""

    @property
    def time(self) -> float:
        """Seconds to the same loss over those before."""
        return self.samples / self.throughput

    def to_json(self) -> dict[str, float | str | None]:
        """The gain as plain JSON values; infinite is text."""
        return {name: _number_or_text(getattr(self, name)) for name in ("throughput", "samples")}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{name: _read(ratio) for name, ratio in value.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """The loss of one run against the samples it has trained on."""

    plan: str
    """"old" or "new"."""
    seed: int
    """Of model and data."""
    samples: tuple[int, ...]
    """Ends of the windows, ascending."""
    losses: tuple[float, ...]
    """Mean loss of each window."""
    samples_per_sec: float = math.nan
    """Of all ranks, warm-up left out."""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], window: float, *, plan: str, seed: int, samples_per_sec: float) -> "LossCurve":
        """From the metrics of a run, averaged over windows; a last window that is not half full is left out.

        Args:
            rows: with "step", "samples" (so far) and "loss".
            window: its samples, at least one step's.
            plan: "old" or "new".
            seed: seed of the run.
            samples_per_sec: samples per second of the run.
        """
        windows: dict[int, list[float]] = {}
        step = 0
        for row in rows:
            if "loss" in row:
                step = row["samples"] // row["step"]
                windows.setdefault(math.ceil(row["samples"] / window - 1e-9), []).append(row["loss"])
        full = {index: losses for index, losses in windows.items() if len(losses) * step >= window / 2}
        return cls(
            plan=plan,
            seed=seed,
            samples=tuple(round(index * window) for index in full),
            losses=tuple(sum(losses) / len(losses) for losses in full.values()),
            samples_per_sec=samples_per_sec,
        )

    @property
    def falling(self) -> list[tuple[float, float]]:
        """(Samples, loss) of isotonic regression: the least-squares curve that never rises (pool adjacent violators, Ayer and others 1955);
        a pool is at the middle of its samples. At its end that regression follows a single low value down (Woodroofe and Sun 1993), so
        the last pool has at least a tenth of the points.
        """
        pools: list[tuple[float, float, int]] = []  # sum of samples, sum of losses, points
        for seen, loss in zip(self.samples, self.losses, strict=True):
            pools.append((seen, loss, 1))
            while len(pools) > 1 and pools[-2][1] / pools[-2][2] <= pools[-1][1] / pools[-1][2]:
                _merge_last(pools)
        while len(pools) > 1 and pools[-1][2] < len(self.samples) / 10:
            _merge_last(pools)
        return [(samples / count, loss / count) for samples, loss, count in pools]

    def at(self, samples: float) -> float:
        """The loss on the falling curve after some samples; nan beyond the last point."""
        if not self.samples or samples > self.samples[-1]:
            return math.nan
        curve = self.falling
        right = next((place for place, (seen, _) in enumerate(curve) if seen >= samples), len(curve))
        if right in (0, len(curve)):
            return curve[min(right, len(curve) - 1)][1]
        (left, high), (seen, low) = curve[right - 1], curve[right]
        return low + (seen - samples) / (seen - left) * (high - low)

    def reaches(self, loss: float) -> float:
        """Samples after which the falling curve reaches a loss; infinite if it never does."""
        curve = self.falling
        right = next((place for place, (_, value) in enumerate(curve) if value <= loss), None)
        if right is None:
            return math.inf
        if right == 0:
            return curve[0][0]
        (left, high), (seen, low) = curve[right - 1], curve[right]
        return left + (high - loss) / (high - low) * (seen - left)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "plan": self.plan,
            "seed": self.seed,
            "samples": list(self.samples),
            "losses": [_number_or_text(loss) for loss in self.losses],
            "samples_per_sec": _number_or_text(self.samples_per_sec),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        read = {"samples": tuple(value["samples"]), "losses": tuple(map(_read, value["losses"]))}
        return cls(**{**value, **read, "samples_per_sec": _read(value["samples_per_sec"])})


def _merge_last(pools: list[tuple[float, float, int]]) -> None:
    last, before = pools.pop(), pools.pop()
    pools.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))


def _number_or_text(value: float) -> float | str | None:
    return None if math.isnan(value) else str(value) if math.isinf(value) else value


def _read(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


TOLERANCE = 0.25
"""A prediction that is further off did not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProof(display.Shown, JsonDataclass):
    """An old and a new plan, each run once with each seed; predicted and measured gain side by side."""

    old: BatchPlan
    """Before."""
    new: BatchPlan
    """After."""
    predicted: Gain
    """From the throughput curve and the noise scale."""
    samples: int
    """Samples of the old plan's runs, after which losses are compared."""
    courses: tuple[LossCurve, ...]
    """A curve per run; those of the new plan may be longer."""
    notes: tuple[str, ...] = ()
    """Remarks on the measurement."""

    def of(self, plan: str) -> list[LossCurve]:
        """The runs of one plan."""
        return [curve for curve in self.courses if curve.plan == plan]

    def mean(self, plan: str) -> LossCurve:
        """The mean curve of one plan over the seeds, as long as the shortest."""
        runs = self.of(plan)
        length = min(len(run.samples) for run in runs)
        return LossCurve(
            plan=plan,
            seed=runs[0].seed,
            samples=runs[0].samples[:length],
            losses=tuple(_mean([run.losses[place] for run in runs]) for place in range(length)),
            samples_per_sec=_mean([run.samples_per_sec for run in runs]),
        )

    @property
    def losses(self) -> tuple[float, float]:
        """Losses of the old and the new plan after the same samples, means over the seeds."""
        return self.mean("old").at(self.samples), self.mean("new").at(self.samples)

    @property
    def target(self) -> float:
        """The final loss of the old plan, mean over the seeds."""
        return self.losses[0]

    @property
    def spread(self) -> float:
        """Range of the final losses of the old plan's runs."""
        losses = [curve.at(self.samples) for curve in self.of("old")]
        return max(losses) - min(losses)

    @property
    def measured(self) -> Gain:
        """The measured gain; samples are those to the old plan's final loss."""
        old, new = self.mean("old"), self.mean("new")
        return Gain(throughput=new.samples_per_sec / old.samples_per_sec, samples=new.reaches(self.target) / old.reaches(self.target))

    @property
    def reached(self) -> bool:
        """Did the new plan reach the old plan's final loss?"""
        return math.isfinite(self.measured.samples)

    @property
    def gained(self) -> bool:
        """Did it reach that loss sooner?"""
        return self.reached and self.measured.time < 1

    @property
    def held(self) -> bool:
        """Was the predicted time right within TOLERANCE?"""
        return self.reached and abs(self.predicted.time / self.measured.time - 1) <= TOLERANCE

    @property
    def word(self) -> str:
        """The result, in a line."""
        if not self.reached:
            last = max(curve.samples[-1] for curve in self.of("new"))
            return f"the new plan did not reach the old one's loss of {self.target:.3g} within {last:,} samples: keep the old one"
        time = self.measured.time
        result = f"the old plan's loss of {self.target:.3g} is reached in {units.times(time)} the time"
        result += ": a gain" if self.gained else ": no gain"
        if math.isnan(self.predicted.time):
            return f"{result}; nothing was predicted"
        off = self.predicted.time / time - 1
        return f"{result}; predicted were {units.times(self.predicted.time)}, {units.percent(abs(off))} too {'slow' if off > 0 else 'fast'}"

    @property
    def table(self) -> display.Table:
        """Predicted beside measured."""
        pairs = [
            ("samples per second", "throughput"),
            ("samples to the old plan's loss", "samples"),
            ("time to the old plan's loss", "time"),
        ]
        measured = self.measured
        rows = [[name, _times(getattr(self.predicted, field)), _times(getattr(measured, field))] for name, field in pairs]
        old, new = self.losses
        losses = f"loss after {self.samples:,} samples: {old:.4g} with the old plan, {new:.4g} with the new one"
        losses += f" (runs of the old one are {self.spread:.2g} apart)" if len(self.of("old")) > 1 else ""
        return display.Table(
            columns=("new over old", "predicted", "measured"),
            rows=rows,
            title=f"From {_words(self.old)} to {_words(self.new)}",
            note="\n".join([self.word, losses, *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per window of each run."""
        return display.frame(
            {"plan": curve.plan, "seed": curve.seed, "samples": seen, "loss": loss}
            for curve in self.courses
            for seen, loss in zip(curve.samples, curve.losses, strict=True)
        )

    plot = display.plot_method("plan_proof")

    def __repr__(self) -> str:
        return f"PlanProof(batch {self.old.global_batch} to {self.new.global_batch})"


def _words(plan: BatchPlan) -> str:
    return f"{plan.micro_batch} × {plan.accumulation} × {plan.world_size} = {plan.global_batch}"


def _times(value: float) -> str:
    return "never" if math.isinf(value) else units.times(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
