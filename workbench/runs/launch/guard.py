"""Guards a run: starts torchrun, ends all that it leaves behind, and writes the outcome into run.json.

A program of its own, with the standard library only, so that nothing that a launch started outlives the process that launched it:
launching process -> keeper -> guard -> torchrun -> ranks -> their loaders' workers.

torchrun puts every rank into a session of its own, so neither a signal to its process group nor its death ends them all. The guard
owns the tree instead. It is a *child subreaper*: whoever loses a parent becomes the guard's child and is found by one walk over the
process table. It stops the run when it gets SIGTERM ("stopped": `run.stop()`), or SIGUSR1, by which Slurm can announce the end; when the
launching process is gone ("abandoned": the pipe on stdin ends, or its pidfd becomes readable, at a kernel's interrupt, restart or SIGKILL);
or when its time is up ("timeout"): by SIGTERM to torchrun, which passes it on, and after the grace period by SIGKILL to every descendant.
When torchrun ends by itself, what it left behind is killed, too. After a failure a program decides whether torchrun is started again
(`programs/restart.py`, where restarts are allowed). Last, the outcome goes into run.json.

On several machines each has a guard (in a job of Slurm: in the job's step, without a launching process). They write heartbeats and
outcomes into the run directory. A guard stops its part when another has failed or fallen silent; that of the first machine writes run.json
last. Where restarts are allowed the machines that are left agree on the next attempt (`regroup.py`); one that comes back later ends.

The keeper is the guard's parent and a subreaper as well: it passes SIGTERM on, and if the guard is killed, it kills what the guard would
have. If the keeper is killed, the guard gets a signal (PDEATHSIG) and stops the run. Either way there is no outcome: the run is "lost".

Not covered: keeper and guard killed in the same instant leave a rank's own children in another session (all others get PDEATHSIG). macOS
has no subreaper, PDEATHSIG and pidfd: the run's processes are known by its id in their environment (not tested).
"""

import contextlib
import ctypes
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RUN_JSON, RESERVE, NODES, NODE_JSON, BEAT, ENV_RUN_ID = "run.json", "reserve", "nodes", "node.json", "beat", "WORKBENCH_RUN_ID"
HANG, STOP, PREEMPTED, NEXT = "hang", "stop", "preempted.json", "next.json"
"""As in `core/run_directory.py`, which cannot be imported here; a test compares them."""
LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LOOK_FOR_RANKS, START_OF_ALL = 0.1, 5.0
"""Seconds between two looks for ranks, until all are known; seconds after the first in which all start, or have ended unseen."""
END_PAUSES, END_LIMIT, FOREIGN_LIMIT = (0.02, 0.2), 30.0, 2.0
"""Seconds between two looks at what was killed, in the first second and afterwards; from SIGKILL until a process is gone (one with a GPU
when its memory is freed), and for those that may not be killed."""
HEARTBEAT = 1.0
"""Seconds between two heartbeats of a guard, where there are several machines, and between two looks for ranks without progress."""
QUIET = LEAVE = 8.0
"""Seconds of silence after which machine 0 waits no longer for another machine; in which a part may end by itself after another failed."""


def prctl(option: int, value: int) -> None:
    if LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Get SIGTERM when `parent` dies, or at once if it has died already."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def processes() -> Iterator[tuple[int, int]]:
    """(pid, pid of its parent) of every process. Zombies are left out: they hold nothing any more, and their children have a new parent.

    Not so a zombie with other threads, such as one in the driver of a GPU: files and memory are freed when the last thread ends.
    """
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended while we looked
            state, parent, *more = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if state != "Z" or int(more[15]) > 1:
                yield int(name), int(parent)


def descendants(root: int, run_id: str) -> list[int]:
    """Every live process below `root`. Where there is no /proc, every one that carries the run's id."""
    if not LINUX:
        table = subprocess.run(["ps", "-axEww", "-o", "pid=,command="], capture_output=True, text=True, check=False).stdout
        pids = [int(line.split()[0]) for line in table.splitlines() if f"{ENV_RUN_ID}={run_id}" in line]
        return [pid for pid in pids if pid not in (root, os.getppid())]
    children: dict[int, list[int]] = {}
    for pid, parent in processes():
        children.setdefault(parent, []).append(pid)
    todo, pids = [root], []
    while todo:
        below = children.get(todo.pop(), [])
        todo += below
        pids += below
    return pids


def reap(wanted: int) -> int | None:
    """Take the exit codes of all ended children, orphans included; that of `wanted` is returned if it was among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == wanted:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def end_all(wanted: int, run_id: str, beat: Callable[[], object] = int) -> int | None:
    """Kill every descendant, and wait until it is gone; the exit code of `wanted` (torchrun, or the guard) if it was reaped here."""
    code, began = None, time.monotonic()
    while True:
        left, limit = descendants(os.getpid(), run_id), FOREIGN_LIMIT
        for pid in left:
            with contextlib.suppress(OSError):  # gone already, or not ours to kill (setuid)
                os.kill(pid, signal.SIGKILL)
                limit = END_LIMIT
        ended = reap(wanted)
        code = ended if code is None else code
        spent = time.monotonic() - began
        if not left:
            return code
        if spent > limit:
            print(f"these processes still run {spent:.0f} s after SIGKILL: {', '.join(map(str, left))}", flush=True)
            return code
        beat()
        time.sleep(END_PAUSES[spent > 1])


def machine_of(config: dict[str, Any]) -> int:
    """The number of this machine in the run."""
    return int((config.get("node") or {}).get("rank", 0))


def remove_temporary(config: dict[str, Any]) -> None:
    """Delete the folder that multiprocessing had in the processes of the run; see `core/temporary.py`."""
    name = f"pymp-{config['id'][:12]}-{machine_of(config)}".replace("/", "")  # no id leads elsewhere
    shutil.rmtree(os.path.join(tempfile.gettempdir(), name), ignore_errors=True)


class Deaths:
    """When each rank ended, on the monotonic clock that the ranks' own error records use; and which rank each local rank is (`places`)."""

    def __init__(self, torchrun: int, ranks: int) -> None:
        self._torchrun, self._missing = torchrun, ranks if hasattr(os, "pidfd_open") else 0
        self._give_up = float("inf")
        self.watched: dict[int, int] = {}  # pidfd -> rank
        self._known: set[int] = set()
        self.times: dict[int, int] = {}
        self.places: dict[int, int] = {}

    @property
    def looking(self) -> bool:
        return self._missing > 0 and time.monotonic() < self._give_up

    def look(self) -> None:
        """Find ranks that have started: torchrun's own children with a RANK in their environment."""
        for pid in [pid for pid, parent in processes() if parent == self._torchrun and pid not in self._known]:
            try:
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")]
                if ranks:  # none yet between its fork and its exec
                    self.watched[os.pidfd_open(pid)] = ranks[0]
                    self.places |= {int(entry[11:]): ranks[0] for entry in entries if entry.startswith(b"LOCAL_RANK=")}
                    self._known.add(pid)
                    self._missing -= 1
                    self._give_up = time.monotonic() + START_OF_ALL
            except (FileNotFoundError, ProcessLookupError):  # ended while we looked
                continue
            except OSError:  # a sandbox that has no pidfd
                self._missing = 0

    def note(self, ready: list[int]) -> None:
        now = time.monotonic_ns()  # of all: nobody knows which of them was first
        for fd in set(ready) & set(self.watched):
            self.times[self.watched.pop(fd)] = now
            os.close(fd)


class Peers:
    """The guards of the other machines, through files that all machines see. Empty for a run on one machine."""

    def __init__(self, config: dict[str, Any]) -> None:
        node = config.get("node") or {"rank": 0, "members": [0], "silence": 0.0, "attempt": 0, "lost": {}}
        self._me, self._members, self._silence, self._attempt = node["rank"], node["members"], node["silence"], node["attempt"]
        self._lost, self._elastic, self.several, self.regrouping = node["lost"], config.get("restart"), bool(config.get("node")), False
        self._run_dir, self.leads = Path(config["run_dir"]), node["rank"] == min(node["members"])
        self._status: dict[str, Any] = {"clock": time.time_ns() - time.monotonic_ns(), **node, "ranks": {}, "outcome": None}
        self._beats: dict[int, tuple[str, float]] = {}
        self._bad_since: dict[int, float] = {}
        self.cause: int | None = None  # the machine whose end was the reason to stop
        self._beat, self.next = 0, 0.0 if self.several else float("inf")

    def _folder(self, rank: int) -> Path:
        return self._run_dir / NODES / str(rank)

    @property
    def went_on(self) -> bool:
        """Have the others gone on without this machine? An attempt has a plan before it begins."""
        with contextlib.suppress(OSError):
            plans = [self.read(plan) for plan in (self._run_dir / NODES).glob("attempt*.json") if self.several]
            return any(self._me not in plan["members"] for plan in plans if plan)  # one whose writer was cut off says nothing
        return False

    def read(self, what: int | Path) -> dict[str, Any] | None:
        """The status of another machine, or a plan; None before it has come."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((what if isinstance(what, Path) else self._folder(what) / NODE_JSON).read_text()))
        return None

    def publish(self, **more: Any) -> None:
        """Write this machine's status for the others; on a full disk they do not get it, and this machine goes on."""
        if self.several:
            self._status |= more
            with contextlib.suppress(OSError):
                part = self._folder(self._me) / f"{NODE_JSON}.part"
                part.write_text(json.dumps(self._status, indent=1) + "\n")
                part.replace(self._folder(self._me) / NODE_JSON)

    def silent_for(self, rank: int, now: float) -> float:
        """Seconds since the last heartbeat of a machine that has come; by this machine's clock, as no two clocks agree."""
        with contextlib.suppress(OSError):
            if (beat := (self._folder(rank) / BEAT).read_text()) != self._beats.get(rank, ("", 0.0))[0]:
                self._beats[rank] = beat, now
            return now - self._beats[rank][1]
        return 0.0

    def beat(self, now: float | None = None) -> None:
        """Write a heartbeat, if it is time for one."""
        now = time.monotonic() if now is None else now
        if now >= self.next:
            self.next = now + HEARTBEAT
            self._beat += 1
            with contextlib.suppress(OSError):
                (self._folder(self._me) / BEAT).write_text(f"{self._beat}\n")

    def look(self, now: float, deaths: Deaths) -> str:
        """Write a heartbeat and read those of the others; returns why to stop, "" = go on."""
        if now < self.next:
            return ""
        self.beat(now)
        failed = not self.regrouping and self.went_on
        if not self.regrouping and deaths.places != self._status["ranks"]:
            self.publish(ranks=dict(deaths.places))
        for rank in set(self._members) - {self._me}:
            there = self.read(rank)
            outcome = there and there.get("attempt", 0) == self._attempt and there["outcome"]
            if outcome and outcome["state"] != "finished":
                since = self._bad_since.setdefault(rank, now)
                if outcome["state"] != "failed" and not (outcome["state"] == "abandoned" and rank and self._elastic):
                    self.cause = rank if outcome.get("cause") is None else outcome["cause"]
                    return str(outcome["state"])
                failed = failed or now - since > LEAVE
            elif there and not outcome:
                failed = failed or self.silent_for(rank, now) > self._silence
        return "failed" if failed and not self.regrouping else ""

    def conclude(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Publish the outcome of this part. The first machine waits for the others that still have heartbeats; returns that of all."""
        self.publish(outcome=outcome)
        if not (self.several and self.leads):
            return outcome
        limit, others = time.monotonic() + END_LIMIT + 3 * QUIET, {rank: self.read(rank) for rank in self._members if rank != self._me}
        while (now := time.monotonic()) < limit and [
            rank for rank, there in others.items() if there and not there["outcome"] and self.silent_for(rank, now) < QUIET
        ]:
            time.sleep(0.1)
            others = {rank: self.read(rank) for rank in others}
        whole = combine_outcomes(self._status | {"outcome": outcome}, others)
        return whole | {"nodes": {**self._lost, **whole["nodes"]}}


def combine_outcomes(mine: dict[str, Any], others: dict[int, dict[str, Any] | None]) -> dict[str, Any]:
    """The outcome of a run on several machines, on the clock of the first, by its status and the others' (None = they never came)."""
    outcome = dict(mine["outcome"])
    exits, clocks, nodes = dict(outcome["exits"]), dict[str, int](), dict[int, dict[str, Any]]()
    for rank, there in others.items():
        ended = (there or {}).get("outcome")
        nodes[rank] = {"name": there and there["name"], "state": ended["state"] if ended else "silent" if there else "absent"}
        if there:
            shift = there["clock"] - mine["clock"]
            clocks |= {str(number): shift for number in there["ranks"].values()}
            exits |= {number: when + shift for number, when in (ended or {"exits": {}})["exits"].items()}
        if ended and ended["state"] != "finished" and outcome["state"] == "finished":
            outcome["state"] = ended["state"]
    return outcome | {"exits": exits, "clocks": clocks, "nodes": nodes}


def memory_files(in_version_2: str, in_version_1: str) -> list[str]:
    """Texts of a file of our control group for memory, from the group's own to that of all; of version 2, version 1, or both."""
    texts = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                base, file = ("/sys/fs/cgroup/memory", in_version_1) if controllers else ("/sys/fs/cgroup", in_version_2)
                for place in (f"{base}{path}", base):  # inside a container the path may be that of the host
                    with contextlib.suppress(OSError):
                        texts.append(Path(place, file).read_text())
    return texts


def oom_kills() -> int | None:
    """Processes that the kernel's out-of-memory killer has ended in our control group so far; None where it is not counted."""
    for text in memory_files("memory.events", "memory.oom_control"):
        with contextlib.suppress(KeyError, ValueError):
            return int(dict(line.split() for line in text.splitlines())["oom_kill"])
    return None


def memory_limit() -> int | None:
    """Bytes of main memory that this run may use: of its control group, or of the machine where that is less."""
    limits = [int(text) for text in memory_files("memory.max", "memory.limit_in_bytes") if text.strip().isdigit()]
    with contextlib.suppress(OSError, ValueError, IndexError):
        limits.append(1024 * int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]))
    return min(limits, default=None)


def kernel_messages(since: float) -> list[str]:
    """The kernel's messages about processes that it killed because memory ran out, since a time on the monotonic clock; if readable."""
    messages = []
    opened = lambda path, flags: os.open(path, flags | os.O_NONBLOCK)  # noqa: E731
    with contextlib.suppress(OSError, ValueError, IndexError), open("/dev/kmsg", "rb", buffering=0, opener=opened) as log:
        while entry := log.read(8192):  # one message at a time: "level,number,microseconds,flags;text"
            head, _, text = entry.decode(errors="replace").partition(";")
            if "Killed process" in text and int(head.split(",")[2]) >= 1e6 * since:
                messages.append(text.splitlines()[0])
    return messages


def write_outcome(run_dir: Path, outcome: dict[str, Any]) -> None:
    """Add the outcome to run.json, by atomic replace; on a full disk into the space that the launch set aside."""
    path, part = run_dir / RUN_JSON, run_dir / f"{RUN_JSON}.guard.part"
    text = json.dumps({**json.loads(path.read_text()), "outcome": outcome}, indent=1) + "\n"
    for last in (False, True):
        try:
            part.write_text(text)
            part.replace(path)
            break
        except OSError as error:
            part.unlink(missing_ok=True)
            if last or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            (run_dir / RESERVE).unlink(missing_ok=True)


def start(command: list[str]) -> int:
    """Start torchrun in a session of its own, without what the guard has changed for itself; returns its pid."""
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a stop that comes at once must not go to our handler in the child
    pid = os.fork()  # not subprocess: only wait statuses tell the truth where a subreaper reaps everybody
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return pid
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        end_with_parent(guard)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def watch(torchrun: int, config: dict[str, Any], deaths: Deaths, woken: int, peers: Peers) -> tuple[int | None, str, int | None]:
    """Wait for torchrun's end or bring it about.

    Returns:
        torchrun's exit code (None: it outlived the grace period), why it was stopped ("": it was not), and when (monotonic ns).
    """
    never = float("inf")
    launcher = [0] if config["launcher"] else []  # of a step of a job: none, as it ends when the batch system says so
    if launcher and hasattr(os, "pidfd_open"):  # the process beside the pipe from it, which a child that it forked may hold open
        with contextlib.suppress(OSError):  # gone already: the pipe says so, too
            launcher.append(os.pidfd_open(config["launcher"]))
    time_up, kill_at = config["time_up"], never
    why, stopped_ns, hang, watchdog, look_at = "", None, Path(config["run_dir"], HANG), 0, 0.0 if config.get("watchdog") else never
    while (code := reap(torchrun)) is None and (now := time.monotonic()) < kill_at:
        if deaths.looking:
            deaths.look()
        why = why or ("timeout" if now >= time_up else peers.look(now, deaths))
        if now >= look_at and not why:
            look_at = now + HEARTBEAT
            if any(hang.glob("rank*.json")) and not (watchdog and os.path.exists(f"/proc/{watchdog}")):
                watchdog = start(config["watchdog"])  # it finds out who makes no progress
            why = "failed" if (hang / STOP).exists() else ""
        if why and stopped_ns is None:
            os.kill(torchrun, signal.SIGTERM)
            stopped_ns, kill_at = time.monotonic_ns(), now + config["grace"]
        wait = min((kill_at if why else time_up) - now, LOOK_FOR_RANKS if deaths.looking else never, peers.next - now, look_at - now)
        listening = [woken, *deaths.watched, *([] if why else launcher)]
        ready = select.select(listening, [], [], None if wait == never else max(0.0, wait))[0]
        deaths.note(ready)
        if woken in ready and {signal.SIGTERM, signal.SIGUSR1} & set(os.read(woken, 4096)):
            why = why or "stopped"
        if not set(launcher).isdisjoint(ready):
            why = why or "abandoned"
    deaths.note(select.select(list(deaths.watched), [], [], 0)[0])
    return code, why, stopped_ns


def go_on(config: dict[str, Any], outcome: dict[str, Any], woken: int, peers: Peers) -> bool:
    """After a failure, put what the program of `config["restart"]` says into `config`; False = the run has ended."""
    answer, peers.regrouping = Path(config["run_dir"], *[NODES, str(machine_of(config))] * peers.several, NEXT), True
    peers.publish(outcome=outcome | {"state": "failed"})
    with contextlib.suppress(OSError, ValueError):
        answer.write_text(json.dumps(outcome))
        asked = start(config["restart"])
        code, why, _ = watch(asked, config | {"watchdog": None}, Deaths(asked, 0), woken, peers)
        end_all(asked, config["id"], peers.beat)
        outcome["state"] = why or outcome["state"]
        config |= json.loads(answer.read_text())
        answer.unlink()
        return code == 0 and not why
    return False


def guard(config: dict[str, Any], keeper: int) -> int:
    """Start torchrun, wait for its end, leave no process behind, write the outcome; returns the exit status, for a batch system."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)  # each signal arrives as a byte with its number
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with_parent(keeper)
    started = time.monotonic()
    os.environ["WORKBENCH_RUN_MACHINE"] = str(machine_of(config))
    while True:
        config["time_up"] = started + (config["timeout"] or float("inf"))
        peers = Peers(config)
        peers.publish()
        kills_before, begun = oom_kills(), time.monotonic()
        torchrun = start(config["command"])
        deaths = Deaths(torchrun, config["nproc"])
        code, why, stopped_ns = watch(torchrun, config, deaths, woken, peers)
        peers.publish(ranks=dict(deaths.places))
        seconds = time.monotonic() - started
        ended = end_all(torchrun, config["id"], peers.beat)
        remove_temporary(config)
        code = ended if code is None else code
        if os.getppid() != keeper:
            return 1  # the keeper was killed: how this run ended is nobody's decision
        kills, preempted = oom_kills(), Path(config["run_dir"], PREEMPTED).exists()
        outcome = {
            "state": "finished" if code == 0 and not preempted else why or ("stopped" if preempted else "failed"),
            "returncode": code,
            "seconds": seconds,
            "oom_kills": None if kills is None or kills_before is None else kills - kills_before,
            "memory_limit": memory_limit(),
            "kernel": kernel_messages(begun) if kills is None or kills != kills_before else [],
            "exits": deaths.times,
            "stopped_ns": stopped_ns,
            **({} if peers.cause is None else {"cause": peers.cause}),
        }
        again = outcome["state"] == "failed" or (preempted and not why and peers.several)  # maybe another machine's end was the signal
        if not again or peers.went_on or not config.get("restart") or not go_on(config, outcome, woken, peers):
            break
    if peers.went_on:
        print(f"workbench: machine {machine_of(config)} is no longer part of the run, which goes on without it", flush=True)
        return 1
    if config.get("restart"):
        peers = Peers(config)  # the machines that are left may have agreed that the run ends
        peers.publish(ranks=dict(deaths.places))
    outcome = peers.conclude(outcome)
    if peers.leads:
        write_outcome(Path(config["run_dir"]), outcome)
    return int(not config["launcher"] and outcome["state"] != "finished")


def main() -> int:
    """Keeper and guard; the exit status: 0, but in a job's step 1 for a run that did not finish."""
    config = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as the launcher does: no stop may come before we listen
    for number in (signal.SIGINT, signal.SIGHUP):  # an interrupt is for the launching process; it decides what to stop
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(config["lock"], False)  # held by keeper and guard until they end, by nobody else
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    keeper, child = os.getpid(), os.fork()
    if not child:
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # not inherited
        return guard(config, keeper)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.close(0)
    while (ended := os.waitpid(-1, 0))[0] != child:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the pid it would be passed on to is free now
    end_all(child, config["id"])
    remove_temporary(config)
    return 0 if config["launcher"] else int(ended[1] != 0)


if __name__ == "__main__":
    sys.exit(main())
