"""`why_not_linear`: launches a spec, or a script, with one rank, with strangers and with all ranks, and explains what N ranks lose."""

import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.core import run_directory, units
from workbench.core.checks import check_budget, whole_number
from workbench.core.machine_speeds import MachineSpeeds
from workbench.core.progress import INTERRUPTED, Waiting, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.core.system_load import LoadMeter, usable_cores, waited_for_core
from workbench.core.vocabulary import PHASES
from workbench.diagnosis.analysis.evidence import Gradients
from workbench.diagnosis.analysis.gap import SAME
from workbench.diagnosis.analysis.gap_evidence import MIN_FOREIGN, GapBlock, GapEvidence, typical
from workbench.diagnosis.analysis.step_model import between_two
from workbench.diagnosis.analysis.why_not_linear import FEW, WhyNotLinear
from workbench.diagnosis.api import BUDGET
from workbench.runs.failure import RunError
from workbench.runs.launch import experiments
from workbench.runs.launch.launch import check as check_launch
from workbench.runs.launch.launch import check_script, launch
from workbench.runs.rows import RunRows, said_by
from workbench.runs.run import Run, on_run_started
from workbench.runs.spec import AUTO, SHARDED, RunSpec, ScriptSpec
from workbench.runs.target import read_spec
from workbench.timeline.reading import rank_notes
from workbench.timeline.timeline import Timeline

LARGE_ALONE = 4
"""Batches that one process is given at once where it is asked about more ranks than it has."""
LEAST_STEPS = 8
"""Steps of a script, after its warm-up, below which nothing is said."""
CHUNKS = 4
"""Into so many rounds the steps of a script's launch are divided."""
TICK = 0.2
ASSUMED = "what a reduction between two ranks costs here is assumed: wb.measure_collectives, or workbench calibrate, measures it"
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes of DDP's first bucket and of the others, where a script does not say otherwise."""
BACKWARD = PHASES.index("backward")
AGAIN = 0.8
"""Launches are repeated where so many times the seconds that they took are left, or 4 s of steps for each: the last ones are cut off."""
START_SECONDS = 12.0
"""Seconds that a launch of a script may take beside its steps, about."""


@dataclass(kw_only=True)
class LaunchLoad:
    """What the machine did during the launches of a script: it grows while they run."""

    foreign: list[float] = field(default_factory=list)
    """Cores that other processes took, again and again while all ranks ran."""
    waiting: dict[str, list[float]] = field(default_factory=dict)
    """Of each arm, rank by rank: fraction of the time since its first steps that its main thread waited for a core, where that is known."""
    wanted: float | None = None
    """Cores that all ranks together would use if none waited for one; None = not known."""


@accept_synonyms
def why_not_linear(
    target: RunSpec | ScriptSpec | str | os.PathLike[str],
    *,
    same: str = "micro_batch",
    ranks: int | None = None,
    args: Sequence[str] = (),
    nproc_per_node: int | None = None,
    budget_s: float = BUDGET,
    runs_dir: str | os.PathLike[str] | None = None,
) -> WhyNotLinear:
    """Find out by experiment why N ranks are slower than N times one: parts of the gap that add up, with remedies and predicted gains.

    A spec is measured in one launch of its ranks, in which experiments take turns: one rank alone while the others rest; all ranks without
    gradient reduction, as independent processes ("strangers"); and all ranks with it. Each runs with batches from the loader and with
    cached batches. In addition, one rank gets the batch of all ranks, and starts of passes over the loader are timed. `prove()` runs a
    remedy beside the unchanged spec.

    A script is launched unedited, and its steps are watched: as one process, as strangers (several launches of one process at the same
    time), and with its ranks. The reduction is the time by which its ranks are slower than the slowest stranger. While no part of the gap
    is beyond doubt and time is left, the launches take turns again.

    For a spec with one process, it predicts more processes: their waits from the distribution of step times, their reductions from the ring
    formula and this machine's links. What is not measured is marked as predicted.

    Args:
        target: a RunSpec, the name of a task, a script, or its ScriptSpec.
        same: what the one process and the ranks have in common: "micro_batch" (each rank keeps its batch) or "global_batch" (the ranks
            share it). Both are measured, and `gap_at` returns either.
        ranks: predict for this number of ranks, more than the spec or the script has; None = its own number, or 8 for a spec with one.
            `at(64)` predicts for another number.
        args: arguments of a script. "{out}" in them stands for a folder that is new in each launch, so that no launch resumes from
            another's checkpoints.
        nproc_per_node: ranks; None = the spec's own, 2 for a script, which needs 2 or more.
        budget_s: seconds to spend at most, the start of the launch included. At Ctrl-C the result is what is known so far.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        ValueError: something else was given, the ranks cannot compute alone (FSDP, tensor_parallel, SyncBatchNorm), or a script has too few
            steps, or ranks that are in no process group, so that each trains a model of its own.
        LaunchError, TaskError: it cannot run here. Nothing was started.
        RunError: a launch failed; its run directory stays.
    """
    check_budget(budget_s, limited=True)
    if same not in SAME:
        raise ValueError(f"same={same!r}: allowed are " + " and ".join(f'"{name}" ({what})' for name, what in SAME.items()))
    if ranks is not None:
        whole_number("ranks", ranks, least=2)
    if isinstance(target, str | os.PathLike) and os.fspath(target).endswith(".py"):
        target = ScriptSpec(script=os.fspath(target), nproc_per_node=2, watch=True)
    if isinstance(target, ScriptSpec):
        given = {"nproc_per_node": nproc_per_node, "args": args or None}
        script = target.replace(**{knob: value for knob, value in given.items() if value is not None})
        check_launch(script)
        if script.nproc_per_node == 1:
            raise ValueError(
                "nproc_per_node=1: a script is compared with its ranks, so it needs 2 or more. What more ranks would bring is predicted "
                "from one process of a spec only: make the script a task"
            )
        check_script(script.script)
        _check_asked(ranks, script.nproc_per_node, "script")
        with say_what_was_interrupted("why_not_linear"), Waiting("why_not_linear", budget_s, begin="one process alone") as line:
            answer = _script(script, same, line, runs_dir)
        return answer if ranks is None else answer.at(ranks)
    spec = read_spec("why_not_linear", target, because="whose ranks can be launched", instead='or a script: why_not_linear("train.py")')
    if nproc_per_node is not None:
        spec = spec.replace(nproc_per_node=nproc_per_node)
    check(spec, args)
    whole = spec.world_size
    _check_asked(ranks, whole, "spec")
    with say_what_was_interrupted("why_not_linear"):
        run = experiments.run_gap(spec, large=LARGE_ALONE if whole == 1 else 0, budget_s=budget_s, runs_dir=runs_dir)
    evidence = GapEvidence.from_json(run_directory.read_json(run.path / run_directory.GAP))
    asked = 0 if ranks in (None, whole) else ranks or 0
    link: Gradients | None = None
    notes: tuple[str, ...] = ()
    if whole == 1:
        asked = asked or FEW[-1]
        link, measured = between_two(evidence.device, MachineSpeeds.load())
        if not measured:
            notes = (ASSUMED,)
    evidence = replace(evidence, notes=(*evidence.notes, *notes))
    return WhyNotLinear(evidence=evidence, spec=spec, same=same, ranks=asked, link=link, subject=runs_dir)


def _check_asked(ranks: int | None, measured: int, what: str) -> None:
    if ranks is not None and ranks < measured:
        more = f"leave it out, or give more ranks than are measured, such as {4 * measured}"
        raise ValueError(f"ranks={ranks} with a {what} of {measured}: {more}")


def check(spec: RunSpec, args: Sequence[str] = ()) -> None:
    """Refuse what cannot be taken apart.

    Raises:
        ValueError: it cannot.
    """
    if args:
        raise ValueError(f"args={list(args)!r} with a spec: only a script takes them; turn its knobs instead")
    if spec.parallel in SHARDED or spec.tensor_parallel > 1:
        odd = f"parallel={spec.parallel!r}" if spec.parallel in SHARDED else f"tensor_parallel={spec.tensor_parallel}"
        raise ValueError(
            f'{odd}: no rank can compute without the others\' weights, so one cannot be set beside them. Ask with parallel="ddp" and a '
            "smaller model, or measure whole runs: wb.scaling_curve(spec, values=(1, 2))"
        )
    if spec.micro_batch == AUTO:
        raise ValueError('micro_batch="auto" may be another number for one rank than for all: give one, such as micro_batch=32')


def _script(spec: ScriptSpec, same: str, line: Waiting, runs_dir: str | os.PathLike[str] | None) -> WhyNotLinear:
    """From whole launches of a script, which take turns again while no part of the gap is beyond doubt and time is left."""
    launches, loads, began = list[dict[str, list[Timeline]]](), list[LaunchLoad](), line.seconds
    answer: WhyNotLinear | None = None
    while True:
        begun, notes = line.seconds, list[str]()
        try:
            load = LaunchLoad()
            timelines, last = _launches(spec, line, runs_dir, load, notes, least=0.0 if answer else START_SECONDS + 2)
            launches.append(timelines)
            loads.append(load)
            others = RunRows(last.path).other_rows
            reads = {rank: row["reads"] for rank, some in others.items() for row in some if isinstance(row.get("reads"), dict)}
            alike = rank_notes(reads, spec.nproc_per_node)
            if alike and not any(read.get("group") for read in reads.values()):
                raise ValueError(f"there is no scaling to explain: {alike[0]}")
            evidence = script_evidence(*launches, notes=notes, seconds=line.seconds - began, threads=spec.threads, loads=loads)
        except (KeyboardInterrupt, ValueError, RunError) as error:
            if answer is None:
                raise
            stopped = isinstance(error, KeyboardInterrupt)
            note = f"{INTERRUPTED}: this is the result so far" if stopped else f"what was launched once more is left out: {error}"
            return replace(answer, evidence=replace(answer.evidence, notes=(*answer.evidence.notes, note)))
        rows = others.get(0, ())
        size = next((row["gradients"] for row in rows if isinstance(row.get("gradients"), int)), 0)
        places: dict[str, str] = next((row["places"] for row in rows if isinstance(row.get("places"), dict)), {})
        reduced, measured = _reduced(size, spec.nproc_per_node, timelines["all"][0].clock) if size else (None, True)
        said = (*alike, *([] if measured else [ASSUMED]), *evidence.notes)
        evidence = replace(evidence, notes=said, gradients=reduced, places=places, num_workers=int(places.get("workers", 0)))
        answer = WhyNotLinear(evidence=evidence, spec=spec.replace(watch=True), same=same, subject=runs_dir)
        if notes or not answer.in_doubt or min(AGAIN * (line.seconds - begun), 3 * (START_SECONDS + 4)) > line.left:
            return answer


def _launches(
    spec: ScriptSpec, line: Waiting, runs_dir: str | os.PathLike[str] | None, load: LaunchLoad, notes: list[str], *, least: float
) -> tuple[dict[str, list[Timeline]], Run]:
    """Launch one process, strangers, and all ranks, each for a third of the budget; their timelines by arm, and the run of all.

    `load` gets what the machine did meanwhile, `notes` one if Ctrl-C ended the last launch after enough steps.
    """
    ranks = spec.nproc_per_node
    timelines: dict[str, list[Timeline]] = {}
    runs: list[Run] = []
    for number, (arm, launches, nproc) in enumerate((("one", 1, 1), ("strangers", ranks, 1), ("all", 1, ranks))):
        seconds = max(least, line.left / (3 - number))
        line.say({"one": "one process alone", "strangers": f"{ranks} independent processes", "all": f"{ranks} ranks together"}[arm])
        runs = []
        try:
            with _ended_with(runs):
                for _ in range(launches):
                    launch(spec.script, args=spec.args, nproc_per_node=nproc, watch=True, runs_dir=runs_dir, threads=spec.threads)
                _wait([(run, rank) for run in runs for rank in range(nproc)], seconds, line, load, arm)
        except KeyboardInterrupt:
            steps = [timeline.count for run in runs for timeline in run.timelines]
            if arm != "all" or len(steps) < ranks or min(steps) < LEAST_STEPS:
                raise
            notes.append(f"{INTERRUPTED}: this is the result so far")
        timelines[arm] = [timeline for run in runs for timeline in run.timelines]
        for run in runs:
            if (error := experiments.error_of(run)) and run.state == "failed":
                raise error
    return timelines, runs[0]


def _reduced(size: int, ranks: int, clock: str) -> tuple[Gradients, bool]:
    """What reductions of so many bytes between the ranks would take by themselves, by what they take between two; was that measured?"""
    link, measured = between_two("cuda" if clock == "device" else "cpu", MachineSpeeds.load())
    turns, volume = math.sqrt((ranks - 1) * math.log2(ranks)), 2 * (1 - 1 / ranks)
    buckets = 1 + math.ceil(max(0, size - FIRST_BUCKET) / BUCKET)
    return Gradients(size=size, buckets=buckets, latency=link.latency * turns, per_byte=link.per_byte * volume), measured


@contextlib.contextmanager
def _ended_with(runs: list[Run]) -> Iterator[None]:
    """Keep each run that is launched inside in the list, and stop those that still run at the end, whatever ends it."""
    with contextlib.ExitStack() as stack:

        def launched(run: Run) -> None:
            runs.append(run)
            stack.callback(run.stop)

        with on_run_started(launched):
            yield


def _wait(ranks: Sequence[tuple[Run, int]], seconds: float, line: Waiting, load: LaunchLoad, arm: str) -> None:
    """Until the runs have ended, or their time is over; `load` gets what the machine did while all of their ranks ran."""
    end, runs, ours = time.monotonic() + seconds, list(dict.fromkeys(run for run, _ in ranks)), list[float]()
    pids, first, last = dict[int, Any](), dict[int, tuple[float, float]](), dict[int, tuple[float, float]]()
    with contextlib.closing(LoadMeter(root=os.getpid())) as meter:
        while any(run.state == "running" for run in runs) and time.monotonic() < end:
            line.tick()
            time.sleep(TICK)
            lap = meter.lap()
            if not all(run.state == "running" for run in runs):  # what one that has ended used is not seen before it is waited for
                continue
            load.foreign.append(lap.foreign)
            read = 0
            for place, (run, rank) in enumerate(ranks):
                pids[place] = pids.get(place) or said_by(run.path, rank).get("pid")  # it is there once the rank takes steps
                if isinstance(pids[place], int) and (waited := waited_for_core(pids[place])) is not None:
                    last[place] = (time.monotonic(), waited)
                    first.setdefault(place, last[place])
                    read += 1
            ours += [lap.ours] * (read == len(ranks))  # a process may be gone while its run still counts as running
    if len(ours) > 1:
        pairs = [(last[place][1] - first[place][1], last[place][0] - first[place][0]) for place in range(len(ranks))]
        load.waiting[arm] = [min(1.0, max(0.0, waited) / passed) for waited, passed in pairs]
        load.wanted = statistics.fmean(ours) / max(0.1, 1 - statistics.fmean(load.waiting[arm]))  # each arm overwrites it; "all" comes last


def script_evidence(
    *launches: dict[str, list[Timeline]],
    notes: Sequence[str] = (),
    seconds: float = 0.0,
    threads: int = 1,
    loads: Sequence[LaunchLoad] = (),
) -> GapEvidence:
    """What the timelines of a script tell: one process, strangers, and all ranks.

    The ranks of "all" wait for each other in the backward, so how long a rank works is seen in the rest of its step: a stranger is taken to
    be as much slower than the others as the rank in its place is.

    Args:
        launches: timelines by arm, of each time that all arms were launched: "one" has one, "strangers" and "all" one per rank.
        notes: notes that the evidence keeps.
        seconds: what the launches took.
        threads: threads per operator of each rank.
        loads: what the machine did during each of the launches.

    Raises:
        ValueError: a launch has too few steps.
    """
    for arm, some in ((arm, some) for timelines in launches for arm, some in timelines.items()):
        fewest = min((timeline.count for timeline in some), default=0)
        if fewest < LEAST_STEPS:
            raise ValueError(
                f"the script took {fewest} steps ({arm}) that could be timed in its third of the budget, and {LEAST_STEPS} are needed: "
                "give it more steps or a larger budget_s, and check that its loop reads a DataLoader; if it resumes from a checkpoint of "
                'an earlier launch, give its folder as {out}: args=["--out", "{out}"]'
            )
    timelines = launches[-1]
    together, size = timelines["all"], len(timelines["all"])
    foreign = statistics.fmean([cores for load in loads for cores in load.foreign] or [0.0])
    wanted = [load.wanted for load in loads if load.wanted is not None and load.waiting.keys() == timelines.keys()]
    known = len(wanted) == len(launches)
    blocks = [block for number, each in enumerate(launches) for block in _blocks(each, loads[number].waiting if known else {})]
    per_rank = [_samples(timelines["one"][0]), _samples(together[0])]
    said = [*notes, *([f"other processes took {foreign:.1f} of {usable_cores():.1f} cores meanwhile"] if foreign > MIN_FOREIGN else [])]
    samples = None
    if None not in per_rank:
        samples = float(per_rank[1] or 0) * size
        if per_rank[0] != per_rank[1]:
            said.append(
                f"a step of one process has {per_rank[0]:g} samples, one of a rank {per_rank[1]:g}: the script shares its batch out, and "
                "its steps are compared as they are"
            )
    return GapEvidence(
        blocks=tuple(blocks),
        world_size=size,
        samples=samples,
        cores=usable_cores(),
        foreign=foreign,
        wanted=statistics.fmean(wanted) if known else None,
        threads=threads,
        script=True,
        launches=len(launches),
        seconds=seconds,
        notes=(
            *said,
            f"whole launches of a script, one after the other: a change of the machine's load between them counts, too "
            f"({units.percent(_drift(blocks))} between their parts)",
        ),
    )


def _blocks(timelines: Mapping[str, Sequence[Timeline]], waiting: Mapping[str, Sequence[float]]) -> Iterator[GapBlock]:
    """Rounds of the arms, from one launch of each.

    `waiting` has the fraction of the time that each rank waited for a core, by arm, and each of its steps is taken to have waited so much;
    {} = not known.
    """
    together = timelines["all"]
    size = len(together)
    free = {arm: [1 - share for share in waiting.get(arm, (0.0,) * len(some))] for arm, some in timelines.items()}
    own = [
        part * statistics.fmean(step.seconds - step.phases[BACKWARD] for step in timeline.measured)
        for timeline, part in zip(together, free["all"], strict=True)
    ]
    usual = sorted(own)[(size - 1) // 2]
    late = {"strangers": [max(0.0, seconds - usual) for seconds in own]}
    for number in range(CHUNKS):
        for arm in ("one", "strangers", "all"):
            rows, delays, backward = list[tuple[float, ...]](), list[tuple[float, ...]](), list[float]()
            for timeline, part, more in zip(timelines[arm], free[arm], late.get(arm, [0.0] * size), strict=False):
                steps = _chunk([step.seconds for step in timeline.measured], number)
                rows.append(tuple(seconds + more for seconds in steps))
                delays.append(tuple((1 - part) * seconds for seconds in steps))
                backward.append(part * statistics.fmean(_chunk([step.phases[BACKWARD] for step in timeline.measured], number)))
            idle: list[tuple[float, ...]] = [()] * (size - len(rows))
            yield GapBlock(arm=arm, steps=(*rows, *idle), delays=(*delays, *idle) if waiting else (), backward=tuple(backward))


def _chunk(values: Sequence[float], number: int) -> tuple[float, ...]:
    step = len(values) // CHUNKS
    return tuple(values[number * step : (number + 1) * step])


def _samples(timeline: Timeline) -> float | None:
    known = [step.samples for step in timeline.measured if step.samples]
    return statistics.median(known) if known else None


def _drift(blocks: Sequence[GapBlock]) -> float:
    """How far the parts of a launch differ."""
    widths = []
    for arm in {block.arm for block in blocks}:
        means = [typical(block.means) for block in blocks if block.arm == arm]
        widths.append((max(means) - min(means)) / statistics.median(means))
    return max((width for width in widths if math.isfinite(width)), default=0.0)
