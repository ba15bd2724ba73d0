"""Resuming: a run that was killed or stopped goes on from its last checkpoint, as a new life of the same run, in its own directory."""

import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

from workbench import rundir
from workbench.launcher import environment
from workbench.launcher.start import LaunchError, NewRun, open_lock, wait_for_reaped
from workbench.run import ACTIVE, Run
from workbench.spec import RunSpec

ATTEMPTS = "attempts"
"""Folder of what was said in earlier lives of a run, a folder each."""
PATIENCE = 20.0
"""Seconds that a guard may take to leave after it has said how its run ended."""


def resumable(old: Run | str | os.PathLike[str], target: Any = None) -> Run:
    """The run, if it has ended before its last step and can go on.

    Args:
        old: the run, or its directory.
        target: None, or a spec that has to be that of the run.

    Raises:
        LaunchError: it cannot go on, and why.
    """
    run = Run.load(old.path if isinstance(old, Run) else old)
    _refuse(run, rundir.read_json(run.path / rundir.RUN_JSON), target)
    return run


def go_on(run: Run, timeout: float | None = None) -> Run:
    """Start another life of a run, from its last checkpoint.

    Args:
        run: that is `resumable`.
        timeout: seconds after which this life is stopped; None = never.

    Raises:
        LaunchError: somebody else let it go on meanwhile, or there is no room. The run stays as it had ended.
    """
    limit = time.monotonic() + PATIENCE
    while rundir.is_locked(run.path / rundir.LOCK) and time.monotonic() < limit:  # how it ended is written; its guard is about to leave
        time.sleep(0.02)
    lock = open_lock(run.path, wait=False)
    try:
        _Again(run).start_again(timeout, lock)
    finally:
        os.close(lock)
    return Run.load(run.path)


def _refuse(run: Run, info: dict[str, Any], target: Any) -> None:
    """Say why a run cannot go on."""
    spec, path = run.spec, run.path
    if info.get("batch"):
        raise LaunchError(f"{run!r} is a job of Slurm: with Slurm(requeue=True) it goes on by itself, and scontrol requeue tells it to")
    if info.get("alone") or info.get("experiment") or info["launch_dir"] != "." or info["command"][-1:] != [str(path)]:
        raise LaunchError(f"{path} was not launched as a run of its own in this place: only such a run goes on. Launch its spec anew")
    if not isinstance(spec, RunSpec):
        raise LaunchError(f"{run!r} is a script, whose checkpoints are its own: launch it again with the option by which it reads them")
    if target is not None and target != spec:
        raise LaunchError(f"{run!r} goes on as it was launched, {_difference(spec, target)}: leave the spec out, or launch it as a new run")
    if spec.nnodes > 1:
        raise LaunchError(f"{run!r} is of {spec.nnodes} machines: only a run of one goes on here; on Slurm, with Slurm(requeue=True)")
    state = run.state
    if state in ACTIVE:
        raise LaunchError(f"{run!r} is still running: it goes on anyway. To begin again from its last checkpoint, run.stop() first")
    if state == "finished":
        raise LaunchError(f"{run!r} has finished: there is nothing left to go on with. For more steps launch a new run")
    if not list((path / rundir.CHECKPOINTS).glob("step*.pt")):
        every = f"ended before its first one (every {spec.checkpoint_every} steps)" if spec.checkpoint_every else "was to keep none"
        raise LaunchError(f"{run!r} has no checkpoint to go on from: it {every}. Launch it anew: wb.launch(run.spec, checkpoint_every=…)")


def _difference(spec: RunSpec, target: Any) -> str:
    if not isinstance(target, RunSpec):
        return f"and {target!r:.60} is not its spec"
    name, (here, there) = next(iter(spec.changes(target).items()))
    return f"with {name}={here!r} and not {there!r}"


def put_away(path: Path) -> None:
    """What processes said in an earlier life moves to `attempts/<n>`; steps, metrics and checkpoints stay, cut to whole lines."""
    old = path / ATTEMPTS / str(lives(path))
    old.mkdir(parents=True)
    for name in (rundir.NODES, rundir.LOGS, rundir.ERRORS, rundir.LAUNCHER_LOG):
        if (path / name).exists():
            shutil.move(path / name, old / name)
    for name in (rundir.ERRORS, rundir.LOGS):
        (path / name).mkdir()
    for rows in path.glob("*.jsonl"):
        rundir.cut_to_whole_lines(rows)


def lives(path: Path) -> int:
    """Earlier lives of a run."""
    return len([*(path / ATTEMPTS).glob("*")])


class _Again(NewRun):
    """The directory of a run that was there before: nothing of it goes away."""

    def __init__(self, run: Run) -> None:
        self.path, self.id, self.name, self.created = run.path, run.id, run.name, run.created

    def start_again(self, timeout: float | None, lock: int) -> None:
        """Start a guard in it, with the same command."""
        ended = rundir.read_json(self.path / rundir.RUN_JSON)
        environ, added, removed = environment.for_ranks(self.path, self.id, ended["spec"]["threads"])
        info = ended | {"timeout": timeout, "outcome": None, "host": platform.node(), "versions": environment.versions()}
        info |= {"cores": environment.core_count(), "gpus": environment.gpu_count(), "environment": {"set": added, "removed": removed}}
        wait_for_reaped(self.id)
        try:
            put_away(self.path)
            (self.path / rundir.RESERVE).write_bytes(os.urandom(rundir.RESERVE_BYTES))
            rundir.write_json(self.path / rundir.RUN_JSON, info)
            self._start_guard(info, environ, lock)
        except OSError as error:
            rundir.write_json(self.path / rundir.RUN_JSON, ended)
            raise LaunchError(f"{self.path} could not go on: {error}. Its checkpoints are as they were") from error
