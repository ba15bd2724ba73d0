"""When the script of a proof is killed, and how: after optimizer steps or writes, or while it writes a checkpoint."""

import contextlib
import itertools
import os
import random
import re
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workbench.runs.guards import ranks_of
from workbench.runs.launch.cut_saves import ClosedFiles, cut, hold_renames, is_held, renamed_by_others, state_of
from workbench.runs.run import ACTIVE, Run

TRIES = 3
"""How often it is tried at most, where the kills left too little to train, each time with earlier kills."""
LATEST = 0.8
"""Part of the undisturbed steps before which the first try kills: what a launch has trained is seen up to 0.3 s later."""
LOG = 3
"""Counts of steps during which a file may be open and still be one of a checkpoint: a file that is open longer is a log."""
_LOG = re.compile(r"\.(log|csv|tsv|jsonl|out|err|lock|wandb)$|-(journal|wal|shm)$|^events\.out\.tfevents")
"""In the names of logs, of files that lock others, and of those that a data base has beside it."""


def kill_steps(writes: Sequence[int], total: int, kills: int, chosen: random.Random) -> list[list[int]]:
    """After how many steps, of all launches together, each kill of each try comes: after a third of those with writes, before LATEST.

    In each further try the latest step is half as far from the earliest; where they are one already, there is no further try.

    Args:
        writes: steps that the undisturbed script had taken at each of its writes, as measured.
        total: those at its end; 0 or 1 = steps tell nothing, and the kills are chosen by writes: one try, an empty list.
        kills: number of kills in each try.
        chosen: generator that draws the steps.
    """
    if total < 2:
        return [[]]
    written = sorted(set(writes))
    early = [step for step in written if step < int(LATEST * total)] or written[:1]
    first = max(1, min(early[(len(early) - 1) // 3] + 1, total - 1))  # a step after it, what was written is whole
    latest = dict.fromkeys(first + max(0, int(LATEST * total) - first) // 2**tried for tried in range(TRIES))
    places = sorted(chosen.random() for _ in range(kills))
    return [[first + round(place * (each - first)) for place in places] for each in latest]


@dataclass(frozen=True, slots=True)
class Due:
    """When a script is killed: after so many steps, if given, and writes, and then, if given, at so many looks that see a save."""

    writes: int = 1
    steps: int = 0
    saves: int = 0
    logs: frozenset[str] = frozenset()  # files that are no saves
    cut: bool = False  # saves are too short to be caught: the file that was closed last is cut


@dataclass(slots=True)
class Watched:
    """What was seen of a launch."""

    killed: float = 0.0
    """Seconds after which it was killed; 0 = it was not."""
    writing: str = ""
    """The file that was being written then."""
    writes: list[int] = field(default_factory=list)
    """Of each write the steps that were measured by then; a write of logs is none."""
    saves: list[int] = field(default_factory=list)
    """Of each look that saw a save, too."""
    closes: list[int] = field(default_factory=list)
    """And of each file that was closed after writing."""
    uncut: frozenset[str] = frozenset()
    """Files that another program renames as soon as they are written, so that they cannot be cut."""
    logs: frozenset[str] = frozenset()
    """Files that were opened to be appended to, and, if others are written, those that were opened once and stayed open to the end."""


def watch(
    run: Run, out: Path, due: Due | None = None, chosen: random.Random | None = None, *, say: Callable[[int, int], object] = max
) -> Watched:
    """Follow what a script writes into its folder, until it ends or, when that is due, is killed: a rank by `chosen`.

    `say` is told the writes and steps so far, again and again.
    """
    closed: ClosedFiles | None = None
    if due and due.saves:
        with contextlib.suppress(OSError, AttributeError):  # not where no further watcher of files is allowed
            logs = due.logs
            closed = ClosedFiles(out, lambda name: name in logs or is_log(name))
    try:
        return _watched(run, out, due, chosen, say, closed)
    finally:
        if closed:
            closed.close()


def _watched(
    run: Run, out: Path, due: Due | None, chosen: random.Random | None, say: Callable[[int, int], object], closed: ClosedFiles | None
) -> Watched:
    logs = due.logs if due else frozenset[str]()
    start, files, seen, ranks = time.monotonic(), _written(out), Watched(), _Ranks(run.id, out, due)
    changes, before = [(0, files)], _latest(files, logs)
    closes = list[tuple[int, str]]()
    looks = list[tuple[int, set[str], set[str]]]()  # steps, and files: those that were opened after the first step, all
    had = before > 0  # an earlier launch has written
    times, passed, armed = [start], 0, False
    while run.state in ACTIVE:
        now, steps = _written(out), run.progress[0]
        if changed := {name: when for name, when in now.items() if files.get(name) != when}:
            changes.append((steps, changed))
        files = now
        if (latest := _latest(now, logs)) > before:
            seen.writes.append(steps)
            before = latest
            times.append(time.monotonic())
        say(len(seen.writes), steps)
        saving = ranks.saving(steps)
        looks += [(steps, {name for name in saving if 0 not in ranks.since[name]}, set(saving))] * bool(saving)
        names = closed.look() if closed else []
        closes += [(steps, name) for name in names]
        is_time = due and steps >= due.steps and len(seen.writes) >= due.writes - (had and due.steps > 0)
        if chosen and due and due.cut and closed and is_time:
            passed += len(names)
            if passed >= due.saves - 1 and not armed:
                hold_renames(run, out, now=True)
                armed = True
            is_due = (names and passed >= due.saves) or (armed and is_held(run.id))
            if is_due and (file := cut(run, out, closed, chosen)) is not None:
                seen.killed, seen.writing = time.monotonic() - start, file
                seen.killed *= run.wait().state == "failed"
                return seen
        elif chosen and due and not due.cut and is_time:
            passed += bool(saving)
            if not due.steps and not due.saves:
                time.sleep(chosen.random() * (times[-1] - times[-2]))  # not always right after a write
            victims = ranks.pids() if not due.saves else list(saving.values()) if passed >= due.saves else []
            if victims and (file := ranks.kill(chosen.choice(victims), steps, only_saving=due.saves > 0)) is not None:
                seen.killed, seen.writing = time.monotonic() - start, file
                seen.killed *= run.wait().state == "failed"
                return seen
        time.sleep(0.001 if due and due.saves else 0.005)
    total = run.progress[0]
    changes.append((total, _written(out)))
    for seen.logs in (ranks.lasting() | ranks.appended, ranks.appended):
        seen.writes = _writes(changes, seen.logs)
        if len(seen.writes) > 1:
            break
    seen.closes = [steps for steps, name in closes if name not in seen.logs]
    seen.uncut = frozenset(renamed_by_others(run, closed) - seen.logs if closed else ())
    seen.saves = [steps for steps, later, files in looks if (later if total > 1 else files) - seen.logs]
    return seen


class _Ranks:
    """The ranks of a run, and which files of a folder each has open for writing; their child processes are not looked at."""

    def __init__(self, run_id: str, out: Path, due: Due | None = None) -> None:
        self._id, self._out, self._due, self._pids, self._next = run_id, f"{out.resolve()}/", due or Due(), list[int](), 0.0
        self.since = dict[str, set[int]]()  # of each file that is open: counts of steps since it was opened
        self.appended = frozenset[str]()
        self._opened, self._last, self._looks = Counter[str](), dict[str, tuple[int, int, int]](), 0

    def pids(self) -> list[int]:
        """The process of each rank."""
        return [pids[0] for pids in ranks_of(self._id).values()]

    def saving(self, steps: int) -> dict[str, int]:
        """Each file that is being written, with the process, without logs: those of `due`, and what is open for long or from step 0."""
        if time.monotonic() > self._next:  # ranks appear one after the other
            self._pids, self._next = self.pids(), time.monotonic() + 1
        found = {name: pid for pid in self._pids for name in self._written_by(pid)}
        self._opened.update(found.keys() - self.since.keys())
        self.since = {name: self.since.get(name, set()) | {steps} for name in found}
        self._looks += bool(found)
        self._last |= {name: (self._looks, steps, len(counts)) for name, counts in self.since.items()}
        logs = self._due.logs | {name for name, counts in self.since.items() if len(counts) > LOG or (self._due.steps and 0 in counts)}
        return {name: pid for name, pid in found.items() if name not in logs and not is_log(name)}

    def lasting(self) -> frozenset[str]:
        """Files that were opened once and open at the last look that saw any, or across counts of steps up to the last one."""
        end = max((steps for _, steps, _ in self._last.values()), default=0)
        once = ((name, last) for name, last in self._last.items() if self._opened[name] == 1)
        return frozenset(name for name, (look, steps, counts) in once if look == self._looks or (counts > 1 and steps == end))

    def _written_by(self, pid: int) -> Iterator[str]:
        with contextlib.suppress(OSError):  # it has ended
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    path = os.readlink(f"/proc/{pid}/fd/{number}")
                    if path.startswith(self._out):
                        flags = int(Path(f"/proc/{pid}/fdinfo/{number}").read_text().partition("flags:")[2].split()[0], 8)
                        if flags & os.O_ACCMODE and flags & os.O_APPEND:
                            self.appended |= {path.removeprefix(self._out)}
                        elif flags & os.O_ACCMODE:
                            yield path.removeprefix(self._out)

    def kill(self, pid: int, steps: int, *, only_saving: bool) -> str | None:
        """Kill a rank, stopped before so that the file that it writes is seen: its name, "" = none. None = it does not save, and lives."""
        file = None
        with contextlib.suppress(OSError):  # it has ended
            try:
                os.kill(pid, signal.SIGSTOP)
                limit = time.monotonic() + 1.0
                while state_of(pid) not in "TtZX" and time.monotonic() < limit:
                    time.sleep(0.001)
                file = next((name for name, by in self.saving(steps).items() if by == pid), None if only_saving else "")
                if file is not None:
                    os.kill(pid, signal.SIGKILL)
            finally:
                os.kill(pid, signal.SIGCONT)  # it lives on, also after Ctrl-C here
        return file


def is_log(name: str) -> bool:
    """Does the name of a file say that it is no checkpoint?"""
    return _LOG.search(name.rpartition("/")[2]) is not None


def _written(out: Path) -> dict[str, int]:
    """When each file of a folder was written last."""
    times = dict[str, int]()
    for path in out.rglob("*"):
        with contextlib.suppress(OSError):  # renamed meanwhile
            state = path.stat()
            if not stat.S_ISDIR(state.st_mode):
                times[str(path.relative_to(out))] = state.st_mtime_ns
    return times


def _latest(files: Mapping[str, int], logs: Collection[str]) -> int:
    """When the last of them that is no log was written."""
    return max((when for name, when in files.items() if not (name in logs or is_log(name))), default=0)


def _writes(changes: Sequence[tuple[int, Mapping[str, int]]], logs: Collection[str]) -> list[int]:
    """The steps of each change, after the first entry, in which a file was written that is no log."""
    latest = list(itertools.accumulate((_latest(files, logs) for _, files in changes), max))
    return [steps for (steps, _), before, now in zip(changes[1:], latest, latest[1:], strict=False) if now > before]
