"""Scaling curves: throughput, or efficiency, over processes or any other knob; what was measured, what is foretold, and the naive line."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.display.axes import PALE, WIDTH, legend, prepared
from workbench.core.display.colors import INK, LINE
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.fit import CurveFit
from workbench.scaling.analysis.curve.forecast import CurveForecast
from workbench.scaling.analysis.curve.point import PROCESSES, ScalingPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes


REACH = 4
"""How far beyond the largest measured point the band is drawn, where nobody says: further it is mostly the laws' own differences."""
_DRAWN = 40
"""Numbers of processes at which the band is computed."""


def scaling(result: ScalingCurve | CurveFit, ax: Axes | None = None, *, to: int | None = None) -> Axes:
    """Throughput over processes, both logarithmic: points with the 90 % interval of their repeats, hollow where oversubscribed; beyond them
    the laws together with their interval, and dashed the naive line, on which each process goes on as in the last point. Dotted: perfect
    scaling from the smallest point. Triangles: what a point would reach if its exposed communication were hidden, where that was measured.

    A curve over another knob has its points only: there is no law.

    Args:
        result: a curve, or its fit; a curve of fewer than two usable points has no band.
        ax: where to draw; None = a new figure.
        to: processes to which the band is drawn; None = four times the largest measured.

    Raises:
        ValueError: no point of the curve was measured, or `to` is below the largest one.
    """
    if isinstance(result, ScalingCurve) and result.over != PROCESSES:
        return _by_knob(result, ax, to)
    from matplotlib.ticker import LogLocator, NullLocator

    ax = _draw(result, ax, to, lambda value, size: value)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    ax.yaxis.set_major_formatter(lambda value, _: units.count(value))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylabel("throughput (samples/s)")
    return ax


def scaling_efficiency(result: ScalingCurve | CurveFit, ax: Axes | None = None, *, to: int | None = None) -> Axes:
    """The same as efficiency in percent: throughput per process over that of the smallest measured point; perfect scaling lies at 100 %.

    Args:
        result: as in `scaling`.
        ax: as there.
        to: as there.

    Raises:
        ValueError: as there, or a curve over another knob than the processes.
    """
    if isinstance(result, ScalingCurve) and result.over != PROCESSES:
        raise ValueError(f"a curve over {result.over} has no efficiency, which is throughput per process: draw plot.scaling(curve)")
    base = _base(_points(result)).per_process
    ax = _draw(result, ax, to, lambda value, size: 100 * value / size / base)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("efficiency (%)")
    return ax


Shown = Callable[[float, int], float]
"""What is drawn of a throughput and its number of processes."""
Place = Callable[[ScalingPoint], float]
"""Where on the axis."""
HIDDEN = "if communication were hidden"


def _draw(result: ScalingCurve | CurveFit, ax: Axes | None, to: int | None, shown: Shown) -> Axes:
    points = _points(result)
    base, largest = _base(points), max(point.world_size for point in points if point.rates)
    fit = result if isinstance(result, CurveFit) else result.fit() if len(result.usable) > 1 else None
    end = to if to is not None else REACH * largest if fit is not None else largest
    if end < largest:
        raise ValueError(f"to={to!r}: the largest measured point has {largest} processes; give at least as many, or None")
    end = max(end, 2 * base.world_size)  # one point alone has no width
    ax = prepared(ax, WIDTH, 4.0)
    ends = (base.world_size, end)
    perfect = [shown(size * base.per_process, size) for size in ends]
    ax.plot(ends, perfect, color=INK, linestyle=":", linewidth=1.2, label="perfect")
    if fit is not None and end > fit.points[-1].world_size:
        _foretold(ax, fit, end, shown)
    _measured(ax, points, shown)
    _hidden(ax, points, shown)
    ax.set_xscale("log", base=2)
    ticks = _ticks(base.world_size, end)
    ax.set_xticks(ticks, [units.count(tick) for tick in ticks])
    ax.minorticks_off()
    ax.grid(axis="y", color=INK, alpha=0.18, linewidth=0.8)
    ax.set_xlabel("processes")
    handles, labels = ax.get_legend_handles_labels()
    legend(ax, [handle for handle, label in zip(handles, labels, strict=True) if not label.startswith("_")])
    return ax


def _foretold(ax: Axes, fit: CurveFit, end: int, shown: Shown) -> None:
    start = fit.points[-1].world_size
    steps = (start * (end / start) ** (i / (_DRAWN - 1)) for i in range(_DRAWN))
    sizes = sorted({max(1, round(step)) for step in steps} | {start, end})
    found = fit.forecasts(sizes)

    def line(of: Callable[[CurveForecast], float]) -> list[float]:
        return [shown(of(one), one.world_size) for one in found]

    band = f"{units.percent(fit.level)} interval"
    ax.fill_between(sizes, line(lambda one: one.low), line(lambda one: one.high), color=LINE, alpha=PALE / 2, linewidth=0, label=band)
    ax.plot(sizes, line(lambda one: one.mid), color=LINE, linewidth=1.8, label="laws together")
    ax.plot(sizes, line(lambda one: one.naive), color=INK, linestyle="--", linewidth=1.4, label="naive: as the last point")


def _measured(ax: Axes, points: Sequence[ScalingPoint], shown: Shown, place: Place = operator.attrgetter("world_size")) -> None:
    for words, crowded in (("measured", False), ("oversubscribed: no scaling", True)):
        some = [point for point in points if point.rates and point.oversubscribed == crowded]
        if not some:
            continue
        values = [shown(point.samples_per_sec, point.world_size) for point in some]
        arms = [
            [_arm(value, shown(edge(point), point.world_size)) for point, value in zip(some, values, strict=True)] for edge in (_low, _high)
        ]
        ax.errorbar(
            [place(point) for point in some],
            values,
            yerr=arms,
            linestyle="none",
            marker="o",
            markersize=6,
            color=LINE,
            markerfacecolor="none" if crowded else LINE,
            capsize=3,
            label=words,
        )
    for point in points:
        if not point.rates:
            ax.plot(place(point), 0.02, marker="x", color=INK, transform=ax.get_xaxis_transform(), linestyle="none")
            ax.annotate("failed", (place(point), 0.05), xycoords=("data", "axes fraction"), ha="center", fontsize=8.5, color=INK)


def _hidden(ax: Axes, points: Sequence[ScalingPoint], shown: Shown) -> None:
    """What points would reach without the part of the step that is nothing but communication."""
    some = [point for point in points if point.rates and point.exposed and not point.oversubscribed]
    if some:
        sizes = [point.world_size for point in some]
        values = [shown(point.samples_per_sec / (1 - (point.exposed or 0)), point.world_size) for point in some]
        ax.plot(sizes, values, linestyle="none", marker="^", markersize=6, color=INK, markerfacecolor="none", label=HIDDEN)


def _by_knob(curve: ScalingCurve, ax: Axes | None, to: int | None) -> Axes:
    """Throughput over the values of a knob; texts stand side by side."""
    if to is not None:
        raise ValueError(f"to={to!r}: a curve over {curve.over} has no law that could be drawn beyond its points; leave it out")
    _base(curve.points)
    ax = prepared(ax, WIDTH, 4.0)
    numbers = all(not isinstance(value, str) for value in curve.values)
    places = {value: value if numbers else place for place, value in enumerate(curve.values)}
    _measured(ax, curve.points, lambda value, _: value, lambda point: places[point.at])
    if numbers and min(curve.values) > 0 and max(curve.values) >= 4 * min(curve.values):
        ax.set_xscale("log", base=2)
    ax.set_xticks(list(places.values()), [units.count(value) if numbers else str(value) for value in places])
    ax.minorticks_off()
    ax.set_ylim(0, 1.08 * max(rate for point in curve.points for rate in point.rates))
    if not numbers:
        ax.set_xlim(-0.5, len(places) - 0.5)
    ax.grid(axis="y", color=INK, alpha=0.18, linewidth=0.8)
    ax.set_xlabel(curve.over)
    ax.set_ylabel("throughput (samples/s)")
    legend(ax, list(ax.get_legend_handles_labels()[0]))
    return ax


def _low(point: ScalingPoint) -> float:
    return point.low


def _high(point: ScalingPoint) -> float:
    return point.high


def _arm(value: float, edge: float) -> float:
    """Length of an error bar; none where there were no repeats."""
    return 0.0 if math.isnan(edge) else abs(edge - value)


def _points(result: ScalingCurve | CurveFit) -> Sequence[ScalingPoint]:
    return result.points


def _base(points: Sequence[ScalingPoint]) -> ScalingPoint:
    for point in points:
        if point.rates:
            return point
    raise ValueError("no point of this curve was measured, so there is nothing to draw: its table says why each has failed")


def _ticks(first: int, last: int) -> list[int]:
    """Doublings of the first number, at most eight of them."""
    doublings = max(1, math.ceil(math.log2(last / first)) if last > first else 1)
    step = math.ceil(doublings / 8)
    return [first * 2**i for i in range(0, doublings + 1, step) if first * 2**i <= last]
