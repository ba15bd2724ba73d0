"""MFU: the FLOPs of a traced step over what the device could have done meanwhile."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from workbench import display, units
from workbench.codec import JsonDataclass
from workbench.traces.roofline import Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Mfu(display.Shown, JsonDataclass):
    """Model FLOPs utilization of the traced step: the FLOPs of its operators over what the device could have done meanwhile."""

    flops: float | None
    """Per step, of products of matrices, convolutions and attention; None where the trace has none of known shape."""
    step_seconds: float
    ideal_seconds: float | None
    """In which the device could do them at its peak, each in its own number format; None where a peak is not known."""
    device: str | None
    unaccounted: float | None
    """Fraction 0..1 of the operators' time in which nobody counts FLOPs; None where they take no time."""
    notes: tuple[str, ...] = ()

    @property
    def flops_per_sec(self) -> float | None:
        """Reached over the whole step; None without FLOPs or a step."""
        return self.flops / self.step_seconds if self.step_seconds and self.flops is not None else None

    @property
    def value(self) -> float | None:
        """Fraction 0..1; None where the device's peak is not known."""
        return None if self.ideal_seconds is None or not self.step_seconds else self.ideal_seconds / self.step_seconds

    def __float__(self) -> float:
        return float("nan") if self.value is None else self.value

    @property
    def table(self) -> display.Table:
        """FLOPs, time, rate and MFU."""
        rows = [
            ["FLOPs per step", units.count(self.flops, "FLOP")],
            ["traced step", units.seconds(self.step_seconds)],
            ["reached", units.count(self.flops_per_sec, "FLOP/s")],
            ["at the peak it would take", units.seconds(self.ideal_seconds)],
            ["MFU", units.percent(self.value) if self.value is not None else "not known"],
        ]
        note = "; ".join(self.notes) or None
        return display.Table(columns=("what", "per step"), rows=rows, title=f"MFU on {self.device or 'an unknown device'}", note=note)

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        derived = {"flops_per_sec": self.flops_per_sec, "mfu": self.value}
        return display.frame([{**{k: v for k, v in dataclasses.asdict(self).items() if k != "notes"}, **derived}])

    def __repr__(self) -> str:
        return f"Mfu({units.percent(self.value) if self.value is not None else 'not known'})"


def mfu(found: Roofline, step_seconds: float) -> Mfu:
    """FLOPs / peak, summed over the number formats, over the step's time.

    Source of the figure: Chowdhery et al., PaLM, 2022, appendix B. There FLOPs are those the model needs; a trace has those that were done,
    so that with activation checkpointing (what is computed again) this is hardware FLOPs utilization, and higher.
    """
    points = [one for one in found.points if one.matrix]
    ideal = math.fsum(one.flops / one.peak for one in points if one.peak) if points and all(one.peak for one in points) else None
    said = ["from a traced step, which the profiler slows down", "what checkpointing computes again is in it"] if points else []
    return Mfu(
        flops=math.fsum(one.flops for one in points) if points else None,
        step_seconds=step_seconds,
        ideal_seconds=ideal,
        device=found.device,
        unaccounted=found.unaccounted,
        notes=(*said, *found.notes),
    )
