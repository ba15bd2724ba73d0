"""Resumes a run that was killed or stopped from its last checkpoint: another attempt of the same run, in its own directory.

What the processes of each earlier attempt wrote is kept in a folder `attempts/<n>`.
"""

import contextlib
import math
import os
import platform
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import late, run_directory
from workbench.runs.entrypoints import spec_entrypoint
from workbench.runs.guards import ranks_of
from workbench.runs.launch import environment
from workbench.runs.launch.new_run import GIT_PATIENCE, LaunchError, NewRun, end_guard, open_lock, wait_for_reaped
from workbench.runs.launch.rendezvous import loopback_environ
from workbench.runs.restarts import WITH_WHAT_IS_LEFT, checkpoints_of, step_of
from workbench.runs.run import ACTIVE, Run
from workbench.runs.spec import RunSpec
from workbench.runs.task import code_files, code_names, with_files_at

ATTEMPTS = "attempts"
"""Folder of earlier attempts."""
_OF_ATTEMPT = (
    run_directory.PREEMPTED,
    run_directory.HANG,
    run_directory.NODES,
    run_directory.LOGS,
    run_directory.ERRORS,
    run_directory.LAUNCHER_LOG,
)
_FOLDERS = {
    *(run_directory.CHECKPOINTS, run_directory.FINGERPRINTS, run_directory.LOGS, run_directory.ERRORS, run_directory.HANG),
    *(run_directory.NODES, run_directory.MEMORY, run_directory.TRACES, run_directory.ALARM_TRACES, ATTEMPTS),
}
"""The folders of a run directory that the workbench writes into."""
LAYOUT_KNOBS = (
    *("parallel", "nproc_per_node", "tensor_parallel", "pipeline_parallel", "pipeline_schedule", "expert_parallel"),
    *("shard_ranks", "nnodes", "micro_batch", "accumulation", "offload"),
)
"""Knobs that say how ranks share the work."""
OF_ANOTHER_RUN = (*LAYOUT_KNOBS, "steps")
"""Knobs that another run may have which begins with this run's checkpoint."""


def attempts(path: Path) -> int:
    """Earlier attempts of a run: the number of the next folder, even where some before were deleted."""
    return max((int(folder.name) + 1 for folder in (path / ATTEMPTS).glob("*") if folder.name.isdecimal()), default=0)


def archive_attempt(
    path: Path,
    number: int | None = None,
    *,
    copy_log: bool = False,
    machines: Collection[int] = (),
    check: Callable[[], Any] = lambda: None,
) -> None:
    """Move what processes of the last attempt wrote to `attempts/<n>`; steps, metrics and checkpoints stay, cut to whole lines.

    Args:
        path: run directory of the run.
        number: of that attempt; None = by `attempts`.
        copy_log: the guard goes on, and writes into its log.
        machines: of several, those whose guards go on.
        check: called before anything is changed, and again before each file or folder; raises where that may no longer be.
    """
    check()
    old = path / ATTEMPTS / str(attempts(path) if number is None else number)
    old.mkdir(parents=True)
    kept = {f"{run_directory.NODES}/{machine}" for machine in machines}
    names = [str(file.relative_to(path)) for file in path.glob(f"{run_directory.NODES}/[0-9]*") if machines]
    names += [f"{folder}/{name}" for folder in kept for name in (run_directory.LOGS, run_directory.LAUNCHER_LOG)]
    for name in names + [name for name in _OF_ATTEMPT if not (machines and name == run_directory.NODES)]:
        check()
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        if Path(name).name == run_directory.LAUNCHER_LOG and copy_log and (path / name).exists():
            shutil.copyfile(path / name, old / name)
            os.truncate(path / name, 0)
        elif (path / name).exists() and name not in kept:
            shutil.move(path / name, old / name)
    for name in (run_directory.ERRORS, run_directory.LOGS):
        check()
        (path / name).mkdir(exist_ok=bool(machines))
    for rows in path.glob("*.jsonl"):
        before, whole = rows.stat(), run_directory.part_of(rows) if machines else rows
        if machines:  # one that was only paused has the old file open
            shutil.copyfile(rows, whole)
        run_directory.cut_to_whole_lines(whole)
        os.utime(whole, ns=(before.st_atime_ns, before.st_mtime_ns))  # when its rank wrote last
        if machines:
            check()
            whole.replace(rows)


def restore_attempt(path: Path, number: int) -> None:
    """Undo `archive_attempt` of an attempt that did not begin, even where it was interrupted."""
    old = path / ATTEMPTS / str(number)
    if not old.exists():
        return
    for kept in list(old.iterdir()):
        new = path / kept.name
        if new.is_dir():
            shutil.rmtree(new)
        shutil.move(kept, new)
    old.rmdir()
    with contextlib.suppress(OSError):  # there are others
        old.parent.rmdir()


PATIENCE = 20.0
"""Seconds that a guard may take to end after it has written the outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that can be resumed, as it was when it was read."""

    run: Run
    """The run."""
    spec: RunSpec
    """Its spec; a task, or a schedule, in a file has the file's whole path."""
    info: dict[str, Any]
    """What its run.json said."""
    folder: Path
    """Where it was launched: relative paths are found from there."""
    seconds: float
    """How long all its attempts took."""


def resumable(old: Run | str | os.PathLike[str], target: Any = None, *, anew: bool = False) -> Ended:
    """A run that has ended and can go on: before its last step, unless another run takes more steps.

    Args:
        target: None, or a spec: that of the run, or with `anew` that of the other run.
        anew: another run is to begin with its checkpoints, which may be on fewer machines.

    Raises:
        LaunchError: it cannot go on, and why.
    """
    if not isinstance(old, Run | str | os.PathLike):
        raise LaunchError(f"resume={old!r:.80}: expected a run that has ended, or the path of its directory")
    run = Run.load(old.path if isinstance(old, Run) else old)
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    spec = _checked_spec(run, info, target, anew)
    refuse_foreign(run)
    refuse_links(run)
    moved = was_moved(run)
    if not moved and (home := Path(info["command"][-1])) != run.path:  # a link leads to it: its processes know it by one name
        run = Run.load(home)
    _refuse_as_it_stands(run, spec, info["host"], target if anew else None)
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)  # as it stands: it may have ended since
    folder = Path((None if moved else info.get("cwd")) or Path.cwd()).absolute()
    if not folder.is_dir():
        raise LaunchError(f"{run!r} was launched in {folder}, which is gone: its task and its files were found from there. Put it back")
    spec = with_files_at(spec, lambda file: str(folder / file))
    _refuse_code_inside(run, folder, *(Path(file) for file in code_files(spec)))
    return Ended(run=run, spec=spec, info=info, folder=folder, seconds=run.seconds)


def with_names_of(old: Run | str | os.PathLike[str], target: Any) -> Any:
    """A spec, whose task and schedule have the names that they have in a run's spec, if those lead to the same file and function."""
    if not isinstance(old, Run | str | os.PathLike) or not isinstance(target, RunSpec):
        return target
    run = Run.load(old.path if isinstance(old, Run) else old)
    if not isinstance(run.spec, RunSpec):
        return target
    folder = str(run_directory.read_json(run.path / run_directory.RUN_JSON).get("cwd") or "")
    known, names = code_names(run.spec), dict[str, str]()
    for knob, name in code_names(target).items():
        (file, _, function), (its, _, other) = name.rpartition(":"), known.get(knob, "").rpartition(":")
        with contextlib.suppress(OSError):  # one of them is not there
            if file.endswith(".py") and function == other and os.path.samefile(file, os.path.join(folder, its)):
                names[knob] = known[knob]
    return target.replace(**names)


def changes_for_another(old: Run | str | os.PathLike[str], target: Any) -> set[str] | None:
    """The knobs in which a spec differs from that of a run with whose checkpoint another run is to begin; None = none is to.

    Another run begins where some differ, and all of these may; and where the directory of the run was moved, in which it cannot go on.
    """
    if not isinstance(old, Run | str | os.PathLike) or not isinstance(target, RunSpec):
        return None  # `resumable` refuses it
    run = Run.load(old.path if isinstance(old, Run) else old)
    if not isinstance(run.spec, RunSpec):
        return None
    changes = set(run.spec.changes(target))
    return changes if changes <= set(OF_ANOTHER_RUN) and (changes or was_moved(run)) else None


def take_checkpoints(run: Run, new: NewRun, step: int | None = None) -> None:
    """Give a new run the checkpoints of another, or the one after so many steps, as links or copies."""
    folder = new.path / run_directory.CHECKPOINTS
    folder.mkdir()
    try:
        for path in (run.path / run_directory.CHECKPOINTS).glob("step*.pt" if step is None else f"step{step:08d}*.pt"):
            try:
                os.link(path, folder / path.name, follow_symlinks=False)
            except OSError:  # another disk
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        shutil.rmtree(new.path, ignore_errors=True)
        raise LaunchError(f"the checkpoints of {run!r} could not be copied: {error}. The run is as it had ended") from error


def begin_with_dcp(folder: Path, new: NewRun, spec: Any) -> None:
    """Give a new run the weights, and the optimizer's states, of a directory of torch.distributed.checkpoint.

    Raises:
        LaunchError: it cannot be used, or the run would not read it. There is no new run then.
    """
    try:
        if not isinstance(spec, RunSpec):
            raise LaunchError(f"resume={str(folder)!r}: a script reads its checkpoints itself; only a RunSpec can begin with one")
        if not spec.checkpoint_every:
            raise LaunchError(f"resume={str(folder)!r}: a run without checkpoints reads none; add checkpoint_every=, such as 100")
        late.load("begin_with_dcp")(folder, new.path, spec)
    except BaseException as error:
        shutil.rmtree(new.path, ignore_errors=True)
        if isinstance(error, ValueError | OSError) and not isinstance(error, LaunchError):
            raise LaunchError(f"resume={str(folder)!r}: {error}. Nothing was launched") from error
        raise


def go_on(ended: Ended, timeout: float | None = None) -> Run:
    """Start another attempt of a run, from its last checkpoint; it is stopped after `timeout` seconds.

    Raises:
        LaunchError: another process resumed it meanwhile, or the disk is full. The run stays as it was.
    """
    run = ended.run
    lock = _lock(run.path)
    try:
        now = run_directory.read_json(run.path / run_directory.RUN_JSON)
        if now != ended.info:
            state = (now.get("outcome") or {"state": "lost"})["state"]
            raise LaunchError(f"{run!r} was meanwhile resumed by another process, and is {state} now: look at it anew")
        _Attempt(run).start_again(ended, timeout, lock)
    finally:
        os.close(lock)
    return Run.load(run.path)


def _lock(path: Path) -> int:
    """The lock of a run that has ended. Its guard may still be about to exit, and testing the lock holds it for a moment."""
    limit = time.monotonic() + PATIENCE
    while True:
        try:
            return open_lock(path, wait=False)
        except LaunchError:
            if time.monotonic() >= limit:
                raise
        except OSError as error:
            raise LaunchError(f"{path} cannot be written to, and a run goes on in its own directory: {error}") from error
        time.sleep(0.02)


def _checked_spec(run: Run, info: dict[str, Any], target: Any, anew: bool) -> RunSpec:
    """The spec of a run, if it is one of a kind that goes on here."""
    spec, path = run.spec, run.path
    if info.get("batch"):
        raise LaunchError(f"{run!r} is a job of Slurm: with Slurm(requeue=True) it goes on by itself, and scontrol requeue tells it to")
    if info.get("alone") or info.get("experiment") or info["launch_dir"] != ".":
        raise LaunchError(f"{path} was not launched as a run of its own: only such a run goes on. Launch its spec anew")
    if was_moved(run) and not anew:
        raise LaunchError(
            f"{path} is a directory that was moved or copied: a run goes on in its first place only. From here, another run can begin with "
            "its last checkpoint: wb.launch(run.spec, resume=run)"
        )
    if not isinstance(spec, RunSpec):
        raise LaunchError(f"{run!r} is a script, whose checkpoints are its own: launch it again with the option by which it reads them")
    if target is not None and target != spec and not anew:
        raise LaunchError(
            f"{run!r} goes on as it was launched, {_difference(spec, target)}: leave the spec out, or launch it as a new run, which can "
            "begin with the weights: wb.export_weights(run, folder), and wb.import_weights(Net(), folder) in the task"
        )
    if spec.nnodes > 1 and not anew:
        raise LaunchError(
            f"{run!r} is of {spec.nnodes} machines: only a run of one goes on here; on Slurm, with Slurm(requeue=True). {WITH_WHAT_IS_LEFT}"
        )
    return spec


def was_moved(run: Run) -> bool:
    """Is the directory of a run not the one in which its command trains, by whatever name? Nobody knows then where its code is."""
    command: Any = run_directory.read_json(run.path / run_directory.RUN_JSON).get("command")
    try:
        known = isinstance(command, list) and os.path.isabs(command[-1]) and Path(command[-1]).parts[1:2] != ("proc",)
        return not (known and os.path.samefile(command[-1], run.path))
    except (OSError, IndexError, TypeError):
        return True


def refuse_foreign(run: Run) -> None:
    """Refuse a run directory of another user: to take part in the run executes the task or script that it names, as oneself.

    Raises:
        LaunchError: it belongs to another user.
    """
    code = " and ".join(code_names(run.spec).values()) if isinstance(run.spec, RunSpec) else run.spec.script
    probe = run_directory.part_of(run.path / run_directory.RUN_JSON)
    try:
        probe.touch(exist_ok=False)
        ours = probe.stat().st_uid  # on some shared file systems not our own number
        probe.unlink()
    except OSError:  # it cannot be written to, and may be read
        ours = os.geteuid()
    for path in (run.path, run.path / run_directory.RUN_JSON):
        if path.stat().st_uid != ours:
            raise LaunchError(
                f"{path} belongs to {_user(path)}: this would execute what the run names, {code}, as you. "
                "Check run.spec, and launch it as a run of your own: wb.launch(run.spec)"
            )


def refuse_code_of_others(run: Run) -> None:
    """Refuse a run to repeat it, or to ask its task, where its code is somebody else's: another user's, or brought by its directory.

    Raises:
        LaunchError: it is.
    """
    refuse_foreign(run)
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    files = code_files(run.spec) if isinstance(run.spec, RunSpec) else [run.spec.script]
    folder, command = info.get("cwd"), info.get("command")
    named = [folder, *(os.path.join(folder or "", file) for file in files), command[0] if isinstance(command, list) and command else None]
    _refuse_code_inside(run, *(Path(path) for path in named if isinstance(path, str) and path))


def _refuse_code_inside(run: Run, *paths: Path) -> None:
    """Refuse code, folders of code and interpreters that lie in the directory of a run, or are a link there or to there."""
    for code in paths:
        absolute = Path(os.path.abspath(code))  # a link to Python has its packages beside itself
        if absolute.is_relative_to(run.path) or code.resolve().is_relative_to(run.path.resolve()):
            raise LaunchError(
                f"{run!r} would run code from {code}, inside its own run directory, where a launch never puts code. "
                "Check it; if it is yours, move it elsewhere and launch it: wb.launch(run.spec)"
            )


def refuse_links(run: Run) -> None:
    """Refuse a run directory with symbolic links, right in it or anywhere in the folders that a launch makes in it.

    A run that goes on would write, and delete old checkpoints, where they lead, and read what lies there as its own. What a task has
    written beside these folders may have links inside.

    Raises:
        LaunchError: it has one.
    """
    waiting = [run.path]
    while waiting:
        with os.scandir(folder := waiting.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    raise LaunchError(
                        f"{entry.path} is a symbolic link to {os.readlink(entry.path)}: a run that goes on would write there, or read what "
                        "lies there, and a launch makes no links. If it is yours, put what it leads to there; checkpoints on another disk: "
                        "wb.launch(spec, runs_dir=…)"
                    )
                if entry.is_dir() and (folder != run.path or entry.name in _FOLDERS):
                    waiting.append(Path(entry.path))


def _user(path: Path) -> str:
    try:
        return f"the user {path.owner()}"
    except (KeyError, OSError):
        return f"another user (number {path.stat().st_uid})"


def _difference(spec: RunSpec, target: Any) -> str:
    if not isinstance(target, RunSpec):
        return f"and {target!r:.60} is not its spec"
    changes = spec.changes(target)
    name = next((name for name in changes if name not in OF_ANOTHER_RUN), next(iter(changes)))  # the others may change
    here, there = changes[name]
    return f"with {name}={here!r} and not {there!r}"


def _refuse_as_it_stands(run: Run, spec: RunSpec, host: str, other: RunSpec | None) -> None:
    """Say why a run cannot go on now, or `other` not from its checkpoint; `host` is where its last attempt was."""
    state, lock = run.state, run.path / run_directory.LOCK
    if state in ACTIVE:
        raise LaunchError(f"{run!r} is still running: it goes on anyway. To begin again from its last checkpoint, run.stop() first")
    checkpoints = checkpoints_of(run.path)
    if state == "finished" and (other is None or other.steps == spec.steps) and checkpoints:
        raise LaunchError(
            f"{run!r} has finished: there is nothing left to go on with. For more steps, launch another run that begins with its last "
            f"checkpoint: wb.launch(run.spec.replace(steps={2 * spec.steps}), resume=run)"
        )
    if state == "lost" and host != platform.node() and lock.exists():
        raise LaunchError(
            f"{run!r} was launched on {host}, and this is {platform.node()}: from here nobody can see whether it still runs there. "
            f"Resume it there; or, where that machine is gone, delete {lock} and try again"
        )
    if state == "lost":
        _wait_for_ranks(run)
        checkpoints = checkpoints_of(run.path)
    if not checkpoints:
        if not spec.checkpoint_every:
            raise LaunchError(f"{run!r} keeps no checkpoints, so it cannot go on. Launch it anew: wb.launch(run.spec, checkpoint_every=…)")
        if failed := [
            note.partition(". The training")[0] for note in run.notes if re.match(r"the checkpoint .* could not be written", note)
        ]:
            raise LaunchError(f"{run!r} has no checkpoint to go on from: {failed[-1]}. Launch it anew: wb.launch(run.spec)")
        begun = (run.path / run_directory.CHECKPOINTS).exists() and any((run.path / run_directory.CHECKPOINTS).iterdir())
        when = "while its first one was written" if begun else "before its first one was written"
        raise LaunchError(
            f"{run!r} has no checkpoint to go on from: it ended {when} (every {spec.checkpoint_every} steps, and it had taken "
            f"{run.progress[0]}). Launch it anew: wb.launch(run.spec), or with a smaller checkpoint_every="
        )
    if not any(zipfile.is_zipfile(path) for path in checkpoints):  # as torch writes them; the ranks will see whether all is well inside
        names = ", ".join(sorted(path.name for path in checkpoints))
        raise LaunchError(
            f"{run!r} has no whole checkpoint to go on from: {names} in {checkpoints[0].parent} cannot be read. "
            "Put a sound one there, or launch it anew: wb.launch(run.spec)"
        )
    if other and other.steps != spec.steps and other.steps <= (last := step_of(checkpoints[-1])):
        raise LaunchError(f"steps={other.steps} with resume=…: the last checkpoint of {run!r} is of step {last}; give more steps")


def _wait_for_ranks(run: Run) -> None:
    """Wait for the ranks of a run whose guard and keeper were killed: they get SIGTERM from torchrun then, and write a checkpoint."""
    limit = time.monotonic() + PATIENCE
    while ranks := ranks_of(run.id):
        if time.monotonic() >= limit:
            left = " ".join(str(pid) for pids in ranks.values() for pid in pids)
            raise LaunchError(
                f"ranks of {run!r} still run, though its guard was killed: end them first (kill {left}), or wait for their end"
            )
        time.sleep(0.02)


class _Attempt(NewRun):
    """Starts in the directory of an earlier run, and deletes nothing of it."""

    def __init__(self, run: Run) -> None:
        self.path, self.id, self.name, self.created = run.path, run.id, run.name, run.created

    def start_again(self, ended: Ended, timeout: float | None, lock: int) -> None:
        """Start a guard in it; where that fails, leave everything as it was."""
        wait_for_reaped(self.id)
        info, environ = self._anew(ended, timeout)
        number, reserved = attempts(self.path), (self.path / run_directory.RESERVE).exists()
        try:
            archive_attempt(self.path, number)
            (self.path / run_directory.RESERVE).unlink(missing_ok=True)
            (self.path / run_directory.RESERVE).write_bytes(os.urandom(run_directory.RESERVE_BYTES))
            run_directory.write_json(self.path / run_directory.RUN_JSON, info)
            self._start_guard(info, environ, lock)
        except BaseException as error:
            end_guard(self.id)
            if not reserved:
                run_directory.free_reserve(self.path)
            restore_attempt(self.path, number)
            if run_directory.read_json(self.path / run_directory.RUN_JSON) != ended.info:
                run_directory.write_json(self.path / run_directory.RUN_JSON, ended.info)
            if isinstance(error, OSError):
                raise LaunchError(f"{self.path} could not go on: {error}. The run is as it had ended") from error
            raise

    def _anew(self, ended: Ended, timeout: float | None) -> tuple[dict[str, Any], dict[str, str]]:
        """run.json's content for another attempt, and the environment of the ranks."""
        git = environment.GitQuery(ended.folder)
        more = loopback_environ() | environment.asked_of_launch(ended.info["spec"], ended.info)
        environ, added, removed = environment.for_ranks(self.path, self.id, ended.spec.threads, more)
        # not as it was launched: an older workbench may have had its programs, and Python itself, elsewhere
        program = spec_entrypoint(ended.spec, self.path)
        command = environment.torchrun(
            ended.spec.nproc_per_node, self.path / run_directory.LOGS, program, self.id, shutdown=environment.shutdown_s(ended.info["spec"])
        )
        info = ended.info | {
            "command": command,
            "cwd": str(ended.folder),
            "host": platform.node(),
            "cores": environment.core_count(),
            "gpus": environment.gpu_count(),
            "timeout": timeout,
            "environment": {"set": added, "removed": removed},
            "versions": environment.versions(),
            "git": git.answer(GIT_PATIENCE),
            "begun": time.time(),
            "seconds_before": 0.0 if math.isnan(ended.seconds) else ended.seconds,
            "outcome": None,
        }
        info.pop("layout", None)  # that of a restart with fewer ranks: all are here again
        return info, environ
