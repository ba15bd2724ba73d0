"""PlanProof: a plan that was run beside the one it is to replace; what was predicted of it, and what was measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench import display, units
from workbench.batch.plan import BatchPlan
from workbench.batching.course import Course, Gain
from workbench.codec import JsonDataclass

TOLERANCE = 0.25
"""A prediction this far off did not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProof(display.Shown, JsonDataclass):
    """The old plan and the new one, run for the same samples, with each seed once; prediction and measurement side by side."""

    old: BatchPlan
    """Before."""
    new: BatchPlan
    """After."""
    predicted: Gain
    """From the throughput curve and the noise scale."""
    samples: int
    """Of the old plan's runs: where losses are compared."""
    courses: tuple[Course, ...]
    """Every run; those of the new plan may go on further."""
    notes: tuple[str, ...] = ()
    """What the measurement has to say about itself."""

    def of(self, plan: str) -> list[Course]:
        """The runs of one plan."""
        return [course for course in self.courses if course.plan == plan]

    def mean(self, plan: str) -> Course:
        """The runs of one plan as one: losses averaged over the seeds, where all have got to."""
        runs = self.of(plan)
        length = min(len(run.samples) for run in runs)
        return Course(
            plan=plan,
            seed=runs[0].seed,
            samples=runs[0].samples[:length],
            losses=tuple(_mean([run.losses[place] for run in runs]) for place in range(length)),
            samples_per_sec=_mean([run.samples_per_sec for run in runs]),
        )

    @property
    def losses(self) -> tuple[float, float]:
        """Of the old and the new plan after the same samples: means over the seeds."""
        return self.mean("old").at(self.samples), self.mean("new").at(self.samples)

    @property
    def target(self) -> float:
        """The loss that the old plan has reached in the end: mean over the seeds."""
        return self.losses[0]

    @property
    def spread(self) -> float:
        """How far the old plan's runs are apart in the end, in loss: largest less smallest."""
        found = [course.at(self.samples) for course in self.of("old")]
        return max(found) - min(found)

    @property
    def measured(self) -> Gain:
        """Throughput, and samples to the loss that the old plan has reached in the end."""
        old, new = self.mean("old"), self.mean("new")
        return Gain(throughput=new.samples_per_sec / old.samples_per_sec, samples=new.reaches(self.target) / old.reaches(self.target))

    @property
    def reached(self) -> bool:
        """Did the new plan come to the old plan's loss?"""
        return math.isfinite(self.measured.samples)

    @property
    def gained(self) -> bool:
        """Is the old plan's loss reached sooner?"""
        return self.reached and self.measured.time < 1

    @property
    def held(self) -> bool:
        """Was the prediction of the time right, as far as there was one, within TOLERANCE?"""
        return self.reached and abs(self.predicted.time / self.measured.time - 1) <= TOLERANCE

    @property
    def word(self) -> str:
        """How it went, in a line."""
        if not self.reached:
            last = max(course.samples[-1] for course in self.of("new"))
            return f"the new plan did not reach the old one's loss of {self.target:.3g} within {last:,} samples: keep the old one"
        time = self.measured.time
        said = f"the old plan's loss of {self.target:.3g} is reached in {units.times(time)} the time"
        said += ": a gain" if self.gained else ": no gain"
        if math.isnan(self.predicted.time):
            return f"{said}; nothing was predicted"
        off = self.predicted.time / time - 1
        return f"{said}; predicted were {units.times(self.predicted.time)}, {units.percent(abs(off))} too {'slow' if off > 0 else 'fast'}"

    @property
    def table(self) -> display.Table:
        """Predicted beside measured."""
        pairs = [
            ("samples per second", "throughput"),
            ("samples to the old plan's loss", "samples"),
            ("time to the old plan's loss", "time"),
        ]
        measured = self.measured
        rows = [[name, _times(getattr(self.predicted, one)), _times(getattr(measured, one))] for name, one in pairs]
        old, new = self.losses
        said = f"loss after {self.samples:,} samples: {old:.4g} with the old plan, {new:.4g} with the new one"
        said += f" (runs of the old one are {self.spread:.2g} apart)" if len(self.of("old")) > 1 else ""
        return display.Table(
            columns=("new over old", "predicted", "measured"),
            rows=rows,
            title=f"From {_words(self.old)} to {_words(self.new)}",
            note="\n".join([self.word, said, *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per point of each run."""
        return display.frame(
            {"plan": course.plan, "seed": course.seed, "samples": seen, "loss": loss}
            for course in self.courses
            for seen, loss in zip(course.samples, course.losses, strict=True)
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
