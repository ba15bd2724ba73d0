"""Experiments in a launch of their own, awaited: what a step of a spec is made of or holds, or whether a changed spec is faster.

Timing collectives in a launch of its own, awaited.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.runs.launch.launch import check, label, own
from workbench.runs.launch.new_run import NewRun
from workbench.runs.launch.waiting import time_left, wait_for
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

PATIENCE = 600.0
"""Seconds beyond three times the budget after which an experiment is stopped: the building of a model or a dataset takes as long as it
takes, and one step of it can be longer than the whole budget."""
STEP = 60.0
"""Seconds that a step whose memory is recorded may take, about."""


def explore(spec: RunSpec, *, budget_s: float, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Find out what a step of a spec is made of; the run directory then holds `evidence.json`.

    Args:
        spec: to launch.
        budget_s: seconds for all of it, the start included.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        RunError: the experiment failed; the run directory stays.
        LaunchError, TaskError: it cannot run here. Nothing was written.
    """
    check(spec)
    return launched(spec, f"{label(spec)} diagnose", {"kind": "diagnose", "budget_s": budget_s}, runs_dir)


def contend(spec: RunSpec, changed: RunSpec, *, name: str, budget_s: float, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Let two specs take turns in one launch; the run directory then holds `contest.json`.

    Where they want different numbers of ranks, there are as many as the larger one wants, and some rest while the smaller one runs.

    Args:
        spec: the baseline.
        changed: the other one.
        name: of the change, for people.
        budget_s: seconds for all of it, the start included.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        RunError: the experiment failed; the run directory stays.
        LaunchError, TaskError: one of them cannot run here. Nothing was written.
    """
    for one in (spec, changed):
        check(one)
    both = max(spec, changed, key=lambda one: one.nproc_per_node)
    order = {"kind": "prove", "budget_s": budget_s, "baseline": spec.to_json(), "changed": changed.to_json()}
    return launched(both, f"{label(spec)} prove {name}", order, runs_dir)


def weigh(spec: RunSpec, *, steps: int, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Find out what a step of a spec holds in memory; the run directory then has a folder `memory` with a file of each rank.

    Args:
        spec: to launch.
        steps: how many are taken.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        RunError: it failed; the run directory stays.
        LaunchError, TaskError: it cannot run here. Nothing was written.
    """
    check(spec)
    order = {"kind": "memory", "budget_s": STEP * steps, "steps": steps}
    return launched(spec, f"{label(spec)} memory", order, runs_dir, program="workbench.programs.memory")


def measure_communication(
    specs: Sequence[RunSpec],
    *,
    seconds: float,
    runs_dir: str | os.PathLike[str] | None = None,
    tick: Callable[[], object] = int,
) -> Run:
    """Let each of several specs train with and without its reduction of gradients, in turns; the run directory then has
    `communication.json`.

    All are measured in one launch of as many ranks as the largest wants, while the others rest. They must agree on the task, and on what
    is fixed when the processes start.

    Args:
        specs: to be measured, one after the other.
        seconds: for each, without the start.
        runs_dir: where run directories go; None = `runs` in the current folder.
        tick: called again and again meanwhile, such as to show how far it is.

    Raises:
        RunError: it failed; the run directory stays.
        LaunchError, TaskError: it cannot run here. Nothing was written.
    """
    for one in specs:
        check(one)
    most = max(specs, key=lambda one: one.nproc_per_node)
    order = {
        "kind": "communication",
        "budget_s": seconds * len(specs),
        "seconds": seconds,
        "specs": [one.to_json() for one in specs],
    }
    return launched(most, f"{label(most)} communication", order, runs_dir, program="workbench.programs.communication", tick=tick)


def range_test(spec: RunSpec, *, options: Mapping[str, Any], runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Look for the learning rate of a spec; the run directory then holds `lr_range.json`.

    In a terminal a line says how far it is and how long it will take.

    Args:
        spec: to launch.
        options: low, high, sweeps, iterations and race_steps, as `measure.lr_range.find` takes them.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        RunError: it failed; the run directory stays.
        LaunchError, TaskError: it cannot run here. Nothing was written.
    """
    check(spec)
    steps = (options["sweeps"] + 1) * options["iterations"] + _RACES * options["race_steps"]
    order = {"kind": "lr_range", "budget_s": STEP * steps, **options}
    return launched(
        spec,
        f"{label(spec)} find_lr",
        order,
        runs_dir,
        program="workbench.programs.lr_range",
        show=time_left("{done} of about {steps} steps"),
    )


_RACES = 20
"""Rounds that candidates run in a race, about."""


def launched(
    spec: RunSpec,
    name: str,
    order: Mapping[str, Any],
    runs_dir: str | os.PathLike[str] | None,
    *,
    program: str = "workbench.programs.experiment",
    show: Callable[[Run], str] | None = None,
    tick: Callable[[], object] = int,
) -> Run:
    """Launch an experiment, and wait for its end.

    Args:
        spec: to launch.
        name: of the run, for people.
        order: what to try; its `budget_s` is the seconds that it may take, about.
        runs_dir: where run directories go; None = `runs` in the current folder.
        program: a module of `workbench.programs` that carries the order out.
        show: how far it is, in words; None = nothing is shown.
        tick: called again and again meanwhile.

    Raises:
        RunError: it failed; the run directory stays.
        LaunchError: it cannot run here. Nothing was written.
    """
    new = NewRun(runs_dir, name)
    run = new.start(spec, own(program, new.path), timeout=PATIENCE + 3 * order["budget_s"], experiment=order)
    return wait_for(run, show=show, tick=tick)


def link_sweep(spec: RunSpec, order: Mapping[str, Any], *, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Time collectives between ranks; the run directory then holds `links.json`.

    Args:
        spec: of which its ranks, device and backend count.
        order: kinds, sizes, repeats and measuring_s, as `measure.links.time_links` takes them.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        RunError: it failed; the run directory stays.
        LaunchError: it cannot run here. Nothing was written.
    """
    check(spec)
    wanted = {"kind": "links", "budget_s": order["measuring_s"], **order}
    return launched(spec, "collectives", wanted, runs_dir, program="workbench.programs.links", show=time_left("{done} of {steps} rounds"))
