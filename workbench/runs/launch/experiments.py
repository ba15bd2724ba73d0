"""Launches a program that measures something, waits for its end, and stops it when the wait is interrupted.

Each function here writes an order into the run directory, under "experiment" of run.json. Its program reads it in every rank and leaves
the result in the directory. All take `runs_dir`, where run directories go (None = `runs` in the current folder). `budget_s` are seconds
for all of it, the start included; `tick` is called again and again meanwhile, such as to show progress. All raise `RunError` where the
experiment failed (its run directory stays), `LaunchError` or `TaskError` where it cannot run here (nothing was written).
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.core import run_directory, units
from workbench.core.progress import ProgressLine, left_by, status_text
from workbench.runs import entrypoints
from workbench.runs.combinations import given
from workbench.runs.failure import Failure, RunError
from workbench.runs.launch.launch import check, label
from workbench.runs.launch.new_run import LaunchError, NewRun
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

PATIENCE = 600.0
"""Seconds beyond three times the budget after which an experiment is stopped: a model or a dataset may take long to build, and one step
may be longer than the whole budget."""
STEP = 60.0
"""Seconds that a step whose memory is recorded, or a step of an LR range test, may take, about."""
FINISH_SECONDS = 20.0
"""Seconds that a run may take after Ctrl-C to end with what it knows."""
_RACES = 20
"""Rounds that candidates run in a race of learning rates, about."""
_TICK = 0.05


def run_diagnosis(spec: RunSpec, *, budget_s: float, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Diagnose a step of a spec by experiments; the run directory then holds `evidence.json`."""
    _check_stages(spec, "diagnose")
    check(spec)
    order = {"kind": "diagnose", "budget_s": budget_s}
    show = so_far("diagnose", budget_s)
    return run_experiment(spec, f"{label(spec)} diagnose", order, runs_dir, program=entrypoints.EXPERIMENT, show=show, finish=True)


def run_ab_test(spec: RunSpec, changed: RunSpec, *, name: str, budget_s: float, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Time two specs against each other, interleaved in one launch; the run directory then holds `contest.json`.

    The launch has as many ranks as the larger one; some idle while the smaller one runs.
    """
    for each in (spec, changed):
        _check_stages(each, f"prove {name}")
        check(each)
    larger = max(spec, changed, key=lambda each: each.nproc_per_node)
    order = {"kind": "prove", "budget_s": budget_s, "baseline": spec.to_json(), "changed": changed.to_json()}
    show = so_far(f"prove {name}", budget_s)
    return run_experiment(larger, f"{label(spec)} prove {name}", order, runs_dir, program=entrypoints.EXPERIMENT, show=show, finish=True)


def run_gap(spec: RunSpec, *, large: int, budget_s: float, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Measure what the ranks of a spec cost each other; the run directory then holds `gap.json`.

    One rank alone is given `large` batches at once; 0 = as many as there are ranks. All takes `budget_s` seconds, the start included.
    """
    _check_stages(spec, "why_not_linear")
    check(spec)
    order = {"kind": "gap", "budget_s": budget_s, "large": large}
    name, show = f"{label(spec)} why not linear", so_far("why_not_linear", budget_s)
    return run_experiment(spec, name, order, runs_dir, program=entrypoints.EXPERIMENT, show=show, finish=True)


def run_memory_measurement(spec: RunSpec, *, steps: int, budget_s: float, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Record the memory of some steps of a spec; the run directory then has a folder `memory` with a file of each rank.

    There are fewer steps, but one at least, where the budget, in seconds with the start, ends or Ctrl-C comes.
    """
    check(spec)
    order = {"kind": "memory", "budget_s": budget_s, "steps": steps}
    show = so_far("measure_memory", budget_s)
    return run_experiment(spec, f"{label(spec)} memory", order, runs_dir, program=entrypoints.MEMORY, show=show, finish=True)


def run_communication(
    specs: Sequence[RunSpec], *, seconds: float, runs_dir: str | os.PathLike[str] | None = None, tick: Callable[[], object] = int
) -> Run:
    """Train each of several specs with and without its reduction of gradients, interleaved; the run directory then has
    `communication.json`.

    All are measured in one launch of as many ranks as the largest needs, while the others idle. They must agree on the task, and on what
    is fixed when the processes start.
    """
    for spec in specs:
        check(spec)
    largest = max(specs, key=lambda spec: spec.nproc_per_node)
    listed = [spec.to_json() for spec in specs]
    order = {"kind": "communication", "budget_s": seconds * len(specs), "seconds": seconds, "specs": listed}
    return run_experiment(largest, f"{label(largest)} communication", order, runs_dir, program=entrypoints.COMMUNICATION, tick=tick)


def run_link_sweep(spec: RunSpec, order: Mapping[str, Any], *, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Time collectives between ranks; the run directory then holds `links.json`.

    Of the spec its ranks, device and backend count. In `order` are kinds, sizes, repeats and measuring_s, as
    `cluster.measure.links.time_links` takes them.
    """
    check(spec)
    order = {"kind": "links", "budget_s": order["measuring_s"], **order}
    new, progress = NewRun(runs_dir, "collectives"), time_left("{done} of {steps} rounds")
    program = entrypoints.entrypoint(entrypoints.COMMUNICATION, new.path)
    run = new.start(spec, program, timeout=PATIENCE + 3 * order["budget_s"], experiment=order)
    try:
        return wait_for(run, show=progress)
    except KeyboardInterrupt:
        if not (run.path / run_directory.LINKS).exists():
            raise
        return run  # the rounds that are done


def run_lr_range(spec: RunSpec, *, options: Mapping[str, Any], runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Look for the learning rate of a spec, with its progress in a terminal; the run directory then holds `lr_range.json`.

    `options` are low, high, sweeps, iterations and race_steps, as `batch.measure.lr_range.find` takes them, and measuring_s, the seconds
    that it may take (None = no limit).
    """
    _check_stages(spec, "find_lr")
    check(spec)
    steps = (options["sweeps"] + 1) * options["iterations"] + _RACES * options["race_steps"]
    order = {"kind": "lr_range", "budget_s": STEP * steps, **options}
    progress = time_left("{done} of about {steps} steps", options["measuring_s"])
    return run_experiment(spec, f"{label(spec)} find_lr", order, runs_dir, program=entrypoints.LR_RANGE, show=progress, finish=True)


def run_recording(spec: RunSpec, *, steps: int, runs_dir: str | os.PathLike[str] | None = None, tick: Callable[[], object] = int) -> Run:
    """Record the first steps of a spec on its ranks, as they are and in fp64; the run directory then holds `divergence.json`."""
    check(spec)
    order = {"kind": "diverge", "budget_s": STEP * steps, "steps": steps}
    return run_experiment(spec, f"{label(spec)} diverge", order, runs_dir, program=entrypoints.DIVERGENCE, tick=tick)


def _check_stages(spec: RunSpec, what: str) -> None:
    if spec.pipeline_parallel > 1:
        raise LaunchError(
            f"{what}: pipeline_parallel={spec.pipeline_parallel}: an experiment takes steps on some ranks alone, and no stage "
            "of a pipeline can; try it with pipeline_parallel=1 and a model, or a micro_batch, that fits one rank"
        )
    if spec.expert_parallel > 1 or spec.local_sgd != "none":
        knob = "expert_parallel" if spec.expert_parallel > 1 else "local_sgd"
        raise LaunchError(
            f"{what}: {given(spec, knob)}: an experiment takes steps on some ranks alone, and the others would wait for "
            f"{'the tokens' if spec.expert_parallel > 1 else 'the parameters'} that all of them exchange; leave {knob} out"
        )


def run_experiment(
    spec: RunSpec,
    name: str,
    order: Mapping[str, Any],
    runs_dir: str | os.PathLike[str] | None,
    *,
    program: str,
    show: Callable[[Run], str] | None = None,
    tick: Callable[[], object] = int,
    finish: bool = False,
) -> Run:
    """Launch an experiment, and wait for its end as `wait_for` does.

    Args:
        spec: the training that is launched for it.
        name: of the run, for people.
        order: what to do; its `budget_s` is the seconds that it may take, about.
        runs_dir: folder of the run directory; None = `runs` in the current folder.
        program: of `runs/entrypoints.py`; it runs the experiment.
        show, tick, finish: see `wait_for`.
    """
    new = NewRun(runs_dir, name)
    run = new.start(spec, entrypoints.entrypoint(program, new.path), timeout=PATIENCE + 3 * order["budget_s"], experiment=order)
    return wait_for(run, show=show, tick=tick, finish=finish)


def wait_for(
    run: Run, *, show: Callable[[Run], str] | None = None, tick: Callable[[], object] = int, check: bool = True, finish: bool = False
) -> Run:
    """Wait for the end of a run. Whatever interrupts the wait, such as Ctrl-C or an error of `tick`, stops the run.

    Args:
        show: its progress, for a line in a terminal; None = nothing is shown.
        tick: called again and again meanwhile.
        check: raise if it did not finish well.
        finish: at the first Ctrl-C, let it end with what it knows by then; its program has to look for FINISH.

    Raises:
        RunError: it did not finish well; its run directory stays.
    """
    line = ProgressLine(lambda: show(run) if show else "", notebook=True)
    try:
        while run.state == "running":
            if show:
                line.show()
            tick()
            time.sleep(_TICK)
    except BaseException as why:
        if not (finish and isinstance(why, KeyboardInterrupt) and _ends_early(run)):
            run.stop()
            if isinstance(why, KeyboardInterrupt):
                why.add_note(left_by(run.path))
            raise
    finally:
        line.close(run)
    if check and (error := error_of(run)):
        raise error
    return run


def _ends_early(run: Run) -> bool:
    """Ask a run that knows something to end with that; True if it then finished well."""
    try:
        if not run_directory.read_json(run.path / run_directory.PROGRESS)["known"]:
            return False
        (run.path / run_directory.FINISH).touch()
        end = time.monotonic() + FINISH_SECONDS
        while run.state == "running" and time.monotonic() < end:
            time.sleep(_TICK)
    except (KeyboardInterrupt, OSError, run_directory.DamagedRunError):  # a second Ctrl-C, or nothing is known yet
        return False
    return run.ok


def error_of(run: Run) -> RunError | None:
    """Why a run that has ended did not finish well, and where its directory is; None = it did."""
    if run.ok:
        return None
    error = RunError(run.error or Failure.of_launcher(f"it was {run.state}"))
    error.add_note(f"Its run directory: {run.path}")
    return error


def so_far(name: str, budget_s: float | None) -> Callable[[Run], str]:
    """A function that gives what a run tries now and knows so far, as its file says (now, known)."""
    began = time.monotonic()

    def words(run: Run) -> str:
        ranks = run.spec.world_size
        status = {
            "now": f"starting {ranks} processes, which load torch" if ranks > 1 else "starting a process, which loads torch",
            "known": "",
        }
        with contextlib.suppress(run_directory.DamagedRunError, OSError):  # it has not begun, or a shared disk does not answer
            status = run_directory.read_json(run.path / run_directory.PROGRESS)
        return status_text(name, status["now"], status["known"], time.monotonic() - began, budget_s)

    return words


def time_left(words: str, budget_s: float | None = None) -> Callable[[Run], str]:
    """A function that gives the progress of a run and its time left, by the last row of its metrics (step, steps, seconds).

    With `budget_s`, it is never more than what is left of these seconds, and where all steps would take longer it says so.
    """

    def progress(run: Run) -> str:
        rows = run.metric_rows
        if not rows:
            return f"{run.path.name}: starting"
        done, steps, seconds = (rows[-1][name] for name in ("step", "steps", "seconds"))
        left = seconds * max(0, steps - done) / done
        if budget_s is not None and seconds + left > budget_s:
            return f"{run.path.name}: step {done}, {units.seconds(seconds)} of {units.seconds(budget_s)}"
        return f"{run.path.name}: {words.format(done=done, steps=steps)} · {units.seconds(left)} left"

    return progress
