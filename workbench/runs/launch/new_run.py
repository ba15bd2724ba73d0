"""Makes and fills a run directory, and starts the guard in it; where that fails, nothing of it stays."""

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.variables import kept_variables
from workbench.runs import entrypoints
from workbench.runs.guards import guards
from workbench.runs.launch import environment
from workbench.runs.launch.rendezvous import BACKEND, HERE, Rendezvous, loopback_environ
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec, Spec

GRACE = 2
"""Seconds longer than torchrun waits for its ranks after SIGTERM, until the guard kills what is left."""
GIT_PATIENCE = 0.02
"""Seconds to wait for git once everything else is ready: a large repository is not worth a slow launch."""
TIMED = ("diagnose", "prove")
"""Experiments that compare times, and so get `environment.steady_malloc`."""


class LaunchError(ValueError):
    """Nothing was started: the run is not possible here, or its directory cannot be written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where a run starts, in place of where this process is: its folder, environment variables and Python."""

    folder: Path | None = None
    """Where its processes start; None = the current folder."""
    variables: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Environment variables that differ from those of this process; None = not set."""
    python: str | None = None
    """The interpreter of its ranks; None = this one."""

    def environ(self) -> dict[str, str]:
        """The variables of this process with those that differ."""
        return {name: value for name, value in {**os.environ, **self.variables}.items() if value is not None}


HERE_AND_NOW = Surroundings()


class NewRun:
    """A new, empty run directory, which becomes a run or is deleted again."""

    def __init__(self, runs_dir: str | os.PathLike[str] | None, name: str, around: Surroundings = HERE_AND_NOW) -> None:
        self._around = around
        self.id, self.name, self.created = uuid.uuid4().hex, name, time.time()
        word = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip(".") or "run"
        base = f"{time.strftime('%Y-%m-%dT%H-%M-%S', time.localtime(self.created))}-{word}"
        runs = Path(runs_dir or "runs").expanduser().absolute()
        try:
            runs.mkdir(parents=True, exist_ok=True)
            self.path = _make_unique(runs, base)
        except OSError as error:
            raise LaunchError(f"no run directory can be made in {runs}: {error.strerror}. Try runs_dir= with a folder of yours") from error

    def start(
        self,
        spec: Spec,
        program: list[str],
        timeout: float | None = None,
        children: Sequence[tuple[str, RunSpec]] = (),
        experiment: Mapping[str, Any] | None = None,
        rendezvous: Rendezvous | None = None,
        submit: Callable[[Path, str], None] | None = None,
        batch: Mapping[str, Any] | None = None,
        on_hang: str = "report",
        elastic: Mapping[str, Any] | None = None,
        alarm: str = "",
    ) -> Run:
        """Fill the directory and start the guard in it; `children` (name, spec) get run directories of their own, `000`, `001`, …

        Args:
            program: what torchrun starts.
            timeout: seconds after which it is stopped.
            experiment: the order of an experiment; None = it trains.
            rendezvous: where the machines of the run meet; None = there is only this one.
            submit: gives the filled directory (and the run's id) to a batch system, in the place of starting a guard here.
            batch: what the run directory keeps of that batch system.
            on_hang: one of `entrypoints.ON_HANG`.
            elastic: `max_restarts` and `min_ranks` of a run that may be restarted.
            alarm: one of `run_directory.ALARMS`; "" = its ranks raise none.

        Raises:
            LaunchError: the disk is full, the batch system refuses, or the guard cannot be started. The directory is gone again.
        """
        try:
            if submit:
                self._write(spec, program, timeout, children, experiment, batch=batch, on_hang=on_hang)
                submit(self.path, self.id)
                return Run.load(self.path)
            lock = open_lock(self.path)
            try:
                info, environ = self._write(
                    spec, program, timeout, children, experiment, rendezvous, on_hang=on_hang, elastic=elastic, alarm=alarm
                )
                self._start_guard(info, environ, lock)
            finally:
                os.close(lock)
        except BaseException as error:
            end_guard(self.id)
            shutil.rmtree(self.path, ignore_errors=True)
            if isinstance(error, OSError):
                reason = f"{self.path.parent} is full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else str(error)
                raise LaunchError(f"the run could not be started: {reason}. Make room, or try runs_dir= on another disk") from error
            raise
        return Run.load(self.path)

    def _write(
        self,
        spec: Spec,
        program: list[str],
        timeout: float | None,
        children: Sequence[tuple[str, RunSpec]],
        experiment: Mapping[str, Any] | None,
        rendezvous: Rendezvous | None = None,
        batch: Mapping[str, Any] | None = None,
        on_hang: str = "report",
        elastic: Mapping[str, Any] | None = None,
        alarm: str = "",
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Write what the run starts from; returns run.json's content and the environment of the ranks."""
        (self.path / run_directory.RESERVE).write_bytes(
            os.urandom(run_directory.RESERVE_BYTES)
        )  # bytes that no file system compresses away
        for sub in (run_directory.ERRORS, run_directory.LOGS):
            (self.path / sub).mkdir()
        around, folder = self._around, self._around.folder or Path.cwd()
        git = environment.GitQuery(Path(spec.script).parent if isinstance(spec, ScriptSpec) else folder)
        more = {} if batch else rendezvous.environ() if rendezvous else loopback_environ()
        if experiment is not None and experiment["kind"] in TIMED:
            more |= environment.steady_malloc()
        more |= {run_directory.ENV_ALARM: alarm} if alarm else {}
        every = [spec.to_json(), *(child.to_json() for _, child in children), (experiment or {}).get("changed") or {}]
        if any(each.get("deterministic") for each in every):
            more |= environment.DETERMINISTIC
        inherited = around.environ()
        environ, added, removed = environment.for_ranks(self.path, self.id, spec.threads, more, inherited)
        meeting = rendezvous.flags(0) if rendezvous else HERE
        if batch:  # the endpoint is chosen when the job begins
            meeting = ["--nnodes", str(spec.nnodes), "--rdzv-backend", BACKEND]
        info = {
            "format": run_directory.FORMAT,
            "id": self.id,
            "name": self.name,
            "created": self.created,
            "host": platform.node(),
            "cores": environment.core_count(),
            "gpus": environment.gpu_count(),
            "spec": spec.to_json(),
            "launch_dir": ".",
            "command": environment.torchrun(
                spec.nproc_per_node,
                self.path / run_directory.LOGS,
                program,
                self.id,
                meeting,
                shutdown=environment.shutdown_s(spec.to_json()),
                python=around.python or sys.executable,
            ),
            "timeout": timeout,
            "on_hang": on_hang,
            "cwd": str(folder),
            "environment": {"set": added, "removed": removed},
            "variables": kept_variables(inherited, environment.source_of(spec, folder)),
            "machine": environment.machine_state(),
            "versions": environment.versions(),
            "git": git.answer(GIT_PATIENCE),
            "outcome": None,
        }
        if elastic:
            info["elastic"] = dict(elastic)
        if experiment is not None:
            info["experiment"] = dict(experiment)
        if rendezvous or batch:  # what other machines start from
            info |= {"path": str(self.path), "program": program, "batch": batch and dict(batch)}
            info["rendezvous"] = rendezvous and dataclasses.asdict(rendezvous)
        run_directory.write_json(self.path / run_directory.RUN_JSON, info)
        for index, (name, child) in enumerate(children):
            folder = child_dir(self.path, index)
            folder.mkdir()
            own = {"id": uuid.uuid4().hex, "name": name, "spec": child.to_json(), "launch_dir": ".."}
            run_directory.write_json(folder / run_directory.RUN_JSON, info | own)
        return info, environ

    def _start_guard(self, info: dict[str, Any], environ: dict[str, str], lock: int) -> None:
        config = {
            "run_dir": str(self.path),
            "id": self.id,
            "command": info["command"],
            "nproc": info["spec"]["nproc_per_node"],
            "grace": GRACE + environment.shutdown_s(info["spec"]),
            "timeout": info["timeout"],
            "lock": lock,
            "launcher": os.getpid(),
            "watchdog": entrypoints.watchdog(self.path, info.get("on_hang", "report")),
            "restart": entrypoints.restart(self.path, 0 if info.get("rendezvous") else None) if info.get("elastic") else None,
            "node": Rendezvous(**info["rendezvous"]).node(self.path, 0) if info.get("rendezvous") else None,
        }
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # inherited: no stop before the guard listens
        try:
            with open(self.path / run_directory.LAUNCHER_LOG, "ab") as log:  # a restart cuts it
                guard = guards[self.id] = subprocess.Popen(
                    [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), json.dumps(config)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environ,
                    cwd=info["cwd"],
                    pass_fds=(lock,),
                    start_new_session=True,  # jupyter_client signals the kernel's whole process group
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        threading.Thread(target=_reap, args=(self.id, guard), name=f"reap {self.name}", daemon=True).start()
        os.pwrite(lock, str(guard.pid).encode(), 0)


def open_lock(folder: Path, *, wait: bool = True) -> int:
    """The lock that says "alive", taken: a file descriptor. It belongs to the open file, so the guard, which inherits it, holds it on.

    Raises:
        LaunchError: somebody has it, and `wait` is off.
    """
    lock = os.open(folder / run_directory.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise LaunchError(f"{folder} is that of a run that is still running") from None
    try:
        os.pwrite(lock, b" " * 20, 0)  # room for the guard's pid, even if the disk is full by then
    except OSError:
        os.close(lock)
        raise
    return lock


def child_dir(launch_dir: Path, index: int) -> Path:
    """Run directory of one configuration of a shared launch."""
    return launch_dir / f"{index:03d}"


def _make_unique(runs: Path, base: str) -> Path:
    for number in itertools.count(1):
        path = runs / (base if number == 1 else f"{base}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)  # what a run prints and learns is its user's
            break
    return path


def wait_for_reaped(run_id: str) -> None:
    """Wait until a guard that has ended is reaped, before the next one of the same run takes its place."""
    while run_id in guards:
        time.sleep(0.01)


def end_guard(run_id: str) -> None:
    """End the guard of a launch that failed after it was started, and wait until it is gone; does nothing where there is none."""
    if guard := guards.get(run_id):
        guard.terminate()
        _reap(run_id, guard)


def _reap(run_id: str, guard: "subprocess.Popen[bytes]") -> None:
    """Wait for a guard, so that it leaves no zombie, and close our end of its pipe."""
    guard.wait()
    assert guard.stdin
    guard.stdin.close()
    if guards.get(run_id) is guard:  # else it was reaped before, and its run may have another one
        del guards[run_id]
