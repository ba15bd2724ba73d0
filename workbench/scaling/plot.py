"""Pictures of scaling: throughput or efficiency over processes, measured and predicted; loss against compute."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core import units
from workbench.core.display.axes import DASHES, WIDTH, band, ink, legend, marker_look, prepared, tone
from workbench.core.display.colors import LINE, SERIES, SIZES, mixed
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.fit import CurveFit, CurveForecast
from workbench.scaling.analysis.curve.point import PROCESSES, ScalingPoint
from workbench.scaling.analysis.law.fit import losses
from workbench.scaling.analysis.law.forecast import HeldOut
from workbench.scaling.analysis.law.law import ScalingLaw
from workbench.scaling.analysis.law.points import Points, read_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes


REACH = 4
"""How far beyond the largest measured point the band is drawn by default: further out it is mostly the difference between the forms."""
_DRAWN = 40
"""Numbers of processes at which the band is computed."""


def scaling(result: ScalingCurve | CurveFit, ax: Axes | None = None, *, to: int | None = None) -> Axes:
    """Throughput against processes, both logarithmic: points with the 90 % interval of their repeats, and crosses for oversubscribed
    points. Beyond them, the dashed line is the fit with its interval, and the dash-dotted line the linear extrapolation from the last
    point. The dotted line is perfect scaling from the smallest point. Triangles show what a point would reach if its exposed communication
    were hidden, where that was measured.

    A curve over another knob shows only its points, since there is no law.

    Args:
        result: a curve, or its fit; a curve with fewer than two usable points has no band.
        ax: where to draw; None = a new figure.
        to: number of processes up to which the band is drawn; None = four times the largest measured number.

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
    ax.set_ylabel(f"throughput ({result.unit}/s)")
    return ax


def scaling_efficiency(result: ScalingCurve | CurveFit, ax: Axes | None = None, *, to: int | None = None) -> Axes:
    """Efficiency in percent: throughput per process over that of the smallest measured point; perfect scaling is 100 %.

    Args:
        result: as in `scaling`.
        ax: as there.
        to: as there.

    Raises:
        ValueError: as there, or a curve over another knob than the processes.
    """
    if isinstance(result, ScalingCurve) and result.over != PROCESSES:
        raise ValueError(f"a curve over {result.over} has no efficiency, which is throughput per process: draw plot.scaling(curve)")
    base = _base(result.points).per_process
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
    points: Sequence[ScalingPoint] = result.points
    base, largest = _base(points), max(point.world_size for point in points if point.rates)
    fit = result if isinstance(result, CurveFit) else result.fit() if len(result.usable) > 1 else None
    end = to if to is not None else REACH * largest if fit is not None else largest
    if end < largest:
        raise ValueError(f"to={to!r}: the largest measured point has {largest} processes; give at least as many, or None")
    end = max(end, 2 * base.world_size)  # one point alone has no width
    ax = prepared(ax, WIDTH, 4.0)
    ends = (base.world_size, end)
    perfect = [shown(size * base.per_process, size) for size in ends]
    ax.plot(ends, perfect, color=ink(ax), linestyle=":", linewidth=1.2, label="perfect")
    if fit is not None and end > fit.points[-1].world_size:
        _draw_forecast(ax, fit, end, shown)
    _draw_points(ax, points, shown)
    _draw_hidden(ax, points, shown)
    ax.set_xscale("log", base=2)
    ticks = _ticks(base.world_size, end)
    ax.set_xticks(ticks, [units.count(tick) for tick in ticks])
    ax.minorticks_off()
    ax.grid(axis="y", color=ink(ax), alpha=0.18, linewidth=0.8)
    ax.set_xlabel("processes")
    handles, labels = ax.get_legend_handles_labels()
    legend(ax, [handle for handle, label in zip(handles, labels, strict=True) if not label.startswith("_")])
    return ax


def _draw_forecast(ax: Axes, fit: CurveFit, end: int, shown: Shown) -> None:
    start = fit.points[-1].world_size
    steps = (start * (end / start) ** (i / (_DRAWN - 1)) for i in range(_DRAWN))
    sizes = sorted({max(1, round(step)) for step in steps} | {start, end})
    forecasts = fit.forecasts(sizes)

    def line(of: Callable[[CurveForecast], float]) -> list[float]:
        return [shown(of(forecast), forecast.world_size) for forecast in forecasts]

    low, high = line(lambda forecast: forecast.low), line(lambda forecast: forecast.high)
    band(ax, sizes, low, high, LINE, label=f"{units.percent(fit.level)} interval")
    ax.plot(sizes, line(lambda forecast: forecast.mid), color=LINE, linewidth=1.8, linestyle=DASHES, label="predicted: ensemble")
    ax.plot(sizes, line(lambda forecast: forecast.naive), color=ink(ax), linestyle="-.", linewidth=1.2, label="naive: as the last point")


def _draw_points(ax: Axes, points: Sequence[ScalingPoint], shown: Shown, place: Place = operator.attrgetter("world_size")) -> None:
    for words, crowded in (("measured", False), ("oversubscribed: no scaling", True)):
        some = [point for point in points if point.rates and point.oversubscribed == crowded]
        if not some:
            continue
        values = [shown(point.samples_per_sec, point.world_size) for point in some]
        arms = [
            [_arm(value, shown(getattr(point, edge), point.world_size)) for point, value in zip(some, values, strict=True)]
            for edge in ("low", "high")
        ]
        ax.errorbar(
            [place(point) for point in some],
            values,
            yerr=arms,
            linestyle="none",
            marker="X" if crowded else "o",
            markersize=8 if crowded else 6,
            color=ink(ax) if crowded else LINE,
            capsize=3,
            label=words,
        )
    for point in points:
        if not point.rates:
            ax.plot(place(point), 0.02, marker="x", color=ink(ax), transform=ax.get_xaxis_transform(), linestyle="none")
            ax.annotate("failed", (place(point), 0.05), xycoords=("data", "axes fraction"), ha="center", fontsize=8.5, color=ink(ax))


def _draw_hidden(ax: Axes, points: Sequence[ScalingPoint], shown: Shown) -> None:
    """What points would reach without the part of the step that is nothing but communication."""
    some = [point for point in points if point.rates and point.exposed and not point.oversubscribed]
    if some:
        sizes = [point.world_size for point in some]
        values = [shown(point.samples_per_sec / (1 - (point.exposed or 0)), point.world_size) for point in some]
        ax.plot(sizes, values, linestyle="none", marker="^", markersize=6, color=ink(ax), markerfacecolor="none", label=HIDDEN)


def _by_knob(curve: ScalingCurve, ax: Axes | None, to: int | None) -> Axes:
    """Throughput over the values of a knob; texts at equal distances."""
    if to is not None:
        raise ValueError(f"to={to!r}: a curve over {curve.over} has no law that could be drawn beyond its points; leave it out")
    _base(curve.points)
    ax = prepared(ax, WIDTH, 4.0)
    numbers = all(not isinstance(value, str) for value in curve.values)
    places = {value: value if numbers else place for place, value in enumerate(curve.values)}
    _draw_points(ax, curve.points, lambda value, _: value, lambda point: places[point.at])
    if numbers and min(curve.values) > 0 and max(curve.values) >= 4 * min(curve.values):
        ax.set_xscale("log", base=2)
    ax.set_xticks(list(places.values()), [units.count(value) if numbers else str(value) for value in places])
    ax.minorticks_off()
    ax.set_ylim(0, 1.08 * max(rate for point in curve.points for rate in point.rates))
    if not numbers:
        ax.set_xlim(-0.5, len(places) - 0.5)
    ax.grid(axis="y", color=ink(ax), alpha=0.18, linewidth=0.8)
    ax.yaxis.set_major_formatter("{x:,.10g}")
    ax.set_xlabel(curve.over)
    ax.set_ylabel(f"throughput ({curve.unit}/s)")
    legend(ax, list(ax.get_legend_handles_labels()[0]))
    return ax


def _arm(value: float, edge: float) -> float:
    """Length of an error bar; none where there were no repeats."""
    return 0.0 if math.isnan(edge) else abs(edge - value)


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


LINES = 6
"""Sizes that get a line and an entry of the legend; of more, so many are chosen from the smallest to the largest."""
BEYOND = 10.0
"""The frontier goes on to this many times the largest compute that is drawn."""
FRONTIER = SERIES[1]
"""Colour of the frontier: no size's."""


def scaling_law(result: ScalingLaw, ax: Axes | None = None, *, held_out: Any = None) -> Axes:
    """Loss against training compute, both on logarithmic scales.

    Dots are measured runs; dashed lines are the fitted law for each size, from the fewest tokens to the most. The frontier is the loss of
    the best size for each amount of compute, with its interval; two marks name the best size and its tokens. Runs with a ring were not
    fitted.

    Args:
        result: a fitted law.
        ax: the Axes to draw into; None makes a figure.
        held_out: runs that were not fitted: rows of (parameters, tokens, loss), a DataFrame, or the result of `law.held_out()`.
    """
    ax = prepared(ax, WIDTH, 4.0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    unseen = _unseen(held_out)
    sizes = _chosen(sorted({*result.points.sizes, *(unseen.parameters if unseen else ())}))
    few, many = SIZES[tone(ax)]
    colors = {size: mixed(many, few, place / max(1, len(sizes) - 1)) for place, size in enumerate(sizes)}
    all_tokens = [*result.points.tokens, *(unseen.tokens if unseen else ())]
    for size in sizes:
        tokens = np.geomspace(min(all_tokens), max(all_tokens), 40)
        work = result.flops_per * size * tokens
        label = f"{units.count(size)} parameters"
        ax.plot(work, losses(result.five, size, tokens), color=colors[size], linewidth=1.2, linestyle=DASHES, label=label, zorder=2)
    for points, held_out in ((result.points, False), (unseen, True)):
        if points:
            _dots(ax, points, result.flops_per, colors, held_out=held_out)
    _frontier(ax, result, unseen)
    _axes(ax, result, unseen)
    return ax


def _unseen(held_out: Any) -> Points | None:
    if held_out is None:
        return None
    if isinstance(held_out, HeldOut):
        return Points.of(
            [(forecast.parameters, forecast.tokens, loss) for forecast, loss in zip(held_out.forecasts, held_out.measured, strict=True)]
        )
    return read_points(held_out)


def _chosen(sizes: Sequence[float]) -> list[float]:
    if len(sizes) <= LINES:
        return list(sizes)
    return [sizes[round(i * (len(sizes) - 1) / (LINES - 1))] for i in range(LINES)]


def _dots(ax: Axes, points: Points, per: float, colors: dict[float, str], *, held_out: bool) -> None:
    nearest = [colors[min(colors, key=lambda known: abs(math.log(known / size)))] for size in points.parameters]
    ax.scatter(
        points.compute(per),
        points.loss,
        s=24,
        facecolors=nearest,
        edgecolors=nearest,
        label="_held out" if held_out else "measured",
        zorder=3,
    )
    if held_out:
        look: dict[str, Any] = {"facecolors": "none", "edgecolors": ink(ax), "linewidths": 1.2, "zorder": 4}
        ax.scatter(points.compute(per), points.loss, s=110, label="not seen by the fit", **look)


def _frontier(ax: Axes, result: ScalingLaw, unseen: Points | None) -> None:
    work = [*result.compute, *(unseen.compute(result.flops_per) if unseen else ())]
    last = max(work)
    frontier = [result.allocation(float(budget)) for budget in np.geomspace(min(work), BEYOND * last, 30)]
    flops, bands = [place.flops for place in frontier], [place.loss for place in frontier]
    band(ax, flops, [loss.low for loss in bands], [loss.high for loss in bands], FRONTIER)
    label = f"predicted best size for the compute ({units.percent(result.level)} band)"
    ax.plot(flops, [loss.mid for loss in bands], color=FRONTIER, linewidth=1.8, linestyle=DASHES, label=label, zorder=2.5)
    words = []
    for budget in (last, BEYOND * last):
        best = result.allocation(float(budget))
        ax.plot([best.flops], [best.loss.mid], marker="D", markersize=6, zorder=5, **marker_look(ax, FRONTIER, predicted=True))
        words.append(f"◆ {budget:.2g} FLOPs: {units.count(best.parameters.mid)} parameters, {units.count(best.tokens.mid)} tokens")
    if not result.enough:
        words.append("these runs cannot tell the best size: see law.cannot_tell")
    ax.text(
        0.02, 0.03, "\n".join(words), transform=ax.transAxes, color=ink(ax), fontsize=8, va="bottom"
    )  # nothing is drawn below the frontier


def _axes(ax: Axes, result: ScalingLaw, unseen: Points | None) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    ends = [*result.points.loss, *(unseen.loss if unseen else ())]
    work = max(*result.compute, *(unseen.compute(result.flops_per) if unseen else ()))
    low = min(*ends, result.allocation(BEYOND * work).loss.mid)
    ax.set_ylim(low * 0.94, max(ends) * 1.03)
    ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    ax.set_xlabel("training compute (FLOPs)")
    ax.set_ylabel("final loss")
    ax.grid(axis="y", color=ink(ax), alpha=0.18, linewidth=0.8)
    ax.legend(frameon=False, labelcolor=ink(ax), fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 1.02), ncols=2)
