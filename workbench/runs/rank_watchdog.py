"""Watches, in a thread of each rank, whether the rank makes progress; where it makes none, writes what its threads do.

Progress is a finished step, or a call of a collective, a send or a receive. A rank without any writes `hang/rank<r>.json`: the stacks of
all threads, its last collectives, whether it works (CPU, disk, children) or is stuck, and, before its second step or while it waits for a
message, for how long it has been idle (`IdleTime`). `hang.py` judges what all ranks have written, `programs/watchdog.py` collects it. While
there is progress the thread looks at three counters twice a second, and writes nothing.

A rank in C code that holds Python's lock cannot run this thread. For it, a signal lets `faulthandler` print all stacks to stderr.
"""

import contextlib
import dis
import faulthandler
import itertools
import linecache
import os
import platform
import re
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from workbench.core import run_directory
from workbench.core.checks import number_or_default
from workbench.core.package import is_users
from workbench.core.system_load import PROC, cpu_of_process, cpu_of_tree, descendants, text_of
from workbench.runs import flight_recorder
from workbench.timeline import rank_log

TICK = 0.5
"""Seconds between two looks."""
QUIET = 4.0
"""Seconds without progress after which a rank writes what it does."""
LATER = 60.0
"""Seconds without progress after which it does so less often."""
WINDOW = 5.0
"""Seconds over which a rank judges whether it works or is stuck."""
DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - 5
"""The signal upon which a rank prints its stacks: none that batch systems or users send."""
MOST_FRAMES = 60
FIRST_COLLECTIVES = 6
"""Collectives with which a script begins, where its steps are not counted: DDP compares and sends the weights. Pauses until
then, until as many messages, or until the first step, are those of the start."""
IDLE = {"cpu": 0.04, "bytes": 4096.0, "wakes": 5.0}
"""CPU seconds and bytes of a process, and times that a thread wakes up, per second: up to these it is idle. What only looks after something
wakes once a second, a slow download with each packet."""
_LOOK_AFTER = ("pt_", "cuda", "nccl", "gloo")  # beginnings of the names of threads of torch and CUDA that do so more often
_WAITS = {  # numbers of system calls that wait for no file: poll, select, sleeps, futex, wait4, flock, fcntl, epoll, …
    "x86_64": {7, 23, 34, 35, 61, 72, 73, 128, 202, 219, 230, 232, 247, 270, 271, 281, 441, 449},
    "aarch64": {22, 25, 32, 72, 73, 95, 98, 101, 115, 128, 137, 260, 441, 449},
}
_READS = {"x86_64": {0, 19, 43, 45, 47, 288}, "aarch64": {63, 65, 202, 207, 212, 242}}  # they wait for pipes, sockets and terminals


def starting(steps: int | None, numbers: Mapping[str, int]) -> bool:
    """Has a rank with so many steps (None = not counted) and collectives of each group not taken its second step yet?"""
    return steps < 2 if steps is not None else max(numbers.values(), default=0) < FIRST_COLLECTIVES


class RankWatchdog:
    """What this rank does, seen from another thread."""

    def __init__(self, folder: Path, rank: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._rank, self._clock = folder, rank, clock
        self._path = folder / f"rank{rank}.json"
        self._main = threading.main_thread()
        self._count: tuple[int | None, dict[str, int], int] = (None, {}, 0)
        self._since, self._gaps, self._written = clock(), [0.0, 0.0], -1e9
        self._samples: deque[dict[str, Any]] = deque(maxlen=round(WINDOW / TICK))
        self._idle_time, self._idle = IdleTime(), 0.0
        self._waits: Any = None

    def tick(self) -> None:
        """Look once; write, or delete what was written, where that is due."""
        now, messages = self._clock(), flight_recorder.messages()
        count = rank_log.steps_written(), self._count[1] | flight_recorder.numbers(), messages
        if count != self._count:
            if self._count[0] or (self._count[0] is None and max([*self._count[1].values(), self._count[2]]) >= FIRST_COLLECTIVES):
                self._gaps = sorted([*self._gaps, now - self._since])[-2:]
            self._count, self._since = count, now
            self._samples.clear()
            self._idle_time, self._idle = IdleTime(), 0.0
        quiet = now - self._since
        counts = count[0] is not None or bool(count[1]) or number_or_default("WORLD_SIZE", 1) > 1  # else nothing shows its progress
        if counts and quiet >= QUIET / 2:
            self._samples.append(sample := self._sample())
            if sample["waits"] and sample["waits"] != self._waits:  # a message came since, or it waits for another
                self._idle_time = IdleTime()
            self._waits = sample["waits"]
            self._idle = self._idle_time.look() if self._waits or starting(count[0], count[1]) else 0.0
        if counts and (quiet >= QUIET or (self._folder / run_directory.ASK).exists()):
            if now - self._written >= (1.0 if quiet < LATER else 5.0):
                self._written = now
                with contextlib.suppress(OSError):
                    self._folder.mkdir(exist_ok=True)
                    run_directory.write_json(self._path, self._report(quiet))
        elif self._written > 0:
            self._written = -1e9
            self._path.unlink(missing_ok=True)

    def _sample(self) -> dict[str, Any]:
        """What the main thread does at this moment."""
        frames = _frames(sys._current_frames().get(self._main.ident or 0))
        where = tuple((id(frame.f_code), frame.f_lasti) for frame in frames)
        state, pid = _main_state(), os.getpid()
        loop = state == "R" and not _in_torch(frames) and _repeats_while(frames)
        own = cpu_of_process(pid)
        return {
            "where": where,
            "state": state,
            "loop": (where, _digest(frames)) if loop else None,
            "waits": (where, _switches(self._main.native_id)) if waits_for_message([*map(describe, frames[:1])]) else None,
            "threads": own - time.clock_gettime(time.pthread_getcpuclockid(self._main.ident or 0)) - time.thread_time(),
            "children": cpu_of_tree(pid) - own,
            "io": _bytes_moved(),
            "time": self._clock(),
        }

    def _works(self) -> tuple[bool, bool]:
        """Does this rank work, and does it repeat a `while` loop in which nothing but numbers changes?"""
        samples = [*self._samples]
        if len(samples) < 4:
            return True, False
        first, last, count = samples[0], samples[-1], len(samples)
        seconds = max(last["time"] - first["time"], TICK)
        share = sum(sample["state"] in "RD" for sample in samples) / count
        moved = sum(a["where"] != b["where"] for a, b in itertools.pairwise(samples)) / count
        others = max((last["threads"] - first["threads"]) / seconds, (last["children"] - first["children"]) / seconds)
        loops = [sample["loop"] for sample in samples if sample["loop"]]
        repeats = len(loops) >= 0.7 * count and len({digest for _, digest in loops}) == 1
        return share >= 0.2 or moved >= 0.5 or others >= 0.1 or (last["io"] - first["io"]) / seconds > 2**18, repeats

    def _report(self, quiet: float) -> dict[str, Any]:
        works, repeats = self._works()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        threads: list[dict[str, Any]] = [
            {"name": names.get(ident, "?"), "main": ident == self._main.ident, "frames": [describe(f) for f in _frames(frame)]}
            for ident, frame in sys._current_frames().items()
            if ident == self._main.ident or ident != threading.get_ident()
        ]
        leaving = any(frame[2] == "destroy_process_group" for thread in threads for frame in thread["frames"])
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "time": time.time(),
            "quiet": quiet,
            "usual": self._gaps[0],
            "steps": self._count[0],
            "numbers": flight_recorder.by_name(self._count[1]),
            "messages": self._count[2],
            "works": works,
            "repeats": repeats,
            "idle": self._idle,
            "message": _message(_frames(sys._current_frames().get(self._main.ident or 0))),
            "threads": sorted(threads, key=lambda thread: not thread["main"]),
            "collectives": flight_recorder.last_collectives(),
            "groups": {} if leaving else flight_recorder.members(),
            "no_recorder": flight_recorder.why_missing(),
        }

    def run(self) -> None:
        """Look for ever. An error of the watchdog ends the watchdog, not the training."""
        with contextlib.suppress(Exception):
            while True:
                time.sleep(TICK)
                self.tick()


def start() -> None:
    """Watch this rank, if it is one of a run; what a forked child (a DataLoader worker) does is not watched."""
    with contextlib.suppress(ValueError, OSError, AttributeError, RuntimeError):  # no such folder; stderr is no file
        if (run_dir := run_directory.in_environment()) is None or sys.platform != "linux":
            return
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
        watchdog = RankWatchdog(run_dir / run_directory.HANG, rank_log.rank())
        threading.Thread(target=watchdog.run, name="workbench-watchdog", daemon=True).start()


def _frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of a stack, the innermost first."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames


def describe(frame: FrameType) -> tuple[str, int, str, str, bool]:
    """File, line, function and text of a frame; is it the user's code?"""
    file = frame.f_code.co_filename
    line = frame.f_lineno or 0
    return file, line, frame.f_code.co_name, linecache.getline(file, line).strip()[:200], is_users(file)


def waits_for_message(main: Sequence[tuple[str, int, str, str, bool]]) -> bool:
    """By its described frames, the innermost first: is a thread in send or recv of `torch.distributed`, or in wait() of a request? The
    wait() inside a synchronous collective is none.
    """
    file, _, name, text, user = main[0] if main else ("", 0, "", "", False)
    here = user or ("/torch/distributed/" in file.replace("\\", "/") and name in ("send", "recv"))
    return here and re.search(r"(?<!store)(?<!\bos)\.wait\(", text) is not None


def _message(frames: list[FrameType]) -> dict[str, Any] | None:
    """What send or recv of `torch.distributed` waits for: op, peer (its rank in the run) and tag; None = neither, or it is not known."""
    for frame in frames[:1]:
        op, given = frame.f_code.co_name, frame.f_locals
        if op in ("send", "recv") and frame.f_code.co_filename.endswith("distributed_c10d.py"):
            with contextlib.suppress(Exception):  # another release of torch; recv of any rank
                side = "dst" if op == "send" else "src"
                peer = given[side]
                if peer is None:
                    peer = frame.f_globals["get_global_rank"](given["group"], given[f"group_{side}"])
                return {"op": op, "peer": int(peer), "tag": int(given["tag"])}
    return None


def _switches(thread: int | None) -> int:
    """How many times the kernel has taken a thread off its core: what waits and is not woken keeps that number."""
    lines = text_of(PROC / "self" / "task" / str(thread) / "status").splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def _main_state() -> str:
    """The kernel's letter for the state of the main thread: R runs or waits for a core, S sleeps, D waits for a disk."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[0]
    return "R"


def _bytes_moved() -> int:
    """Bytes that this process has read and written so far, without this thread: its first report reads the source of each frame."""
    with contextlib.suppress(OSError, ValueError):
        return _bytes_of(PROC / "self") - _bytes_of(PROC / "thread-self")
    return 0


def _bytes_of(task: Path, most: int = 2) -> int:
    """Bytes that a process or thread has read and written; with most=6 also those that came from a disk or went to one."""
    return sum(int(line.split()[1]) for line in (task / "io").read_text().splitlines()[:most] if not line.startswith("sys"))


def _in_torch(frames: list[FrameType]) -> bool:
    """Does the main thread compute in torch, or in a package that is built on it?"""
    return any("/torch/" in frame.f_code.co_filename and "/torch/distributed/" not in frame.f_code.co_filename for frame in frames[:20])


def _digest(frames: list[FrameType]) -> tuple[Any, ...]:
    """What the user's variables are, without numbers: equal in a loop that only counts."""
    seen = []
    for frame in [frame for frame in frames if is_users(frame.f_code.co_filename)][:4]:
        for name, value in list(frame.f_locals.items())[:200]:
            if not isinstance(value, int | float | complex):
                size = len(value) if isinstance(value, list | dict | set | str | bytes | tuple | deque) else 0
                seen.append((name, id(value), size))
    return tuple(seen)


def _repeats_while(frames: list[FrameType]) -> bool:
    """Is the innermost loop of the user's code a `while`?"""
    kinds = (_loop_around(frame.f_code, frame.f_lasti) for frame in frames if is_users(frame.f_code.co_filename))
    return next(filter(None, kinds), "") == "while"


@lru_cache(maxsize=256)
def _loop_around(code: CodeType, at: int) -> str:
    """The kind of the innermost loop around an instruction; "" = there is none."""
    instructions = {instruction.offset: instruction for instruction in dis.get_instructions(code)}
    loops = [int(jump.argval) for jump in instructions.values() if "JUMP_BACKWARD" in jump.opname and int(jump.argval) <= at <= jump.offset]
    return ("for" if instructions[max(loops)].opname == "FOR_ITER" else "while") if loops else ""


class IdleTime:
    """For how long this process and its descendants have done nothing at all, as far as /proc knows.

    Anything counts: a thread that runs or waits for a disk, CPU time, bytes read or written, a thread that wakes up again and again (data
    arrives, it polls), a system call on a file, a process or thread that begins or ends.
    """

    def __init__(self, proc: Path = PROC) -> None:
        """Nothing is known yet; threads of the workbench, and the one that asks, do not count."""
        self._proc = proc
        self._last: tuple[float, dict[tuple[str, int, int], float]] = (0.0, {})
        self._since: float | None = None

    def look(self) -> float:
        """Seconds for which every look has found nothing; 0 = there was something, or /proc does not tell."""
        (was, before), at, counts = self._last, time.monotonic(), dict[tuple[str, int, int], float]()
        with contextlib.suppress(OSError, ValueError, KeyError):  # a process or thread ended meanwhile, or the kernel does not say
            counts = self._counts()
        idle = counts and counts.keys() == before.keys()
        idle = idle and all(count - before[key] <= IDLE[key[0]] * (at - was) for key, count in counts.items())
        self._since = (was if self._since is None else self._since) if idle else None
        self._last = (at, counts)
        return 0.0 if self._since is None else at - self._since

    def _counts(self) -> dict[tuple[str, int, int], float]:
        """(key of IDLE, process, thread) → its count so far; {} = a thread runs, waits for a disk, or uses a file."""
        own = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("workbench")]
        counts, left_out = dict[tuple[str, int, int], float](), {*own, threading.get_native_id()}
        for process in descendants(os.getpid(), self._proc):
            folder = self._proc / str(process)
            cpu, moved = cpu_of_process(process), _bytes_of(folder, 6)
            for thread in map(int, os.listdir(folder / "task")):
                task = folder / "task" / str(thread)
                status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
                if thread in left_out:
                    cpu -= time.clock_gettime(~thread << 3 | 6)  # the kernel's name for the clock of a thread
                    moved -= _bytes_of(task, 6)
                elif not status["Name"].startswith(_LOOK_AFTER):
                    if status["State"][0] in "RD" or not _waits(task):
                        return {}
                    counts["wakes", process, thread] = int(status["voluntary_ctxt_switches"])
            counts |= {("cpu", process, 0): cpu, ("bytes", process, 0): moved}
        return counts


def _is_network(file: Path) -> bool:
    """Is an open file a TCP connection? A server may take its time, as that of a download."""
    inode = os.readlink(file).removeprefix("socket:[").removesuffix("]")
    tables = [(file.parent.parent / "net" / name) for name in ("tcp", "tcp6")]
    return any(inode in line.split()[9:10] for table in tables if table.exists() for line in table.read_text().splitlines())


def _waits(task: Path) -> bool:
    """Is a thread in a system call that waits for neither a file nor a server?"""
    number, *arguments = (task / "syscall").read_text().split()
    if number.isdigit() and int(number) in _READS.get(platform.machine(), ()):
        file = task.parent.parent / "fd" / str(int(arguments[0], 16))
        mode = os.stat(file).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or (stat.S_ISSOCK(mode) and not _is_network(file))
    return number.isdigit() and int(number) in _WAITS.get(platform.machine(), ())
