"""Draws learning rates and noise: rules over the batch, a range test, a noise scale, the proof of a plan, and learning-rate schedules."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.batch.analysis.lr_range import LrFound, lr_text
from workbench.batch.analysis.lr_scaling_rules import rule_factor
from workbench.batch.analysis.noise_scale import NoiseScale
from workbench.batch.analysis.noise_scale_estimator import ENOUGH, NoiseBlock, relative_width
from workbench.batch.analysis.optimizer_description import OptimizerDescription
from workbench.batch.analysis.proof import PlanProof
from workbench.batch.analysis.scaled_lr import VALIDITY_TEXT, ScaledLr, number
from workbench.batch.analysis.schedule import Schedule
from workbench.core import units
from workbench.core.display.axes import WIDTH, band, halo, ink, legend, marker_look, note_beside, prepared
from workbench.core.display.colors import LINE, LINE_PALE, SERIES
from workbench.runs.spec import RunSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_STYLES: dict[str, Any] = {"linear": "--", "sqrt": "-.", "damped": (0, (7, 2)), "none": ":"}
_POINTS = 60
_BEYOND = 4.0  # times the larger batch, and below the smaller one


def scaled_lr(result: ScaledLr, ax: Axes | None = None) -> Axes:
    """The learning rate of each rule against the batch size; the solid diamond is the present rate.

    The rule that was used is blue, with a hollow diamond at the rate that it predicts. The vertical dotted line is the
    noise scale, or the critical batch.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    ax = prepared(ax, WIDTH, 3.4)
    base, used = OptimizerDescription.of(result.base), "sqrt" if result.rule == "adam" else result.rule
    low, high = min(result.batch, result.to_batch) / _BEYOND, max(result.batch, result.to_batch) * _BEYOND
    batches = [low * (high / low) ** (place / (_POINTS - 1)) for place in range(_POINTS)]
    for rule, style in _STYLES.items():
        if rule == "damped" and result.noise is None:
            continue
        rates = [result.base_lr * rule_factor(rule, base, result.batch, batch, result.noise) for batch in batches]
        look: dict[str, Any] = {"color": LINE, "linewidth": 2.2} if rule == used else {"color": ink(ax), "linewidth": 1.0}
        label = f"{'square root' if rule == 'sqrt' else rule}{', with betas and epsilon' if result.rule == 'adam' and rule == used else ''}"
        ax.plot(batches, rates, linestyle=style, label=label, **look)
    for batch, rate, predicted, label in (
        (result.batch, result.base_lr, False, "as it is"),
        (result.to_batch, result.lr, True, "predicted"),
    ):
        look = marker_look(ax, LINE, predicted=predicted) | {"linestyle": "none"}
        ax.plot([batch], [rate], marker="D", markersize=7, path_effects=halo(ax), zorder=4, label=label, **look)
    words = f"{number(result.lr)} at {number(result.to_batch)}: {VALIDITY_TEXT[result.valid]}"
    ax.annotate(
        words, (1, 0), (-4, 5), xycoords="axes fraction", textcoords="offset points", color=ink(ax), ha="right", path_effects=halo(ax)
    )
    if result.noise is not None and low <= result.noise <= high:
        ax.axvline(result.noise, color=SERIES[1], linestyle=":", linewidth=1.6, label="noise scale or critical batch")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: number(int(value) if value >= 1 and float(value).is_integer() else value))
    ax.set_xlabel("global batch (samples)")
    ax.set_ylabel("learning rate")
    ax.grid(color=ink(ax), alpha=0.18, linewidth=0.8)
    legend(ax, ax.get_legend_handles_labels()[0])
    return ax


_HEIGHT = 4.6
_CURVES = 0.6  # share of the height for the curves; rules are above
_BAND = (0.66, 0.97)
_RACE = SERIES[1]


def lr_range(result: LrFound, ax: Axes | None = None) -> Axes:
    """Smoothed losses of all seeds (pale) and their median (blue) against the learning rate; diamonds are mean losses in the race.

    Above the curves, each rule has a row: a dot for its median suggestion, and a line over the range of the seeds. The dotted line is the
    chosen learning rate; the band contains the rates that did about as well.

    Raises:
        ValueError: there are no sweeps.
    """
    if not result.sweeps:
        raise ValueError(f"{result!r} has no sweeps to draw")
    ax = prepared(ax, WIDTH, _HEIGHT)
    ax.set_xscale("log")
    for position, sweep in enumerate(result.sweeps):
        ax.plot(sweep.lrs, sweep.smoothed, color=LINE_PALE, linewidth=1, label="smoothed loss of a seed" if not position else "_")
    at, middle = _median(result)
    ax.plot(at, middle, color=LINE, linewidth=2, label="median")
    ran = [(candidate.lr, candidate.mean(1)) for candidate in result.race if math.isfinite(candidate.mean(1))]
    if ran:
        ax.plot(
            *zip(*ran, strict=True), color=_RACE, marker="D", markersize=5, linewidth=1, label=f"race: loss over {result.race_steps} steps"
        )
    _limits(ax, result, [*middle, *(loss for _, loss in ran)])
    _rules(ax, result)
    if result.lr is not None:
        if result.low and result.high:
            what = "about as good" if result.verified else "range of the rules"
            ax.axvspan(result.low, result.high, color=ink(ax), alpha=0.12, linewidth=0, label=what)
        ax.axvline(result.lr, color=ink(ax), linestyle=":", linewidth=1.6, label=f"chosen: {lr_text(result.lr)}")
    ax.set_xlabel("learning rate")
    ax.set_ylabel("training loss", loc="bottom")
    handles, _ = ax.get_legend_handles_labels()
    legend(ax, handles)
    return ax


def _median(result: LrFound) -> tuple[list[float], list[float]]:
    """Median over the seeds at each learning rate that at least half of them reached."""
    longest = max(result.sweeps, key=lambda sweep: len(sweep.lrs))
    curves = [sweep.smoothed for sweep in result.sweeps]
    at, middle = [], []
    for place, lr in enumerate(longest.lrs):
        there = [curve[place] for curve in curves if place < len(curve) and math.isfinite(curve[place])]
        if 2 * len(there) >= len(curves):
            at.append(lr)
            middle.append(statistics.median(there))
    return at, middle


def _limits(ax: Axes, result: LrFound, losses: list[float]) -> None:
    """Limit the axis to losses from the lowest to a little above the start; exploding ones are cut off."""
    low, high = min(losses), result.start
    span = max(high - low, 1e-3 * abs(high), 1e-12)
    bottom, top = low - 0.08 * span, high + 0.2 * span
    ax.set_ylim(bottom, bottom + (top - bottom) / _CURVES)
    ax.set_yticks([tick for tick in ax.get_yticks() if bottom <= tick <= top])
    ax.set_xlim(min(sweep.lrs[0] for sweep in result.sweeps), max(sweep.lrs[-1] for sweep in result.sweeps))


def _rules(ax: Axes, result: LrFound) -> None:
    """A row per rule, above the curves."""
    left, right = ax.get_xlim()
    known = [rule for rule in result.suggestions if rule.lr is not None]
    for row, rule in enumerate(known):
        height = _BAND[1] - (_BAND[1] - _BAND[0]) * row / max(1, len(known) - 1)
        where = ax.get_xaxis_transform()
        assert rule.lr is not None
        assert rule.low is not None
        assert rule.high is not None
        ax.plot([rule.low, rule.high], [height, height], color=ink(ax), linewidth=1.4, transform=where, label="_")
        ax.plot(
            [rule.lr], [height], color=ink(ax), marker="o", markersize=5, linestyle="none", transform=where, label="_" if row else "rules"
        )
        on_left = math.log(rule.lr) > (math.log(left) + math.log(right)) / 2
        ax.annotate(
            rule.rule,
            (rule.low if on_left else rule.high, height),
            (-7 if on_left else 7, 0),
            xycoords=where,
            textcoords="offset points",
            ha="right" if on_left else "left",
            va="center",
            fontsize=8.5,
            color=ink(ax),
        )


_ABOVE = 2.5  # an interval without an end is cut at this many times the largest estimate
_WINDOW = SERIES[1]


def noise_scale(result: NoiseScale, ax: Axes | None = None) -> Axes:
    """The estimate against the number of steps, with its interval; windowed estimates; and the step from which the estimate is good enough.

    Raises:
        ValueError: it is from single samples, and has no steps to draw.
    """
    running = result.running()
    if not running:
        raise ValueError(f"{result!r} has no steps to draw: it is one number, of one moment")
    ax = prepared(ax, WIDTH, 3.4)
    top = _top(result, running)
    steps = [block.last for block in running]
    low, high = ([min(getattr(block, end), top) for block in running] for end in ("low", "high"))
    band(ax, steps, low, high, LINE, predicted=False, label=f"its {100 * result.level:.0f} % interval")
    known = [block for block in running if block.b_simple <= top]
    ax.plot([block.last for block in known], [block.b_simple for block in known], color=LINE, linewidth=1.8, label="estimate so far")
    _draw_windows(ax, result.over_time, top)
    _mark_enough(ax, running)
    ax.set_ylim(0, top)
    ax.set_xlim(left=0)
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("noise scale (samples)")
    ax.grid(axis="y", color=ink(ax), alpha=0.18, linewidth=0.8)
    legend(ax, ax.get_legend_handles_labels()[0])
    return ax


def _draw_windows(ax: Axes, blocks: Sequence[NoiseBlock], top: float) -> None:
    """Points with whiskers at the middle of each window; where the signal was lost in the noise there is only the whisker."""
    shown = [block for block in blocks if block.low < top]
    middles = [(block.first + block.last) / 2 for block in shown]
    ax.vlines(middles, [block.low for block in shown], [min(block.high, top) for block in shown], color=_WINDOW)
    known = [(middle, block.b_simple) for middle, block in zip(middles, shown, strict=True) if block.b_simple <= top]
    if known:
        ax.plot(*zip(*known, strict=True), linestyle="none", marker="o", markersize=5, color=_WINDOW, label="windowed estimate")


def _mark_enough(ax: Axes, running: Sequence[NoiseBlock]) -> None:
    """A dotted line at the step from which the interval is narrow enough."""
    late = [block for block in running if not relative_width(block) <= ENOUGH]
    enough = [block for block in running if not late or block.last > late[-1].last]
    if not enough:
        return
    first = enough[0].last
    note_beside(ax, first, f"enough, from step {first}", left=first > running[-1].last / 2, path_effects=halo(ax))


def _top(result: NoiseScale, running: Sequence[NoiseBlock]) -> float:
    """The upper limit: well above the estimate, and above its last interval if that has an end."""
    if math.isfinite(result.high):
        return max(result.high * 1.1, _ABOVE * result.b_simple)
    known = [block.low for block in running if block.low > 0] + [block.b_simple for block in running[-1:] if math.isfinite(block.b_simple)]
    return _ABOVE * max(known, default=1.0)


COLORS = {"old": SERIES[1], "new": LINE}
"""Plan → colour."""


def plan_proof(result: PlanProof, ax: Axes | None = None) -> Axes:
    """The loss of each plan against the samples: thin lines are seeds, the thick line is their mean, smoothed so that it never rises. The
    dotted line is the old plan's final loss; the hollow diamond is where the new one was predicted to reach it.
    """
    ax = prepared(ax, 7.0, 3.4)
    for name, plan in (("old", result.old), ("new", result.new)):
        mean = result.mean(name)
        label = f"{name}: batch {plan.global_batch:,}, {units.rate(mean.samples_per_sec)}"
        ax.plot(*zip(*mean.falling, strict=True), color=COLORS[name], linewidth=2.0, label=label)
        for curve in result.of(name):
            ax.plot(curve.samples, curve.losses, color=COLORS[name], linewidth=0.7, alpha=0.7)
    ax.axhline(result.target, color=ink(ax), linestyle=":", linewidth=1.2)
    if math.isfinite(result.predicted.samples):
        predicted = result.predicted.samples * result.mean("old").reaches(result.target)
        look = marker_look(ax, COLORS["new"], predicted=True) | {"linestyle": "none"}
        ax.plot([predicted], [result.target], marker="D", path_effects=halo(ax), zorder=4, label="new, predicted", **look)
    _in_words(ax)
    ax.set_xlabel("samples")
    ax.set_ylabel("loss")
    ax.legend(frameon=False, labelcolor=ink(ax))
    return ax


_LINE_STYLES = ("-", "-.", ":")


def schedule(
    what: Any, ax: Axes | None = None, *, steps: int | None = None, batch: int | None = None, by: str = "auto", lr: float | None = None
) -> Axes:
    """The learning rate against the steps, with its warm-up and its peak.

    Args:
        what: a RunSpec, a torch scheduler (which does not change), a function that makes one for an optimizer, or a `Schedule`; several in
            a list, or by name in a mapping: `{"old": spec, "new": bigger}`.
        ax: Axes to draw into; None = a new figure.
        steps: number of steps, for schedulers without a length.
        batch: samples per optimizer step, for schedulers; a second axis counts samples.
        by: unit of the horizontal axis, "steps" or "samples"; "auto" = samples if several batches are compared, otherwise steps.
        lr: peak learning rate, if a RunSpec leaves it to the task's optimizer.

    Raises:
        ValueError: nothing to draw, something of another kind, or samples without a known batch.
    """
    schedules = _schedules(what, steps, batch, lr)
    batches = {item.batch for item in schedules}
    if by not in ("auto", "steps", "samples"):
        raise ValueError(f"by={by!r}: allowed are 'auto', 'steps', 'samples'")
    if by == "samples" and None in batches:
        raise ValueError("by='samples' needs to know the samples per step: give batch=…, or a RunSpec with a micro_batch")
    in_samples = by == "samples" or (by == "auto" and len(batches) > 1 and None not in batches)
    ax = prepared(ax, WIDTH, 3.0)
    for index, item in enumerate(schedules):
        _draw(ax, item, index, in_samples=in_samples, alone=len(schedules) == 1)
    _in_words(ax)
    ax.set_xlabel("samples" if in_samples else "optimizer step")
    relative = any(isinstance(item, RunSpec) and item.lr is None for item in _each(what)) and lr is None
    ax.set_ylabel("learning rate / peak" if relative and all(item.peak[1] == 1 for item in schedules) else "learning rate")
    ax.set_ylim(bottom=0)
    ax.margins(x=0.01)
    ax.grid(axis="y", color=ink(ax), alpha=0.18, linewidth=0.8)
    if not in_samples and len(batches) == 1 and None not in batches:
        _count_samples(ax, batches.pop() or 1)
    if len(schedules) > 1:
        legend(ax, ax.get_legend_handles_labels()[0])
    return ax


def _each(what: Any) -> list[Any]:
    if isinstance(what, Mapping):
        return list(what.values())
    return list(what) if isinstance(what, Sequence) and not isinstance(what, str) else [what]


def _schedules(what: Any, steps: int | None, batch: int | None, lr: float | None) -> list[Schedule]:
    parts, names = _each(what), list(what) if isinstance(what, Mapping) else None
    if not parts:
        raise ValueError("no schedule to draw: a RunSpec, a torch scheduler or a Schedule is allowed, or several of them")
    return [_schedule(part, None if names is None else str(names[index]), steps, batch, lr) for index, part in enumerate(parts)]


def _schedule(what: Any, name: str | None, steps: int | None, batch: int | None, lr: float | None) -> Schedule:
    if isinstance(what, Schedule):
        return what if name is None else Schedule.from_json({**what.to_json(), "label": name})
    if isinstance(what, RunSpec):
        from workbench.batch.measure.schedule import schedule_of

        return schedule_of(what, lr=lr, name=name)
    from workbench.batch.measure.schedule import scheduled

    return scheduled(what, steps, lr=1.0 if lr is None else lr, batch=batch, label=name)


def _draw(ax: Axes, item: Schedule, index: int, *, in_samples: bool, alone: bool) -> None:
    scale = (item.batch or 1) if in_samples else 1
    color, style = SERIES[index % len(SERIES)], _LINE_STYLES[index % len(_LINE_STYLES)]
    label = item.label if item.batch is None else f"{item.label}, batch {number(item.batch)}"
    positions = [step * scale for step in item.steps]
    ax.plot(positions, item.lrs, color=color, linestyle=style, linewidth=1.8, label=label, marker="o" if len(positions) < 3 else None)
    step, peak = item.peak
    if not item.constant:
        ax.plot([step * scale], [peak], marker="D", color=color, markersize=5, linestyle="none")
    if alone:
        left = not item.constant and step > (item.steps[0] + item.steps[-1]) / 2
        words = f"{'constant' if item.constant else 'peak'} {number(peak)}"
        words += f", after {number(item.warmup_steps)} steps of warm-up" if item.warmup_steps else ""
        ha = "right" if left else "left"
        ax.annotate(
            words, (step * scale, peak), (-8 if left else 8, 3), textcoords="offset points", ha=ha, color=ink(ax), path_effects=halo(ax)
        )
        ax.set_ylim(top=peak * 1.12)
    if item.warmup_steps:
        ax.axvspan(positions[0], step * scale, color=color, alpha=0.12, linewidth=0)


def _count_samples(ax: Axes, batch: int) -> None:
    """A second axis above, in samples."""

    def to_samples(step: Any) -> Any:
        return step * batch

    def to_steps(samples: Any) -> Any:
        return samples / batch

    above = ax.secondary_xaxis("top", functions=(to_samples, to_steps))
    above.set_xlabel(f"samples, {number(batch)} a step", color=ink(ax))
    above.tick_params(colors=ink(ax), width=0.8)
    above.spines["top"].set_color(ink(ax))
    _in_words(above)


def _in_words(ax: Any) -> None:
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) < 1e6 else units.count(value))
