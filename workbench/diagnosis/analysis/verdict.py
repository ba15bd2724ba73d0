"""Decides which part limits a step: the part whose removal would save most, whatever its share of observed time.

Waiting that is hidden saves nothing when it is removed, and a part of training saves nothing while the step waits for its loader. So each
part is removed, by an ablation or in arithmetic over ablations, and the largest saving names the verdict. If no ablation saves time, the
verdict is compute-bound.

A Judgement also compares three independent sources, part by part: marks in the loop, ablations, and a trace of a step.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.core import units
from workbench.core.codec import JsonDataclass, fields_to_json
from workbench.core.display import table as display
from workbench.core.statistics import Interval
from workbench.diagnosis.analysis import causes
from workbench.diagnosis.analysis.causes import Cause
from workbench.diagnosis.analysis.costs import NOTHING, Costs, at_least_0, beside_others, capped, noise_warnings
from workbench.diagnosis.analysis.evidence import Evidence

VERDICTS = {
    "input-bound": "waiting for data",
    "transfer-bound": "copying batches to the device",
    "compute-bound": "computing forward and backward",
    "optimizer-bound": "the optimizer's step",
    "host-bound": "Python, launches or sleep, while no operator runs",
    "communication-bound": "reducing gradients over the ranks",
    "straggler": "one rank that is slower than the others",
    "stalled": "pauses in some steps",
    "inconclusive": "too much noise to tell",
}
"""What limits a step, in one word, and in a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One part of the step as three independent sources see it: fractions of the step; None where a source cannot see it."""

    part: str
    """Of PARTS."""
    clocks: float | None = None
    """Time between marks in the loop, as `wb.watch` sees it."""
    arms: float | None = None
    """What the step saved when the part was removed."""
    trace: float | None = None
    """Operators and Python stacks, from inside a cached step."""
    note: str = ""
    """Where they differ: why, and which one counts."""

    @property
    def agree(self) -> bool | None:
        """Do the sources that can see it lie within MAX_DISAGREEMENT of each other? None if there are fewer than two."""
        seen = [value for value in (self.clocks, self.arms, self.trace) if value is not None]
        return max(seen) - min(seen) <= MAX_DISAGREEMENT if len(seen) > 1 else None


MAX_DISAGREEMENT = 0.1
"""Fractions of the step this far apart still agree. Chosen: blocks of one quiet machine differ by half of it. It decides a word in a table,
and no verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement(JsonDataclass):
    """What follows from evidence."""

    verdict: str
    """Of VERDICTS."""
    cause: str
    """The cause under the verdict."""
    why: str
    """One or two sentences with the numbers."""
    shares: Mapping[str, Interval] = field(default_factory=dict)
    """Part → the fraction of the step that its removal would save. A part that hides behind another one saves nothing."""
    sources: tuple[Source, ...] = ()
    """The parts as clocks, ablations and trace see them."""
    notes: tuple[str, ...] = ()
    """Close decisions, and what makes the result uncertain."""

    @property
    def table(self) -> display.Table:
        """One row per part, with a column each for clocks, experiments and, if it saw a part, the trace."""
        word = {None: "", True: "they agree", False: "they differ"}
        rows = [
            [s.part, units.percent(s.clocks), units.percent(s.arms), units.percent(s.trace), s.note or word[s.agree]] for s in self.sources
        ]
        table = display.Table(
            columns=("part", "clocks", "experiments", "trace", ""),
            rows=rows,
            title="Three sources",
            note="shares of the step: between marks in the loop, saved without the part, and in a trace; the experiments count",
        )
        return table if any(s.trace is not None for s in self.sources) else table.without("trace")

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**fields_to_json(self), "shares": {part: saved.to_list() for part, saved in self.shares.items()}}

    def __str__(self) -> str:
        return f"{self.verdict} ({self.cause}): {self.why}\n\n{self.table}"

    def _repr_html_(self) -> str:
        text = "".join(f"<p>{display.escape(text)}</p>" for text in (f"{self.verdict} ({self.cause})", self.why))
        return text + self.table._repr_html_()


def sources_of(e: Evidence, c: Costs) -> tuple[Source, ...]:
    """Each part that at least one source can see, as fractions of the step."""
    sources = [_data(e, c), _transfer(e, c), _optimizer_source(e, c), _communication(e, c), _host(e, c)]
    return tuple(source for source in sources if source is not None)


def _clock(e: Evidence, phase: str) -> float | None:
    """Mean share of a phase over the ranks."""
    shares = [rank.timeline.share(phase) for rank in e.ranks if rank.timeline.count]
    known = [share for share in shares if not math.isnan(share)]
    return statistics.fmean(known) if known else None


def _traced(c: Costs, seconds: float | None, step: float) -> float | None:
    """From the replayed step to the whole one."""
    return None if seconds is None or not step else seconds / step * c.replayed / c.step


def _arm(e: Evidence, c: Costs, name: str, seconds: float) -> float | None:
    return seconds / c.step if name in e.arms else None


def _data(e: Evidence, c: Costs) -> Source | None:
    clock = _clock(e, "data_wait")
    late = max(0.0, c.straggler.mid - c.slow.compute) if c.slow else 0.0
    arm = None if c.doubt else _arm(e, c, "cached", c.data.mid + min(late, c.clean - c.cached))
    if clock is None and arm is None:
        return None
    note = ""
    if clock is not None and arm is not None and abs(clock - arm) > MAX_DISAGREEMENT:
        if arm > clock and e.loading is not None and e.loading.num_workers:
            note = "workers take cores from training: the loader costs more than it is waited for"
        elif e.serial_wait is not None and noise_warnings(e):
            note = "the load on the machine differed: the range includes both"
        elif arm > clock:
            note = "the loader costs more than it is waited for, or the load on the machine differed"
        elif e.world_size == 1 and e.device == "cpu" and e.loading is not None and not e.loading.num_workers:
            note = "the load on the machine differed"
        else:
            note = "part of the waiting would only move elsewhere: another rank or the device is slower"
    return Source(part="data_wait", clocks=clock, arms=arm, note=note)


def _transfer(e: Evidence, c: Costs) -> Source | None:
    clock = _clock(e, "h2d")
    arm = _arm(e, c, "device_batch", c.transfer.mid)
    if arm is None and not clock:
        return None
    return Source(part="transfer", clocks=clock, arms=arm)


def _optimizer_source(e: Evidence, c: Costs) -> Source | None:
    clock = _clock(e, "optimizer")
    arm = _arm(e, c, "no_optimizer", c.optimizer.mid)
    trace = _traced(c, e.inside.optimizer, e.inside.step) if e.inside else None
    if clock is None and arm is None and trace is None:
        return None
    note = ""
    if clock is not None and arm is not None and clock > arm + MAX_DISAGREEMENT:
        note = "work that was queued before finishes while it is timed"
    elif trace is not None and arm is not None and arm > trace + MAX_DISAGREEMENT:
        note = "its writes push forward and backward out of the caches"
    return Source(part="optimizer", clocks=clock, arms=arm, trace=trace, note=note)


def _communication(e: Evidence, c: Costs) -> Source | None:
    arm = _arm(e, c, "no_sync", c.communication.mid)
    trace = _traced(c, e.inside.collectives, e.inside.step) if e.inside else None
    if arm is None and trace is None:
        return None
    note = "clocks have it inside backward"
    if arm is not None and trace is not None:
        exposed = min(arm, trace)
        note = f"exposed {units.percent(exposed)}, contention {units.percent(max(0.0, arm - exposed))}; clocks have it inside backward"
    return Source(part="communication", arms=arm, trace=trace, note=note)


def _host(e: Evidence, c: Costs) -> Source | None:
    if e.inside is None:
        return None
    clock = _clock(e, "other")
    return Source(part="host", trace=c.host.mid / c.step, note=f"clocks saw {units.percent(clock)} outside all phases" if clock else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The saving from which on a part is blamed."""

    least: float
    """Fraction of the step that its removal saves."""
    least_low: float
    """The same at the lower end of its interval."""
    reason: str


USUAL = Limit(
    least=0.15,
    least_low=0.10,
    reason="removal makes the step 1.18 times as fast: worth a change. In healthy training, loaders, reductions and logging take 1 to 10 %",
)
"""The limit of most parts. Chosen, and held against the gallery: what is planted there takes 17 % and more, and in healthy loops nothing
takes more than 9 %. With half, healthy loops whose loader or log takes 8 % are blamed; with twice, a loader that costs a quarter of the
step is not."""
LIMITS = {
    "optimizer": Limit(
        least=0.30,
        least_low=0.20,
        reason="an optimizer can be made cheaper, not removed, and a healthy AdamW takes up to a quarter of a step with small batches",
    ),
    "host": Limit(
        least=0.25,
        least_low=0.12,
        reason="some Python always runs between operators: 10 to 20 % in healthy models on a CPU, and a trace makes the gaps longer",
    ),
    "checkpoints": Limit(
        least=0.08,
        least_low=0.07,
        reason="each was timed where it was saved, so that nothing is inferred, and saving less often, or in a thread, removes them",
    ),
}
"""Limits of parts that differ from USUAL. Chosen on the machine of `FITTED_ON` by healthy models in the gallery; fractions, so a faster
machine changes them little. With half, healthy steps with small batches are called optimizer- or host-bound; with twice, only parts of half
a step are blamed."""

UNMARKED = "time outside all phases"
"""The cause where a phase that every training has was not seen, and the time outside the phases is most of the step."""
HIDDEN_REDUCTION = "communication hides inside backward"
"""The cause where clocks cannot tell reducing gradients from computing."""
WIDE_INTERVAL = 0.2
"""An interval of a saving as wide as this decides nothing near a limit. Chosen: twice the difference between the two numbers of most
limits. With half, more close cases are inconclusive; with twice, some are decided by noise."""
MAX_CONTRADICTION = 2.0
"""A step on a noisy machine that takes more than so many times what it takes without its loader and what making its batches takes was not
measured under the same load. Chosen. With half as much, most diagnoses on a busy machine are inconclusive; with twice, a loader is blamed
for a burst of other work."""
MIN_THREADS_SHARE = 0.4
"""More threads than cores slow down everything else; they are blamed if they explain so much of the largest saving. Measured on two cores:
0.6 to 0.75 of what reductions seem to cost then. With half, one thread too many is blamed for slow reductions; with twice, threads are
never blamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A verdict that the evidence may support."""

    verdict: str
    part: str
    saved: Interval
    """Fraction of the step."""
    cause: Cause
    limit: Limit = USUAL

    @property
    def stands(self) -> bool:
        return self.saved.mid >= self.limit.least and self.saved.low >= self.limit.least_low

    @property
    def unmarked(self) -> bool:
        """Is it time of which nothing is known but that it lies outside all phases?"""
        return self.cause.cause == UNMARKED

    @property
    def open(self) -> bool:
        """Does its interval reach the limit?"""
        return (
            not self.stands
            and self.saved.high >= self.limit.least
            and (self.saved.mid >= self.limit.least_low or self.saved.width >= WIDE_INTERVAL)
        )


def judge(evidence: Evidence) -> Judgement:
    """What limits the step, and why.

    Args:
        evidence: from experiments, or from observation alone, whose savings are ceilings.
    """
    costs = Costs.of(evidence)
    candidates = _candidates(evidence, costs)
    shares: dict[str, Interval] = {}
    for candidate in candidates:
        if candidate.part not in shares or candidate.saved.mid > shares[candidate.part].mid:
            shares[candidate.part] = capped(at_least_0(candidate.saved), 1.0)
    standing = sorted((candidate for candidate in candidates if candidate.stands), key=lambda candidate: -candidate.saved.mid)
    doubtful = sorted((candidate for candidate in candidates if candidate.open), key=lambda candidate: -candidate.saved.mid)
    notes = noise_warnings(evidence)
    if not evidence.observed and "cached" not in evidence.arms:
        verdict, cause = "inconclusive", "not enough was tried"
        why = " ".join(["The step could not be run without its loader, so what holds it back is not known.", *evidence.notes[:1]])
    elif notes and standing and standing[0].part == "data_wait" and (doubt := _contradiction(evidence, costs)):
        verdict, cause, why = "inconclusive", "noise", f"{doubt} {notes[0]}"
    elif standing:
        best = _surest(standing, bool(notes))
        crowd = next((candidate for candidate in standing if candidate.cause.cause == "oversubscribed threads"), best)
        if crowd.saved.mid >= MIN_THREADS_SHARE * standing[0].saved.mid:
            best = crowd
        best = next((candidate for candidate in (standing[0], best) if candidate.unmarked), best)
        verdict, cause, why = best.verdict, best.cause.cause, f"{_saving(evidence, costs, best)} {best.cause.why}"
        if best.unmarked:
            verdict, why = "inconclusive", best.cause.why
        notes += [_also(evidence, other) for other in standing if other.verdict != best.verdict]
    elif doubtful and (notes or doubtful[0].saved.width >= WIDE_INTERVAL):
        best = doubtful[0]
        verdict, cause = "inconclusive", "noise" if notes else "too few measurements"
        why = f"{_saving(evidence, costs, best)} The step may be {best.verdict}, but the measurements vary too much to tell." + (
            f" {notes[0]}" if notes else ""
        )
    elif not (evidence.observed or evidence.inside or {*evidence.arms} - {"cached", "loader"}):
        verdict, cause, why = "inconclusive", "not enough was tried", "It is not the loader, and there was no time to try anything else."
    elif evidence.observed and (hidden := _hidden_reduction(evidence)) >= USUAL.least:
        verdict, cause = "inconclusive", HIDDEN_REDUCTION
        why = (
            f"Backward is longer than twice forward by {units.percent(hidden)} of the step, which may be the reduction of gradients or "
            "computing: clocks cannot tell. wb.diagnose(spec) tries it."
        )
    elif doubt := _unexplained_wait(evidence, costs):
        verdict, cause, why = "inconclusive", "noise" if notes else "too few measurements", " ".join([doubt, *notes[:1]])
    else:
        computes = causes.compute_cause(evidence, costs)
        verdict, cause, why = "compute-bound", computes.cause, _computes(costs, candidates, computes)
        notes += [f"{candidate.verdict} is close: {_percents(candidate.saved)} could be saved" for candidate in doubtful]
    notes += filter(None, [costs.doubt, causes.own_code_note(evidence, costs) if verdict != "host-bound" else ""])
    return Judgement(verdict=verdict, cause=cause, why=why.strip(), shares=shares, sources=sources_of(evidence, costs), notes=tuple(notes))


def _contradiction(e: Evidence, c: Costs) -> str:
    """Why the times of step and loader cannot both be right: without workers, a batch costs about what making it takes. "" = they can."""
    if e.observed or e.world_size > 1 or e.loading is None or e.loading.num_workers or math.isnan(e.loading.alone):
        return ""
    made = e.loading.alone * e.accumulation
    if c.step <= MAX_CONTRADICTION * (c.cached + made):
        return ""
    return (
        f"The step takes {units.seconds(c.step)}, although it takes {units.seconds(c.cached)} without its loader, and making its batches "
        f"{units.seconds(made)}: these were measured under different loads."
    )


def _unexplained_wait(e: Evidence, c: Costs) -> str:
    """Why the loop cannot wait for data as long as its clocks say and gain as little by cached batches; "" = it can.

    A single process on a CPU whose loader has no workers: what it waits for is made by the same cores, and nothing hides it.
    """
    clock = _clock(e, "data_wait")
    if clock is None or e.observed or e.world_size > 1 or e.device != "cpu" or e.loading is None or e.loading.num_workers:
        return ""
    saved = c.share(c.data)
    if e.ranks[0].timeline.mean("data_wait") < (saved.high + USUAL.least) * c.step:
        return ""
    shorter = f"only {_percents(saved)} shorter" if saved.mid > 0 else "no shorter"
    return (
        f"By its clocks the loop waits for data for {units.percent(clock)} of the step, although the step without its loader is {shorter}: "
        f"these were measured under different loads."
    )


def unseen(e: Evidence) -> str:
    """What may be in the time outside all phases of an observed step, since no mark was seen of it; "" = nothing, or it is no such step."""
    if not e.observed:
        return ""
    if not _clock(e, "data_wait"):
        return "no DataLoader was seen, so that is making the batches, or other Python"
    missing = [phase for phase in ("forward", "backward") if not _clock(e, phase)]
    return f"no {' and no '.join(missing)} was seen, so that is computing, or Python" if missing else ""


def _surest(standing: list[Candidate], noisy: bool) -> Candidate:
    """The one that saves most; of those that might, where intervals overlap because of noise, the one that saves most at least."""
    first = standing[0]
    if not noisy and first.saved.width < WIDE_INTERVAL:
        return first
    return max((candidate for candidate in standing if candidate.saved.high >= first.saved.low), key=lambda candidate: candidate.saved.low)


def _input_limit(e: Evidence, c: Costs, cause: Cause) -> Limit:
    """Where workers keep up, taking batches over from them is a part of having them: no deeper queue takes that off."""
    if cause.cause != "prefetch" or e.loading is None or not e.loading.handover:
        return USUAL
    taken = e.loading.handover * e.accumulation / c.step
    return dataclasses.replace(USUAL, least=USUAL.least + taken, least_low=USUAL.least_low + taken)


def _candidates(e: Evidence, c: Costs) -> list[Candidate]:
    """Every part that could be removed, with what that saves."""
    cause = causes.input_cause(e, c)
    candidates = [Candidate(verdict="input-bound", part="data_wait", saved=c.share(c.data), cause=cause, limit=_input_limit(e, c, cause))]
    pausing = causes.pausing_rank(e)
    if c.slow:
        late = c.straggler if c.slow.input >= c.slow.compute else c.saves(c.straggler)
        saved = at_least_0(beside_others(e, c.share(late)))
        candidates.append(Candidate(verdict="straggler", part="straggler", saved=saved, cause=causes.straggler_cause(e, c)))
    for verdict, part, seconds, cause_of in (
        ("communication-bound", "communication", c.communication, causes.communication_cause),
        ("transfer-bound", "transfer", c.transfer, causes.transfer_cause),
    ):
        if seconds != NOTHING:
            saved = c.share(c.saves(seconds))
            saved = at_least_0(beside_others(e, saved)) if part == "communication" else saved
            candidates.append(Candidate(verdict=verdict, part=part, saved=saved, cause=cause_of(e, c)))
    if e.stalls.at:
        stalled = c.share(c.stalls)
        if pausing is None:
            limit = LIMITS["checkpoints"] if e.stalls.noted else USUAL
            candidates.append(Candidate(verdict="stalled", part="stalls", saved=stalled, cause=causes.stalled_cause(e, c), limit=limit))
        else:
            candidates.append(Candidate(verdict="straggler", part="stalls", saved=stalled, cause=causes.pauses_cause(e, pausing)))
    if c.optimizer != NOTHING:
        candidates.append(_optimizer(e, c))
    if e.observed and c.host.mid:
        candidates.append(Candidate(verdict="host-bound", part="host", saved=c.share(c.saves(c.host)), cause=_outside(e, c)))
    for host in (causes.oversubscription(e, c), causes.garbage_collection(e, c)):
        if host:
            saved, cause = host
            candidates.append(Candidate(verdict="host-bound", part="host", saved=c.share(c.saves(saved)), cause=cause))
    if gaps := causes.between_operators(e, c):
        saved, cause = gaps
        limit = USUAL if cause.cause in ("sleeping or I/O", "allocator retries") else LIMITS["host"]
        candidates.append(Candidate(verdict="host-bound", part="host", saved=c.share(c.saves(saved)), cause=cause, limit=limit))
    return candidates


def _outside(e: Evidence, c: Costs) -> Cause:
    """What the time outside all phases is: Python, unless a phase that every training has was not seen."""
    if what := unseen(e):
        why = f"{units.percent(c.host.mid / c.step)} of each step ({units.seconds(c.host.mid)}) lie outside all phases, and {what}"
        return Cause(cause=UNMARKED, why=f"{why}: clocks cannot tell one from the other.")
    return Cause(cause="python", why=f"{units.seconds(c.host.mid)} of each step lie outside all phases.")


def _optimizer(e: Evidence, c: Costs) -> Candidate:
    """It cannot be left out, so the usual limit holds for what another implementation saves; or it is most of the step."""
    cheaper = [e.arms[name].saved for name in ("optimizer=fused", "optimizer=foreach") if name in e.arms]
    real = any(saved.mid * c.replayed / c.step >= USUAL.least and saved.low * c.replayed / c.step >= USUAL.least_low for saved in cheaper)
    return Candidate(
        verdict="optimizer-bound",
        part="optimizer",
        saved=c.share(c.saves(c.optimizer)),
        cause=causes.optimizer_cause(e, c),
        limit=USUAL if real else LIMITS["optimizer"],
    )


def _hidden_reduction(e: Evidence) -> float:
    """Fraction of an observed step by which backward exceeds its usual length, twice forward; several ranks reduce gradients in it."""
    if e.world_size < 2:
        return 0.0
    return max(rank.timeline.share("backward") - 2 * rank.timeline.share("forward") for rank in e.ranks)


_WITHOUT = {
    "data_wait": "the loader",
    "straggler": "the slowest rank's delay",
    "communication": "the reduction of gradients",
    "transfer": "copies to the device",
    "stalls": "the stalls",
    "optimizer": "the optimizer's step",
    "host": "the work outside all phases",
}


def _percents(interval: Interval) -> str:
    return f"{units.percent(interval.mid)} ({units.percent(max(0.0, interval.low))} … {units.percent(interval.high)})"


def _also(e: Evidence, other: Candidate) -> str:
    """A note on another part that is large enough to be blamed."""
    if other.unmarked:
        return f"also {UNMARKED}, {_percents(other.saved)}: {unseen(e)}"
    return f"also {other.verdict} ({other.cause.cause}): {_percents(other.saved)} could be saved"


def _saving(e: Evidence, c: Costs, candidate: Candidate) -> str:
    left = units.seconds(c.step * (1 - candidate.saved.mid))
    if e.observed:
        return f"Without {_WITHOUT[candidate.part]} the step would take {left} instead of {units.seconds(c.step)}, at best."
    if candidate.part == "host":
        return f"The host holds up {_percents(candidate.saved)} of the step."
    return (
        f"Without {_WITHOUT[candidate.part]} the step takes {left} instead of {units.seconds(c.step)}: {_percents(candidate.saved)} less."
    )


def _computes(c: Costs, candidates: list[Candidate], computes: Cause) -> str:
    largest = max(candidates, key=lambda candidate: candidate.saved.mid)
    text = f"Forward and backward take {units.percent(c.compute / c.step)} of the step."
    if largest.saved.mid > 0.01:
        name = "optimizer" if largest.part == "optimizer" else largest.verdict.removesuffix("-bound")
        text += f" The most that could be taken away otherwise is {units.percent(largest.saved.mid)} ({name}: {largest.cause.cause})."
    return f"{computes.why} {text}" if computes.why else text
