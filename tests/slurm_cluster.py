"""A real Slurm of two virtual nodes on this machine, in a folder of its own: munged, slurmctld and two slurmd, on free ports, all ended."""

import contextlib
import getpass
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.conftest import processes_with

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "scontrol", "sinfo")
NODES, IDLE = ("n1", "n2"), ["idle", "idle"]
PATIENCE = 120
_PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

_CONF = """
ClusterName=workbench-tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=2,default_queue_depth=100
MessageTimeout=10
SlurmdTimeout=10
KillWait=8
OverTimeLimit=0
MinJobAge=600
InactiveLimit=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


_FORBIDDEN = re.compile(r"Operation not permitted|Permission denied|Read-only file system")


class NoSlurm(Exception):
    """Slurm's daemons cannot run here."""

    def __init__(self, why: str, forbidden: bool = False) -> None:
        super().__init__(why)
        self.forbidden = forbidden
        """Has one ended because it lacks a right, as in a container?"""


def missing() -> list[str]:
    """Programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PLACES) is None]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found


class SlurmCluster:
    """Two nodes, n1 and n2."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.conf.write_text(_CONF.format(host=platform.node(), user=getpass.getuser(), folder=folder, ports=free_ports(3)))
        self.environ = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": _PLACES}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle.

        Raises:
            NoSlurm: one of them cannot run here; with its own words.
        """
        names = {name: str(self.folder / f"munge.{name}") for name in ("sock", "pid", "log", "seed", "key")}
        munged = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={names['sock']}",
            f"--key-file={names['key']}",
            f"--pid-file={names['pid']}",
        ]
        self._start("munged", [*munged, f"--log-file={names['log']}", f"--seed-file={names['seed']}"])
        self._until(lambda: Path(names["sock"]).exists(), "munged")
        self._start("slurmctld", ["slurmctld", "-D"])
        self._until(lambda: "UP" in self.ask("scontrol", "ping"), "slurmctld")
        self.make_whole()

    def make_whole(self) -> None:
        """Cancel what runs, start the nodes that have died, and wait until both are idle.

        Raises:
            NoSlurm: a node does not come up; with its own words.
        """
        dead = [node for node in NODES if node not in self._daemons]
        if self.ask("squeue", "-h").strip():
            self.ask("scancel", "--user", getpass.getuser())
        for node in dead:
            self._start(node, ["slurmd", "-D", "-N", node])
        self._until(lambda: self._states() == IDLE, "the nodes")

    def _states(self) -> list[str]:
        return self.ask("sinfo", "-h", "-N", "-o", "%t").split()

    def ask(self, *command: str) -> str:
        """What one of Slurm's programs prints."""
        found = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False, timeout=PATIENCE)
        return found.stdout

    def kill_node(self, node: str) -> list[int]:
        """A node dies: its slurmd, who minds its job steps, and all that runs there get SIGKILL. Returns whom it met."""
        running = processes_with("SLURMD_NODENAME", node)
        victims = [self._daemons[node].pid, *filter(None, map(_minder, running)), *running]
        for pid in dict.fromkeys(victims):
            self._kill(pid)
        self._daemons.pop(node).wait()
        return victims

    def stop(self) -> None:
        """End the daemons and all that they have started."""
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for _ in range(200):
            left = processes_with("SLURM_CONF", str(self.conf))
            for pid in left:
                self._kill(pid)
            if not left:
                break
            time.sleep(0.05)

    def _start(self, name: str, command: list[str]) -> None:
        program = shutil.which(command[0], path=_PLACES)
        assert program
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                [program, *command[1:]],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _until(self, condition: object, what: str) -> None:
        assert callable(condition)
        limit = time.monotonic() + PATIENCE
        while not condition():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > limit:
                said = self._words()
                raise NoSlurm(f"{', '.join(dead) or what} did not come up: {said}", bool(dead and _FORBIDDEN.search(said)))
            time.sleep(0.1)

    def _words(self) -> str:
        """The last words of each daemon."""
        said = []
        for path in sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")]):
            lines = path.read_text(errors="replace").splitlines()
            said += [f"{path.stem}: {line}" for line in lines[-3:]]
        return " | ".join(said)

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _minder(pid: int) -> int | None:
    """The slurmstepd whose child a process is; None = its parent is another one."""
    with contextlib.suppress(OSError, IndexError):
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
            return int(parent)
    return None
