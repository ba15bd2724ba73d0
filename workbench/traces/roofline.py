"""Roofline: how many FLOPs and bytes each operator of a step takes, how fast it did them, and how fast the device could at best."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench import display, units
from workbench.codec import JsonDataclass
from workbench.device import Device
from workbench.traces.counting import Counted, RoofPoint
from workbench.traces.ops import SHOWN, short

GIVE = "give one: device=wb.Device(name=…, memory=…, bandwidth=…, flops_per_sec={'fp32': …}, source=…)"
"""What to do about a device that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline(display.Shown, JsonDataclass):
    """Where each operator stands under the roof of the device. Get one from `trace.roofline()`."""

    points: tuple[RoofPoint, ...]
    """Those that take longest first."""
    device: str | None
    """Name in the workbench's table of devices; None where it is not known."""
    bandwidth: float | None
    """Bytes per second of the device's memory, at best."""
    peaks: Mapping[str, float]
    """Number format → FLOP/s at best."""
    unaccounted: float | None
    """Fraction 0..1 of the operators' time in which nobody counts FLOPs; None where they take no time."""
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
        """What the numbers are."""
        roof = f"the roof is that of {self.device}" if self.device else "no roof: what the device can do is not known"
        return "; ".join([roof, f"{units.percent(self.unaccounted)} of the operators' time has no formula", *self.notes])

    @property
    def table(self) -> display.Table:
        """The first 15."""
        rows = []
        for one in self.points[:SHOWN]:
            reach = self.attainable(one)
            rows.append(
                [
                    f"{one.name.removeprefix('aten::')} {short(one.shapes)}",
                    one.dtype or units.MISSING,
                    units.seconds(one.seconds),
                    units.count(one.flops, "FLOP"),
                    units.count(one.intensity, "FLOP/B"),
                    units.count(one.flops_per_sec, "FLOP/s"),
                    self.bound(one) or units.MISSING,
                    units.percent(one.flops_per_sec / reach if reach else None),
                ]
            )
        columns = ("operator", "type", "seconds a step", "FLOPs", "intensity", "reached", "bound by", "of the roof")
        return display.Table(columns=columns, rows=rows, title="Operators under the roof, per step", note=self.caption)

    def to_frame(self) -> Any:
        """A DataFrame with one row per operator and shape; per step."""
        derived = ("intensity", "flops_per_sec")
        rows = [
            {**dataclasses.asdict(one), **{name: getattr(one, name) for name in derived}, "bound": self.bound(one)} for one in self.points
        ]
        return display.frame(rows, columns=[*(field.name for field in dataclasses.fields(RoofPoint)), *derived, "bound"])

    plot = display.plot_method("roofline")

    def __repr__(self) -> str:
        return f"Roofline({len(self.points)} operators, {self.device or 'an unknown device'})"


def roofline(counted: Counted, device: Device | None, notes: tuple[str, ...] = ()) -> Roofline:
    """Set what was counted under the roof of a device."""
    peaks = dict(device.flops_per_sec) if device else {}
    points = [dataclasses.replace(one, peak=peaks.get(one.dtype)) for one in counted.rows]
    return Roofline(
        points=tuple(sorted(points, key=lambda one: -one.seconds)),
        device=device.name if device else None,
        bandwidth=device.bandwidth if device else None,
        peaks=peaks,
        unaccounted=counted.unaccounted,
        notes=(*counted.notes, *notes, *_of_formats(points, device)),
    )


def _of_formats(points: list[RoofPoint], device: Device | None) -> list[str]:
    """What is to be said about number formats and peaks."""
    used = {one.dtype for one in points if one.matrix}
    said = []
    if device and "fp32" in used and "tf32" in device.flops_per_sec:
        said.append(
            f"fp32 is held against the peak without tensor cores: whether TF32 was allowed (up to "
            f"{units.count(device.flops_per_sec['tf32'], 'FLOP/s')}) a trace does not tell"
        )
    if device and (missing := sorted(one for one in used if one and one not in device.flops_per_sec)):
        said.append(f"{device.name} has no peak for {', '.join(missing)} in the table")
    return said


def known(device: "str | Device | None", names: tuple[str, ...]) -> tuple[Device | None, tuple[str, ...]]:
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
