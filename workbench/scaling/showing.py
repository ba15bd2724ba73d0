"""Showing: a curve as a table and as rows for a DataFrame."""

import math
from typing import TYPE_CHECKING, Any

from workbench import display, units
from workbench.scaling.point import PROCESSES, ScalingPoint

if TYPE_CHECKING:
    from workbench.scaling.curve import ScalingCurve

KINDS = {
    "weak": "each process keeps its batch, the global one grows",
    "strong": "the global batch stays, each process gets a smaller part",
}


def table_of(curve: "ScalingCurve") -> display.Table:
    """One row per point; columns of which nothing is known are left out."""
    points = curve.points
    columns: dict[str, list[object]] = {
        "processes" if curve.over == PROCESSES else curve.over: [point.at for point in points],
        "throughput": [units.rate(point.samples_per_sec) for point in points],
        "90 % interval": [_between(point) for point in points],
    }
    if curve.over == PROCESSES or len(set(curve.world_sizes)) > 1:
        columns["per process"] = [units.rate(point.per_process) for point in points]
    columns["speedup"] = [units.times(one) for one in curve.speedup]
    if curve.over == PROCESSES:
        columns["efficiency"] = [units.percent(one) for one in curve.efficiency]
    if curve.over == PROCESSES or any(point.exposed is not None for point in points):
        columns["exposed"] = [units.percent(point.exposed) for point in points]
    if any(point.straggling is not None for point in points):
        columns["straggling"] = [units.percent(point.straggling) for point in points]
    if any(point.cpu_per_sample is not None for point in points):
        columns["CPU per sample"] = [units.seconds(point.cpu_per_sample) for point in points]
    columns[""] = [_said(point) for point in points]
    title = f"{curve.kind.capitalize()} scaling: {KINDS[curve.kind]}" if curve.over == PROCESSES else f"Throughput by {curve.over}"
    return display.Table(
        columns=tuple(columns), rows=[list(row) for row in zip(*columns.values(), strict=True)], title=title, note=_note(curve)
    )


def rows_of(curve: "ScalingCurve") -> list[dict[str, Any]]:
    """Plain values, one mapping per point."""
    return [
        {
            "world_size": point.world_size,
            **({} if curve.over == PROCESSES else {"value": point.at}),
            "samples_per_sec": point.samples_per_sec,
            "low": point.low,
            "high": point.high,
            "repeats": len(point.rates),
            "speedup": speedup,
            "efficiency": share,
            "exposed": _number(point.exposed),
            "straggling": _number(point.straggling),
            "cpu_per_sample": _number(point.cpu_per_sample),
            "oversubscribed": point.oversubscribed,
            "failed": point.failed,
        }
        for point, speedup, share in zip(curve.points, curve.speedup, curve.efficiency, strict=True)
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _between(point: ScalingPoint) -> str:
    return units.MISSING if math.isnan(point.low) else f"{units.rate(point.low)} … {units.rate(point.high)}"


def _note(curve: "ScalingCurve") -> str:
    if curve.base is None:
        base = "nothing was measured"
    elif curve.over == PROCESSES:
        base = f"speedup and efficiency: of {curve.base.at}"
    else:
        base = f"speedup: over {curve.over}={curve.base.at}"
    return "; ".join(["measured", base, *curve.notes])


def _said(point: ScalingPoint) -> str:
    """What is to be said of a point."""
    crowded = "oversubscribed: no scaling, left out of fits" if point.oversubscribed else ""
    apart = "repeats lie more than a factor of 2 apart: measure it again on a quieter machine" if point.unsteady else ""
    failed = f"{'a repeat ' if point.rates else ''}failed: {point.failed}" if point.failed else ""
    return "; ".join(filter(None, [crowded, apart, failed]))
