"""sweep: runs every combination of some knobs' values, one run each, in as few launches as a fair comparison allows."""

import contextlib
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core import run_directory, units
from workbench.core.checks import check_budget, whole_number
from workbench.core.progress import INTERRUPTED, BudgetError, Waiting, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.runs.entrypoints import spec_entrypoint
from workbench.runs.launch.experiments import wait_for
from workbench.runs.launch.launch import check, label
from workbench.runs.launch.new_run import NewRun, child_dir
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, SpecError, check_names, check_profile
from workbench.runs.target import read_spec

_SAME_FOR_ALL = ("task", "launcher", "disk-full")
"""Kinds of failure that the next configuration would meet as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One repetition of one configuration."""

    place: int
    """Where its run goes in the result."""
    name: str
    """The knobs that vary, with their values here."""
    spec: RunSpec

    @property
    def shared(self) -> tuple[Any, ...]:
        """What the runs of one launch must have in common, because it is fixed when the processes start."""
        return self.spec.nproc_per_node, self.spec.device, self.spec.backend, self.spec.threads


@accept_synonyms
def sweep(
    spec: RunSpec,
    *,
    runs_dir: str | os.PathLike[str] | None = None,
    repeat: int = 1,
    quiet: bool = False,
    budget_s: float | None = None,
    **lists: Sequence[Any],
) -> list[Run]:
    """Run every combination of the knobs' values and return when all have ended.

    Configurations that can share their processes run in one launch, which pays the start-up once. No two configurations run at the same
    time. With `repeat`, each repetition goes through the configurations in the opposite order (A B B A), so that a machine that slowly
    becomes hotter or busier favours none of them.

    Args:
        spec: what all configurations have in common.
        runs_dir: where run directories go; None = `runs` in the current folder.
        repeat: how often each configuration runs.
        quiet: do not print a line per finished run.
        budget_s: seconds after which the current run is stopped and no further run starts, once at least one has ended; None = no limit,
            since an unfinished comparison may favour what ran first.
        **lists: a list of values for each knob, such as `micro_batch=[16, 32]`.

    Returns:
        The runs in the order of the product (the last knob varies fastest), repetitions side by side. If the budget or Ctrl-C ended the
        sweep, only the finished runs; a line on stderr says which are missing.

    Raises:
        SpecError: a knob or value that is not allowed, or fewer steps than `profile` needs. Nothing was started.
        LaunchError, TaskError: a configuration cannot run here, or the task does not exist. Nothing was started.
        KeyboardInterrupt: Ctrl-C came before the first run had ended.
    """
    spec = read_spec("sweep", spec, because="whose knobs can be turned", instead="a script is launched with launch()", error=SpecError)
    return run_all(combinations(spec, lists), "sweep", budget_s=budget_s, runs_dir=runs_dir, repeat=repeat, quiet=quiet)


def run_all(
    specs: Sequence[tuple[str, RunSpec]],
    name: str,
    *,
    budget_s: float | None,
    runs_dir: str | os.PathLike[str] | None = None,
    repeat: int = 1,
    quiet: bool = True,
) -> list[Run]:
    """Run specs that need not be a product, as `sweep` does; gives the runs in the order of the specs, repetitions side by side.

    Raises:
        SpecError, LaunchError, TaskError, KeyboardInterrupt: as in `sweep`.
    """
    whole_number("repeat", repeat, least=1, error=SpecError)
    check_budget(budget_s, error=SpecError)
    for _, each in specs:
        check(each)
        check_profile(each)
    trials = plan(specs, repeat)
    done: dict[int, Run] = {}
    cause = ""

    def tick() -> None:
        left = len(trials) - len(done)
        if done and left and line.left <= 0:
            raise BudgetError
        rest = f", the others take about {units.seconds(line.seconds / len(done) * left)}" if done and left else ""
        line.say(trials[-left or -1].name, f"{len(done)} of {len(trials)} runs are over{rest}" if done else None)

    with say_what_was_interrupted(name), Waiting(name, budget_s, begin=f"{len(trials)} runs") as line:
        try:
            with contextlib.closing(in_turn(trials, runs_dir, tick)) as ended:
                for trial, run in ended:
                    done[trial.place] = run
                    if not quiet:
                        begin = "\r\x1b[2K" * sys.stderr.isatty()  # where the line is that shows the time
                        print(f"{begin}[{len(done)}/{len(trials)}] {trial.name}: {outcome_line(run)}", flush=True)
        except (BudgetError, KeyboardInterrupt) as why:
            if not done:
                raise
            cause = INTERRUPTED if isinstance(why, KeyboardInterrupt) else "the budget ended"
    if missing := ", ".join(trial.name for trial in trials if trial.place not in done):
        print(f"{name}: {cause} after {len(done)} of {len(trials)} runs; missing: {missing}", file=sys.stderr)
    return [done[place] for place in sorted(done)]


def in_turn(
    trials: Sequence[Trial],
    runs_dir: str | os.PathLike[str] | None = None,
    tick: Callable[[], object] = int,
    skip: Callable[[Trial], object] = lambda trial: False,
) -> Generator[tuple[Trial, Run], None, None]:
    """Run trials in their order, neighbours that can share a launch in one, and give each one's run as soon as it has ended.

    Closing the generator stops what runs; runs that have ended stay.

    Args:
        trials: checked already.
        runs_dir: where run directories go; None = `runs` in the current folder.
        tick: called again and again meanwhile, such as to show how far it is.
        skip: called with each trial before its launch; true = leave it out, for instance because the same spec has failed.
    """
    for _, group in itertools.groupby(trials, key=lambda trial: trial.shared):
        waiting = list(group)
        while waiting := [trial for trial in waiting if not skip(trial)]:  # a second time only if a launch broke down on the way
            with contextlib.closing(_together(waiting, runs_dir, tick)) as ended:
                for run in ended:
                    yield waiting.pop(0), run


def combinations(spec: RunSpec, lists: Mapping[str, Sequence[Any]]) -> list[tuple[str, RunSpec]]:
    """The product of the lists: each configuration in words, and its spec.

    >>> [words for words, _ in combinations(RunSpec(task="text-gpt"), {"micro_batch": [8, 16], "precision": ["fp32"]})]
    ['micro_batch=8 precision=fp32', 'micro_batch=16 precision=fp32']

    Raises:
        SpecError: a knob or value that is not allowed; the message names both.
    """
    if not lists:
        raise SpecError("a sweep of nothing: give at least one knob a list of values, such as micro_batch=[16, 32]")
    check_names(RunSpec, lists)
    for knob, values in lists.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise SpecError(f"{knob}={values!r}: expected a list of values, such as {knob}=[{getattr(spec, knob)!r}]")
        if any(value in values[:i] for i, value in enumerate(values)):
            raise SpecError(f"{knob}={values!r} has a value twice: to run each configuration several times there is repeat=2")
    specs = []
    for combination in itertools.product(*lists.values()):
        changes = dict(zip(lists, combination, strict=True))
        words = " ".join(f"{knob}={value}" for knob, value in changes.items())
        try:
            specs.append((words, spec.replace(**changes)))
        except SpecError as error:
            raise SpecError(f"{error} (in {words})") from error
    return specs


def plan(specs: Sequence[tuple[str, RunSpec]], repeat: int) -> list[Trial]:
    """The order of execution: trials that can share a launch together, forwards, then backwards for the next repetition."""
    trials = [
        [Trial(place=place * repeat + repetition, name=words, spec=spec) for place, (words, spec) in enumerate(specs)]
        for repetition in range(repeat)
    ]
    first_seen = {trial.shared: trial.place for trial in reversed(trials[0])}
    order = []
    for repetition, there in enumerate(trials):
        there.sort(key=lambda trial: first_seen[trial.shared])
        order += there if repetition % 2 == 0 else there[::-1]
    return order


def _together(trials: Sequence[Trial], runs_dir: str | os.PathLike[str] | None, tick: Callable[[], object]) -> Generator[Run, None, None]:
    """Run trials in one launch and give each run as it ends; none for trials that did not begin because the launch failed."""
    trials = tuple(trials)
    first = trials[0]
    name = f"{label(first.spec)} {first.name}" if len(trials) == 1 else f"{label(first.spec)} sweep"
    new = NewRun(runs_dir, name)
    if len(trials) == 1:
        folders = [new.path]
        launched = new.start(first.spec, spec_entrypoint(first.spec, new.path))
    else:
        folders = [child_dir(new.path, index) for index in range(len(trials))]
        children = [(f"{label(trial.spec)} {trial.name}", trial.spec) for trial in trials]
        launched = new.start(first.spec, spec_entrypoint(first.spec, *folders), children=children)
    try:
        for index, folder in enumerate(folders):
            run = wait_for(Run.load(folder), tick=tick, check=False)
            if index and _never_begun(run, launched):
                for left in folders[index:]:
                    shutil.rmtree(left)
                break
            yield run
        wait_for(launched, tick=tick, check=False)
    except BaseException:
        launched.stop()
        raise


def _never_begun(run: Run, launched: Run) -> bool:
    """Did the launch fail before this run began, in a way that another launch may not?"""
    if any(run.path.glob("rank*.jsonl")) or run_directory.read_json(run.path / run_directory.RUN_JSON)["outcome"]:
        return False
    return launched.error is not None and launched.error.kind not in _SAME_FOR_ALL


def outcome_line(run: Run) -> str:
    """How a run ended, in one line."""
    how = units.rate(run.samples_per_sec) if run.ok else f"{run.state}: {run.error}".splitlines()[0]
    return f"{how} · {units.seconds(run.seconds)}"
