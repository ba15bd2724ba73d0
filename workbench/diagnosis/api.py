"""`diagnose`, `prove` and `climb`: from a step, a spec or a run to a verdict, from a remedy to its proof, and both again and again.

Experiments on a step and its loader run in this process, those on a spec in launches of their own.
"""

import contextlib
import functools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.core import run_directory, units
from workbench.core.checks import check_budget
from workbench.core.progress import INTERRUPTED, Waiting, begins, say_what_was_interrupted
from workbench.core.statistics import Interval
from workbench.core.synonyms import accept_synonyms
from workbench.core.system_load import LoadMeter, Noise, usable_cores, waited_for_core
from workbench.diagnosis.analysis import calibration
from workbench.diagnosis.analysis.calibration import Calibration
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.observed import observe
from workbench.diagnosis.analysis.proof import Ladder, Proof, Rung, how_to_prove
from workbench.diagnosis.analysis.remedy import Remedy, apply_remedy
from workbench.diagnosis.analysis.script_remedies import LaunchedScript
from workbench.diagnosis.prove_script import prove_script, why_no_proof_fits
from workbench.harness.results import VariantTimes
from workbench.runs import task
from workbench.runs.failure import RunError
from workbench.runs.launch import experiments
from workbench.runs.launch.launch import check_script, launch
from workbench.runs.rows import said_by
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec, check_names
from workbench.runs.target import Measured, Step, read_spec
from workbench.timeline.timeline import Timeline

BUDGET = 60.0
"""Default of `budget_s`: seconds that an experiment may take; most need fewer."""
MIN_SHARE = 0.25
"""Part of the budget that an experiment in this process has at least, however long it took to begin."""
LOAD_LAP = 0.5
"""Seconds between two looks at what other processes do while a script runs."""
FORESEEN_STEPS = 3
"""Steps after its first ones that tell how long a step of a script takes. Chosen; it decides when a user is told that no proof will fit."""
MIN_CLIMB_SPEEDUP = 1.05
"""Predicted speedup from which on `climb` tries a remedy."""
MIN_CLIMB_SECONDS = 15.0
"""Seconds: with less than that left of its budget, `climb` begins nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedSpec:
    """The subject of a diagnosis whose experiments are launched."""

    runs_dir: str | os.PathLike[str] | None = None
    """Where their run directories go; None = `runs` in the current folder."""


@accept_synonyms
def diagnose(
    target: RunSpec | Run | Timeline | str | os.PathLike[str] | Callable[[Any], Any],
    loader: Iterable[Any] | None = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    args: Sequence[str] = (),
    nproc_per_node: int = 1,
    threads: int = 1,
    budget_s: float = BUDGET,
    prove_budget_s: float | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
) -> Diagnosis:
    """Find out what limits a training step: remove its parts one at a time, and measure how much shorter the step becomes.

    * `diagnose(step, loader)` experiments in this process; `step(batch)` does one whole optimizer step. Model, optimizer, random
      generators, loader and whatever else the step reaches are restored; a note says what could not be restored, such as an exhausted
      generator.
    * `diagnose(spec)` launches the spec's ranks and experiments there. The ranks do not return freed memory to the system (see
      `runs.launch.environment.steady_malloc`): glibc would do so at random, which may take a third of a CPU's step.
    * `diagnose("train.py")` runs a script until it ends or the budget is spent, and diagnoses that run. Its `prove` launches the script
      with and without a remedy, alternately.
    * `diagnose(run)` runs no experiment: it uses what the run recorded, and says which questions only an experiment could settle. So does
      `diagnose(timeline)`, with the timeline of a loop in this process.

    Args:
        target: a step function, a RunSpec, the name of a task, a script, a run, the path of a run directory, or a timeline.
        loader: with a step: its batches, from a DataLoader or any other iterable.
        model: with a step: the module, or several; None = found by looking at the step.
        optimizer: with a step: the optimizer, or several; None = found as well.
        args: with a script: its own options, such as args=["--epochs", "1"]. "{out}" in them stands for a folder that is new in each
            launch, so that none resumes from the checkpoints of another.
        nproc_per_node: with a script: the number of its processes.
        threads: with a script: the threads per operator with which each process starts. A process that you start yourself has one per core.
        budget_s: seconds to spend at most, the start of a launch included; less if the verdict is clear earlier. However long a start
            takes, a spec is measured for 15 s, or half of a budget below 30 s, and a note says so if that exceeds the budget. However long
            a step takes, at least four are run; nothing else is begun for which a step would not fit, and a note names what was left out.
            At Ctrl-C the result is what is known so far; if nothing is known, the KeyboardInterrupt says so.
        prove_budget_s: with a script: seconds that its proof will get afterwards. If two pairs of launches do not fit into them, that is
            said on stderr while the script runs, as soon as its start and first steps show it, with the budget that suffices.
        runs_dir: with a spec: where its run directory goes; None = `runs` in the current folder.

    Raises:
        ValueError: something else was given, or what was given cannot be diagnosed; the message says why.
        RunError: an experiment that was launched failed; its run directory stays.
    """
    check_budget(budget_s, limited=True)
    if loader is None and isinstance(target, str | os.PathLike) and os.fspath(target).endswith(".py"):
        _TARGET.refuse(target, {"model": model, "optimizer": optimizer}, "a step", "step, loader")
        with say_what_was_interrupted("diagnose"):
            return _diagnose_script(target, args, nproc_per_node, threads, budget_s, prove_budget_s, runs_dir)
    for name, value, unset in (("nproc_per_node", nproc_per_node, 1), ("threads", threads, 1), ("prove_budget_s", prove_budget_s, None)):
        if value != unset:
            raise ValueError(f"{name}={value!r}: it is for a script; for a task it belongs in the spec")
    if args:
        raise ValueError(f'args={list(args)!r}: only a script has options of its own, diagnose("train.py", args=["--epochs", "1"])')
    if isinstance(target, Timeline):
        _TARGET.refuse(target, {"loader": loader, "model": model, "optimizer": optimizer}, "a step", "step, loader")
        return Diagnosis.of(observe(target), adjust=Calibration.load().adjust)
    given = _TARGET.read(target, loader, model=model, optimizer=optimizer)
    if isinstance(given, RunSpec):
        with say_what_was_interrupted("diagnose"):
            run = experiments.run_diagnosis(given, budget_s=budget_s, runs_dir=runs_dir)
        return _from_experiment(run, LaunchedSpec(runs_dir=runs_dir))
    if isinstance(given, Run):
        return _from_run(given)
    with say_what_was_interrupted("diagnose"), Waiting("diagnose", budget_s, begin=_EXPERIMENTS) as line:
        from workbench.diagnosis.measure.experiment import experiment  # on a busy machine this takes long, and the budget counts it

        left = max(line.left, MIN_SHARE * budget_s)
        evidence = experiment(given.step, given.loader, model=model, optimizer=optimizer, budget_s=left, progress=line.say)
    return Diagnosis.of(evidence, subject=given, adjust=Calibration.load().adjust)


_EXPERIMENTS = "steps as they are, alternating with steps without loader, optimizer and other parts"


def prove(diagnosis: Diagnosis, remedy: Remedy, *, budget_s: float = BUDGET) -> Proof:
    """Run a remedy interleaved with the baseline, and keep the result for later predictions; see `Diagnosis.prove`.

    Raises:
        ValueError: what was diagnosed is no longer in this process, or cannot be changed from here.
        RunError: one of the two failed in its launch.
    """
    check_budget(budget_s, limited=True)
    spec, subject = diagnosis.spec, diagnosis.subject
    if isinstance(spec, ScriptSpec) and isinstance(subject, LaunchedScript):
        evidence = diagnosis.evidence
        return prove_script(spec, remedy, evidence, step=evidence.step, budget_s=budget_s, runs_dir=subject.runs_dir, launched=subject)
    if not remedy.provable:
        script = f". In a script, {how_to_prove(spec.script)}" if isinstance(spec, ScriptSpec) else ""
        raise ValueError(f"{remedy.name} cannot be changed from here: {remedy.what} Then diagnose again{script}")
    if isinstance(spec, RunSpec):
        return prove_spec(spec, remedy, budget_s=budget_s, runs_dir=subject.runs_dir if isinstance(subject, LaunchedSpec) else None)
    if not isinstance(subject, Step):
        if isinstance(spec, ScriptSpec):
            raise ValueError(f"{remedy.name} cannot be proved from here: {how_to_prove(spec.script)}")
        raise ValueError(
            f"{remedy.name} cannot be proved from here: the step that was diagnosed is not in this process; "
            "diagnose(step, loader) or diagnose(spec) gives a diagnosis whose remedies can be tried"
        )
    with (
        say_what_was_interrupted("prove"),
        Waiting(f"prove {remedy.name}", budget_s, begin="steps without and with it, alternately") as line,
    ):
        from workbench.harness.ab_test import measure_change

        models = {"model": subject.model, "optimizer": subject.optimizer}
        arm = measure_change(subject.step, subject.loader, dict(remedy.change), **models, budget_s=budget_s, progress=line.say)
    return _kept(remedy, arm, samples=diagnosis.evidence.samples or 1.0)


def prove_spec(spec: RunSpec, remedy: Remedy, *, budget_s: float = BUDGET, runs_dir: str | os.PathLike[str] | None = None) -> Proof:
    """Run a spec with a remedy interleaved with the spec as it is, in one launch, and keep the result for later predictions.

    Raises:
        ValueError: the spec does not take the change.
        RunError: one of the two failed in its launch.
    """
    check_budget(budget_s, limited=True)
    changed = apply_remedy(spec, remedy)
    with say_what_was_interrupted("prove"):
        run = experiments.run_ab_test(spec, changed, name=remedy.name, budget_s=budget_s, runs_dir=runs_dir)
    return _kept(remedy, read_ab_test(run), samples=float(spec.global_batch), name=task.label(spec.task))


def _kept(remedy: Remedy, arm: VariantTimes, *, samples: float, name: str = "") -> Proof:
    """The proof that an A/B test is, kept for later predictions on this machine if it was not interrupted."""
    stopped = INTERRUPTED in (arm.note or "")
    proof = Proof(
        remedy=remedy,
        measured=arm.speedup,
        baseline=samples / statistics.fmean(base for base, _ in arm.pairs),
        notes=(arm.note,) if arm.note else (),
    )
    known = remedy.predicted and not stopped and math.isfinite(proof.measured.low)
    if known and os.environ.get("RANK", "0") == "0" and (trouble := calibration.keep(proof, task=name)):
        proof = Proof(remedy=remedy, measured=proof.measured, baseline=proof.baseline, notes=(*proof.notes, trouble))
    return proof


@accept_synonyms
def climb(
    spec: RunSpec | str, *, budget_s: float = BUDGET, leave: Collection[str] = (), runs_dir: str | os.PathLike[str] | None = None
) -> Ladder:
    """Diagnose, prove the best remedy and keep it if it helps; repeat until no remedy is predicted to gain more than 5 %.

    Args:
        spec: where to start: a RunSpec or the name of a task.
        budget_s: seconds for all diagnoses and proofs. Nothing new starts after that, and each diagnosis or proof takes at most half of the
            rest, but between 15 s and a minute. One minute is enough for one or two attempts, ten minutes for about five. When the budget
            ends, or at Ctrl-C, the Ladder has what was proved so far, and says what could not be tried.
        leave: knobs that stay as they are, such as "micro_batch", which changes what is trained.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        ValueError: not a RunSpec, no such knob, or no budget.
        RunError: a launched diagnosis failed. A remedy whose proof fails is only dropped.
    """
    check_budget(budget_s, limited=True)
    spec = read_spec("climb", spec, because="whose knobs can be turned")
    check_names(RunSpec, dict.fromkeys(leave))
    most = units.seconds(min(BUDGET, max(MIN_CLIMB_SECONDS, budget_s / 2)))
    begin = f"a diagnosis, then the best remedy, repeatedly; each takes at most {most}"
    with Waiting("climb", budget_s, begin=begin) as line:
        more = f"; budget_s={10 * max(BUDGET, budget_s):.0f} goes further"
        return _climb(spec, leave, runs_dir, line, f"the budget of {units.seconds(budget_s)} was spent", more)


def _climb(spec: RunSpec, leave: Collection[str], runs_dir: str | os.PathLike[str] | None, line: Waiting, spent: str, more: str) -> Ladder:
    def budget() -> float:
        return min(BUDGET, max(MIN_CLIMB_SECONDS, line.left / 2))

    diagnosis = diagnose(spec, budget_s=budget(), runs_dir=runs_dir)
    now, dropped, rungs = spec, set[str](), list[Rung]()
    rate = start = (diagnosis.evidence.samples or 1.0) / diagnosis.evidence.step
    while True:
        remedy = next(
            (
                remedy
                for remedy in diagnosis.remedies
                if remedy.speedup > MIN_CLIMB_SPEEDUP and _can_try(remedy, now, leave) and remedy.name not in dropped
            ),
            None,
        )
        if any(note.startswith(INTERRUPTED) for note in diagnosis.evidence.notes):
            stopped = f"{INTERRUPTED} during a diagnosis: this is the result so far"
            break
        if remedy is None:
            stopped = f"nothing is left that can be tried and is predicted to gain more than {units.percent(MIN_CLIMB_SPEEDUP - 1)}"
            break
        if line.left < MIN_CLIMB_SECONDS:
            stopped = f"{spent} before {remedy.name} could be tried{more}"
            break
        line.say(remedy.name, f"{units.rate(rate)} after {len(rungs)} attempts, {units.rate(start)} at the start")
        try:
            proof = diagnosis.prove(remedy, budget_s=budget())
        except RunError as error:
            nothing = Interval(low=math.nan, mid=math.nan, high=math.nan)
            proof = Proof(remedy=remedy, measured=nothing, baseline=rate, notes=(f"it failed: {error}",))
        except KeyboardInterrupt:
            stopped = f"{INTERRUPTED} while {remedy.name} was tried: this is the result so far"
            break
        if proof.gained:
            now, rate = apply_remedy(now, remedy), proof.baseline * proof.measured.mid
        rungs.append(Rung(verdict=diagnosis.verdict, cause=diagnosis.cause, proof=proof, samples_per_sec=rate))
        if any(INTERRUPTED in note for note in proof.notes):
            stopped = f"{INTERRUPTED} while {remedy.name} was tried: this is the result so far"
            break
        if not proof.gained:
            dropped.add(remedy.name)
            continue
        if line.left < MIN_CLIMB_SECONDS:
            stopped = f"{spent} with {remedy.name}; the verdict is that before it{more}"
            break
        line.say(f"diagnosing it with {remedy.name}", f"{units.rate(rate)}, {units.rate(start)} at the start")
        try:
            diagnosis = diagnose(now, budget_s=budget(), runs_dir=runs_dir)
        except RunError as error:  # what was proved so far is not lost
            stopped = f"with {remedy.name} it could not be diagnosed again: {error}"
            break
        except KeyboardInterrupt:
            stopped = f"{INTERRUPTED} with {remedy.name}; the verdict is that before it"
            break
    changes = {name: new for name, (_, new) in spec.changes(now).items()}
    return Ladder(
        start=start, rungs=tuple(rungs), verdict=diagnosis.verdict, cause=diagnosis.cause, changes=changes or None, stopped=stopped
    )


def _can_try(remedy: Remedy, spec: RunSpec, leave: Collection[str]) -> bool:
    return remedy.provable and not remedy.ceiling and remedy.change.keys().isdisjoint(leave) and apply_remedy(spec, remedy) != spec


def read_ab_test(run: Run) -> VariantTimes:
    """The VariantTimes of two specs that ran interleaved."""
    value = run_directory.read_json(run.path / run_directory.CONTEST)
    return VariantTimes(**{**value, "pairs": tuple((base, other) for base, other in value["pairs"])})


_TARGET = Measured(
    name="diagnose",
    verb="diagnosed",
    script='a script by a run of it, diagnose(wb.launch("train.py", watch=True).wait())',
    also=', the name of a task, a script ("train.py") or a Timeline',
)


def _diagnose_script(
    script: str | os.PathLike[str],
    args: Sequence[str],
    nproc_per_node: int,
    threads: int,
    budget_s: float,
    prove_budget_s: float | None,
    runs_dir: str | os.PathLike[str] | None,
) -> Diagnosis:
    """From a watched run of a script, stopped when the budget is spent or at Ctrl-C; a file that only defines a task is refused."""
    check_script(script)
    if builder := task.lone_builder(script):
        named = f"{os.fspath(script)}:{builder}"
        raise ValueError(f"{script} does nothing when it is run: it defines {builder}(), which makes a wb.Task. Diagnose that: {named!r}")
    begins(
        f"running {script} for at most {units.seconds(budget_s)}. It writes, and deletes old checkpoints, where it always does"
        + ("; {out} in its options is a new folder …" if not any("{out}" in arg for arg in args) else " …")
    )
    folder, began = Path.cwd(), time.time()
    run, ended = launch(script, args=args, nproc_per_node=nproc_per_node, threads=threads, watch=True, runs_dir=runs_dir), ""
    foreign, waiting = list[float](), list[float]()
    try:
        with _noting_load(run, foreign, waiting, functools.partial(_foresee_proof, run, os.fspath(script), began, prove_budget_s, [])):
            run = run.wait(timeout=budget_s, check=True)
    except TimeoutError:
        run = run.stop()
        ended = (
            f"the budget of {units.seconds(budget_s)} ended the script after {run.progress[0]} steps: budget_s= or --budget gives it longer"
        )
    except KeyboardInterrupt:  # the wait has stopped it
        ended = f"{INTERRUPTED} after {units.seconds(run.seconds)}: this is the result so far"
    try:
        noise = Noise(cores=usable_cores(), foreign=statistics.median(foreign or [0.0]), waiting=statistics.fmean(waiting or [0.0]))
        evidence = observe(run, outside=True, noise=noise)
        subject = LaunchedScript(folder=folder, start_s=_seconds_to_start(run, began) or 0.0, runs_dir=runs_dir)
        diagnosis = Diagnosis.of(evidence, spec=run.spec, subject=subject, adjust=Calibration.load().adjust)
    except ValueError as error:
        if ended.startswith(INTERRUPTED):
            raise KeyboardInterrupt(f"{INTERRUPTED}: {error}") from None
        if ended:
            raise ValueError(f"{error} ({ended})") from None
        raise
    where = f"the run is in {run.path}: wb.Run.load({str(run.path)!r}).logs() has what the script printed"
    diagnosis.evidence = replace(diagnosis.evidence, notes=(*filter(None, [ended]), *diagnosis.evidence.notes, where))
    return diagnosis


def _seconds_to_start(run: Run, began: float) -> float | None:
    """Seconds from a time to the first step of a run; None = it has not taken one."""
    first_step = run.path / run_directory.ENVIRONMENT  # rank 0 writes it then
    with contextlib.suppress(FileNotFoundError):
        return max(0.0, first_step.stat().st_mtime - began)
    return None


def _foresee_proof(run: Run, script: str, began: float, budget_s: float | None, seen: list[tuple[float, int]]) -> bool:
    """Say that a script's proof will probably not fit into its budget, once the script has taken some steps.

    Args:
        run: of the script, not over yet.
        script: path of its file.
        began: when it was launched, as `time.time` gives it.
        budget_s: seconds for the proof; None = there will be none.
        seen: empty, or the time and the number of steps at the first look that saw any; it is filled here.

    Returns:
        Is it known whether it fits?
    """
    if budget_s is None:
        return True
    now, steps, start_s = time.time(), run.progress[0], _seconds_to_start(run, began)
    if steps and not seen:
        seen.append((now, steps))
    if start_s is None or not seen or steps < seen[0][1] + FORESEEN_STEPS:
        return False
    if short := why_no_proof_fits(script, (now - seen[0][0]) / (steps - seen[0][1]), start_s, budget_s):
        begins(f"the proof will probably not fit into {units.seconds(budget_s)}: {short}")
    return True


@contextlib.contextmanager
def _noting_load(run: Run, foreign: list[float], waiting: list[float], foresee: Callable[[], bool]) -> Iterator[None]:
    """Inside, two lists grow again and again: the cores that other processes take, and the fraction of the time that the main thread of
    rank 0 waits for a core once it takes steps. `foresee` is called as often, until it returns True.
    """
    over = threading.Event()

    def look() -> None:
        main: int | None = None
        at, before, foreseen = 0.0, None, False
        with contextlib.closing(LoadMeter(root=os.getpid())) as meter:
            while not over.wait(LOAD_LAP):
                foreign.append(meter.lap().foreign)
                main = main or said_by(run.path).get("pid")
                now, waited = time.perf_counter(), None if main is None else waited_for_core(main)
                if waited is not None and before is not None:
                    waiting.append(min(1.0, max(0.0, waited - before) / (now - at)))
                at, before = now, waited
                with contextlib.suppress(OSError, ValueError):  # a file that is being written: the load is still measured
                    foreseen = foreseen or foresee()

    thread = threading.Thread(target=look, name="load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _from_experiment(run: Run, subject: LaunchedSpec) -> Diagnosis:
    evidence = Evidence.from_json(run_directory.read_json(run.path / run_directory.EVIDENCE))
    return Diagnosis.of(evidence, spec=run.spec, subject=subject, adjust=Calibration.load().adjust)


def _from_run(run: Run) -> Diagnosis:
    """From what a run has left behind: the evidence of an experiment, or the timelines of a training."""
    subject = LaunchedSpec(runs_dir=run.path.parent)
    if (run.path / run_directory.EVIDENCE).exists():
        return _from_experiment(run, subject)
    return Diagnosis.of(observe(run), spec=run.spec, subject=subject, adjust=Calibration.load().adjust)
