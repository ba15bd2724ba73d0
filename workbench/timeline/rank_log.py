"""Writes the steps of a rank to its file: a background thread turns marks into JSON lines every 0.3 s, one writer per path and process.

The training loop only records marks. Arithmetic, text and disk belong to this thread. A killed process loses less than a second of steps. A
forked child (a DataLoader worker) inherits the loops but neither the thread nor the file, and writes nothing.
"""

import atexit
import contextlib
import json
import operator
import os
import resource
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from workbench.core import run_directory
from workbench.core.checks import number_in_environment, number_or_default
from workbench.core.system_load import cpu_of_tree
from workbench.core.vocabulary import PHASES
from workbench.timeline.steps import Row
from workbench.timeline.timeline import MAX_WARMUP, WARNING, Clock

INTERVAL = 0.3
"""Seconds between two writes."""

_LINE = '{"step":%d,' + ",".join(f'"{phase}":%de-9' for phase in PHASES) + ',"samples":%s}\n'
"""A step's line. Nanoseconds are written as `123e-9`: exact seconds for every JSON reader, at an eighth of the cost of `json.dumps`."""

TOTALS_EVERY = 4096
"""Bytes of steps after which they are told again: seldom enough to add little, and often enough to stand among the last 16 KB."""
_TOTALS = (
    ',"totals":{"at":%d,"steps":%d,"rows":%d,"phases":[' + ",".join(["%de-9"] * len(PHASES)) + '],"samples":%d,"timed":%de-9,"memory":%d}'
)
"""What all lines so far come to, so that a long file needs not be read whole: see `Totals`."""

_LOGS: dict[Path, "RankLog"] = {}
"""The files of this process: two timers on one path share a writer and go on counting."""

_WITHOUT_FILE: "weakref.WeakSet[Source]" = weakref.WeakSet()
"""Recordings without a file that are closed at exit: those that have an alarm."""


class Source(Protocol):
    """Where the steps of a file come from: a `Recording`."""

    clock: Clock | None
    device: int | None

    @property
    def notes(self) -> tuple[str, ...]: ...

    def harvest(self) -> list[Row]: ...

    def close(self) -> None: ...


def rank() -> int:
    """Number of this process in its launch, from the environment that torchrun sets; 0 outside."""
    return number_or_default("RANK", 0)


def notes_on_environment() -> list[str]:
    """What is wrong with the variables that a launch sets, and what counts instead: who only watches a loop does not end it."""
    notes = []
    try:
        run_directory.in_environment()
    except ValueError as error:
        notes.append(f"{error}. Until then the steps are not written")
    for name, default in {"RANK": 0, "WORLD_SIZE": 1}.items():
        try:
            number_in_environment(name, default, least=default)
        except ValueError as error:
            notes.append(f"{error}. Until then {default} counts")
    return notes


def default_path() -> Path | None:
    """The file of this rank in the run directory that the launcher names in the environment, if any."""
    with contextlib.suppress(ValueError):
        if run_dir := run_directory.in_environment():
            return run_dir / run_directory.rank_file(rank())
    return None


def steps_written() -> int | None:
    """Steps that this process has written so far; None = it measures none."""
    return sum(log._steps for log in _LOGS.values()) if _LOGS else None


def attach(path: Path, recording: Source) -> "RankLog":
    """Write the steps of a recording to `path` from now on.

    Raises:
        OSError: the file cannot be opened.
    """
    path = path.absolute()
    log = _LOGS.get(path)
    if log is None or (log.closed and not path.exists()):
        log = _LOGS[path] = RankLog(path)
    log.attach(recording)
    return log


def close_at_exit(recording: Source) -> None:
    """Close a recording that has no file when this process ends, so that its alarm tells what it still holds."""
    _WITHOUT_FILE.add(recording)


def can_take(lock: threading.Lock) -> bool:
    """Can this thread take a lock within 0.1 s? It never can if it holds the lock itself."""
    if taken := lock.acquire(timeout=0.1):
        lock.release()
    return taken


def current_device() -> int | None:
    """Index of the CUDA device that is current in this thread; None if this process does not use CUDA yet."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else None


def peak_bytes(device: int | None = None) -> int:
    """Peak bytes so far: allocated on the device if this process uses CUDA, else resident in the host's memory.

    Without a device: on the one that holds most; which one is current says nothing in a thread that did not choose it.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count()) if device is None else [device]
        return max(int(torch.cuda.max_memory_allocated(index)) for index in devices)
    return _peak_resident()


def _peak_resident() -> int:
    """Most bytes of main memory that this process had; not `ru_maxrss`, which a process inherits from the one that started it."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


class Totals:
    """What the lines of one file come to.

    Attributes:
        steps: in all.
        rows: lines that are no steps.
        phases: nanoseconds per phase, of all steps but the first `MAX_WARMUP`.
        samples: of the steps among those whose samples are known.
        timed: nanoseconds of these.
        memory: peak bytes of the process.
        untold: bytes of steps since the totals were written last.
    """

    def __init__(self) -> None:
        self.steps = self.rows = self.samples = self.timed = self.memory = self.untold = 0
        self.phases = [0] * len(PHASES)

    def add(self, rows: list[Row], memory: int) -> None:
        """Add steps, and what memory was read after them."""
        for *phases, samples in rows[max(0, MAX_WARMUP - self.steps) :]:
            self.phases = [*map(operator.add, self.phases, phases)]
            if samples is not None:
                self.samples, self.timed = self.samples + samples, self.timed + sum(phases)
        self.steps, self.memory = self.steps + len(rows), max(self.memory, memory)

    def text(self, at: int) -> str:
        """As a line has them that begins at this place of its file: where it stands elsewhere, others have written to the file, too."""
        return _TOTALS % (at, self.steps, self.rows, *self.phases, self.samples, self.timed, self.memory)


def lines_of(rows: list[Row], start: int, totals: Totals, *, at: int, memory: int, cpu: float) -> str:
    """The lines of steps; the last one also has what was read after them and, now and then, the totals.

    Args:
        rows: rows of the steps, in their order.
        start: number of the first one.
        totals: of the file so far, to which these are added.
        at: bytes in the file before them.
        memory: peak bytes of the process.
        cpu: CPU seconds of the process and its workers.
    """
    lines = "".join([_LINE % (number, *row) for number, row in enumerate(rows, start)]).replace("None", "null").removesuffix("}\n")
    totals.add(rows, memory)
    totals.untold += len(lines)
    told = ""
    if totals.untold >= TOTALS_EVERY:
        told, totals.untold = totals.text(at + lines.rfind("\n") + 1), 0
    return f'{lines},"memory":{memory},"cpu":{cpu:.3f}{told}}}\n'


class RankLog:
    """One rank's file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: Exception | None = None
        """Why it is not written any more; the training goes on without it."""
        self._recordings: list[Source] = []
        self._steps = 0
        self._lock = threading.Lock()
        self._writer: run_directory.LineWriter | None = None
        self._headed = False
        self._totals = Totals()
        self._size = 0  # of what was written here
        self._stop = threading.Event()

    @property
    def closed(self) -> bool:
        """Is no recording attached?"""
        return self._writer is None

    @property
    def free(self) -> bool:
        """Can this thread write a row, without waiting for long?"""
        return can_take(self._lock)

    def attach(self, recording: Source) -> None:
        """Take the steps of one more recording."""
        with self._lock:
            if self._writer is None and self.failed is None:
                self._writer = run_directory.LineWriter(self.path)
                self._stop = threading.Event()
                threading.Thread(target=self._follow, args=(self._stop,), name="workbench-ranklog", daemon=True).start()
            self._recordings.append(recording)

    def detach(self, recording: Source) -> None:
        """Write the remaining steps of a recording; close the file if it was the last one."""
        with self._lock:
            if recording in self._recordings:
                self._recordings.remove(recording)
                with self._unless_it_fails():
                    if recording.clock:
                        notes = [self._row({"note": note}) for note in recording.notes if not note.startswith(WARNING)]
                        self._write(self._header(recording) + "".join(notes))
            if not self._recordings:
                self._close()

    def flush(self) -> None:
        """Write the steps finished since the last flush."""
        with self._lock, self._unless_it_fails():
            rows = [row for recording in self._recordings for row in recording.harvest()]
            if rows and self._writer:
                recording = next(r for r in self._recordings if r.clock)
                header, memory, cpu = self._header(recording), peak_bytes(recording.device), cpu_of_tree(os.getpid())
                at = self._size + len(header.encode())
                self._write(header + lines_of(rows, self._steps, self._totals, at=at, memory=memory, cpu=cpu))
                self._steps += len(rows)

    def line(self, row: Row) -> str:
        """The line of a step that comes after all that were written; it is not written."""
        return (_LINE % (self._steps, *row)).replace("None", "null")

    def say(self, row: dict[str, Any]) -> None:
        """Write a row that is not a step."""
        with self._lock, self._unless_it_fails():
            header = next((self._header(recording) for recording in self._recordings if recording.clock), "")
            self._write(header + self._row(row))

    def go_on(self, done: int) -> None:
        """Give the next step the number `done`."""
        with self._lock:
            self._steps = done

    def forget(self) -> None:
        """Write nothing more in a forked child, where the parent's thread does not exist and its lock may be held for ever."""
        self._lock, self._recordings, self._writer = threading.Lock(), [], None

    def _follow(self, stop: threading.Event) -> None:
        while not stop.wait(INTERVAL):
            self.flush()

    def _header(self, recording: Source) -> str:
        if self._headed:
            return ""
        self._headed = True
        clock, device = recording.clock, "cpu"
        if clock == "device":
            device = sys.modules["torch"].cuda.get_device_name(recording.device)
        world_size = number_or_default("WORLD_SIZE", 1)
        return self._row({"rank": rank(), "world_size": world_size, "clock": clock, "pid": os.getpid(), "device": device})

    def _row(self, row: dict[str, Any]) -> str:
        """The line of a row that is no step."""
        self._totals.rows += 1
        return json.dumps(row) + "\n"

    def _write(self, text: str) -> None:
        if self._writer and text:
            self._writer.append(data := text.encode())
            self._size += len(data)

    @contextlib.contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """An error inside ends the file and is printed once; the training goes on."""
        try:
            yield
        except Exception as error:
            self._close()
            if self.failed is None:
                self.failed = error
                why = str(error) if isinstance(error, OSError) else repr(error)
                print(f"workbench: steps are no longer recorded: {why}", file=sys.stderr, flush=True)

    def _close(self) -> None:
        self._stop.set()
        if self._writer:
            self._writer.close()
            self._writer = None


def _at_exit() -> None:
    for recording in [*(recording for log in _LOGS.values() for recording in log._recordings), *_WITHOUT_FILE]:
        with contextlib.suppress(RuntimeError):  # the device may be beyond an answer; the steps read before are written already
            recording.close()


def _in_child() -> None:
    for log in _LOGS.values():
        log.forget()
    _LOGS.clear()
    _WITHOUT_FILE.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
