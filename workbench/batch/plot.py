"""What each rule makes of a learning rate, over the batch; and where the one that was used leads.

The learning-rate range test: losses over the learning rate, what each rule reads out of them, and the race that decided.

The gradient noise scale: the estimate as it narrows, and how it moves over the training.

`plan_proof`: the loss against the samples under two plans, with the loss at which they are compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.batch.analysis.lr_found import LrFound, figure
from workbench.batch.analysis.noise_estimate import ENOUGH, NoiseBlock, relative_width
from workbench.batch.analysis.noise_scale import NoiseScale
from workbench.batch.analysis.optimizer import Described
from workbench.batch.analysis.proof import PlanProof
from workbench.batch.analysis.scale_lr import factor_of
from workbench.batch.analysis.scaled_lr import LIGHTS, ScaledLr, number
from workbench.core import units
from workbench.core.display.axes import PALE, WIDTH, legend, prepared
from workbench.core.display.colors import INK, LINE, PARTS, PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_STYLES = {"linear": "--", "sqrt": "-.", "damped": "-", "none": ":"}
_WORDS = {"linear": "linear", "sqrt": "square root", "damped": "damped", "none": "none"}
_POINTS = 60
_BEYOND = 4.0  # times the larger batch, and below the smaller one


def scaled_lr(result: ScaledLr, ax: Axes | None = None) -> Axes:
    """The learning rate by each rule over the batch, through that of the base, a hollow diamond.

    The rule that was used is blue and leads to the full diamond. A vertical dotted line is the noise, where it is known.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    ax = prepared(ax, WIDTH, 3.4)
    base, used = Described.of(result.base), "sqrt" if result.rule == "adam" else result.rule
    low, high = min(result.batch, result.to_batch) / _BEYOND, max(result.batch, result.to_batch) * _BEYOND
    batches = [low * (high / low) ** (place / (_POINTS - 1)) for place in range(_POINTS)]
    for rule, style in _STYLES.items():
        if rule == "damped" and result.noise is None:
            continue
        rates = [result.base_lr * factor_of(rule, base, result.batch, batch, result.noise) for batch in batches]
        look = {"color": LINE, "linewidth": 2.2} if rule == used else {"color": INK, "linewidth": 1.2, "alpha": PALE}
        label = f"{_WORDS[rule]}{', with betas and epsilon' if result.rule == 'adam' and rule == used else ''}"
        ax.plot(batches, rates, linestyle=style, label=label, **look)  # type: ignore[arg-type]
    ax.plot([result.batch], [result.base_lr], marker="D", color=LINE, markersize=6, markerfacecolor="none", linestyle="none")
    ax.plot([result.to_batch], [result.lr], marker="D", color=LINE, markersize=6, linestyle="none")
    words = f"{number(result.lr)} at {number(result.to_batch)}: {LIGHTS[result.valid]}"
    ax.annotate(words, (1, 0), (-4, 5), xycoords="axes fraction", textcoords="offset points", color=INK, ha="right")
    if result.noise is not None and low <= result.noise <= high:
        ax.axvline(result.noise, color=PHASES["other"], linestyle=":", linewidth=1.4, label="noise scale")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: number(int(value) if value >= 1 and float(value).is_integer() else value))
    ax.set_xlabel("global batch (samples)")
    ax.set_ylabel("learning rate")
    ax.grid(color=INK, alpha=0.18, linewidth=0.8)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2, borderpad=0.2)
    return ax


_HEIGHT = 4.6
_CURVES = 0.6  # share of the height that the curves have; above stand the rules
_BAND = (0.66, 0.97)
_RACE, _RULE = PARTS["data_wait"], PARTS["straggler"]


def lr_range(result: LrFound, ax: Axes | None = None) -> Axes:
    """Smoothed losses of all seeds (pale) and their median (blue) over the learning rate; diamonds are the race's mean losses.

    Above the curves each rule has a row: a dot for its median suggestion, a line from the smallest seed's to the largest. The dotted line
    is the learning rate that was chosen, the band those that did about as well.

    Raises:
        ValueError: there are no sweeps.
    """
    if not result.sweeps:
        raise ValueError(f"{result!r} has no sweeps to draw")
    ax = prepared(ax, WIDTH, _HEIGHT)
    ax.set_xscale("log")
    for position, sweep in enumerate(result.sweeps):
        ax.plot(sweep.lrs, sweep.smoothed, color=LINE, alpha=0.3, linewidth=1, label="smoothed loss of a seed" if not position else "_")
    at, middle = _median(result)
    ax.plot(at, middle, color=LINE, linewidth=2, label="median")
    ran = [(one.lr, one.mean(1)) for one in result.race if math.isfinite(one.mean(1))]
    if ran:
        ax.plot(
            *zip(*ran, strict=True), color=_RACE, marker="D", markersize=5, linewidth=1, label=f"race: loss over {result.race_steps} steps"
        )
    _limits(ax, result, [*middle, *(loss for _, loss in ran)])
    _rules(ax, result)
    if result.lr is not None:
        if result.low and result.high:
            ax.axvspan(result.low, result.high, color=INK, alpha=0.12, linewidth=0, label="about as good")
        ax.axvline(result.lr, color=INK, linestyle=":", linewidth=1.6, label=f"chosen: {figure(result.lr)}")
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
    """From the lowest loss to a little above the start: what explodes leaves the picture."""
    low, high = min(losses), result.start
    room = max(high - low, 1e-3 * abs(high), 1e-12)
    bottom, top = low - 0.08 * room, high + 0.2 * room
    ax.set_ylim(bottom, bottom + (top - bottom) / _CURVES)
    ax.set_yticks([tick for tick in ax.get_yticks() if bottom <= tick <= top])
    ax.set_xlim(min(sweep.lrs[0] for sweep in result.sweeps), max(sweep.lrs[-1] for sweep in result.sweeps))


def _rules(ax: Axes, result: LrFound) -> None:
    """A row per rule, above the curves."""
    left, right = ax.get_xlim()
    known = [one for one in result.suggestions if one.lr is not None]
    for row, one in enumerate(known):
        height = _BAND[1] - (_BAND[1] - _BAND[0]) * row / max(1, len(known) - 1)
        where = ax.get_xaxis_transform()
        assert one.lr is not None
        assert one.low is not None
        assert one.high is not None
        ax.plot([one.low, one.high], [height, height], color=_RULE, linewidth=1.4, transform=where, label="_")
        ax.plot([one.lr], [height], color=_RULE, marker="o", markersize=5, linestyle="none", transform=where, label="_" if row else "rules")
        on_left = math.log(one.lr) > (math.log(left) + math.log(right)) / 2
        ax.annotate(
            one.rule,
            (one.low if on_left else one.high, height),
            (-7 if on_left else 7, 0),
            xycoords=where,
            textcoords="offset points",
            ha="right" if on_left else "left",
            va="center",
            fontsize=8.5,
            color=INK,
        )


_ABOVE = 2.5  # times the largest estimate, where an interval without an end is cut
_STRETCH = PHASES["data_wait"]


def noise_scale(result: NoiseScale, ax: Axes | None = None) -> Axes:
    """The estimate over more and more steps in its band; stretches of the training, each by itself; where it is known well enough.

    Raises:
        ValueError: it was made from single samples at one moment, and has no steps to draw.
    """
    running = result.running()
    if not running:
        raise ValueError(f"{result!r} has no steps to draw: it is one number, of one moment")
    ax = prepared(ax, WIDTH, 3.4)
    top = _top(result, running)
    steps = [block.last for block in running]
    ax.fill_between(
        steps,
        [min(block.low, top) for block in running],
        [min(block.high, top) for block in running],
        color=LINE,
        alpha=0.22,
        linewidth=0,
        label=f"its {100 * result.level:.0f} % interval",
    )
    known = [block for block in running if block.b_simple <= top]
    ax.plot([block.last for block in known], [block.b_simple for block in known], color=LINE, linewidth=1.8, label="estimate so far")
    _draw_stretches(ax, result.over_time, top)
    _mark_enough(ax, running)
    ax.set_ylim(0, top)
    ax.set_xlim(left=0)
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("noise scale (samples)")
    ax.grid(axis="y", color=INK, alpha=0.18, linewidth=0.8)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, borderpad=0.2)
    return ax


def _draw_stretches(ax: Axes, blocks: Sequence[NoiseBlock], top: float) -> None:
    """Points with whiskers, at the middle of each stretch; one whose signal was lost in the noise has the whisker only."""
    shown = [block for block in blocks if block.low < top]
    middles = [(block.first + block.last) / 2 for block in shown]
    ax.vlines(middles, [block.low for block in shown], [min(block.high, top) for block in shown], color=_STRETCH, alpha=0.7)
    known = [(middle, block.b_simple) for middle, block in zip(middles, shown, strict=True) if block.b_simple <= top]
    if known:
        ax.plot(*zip(*known, strict=True), linestyle="none", marker="o", markersize=5, color=_STRETCH, label="a stretch by itself")


def _mark_enough(ax: Axes, running: Sequence[NoiseBlock]) -> None:
    """A dotted line from which on the interval is narrow enough."""
    late = [block for block in running if not relative_width(block) <= ENOUGH]
    enough = [block for block in running if not late or block.last > late[-1].last]
    if not enough:
        return
    first = enough[0].last
    ax.axvline(first, color=INK, linestyle=":", linewidth=1.2, label="_enough")
    left = first > running[-1].last / 2
    ax.annotate(
        f"enough, from step {first}",
        (first, 1),
        (-6 if left else 6, -2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        color=INK,
    )


def _top(result: NoiseScale, running: Sequence[NoiseBlock]) -> float:
    """Where the picture ends: well above the estimate, and above its last interval where that has an end."""
    if math.isfinite(result.high):
        return max(result.high * 1.1, _ABOVE * result.b_simple)
    known = [block.low for block in running if block.low > 0] + [block.b_simple for block in running[-1:] if math.isfinite(block.b_simple)]
    return _ABOVE * max(known, default=1.0)


COLORS = {"old": PHASES["data_wait"], "new": LINE}
"""Plan → colour."""


def plan_proof(result: PlanProof, ax: Axes | None = None) -> Axes:
    """The loss of each plan over the samples it has seen: thin lines for the seeds, a thick one that never rises through their mean.
    The dotted line is the loss that the old plan ends with; a diamond marks where the new one was predicted to reach it.
    """
    ax = prepared(ax, 7.0, 3.4)
    for name, plan in (("old", result.old), ("new", result.new)):
        mean = result.mean(name)
        label = f"{name}: batch {plan.global_batch:,}, {units.rate(mean.samples_per_sec)}"
        ax.plot(*zip(*mean.falling, strict=True), color=COLORS[name], linewidth=2.0, label=label)
        for course in result.of(name):
            ax.plot(course.samples, course.losses, color=COLORS[name], linewidth=0.7, alpha=0.5)
    ax.axhline(result.target, color=INK, linestyle=":", linewidth=1.2)
    if math.isfinite(result.predicted.samples):
        there = result.predicted.samples * result.mean("old").reaches(result.target)
        ax.plot([there], [result.target], marker="D", color=COLORS["new"], markerfacecolor="none", linestyle="none", label="new, predicted")
    ax.set_xlabel("samples")
    ax.set_ylabel("loss")
    ax.legend(frameon=False, labelcolor=INK)
    return ax
