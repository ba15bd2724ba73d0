"""Compares the speed of each operator, and of the whole step (MFU), with what the device could do at best."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.device import Device
from workbench.core.display import table as display
from workbench.traces.analysis.flops import FlopCounts, RoofPoint
from workbench.traces.analysis.operators import SHOWN, short_name

GIVE = "give one: device=wb.Device(name=…, memory=…, bandwidth=…, flops_per_sec={'fp32': …}, source=…)"
"""What to do about a device that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline(display.Shown, JsonDataclass):
    """The speed of each operator compared with the limits of the device. Get it from `trace.roofline()`."""

    points: tuple[RoofPoint, ...]
    """Those that take longest first."""
    device: str | None
    """Name in the workbench's table of devices; None where it is not known."""
    bandwidth: float | None
    """Bytes per second of the device's memory, at best."""
    peaks: Mapping[str, float]
    """Number format → FLOP/s at best."""
    unaccounted: float | None
    """Fraction 0..1 of the operators' time without a FLOP formula; None where they take no time."""
    notes: tuple[str, ...] = ()

    def attainable(self, point: RoofPoint) -> float | None:
        """FLOP/s that the device could do at this intensity: the lower of its peak and intensity × bandwidth."""
        if point.peak is None or self.bandwidth is None or point.intensity is None:
            return None
        return min(point.peak, point.intensity * self.bandwidth)

    def bound(self, point: RoofPoint) -> str:
        """ "compute" or "memory", whichever part of the roof is above it; "" where the roof is not known."""
        reach = self.attainable(point)
        return "" if reach is None else "compute" if reach == point.peak else "memory"

    @property
    def caption(self) -> str:
        """What the numbers mean."""
        roof = f"the roof is that of {self.device}" if self.device else "no roof: what the device can do is not known"
        return display.notes([roof, f"{units.percent(self.unaccounted)} of the operators' time has no formula", *self.notes])

    @property
    def table(self) -> display.Table:
        """The first 15."""
        rows = []
        for point in self.points[:SHOWN]:
            reach = self.attainable(point)
            rows.append(
                [
                    f"{point.name.removeprefix('aten::')} {short_name(point.shapes)}",
                    point.dtype or units.MISSING,
                    units.seconds(point.seconds),
                    units.count(point.flops, "FLOP"),
                    units.count(point.intensity, "FLOP/B"),
                    units.count(point.flops_per_sec, "FLOP/s"),
                    self.bound(point) or units.MISSING,
                    units.percent(point.flops_per_sec / reach if reach else None),
                ]
            )
        columns = ("operator", "type", "seconds a step", "FLOPs", "intensity", "reached", "bound by", "of the roof")
        return display.Table(columns=columns, rows=rows, title="Operators under the roof, per step", note=self.caption)

    def to_frame(self) -> Any:
        """A DataFrame with one row per operator and shape; per step."""
        derived = ("intensity", "flops_per_sec")
        rows = [
            {**dataclasses.asdict(point), **{name: getattr(point, name) for name in derived}, "bound": self.bound(point)}
            for point in self.points
        ]
        return display.frame(rows, columns=[*(field.name for field in dataclasses.fields(RoofPoint)), *derived, "bound"])

    plot = display.plot_method("roofline")

    def __repr__(self) -> str:
        return f"Roofline({len(self.points)} operators, {self.device or 'an unknown device'})"


def roofline(counts: FlopCounts, device: Device | None, notes: tuple[str, ...] = ()) -> Roofline:
    """Compare counted FLOPs with the limits of a device."""
    peaks = dict(device.flops_per_sec) if device else {}
    points = [dataclasses.replace(point, peak=peaks.get(point.dtype)) for point in counts.rows]
    return Roofline(
        points=tuple(sorted(points, key=lambda point: -point.seconds)),
        device=device.name if device else None,
        bandwidth=device.bandwidth if device else None,
        peaks=peaks,
        unaccounted=counts.unaccounted,
        notes=(*counts.notes, *notes, *_format_notes(points, device)),
    )


def _format_notes(points: list[RoofPoint], device: Device | None) -> list[str]:
    """Remarks about number formats and peaks."""
    used = {point.dtype for point in points if point.matrix}
    remarks = []
    if device and "fp32" in used and "tf32" in device.flops_per_sec:
        remarks.append(
            f"fp32 is compared with the peak without tensor cores: whether TF32 was allowed (up to "
            f"{units.count(device.flops_per_sec['tf32'], 'FLOP/s')}) a trace does not tell"
        )
    if device and (missing := sorted(dtype for dtype in used if dtype and dtype not in device.flops_per_sec)):
        remarks.append(f"{device.name} has no peak for {', '.join(missing)} in the table")
    return remarks


def known_device(device: "str | Device | None", names: tuple[str, ...]) -> tuple[Device | None, tuple[str, ...]]:
    """The device that is meant, and why it is not known.

    Args:
        device: itself, its name, or None = the one of the trace.
        names: of the devices that the trace lists.

    Raises:
        ValueError: a name was given that is not in the table, or something else.
    """
    if isinstance(device, Device):
        return device, ()
    if isinstance(device, str):
        return Device.named(device), ()
    if device is not None:
        raise ValueError(f"device={device!r}: allowed are a name such as 'H100-SXM', a wb.Device, or None for the device of the trace")
    if not names:
        return None, (f"the trace is of a CPU, or lists no device, and what that can do at best is in no table: {GIVE}",)
    try:
        return Device.named(names[0]), ()
    except ValueError:
        return None, (f"what {names[0]} can do at best is in no table here: {GIVE}",)


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
    """Fraction 0..1 of the operators' time without a FLOP formula; None where they take no time."""
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
        note = display.notes(self.notes) or None
        return display.Table(columns=("what", "per step"), rows=rows, title=f"MFU on {self.device or 'an unknown device'}", note=note)

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        derived = {"flops_per_sec": self.flops_per_sec, "mfu": self.value}
        return display.frame([{**{k: v for k, v in dataclasses.asdict(self).items() if k != "notes"}, **derived}])

    def __repr__(self) -> str:
        return f"Mfu({units.percent(self.value) if self.value is not None else 'not known'})"


def mfu(roof: Roofline, step_seconds: float) -> Mfu:
    """FLOPs / peak, summed over the number formats, over the step's time.

    Source of the figure: Chowdhery et al., PaLM, 2022, appendix B. There FLOPs are those the model needs; a trace has those that were done,
    so that with activation checkpointing (what is computed again) this is hardware FLOPs utilization, and higher.
    """
    points = [point for point in roof.points if point.matrix]
    ideal = (
        math.fsum(point.flops / point.peak for point in points if point.peak) if points and all(point.peak for point in points) else None
    )
    remarks = ["from a traced step, which the profiler slows down", "what checkpointing computes again is in it"] if points else []
    return Mfu(
        flops=math.fsum(point.flops for point in points) if points else None,
        step_seconds=step_seconds,
        ideal_seconds=ideal,
        device=roof.device,
        unaccounted=roof.unaccounted,
        notes=(*remarks, *roof.notes),
    )
