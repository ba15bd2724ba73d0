"""Draws steps, samples and time to a target against the batch, with the law that the best follow; and the memory of steps by length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.batch.analysis.critical_batch import CriticalBatch
from workbench.batch.analysis.lengths import BatchLengths
from workbench.batch.analysis.steps_to_target import StepsToTarget, TimeToTarget
from workbench.batch.analysis.trials import Mark
from workbench.core import units
from workbench.core.display.axes import DASHES, WIDTH, band, halo, ink, kinds, legend, marker_look, prepared, scale_of, scale_of_bytes
from workbench.core.display.colors import LIMIT, LINE, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D


_MARKERS = "osD^vPX"
_POINTS = 60  # of a curve
_BESIDE = 1.07  # marks of several rules at one batch stand side by side, each so many times as far right as the one before
_NEVER = 0.97  # height of the marks that never reach the target, in the axes


def steps_to_target(result: StepsToTarget, ax: Axes | None = None, *, samples: bool = False) -> Axes:
    """Steps to the target against the batch size, one colour and marker per rule, with a line from the fastest seed to the slowest.

    The dashed curve is the law, fitted to the best rule at each batch, with the 90 % band of a measurement. Where there are several
    rules, it has a colour of its own. Points with a ring were not fitted. The dotted line is perfect scaling: twice the batch, half the
    steps. A triangle means that the target was not reached by then. A cross at the upper edge means that every trial diverged, so no
    number of steps is enough.

    Args:
        result: trials at several batch sizes.
        ax: where to draw; None = a new figure.
        samples: draw samples to the target instead; perfect scaling is then level.

    Raises:
        ValueError: no trial has ended.
    """
    if not result.trials:
        raise ValueError("; ".join(result.notes))
    ax = _logarithmic(ax)
    several = len(result.optimizers) > 1
    tried = dict.fromkeys((trial.optimizer, trial.rule) for trial in result.trials)
    configurations = sorted(tried, key=lambda each: result.rules.index(each[1]) if each[1] in result.rules else -1)
    handles, missed = [], list[Mark]()
    measured, predicted = kinds(ax, of_lines=True)
    shown = [measured]
    for place, ((optimizer, rule), color) in enumerate(zip(configurations, itertools.cycle(SERIES), strict=False)):
        marker, beside = _MARKERS[place % len(_MARKERS)], _BESIDE ** (place - (len(configurations) - 1) / 2)
        label = f"{optimizer} {rule}" if several else rule
        marks = result.marks(optimizer, rule)
        handles.append(_marks(ax, result, marks, color, marker, label, samples, beside))
        missed += [mark for mark in marks if not mark.reached]
    for position, optimizer in enumerate(result.optimizers):
        try:
            law = result.fit(optimizer)
        except ValueError:
            continue
        of_several_rules = not several and len(configurations) > 1
        place = len(configurations) if of_several_rules else [name for name, _ in configurations].index(optimizer)
        color = SERIES[place % len(SERIES)]
        handles.append(_law(ax, law, result.batches, color, f"law of {optimizer}" if several else "law (90 %)", samples))
        shown = [measured, predicted]
        if not position:
            handles.append(_perfect(ax, result, law, samples))
    handles += _never_reached(ax, missed)
    if any(line.get_label() == "_ring" for line in ax.get_lines()):
        handles += ax.plot([], [], marker="o", label="not used for the fit", **_ring(ax, 9))
    _axes(ax, result.batches)
    ax.set_ylabel(f"{'samples' if samples else 'steps'} to {result.target}")
    legend(ax, [*handles, *shown])
    return ax


def _ring(ax: Axes, size: float) -> dict[str, Any]:
    """The look of a ring around a mark."""
    return {"markersize": size, "color": ink(ax), "markerfacecolor": "none", "linestyle": "none"}


def _never_reached(ax: Axes, missed: Sequence[Mark]) -> list[Line2D]:
    """Entries of the legend for what did not reach the target."""
    shown = []
    for diverged, marker, words in ((False, "^", "not reached by then"), (True, "x", "diverged")):
        if any(mark.diverged == diverged for mark in missed):
            shown += ax.plot([], [], marker=marker, color=ink(ax), linestyle="none", label=words)
    return shown


def critical_batch(result: CriticalBatch, ax: Axes | None = None) -> Axes:
    """Steps against the batch size: the fitted points (a triangle means not reached by then), the law with the 90 % band of a measurement,
    and the critical batch with its interval.
    """
    ax = _logarithmic(ax)
    for point in result.points:
        ax.plot(point.batch, point.steps, marker="o" if point.reached else "^", markersize=6 if point.reached else 8, color=LINE)
    batches = tuple(sorted({point.batch for point in result.points}))
    line = _law(ax, result, batches, LINE, "law (90 %)", samples=False)
    ends = max(result.b_crit_low, batches[0] / 4), min(result.b_crit_high, batches[-1] * 4)
    if ends[0] < ends[1]:
        ax.axvspan(*ends, color=ink(ax), alpha=0.12, linewidth=0, label="_interval")
    critical = ax.axvline(
        min(max(result.b_crit, ends[0]), ends[1]), color=ink(ax), linestyle=DASHES, linewidth=1.2, label=f"b_crit {result.words}"
    )
    _axes(ax, batches)
    ax.set_ylabel("steps to the target")
    legend(ax, [line, critical, *kinds(ax, of_lines=True)])
    return ax


def time_to_target(result: TimeToTarget, ax: Axes | None = None) -> Axes:
    """Time to the target against the batch size, a curve per number of processes with the 90 % interval of its steps; a ring marks the
    shortest time.
    """
    ax = _logarithmic(ax)
    handles = []
    scale, unit = scale_of(max(row.seconds for row in result.rows))
    for size, color, marker in zip(result.world_sizes, itertools.cycle(SERIES), itertools.cycle(_MARKERS), strict=False):
        rows = [row for row in result.rows if row.world_size == size]
        batches = [row.batch for row in rows]
        low, mid, high = ([scale * getattr(row, name) for row in rows] for name in ("low", "seconds", "high"))
        band(ax, batches, low, high, color)
        (line,) = ax.plot(batches, mid, marker=marker, **marker_look(ax, color, predicted=True), label=f"{size} process{'es' * (size > 1)}")
        best = result.best(size)
        ax.plot(best.batch, scale * best.seconds, marker="o", label="_best", **_ring(ax, 15))
        handles.append(line)
    handles += ax.plot([], [], marker="o", label="shortest", **_ring(ax, 9))
    _axes(ax, tuple(sorted({row.batch for row in result.rows})))
    ax.set_ylabel(f"time to {result.target} ({unit})")
    legend(ax, [*handles, *kinds(ax, of_lines=True)[1:]])
    return ax


_DRAWN = 400
"""Places of a curve over many steps; of those in between the longest counts."""


def batch_lengths(result: BatchLengths, ax: Axes | None = None) -> Axes:
    """Predicted memory of each step, by its longest batch, compared with the device's memory.

    Hollow circles are steps that do not fit; hollow diamonds are steps for which that is not known.

    If there are many steps, several are drawn as one, by the longest batch of them. Between lengths with a dry run, memory is interpolated.

    Args:
        result: the result of `wb.batch_lengths`.
        ax: the Axes to draw into; None makes a figure.
    """
    ax = prepared(ax, WIDTH, 3.4)
    known = sorted(result.memory)
    needed = np.interp(result.lengths, known, [result.memory[length] for length in known])
    fits = [result.fits(length) for length in result.lengths]
    wide = -(-len(needed) // _DRAWN)
    starts = range(0, len(needed), wide)
    places = [start + int(np.argmax(needed[start : start + wide])) for start in starts]
    scale, unit = scale_of_bytes(max(result.capacity, *needed))
    ax.plot(
        [place + 1 for place in places],
        needed[places] / scale,
        color=LINE,
        linestyle=DASHES,
        linewidth=1.2,
        label="predicted memory of a step",
    )
    look = marker_look(ax, ink(ax), predicted=True) | {"linestyle": "none"}
    for answer, marker, label in ((False, "o", "does not fit, predicted"), (None, "D", "not known whether it fits")):
        if out := [place for place in places if fits[place] is answer]:
            ax.plot([place + 1 for place in out], needed[out] / scale, marker=marker, markersize=6, label=label, **look)
    words = f"may be used: {units.bytes_(result.capacity)} of {result.device}"
    ax.axhline(result.capacity / scale, color=LIMIT, linewidth=1.8, label=words, path_effects=halo(ax), zorder=3)
    ax.set_ylim(bottom=0, top=1.08 * max(result.capacity, *needed) / scale)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("optimizer step")
    ax.set_ylabel(f"memory ({unit})")
    legend(ax, ax.get_legend_handles_labels()[0])
    return ax


def _logarithmic(ax: Axes | None) -> Axes:
    ax = prepared(ax, WIDTH, 4.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    return ax


def _axes(ax: Axes, batches: Sequence[float]) -> None:
    """Ticks at the batches, and plain numbers on the other axis."""
    from matplotlib.ticker import LogLocator

    ax.set_xticks(batches, [f"{batch:,}" for batch in batches])
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.grid(axis="y", color=ink(ax), alpha=0.18, linewidth=0.8)
    ax.set_xlabel("batch (samples per optimizer step)")


def _marks(
    ax: Axes, result: StepsToTarget, marks: tuple[Mark, ...], color: str, marker: str, label: str, samples: bool, beside: float
) -> Line2D:
    """Draw the marks of one rule, at `beside` times their batches; returns the handle for the legend."""
    for mark in (mark for mark in marks if mark.reached):
        at, scale = beside * mark.batch, mark.batch if samples else 1
        if math.isfinite(mark.high) and mark.high > mark.low:
            ax.plot([at] * 2, [scale * mark.low, scale * mark.high], color=color, linewidth=1.2, label="_seeds")
        held_out = result.fitted is not None and mark.batch not in result.fitted
        ax.plot(at, scale * mark.steps, marker=marker, markersize=7, color=color, label="_held out" if held_out else "_mark")
        if held_out:
            ax.plot(at, scale * mark.steps, marker="o", label="_ring", **_ring(ax, 13))
    look: dict[str, Any] = {"markersize": 8, "color": color, "linestyle": "none"}
    for mark in (mark for mark in marks if not mark.reached):
        if mark.diverged:  # it has no place on the axis: the few steps until it diverged would look like the best
            ax.plot(beside * mark.batch, _NEVER, marker="x", transform=ax.get_xaxis_transform(), label="_diverged", **look)
        else:
            ax.plot(beside * mark.batch, mark.steps * (mark.batch if samples else 1), marker="^", label="_not reached", **look)
    (shown,) = ax.plot([], [], marker=marker, color=color, linestyle="none", label=label)
    return shown


def _law(ax: Axes, law: CriticalBatch, batches: Sequence[float], color: str, label: str, samples: bool) -> Line2D:
    """The curve with its band, from the smallest batch to the largest."""
    first, last = math.log(batches[0]), math.log(batches[-1])
    points = [law.predict(math.exp(first + (last - first) * i / (_POINTS - 1))) for i in range(_POINTS)]
    at = [point.batch for point in points]
    low, mid, high = zip(*(point.samples if samples else (point.low, point.mid, point.high) for point in points), strict=True)
    band(ax, at, low, high, color)
    (line,) = ax.plot(at, mid, color=color, linestyle=DASHES, linewidth=1.8, label=label)
    return line


def _perfect(ax: Axes, result: StepsToTarget, law: CriticalBatch, samples: bool) -> Line2D:
    """Steps in proportion to 1 / batch, from the smallest batch on."""
    first, last = result.batches[0], result.batches[-1]
    start = law.samples(first)
    ends = [start, start] if samples else [start / first, start / last]
    (line,) = ax.plot([first, last], ends, color=ink(ax), linestyle=":", linewidth=1.4, label="perfect scaling")
    return line
