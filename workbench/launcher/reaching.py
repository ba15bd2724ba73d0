"""Many trainings until a target in one launch, awaited: how they get on is read from the journal that the ranks share."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from workbench.batch.reaching import StepsToTarget
from workbench.launcher.launching import check, label, own
from workbench.launcher.start import NewRun
from workbench.launcher.waiting import wait_for
from workbench.run import Run
from workbench.spec import RunSpec


def reach(
    spec: RunSpec,
    order: Mapping[str, Any],
    *,
    words: Callable[[Run], str],
    runs_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> Run:
    """Train until a target at several batches; the run directory then holds `trials.jsonl`, which grows trial by trial.

    An interrupt or an error stops the processes, and trials that have ended stay: the exception says where.

    Args:
        spec: what all trials have in common; each of its ranks does trials of its own.
        order: what is wanted, as plain JSON values.
        words: how the run gets on, in a line.
        runs_dir: where run directories go; None = `runs` in the current folder.
        quiet: show no progress.

    Raises:
        RunError: it failed; the run directory stays.
        LaunchError, TaskError: it cannot run here. Nothing was written.
    """
    check(spec)
    new = NewRun(runs_dir, f"{label(spec)} steps to target")
    run = new.start(spec, own("workbench.train.reach", new.path), experiment={"kind": "reach", "order": dict(order)})
    try:
        return wait_for(run, show=None if quiet else words)
    except BaseException as error:
        _say_where(error, run)
        raise


def _say_where(error: BaseException, run: Run) -> None:
    """Add to an error where trials lie that have ended, if there are any."""
    try:
        learnt = StepsToTarget.of(run).trials
    except ValueError:  # none has begun
        return
    if not learnt:
        return
    error.add_note(f'What was learnt so far is kept: wb.steps_to_target("{run.path}")')
