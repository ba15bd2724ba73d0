"""Schedule: the learning rate at each step of a run."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

from workbench.batch.analysis.scaled_lr import number
from workbench.core import units
from workbench.core.checks import whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(display.Shown, JsonDataclass):
    """A learning rate for each optimizer step."""

    steps: tuple[int, ...]
    """Consecutive numbers of optimizer steps."""
    lrs: tuple[float, ...]
    """The learning rate of each."""
    label: str = "learning rate"
    """Name in pictures."""
    batch: int | None = None
    """Samples per optimizer step over all ranks; None = not known."""
    end: str = ""
    """Why it ends early; "" = it does not."""

    def __post_init__(self) -> None:
        if not self.steps or len(self.steps) != len(self.lrs):
            given = f"{len(self.steps)} steps and {len(self.lrs)} learning rates"
            raise ValueError(f"a schedule of {given}: one rate per step, and at least one step")
        if self.batch is not None:
            whole_number("batch", self.batch, least=1, what="a whole number of samples per optimizer step", also=", or None")

    @property
    def peak(self) -> tuple[int, float]:
        """The first step with the highest learning rate, and that rate. Rates within a millionth of the highest are as high."""
        highest = max(self.lrs)
        return next((step, lr) for step, lr in zip(self.steps, self.lrs, strict=True) if lr >= highest * (1 - 1e-6))

    @property
    def warmup_steps(self) -> int:
        """Steps before the peak, if the learning rate never falls until then; else 0."""
        peak = self.steps.index(self.peak[0])
        return peak if all(a <= b for a, b in itertools.pairwise(self.lrs[: peak + 1])) else 0

    @property
    def constant(self) -> bool:
        """Is the learning rate the same throughout?"""
        return math.isclose(min(self.lrs), max(self.lrs), rel_tol=1e-6)

    @property
    def samples(self) -> tuple[int, ...] | None:
        """Samples before each step; None where the batch is not known."""
        return None if self.batch is None else tuple(step * self.batch for step in self.steps)

    @property
    def table(self) -> display.Table:
        """The first step, the peak and the last step."""
        step, lr = self.peak
        rows = (("first", self.steps[0], self.lrs[0]), ("peak", step, lr), ("last", self.steps[-1], self.lrs[-1]))
        notes = [f"warm-up of {number(self.warmup_steps)} steps" if self.warmup_steps else "no warm-up", self.end]
        return display.Table(
            columns=("", "step", "samples", "learning rate"),
            rows=[
                [name, number(at), units.count(None if self.batch is None else at * self.batch), number(rate)] for name, at, rate in rows
            ],
            title=f"Schedule: {self.label}",
            note=display.notes(note for note in notes if note),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per step."""
        samples = self.samples or (None,) * len(self.steps)
        rows = zip(self.steps, samples, self.lrs, strict=True)
        return display.frame(({"step": step, "samples": seen, "lr": lr} for step, seen, lr in rows), columns=("step", "samples", "lr"))

    plot = display.plot_method("schedule")

    def __repr__(self) -> str:
        return f"Schedule({len(self.steps)} steps, peak {number(self.peak[1])})"
