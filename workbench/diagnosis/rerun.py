"""Runs a short training as a recorded run had it, with some of what another run had: knobs, variables, code, Python; and measures it."""

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from workbench.core import units
from workbench.core.progress import BudgetError
from workbench.core.statistics import Interval, student_t
from workbench.core.variables import kept_variables, named_variables
from workbench.diagnosis.analysis.owner_search import change_of_launches, recorded_change
from workbench.runs.budgets import QUANTITIES
from workbench.runs.entrypoints import spec_entrypoint
from workbench.runs.launch import environment, worktrees
from workbench.runs.launch.experiments import wait_for
from workbench.runs.launch.launch import label
from workbench.runs.launch.new_run import NewRun, Surroundings
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec, Spec
from workbench.runs.task import with_files_at
from workbench.timeline.timeline import MAX_WARMUP

MEASURED_S = 3.0
"""Seconds of steps, beside the warm-up, that a training is to have. Chosen: starting it takes longer anyway."""
FEWEST, MOST = 10, 300
"""Steps beside the warm-up."""
BLOCKS = 8
"""Parts into which the steps of a recorded run are divided, to see how it varies."""
QUICK, SHOWN = 0.25, 0.7
"""The part of the steps that are faster than the value, and how much of the mean's change it has to show. Chosen: on two cores with eleven
processes that want them the mean of 150 steps varied by 20 % from launch to launch."""
TOO_MUCH = 1.5
"""How many times the change of a mean that is sure the quantile may show at most. Chosen: where two workers are slower than training, every
second step still finds a batch, so the fastest quarter of the steps says nothing of the others."""
CLEAR, SURE, FEW_BLOCKS = 0.03, 3, 4
"""A change of a value is beyond noise from so much on, and so many standard errors of the blocks' mean, of so many blocks at least. Chosen:
launches of a program differ by 3 %."""
LEAST = 0.01
"""The smallest change that trainings are made for, where what was recorded shows it or leaves it open. Chosen: it would take dozens of
launches on a quiet machine."""
SHORTEST = 0.1
"""Seconds that a training gets where nothing is left of the budget."""
HALF = 0.5
"""Part of a recorded difference in memory or loss that a training has to be long enough to show, and not more than twice the difference."""
FEWEST_LOSSES = 5
"""Losses whose mean counts, at least: those of single batches differ by chance."""


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """The code of a run."""

    folder: Path
    """Where it ran."""
    source: Path
    """A folder of the repository that it is in."""
    commit: str | None = None
    """The commit to take in place of what is in the folder now; None = what is there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """What a training is made of."""

    spec: Spec
    """Its spec."""
    code: Code
    """Its code."""
    variables: Mapping[str, str | None]
    """Environment variables that differ from those of this process; None = not set."""
    python: str | None
    """Its interpreter; None = that of this process."""

    def with_changes(self, changes: Sequence["Change"]) -> "Arm":
        """With what some changes set; the later ones win."""
        arm = self
        for change in changes:
            arm = dataclasses.replace(
                arm,
                spec=change.of(arm.spec),
                code=change.code or arm.code,
                variables={**arm.variables, **change.variables},
                python=change.python or arm.python,
            )
        return arm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is put from one run into another."""

    name: str
    """For people."""
    knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the spec."""
    option: str = ""
    """Of a script: the option whose `words` among its arguments it sets."""
    words: tuple[str, ...] = ()
    """The option with its values; none = it is not given."""
    variables: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Environment variables; None = not set."""
    code: Code | None = None
    """The code."""
    python: str | None = None
    """The interpreter."""

    def of(self, spec: Spec) -> Spec:
        """A spec with its knobs, or with its option."""
        if self.option and isinstance(spec, ScriptSpec):
            args, place = spec.args, place_of_option(spec.args, self.option)
            return spec.replace(args=(*args[: place.start], *self.words, *args[place.stop :]))
        return spec.replace(**self.knobs) if self.knobs else spec


def place_of_option(args: Sequence[str], option: str) -> slice:
    """Where an option and its values stand among the arguments of a script; at their end where it is not given.

    >>> place_of_option(["--lr", "0.1", "--amp"], "--lr"), place_of_option(["--lr=0.1", "x"], "--lr"), place_of_option(["x"], "--lr")
    (slice(0, 2, None), slice(0, 1, None), slice(1, 1, None))
    """
    at = next((i for i, word in enumerate(args) if word == option or word.startswith(f"{option}=")), len(args))
    end = min(at + 1, len(args))
    while end < len(args) and args[at] == option and not is_option(args[end]):
        end += 1
    return slice(at, end)


def is_option(word: str) -> bool:
    """Is it an option, and no value such as -1?"""
    return word.startswith("-") and not word.lstrip("-")[:1].isdigit()


class RerunError(ValueError):
    """A training did not run; the message says why, in a line."""


class Reruns:
    """Makes trainings, one after the other, and keeps the folders of commits that they need until it is left."""

    def __init__(
        self,
        measured: "Measured",
        *,
        kind: str,
        runs_dir: str | os.PathLike[str] | None,
        tick: Callable[[], object] = int,
        left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Nothing runs yet. A training that takes longer than what is `left`, in seconds, is ended; `tick` is called while one runs.

        The run directories say of what `kind` of experiment they are. Without `runs_dir` they go with the last training.
        """
        self.measured = measured
        self.seconds: list[float] = []
        """How long each took, its start included."""
        self._kind, self._tick, self._given, self._left = kind, tick, runs_dir, left
        self._enough = False  # has it the steps that are wanted?
        self._stack = contextlib.ExitStack()
        self._checkouts: dict[tuple[Path, str], worktrees.Checkout] = {}

    def __enter__(self) -> Self:
        self.runs_dir = self._given or self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="workbench-reruns-", ignore_cleanup_errors=True)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, arm: Arm, name: str) -> tuple[float, Run]:
        """What a training gives: seconds, bytes or loss; and its run. RerunError: it did not run; BudgetError: no time was left."""
        began = time.monotonic()
        spec, around = self._placed(arm)
        self._enough = False
        run = self.train(spec, around, name)
        self.seconds.append(time.monotonic() - began)
        if run.state == "timeout":
            raise BudgetError(name)
        value = self.measured.value(run, self.measured.steps)
        if not (run.ok or (run.state == "stopped" and self._enough)) or not value > 0:
            why = run.error.message if run.error else f"it {run.state} after {units.several(run.progress[0], 'step')}"
            why += f", and recorded no {self.measured.of}" * (not run.error and run.state != "stopped")
            raise RerunError(why.splitlines()[0][:200] if why else run.state)
        return value, run

    def train(self, spec: Spec, around: Surroundings, name: str) -> Run:
        """A training, when it has ended, well or not."""
        new = NewRun(self.runs_dir, f"{label(spec)} {name}"[:80], around)
        left = self._left()
        timeout = max(left, SHORTEST) if math.isfinite(left) else None
        run = new.start(spec, spec_entrypoint(spec, new.path), timeout, experiment={"kind": self._kind, "name": name})

        began = math.inf

        def tick() -> None:
            nonlocal began
            self._tick()
            if isinstance(spec, ScriptSpec) and (done := run.progress[0]):
                began = min(began, time.monotonic())
                if done >= self.measured.steps and (done >= MOST or time.monotonic() - began >= self.measured.seconds):
                    self._enough = True
                    run.stop()

        try:
            return wait_for(run, tick=tick, check=False)
        except KeyboardInterrupt as why:
            if not self._given:  # its directory goes
                why.__notes__ = []
            raise

    def _placed(self, arm: Arm) -> tuple[Spec, Surroundings]:
        """A spec and its surroundings, with paths of the repository in the folder of the commit."""
        spec, variables = arm.spec, dict(arm.variables)
        spec = spec.replace(steps=self.measured.steps) if isinstance(spec, RunSpec) else spec
        folder = arm.code.folder
        if arm.code.commit is not None:
            checkout = self._checkout(arm.code.source, arm.code.commit)
            folder = checkout.path(folder)
            if isinstance(spec, RunSpec):
                spec = with_files_at(spec, lambda file: str(checkout.path(Path(file))))
            else:
                spec = spec.replace(script=str(checkout.path(Path(spec.script))))
            variables["PYTHONPATH"] = checkout.search_path(variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))) or None
        return spec, Surroundings(folder=folder, variables=variables, python=arm.python)

    def _checkout(self, folder: Path, commit: str) -> worktrees.Checkout:
        top = worktrees.top_of(folder)
        if top is None:
            raise RerunError(f"{folder} is no longer in a git repository")
        if (top, commit) not in self._checkouts:
            try:
                self._checkouts[top, commit] = self._stack.enter_context(worktrees.checkout(top, commit))
            except worktrees.GitError as error:
                raise RerunError(str(error)) from error
        return self._checkouts[top, commit]


def surroundings_of(
    info: Mapping[str, Any], spec: Spec, kept: Mapping[str, str] | None, imported: Sequence[str] = ()
) -> tuple[Path, dict[str, str | None], str | None]:
    """The folder, the variables and the interpreter of a run, as it recorded them.

    A variable that runs keep, and that is set now but was not then, is not set.

    Args:
        info: what the run's `run.json` holds.
        spec: the spec of the run.
        kept: the variables that it kept; None = it kept none.
        imported: the files that it imported, by their paths below where they were found; other paths are ignored.
    """
    folder = Path(info.get("cwd") or Path.cwd())
    variables: dict[str, str | None] = {}
    if kept is not None:
        tops = [folder, *map(Path, filter(None, kept.get("PYTHONPATH", "").split(os.pathsep)))]
        tops += [Path(spec.script).parent] if isinstance(spec, ScriptSpec) else []
        below = [name for name in imported if not Path(name).is_absolute() and ".." not in Path(name).parts]
        files = [top / name for name in below for top in tops]
        named = named_variables(os.environ, [content for path in files if (content := _read(path)) is not None])
        variables = dict.fromkeys([*kept_variables(os.environ, environment.source_of(spec, folder)), *named])
        variables |= {str(name): str(value) if value else None for name, value in kept.items()}
    command = info.get("command")
    python = command[0] if isinstance(command, list) and command and isinstance(command[0], str) else None
    return folder, variables, python


def _read(path: Path) -> bytes | None:
    """The content of a file; None = there is none, or it may not be read, as one of another user."""
    with contextlib.suppress(OSError):
        return path.read_bytes() if path.is_file() else None
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is measured in a training."""

    of: str
    """"time", "memory" or "loss"."""
    steps: int
    """Steps of each training."""
    per: str = "step"
    """Of time: "step", or "sample" of all ranks."""
    seconds: float = 0.0
    """Of a script: how long it runs on after its first step at the least, unless it has taken MOST steps."""
    part: float | None = None
    """Of time: the part of the steps that are faster than the value; None = it is their mean."""

    @property
    def statistic(self) -> str:
        """Of time and loss: what is taken of the steps; "" = of memory."""
        if self.of != "time":
            return "mean of the last tenth" if self.of == "loss" else ""
        return "mean" if self.part is None else f"{units.percent(self.part)} quantile"

    def words(self, runs: Sequence[Run]) -> str:
        """How the value of a run is taken from its steps, and the figures of some runs that are others; "" = there is nothing to say."""
        if self.of != "time":
            last = min(run.progress[0] for run in runs)
            if self.of == "memory" or self.steps >= last:
                return ""
            ends = " and ".join(f"{self.value(run, last):.4g}" for run in runs)
            return f"trainings of {self.steps} steps show the difference between the losses; after {last} steps they are {ends}"
        said = f"the time per {self.per} of a run is the {self.statistic} over its steps after the warm-up, of the slowest rank"
        others = "as in workbench check (in compare it is that of all ranks)"
        if self.part is None and self.per == "step":
            return f"{said}, {others}"
        means = " and ".join(units.seconds(QUANTITIES["step"].read(run)) for run in runs)
        why = "the mean, which other programs disturb more," if self.part is not None else "the mean per step"
        return f"{said}; {why} is {means}, {others}"

    def value(self, run: Run, steps: int | None = None) -> float:
        """Seconds of the slowest rank per step or per sample, peak bytes of the fullest, or the loss; nan = there is none."""
        if self.of == "loss":
            losses = [loss for step, loss in _losses(run) if steps is None or step <= steps]
            return statistics.fmean(losses[-_last(len(losses)) :]) if losses else math.nan
        if self.of == "memory":
            return max((value for _, value in _peaks(run, steps)[-1:]), default=QUANTITIES["peak_memory"].read(run))
        return self.of_steps(step_times(run), run)

    def of_steps(self, times: Sequence[float], run: Run) -> float:
        """The value of some steps of a run."""
        if not times:
            return math.nan
        value = statistics.fmean(times) if self.part is None else sorted(times)[int(self.part * (len(times) - 1))]
        return value / samples_per_step(run) if self.per == "sample" else value

    def blocks(self, run: Run) -> list[float]:
        """The values of a run in some blocks of steps that follow one another; of memory and loss there is one."""
        if self.of != "time":
            return [self.value(run, self.steps)]
        times = step_times(run)
        size = max(4, len(times) // BLOCKS)
        return [self.of_steps(times[i : i + size], run) for i in range(0, len(times) - size + 1, size)] or [self.of_steps(times, run)]

    def change(self, runs: Sequence[Run]) -> Interval:
        """The log of the second run's value over the first one's, with the interval that their steps allow.

        Losses are compared step by step, since those of the same batch differ less than those of different ones. Where the two runs have
        different batches, the interval is that of chance.
        """
        a, b = (self.value(run, self.steps) for run in runs)
        if self.of != "loss":
            return recorded_change((a, b), (self.blocks(runs[0]), self.blocks(runs[1])))
        if not (a > 0 and b > 0):
            return Interval(low=math.nan, mid=math.nan, high=math.nan)
        series = [dict(_losses(run)) for run in runs]
        shared = sorted(step for step in series[0].keys() & series[1].keys() if step <= self.steps)
        shared = shared[-_last(len(shared)) :]
        size = max(1, len(shared) // BLOCKS)
        apart = [
            statistics.fmean(series[1][step] / b - series[0][step] / a for step in shared[i : i + size])
            for i in range(0, len(shared) - size + 1, size)
        ]
        half = student_t(0.05, len(apart) - 1) * statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
        return Interval(low=math.log(b / a) - half, mid=math.log(b / a), high=math.log(b / a) + half)


def measured(runs: Sequence[Run], of: str) -> Measured:
    """What to measure to see a regression between two recorded runs again.

    Of time it is the step that a quarter of the steps are faster than, where that shows the regression as well as the mean: other processes
    disturb it least. Where it shows less, such as where some steps stall, it is the mean, unless only the quantile's change is beyond what
    blocks of the runs vary by. It is the mean, too, where its change is beyond that and the quantile's is more than half as large again,
    such as where a slow loader holds up only every second step. Where the two contradict each other, a quantile that is sure counts: load
    can make any mean longer, and the fastest steps hardly.
    """
    sizes = [samples_per_step(run) for run in runs] if of == "time" else [1.0, 1.0]
    per = "step" if not all(sizes) or math.isclose(*sizes, rel_tol=0.01) else "sample"
    mean = Measured(of=of, steps=steps_for(runs, of), per=per)
    if of != "time" or not all(step_times(run) for run in runs):
        return mean
    quick = dataclasses.replace(mean, part=QUICK)
    (slow, slow_sure), (fast, fast_sure) = (_change(each, runs) for each in (mean, quick))
    as_well = fast * slow > 0 and abs(fast) > SHOWN * abs(slow) and not (slow_sure and abs(fast) > TOO_MUCH * abs(slow))
    return quick if as_well or (fast_sure and (fast * slow <= 0 or not slow_sure)) else mean


def _change(what: Measured, runs: Sequence[Run]) -> tuple[float, bool]:
    """The logarithm of the second run's value over the first one's, and whether it is beyond what their blocks vary by."""
    blocks = what.blocks(runs[0]), what.blocks(runs[1])
    change = what.change(runs)
    known = min(map(len, blocks)) >= FEW_BLOCKS
    return change.mid, known and abs(change.mid) > max(CLEAR, SURE * (change.high - change.mid) / 2)


def within_noise(change: Interval, least: float = LEAST) -> bool:
    """Does a log ratio of recorded values not differ from 0 by more than the steps of the runs themselves vary, or by less than `least`?"""
    return 0 in change or abs(change.mid) < least


def change_in_time(groups: Sequence[Sequence[Run]]) -> tuple[Interval, bool, str] | None:
    """How many times as fast the launches of a second program were as those of a first, as `what_changed` sees it.

    Returns:
        The ratio with its interval, whether it is within noise, and of which statistic of the steps it is. The interval is the one that the
        variation from launch to launch allows; if each program has one, that of their blocks. None = too few steps for four blocks.
    """
    pairs = [tuple(group[number % len(group)] for group in groups) for number in range(max(map(len, groups)))]
    chosen = [measured(pair, "time") for pair in pairs]
    quick = 2 * sum(what.part == QUICK for what in chosen) > len(chosen)
    known = all(samples_per_step(run) for group in groups for run in group)
    per = "sample" if known and any(what.per == "sample" for what in chosen) else "step"
    what = dataclasses.replace(chosen[0], part=QUICK if quick else None, per=per)
    if sum(map(len, groups)) > 2:
        change = change_of_launches([[what.value(run) for run in group] for group in groups])
    elif min(len(what.blocks(run)) for run in pairs[0]) < FEW_BLOCKS:
        return None
    else:
        change = what.change(pairs[0])
    return change.of(lambda log: math.exp(-log)), within_noise(change), f"{what.statistic} per {what.per}"


def step_times(run: Run) -> list[float]:
    """Seconds of each step of the slowest rank, without its warm-up."""
    means = run.rank_means  # much faster to read than all timelines
    slowest = max((place for place, rank in enumerate(means) if rank.count), key=lambda place: means[place].mean(), default=None)
    timeline = None if slowest is None else run.timelines[slowest]
    return [step.seconds for step in timeline.steps[-timeline.count :]] if timeline else []


def samples_per_step(run: Run) -> float:
    """Samples of all ranks in a step; 0 = not known."""
    means = [rank for rank in run.rank_means if rank.count]
    return sum(rank.samples_per_sec * rank.mean() for rank in means if rank.samples_per_sec == rank.samples_per_sec)


def launch_seconds(run: Run, steps: int) -> float:
    """About how long a launch of so many steps takes: as long as a run took to start and end, and its mean steps; 0 = not known."""
    step = QUANTITIES["step"].read(run)
    seconds = max(0.0, run.seconds - step * run.progress[0]) + step * steps
    return seconds if math.isfinite(seconds) else 0.0


def steps_of(seconds: float) -> int:
    """Steps of a training that times such steps, its warm-up among them."""
    wanted = min(MOST, max(FEWEST, math.ceil(MEASURED_S / seconds))) if seconds > 0 else FEWEST
    return wanted + min(MAX_WARMUP, max(3, wanted // 4))


def steps_for(runs: Sequence[Run], of: str) -> int:
    """Steps of a training that is to show in what two runs differ.

    Of time they take some seconds. Of memory and loss they are as many as it took until the two differed by half of their last difference,
    or more, and never again by less or by more than twice of it; of loss also until the difference was beyond chance.
    """
    recorded = min(max(2, run.progress[0]) for run in runs)
    if of == "time":
        return steps_of(max(QUANTITIES["step"].read(run) for run in runs))
    series = [dict(_means(_losses(run)) if of == "loss" else _peaks(run, None)) for run in runs]
    shared = sorted(series[0].keys() & series[1].keys())
    if not shared or not all(0 < values[shared[-1]] < math.inf for values in series):
        return recorded

    def beyond_chance(steps: int) -> bool:
        return of != "loss" or 0 not in Measured(of=of, steps=steps).change(runs)

    apart = [math.log(max(series[1][step], 1e-30) / max(series[0][step], 1e-30)) for step in shared]
    square = apart[-1] ** 2
    early = max((place for place, each in enumerate(apart) if not HALF * square <= each * apart[-1] <= square / HALF), default=-1)
    steps = min(recorded, max(FEWEST, math.ceil(1.2 * shared[early + 1])))
    while steps < recorded and not beyond_chance(steps):
        steps = min(recorded, 2 * steps)
    return steps if beyond_chance(recorded) else recorded


def _last(count: int) -> int:
    """Of so many losses, how many of the last ones count."""
    return max(FEWEST_LOSSES, count // 10)


def _means(losses: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Step → the mean of the last tenth of the losses up to it."""
    sums = [0.0, *itertools.accumulate(loss for _, loss in losses)]
    first = [max(0, place - _last(place)) for place in range(1, len(sums))]
    return [(step, (sums[end] - sums[start]) / (end - start)) for end, (start, (step, _)) in enumerate(zip(first, losses, strict=True), 1)]


def _losses(run: Run) -> list[tuple[int, float]]:
    return [(row["step"], float(row["loss"])) for row in run.metric_rows if row.get("loss") is not None and "lr" in row]


def _peaks(run: Run, steps: int | None) -> list[tuple[int, float]]:
    """Step (from 1) → the largest memory of any rank so far."""
    peaks: dict[int, float] = {}
    for timeline in run.timelines:
        for step in timeline.steps:
            if step.memory is not None and (steps is None or step.index < steps):
                peaks[step.index + 1] = max(peaks.get(step.index + 1, 0.0), float(step.memory))
    numbers = sorted(peaks)
    return list(zip(numbers, itertools.accumulate((peaks[number] for number in numbers), max), strict=True))
