"""`scaling_curve` measures throughput by the number of processes; `scaling_law` fits the loss of many small runs.

A `CurveSpec` says what a curve measures and a `CurveDirectory` keeps its runs; `_Measurement` launches those that are missing, interleaved,
and can be resumed. The runs of a law share as few launches as possible.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from workbench.core import units
from workbench.core.checks import check_budget, is_whole, whole_number
from workbench.core.progress import INTERRUPTED, BudgetError, ProgressLine, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.runs import task
from workbench.runs.entrypoints import COUNTING, START
from workbench.runs.failure import RunError
from workbench.runs.launch.environment import core_count, gpu_count
from workbench.runs.launch.experiments import run_communication
from workbench.runs.launch.launch import check, label
from workbench.runs.launch.sweep import Trial, combinations, in_turn, outcome_line, plan
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, SpecError, check_profile
from workbench.runs.target import named_task, read_spec
from workbench.runs.task import TaskError
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.law.identifiability import varied_too_little
from workbench.scaling.analysis.law.law import ScalingLaw
from workbench.scaling.analysis.law.points import Points, PointsError
from workbench.scaling.curve_directory import CurveDirectory, CurveSpec, in_launches, validate

BUDGET = 60.0
"""Default of `budget_s` of `scaling_curve`."""
COMMUNICATION_SECONDS = 6.0
"""Seconds for which each point trains with and without its reduction, interleaved: about ten pairs of blocks."""
LAUNCH_SECONDS = 8.0
"""Seconds that the start of a launch takes, about: the time left is estimated by it until one has ended."""
_CELLS = 20


@accept_synonyms
def scaling_curve(
    target: RunSpec | str | os.PathLike[str],
    *,
    over: str = "nproc_per_node",
    values: Sequence[Any] = (1, 2),
    kind: str = "weak",
    repeat: int = 3,
    communication: bool = True,
    resume: bool | str | os.PathLike[str] = False,
    budget_s: float | None = BUDGET,
    runs_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> ScalingCurve:
    """Measure throughput against the number of processes or any other knob; the points take turns forwards and backwards (A B B A).

    Each point is a training with its own run directory, whose timelines give throughput, straggling and CPU seconds per sample.
    Neighbouring points share a launch if they can. Exposed communication is measured afterwards in separate launches, which interleave
    steps with and without gradient reduction. Points with more processes × threads than cores (or more processes than GPUs) are labelled as
    oversubscribed, and fits ignore them. A point that fails is kept and shown, and is not repeated.

    Ctrl-C, or the end of the budget, stops the training that runs. The curve then has what was measured, and its notes say what is missing.
    The same call with `resume=True` continues.

    Args:
        target: the spec that all points have in common; or the directory of a curve, which is then read without measuring anything.
        over: the knob that is varied: "nproc_per_node", or "micro_batch", "num_workers", "precision", "threads", …
        values: the values of that knob.
        kind: "weak": each process keeps its micro-batch. "strong": the spec's global batch is divided among the processes.
        repeat: how often each point is measured; an interval needs two or more.
        communication: also measure exposed communication at points with more than one process that are not oversubscribed.
        resume: True = continue the newest curve of this spec in `runs_dir`; or the directory of the curve to continue. Finished trainings
            are not run again. `values` and `repeat` may differ from before.
        budget_s: approximate seconds, but at least one training, if any is missing; None = no limit. What will run, and how long that
            takes, is printed first.
        runs_dir: where the curve's directory goes; None = `runs` in the current folder.
        quiet: show no progress.

    Raises:
        SpecError: no such knob, or a value it does not take. Nothing was started.
        CurveError: values that make no curve, a batch that cannot be divided, or nothing to resume. Nothing was started.
        LaunchError, TaskError: a point cannot run here. Nothing was started.
    """
    if named_task(target) is None and isinstance(target, str | os.PathLike) and not os.fspath(target).endswith(".py"):
        return CurveDirectory.load(target).curve()
    curve_spec = validate(target, over=over, values=values, kind=kind, repeat=repeat, communication=communication)
    for _, spec in curve_spec.points:
        check(spec)
    check_budget(budget_s)
    measurement = _Measurement(_directory(curve_spec, resume, runs_dir), quiet, budget_s)
    path, notes = measurement.directory.path, list[str]()
    try:
        with say_what_was_interrupted("scaling_curve"):
            measurement.train()
            if curve_spec.communication:
                measurement.communicate(notes)
    except BudgetError:
        done = measurement.counted
        notes.append(f"the budget of {units.seconds(budget_s)} was spent{done}: resume={str(path)!r} goes on, budget_s=None to the end")
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) or not measurement.directory.runs():
            error.add_note(f'What was measured so far is kept: wb.scaling_curve(spec, …, resume="{path}") goes on with it')
            raise
        notes.append(f"{INTERRUPTED}: resume={str(path)!r} goes on")
    return measurement.directory.curve(tuple(notes))


def _directory(curve_spec: CurveSpec, resume: bool | str | os.PathLike[str], runs_dir: str | os.PathLike[str] | None) -> CurveDirectory:
    if resume is False:
        return CurveDirectory.new(curve_spec, runs_dir)
    directory = CurveDirectory.latest(curve_spec, runs_dir) if resume is True else CurveDirectory.load(resume)
    return CurveDirectory.new(curve_spec, runs_dir) if directory is None else directory.continued(curve_spec)


class _Measurement:
    """Measures a curve."""

    def __init__(self, directory: CurveDirectory, quiet: bool, budget_s: float | None = None) -> None:
        """Prepare; nothing is started yet."""
        self.directory, self.quiet, self.budget_s = directory, quiet, budget_s
        self._trials = missing_trials(directory)
        self._done, self._failed = 0, set[RunSpec]()
        self._start = time.monotonic()
        self._doing = ""
        self._line = ProgressLine(self._words, notebook=True)

    def train(self) -> None:
        """Make the runs that are missing.

        Raises:
            BudgetError: the budget was spent.
        """
        total = len(self._trials)
        if total and not self.quiet:
            takes = f"about {units.seconds(self._left)}"
            if self.budget_s is not None:
                most = f"at most {units.seconds(self.budget_s)} (budget_s)"
                takes = f"{takes}, {most}" if self._left <= self.budget_s else f"{most}, of {takes} that all would take"
            print(f"{total} trainings for {len(self.directory.curve_spec.points)} points: {takes}", flush=True)
        try:
            with contextlib.closing(
                in_turn(self._trials, self.directory.path, self._tick, lambda trial: trial.spec in self._failed)
            ) as ended:
                for trial, run in ended:
                    self._done += 1
                    if not run.ok:
                        self._failed.add(trial.spec)
                    self._doing = f"{trial.name}: {outcome_line(run)}"
                    if not self.quiet:
                        print(f"[{self._done}/{total}] {self._doing} · about {units.seconds(self._left)} left", flush=True)
        finally:
            self._line.close(self._words())

    def communicate(self, notes: list[str]) -> None:
        """Measure the exposed communication that is not known yet.

        Args:
            notes: what could not be measured is appended here, so that it is kept where the budget or Ctrl-C ends this.

        Raises:
            BudgetError: the budget was spent.
        """
        curve_spec, known = self.directory.curve_spec, {steps.spec for steps in self.directory.steps()}
        wanted = [spec for _, spec in curve_spec.points if self._measurable(spec)]
        if not any(spec.nproc_per_node > 1 for spec in wanted):
            return
        if curve_spec.why_no_communication:
            notes.append(curve_spec.why_no_communication)
            return
        for specs in in_launches([spec for spec in wanted if spec not in known]):
            self._doing = f"communication of {len(specs)} points"
            try:
                run_communication(specs, seconds=COMMUNICATION_SECONDS, runs_dir=self.directory.path, tick=self._tick)
            except RunError as error:
                notes.append(f"exposed communication could not be measured: {str(error).splitlines()[0]}")
            finally:
                self._line.close(self._words())

    def _measurable(self, spec: RunSpec) -> bool:
        """Has it trained, and are there enough cores for it?"""
        return spec not in self._failed and not crowded(spec) and any(run.ok and run.spec == spec for run in self.directory.runs())

    @property
    def counted(self) -> str:
        """How many of the trainings that were missing have been made, for a note."""
        return (
            f" after {self._done} of {len(self._trials)} trainings" if self._done < len(self._trials) else " before communication was known"
        )

    @property
    def _left(self) -> float:
        """Seconds until all is measured, about."""
        points = self.directory.curve_spec.points
        communication = 0.0
        if self.directory.curve_spec.communication and any(spec.nproc_per_node > 1 for _, spec in points):
            communication = sum(
                LAUNCH_SECONDS + COMMUNICATION_SECONDS * len(specs)
                for specs in in_launches([spec for _, spec in points if not crowded(spec)])
            )
        each = (time.monotonic() - self._start) / self._done if self._done else LAUNCH_SECONDS
        return each * (len(self._trials) - self._done) + communication

    def _tick(self) -> None:
        some = self._done or not self._trials  # where only communication is missing, the curve has runs already
        if self.budget_s is not None and some and time.monotonic() - self._start > self.budget_s:
            raise BudgetError
        if not self.quiet:
            self._line.show()

    def _words(self) -> str:
        done, total = self._done, max(1, len(self._trials))
        bar = f"{'█' * (_CELLS * done // total):░<{_CELLS}} {done}/{total} runs"
        return " · ".join(
            filter(None, [f"{label(self.directory.curve_spec.spec)} {bar}", self._doing, f"about {units.seconds(self._left)} left"])
        )


def missing_trials(directory: CurveDirectory) -> list[Trial]:
    """The trainings of the curve that are missing, in the order of a sweep."""
    done = [run.spec for run in directory.runs() if run.ok]
    have = {spec: done.count(spec) for _, spec in directory.curve_spec.points}
    trials = []
    for trial in plan(directory.curve_spec.points, directory.curve_spec.repeat):
        if have[trial.spec]:
            have[trial.spec] -= 1
        else:
            trials.append(trial)
    return trials


def crowded(spec: RunSpec) -> bool:
    """Would it run with more processes × threads than cores, or processes than GPUs?"""
    gpus = 0 if spec.device == "cpu" else gpu_count()
    if gpus and (spec.device == "cuda" or spec.nproc_per_node <= gpus):
        return spec.nproc_per_node > gpus
    return spec.nproc_per_node * spec.threads > (core_count() or math.inf)


SIZED = "workbench.train.sized:gpt_"
"""The sample task in any width: this, and the width."""
SIZED_FROM = "text-gpt"
"""The sample task that has sizes."""
WINDOW = 64
"""Tokens that one of its samples counts."""


@accept_synonyms
def scaling_law(
    spec: RunSpec,
    *,
    samples: Sequence[int],
    sizes: Sequence[int] | None = None,
    tasks: Sequence[str] | None = None,
    seeds: int = 1,
    tokens_per_sample: float | None = None,
    loss: str | None = None,
    budget_s: float | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **options: Any,
) -> ScalingLaw:
    """Train each model size on each amount of data, in as few launches as possible, and fit L(N, D) = E + A/N^α + B/D^β.

    Each run is trained to the end of its own learning-rate schedule, since an intermediate loss of a longer run would be too high. Sizes
    and amounts from which no law follows are refused before anything is trained. Runs that fail are left out, with a note; their
    directories stay.

    Args:
        spec: what all runs have in common; its task and steps are replaced. schedule="cosine" with some warmup_steps is recommended.
        samples: amounts of data, in samples: three or more, spanning at least a factor of 4. Repeated data count as new.
        sizes: widths of the sample task "text-gpt", multiples of 8: three or more, whose parameters span at least a factor of 4.
        tasks: instead of sizes, names of your own tasks, one for each size: ["my_task.py:small", "my_task.py:medium", …].
        seeds: runs of each combination, with consecutive seeds from the spec's own on.
        tokens_per_sample: tokens in a sample; None = 64 for "text-gpt", and 1 for your own tasks, whose law then counts samples.
        loss: name of the evaluation's figure that is the loss; None = the figure whose name ends in "loss", or else the smoothed training
            loss.
        budget_s: seconds after which the training that runs is stopped; None = no limit, since you list the trainings, and some of the
            sizes alone give no law. Their number is printed first, and after each run how long the rest will take. The law is fitted to the
            finished runs, also after Ctrl-C, if they are enough.
        runs_dir: where run directories go; None = `runs` in the current folder.
        quiet: do not print a line per finished run.
        **options: arguments of `ScalingLaw.fit`.

    Raises:
        SpecError: no sizes, or a knob that is not allowed. Nothing was started.
        PointsError: too few sizes or amounts of data, or sizes or amounts too close to each other (nothing was started); or too few
            finished runs.
        TaskError: a task that cannot be built. Nothing was started.
    """
    spec = read_spec("scaling_law", spec, error=SpecError)
    check_budget(budget_s)
    sizes, samples = None if sizes is None else _plain(sizes), _plain(samples)
    seeds = _plain([seeds])[0]
    names = _tasks(spec, sizes, tasks)
    steps = _steps(spec, samples)
    whole_number("seeds", seeds, least=1, error=SpecError)
    per = tokens_per_sample if tokens_per_sample is not None else float(WINDOW) if sizes is not None else 1.0
    counts = count(names)
    parameters = {name: float(counted["parameters"] or 0) for name, counted in counts.items()}
    planned = Points.of(
        [(parameters[name], number * spec.global_batch * per, 1.0) for name in names for number in steps for _ in range(seeds)]
    ).check()
    _wide(planned, "tasks" if sizes is None else "sizes", [number * spec.global_batch for number in steps])
    spec = spec.replace(evaluate=True) if sizes is not None else spec
    varied: dict[str, Any] = {"task": names, "steps": steps}
    if seeds > 1:
        varied["seed"] = range(spec.seed, spec.seed + seeds)
    runs, cut = _sweep(combinations(spec, varied), budget_s, runs_dir, quiet)
    notes = [*cut, *_notes(spec, steps, [counted["samples"] for counted in counts.values()], per)]
    try:
        return ScalingLaw.from_runs(runs, parameters=parameters, tokens_per_sample=per, loss=loss, notes=notes, **options)
    except ValueError as error:
        error.add_note(*cut) if cut else None
        raise


def _sweep(
    specs: Sequence[tuple[str, RunSpec]], budget_s: float | None, runs_dir: str | os.PathLike[str] | None, quiet: bool
) -> tuple[list[Run], list[str]]:
    """Run specs one after the other; the runs that have ended, and a note where the budget or Ctrl-C cut them off."""
    for _, each in specs:
        check(each)
        check_profile(each)
    trials, done, began = plan(specs, 1), dict[int, Run](), time.monotonic()
    if not quiet:
        most = "" if budget_s is None else f"; at most {units.seconds(budget_s)}"
        print(f"{len(trials)} trainings, {sum(spec.steps for _, spec in specs):,} steps in all{most}", flush=True)

    def tick() -> None:
        if budget_s is not None and done and time.monotonic() - began > budget_s:
            raise BudgetError

    cut = ""
    try:
        with say_what_was_interrupted("scaling_law"), contextlib.closing(in_turn(trials, runs_dir, tick)) as ended:
            for trial, run in ended:
                done[trial.place] = run
                if not quiet:
                    passed = time.monotonic() - began
                    left = units.seconds(passed / len(done) * (len(trials) - len(done)))
                    print(f"[{len(done)}/{len(trials)}] {trial.name}: {outcome_line(run)} · about {left} left", flush=True)
    except BudgetError:
        cut = f"the budget of {units.seconds(budget_s)} was spent"
    except KeyboardInterrupt:
        if not done:
            raise
        cut = INTERRUPTED
    notes = [f"{cut} after {len(done)} of {len(trials)} runs"] if cut else []
    return [done[place] for place in sorted(done)], notes


def count(tasks: Sequence[str]) -> dict[str, dict[str, int | None]]:
    """Parameters and samples of tasks, by their names; in a process of its own, which loads torch.

    Raises:
        TaskError: one of them cannot be built.
    """
    for name in tasks:
        task.check(name)
    command = [sys.executable, "-m", START, COUNTING, *tasks]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = " ".join(done.stderr.splitlines()[-1:]) or f"it ended with {done.returncode}"
        raise TaskError(f"the tasks {', '.join(tasks)} could not be built: {last}") from None
    if "error" in counts:
        raise TaskError(counts["error"])
    return counts


def _tasks(spec: RunSpec, sizes: Sequence[int] | None, tasks: Sequence[str] | None) -> list[str]:
    if (sizes is None) == (tasks is None):
        given = "neither" if sizes is None else "both"
        raise SpecError(f'{given} of sizes= and tasks= given: give one of them, sizes=[16, 32, 64] or tasks=["my_task.py:small", …]')
    if tasks is not None:
        if isinstance(tasks, str) or len(set(tasks)) < len(tasks):
            raise SpecError(f"tasks={tasks!r}: give a list of different names, one for each size of the model")
        return list(tasks)
    assert sizes is not None
    if spec.task != SIZED_FROM and not spec.task.startswith(SIZED):
        raise SpecError(
            f'sizes= are those of "{SIZED_FROM}", and the task is {spec.task!r}: name a task for each size, tasks=["…:small", …]'
        )
    for width in sizes:
        if not is_whole(width, least=8) or width % 8:
            raise SpecError(f"sizes={list(sizes)!r}: widths that are multiples of 8 are needed, such as [16, 32, 64]")
    if len(set(sizes)) < len(sizes):
        raise SpecError(f"sizes={list(sizes)!r} has one twice: for several runs of each there is seeds=2")
    return [f"{SIZED}{width}" for width in sizes]


def _steps(spec: RunSpec, samples: Sequence[int]) -> list[int]:
    """Optimizer steps for each amount of data."""
    batch = spec.global_batch
    whole = not isinstance(samples, str | int) and all(isinstance(number, int) and not isinstance(number, bool) for number in samples)
    if not whole or not samples or min(samples) < batch:
        example = [batch * steps for steps in (50, 100, 200)]
        raise SpecError(f"samples={samples!r}: a list of whole numbers of at least one batch ({batch}) is needed, such as {example}")
    steps = [number // batch for number in samples]
    if len(set(steps)) < len(steps):
        raise SpecError(f"samples={list(samples)!r} are {steps} steps of {batch}: two are the same")
    return steps


def _plain(values: Any) -> Any:
    """Whole numbers of numpy as those of Python; everything else as it was, to be checked as it was given."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        return values
    return [int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value for value in values]


def _wide(planned: Points, sized: str, samples: Sequence[int]) -> None:
    """Refuse runs that are too few or too close to each other to give a law."""
    if (narrow := varied_too_little(planned)) is None:
        return
    what, given, wanted = narrow
    most, fewest = max(samples), min(samples)
    remedy = f"samples={[fewest, 2 * fewest, max(4 * fewest, most)]}"
    if what == "parameters":
        remedy = "sizes=[8, 16, 32]" if sized == "sizes" else "tasks=[…] of smaller and larger models"
    raise PointsError(f"the {what} of these runs are {given}: {wanted}; nothing was started; try {remedy}")


def _notes(spec: RunSpec, steps: Sequence[int], sizes: Sequence[int | None], per: float) -> list[str]:
    """Notes on runs like these."""
    notes = [] if per != 1 else ["data are counted in samples, so FLOPs are per parameter and sample"]
    if spec.schedule == "constant":
        notes.append('constant learning rate: with schedule="cosine" every run would end lower, long ones more so')
    if spec.warmup_steps > min(steps) / 2:
        notes.append(f"the warm-up of {spec.warmup_steps} steps fills more than half of the shortest run ({min(steps)} steps)")
    most = max(steps) * spec.global_batch
    if (fewest := min((size for size in sizes if size is not None), default=most)) < most:
        notes.append(
            f"the longest runs see their {fewest:,} samples {most / fewest:.1f} times: data seen again teach less than the law thinks"
        )
    return notes
