"""Steps to a target against the batch, on logarithmic axes: what was measured, by rule, and the law that the best follow.

The learning rate over the steps, from the real scheduler: one plan, or several in one picture.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.batch.analysis.critical_batch import CriticalBatch
from workbench.batch.analysis.scaled_lr import number
from workbench.batch.analysis.schedule import Schedule
from workbench.batch.analysis.steps_to_target import StepsToTarget
from workbench.batch.analysis.time_to_target import TimeToTarget
from workbench.batch.analysis.trials import Mark
from workbench.core import units
from workbench.core.display.axes import PALE, WIDTH, legend, prepared, scale_of
from workbench.core.display.colors import INK, LINE, PARTS, PHASES
from workbench.runs.spec import RunSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D


_COLORS = (LINE, PARTS["data_wait"], PARTS["communication"], PARTS["optimizer"], PARTS["transfer"], PARTS["straggler"], PARTS["stalls"])
_MARKERS = "osD^vPX"
_BAND = 0.16  # opacity
_POINTS = 60  # of a curve


def steps_to_target(result: StepsToTarget, ax: Axes | None = None, *, samples: bool = False) -> Axes:
    """Steps to the target over the batch, one colour and marker per rule; a line leads from the fastest seed to the slowest.

    The curve is the law, fitted to the best of all rules, with the 90 % band of a measurement; batches that it was not fitted to are
    hollow. The dotted line is perfect scaling: twice the batch, half the steps. An open arrow upwards: the target was not reached by then.

    Args:
        result: trials of several batches.
        ax: where to draw; None = a new figure.
        samples: draw samples to the target instead; perfect scaling is then level.

    Raises:
        ValueError: no trial has ended.
    """
    if not result.trials:
        raise ValueError("; ".join(result.notes))
    ax = _logarithmic(ax)
    several = len(result.optimizers) > 1
    found = list(dict.fromkeys((trial.optimizer, trial.rule) for trial in result.trials))
    handles = []
    for (optimizer, rule), color, marker in zip(found, itertools.cycle(_COLORS), itertools.cycle(_MARKERS), strict=False):
        label = f"{optimizer} {rule}" if several else rule
        handles.append(_marks(ax, result, result.marks(optimizer, rule), color, marker, label, samples))
    for position, optimizer in enumerate(result.optimizers):
        try:
            law = result.fit(optimizer)
        except ValueError:
            continue
        color = _COLORS[[one for one, _ in found].index(optimizer) % len(_COLORS)]
        handles.append(_law(ax, law, result.batches, color, f"law of {optimizer}" if several else "law (90 %)", samples))
        if not position:
            handles.append(_perfect(ax, result, law, samples))
    _axes(ax, result.batches)
    ax.set_ylabel(f"{'samples' if samples else 'steps'} to {result.target}")
    legend(ax, handles)
    return ax


def critical_batch(result: CriticalBatch, ax: Axes | None = None) -> Axes:
    """Steps over the batch: the fitted points (an open arrow upwards: not reached by then), the law with the 90 % band of a measurement,
    and the critical batch with its interval.
    """
    ax = _logarithmic(ax)
    for point in result.points:
        ax.plot(
            point.batch, point.steps, marker="o" if point.reached else "^", color=LINE, markerfacecolor=LINE if point.reached else "none"
        )
    batches = tuple(sorted({point.batch for point in result.points}))
    line = _law(ax, result, batches, LINE, "law (90 %)", samples=False)
    ends = max(result.b_crit_low, batches[0] / 4), min(result.b_crit_high, batches[-1] * 4)
    if ends[0] < ends[1]:
        ax.axvspan(*ends, color=INK, alpha=0.12, linewidth=0, label="_interval")
    critical = ax.axvline(
        min(max(result.b_crit, ends[0]), ends[1]), color=INK, linestyle="--", linewidth=1.2, label=f"b_crit {result.words}"
    )
    _axes(ax, batches)
    ax.set_ylabel("steps to the target")
    legend(ax, [line, critical])
    return ax


def time_to_target(result: TimeToTarget, ax: Axes | None = None) -> Axes:
    """Time to the target over the batch, a curve per number of processes, with the 90 % interval of its steps; a ring is the soonest."""
    ax = _logarithmic(ax)
    handles = []
    scale, unit = scale_of(max(row.seconds for row in result.rows))
    for size, color, marker in zip(result.world_sizes, itertools.cycle(_COLORS), itertools.cycle(_MARKERS), strict=False):
        rows = [row for row in result.rows if row.world_size == size]
        places = [row.batch for row in rows]
        low, mid, high = ([scale * getattr(row, name) for row in rows] for name in ("low", "seconds", "high"))
        ax.fill_between(places, low, high, color=color, alpha=_BAND, linewidth=0, label="_band")
        (line,) = ax.plot(places, mid, color=color, marker=marker, label=f"{size} process{'es' * (size > 1)}")
        best = result.best(size)
        ax.plot(best.batch, scale * best.seconds, marker="o", markersize=14, markerfacecolor="none", markeredgecolor=color, label="_best")
        handles.append(line)
    _axes(ax, tuple(sorted({row.batch for row in result.rows})))
    ax.set_ylabel(f"time to {result.target} ({unit})")
    legend(ax, handles)
    return ax


def _logarithmic(ax: Axes | None) -> Axes:
    ax = prepared(ax, WIDTH, 4.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    return ax


def _axes(ax: Axes, batches: Sequence[float]) -> None:
    """The batches that there are along the one, plain numbers along the other."""
    from matplotlib.ticker import LogLocator

    ax.set_xticks(batches, [f"{batch:,}" for batch in batches])
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.grid(axis="y", color=INK, alpha=0.18, linewidth=0.8)
    ax.set_xlabel("batch (samples per optimizer step)")


def _marks(ax: Axes, result: StepsToTarget, marks: tuple[Mark, ...], color: str, marker: str, label: str, samples: bool) -> Line2D:
    """The marks of one rule; returns what the legend shows."""
    reached = [mark for mark in marks if mark.reached]
    for mark in reached:
        scale = mark.batch if samples else 1
        if math.isfinite(mark.high) and mark.high > mark.low:
            ax.plot([mark.batch] * 2, [scale * mark.low, scale * mark.high], color=color, linewidth=1.2, alpha=PALE, label="_seeds")
        hollow = result.fitted is not None and mark.batch not in result.fitted
        face = "none" if hollow else color
        ax.plot(
            mark.batch,
            scale * mark.steps,
            marker=marker,
            markersize=7,
            color=color,
            markerfacecolor=face,
            label="_held out" if hollow else "_mark",
        )
    for mark in marks:
        if not mark.reached:
            place = (mark.batch, mark.steps * (mark.batch if samples else 1))
            ax.plot(*place, marker="^", markersize=8, markerfacecolor="none", markeredgecolor=color, linestyle="none", label="_not reached")
            ax.annotate("∞" if mark.diverged else "", place, (0, 6), textcoords="offset points", ha="center", color=color)
    (shown,) = ax.plot([], [], marker=marker, color=color, linestyle="none", label=label)
    return shown


def _law(ax: Axes, law: CriticalBatch, batches: Sequence[float], color: str, label: str, samples: bool) -> Line2D:
    """The curve with its band, from the smallest batch to the largest."""
    first, last = math.log(batches[0]), math.log(batches[-1])
    places = [math.exp(first + (last - first) * i / (_POINTS - 1)) for i in range(_POINTS)]
    found = [law.predict(place) for place in places]
    scales = [place if samples else 1.0 for place in places]
    low, mid, high = ([getattr(one, name) * scale for one, scale in zip(found, scales, strict=True)] for name in ("low", "mid", "high"))
    ax.fill_between(places, low, high, color=color, alpha=_BAND, linewidth=0, label="_band")
    (line,) = ax.plot(places, mid, color=color, linewidth=1.8, label=label)
    return line


def _perfect(ax: Axes, result: StepsToTarget, law: CriticalBatch, samples: bool) -> Line2D:
    """Steps in proportion to 1 / batch, from the smallest one on."""
    first, last = result.batches[0], result.batches[-1]
    start = law.samples(first)
    ends = [start, start] if samples else [start / first, start / last]
    (line,) = ax.plot([first, last], ends, color=INK, linestyle=":", linewidth=1.4, label="perfect scaling")
    return line


_SCHEDULE_COLORS = (LINE, PHASES["data_wait"], PHASES["optimizer"], PHASES["h2d"], PHASES["forward"], PHASES["other"])
_STYLES = ("-", "--", "-.", ":")


def schedule(
    what: Any, ax: Axes | None = None, *, steps: int | None = None, batch: int | None = None, by: str = "auto", lr: float | None = None
) -> Axes:
    """The learning rate over the steps, its warm-up and its peak.

    Args:
        what: a RunSpec, a torch scheduler (it stays as it is), a function that makes one for an optimizer, or a `Schedule`; several of
            them in a list, or by name in a mapping: `{"old": spec, "new": bigger}`.
        ax: Axes to draw into; None = a new figure.
        steps: how many, of schedulers that do not say how many they are made for.
        batch: samples per optimizer step, of schedulers; a second axis counts samples.
        by: "steps" or "samples" from left to right; "auto" = samples where several batches are compared, so that equal places have seen
            equally much, else steps.
        lr: peak learning rate, where a RunSpec leaves it to the task's optimizer.

    Raises:
        ValueError: nothing to draw, or not from these; or samples are wanted and the batch is not known.
    """
    found = _schedules(what, steps, batch, lr)
    batches = {one.batch for one in found}
    if by not in ("auto", "steps", "samples"):
        raise ValueError(f"by={by!r}: allowed are 'auto', 'steps', 'samples'")
    if by == "samples" and None in batches:
        raise ValueError("by='samples' needs to know the samples per step: give batch=…, or a RunSpec with a micro_batch")
    in_samples = by == "samples" or (by == "auto" and len(batches) > 1 and None not in batches)
    ax = prepared(ax, WIDTH, 3.0)
    for place, one in enumerate(found):
        _draw(ax, one, place, in_samples=in_samples, alone=len(found) == 1)
    _in_words(ax)
    ax.set_xlabel("samples" if in_samples else "optimizer step")
    relative = any(isinstance(one, RunSpec) and one.lr is None for one in _each(what)) and lr is None
    ax.set_ylabel("learning rate / peak" if relative and all(one.peak[1] == 1 for one in found) else "learning rate")
    ax.set_ylim(bottom=0)
    ax.margins(x=0.01)
    ax.grid(axis="y", color=INK, alpha=0.18, linewidth=0.8)
    if not in_samples and len(batches) == 1 and None not in batches:
        _count_samples(ax, batches.pop() or 1)
    if len(found) > 1:
        ax.legend(
            frameon=False, labelcolor=INK, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, borderpad=0.2
        )
    return ax


def _each(what: Any) -> list[Any]:
    if isinstance(what, Mapping):
        return list(what.values())
    return list(what) if isinstance(what, Sequence) and not isinstance(what, str) else [what]


def _schedules(what: Any, steps: int | None, batch: int | None, lr: float | None) -> list[Schedule]:
    parts, names = _each(what), list(what) if isinstance(what, Mapping) else None
    if not parts:
        raise ValueError("no schedule to draw: a RunSpec, a torch scheduler or a Schedule is wanted, or several of them")
    return [_schedule(part, None if names is None else str(names[place]), steps, batch, lr) for place, part in enumerate(parts)]


def _schedule(what: Any, name: str | None, steps: int | None, batch: int | None, lr: float | None) -> Schedule:
    if isinstance(what, Schedule):
        return what if name is None else Schedule.from_json({**what.to_json(), "label": name})
    if isinstance(what, RunSpec):
        from workbench.batch.measure.schedule import schedule_of

        return schedule_of(what, lr=lr, name=name)
    from workbench.batch.measure.schedule import scheduled

    return scheduled(what, steps, lr=1.0 if lr is None else lr, batch=batch, label=name)


def _draw(ax: Axes, one: Schedule, place: int, *, in_samples: bool, alone: bool) -> None:
    scale = (one.batch or 1) if in_samples else 1
    color, style = _SCHEDULE_COLORS[place % len(_SCHEDULE_COLORS)], _STYLES[place % len(_STYLES)]
    label = one.label if one.batch is None else f"{one.label}, batch {number(one.batch)}"
    places = [step * scale for step in one.steps]
    ax.plot(places, one.lrs, color=color, linestyle=style, linewidth=1.8, label=label, marker="o" if len(places) < 3 else None)
    step, peak = one.peak
    if not one.constant:
        ax.plot([step * scale], [peak], marker="D", color=color, markersize=5, linestyle="none")
    if alone:
        left = not one.constant and step > (one.steps[0] + one.steps[-1]) / 2
        words = f"{'constant' if one.constant else 'peak'} {number(peak)}"
        words += f", after {number(one.warmup_steps)} steps of warm-up" if one.warmup_steps else ""
        ha = "right" if left else "left"
        ax.annotate(words, (step * scale, peak), (-8 if left else 8, 3), textcoords="offset points", ha=ha, color=INK)
        ax.set_ylim(top=peak * 1.12)
    if one.warmup_steps:
        ax.axvspan(places[0], step * scale, color=color, alpha=0.12, linewidth=0)


def _count_samples(ax: Axes, batch: int) -> None:
    """A second axis above, in samples."""

    def to_samples(step: Any) -> Any:
        return step * batch

    def to_steps(samples: Any) -> Any:
        return samples / batch

    above = ax.secondary_xaxis("top", functions=(to_samples, to_steps))
    above.set_xlabel(f"samples, {number(batch)} a step", color=INK)
    above.tick_params(colors=INK, width=0.8)
    above.spines["top"].set_color(INK)
    _in_words(above)


def _in_words(ax: Any) -> None:
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) < 1e6 else units.count(value))
