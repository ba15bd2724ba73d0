"""Runs one machine's part of a run on several machines: a guard and torchrun, in the run directory that all machines see.

workbench join RUN_DIR                                  by hand, on each further machine
python -m workbench.runs.launch.nodes begin RUN_DIR     when a job of Slurm begins: prints where its machines meet
python -m workbench.runs.launch.nodes step RUN_DIR      on each machine of the job
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.checks import number_in_environment
from workbench.runs import entrypoints
from workbench.runs.launch import environment
from workbench.runs.launch.new_run import GRACE, LaunchError, open_lock
from workbench.runs.launch.rendezvous import Rendezvous, free_endpoint
from workbench.runs.launch.resume import archive_attempt, attempts, refuse_foreign, refuse_links
from workbench.runs.run import Run
from workbench.runs.spec import Spec, spec_from_json

ENV_ENDPOINT = "WORKBENCH_RUN_RDZV"
_NUMBER = "SLURM_PROCID"
_LOOK = 3.0
"""Seconds between two looks for a restart."""
_GUARD = str(Path(__file__).with_name("guard.py"))


def join(run_dir: str | os.PathLike[str]) -> int:
    """Run this machine's part of a run, until it has ended; returns the exit status. An interrupt ends the whole run.

    Raises:
        LaunchError: the run is of one machine, has ended, has all of its machines, or belongs to another user.
        DamagedRunError: it is no run directory.
    """
    path = Path(run_dir).expanduser().absolute()
    run = Run.load(path)
    info = run_directory.read_json(path / run_directory.RUN_JSON)
    if not info.get("rendezvous"):
        raise LaunchError(f"{run!r} is a run of one machine: launch it with nnodes=2 or more, so that others can join")
    if info["outcome"]:
        raise LaunchError(f"{run!r} has ended ({run.state}): nobody can join it any more")
    if any((path / run_directory.NODES).glob("attempt*.json")):
        raise LaunchError(f"{run!r} has restarted, and nobody can join it any more")
    refuse_foreign(run)
    refuse_links(run)
    rendezvous = Rendezvous(**info["rendezvous"])
    rank = _take_place(path, rendezvous.nnodes)
    lock = open_lock(path / run_directory.NODES / str(rank))
    config, environ = _prepared(path, info, rendezvous, rank)
    log_file = path / run_directory.NODES / str(rank) / run_directory.LAUNCHER_LOG
    with open(log_file, "ab") as log:  # a restart cuts it
        guard = subprocess.Popen(
            [sys.executable, "-I", _GUARD, json.dumps(config | {"lock": lock, "launcher": os.getpid()})],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environ,
            pass_fds=(lock,),
            start_new_session=True,
        )
    os.close(lock)
    print(f"machine {rank} of {rendezvous.nnodes} of {run.name}: meeting at {rendezvous.endpoint}", flush=True)
    with open(log_file, encoding="utf-8", errors="replace") as log_lines:  # the folder is moved when the run goes on without this machine
        try:
            _wait(guard, run)
        except KeyboardInterrupt:
            guard.send_signal(signal.SIGTERM)
            guard.wait()
        outcome = None
        with contextlib.suppress(run_directory.DamagedRunError):
            outcome = run_directory.read_json(path / run_directory.NODES / str(rank) / run_directory.NODE_JSON)["outcome"]
        state = outcome["state"] if outcome else "lost"
        print(f"machine {rank}: {state}", flush=True)
        if state != "finished":
            print("".join(log_lines.readlines()[-20:]), file=sys.stderr)
    return 0 if state == "finished" else 1


def _wait(guard: "subprocess.Popen[bytes]", run: Run) -> None:
    """Wait for a guard, and print each restart when its first step was taken; while the run directory cannot be read, none."""
    said = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(_LOOK)
        restarts = []
        with contextlib.suppress(OSError, run_directory.DamagedRunError):
            restarts = [restart for restart in run.restarts if restart.seconds is not None]
        for restart in restarts[said:]:
            print(restart, flush=True)
            said += 1
        if guard.returncode is not None:
            return


def _take_place(path: Path, nnodes: int) -> int:
    """The number of this machine: the first free one."""
    for rank in range(1, nnodes):
        with contextlib.suppress(FileExistsError):
            (path / run_directory.NODES / str(rank)).mkdir(parents=True)
            return rank
    raise LaunchError(f"{path} has all of its {nnodes} machines: there is nothing left to join")


def begin(path: Path) -> str:
    """Prepare the run directory of a job that begins, perhaps anew after it was requeued; returns where its machines meet.

    What its machines and ranks wrote in an earlier attempt moves to `attempts/<n>`; steps, metrics and checkpoints stay, and the job goes
    on from there.
    """
    if (path / run_directory.NODES).exists():
        archive_attempt(path)
    run_directory.write_json(path / run_directory.RUN_JSON, run_directory.read_json(path / run_directory.RUN_JSON) | {"outcome": None})
    (path / run_directory.NODES).mkdir()
    return free_endpoint()


def step(path: Path) -> None:
    """Become the guard of this machine's part of a job.

    Raises:
        LaunchError: a variable that Slurm or job.sh sets is missing, or is of another job.
        RendezvousError: the variable with the endpoint holds something else.
    """
    info = run_directory.read_json(path / run_directory.RUN_JSON)
    spec = spec_from_json(info["spec"])
    for variable in (_NUMBER, ENV_ENDPOINT):
        if not os.environ.get(variable):
            raise LaunchError(
                f"the environment variable {variable} is not set: this is started by job.sh, in a job of Slurm. Try: wb.launch"
            )
    rank = number_in_environment(_NUMBER, 0)
    if rank >= spec.nnodes:
        many = f"the environment variable {_NUMBER} is {rank}, and the run has {spec.nnodes} machines"
        raise LaunchError(f"{many}. Try: srun --ntasks-per-node=1")
    rendezvous = Rendezvous(nnodes=spec.nnodes, endpoint=os.environ[ENV_ENDPOINT], timeout=info["batch"]["rdzv_timeout"])
    name = os.environ.get("SLURMD_NODENAME")
    folder = path / run_directory.NODES / str(rank)
    config, environ = _prepared(path, info, rendezvous, rank, name)
    lock = open_lock(folder if rank else path)
    os.set_inheritable(lock, True)
    log = os.open((folder if rank else path) / run_directory.LAUNCHER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execve(sys.executable, [sys.executable, "-I", _GUARD, json.dumps(config | {"lock": lock, "launcher": None})], environ)


def _prepared(
    path: Path, info: dict[str, Any], rendezvous: Rendezvous, rank: int, name: str | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The guard's configuration, and the environment of this machine's ranks."""
    spec: Spec = spec_from_json(info["spec"])
    node = rendezvous.node(path, rank, name)
    more = rendezvous.environ() | environment.asked_of_launch(info["spec"], info)
    environ, _, _ = environment.for_ranks(path, info["id"], spec.threads, more)
    meeting = f"{info['id']}-{attempts(path)}" if info["batch"] else info["id"]
    config = {
        "run_dir": str(path),
        "id": info["id"],
        "grace": GRACE + environment.shutdown_s(info["spec"]),
        "restart": entrypoints.restart(path, rank) if info.get("elastic") else None,
    }
    return config | of_attempt(path, info, rendezvous, node, meeting), environ


def of_attempt(path: Path, info: dict[str, Any], rendezvous: Rendezvous, node: dict[str, Any], meeting: str) -> dict[str, Any]:
    """What the guard of a machine starts in an attempt."""
    spec, rank, first = spec_from_json(info["spec"]), node["rank"], node["rank"] == min(node["members"])
    program = entrypoints.spec_entrypoint(spec, path)  # never what stands in run.json; and the shared folder may be mounted elsewhere
    logs = path / run_directory.NODES / str(rank) / run_directory.LOGS if rank else path / run_directory.LOGS
    flags, shutdown = rendezvous.flags(node["members"].index(rank)), environment.shutdown_s(info["spec"])
    return {
        "command": environment.torchrun(spec.nproc_per_node, logs, program, meeting, flags, shutdown=shutdown),
        "nproc": spec.nproc_per_node,
        "timeout": info["timeout"] if first else None,
        "watchdog": entrypoints.watchdog(path, info.get("on_hang", "report")) if first else None,
        "node": node,
    }


def main() -> None:
    """Begin a job of Slurm, or run a step of it."""
    command, run_dir = sys.argv[1], Path(sys.argv[2])
    if command == "begin":
        print(begin(run_dir))
    else:
        step(run_dir)


if __name__ == "__main__":
    main()
