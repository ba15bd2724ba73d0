"""Makes the HTML of the batch planner, live and static, by pure functions."""

import math
from collections.abc import Iterator, Sequence

from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.scaled_lr import VALIDITY_TEXT, number, numbers
from workbench.batch.facts import extrapolation_note
from workbench.batch.panel.model import IMPOSSIBLE, Planned
from workbench.core import units
from workbench.core.display import html as stack
from workbench.core.display.colors import ERROR, LINE, LINE_PALE, PHASES, SUCCESS, WARNING
from workbench.core.display.table import escape

COLORS = {"inside": SUCCESS, "edge": WARNING, "unknown": PHASES["other"], "outside": ERROR, IMPOSSIBLE: ERROR}
"""Validity → colour: green, amber, grey, red."""
TINTS = {"inside": "finished", "edge": "stopped", "unknown": "stopped", "outside": "failed", IMPOSSIBLE: "failed"}
"""Validity → the state of a run whose badge has the same colour: green, amber, red."""
WORDS = {**VALIDITY_TEXT, IMPOSSIBLE: "impossible"}
_HIGH = 84  # pixels of a picture
_DOTTED = "background-image:radial-gradient(#fff 1.2px,transparent 1.6px);background-size:6px 6px;"


def head(title: str) -> str:
    return f'<div class="wb-head"><strong class="wb-name">Batch planner</strong><span class="wb-spec">{escape(title)}</span></div>'


def validity(planned: Planned) -> str:
    """The rule's validity, and the reason."""
    border = f"border:2px solid {COLORS[planned.light]};border-radius:10px;padding:1px 9px;margin-right:8px"
    return (
        f'<div role="status"><div class="wb-head"><span class="wb-badge wb-is-{TINTS[planned.light]}" '
        f'style="{border}">{escape(WORDS[planned.light])}</span>'
        f'<span class="wb-product">{escape(_product(planned))}</span></div>'
        f'<div class="wb-said">{escape(planned.why)}</div></div>'
    )


def _product(planned: Planned) -> str:
    plan = planned.plan
    if plan is None:
        return f"batch {planned.batch:,}"
    return f"{plan.micro_batch:,} × {plan.accumulation} × {plan.world_size} = {plan.global_batch:,} samples per step"


def figures(planned: Planned) -> str:
    """Learning rate, betas, warm-up, and steps, samples and time to the target: new values with the present ones."""
    plan, old = planned.plan, planned.known.plan
    if plan is None:
        return ""
    tiles = [("learning rate", number(plan.lr), number(old.lr))]
    scaled = plan.scaled
    if scaled is not None and scaled.betas is not None:
        before = BatchPlan.scaled_to(old, global_batch=old.global_batch, rule="none").scaled
        tiles.append(("betas", numbers(scaled.betas), numbers(before.betas if before and before.betas else ())))
    tiles.append(("warm-up", _steps(plan.warmup_steps), _steps(old.warmup_steps)))
    tiles += _outlook(planned)
    shown = stack.tiles((label, value, _was(value, before)) for label, value, before in tiles)
    return shown + "".join(f'<div class="wb-what">{escape(line)}</div>' for line in _small_print(planned, plan))


def _small_print(planned: Planned, plan: BatchPlan) -> Iterator[str]:
    """Why the warm-up has changed, and that throughput is extrapolated to other numbers of processes."""
    if plan.warmup_steps != planned.known.plan.warmup_steps:
        yield f"warm-up: {plan.reasons['warmup_steps']}"
    curve = planned.known.throughput
    if curve is not None and plan.world_size != curve.world_size:
        yield extrapolation_note(curve, plan.world_size)


def _outlook(planned: Planned) -> list[tuple[str, str, str]]:
    after, before = planned.after, planned.before
    tiles = []
    if not math.isnan(after.steps):
        tiles.append(("steps to target", units.count(round(after.steps)), units.count(round(before.steps))))
        tiles.append(("samples to target", units.count(round(after.samples)), units.count(round(before.samples))))
    if not math.isnan(after.rate):
        tiles.append(("throughput", units.rate(after.rate), units.rate(before.rate)))
    if not math.isnan(after.seconds):
        tiles.append(("time to target", units.seconds(after.seconds), units.seconds(before.seconds)))
    steps, seconds = planned.gain
    if math.isnan(after.steps) and not math.isnan(steps):
        tiles.append(("steps to the same loss", units.times(steps), ""))
    if math.isnan(after.seconds) and not math.isnan(seconds):
        tiles.append(("time to the same loss", units.times(seconds), ""))
    return tiles


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}" if count else "none"


def _was(value: str, before: str) -> str:
    return "of the present one" if not before else f"was {before}" if before != value else "as before"


def ladder(planned: Planned) -> str:
    """The learning rate that the rule gives every batch, coloured by whether it holds there."""
    rates = [lr for _, _, lr in planned.ladder if lr == lr]
    if not rates:
        return ""
    low, high = math.log(min(rates)), math.log(max(rates))
    columns = "".join(_column(planned, *step, low=low, high=high) for step in planned.ladder)
    critical = planned.known.critical
    noise_name = "critical batch" if planned.known.fit is not None else "noise scale"
    noise = f"; the {noise_name} is {number(round(critical))} samples" if critical and math.isfinite(critical) else ""
    shown = {WORDS[name]: COLORS[name] for name in COLORS if any(step[1] == name for step in planned.ladder)}
    return (
        f'<div class="wb-steps"><div class="wb-label">learning rate against batch by the rule {escape(repr(planned.rule))}{noise}</div>'
        f'<div class="wb-columns" role="img" aria-label="{escape(_in_words(planned))}" style="display:flex;align-items:flex-end">{columns}'
        f"</div>{stack.legend(shown, 0)}</div>"
    )


def _column(planned: Planned, batch: int, valid: str, lr: float, *, low: float, high: float) -> str:
    share = 0.06 if lr != lr else 0.12 + 0.88 * ((math.log(lr) - low) / (high - low) if high > low else 1.0)
    now, own = batch == planned.batch, batch == planned.known.plan.global_batch
    text = units.MISSING if lr != lr else number(lr)
    dots = _DOTTED if valid in ("outside", IMPOSSIBLE) else ""
    ring = f"outline:2px solid {LINE};outline-offset:1px;" if now else ""
    weight = "font-weight:600;" if now else ""
    words = f"batch {batch:,}: learning rate {text}, {WORDS[valid]}" + ("; as it is" if own else "")
    return (
        f'<div title="{escape(words)}" style="flex:1 1 0;text-align:center;font-size:11px;{weight}margin-right:3px">'
        f'<div style="white-space:nowrap;font-size:10px;margin-bottom:4px">{escape(text)}</div>'
        f'<div class="wb-light-{valid}" style="height:{_HIGH * share:.0f}px;background-color:{COLORS[valid]};{dots}{ring}"></div>'
        f'<div style="border-top:2px {"solid" if own else "none"} currentColor;margin-top:3px">{units.count(batch)}</div></div>'
    )


def _in_words(planned: Planned) -> str:
    return ", ".join(f"{batch:,}: {number(lr) if lr == lr else 'none'} ({WORDS[valid]})" for batch, valid, lr in planned.ladder)


def schedule(planned: Planned, curves: Sequence[Sequence[float]], samples: int, *, own: bool = False) -> str:
    """The learning rate over the samples of a run: columns for the new plan, a line for the present one."""
    if planned.plan is None:
        return ""
    most = max(max(curve) for curve in curves)
    columns = "".join(_moment(old, new, most) for old, new in zip(*curves, strict=True))
    aside = "; without your own schedule, which is not imported here" if own else ""
    ends = f"<span>0</span><span>{units.count(samples)} samples</span>"
    label = f"learning rate over {samples:,} samples: up to {number(max(curves[1]))} as planned, {number(max(curves[0]))} as it is"
    return (
        f'<div class="wb-steps"><div class="wb-label">learning rate over the samples: planned; the line is as it is now{aside}</div>'
        f'<div class="wb-schedule" role="img" aria-label="{escape(label)}" style="display:flex;height:{_HIGH}px">{columns}</div>'
        f'<div class="wb-what" style="display:flex;justify-content:space-between;font-size:12px">{ends}</div>'
        f"{_too_short(planned.plan, samples)}</div>"
    )


def _too_short(plan: BatchPlan, samples: int) -> str:
    steps = samples // plan.global_batch
    if plan.warmup_steps < steps:
        return ""
    note = f"the warm-up of {plan.warmup_steps:,} steps does not end in a run of {steps:,}: run longer, or set warmup_steps"
    return f'<div class="wb-what">{note}</div>'


def _moment(old: float, new: float, most: float) -> str:
    """A thin column for the plan, with a mark at the present learning rate."""
    high, mark = 100 * new / most, 100 * old / most
    foot = max(0.0, mark - 2.5)
    fill = f"linear-gradient(to top,{LINE_PALE} {high:.1f}%,transparent {high:.1f}%)"
    line = f"linear-gradient(to top,transparent {foot:.1f}%,currentColor {foot:.1f}% {mark:.1f}%,transparent {mark:.1f}%)"
    return f'<div style="flex:1 1 0;margin-right:-0.6px;background-color:transparent;background-image:{line},{fill}"></div>'


def static(title: str, planned: Planned, curves: Sequence[Sequence[float]], samples: int) -> str:
    """The static HTML, which needs no kernel."""
    table = "" if planned.plan is None else planned.plan._repr_html_()
    begin = f"<p><strong>Batch planner</strong> · {escape(title)}</p>"
    return f"<div>{begin}{validity(planned)}{figures(planned)}{ladder(planned)}{schedule(planned, curves, samples)}{table}</div>"
