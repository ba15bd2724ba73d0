"""Finds what went wrong with the numbers of a run: NaN, loss spikes, a loss that rises or stays, exploding gradients, slow ranks.

Each is held against the run's own noise, not against a fixed threshold: a spike against the largest deviations before it, a slow rank
against how much ranks differ anyway. `health(run)` gives all of it, with the hang, if there was one.
"""

import math
import os
import sys
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import linear_regression, median
from typing import Any

from workbench.core import brief, run_directory, units
from workbench.core.checks import is_number, is_whole
from workbench.core.codec import to_json
from workbench.core.synonyms import accept_synonyms
from workbench.core.vocabulary import PHASES
from workbench.runs.rank_ends import MANY_RANKS
from workbench.runs.rows import RunRows, losses_of
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec
from workbench.timeline.analysis.told import MEETS, NOT_FINITE, NOT_TIME, REDUCTION, Told, waited_for
from workbench.timeline.timeline import Timeline

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
"""A loss whose fall over the run is surely less than this share of it does not fall."""
LONG = 100
"""Steps before a loss is said not to fall."""
MOST_STEPS = 5_000
"""Steps, the last ones, in which ranks are compared."""
LASTING = 0.25
"""Part of the losses for which a loss must have been higher, where it came down again: with the order of samples, it comes and goes."""
CLEAR = 4.0
"""Standard errors by which a loss must be higher, where neighbouring losses are correlated."""
MOST_CORRELATED = 0.99
"""Largest correlation of neighbouring losses that is reckoned with."""
EPISODE, DIPS = 8, 0.25
"""Steps that a rank must be slow in a row, and by which share of a step, to be named."""

NO_LOSS = (
    "the loss of this run was not recorded, so spikes, rises and a loss that does not fall were not looked for, and NaN only "
    'if it was launched with watch="always"'
)
"""Of a script's run."""
MANY = (
    f"with more than {MANY_RANKS} ranks the files of single ranks are not read: slow ranks, alarms, and a loss that is NaN on another rank "
    "than 0 were not looked for"
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What went wrong in a run, and what was looked at."""

    faults: tuple[Fault, ...]
    """What was seen, by step."""
    losses: int
    """Losses that were looked at."""
    ranks: int
    """Ranks whose times were compared."""
    notes: tuple[str, ...] = ()
    """What is no fault, and yet not known to be right: of a noisy loss, that no fall of it can be seen; that no loss is known."""

    @property
    def ok(self) -> bool:
        """Was nothing wrong?"""
        return not self.faults

    @property
    def looked(self) -> bool:
        """Was there anything to look at?"""
        return bool(self.losses or self.ranks > 1 or self.faults)

    def brief(self) -> dict[str, Any]:
        """The answer for a program or an agent, as plain JSON values that take at most BRIEF_BYTES as text."""
        faults = [to_json(fault) | {"message": brief.short(fault.message), "hint": brief.short(fault.hint)} for fault in self.faults]
        value = {"ok": self.ok, "looked": self.looked, "losses": self.losses, "ranks": self.ranks, "faults": faults}
        return brief.fitted(value | {"notes": [brief.short(note) for note in self.notes]}, "faults", "notes")

    def __str__(self) -> str:
        if self.faults:
            return "\n".join(f"fault: {fault}" for fault in self.faults)
        notes = "".join(f"; {note}" for note in self.notes)
        looked = [f"{self.losses} losses"] * bool(self.losses) + [f"the steps of {self.ranks} ranks"] * (self.ranks > 1)
        return (
            f"nothing wrong in {' and '.join(looked)}{notes}"
            if looked
            else f"nothing to look at yet: no losses, and no two ranks to compare{notes}"
        )


@accept_synonyms
def health(run: Run | str | os.PathLike[str]) -> Health:
    """Find out what went wrong with the numbers of a run, finished or not.

    Args:
        run: a Run, or its directory.
    """
    run = run if isinstance(run, Run) else Run.load(run)
    files, hang = RunRows(run.path), run.hang
    metrics = files.read(run_directory.METRICS)
    losses = losses_of(metrics)
    many = run.spec.world_size > MANY_RANKS
    rows = {} if many else files.other_rows
    timelines = [] if many else list(files.timelines)
    faults = [Fault(kind="hang", step=None, rank=hang.rank, message=str(hang), hint="")] if hang else []
    error = run.error
    if error is not None and not (hang and error.kind == "hang"):
        message = f"{'the run' if error.rank is None else f'rank {error.rank}'}: {error.message}"
        message += f", at {error.place}" if error.place else ""
        faults.append(Fault(kind="failed", step=None, rank=error.rank, message=message, hint=error.hint or ""))
    faults += not_finite(losses, rows) + spikes(losses) + not_falling(losses)
    told = [alarm.step for more in rows.values() for row in more if (alarm := Told.of_row(row.get("alarm"))) and alarm.phase == "loss"]
    told += [fault.step for fault in faults if fault.kind == "spike" and fault.step is not None]
    rises, with_rate = rises_of(losses, [row.get("lr") for row in metrics if row.get("loss") is not None])
    faults += [rise for rise in rises if rise.step is None or not any(abs(rise.step - step) <= 2 * MEETS for step in told)]
    faults += exploding(files.read(run_directory.noise_file(0))) or exploding(files.read(run_directory.GRADIENTS)) or exploding(metrics)
    faults += slow_ranks(timelines) + changes(rows)
    faults.sort(key=lambda fault: -1 if fault.step is None else fault.step)
    no_loss = "" if losses or not isinstance(run.spec, ScriptSpec) else NO_LOSS
    notes = tuple(filter(None, [not_seen_to_fall(losses), *with_rate, no_loss, MANY * many]))
    return Health(faults=tuple(faults), losses=len(losses), ranks=len(timelines), notes=notes)


def not_finite(losses: Sequence[tuple[int, float]], rows: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Fault]:
    """The first loss that is NaN or infinite, on whichever rank.

    Args:
        losses: (step, loss) of rank 0.
        rows: the rows of each rank's file that are no steps; `not_finite` in them, or an alarm, is what the rank itself saw.
    """
    first = [(step, 0, "") for step, loss in losses if not math.isfinite(loss)][:1]
    for rank, more in rows.items():
        for row in more:
            seen = row.get("not_finite")
            if isinstance(seen, Mapping) and is_whole(seen.get("step"), least=1):
                first.append((seen["step"], rank, str(seen.get("weights") or "")[:300]))
    if not first:  # of a script, whose losses are known to its alarms alone
        told = [alarm for more in rows.values() for row in more if (alarm := Told.of_row(row.get("alarm")))]
        told = sorted((alarm for alarm in told if alarm.phase == NOT_FINITE), key=lambda alarm: alarm.step)
        first = [(told[0].step, alarm.rank, "") for alarm in told if alarm.step - told[0].step <= MEETS]  # not each loss is read
    if not first:
        return []
    step = min(place[0] for place in first)
    ranks = sorted({rank for at, rank, _ in first if at == step})
    weights = next((words for _, _, words in sorted(first) if words), "")
    who = "" if not rows or len(ranks) == len(rows) else f", on rank {', '.join(map(str, ranks))}"
    message = f"the loss is NaN or infinite from step {step} on{who}" + (f"; soon after, {weights}" if weights else "")
    hint = "a smaller learning rate, a warm-up, clip_grad_norm=1.0, or precision='amp_bf16'; on one rank only, look at its samples"
    return [Fault(kind="not finite", step=step, rank=ranks[0] if who else None, message=message, hint=hint)]


def changes(rows: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Fault]:
    """What ranks told while they ran (`launch(watch="always")`), where the training lost by it; a rank that became slow again and again has
    one fault for all its times.

    Where a rank gets slower before its backward, the others wait for it in theirs: that is told once, of the rank that is slow.

    Args:
        rows: the rows of each rank's file that are no steps.
    """
    every = [alarm for more in rows.values() for row in more if (alarm := Told.of_row(row.get("alarm"))) and alarm.phase != NOT_FINITE]
    losses = [alarm for alarm in every if alarm.phase == "loss"]
    told = [alarm for alarm in every if alarm.phase != "loss" and (alarm.slower or alarm.phase in NOT_TIME)]
    kept = [alarm for alarm in told if not waited_for(alarm, told)]
    culprits: dict[int, list[int]] = {}  # rank → steps since when all others wait for it
    faults = []
    for rank, phase in sorted(dict.fromkeys((alarm.rank, alarm.phase) for alarm in kept), key=lambda key: key[1] != REDUCTION):
        own = [alarm for alarm in kept if (alarm.rank, alarm.phase) == (rank, phase)]
        if phase in ("step", "throughput"):  # of the rank for which the others wait, no phase is known
            own = [alarm for alarm in own if not any(abs(alarm.step - step) <= MEETS for step in culprits.get(rank, []))]
            if not own:
                continue
        steps = ", ".join(f"{alarm.step:,}" for alarm in own[1:6])
        again = f"; and {_more(len(own) - 1)}, at step{'s' * (len(own) > 2)} {steps}" if len(own) > 1 else ""
        hint = "a leak? wb.find_leaks finds what stays" if phase in NOT_TIME else _SLOW if len(rows) > 1 else _SLOW.partition(" Compare")[0]
        words = own[0].words(len(rows))
        whose: int | None = rank
        together = sorted({a.rank for a in kept if a.phase == phase and abs(a.step - own[0].step) <= MEETS})
        if phase not in NOT_TIME and len(rows) > 1:
            if rank != together[0]:
                continue  # told with that rank
            others = [other for other in rows if other not in together]
            if not others:  # nobody is waited for
                words, whose = words.replace(", with the wait for other ranks,", "").replace(f" on rank {rank}", " on all ranks"), None
            elif len(others) == 1 and phase == REDUCTION:
                words, whose = f"{words}; the others wait for rank {others[0]}", others[0]
                culprits.setdefault(others[0], []).append(own[0].step)
            elif len(together) > 1:
                words, whose = words.replace(f" on rank {rank}", f" on ranks {', '.join(map(str, together))}"), None
        faults.append(Fault(kind="change", step=own[0].step, rank=whose, message=words + again, hint=hint))
    return faults + _higher_losses(losses, len(rows))


def _more(times: int) -> str:
    return "once more" if times == 1 else f"{times} more times"


def _higher_losses(told: Sequence[Told], ranks: int) -> list[Fault]:
    """A loss that rose for good; one that rose on several ranks at once is told once."""
    faults, left = [], sorted(told, key=lambda alarm: (alarm.step, alarm.rank))
    while left:
        first = left[0]
        together = sorted({alarm.rank for alarm in left if alarm.step - first.step <= MEETS})
        left = [alarm for alarm in left if alarm.step - first.step > MEETS]
        alone = len(together) == 1
        others = "" if alone else f"; on {len(together)} of {ranks} ranks"
        hint = (
            "its samples? Compare them with those of other ranks"
            if alone and ranks > 1
            else "the samples from there on, or the learning rate?"
        )
        message = first.words(ranks if alone else 1) + others
        faults.append(Fault(kind="change", step=first.step, rank=first.rank if alone else None, message=message, hint=hint))
    return faults


def new_faults(run: Run) -> list[Fault]:
    """The faults that the notes of a run do not say already."""
    return [
        fault
        for fault in health(run).faults
        if fault.kind not in ("hang", "change", "failed") and (fault.kind != "not finite" or fault.rank is not None)
    ]


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


def spikes(losses: Sequence[tuple[int, float]], most: int = 3, surely: bool = True) -> list[Fault]:
    """Steps in which the loss jumps up, out of proportion to how much it varied before.

    Args:
        losses: (step, loss).
        most: spikes that are listed one by one.
        surely: a spike of a single step must stand out more than one that lasts, as it may be chance.
    """
    recent, level, above = _Recent(), _Recent(LEVEL), _Recent()  # of a falling loss the level is that of the last steps
    faults: list[Fault] = []
    count, quiet_until = 0, -1
    finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    for place, (step, loss) in enumerate(finite):
        if len(recent.values) >= LEAST and place > quiet_until:
            usual, noise, largest = level.middle, 1.4826 * recent.middle, max(above.values)
            over = loss - usual
            later = [value - usual for _, value in finite[place + 1 : place + 6]]
            limit = max(SPIKE * noise, 2 * largest)
            lasts = sum(value > max(4 * noise, largest) for value in later) >= LASTS
            if over > limit and noise > 0 and (lasts or not surely or over > max(2 * limit, ALONE * largest)):
                after = next((at for at in range(place, len(finite)) if finite[at][1] - usual < 3 * noise), len(finite))
                count, quiet_until = count + 1, max(place + 20, after)  # until then it is the same spike
                back = f"back in step {finite[after][0]}" if after < len(finite) else "not back yet"
                message = f"the loss jumps from {usual:.4g} to {loss:.4g} in step {step} ({over / noise:.0f} times its noise), {back}"
                hint = "a smaller learning rate, clip_grad_norm=1.0, or look at the samples of that step"
                faults.append(Fault(kind="spike", step=step, rank=None, message=message, hint=hint))
        if place > quiet_until or not level.values:
            level.add(loss)
            recent.add(abs(loss - level.middle))
            above.add(max(loss - level.middle, 0.0))
    if count > most:
        faults = [*faults[:most], Fault(kind="spike", step=faults[most].step, rank=None, message=f"{count - most} more spikes", hint="")]
    return faults


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
        before, since = rates[max(0, change.step - NEAR * BLOCK) : change.step], rates[change.step : change.told + 1]
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
    if level == 0 or fall + 2 * error > FLAT * level or earliest - median(last) > max(3 * FLAT * level, 4 * error):
        return []
    how = f"rises from {median(first):.4g} to {median(last):.4g}" if fall < -2 * error else f"stays at {median(last):.4g}"
    message = f"the loss {how} over {len(values)} steps"
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


def slow_ranks(timelines: Sequence[Timeline]) -> list[Fault]:
    """Ranks that are slower than the others for a while, or come back to it; by their time outside of backward, where ranks wait."""
    measured = {timeline.rank: {step.index: step for step in timeline.measured} for timeline in timelines}
    common = sorted(set.intersection(*(set(steps) for steps in measured.values()))) if len(measured) > 1 else []
    common = common[-MOST_STEPS:]
    if len(common) < 2 * LEAST:
        return []
    own = {rank: [steps[index].seconds - steps[index].phases[BACKWARD] for index in common] for rank, steps in measured.items()}
    length = median(steps[index].seconds for steps in measured.values() for index in common)
    faults = []
    for rank, seconds in own.items():
        others = [median(theirs[at] for other, theirs in own.items() if other != rank) for at in range(len(common))]
        smooth = [median(seconds[at : at + 5]) - median(others[at : at + 5]) for at in range(len(common) - 4)]
        usual = median(smooth)
        noise = 1.4826 * median(abs(value - usual) for value in smooth)
        if usual > DIPS * length and usual > 4 * noise:
            message = (
                f"rank {rank} is slower than the others all the time, by {units.seconds(usual)} of the {units.seconds(length)} of a step"
            )
            faults.append(Fault(kind="slow rank", step=common[0] + 1, rank=rank, message=message, hint=_SLOW))
            continue
        spans = _spans([value - usual > max(DIPS * length, 8 * noise) for value in smooth])
        if spans:
            first, last = spans[0]
            more = f", and {_more(len(spans) - 1)}" if len(spans) > 1 else ""
            by = median(value - usual for begin, end in spans for value in smooth[begin:end])
            message = (
                f"rank {rank} is slower than usual by {units.seconds(by)} a step, where half of all take {units.seconds(length)} at most, "
                f"in steps {common[first] + 1} to {common[min(last + 3, len(common) - 1)] + 1}{more}; the others wait for it"
            )
            faults.append(Fault(kind="slow rank", step=common[first] + 1, rank=rank, message=message, hint=_SLOW))
    return faults


BACKWARD = PHASES.index("backward")
_SLOW = "another program on its cores or GPU, heat (clocks), a slow disk for its samples? Compare its machine: wb.diagnose(run)"


def _spans(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """(begin, end) of each stretch of at least EPISODE."""
    spans, begin = [], None
    for place, flag in enumerate([*flags, False]):
        if flag and begin is None:
            begin = place
        elif not flag and begin is not None:
            if place - begin >= EPISODE:
                spans.append((begin, place))
            begin = None
    return spans
