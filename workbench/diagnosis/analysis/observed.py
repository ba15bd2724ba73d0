"""Makes evidence of the timelines of a run. No experiment was run, so every saving is a ceiling, and some questions stay open."""

import dataclasses
import math
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from workbench.core import units
from workbench.core.system_load import Noise
from workbench.core.vocabulary import PHASES
from workbench.diagnosis.analysis.costs import is_crowded
from workbench.diagnosis.analysis.evidence import Evidence, Loading, RankEvidence, Stalls
from workbench.diagnosis.analysis.stalls import Call, even_distance, find_stalls
from workbench.diagnosis.analysis.step_model import UNKNOWN_OVERLAP
from workbench.harness.results import BUSY, OTHERS, Place
from workbench.runs.rows import busy_note, said_by
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec
from workbench.timeline.timeline import LARGEST, LEFT_OUT, WARNING, Pause, Timeline

MIN_STEPS = 8
"""Fewer measured steps say nothing about a mean."""
MORE_SECONDS = 120.0
"""The budget that is suggested for a script that took too few steps, or three times what it had. Chosen, not measured."""
SLOWED_PHASES, MAX_ONE_PHASE = 3, 0.9
"""A step was slowed down as a whole if it takes twice its usual time in so many phases, and a single phase has no more than this share of
what it takes longer. Chosen: a pause of the loop lies in one phase, with next to all of its time."""
PLACES = ("loop", "step", "dataset", "framework", "workers", "ddp")
WAITED_FOR = 0.05
"""Fraction of the step that is waiting for data below which workers keep up: how long they take is not seen then. Chosen as in `costs`.
With half or twice as much, workers of a script that hardly waits get a remedy or none; its gain is below that share."""
DATA, BACKWARD = PHASES.index("data_wait"), PHASES.index("backward")
MIN_SAVING = 0.01
"""Fraction of the step below which checkpoints are no part of it. Chosen: nobody would save less often for less. With half or twice as
much, a row of the parts comes or goes."""
MOST = 0.8
"""Fraction of what long steps take longer that is mostly the saving of checkpoints, where that was timed. Chosen: the rest is what varies.
What takes so much longer to save, as to gather a model from all ranks, shows in the long steps alone."""


def _hint(run: Run) -> str:
    """What to do about a run that has too few steps."""
    if run.state == "running":
        return "wait for it: run.wait()"
    if isinstance(run.spec, ScriptSpec) and not run.spec.watch:
        return "a script's steps are measured with watch=True"
    if run.state == "stopped":
        more = f"{max(MORE_SECONDS, 3 * run.seconds):.0f}"
        return f"it was stopped, or its budget ended, before: let it run longer, diagnose(…, budget_s={more}) or --budget {more}"
    if isinstance(run.spec, ScriptSpec) and not run.progress[0]:
        file = os.path.basename(run.spec.script)
        return (
            f"no steps of an optimizer were seen. Does it train when it is run (python {file})? If a function in it returns a wb.Task, "
            f"give that function's name after the file's: {file}:FUNCTION"
        )
    return "no more steps of an optimizer were seen"


def observe(source: Run | Timeline, *, outside: bool = False, noise: Noise | None = None) -> Evidence:
    """Evidence of a run, from its timelines alone, or of the timeline of a loop in this process.

    With `outside` it is a script's that can be launched again with other arguments of its loader, its optimizer or its launch: what it was
    seen to have of them is there, too. `noise` is what else the machine did meanwhile, where that was measured.

    Under DDP all ranks are equally long at each step, since they wait for each other inside `backward`. The one that is waited for is the
    one that waits least there: what the others' backward takes longer than the shortest is counted as their waiting, not as their work.

    Raises:
        ValueError: there is no step to look at, or too few.
    """
    run, all_ = (None, [source]) if isinstance(source, Timeline) else (source, source.timelines)
    timelines = [after_queue_drained(timeline) for timeline in all_ if timeline.count]
    if not timelines or min(timeline.count for timeline in timelines) < MIN_STEPS:
        most = min((timeline.count for timeline in timelines), default=0)
        if run is None:
            raise ValueError(f"the timeline has {most} measured steps, and at least {MIN_STEPS} are needed to judge it: take more steps")
        raise ValueError(
            f"{run!r} has {most} measured steps, and at least {MIN_STEPS} are needed to judge it ({run.state}): {run.error or _hint(run)}"
        )
    spec = run.spec if run and isinstance(run.spec, RunSpec) else None
    waits = _waits(timelines)
    judged = [_rank(timeline, wait) for timeline, wait in zip(timelines, waits, strict=True)]
    ranks = tuple(rank for rank, _ in judged)
    together = max((rank.stalls for rank in ranks), key=lambda stalls: stalls.share)
    if together.noted:
        ranks = _with_waits(ranks, together.per_step)
    of_run = [*run.notes, busy_note(run.path)] if run else []
    samples = [_samples(timeline) for timeline in timelines]
    said = said_by(run.path) if run else {}
    evidence = Evidence(
        step=statistics.fmean(timeline.mean() for timeline in timelines),
        device="cuda" if timelines[0].clock == "device" else "cpu",
        world_size=max(len(timelines), run.spec.world_size if run else 1),
        accumulation=spec.accumulation if spec else 1,
        threads=run.spec.threads if run else timelines[0].threads or 1,
        samples=None if None in samples else sum(count for count in samples if count is not None),
        precision=spec.precision if spec else "fp32",
        loading=_loading(spec) if spec else None,
        stalls=together,
        ranks=ranks,
        noise=noise if run else timelines[0].noise,
        observed=True,
        steps=sum(timeline.count for timeline in timelines),
        notes=tuple(filter(None, (*of_run, *(slowed for _, slowed in judged), *_notes(timelines)))),
        places=_places(said.get("places")),
    )
    if isinstance(threads := said.get("threads"), int) and threads > 0:  # a script may set them itself
        evidence = dataclasses.replace(evidence, threads=threads)
    if not outside:
        return evidence
    optimizer = said.get("optimizer")
    return dataclasses.replace(
        evidence,
        loading=_script_loading(said.get("loader"), timelines[0], noise.waiting if noise else 0.0),
        optimizer=optimizer[:200] if isinstance(optimizer, str) else None,
    )


def _places(places: Any) -> dict[str, str]:
    """Lines of a watched script: see `Evidence.places`."""
    known = places if isinstance(places, dict) else {}
    return {name: known[name][:200] for name in PLACES if isinstance(known.get(name), str)}


def _script_loading(said: Any, timeline: Timeline, waiting: float) -> Loading | None:
    """The loader of a script: its options as they were seen, and what making a step's batches takes, by the steps of one rank.

    Without workers, that is the waiting for data, and what is taken to hide behind a device; with workers that are waited for, what they
    take at the pace of the steps. It computes as long as more CPU was used than the rest of the step can have, and else waits. `waiting` is
    the fraction of the time that the script waited for a core: whatever computes was slower by it, and that is no waiting for storage. What
    the first steps of epochs wait longer than the others is the start of the workers.
    """
    if not isinstance(said, dict):
        return None
    workers, prefetch, size, epoch = (
        value if type(value) is int and 0 <= value < LARGEST else None
        for value in map(said.get, ("num_workers", "prefetch_factor", "batch_size", "epoch"))
    )
    batches = max(1, round((_samples(timeline) or 1) / size)) if size else 1
    epoch, staying = (epoch or 0) // batches, bool(said.get("persistent_workers"))
    first = [] if not workers or staying or epoch < 2 else [step for step in timeline.measured if step.index % epoch == 0]
    numbers = {step.index for step in first}
    others = [step for step in timeline.measured if step.index not in numbers] or timeline.measured
    wait, step = statistics.fmean(each.phases[DATA] for each in others), statistics.fmean(each.seconds for each in others)
    start = max(0.0, statistics.fmean(each.phases[DATA] for each in first) - wait) if first else 0.0
    hidden = min(wait / (1 - UNKNOWN_OVERLAP) - wait, UNKNOWN_OVERLAP * (step - wait)) if timeline.clock == "device" else 0.0
    made = wait + hidden if not workers else workers * step if max(wait, start / max(1, epoch)) > WAITED_FOR * step else math.nan
    used = timeline.cpu_per_step
    slower = 1 + waiting * step / used if used > 0 and not workers else 1.0
    cpu = min(made, max(0.0, used - (step - wait) / slower)) if used == used else made
    known = made == made
    return Loading(
        kind="DataLoader",
        num_workers=workers or 0,
        prefetch_factor=prefetch,
        persistent_workers=staying,
        pin_memory=bool(said.get("pin_memory")),
        batch_size=size,
        stream=said["stream"] if said.get("stream") in ("split", "unknown") else "",
        epoch=epoch or None,
        alone=made if not workers else math.nan,
        cpu=cpu if known and not workers else None,
        worker_cpu=cpu if known and workers else None,
        blocked=max(0.0, made - cpu * slower) if known else None,
        start_up=start or None,
    )


def after_queue_drained(timeline: Timeline) -> Timeline:
    """Without the steps in which a queue that was full at first still hid a loader that cannot keep up."""
    waits = timeline.values("data_wait")
    half = len(waits) // 2
    if half < MIN_STEPS:
        return timeline
    late, early, step = statistics.fmean(waits[half:]), statistics.fmean(waits[:half]), timeline.mean()
    if late - early < 0.05 * step or late < 1.5 * early:
        return timeline
    left = timeline.left_out + half
    note = f"waiting for data grew from {units.seconds(early)} to {units.seconds(late)} per step: only the last steps count"
    return dataclasses.replace(timeline, warmup=left, notes=(*timeline.notes, note))


def _waits(timelines: Sequence[Timeline]) -> list[list[float]]:
    """Of each rank, step by step: what its backward takes longer than the shortest one."""
    count = min(timeline.count for timeline in timelines)
    columns = [[step.phases[BACKWARD] for step in timeline.measured[-count:]] for timeline in timelines]
    if len(columns) == 1:
        return [[0.0] * count]
    return [[mine - min(all_) for mine, all_ in zip(column, zip(*columns, strict=True), strict=True)] for column in columns]


def _rank(timeline: Timeline, waits: Sequence[float]) -> tuple[RankEvidence, str]:
    """A rank on its own, and a note on steps that took longer in all their parts, which are no stalls of the loop; "" = there were none."""
    steps = timeline.measured[-len(waits) :]
    own = [step.seconds - step.phases[DATA] - wait for step, wait in zip(steps, waits, strict=True)]
    wait = statistics.fmean(step.phases[DATA] for step in steps)
    seconds_of = {step.index: seconds for step, seconds in zip(steps, own, strict=True)}
    places = _pauses(timeline.pauses, seconds_of)
    stalls = find_stalls(
        [Call(number=number, seconds=seconds) for number, seconds in seconds_of.items()], wait=wait, places=places.__getitem__
    )
    stalled = set(stalls.at)
    compute = statistics.fmean(seconds for step, seconds in zip(steps, own, strict=True) if step.index not in stalled)
    slowed = ""
    if _slowed_throughout(timeline, stalled):
        slowed = (
            f"{len(stalled)} of {stalls.steps} steps took {units.seconds(stalls.extra)} longer, in several phases at once: {OTHERS}, which "
            "is no pause of the loop"
        )
        stalls = Stalls(steps=stalls.steps)
    saved = _saves(places, statistics.fmean(own) + wait)
    if saved.share >= MIN_SAVING and saved.per_step >= MOST * stalls.per_step:
        stalls, compute = saved, statistics.fmean(own) - saved.per_step
    return RankEvidence(rank=timeline.rank, timeline=timeline, alone=compute + wait, wait=wait, compute=compute, stalls=stalls), slowed


def _with_waits(ranks: Sequence[RankEvidence], saving: float) -> tuple[RankEvidence, ...]:
    """The ranks, with what they wait outside the phases, at a barrier, for one that takes `saving` per step for its checkpoints: what they
    take longer there than the one that takes least. It is none of their work.
    """
    own = [rank.stalls.per_step if rank.stalls.noted else 0.0 for rank in ranks]
    others = [rank.timeline.mean("other") - saved for rank, saved in zip(ranks, own, strict=True)]
    found = []
    for rank, saved, other in zip(ranks, own, others, strict=True):
        idle = min(saving - saved, other - min(others))
        more = idle if saved else max(0.0, idle - rank.stalls.per_step)  # steps that were too long are left out already
        stalls = dataclasses.replace(rank.stalls if saved else Stalls(steps=rank.stalls.steps), per_step=saved + idle, noted=True)
        found.append(dataclasses.replace(rank, alone=rank.alone - more, compute=rank.compute - more, stalls=stalls))
    return tuple(found)


def _slowed_throughout(timeline: Timeline, stalled: Collection[int]) -> bool:
    """Did most of some steps take longer in several phases at once, as beside other processes? What pauses is in one phase."""
    long = [step.phases for step in timeline.measured if step.index in stalled]
    usual = [
        statistics.median(phase) for phase in zip(*(step.phases for step in timeline.measured if step.index not in stalled), strict=True)
    ]
    slowed = 0
    for phases in long if usual else []:
        longer = [max(0.0, now - before) for now, before in zip(phases, usual, strict=True)]
        several = sum(before > 0 and more >= before for more, before in zip(longer, usual, strict=True)) >= SLOWED_PHASES
        slowed += several and max(longer) <= MAX_ONE_PHASE * sum(longer)
    return 2 * slowed > len(long) > 0


def _pauses(pauses: Sequence[Pause], seconds_of: Mapping[int, float]) -> dict[int, dict[Place, float]]:
    """Step → what its seconds were spent on: evaluations, checkpoints, and all else.

    What comes after k optimizer steps is in the k-th step, or in the next one if it comes before that one's optimizer step: where that one
    is longer.
    """
    found: dict[int, dict[Place, float]] = {number: {Place(line=""): seconds} for number, seconds in seconds_of.items()}
    for pause in pauses:
        now, then = (seconds_of.get(number, 0.0) for number in (pause.after - 1, pause.after))
        number = pause.after if then > now + pause.seconds / 2 > pause.seconds / 2 else pause.after - 1
        if number in found:
            rest, place = found[number][Place(line="")], Place(line=pause.line, kind=pause.kind)
            taken = min(pause.seconds, rest)
            found[number] |= {Place(line=""): rest - taken, place: found[number].get(place, 0.0) + taken}
    return found


def _saves(places: Mapping[int, Mapping[Place, float]], mean: float) -> Stalls:
    """The checkpoints of a rank, by what saving each of them took: they are known, however often they come and however short they are.

    `mean` is the mean length of a step without what the rank waits for others.
    """
    saves = [(number, place.line, s) for number, spent in places.items() for place, s in spent.items() if place.kind == "checkpoint"]
    if not saves or not mean:
        return Stalls(steps=len(places))
    at, total = sorted({number for number, *_ in saves}), sum(seconds for *_, seconds in saves)
    lines = {line: sum(seconds for _, other, seconds in saves if other == line) for _, line, _ in saves}
    return Stalls(
        steps=len(places),
        at=tuple(at),
        extra=total / len(at),
        per_step=total / len(places),
        share=total / len(places) / mean,
        every=even_distance(at, least=1.0),
        where=max(lines, key=lambda line: lines[line]) or None,
        kind="checkpoint",
        noted=True,
    )


def _samples(timeline: Timeline) -> float | None:
    known = [step.samples for step in timeline.measured if step.samples is not None]
    return statistics.fmean(known) if known else None


def _loading(spec: RunSpec) -> Loading:
    return Loading(
        kind="DataLoader",
        num_workers=spec.num_workers,
        prefetch_factor=spec.prefetch_factor,
        persistent_workers=spec.persistent_workers,
        pin_memory=spec.pin_memory,
        batch_size=spec.micro_batch,
        alone=math.nan,
    )


def _notes(timelines: Sequence[Timeline]) -> tuple[str, ...]:
    """Notes: those of the timelines, and the questions that only an experiment could settle."""
    notes = [note for timeline in timelines for note in timeline.notes if not note.startswith((WARNING, LEFT_OUT))]  # run.notes has those
    notes.append("only an experiment could settle: what the loader would take alone, how much of forward and backward is Python")
    if len(timelines) > 1:
        notes[-1] += ", what reducing the gradients costs (it is inside backward)"
    return tuple(dict.fromkeys(notes))


def fewer_threads(e: Evidence) -> str:
    """To try one thread per operator, where several compute each beside other processes and no experiment has tried it; "" = they do not,
    or that is not known.
    """
    if "threads=1" in e.arms or e.device != "cpu" or e.threads < 2:
        return ""
    if not (is_crowded(e) if e.noise else any(note.startswith(BUSY) for note in e.notes)):
        return ""
    return (
        f"Each operator runs in {e.threads} threads, which share the cores with other processes: small operators may take many times as "
        "long, as each waits for its slowest thread. Try torch.set_num_threads(1), or OMP_NUM_THREADS=1."
    )
