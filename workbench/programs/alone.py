"""Trains a spec that was not launched, in a pod of Kubernetes: `torchrun … -m workbench.programs.alone TASK RUNS [KNOB=VALUE…]`.

Rank 0 makes the run directory in RUNS, named after torchrun's run id; the others find it there, or make one of their own where the folder
is not shared. There is no guard: the cluster ends what is left, and rank 0 holds the lock that says "alive" and writes how it ended.
"""

import contextlib
import fcntl
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.checks import number_in_environment
from workbench.programs import train as program
from workbench.runs.spec import RunSpec, SpecError, parse_knob
from workbench.runs.task import label

_LONGEST_ID = 128
"""Letters of torchrun's run id, which becomes a part of a folder's name."""

_PREEMPTED = 128 + 15
"""Exit status of a training that a signal ended, as that of a process that SIGTERM ended: its pod is to start again."""


def main(words: list[str] | None = None) -> None:
    """Make the run directory, and train in it.

    Raises:
        SpecError: the directory is that of another run, or of one that cannot go on; or torchrun's run id makes no name.
    """
    task, runs, *knobs = sys.argv[1:] if words is None else words
    ranks, local = number_in_environment("WORLD_SIZE", 1, least=1), number_in_environment("LOCAL_WORLD_SIZE", 1, least=1)
    spec = RunSpec(task=task, nproc_per_node=local, nnodes=ranks // local).replace(**dict(map(parse_knob, knobs)))
    rank, number = number_in_environment("RANK", 0), (os.environ.get("TORCHELASTIC_RUN_ID") or "alone").replace("/", "-")
    if not (number.isprintable() and len(number) <= _LONGEST_ID):
        allowed = f"up to {_LONGEST_ID} letters, digits and signs are allowed"
        raise SpecError(f"torchrun's run id is {number!r:.80}: {allowed}. Try another --rdzv-id")
    path = Path(runs) / f"{label(task)}-{number}"
    info = {
        "format": run_directory.FORMAT,
        "id": number,
        "name": label(task),
        "created": time.time(),
        "host": platform.node(),
        "spec": spec.to_json(),
        "launch_dir": ".",
        "timeout": None,
        "outcome": None,
        "alone": True,
    }
    _check(path, spec)
    (path / run_directory.ERRORS).mkdir(parents=True, exist_ok=True)
    os.environ[run_directory.ENV_RUN_DIR] = str(path.absolute())
    if rank:
        _write_unless_there(path / run_directory.RUN_JSON, info, rank)
        if program.main([str(path)]):
            raise SystemExit(_PREEMPTED)
        return
    lock = _lock(path)
    for old in (path / run_directory.ERRORS).glob("rank*.json"):  # of an earlier attempt
        old.unlink(missing_ok=True)
    run_directory.write_json(path / run_directory.RUN_JSON, info)
    before = signal.signal(signal.SIGTERM, lambda *_: _on_sigterm(path))
    try:
        preempted = program.main([str(path)])
    except BaseException as error:
        clean = isinstance(error, SystemExit) and not error.code
        _end(path, "finished" if clean else "failed")
        raise
    else:
        _end(path, "stopped" if preempted else "finished")
        if preempted:
            raise SystemExit(_PREEMPTED)
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(lock)


def _check(path: Path, spec: RunSpec) -> None:
    """Refuse the directory of another run: this one would read its checkpoints, and train nothing."""
    if not (path / run_directory.RUN_JSON).exists():
        return
    there = run_directory.read_json(path / run_directory.RUN_JSON)
    outcome = there.get("outcome") or {}
    if outcome.get("state") == "finished":
        why = "is that of a run that has finished"
    elif there["spec"] != json.loads(json.dumps(spec.to_json())):
        why = "is that of a run with another spec"
    elif not spec.checkpoint_every and (outcome or (path / run_directory.METRICS).exists()):
        why = "is that of a run that wrote no checkpoints to go on from"
    else:
        return
    raise SpecError(f"{path} {why}: give torchrun another --rdzv-id (a new manifest has one of its own), or move the directory away")


def _lock(path: Path) -> int:
    """Hold the lock that says "alive", for as long as this process lives."""
    lock = os.open(path / run_directory.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SpecError(f"{path} is that of a run that is still running: give torchrun another --rdzv-id") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)  # whom `run.stop()` asks, inside this pod
    return lock


def _write_unless_there(path: Path, info: dict[str, Any], rank: int) -> None:
    """Write run.json for a rank other than 0; where the folder is shared, the file of rank 0 stays."""
    if path.exists():
        return
    mine = path.with_name(f"{path.name}.{platform.node()}-{rank}")
    run_directory.write_json(mine, info)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
    except OSError:  # a file system without links
        if not path.exists():
            run_directory.write_json(path, info)
    finally:
        mine.unlink(missing_ok=True)


def _on_sigterm(path: Path) -> None:
    """SIGTERM: the pod is deleted, or torchrun ends this rank because another one has failed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end(path, "failed", why="ended by SIGTERM: its pod was deleted, or another rank was killed")
    os.kill(os.getpid(), signal.SIGTERM)


def _end(path: Path, state: str, why: str | None = None) -> None:
    """Write how the run has ended; `why` counts where no rank has recorded an error."""
    # a full disk, or a directory that is gone, must not cover the error itself
    with contextlib.suppress(OSError, run_directory.DamagedRunError):
        info = run_directory.read_json(path / run_directory.RUN_JSON)
        outcome: dict[str, Any] = {"state": state, "returncode": int(state != "finished"), "seconds": time.time() - info["created"]}
        if why and not any((path / run_directory.ERRORS).glob("rank*.json")):
            outcome["error"] = {"rank": None, "kind": "launcher", "message": why, "traceback": None, "hint": None}
        run_directory.write_json(path / run_directory.RUN_JSON, info | {"outcome": outcome})


if __name__ == "__main__":
    main()
