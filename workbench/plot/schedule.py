"""The learning rate over the steps, from the real scheduler: one plan, or several in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench import units
from workbench.batch.scaled import number
from workbench.batch.schedule import Schedule
from workbench.plot.canvas import prepared
from workbench.plot.colors import INK, LINE, PHASES
from workbench.plot.stack import WIDTH
from workbench.spec import RunSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = (LINE, PHASES["data_wait"], PHASES["optimizer"], PHASES["h2d"], PHASES["forward"], PHASES["other"])
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
        from workbench.train.scheduled import schedule_of

        return schedule_of(what, lr=lr, name=name)
    from workbench.measure.scheduled import scheduled

    return scheduled(what, steps, lr=1.0 if lr is None else lr, batch=batch, label=name)


def _draw(ax: Axes, one: Schedule, place: int, *, in_samples: bool, alone: bool) -> None:
    scale = (one.batch or 1) if in_samples else 1
    color, style = _COLORS[place % len(_COLORS)], _STYLES[place % len(_STYLES)]
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
