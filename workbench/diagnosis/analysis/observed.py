"""Makes evidence of the timelines of a run. No experiment was run, so every saving is a ceiling, and some questions stay open."""

import dataclasses
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.core import run_directory, units
from workbench.core.vocabulary import PHASES
from workbench.diagnosis.analysis.costs import is_crowded
from workbench.diagnosis.analysis.evidence import Evidence, Loading, RankEvidence
from workbench.diagnosis.analysis.stalls import Call, find_stalls
from workbench.harness.results import Place
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec
from workbench.timeline.timeline import LEFT_OUT, WARNING, Pause, Timeline

MIN_STEPS = 8
"""Fewer measured steps say nothing about a mean."""
FIRST_BYTES = 1 << 16
"""Of the file of rank 0, in which the places of a script are looked for."""
DATA, BACKWARD = PHASES.index("data_wait"), PHASES.index("backward")


def _hint(run: Run) -> str:
    """What to do about a run that has too few steps."""
    if run.state == "running":
        return "wait for it: run.wait()"
    if isinstance(run.spec, ScriptSpec) and not run.spec.watch:
        return "a script's steps are measured with watch=True"
    if run.state == "stopped":
        return "it was stopped, or its budget ended, before: let it run longer, diagnose(…, budget_s=120) or --budget 120"
    if isinstance(run.spec, ScriptSpec) and not run.progress[0]:
        task = f"{os.path.basename(run.spec.script)}:build"
        return f"no steps of an optimizer were seen. A function of it that returns a wb.Task is diagnosed by its name, diagnose({task!r})"
    return "no more steps of an optimizer were seen"


def observe(source: Run | Timeline) -> Evidence:
    """Evidence of a run, from its timelines alone, or of the timeline of a loop in this process.

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
    ranks = tuple(_rank(timeline, wait) for timeline, wait in zip(timelines, waits, strict=True))
    together = max((rank.stalls for rank in ranks), key=lambda stalls: stalls.share)
    samples = [_samples(timeline) for timeline in timelines]
    return Evidence(
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
        noise=None if run else timelines[0].noise,
        observed=True,
        steps=sum(timeline.count for timeline in timelines),
        notes=(*(run.notes if run else ()), *_notes(timelines)),
        places=_places(run) if run else {},
    )


def _places(run: Run) -> dict[str, str]:
    """Lines of a watched script, as rank 0 has written them with its first step: see `Evidence.places`."""
    try:
        with open(run.path / run_directory.rank_file(0), "rb") as file:
            rows = [run_directory.parse_row(line) or {} for line in file.read(FIRST_BYTES).split(b"\n")]
    except OSError:
        return {}
    places: dict[str, Any] = next((row["places"] for row in rows if isinstance(row.get("places"), dict)), {})
    return {name: places[name][:200] for name in ("loop", "step", "dataset", "framework", "workers") if isinstance(places.get(name), str)}


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


def _rank(timeline: Timeline, waits: Sequence[float]) -> RankEvidence:
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
    return RankEvidence(rank=timeline.rank, timeline=timeline, alone=compute + wait, wait=wait, compute=compute, stalls=stalls)


def _pauses(pauses: Sequence[Pause], seconds_of: Mapping[int, float]) -> dict[int, dict[Place, float]]:
    """Step → what its seconds were spent on: evaluations, checkpoints, and all else.

    What comes after k optimizer steps is in the k-th step, or in the next one if it comes before that one's optimizer step: the longer one.
    """
    found: dict[int, dict[Place, float]] = {number: {Place(line=""): seconds} for number, seconds in seconds_of.items()}
    for pause in pauses:
        number = max((pause.after - 1, pause.after), key=lambda number: seconds_of.get(number, 0.0))
        if number in found:
            rest, place = found[number][Place(line="")], Place(line=pause.line, kind=pause.kind)
            taken = min(pause.seconds, rest)
            found[number] |= {Place(line=""): rest - taken, place: found[number].get(place, 0.0) + taken}
    return found


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
    """To try one thread per operator, where several compute each beside other processes; "" = they do not, or that is not known."""
    if not e.observed or e.noise is None or e.device != "cpu" or e.threads < 2 or not is_crowded(e):
        return ""
    return (
        f"Each operator runs in {e.threads} threads, while other processes took {e.noise.foreign:.1f} of {e.noise.cores:.0f} cores: small "
        "operators may take many times as long, as each waits for its slowest thread. Try torch.set_num_threads(1), or OMP_NUM_THREADS=1."
    )
