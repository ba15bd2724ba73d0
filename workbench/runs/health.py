"""Finds what went wrong with the numbers of a run: NaN, loss spikes, a loss that rises or stays, exploding gradients, slow ranks.

Each is held against the run's own noise, not against a fixed threshold: a spike against the largest deviations before it, a slow rank
against how much ranks differ anyway. `health(run)` gives all of it, with the hang, if there was one.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from workbench.core import brief, run_directory, units
from workbench.core.checks import is_whole
from workbench.core.codec import to_json
from workbench.core.synonyms import accept_synonyms
from workbench.core.vocabulary import PHASES
from workbench.runs.loss_faults import (
    LEAST,
    Fault,
    exploding,
    faults_of,
    growing_besides,
    not_seen_to_fall,
    rises_of,
)
from workbench.runs.rank_ends import MANY_RANKS
from workbench.runs.rows import RunRows, losses_of
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec
from workbench.timeline.analysis.alarm_events import MEETS, NOT_FINITE, NOT_TIME, REDUCTION, AlarmEvent, waited_for
from workbench.timeline.timeline import Timeline

MOST_STEPS = 5_000
"""Steps, the last ones, in which ranks are compared."""
EPISODE, DIPS = 8, 0.25
"""Steps that a rank must be slow in a row, and by which share of a step, to be named."""

NO_LOSS = (
    "the loss of this run was not recorded, so spikes, rises and a loss that does not fall were not looked for, and NaN only "
    'if it was launched with watch="always"'
)
"""Of a script's run."""
OWN = "only rank 0's losses were searched for jumps: one on another rank alone is not seen (a NaN is, on every rank)"
"""Of a run whose ranks have different samples, where nothing is wrong."""
MANY = (
    f"with more than {MANY_RANKS} ranks the files of single ranks are not read: slow ranks, alarms, and a loss that is NaN on another rank "
    "than 0 were not looked for"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What went wrong in a run, and what was looked at."""

    faults: tuple[Fault, ...]
    """What was seen, by step; slow ranks last."""
    losses: int
    """Losses that were looked at."""
    ranks: int
    """Ranks whose times were compared."""
    notes: tuple[str, ...] = ()
    """What is no fault, and yet not known to be right: no fall of a noisy loss is seen, no loss is known, or no checkpoint was written."""

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.faults

    @property
    def looked(self) -> bool:
        """Whether there was anything to look at."""
        return bool(self.losses or self.ranks > 1 or self.faults)

    def brief(self) -> dict[str, Any]:
        """The answer for a program or an agent, as plain JSON values that take at most BRIEF_BYTES as text."""
        faults = [to_json(fault) | {"message": brief.short(fault.message), "hint": brief.short(fault.hint)} for fault in self.faults]
        value = {"ok": self.ok, "looked": self.looked, "losses": self.losses, "ranks": self.ranks, "faults": faults}
        return brief.fitted(value | {"notes": [brief.short(note) for note in self.notes]}, "faults", "notes")

    def __str__(self) -> str:
        if self.faults:
            return "\n".join([*(f"fault: {fault}" for fault in self.faults), *(f"note: {note}" for note in self.notes)])
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
    faults += not_finite(losses, rows) + faults_of(losses)
    known = [
        alarm.step for more in rows.values() for row in more if (alarm := AlarmEvent.of_row(row.get("alarm"))) and alarm.phase == "loss"
    ]
    known += [fault.step for fault in faults if fault.kind == "spike" and fault.step is not None]
    rises, with_rate = rises_of(losses, [row.get("lr") for row in metrics if row.get("loss") is not None])
    faults += [rise for rise in rises if rise.step is None or not any(abs(rise.step - step) <= 2 * MEETS for step in known)]
    faults += growing_besides(losses, faults)
    faults += exploding(files.read(run_directory.noise_file(0))) or exploding(files.read(run_directory.GRADIENTS)) or exploding(metrics)
    faults += slow_ranks(timelines) + changes(rows)
    faults = [dataclasses.replace(fault, hint=_beside(run.spec, fault)) for fault in faults]
    faults.sort(key=lambda fault: (fault.kind == "slow rank", -1 if fault.step is None else fault.step))
    no_loss = "" if losses or not isinstance(run.spec, ScriptSpec) else NO_LOSS
    unsaved = [note for note in run.notes if "could not be" in note and "checkpoint" in note][-1:]
    own = OWN if losses and not faults and isinstance(run.spec, RunSpec) and run.spec.data_ranks > 1 and not many else ""
    notes = tuple(filter(None, [not_seen_to_fall(losses), *with_rate, no_loss, own, MANY * many, *unsaved]))
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
        events = [alarm for more in rows.values() for row in more if (alarm := AlarmEvent.of_row(row.get("alarm")))]
        events = sorted((alarm for alarm in events if alarm.phase == NOT_FINITE), key=lambda alarm: alarm.step)
        first = [(events[0].step, alarm.rank, "") for alarm in events if alarm.step - events[0].step <= MEETS]  # not each loss is read
    if not first:
        return []
    step = min(place[0] for place in first)
    ranks = sorted({rank for at, rank, _ in first if at == step})
    weights = next((words for _, _, words in sorted(first) if words), "")
    who = "" if not rows or len(ranks) == len(rows) else f", on rank {', '.join(map(str, ranks))}"
    message = f"the loss is NaN or infinite from step {step} on{who}" + (f"; soon after, {weights}" if weights else "")
    hint = "a smaller learning rate, a warm-up, clip_grad_norm=1.0, or precision='amp_bf16'"
    hint += "; on one rank only, look at its samples" * bool(who)
    return [Fault(kind="not finite", step=step, rank=ranks[0] if who else None, message=message, hint=hint)]


def changes(rows: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Fault]:
    """What ranks reported while they ran (`launch(watch="always")`), where the training lost by it. A rank that became slow repeatedly has
    one fault for all its times.

    Where a rank gets slower before its backward, the others wait for it in theirs: that is reported once, for the rank that is slow.

    Args:
        rows: the rows of each rank's file that are no steps.
    """
    every = [
        alarm for more in rows.values() for row in more if (alarm := AlarmEvent.of_row(row.get("alarm"))) and alarm.phase != NOT_FINITE
    ]
    losses = [alarm for alarm in every if alarm.phase == "loss"]
    events = [alarm for alarm in every if alarm.phase != "loss" and (alarm.slower or alarm.phase in NOT_TIME)]
    kept = [alarm for alarm in events if not waited_for(alarm, events)]
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
                continue  # reported with that rank
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


def _higher_losses(events: Sequence[AlarmEvent], ranks: int) -> list[Fault]:
    """A loss that rose for good; one that rose on several ranks at once is one fault."""
    faults, left = [], sorted(events, key=lambda alarm: (alarm.step, alarm.rank))
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


def _beside(spec: RunSpec | ScriptSpec, fault: Fault) -> str:
    """A hint that does not name what the run has already, and that names `replay` where it may say more."""
    hint = fault.hint
    if not isinstance(spec, RunSpec):
        return hint
    if spec.clip_grad_norm is not None:
        hint = hint.replace("clip_grad_norm=1.0", f"a clip_grad_norm below {spec.clip_grad_norm:g}")
    if spec.warmup_steps:
        hint = hint.replace("a warm-up", "a longer warm-up")
    hint = hint if spec.precision == "amp_fp16" else hint.replace(", or precision='amp_bf16'", "")
    again = "; wb.replay(run) repeats the step, and says whether it was the data, the rate or the numerics"
    return hint + again * (fault.kind == "not finite")


def new_faults(run: Run) -> list[Fault]:
    """The faults that the notes of a run do not say already."""
    return [
        fault
        for fault in health(run).faults
        if fault.kind not in ("hang", "change", "failed") and (fault.kind != "not finite" or fault.rank is not None)
    ]


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
                f"rank {rank} is slower than usual by {units.seconds(by)} a step, where the median step takes {units.seconds(length)}, "
                f"in steps {common[first] + 1} to {common[min(last + 3, len(common) - 1)] + 1}{more}; the others wait for it"
            )
            faults.append(Fault(kind="slow rank", step=common[first] + 1, rank=rank, message=message, hint=_SLOW))
    return faults


BACKWARD = PHASES.index("backward")
_SLOW = "another program on its cores or GPU, heat (clocks), a slow disk for its samples? Compare its machine: wb.diagnose(run)"


def _spans(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """(begin, end) of each stretch of at least EPISODE; those with fewer steps than that between them are one."""
    spans: list[tuple[int, int]] = []
    begin = None
    for place, flag in enumerate([*flags, False]):
        if flag and begin is None:
            begin = place
        elif not flag and begin is not None:
            if place - begin >= EPISODE:
                joins = spans and begin - spans[-1][1] < EPISODE
                spans.append((spans.pop()[0] if joins else begin, place))
            begin = None
    return spans
