"""Finds what went wrong with the losses and gradient norms of a run: spikes, an explosion, a loss that rises or does not fall.

Each is held against the run's own noise, not against a fixed threshold: a spike against the largest deviations before it.
"""

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import linear_regression, median
from typing import Any

from workbench.core import units
from workbench.core.checks import is_number, is_whole

WINDOW = 200
"""Values before a step that say how much the run varies."""
LEVEL = 15
"""Losses whose median is the level that a loss has now."""
LEAST = 30
"""Values that are needed before anything can be called out of the ordinary."""
SPIKE = 10.0
"""Deviations (scaled MAD) above the running median that make a spike, if it is also twice the largest deviation of the window and lasts."""
ALONE = 8.0
"""Times the largest deviation of the window, for a spike of a single step."""
LASTS = 3
"""Of the next five steps, how many must be high as well, where a spike is smaller."""
EXPLODES = 10.0
"""Times the usual norm of the gradients for which they explode."""
FLAT = 0.02
"""A loss whose fall over the run is surely less than this share of it does not fall; or three times that, where none is seen."""
LONG = 100
"""Steps before a loss is said not to fall."""
LASTING = 0.25
"""Part of the losses for which a loss must have been higher, where it came down again: with the order of samples, it comes and goes."""
CLEAR = 4.0
"""Standard errors by which a loss must be higher, where neighbouring losses are correlated."""
MOST_CORRELATED = 0.99
"""Largest correlation of neighbouring losses that is reckoned with."""
LEAST_CHANGES = 9
"""Changes from one loss to the next that tell how much losses vary."""
GROWN = 4.0
"""Factor by which the smallest of the last losses must exceed the largest of the first where a loss is said to grow. Chosen."""
AT_ONCE, DEVIATIONS = 8.0, 6.0
"""Times the largest loss before it, and standard deviations of the logarithms, for a loss that explodes or jumps in the first `LEAST`;
the standard deviations also for a spike of a single step later.

Chosen: losses of single samples, which vary by a factor of ten, do not reach it.
"""

FAR_ABOVE = 30.0
"""Factor of the range of the other losses by which a loss must exceed those before it, where some are 0 or less and have no logarithm.
Chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that went wrong in a run."""

    kind: str
    """"hang", "not finite", "spike", "rise", "not falling", "exploding gradients", "slow rank", "change" or "failed"."""
    step: int | None
    """The first step in which it shows, from 1; None = it belongs to no step."""
    rank: int | None
    """The rank; None = all, or not known."""
    message: str
    """What was seen, with its figures."""
    hint: str
    """What to try."""

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}" if self.hint else self.message


class _Recent:
    """The last values, in order, for medians."""

    def __init__(self, window: int = WINDOW) -> None:
        self.values: list[float] = []
        self._sorted: list[float] = []
        self._window = window

    def add(self, value: float) -> None:
        self.values.append(value)
        insort(self._sorted, value)
        if len(self.values) > self._window:
            del self._sorted[bisect_left(self._sorted, self.values.pop(0))]

    @property
    def middle(self) -> float:
        return self._sorted[len(self._sorted) // 2]

    @property
    def largest(self) -> float:
        return self._sorted[-1]


SHORT = 10
"""Losses that tell whether they grow all the time."""


def _usual_noise(loss: float, usual: float, before: Sequence[tuple[int, float]]) -> bool:
    """Whether a loss is within what the logarithms of those before it vary by, as losses of single samples do by factors."""
    noise = relative_noise([value for _, value in before])
    return noise is not None and usual > 0 and math.log(loss) - math.log(usual) < DEVIATIONS * noise


def _jump(step: int, words: str) -> Fault:
    hint = "a smaller learning rate, clip_grad_norm=1.0, or look at the samples of that step"
    return Fault(kind="spike", step=step, rank=None, message=words, hint=hint)


def spikes(losses: Sequence[tuple[int, float]], most: int = 3, surely: bool = True) -> list[Fault]:
    """Steps in which the loss jumps up, out of proportion to how much it varied before; from the loss after the first `LEAST` on.

    Of losses that are usually the same, such as 0, half do not vary at all: they jump where they are far above the largest before.

    Args:
        losses: (step, loss).
        most: spikes that are listed one by one.
        surely: a spike of a single step must stand out more than one that lasts, as it may be chance.
    """
    recent, level, above = _Recent(), _Recent(LEVEL), _Recent()  # of a falling loss the level is that of the last steps
    highest = 0.0
    faults: list[Fault] = []
    count, quiet_until = 0, -1
    finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    for place, (step, loss) in enumerate(finite):
        if len(recent.values) >= LEAST and place > quiet_until:
            usual, noise, largest = level.middle, 1.4826 * recent.middle, max(above.values)
            over = loss - usual
            later = [value - usual for _, value in finite[place + 1 : place + 6]]
            if noise == 0:
                largest = highest
            limit = max(SPIKE * noise, 2 * largest)
            lasts = sum(value > max(4 * noise, largest) for value in later) >= LASTS
            alone = over > max(2 * limit, ALONE * largest) and not _usual_noise(loss, usual, finite[max(0, place - WINDOW) : place])
            if over > limit > 0 and (lasts or not surely or alone):
                ordinary = 3 * noise or largest
                after = next((at for at in range(place, len(finite)) if finite[at][1] - usual < ordinary), len(finite))
                count, quiet_until = count + 1, max(place + 20, after)  # until then it is the same spike
                back = f"back in step {finite[after][0]}" if after < len(finite) else "not back yet"
                times = f"{over / noise:.0f} times its noise" if noise else f"{loss / largest:.0f} times the largest before"
                faults.append(_jump(step, f"the loss jumps from {usual:.4g} to {loss:.4g} in step {step} ({times}), {back}"))
        if place > quiet_until or not level.values:
            level.add(loss)
            recent.add(abs(loss - level.middle))
            above.add(max(loss - level.middle, 0.0))
            highest = max(highest, abs(loss))
    if count > most:
        faults = [*faults[:most], Fault(kind="spike", step=faults[most].step, rank=None, message=f"{count - most} more spikes", hint="")]
    return faults


def explodes_at_once(losses: Sequence[tuple[int, float]]) -> list[Fault]:
    """A loss that is far higher within the first `LEAST` steps, and stays there; `spikes` knows too few losses then."""
    values = [loss if math.isfinite(loss) else math.nan for _, loss in losses]
    if any(loss <= 0 for loss in values[: 2 * LEAST]):
        return []  # `jumps_at_once` knows these
    for place in range(1, min(LEAST, len(values) - 2)):
        before, after = max(values[:place]), median(values[place : place + 5])
        if not (before > 0 and AT_ONCE * before < after < math.inf):
            continue
        first = next(at for at in range(place, len(values)) if values[at] > math.sqrt(before * after))
        noise = relative_noise(values[first:])
        if noise is not None and math.log(after) - math.log(before) > DEVIATIONS * noise:
            message = f"the loss explodes in step {losses[first][0]}: it is at {after:.4g}, and was {before:.4g} at most"
            hint = "a smaller learning rate, a warm-up, or clip_grad_norm=1.0"
            return [Fault(kind="rise", step=losses[first][0], rank=None, message=message, hint=hint)]
    return []


def jumps_at_once(losses: Sequence[tuple[int, float]]) -> list[Fault]:
    """A loss among the first `LEAST` that is far above those before it and those after it, where it does not stay there.

    Where losses that high come again, and `spikes` does not find them, they are usual. If some losses are 0 or less, the range of all
    others tells how far above it is.
    """
    known = [(step, loss) for step, loss in losses if math.isfinite(loss)][: 2 * LEAST]
    values = [loss for _, loss in known]
    if len(values) <= LEAST_CHANGES:
        return []
    noise = relative_noise(values) if min(values) > 0 else None
    for place in range(1, min(LEAST, len(values))):
        before, loss = max(values[:place]), values[place]
        if noise is not None:
            back, far = AT_ONCE * before, loss > AT_ONCE * before and math.log(loss) - math.log(before) > DEVIATIONS * noise
        else:
            back = before + (loss - before) / AT_ONCE
            span = max(others := [value for value in values if value < back], default=0.0) - min(others, default=0.0)
            far = loss - before > FAR_ABOVE * span > 0
        if far:
            after = next((at for at in range(place, len(values)) if values[at] <= back), len(values))
            peak = max(values[place:after])
            again = {step for step, later in known[after:] if later - before > (peak - before) / AT_ONCE}
            if again - {fault.step for fault in spikes(losses, most=len(losses))}:
                return []
            when = f"back in step {known[after][0]}" if after < len(values) else "not back yet"
            return [_jump(known[place][0], f"the loss jumps from {before:.4g} at most to {loss:.4g} in step {known[place][0]}, {when}")]
    return []


def faults_of(losses: Sequence[tuple[int, float]], window: int | None = None) -> list[Fault]:
    """An explosion or a jump among the first losses, spikes, and a loss that does not fall.

    Args:
        losses: (step, loss).
        window: only so many losses are looked at, at the beginning and at the end; None = all.
    """
    first, last = (losses, losses) if window is None else (losses[:window], losses[-window:])
    return (explodes_at_once(first) or jumps_at_once(first)) + spikes(last) + not_falling(last)


def growing_besides(losses: Sequence[tuple[int, float]], faults: Sequence[Fault]) -> list[Fault]:
    """The same as `growing`; nothing where one of the faults already says what is wrong with the losses."""
    return [] if any(fault.kind in ("spike", "rise", "not falling", "not finite") for fault in faults) else growing(losses)


def growing(losses: Sequence[tuple[int, float]]) -> list[Fault]:
    """A loss that is far higher in the last steps than it was in the first, and has been growing in between."""
    values = [loss for _, loss in losses if math.isfinite(loss)]
    part = min(LEVEL, len(values) // 4)
    if len(values) < SHORT or min(values) <= 0:
        return []
    first, last = max(values[:part]), min(values[-part:])
    noise = None if last < GROWN * first else relative_noise(values)
    if noise is None or math.log(last) - math.log(first) < DEVIATIONS * noise:
        return []
    message = (
        f"the loss grows: it was {first:.4g} at most in the first {part} of {len(values)} steps, and is {last:.4g} at least in the last"
    )
    hint = "a smaller learning rate, a warm-up, or clip_grad_norm=1.0"
    return [Fault(kind="rise", step=losses[0][0], rank=None, message=message, hint=hint)]


def relative_noise(losses: Sequence[float]) -> float | None:
    """How much losses vary around their course: the standard deviation of their logarithms, from one step to the next; None = not known."""
    changes = [math.log(b) - math.log(a) for a, b in pairwise(losses) if 0 < a < math.inf and 0 < b < math.inf]
    if len(changes) < LEAST_CHANGES:
        return None
    usual = median(changes)
    return 1.4826 * median(abs(change - usual) for change in changes) / math.sqrt(2)


def rises_of(losses: Sequence[tuple[int, float]], rates: Sequence[Any] = ()) -> tuple[list[Fault], list[str]]:
    """Steps since which the loss is higher for good, or was for long: change points, as `launch(watch="always")` follows them.

    Args:
        losses: (step, loss); where one is 0 or less, nothing is looked for.
        rates: the learning rate in each of these steps; empty = not known.

    Returns:
        The faults; and notes on rises that came with a higher learning rate and are still there, as in the last of several cycles.
    """
    from workbench.timeline.analysis.change_points import BLOCK, NEAR, ChangePoints  # they load numpy
    from workbench.timeline.analysis.step_table import blocks_of_losses

    values = [loss if math.isfinite(loss) else math.nan for _, loss in losses]
    if len(values) < LONG or any(value <= 0 for value in values):
        return [], []
    blocks = blocks_of_losses(values[: len(values) // BLOCK * BLOCK], 1)
    faults, notes = [], []
    for change in ChangePoints(("loss",), upward=True).add_blocks(0, blocks, waits=False):
        middles = [median(values[at : at + LEVEL]) for at in range(change.step, len(values) - LEVEL + 1, BLOCK)]
        halfway = (change.before + change.after) / 2
        back = next((change.step + BLOCK * place for place, middle in enumerate(middles) if middle < halfway), None)
        if back is not None and back - change.step < LASTING * len(values):
            continue
        parts = values[max(0, change.step - NEAR * BLOCK) : change.step], values[change.step : change.step + NEAR * BLOCK]
        if change.after - change.before < CLEAR * _error(parts, _noise(*parts)):
            continue  # losses that hang together come and go that far
        step, share = losses[change.step][0], units.percent(change.ratio - 1)
        message = f"since step {step:,} the loss is {share} higher ({change.before:.4g} → {change.after:.4g})"
        before, since = rates[max(0, change.step - NEAR * BLOCK) : change.step], rates[change.step : change.reported + 1]
        if all(map(is_number, (*before, *since))) and before and since and max(since) > (usual := median(before)):
            if back is None:
                notes.append(f"{message}, where the learning rate went from {usual:.3g} to {max(since):.3g}: is it too large?")
            continue
        ended = "" if back is None else f", until step {losses[back][0]:,}"
        hint = "the samples from there on, or the learning rate?"
        faults.append(Fault(kind="rise", step=step, rank=None, message=message + ended, hint=hint))
    return faults, notes


def not_falling(losses: Sequence[tuple[int, float]]) -> list[Fault]:
    """A loss that surely has not fallen over the whole run; where it may have, and noise hides it, nothing is said."""
    values = [loss for _, loss in losses if math.isfinite(loss)]
    if len(values) < LONG or len(values) < len(losses):
        return []
    part = len(values) // 4
    first, last = values[:part], values[-part:]
    fall, error = _fall(first, last, values)
    level = abs(median(first))
    earliest = median(values[: max(5, part // 5)])  # it may have fallen at once, and have stayed there
    most = 3 * FLAT if fall <= error / 2 else FLAT
    if level == 0 or fall + 2 * error > most * level or earliest - median(last) > max(3 * FLAT * level, 4 * error):
        return []
    how = f"rises from {median(first):.4g} to {median(last):.4g}" if fall < -2 * error else f"stays at {median(last):.4g}"
    message = f"the loss {how} over {len(values)} steps (±\u202f{200 * error / level:.1f}\u202f%)"
    hint = "is the learning rate too small or too large, are labels shuffled, are weights frozen? wb.sanity and wb.find_lr find out"
    return [Fault(kind="not falling", step=losses[0][0], rank=None, message=message, hint=hint)]


def not_seen_to_fall(losses: Sequence[tuple[int, float]]) -> str:
    """A note that a loss that is not said to stay did not fall beyond its noise in the later half of a run; "" = it did.

    A training that has converged has it as well as one that has stalled: which of them it is, only its level tells.
    """
    values = [loss for _, loss in losses if math.isfinite(loss)]
    if len(values) < LONG or len(values) < len(losses) or not_falling(losses):
        return ""
    later = values[len(values) // 2 :]
    middle = len(later) // 2
    (fall, error), level = _fall(later[:middle], later[-middle:]), abs(median(later[:middle]))
    if level == 0 or fall > 2 * error:
        return ""
    by, when = f"{round(100 * abs(fall) / level)} ± {200 * error / level:.0f} %", f"in the last {len(later)} of {len(values)} steps"
    if fall < -2 * error:
        return f"{when} the loss rose by {by}: is the learning rate too large there, or did the data change?"
    sign = "-" if fall < 0 else ""
    return f"{when} no fall of the loss can be told from its noise: it fell by {sign}{by}"


def _fall(first: Sequence[float], last: Sequence[float], whole: Sequence[float] = ()) -> tuple[float, float]:
    """By how much the median fell between two parts, and the standard error of that; by the noise of the whole if given."""
    return median(first) - median(last), _error((first, last), _noise(whole) if whole else _noise(first, last))


def _error(parts: Sequence[Sequence[float]], noise: float) -> float:
    """The standard error of the difference between the medians of two parts, by the variance of the noise of single values."""
    return 1.25 * math.sqrt(noise * sum(1 / len(part) for part in parts))


def _noise(*parts: Sequence[float]) -> float:
    """The variance of values around a straight line in each part, larger where neighbours are correlated.

    n values with a correlation r of neighbours tell as much of a mean as n (1 - r) / (1 + r) independent ones, as in an autoregressive
    process of the first order. Around a line r comes out too small by about (2 + 4 r) / n, by simulation more near 1, and this is added.
    """
    rests = [_about_line(part) for part in parts]
    count, power = sum(map(len, rests)), sum(value * value for rest in rests for value in rest)
    r = sum(one * other for rest in rests for one, other in pairwise(rest)) / (power or 1.0)
    r = min(max(0.0, r + (2 + 4 * r) * len(rests) / count), MOST_CORRELATED)
    return power / count * (1 + r) / (1 - r)


def _about_line(values: Sequence[float]) -> list[float]:
    """What is left of values without the straight line through them."""
    slope, start = linear_regression(range(len(values)), values)
    return [value - start - slope * place for place, value in enumerate(values)]


def exploding(rows: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """Gradients whose norm grows far beyond what is usual, and stays there; from rows of `noise_scale=`, `gradient_norms=` or METRICS."""
    norms = [(row["step"], _norm(row)) for row in rows if is_whole(row.get("step"))]
    known = sorted({step: norm for step, norm in norms if norm is not None}.items())  # after a restart steps are repeated
    recent = _Recent()
    for place in range(len(known) - 2):
        usual, now = recent.middle if place >= LEAST else 0.0, [norm for _, norm in known[place : place + 3]]
        if usual > 0 and min(now) > max(EXPLODES * usual, 2 * recent.largest):
            within = known[place + 2][0] - known[place - 1][0]
            message = (
                f"the norm of the gradients grows from {usual:.3g} to {now[-1]:.3g} within {within} steps, from step {known[place][0]} on"
            )
            hint = "clip_grad_norm=1.0, a smaller learning rate or a warm-up"
            return [Fault(kind="exploding gradients", step=known[place][0], rank=None, message=message, hint=hint)]
        recent.add(now[0])
    return []


def _norm(row: Mapping[str, Any]) -> float | None:
    """The norm of the mean gradient of a step, as it was before it was clipped, or that of the gradients of all layers."""
    if is_number(norm := row.get("grad_norm"), least=0, most=sys.float_info.max):
        return float(norm)
    layers = row.get("norms")
    norms = [row.get("big")] if not isinstance(layers, Mapping) else [*layers.values()]
    known = [norm for norm in norms if is_number(norm, least=0, most=sys.float_info.max)]
    norm = math.hypot(*known) if isinstance(layers, Mapping) else math.sqrt(sum(known))
    return norm if len(known) == len(norms) and math.isfinite(norm) else None
