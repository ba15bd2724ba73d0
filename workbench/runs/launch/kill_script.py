"""When the script of a proof is killed, and how: after optimizer steps or writes, or while it writes a checkpoint."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workbench.runs.guards import ranks_of
from workbench.runs.run import ACTIVE, Run

TRIES = 3
"""How often it is tried at most, where the kills left too little to train, each time with earlier kills."""
LATEST = 0.8
"""Part of the undisturbed steps before which the first try kills: what a launch has trained is seen up to 0.3 s later."""
LOG = 3
"""Counts of steps during which a file may be open and still be one of a checkpoint: a file that is open longer is a log."""


def kill_steps(writes: Sequence[int], total: int, kills: int, chosen: random.Random) -> list[list[int]]:
    """After how many steps, of all launches together, each kill of each try comes: after a third of those with writes, before LATEST.

    In each further try the latest step is half as far from the earliest; where they are one already, there is no further try.

    Args:
        writes: steps that the undisturbed script had taken at each of its writes, as measured.
        total: those at its end; 0 or 1 = steps tell nothing, and the kills are chosen by writes: one try, an empty list.
        kills: how many.
        chosen: chooses.
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


@dataclass(slots=True)
class Watched:
    """What was seen of a launch."""

    killed: float = 0.0
    """Seconds after which it was killed; 0 = it was not."""
    writing: str = ""
    """The file that was being written then."""
    writes: list[int] = field(default_factory=list)
    """Of each write the steps that were measured by then."""
    saves: list[int] = field(default_factory=list)
    """Of each look at which a file was being written, too."""


def watch(
    run: Run, out: Path, due: Due | None = None, chosen: random.Random | None = None, *, say: Callable[[int, int], object] = max
) -> Watched:
    """Follow what a script writes into its folder, until it ends or, when that is due, is killed: a rank by `chosen`.

    `say` is told the writes and steps so far, again and again.
    """
    start, before, seen, ranks = time.monotonic(), _written(out), Watched(), _Ranks(run.id, out)
    had = before > 0  # an earlier launch has written
    times, passed = [start], 0
    while run.state in ACTIVE:
        now, steps = _written(out), run.progress[0]
        if now != before:
            seen.writes.append(steps)
            before = now
            times.append(time.monotonic())
        say(len(seen.writes), steps)
        saving = ranks.saving(steps)
        seen.saves += [steps] * bool(saving)
        if chosen and due and steps >= due.steps and len(seen.writes) >= due.writes - (had and due.steps > 0):
            passed += bool(saving)
            if not due.steps and not due.saves:
                time.sleep(chosen.random() * (times[-1] - times[-2]))  # not always right after a write
            victims = ranks.pids() if not due.saves else list(saving.values()) if passed >= due.saves else []
            if victims and (file := ranks.kill(chosen.choice(victims), steps, only_saving=due.saves > 0)) is not None:
                seen.killed, seen.writing = time.monotonic() - start, file
                seen.killed *= run.wait().state == "failed"
                return seen
        time.sleep(0.001 if due and due.saves else 0.005)
    seen.writes += [run.progress[0]] * (_written(out) != before)
    return seen


class _Ranks:
    """The ranks of a run, and which files of a folder each has open for writing."""

    def __init__(self, run_id: str, out: Path) -> None:
        self._id, self._out, self._pids, self._next, self._since = run_id, f"{out.resolve()}/", list[int](), 0.0, dict[str, set[int]]()

    def pids(self) -> list[int]:
        """The process of each rank."""
        return [pids[0] for pids in ranks_of(self._id).values()]

    def saving(self, steps: int) -> dict[str, int]:
        """Each file that is being written, with the process; a log, which is open while steps are taken, is none."""
        if time.monotonic() > self._next:  # ranks appear one after the other
            self._pids, self._next = self.pids(), time.monotonic() + 1
        found = {name: pid for pid in self._pids for name in self._written_by(pid)}
        self._since = {name: self._since.get(name, set()) | {steps} for name in found}
        return {name: pid for name, pid in found.items() if len(self._since[name]) <= LOG}

    def _written_by(self, pid: int) -> Iterator[str]:
        with contextlib.suppress(OSError):  # it has ended
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    path = os.readlink(f"/proc/{pid}/fd/{number}")
                    if path.startswith(self._out):
                        flags = int(Path(f"/proc/{pid}/fdinfo/{number}").read_text().partition("flags:")[2].split()[0], 8)
                        if flags & os.O_ACCMODE and not flags & os.O_APPEND:
                            yield path.removeprefix(self._out)

    def kill(self, pid: int, steps: int, *, only_saving: bool) -> str | None:
        """Kill a rank, stopped before so that the file that it writes is seen: its name, "" = none. None = it does not save, and lives."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            limit = time.monotonic() + 1.0
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TtZX" and time.monotonic() < limit:
                time.sleep(0.001)
            file = next((name for name, by in self.saving(steps).items() if by == pid), None if only_saving else "")
            os.kill(pid, signal.SIGCONT if file is None else signal.SIGKILL)
            return file
        return None


def _written(out: Path) -> int:
    """When something in a folder was written last."""
    times = [0]
    for path in out.rglob("*"):
        with contextlib.suppress(OSError):  # renamed meanwhile
            times.append(path.stat().st_mtime_ns)
    return max(times)
