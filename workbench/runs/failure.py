"""Says why a run failed (Failure), and records the error of a rank in the run directory.

Each rank records its error, with the time on the monotonic clock, before it tears anything down; `root_cause` reads all records.
"""

import contextlib
import mmap
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core import run_directory
from workbench.core.package import is_users, near
from workbench.runs import flight_recorder
from workbench.runs.errors import full_device, is_consequence, symptom_of

if TYPE_CHECKING:
    from workbench.runs.out_of_memory import Held, OutOfMemory


_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+)(,?) in (.+)$', re.MULTILINE)
"""A line of a traceback, or without the comma one of faulthandler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run failed.

    >>> print(Failure(rank=1, kind="exception", message="ValueError: boom", traceback=None, hint="Look at the data."))
    rank 1: ValueError: boom
    Look at the data.
    """

    rank: int | None
    """The rank that failed first; None = none of them (the time limit, the launcher)."""
    kind: str
    """One of `errors.KINDS`."""
    message: str
    """Type and text of the error, or how the process ended."""
    traceback: str | None
    """Its traceback; the last lines on its stderr, where it left no record; None where the message says all."""
    hint: str | None
    """What to do, where that is known."""
    memory: "OutOfMemory | None" = None
    """Why memory ran out, where it did."""
    stderr: str | None = None
    """The file with what the rank printed to stderr; None = it printed nothing, or it is not known."""

    @property
    def place(self) -> str:
        """The line of the user's code at which it failed, as `train.py:41 in main`; "" = the traceback has none. Paths of files in the
        current folder or below it are relative.
        """
        file, number, name = self._frame
        return f"{near(file)}:{number}{f' in {name}' * (name != '<module>')}" if file else ""

    @property
    def caller(self) -> str:
        """The line of the user's code that called `place` through a library, as `train.py:31`, such as the line of the loop that called the
        model; "" = there is none.
        """
        frames = self._frames
        users = [is_users(file) for file, _, _ in frames]
        first = users.index(True) if True in users else len(users)
        if False not in users[first:] or True not in users[users.index(False, first) :]:
            return ""
        file, number, _ = frames[users.index(False, first) - 1]
        return f"{near(file)}:{number}"

    @property
    def _frame(self) -> tuple[str, str, str]:
        """File, line and function of that place; three times "" = there is none."""
        return next((frame for frame in reversed(self._frames) if is_users(frame[0])), ("", "", ""))

    @property
    def _frames(self) -> list[tuple[str, str, str]]:
        """File, line and function of each line of the last traceback, the innermost last."""
        if self.rank is None or self.kind == "hang" or self.message.startswith("ended without an error"):
            return []  # the traceback is of others, or the message has the line
        return frames_in(self.traceback)

    @property
    def _in_memory(self) -> bool:
        """Does the reason for which memory ran out name that line?"""
        file, number, _ = self._frame
        return re.search(rf"(?<!\w){re.escape(f'{os.path.basename(file)}:{number}')}(?!\d)", str(self.memory)) is not None

    @classmethod
    def of_launcher(cls, message: str) -> "Failure":
        """A failure that no rank recorded, such as a run that was stopped."""
        return cls(rank=None, kind="launcher", message=message, traceback=None, hint=None)

    @classmethod
    def from_outcome(cls, value: Mapping[str, Any]) -> "Failure":
        """From the outcome of a run of a sweep; fields of a wrong type are left out."""
        text = {name: each if isinstance(each := value.get(name), str) else None for name in ("kind", "message", "traceback", "hint")}
        rank, memory = value.get("rank"), value.get("memory")
        made = cls(
            rank=rank if isinstance(rank, int) else None,
            kind=text["kind"] or "launcher",
            message=text["message"] or "",
            traceback=text["traceback"],
            hint=text["hint"],
        )
        if isinstance(memory, Mapping):
            from workbench.runs.out_of_memory import OutOfMemory

            with contextlib.suppress(ValueError, TypeError):
                return replace(made, memory=OutOfMemory.from_json(memory))
        return made

    def __post_init__(self) -> None:
        if isinstance(self.memory, Mapping):  # as it stands in JSON
            from workbench.runs.out_of_memory import OutOfMemory

            object.__setattr__(self, "memory", OutOfMemory.from_json(self.memory))

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        parts = [
            f"{where}{self.message}",
            *([f"at {self.place}{f', called from {self.caller}' if self.caller else ''}"] if self.place and not self._in_memory else []),
            *([str(self.memory), *self.memory.hints] if self.memory else []),
            *([self.hint] if self.hint else []),
            *([f"what rank {self.rank} printed: {near(self.stderr)}"] if self.stderr else []),
        ]
        return "\n".join(parts)


def frames_in(text: str | None) -> list[tuple[str, str, str]]:
    """File, line and function of each line of the last traceback in a text, the innermost last."""
    dumped = (text or "").rpartition("Current thread 0x")[2]  # of a crash: of this thread, the innermost line first
    last = _FRAME.findall(dumped.rpartition("Traceback (most recent call last)")[2])
    found = last if any(is_users(file) for file, *_ in last) else _FRAME.findall(dumped)
    frames = [(file, number, name) for file, number, _, name in found]
    return frames if found and found[0][2] else frames[::-1]


class RunError(RuntimeError):
    """A run failed. In a notebook this shows the traceback of the rank at fault, not of the launching process.

    Attributes:
        failure: which rank, and why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def _render_traceback_(self) -> list[str]:  # a hook of IPython
        before = (self.failure.traceback or "").splitlines()
        return [*before, *[""] * bool(before), *f"{type(self).__name__}: {self}".splitlines()]


def record(
    error: BaseException, *, run_dir: Path | None = None, rank: int | None = None, held: "Callable[[BaseException], Held] | None" = None
) -> None:
    """Write this rank's error to the run directory, where there is one. A rank's first record stays; a clean `sys.exit()` is no error.

    Args:
        error: what was raised. Call this before anything is torn down: peers fail as soon as a process group goes.
        run_dir: None = the one in the environment.
        rank: None = RANK of the environment, else 0.
        held: gives the tensors that this rank holds; called if memory has run out.
    """
    now = time.monotonic_ns()
    path = _record_file(run_dir, rank)
    if path is None or path.exists() or _is_clean(error):
        return
    worker_ended = _is_of_a_worker(error)
    message = describe(error) + f" ({_WORKER_ENDED})" * worker_ended
    symptom = symptom_of(message)
    value = {
        "rank": int(path.stem.removeprefix("rank")),
        "time_ns": now,
        "kind": symptom.kind if symptom else "exit" if isinstance(error, SystemExit) else "exception",
        "message": message,
        "traceback": _refused_by_argparse(error)[1] or _traceback(error),
        "consequence": is_consequence(message) and not worker_ended,
    }
    if symptom and symptom.kind == "out-of-memory":
        value["memory"] = _explain(error, message, held)
    if value["consequence"] or isinstance(error, RuntimeError):
        value["collectives"] = flight_recorder.last_collectives(3 * flight_recorder.KEPT)
    try:
        path.parent.mkdir(exist_ok=True)
        run_directory.write_json(path, value)
    except OSError:  # the disk is full: the launch has set some bytes aside for this moment
        with contextlib.suppress(OSError):  # a failed write must not hide the error itself
            run_directory.free_reserve(of_the_launch() or path.parents[1])
            run_directory.write_json(path, value)


_WORKER_ENDED = "a worker of the DataLoader ended while it handed over a batch"


def _is_of_a_worker(error: BaseException) -> bool:
    """Is a DataLoader's worker gone that was to hand over a tensor? For torch it is a lost connection, as of another rank."""
    if not isinstance(error, ConnectionError | EOFError | FileNotFoundError):
        return False
    files = {frame.f_code.co_filename.replace("\\", "/") for frame, _ in traceback.walk_tb(error.__traceback__)}
    return all(
        any(file.endswith(end) for file in files) for end in ("torch/utils/data/dataloader.py", "torch/multiprocessing/reductions.py")
    )


def _traceback(error: BaseException) -> str | None:
    """The traceback of an error. For an error of the workbench that no line of the user caused, the traceback of its cause."""
    ours = type(error).__module__.partition(".")[0] == "workbench"
    if not ours or any(is_users(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)):
        return "".join(traceback.format_exception(error))
    return _traceback(error.__cause__) if error.__cause__ else None


RESERVED = 1 << 25
"""Bytes of address space set aside for describing what is held when memory runs out. They are not touched, so no memory is behind them."""
_reserve: list[mmap.mmap] = []


def reserve_memory() -> None:
    """Set RESERVED bytes aside in this process: to list what is alive takes some MB, which are not there once memory has run out."""
    with contextlib.suppress(OSError):
        _reserve.append(mmap.mmap(-1, RESERVED))


def _explain(error: BaseException, message: str, held: "Callable[[BaseException], Held] | None") -> dict[str, Any] | None:
    """Why memory ran out; None if that fails, for want of memory for instance: the error itself is still recorded."""
    with contextlib.suppress(Exception):
        from workbench.runs.out_of_memory import OutOfMemory

        memory = OutOfMemory.parse(message)
        if memory is not None and held is not None:
            with contextlib.suppress(Exception):
                freed = RESERVED * len(_reserve)
                _reserve.clear()
                found = held(error)
                left = None if found.available is None else max(0, found.available - freed)
                memory = OutOfMemory.parse(message, replace(found, available=left))
        return memory.to_json() if memory else None
    return None


def conclude(error: BaseException | None, *, held: "Callable[[BaseException], Held] | None" = None) -> None:
    """Record how a whole program ended: write its error, or delete an earlier record, because the program handled that error."""
    if error is not None and not _is_clean(error):
        record(error, held=held)
    elif path := _record_file(None, None):
        path.unlink(missing_ok=True)


def _record_file(run_dir: Path | None, rank: int | None) -> Path | None:
    where = run_dir or of_the_launch()
    if rank is None:
        text = os.environ.get("RANK", "0")
        rank = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0  # recording an error raises none
    if where is None or (where / run_directory.ERRORS).is_symlink():  # a link leads out of the directory
        return None
    return where / run_directory.ERRORS / f"rank{rank}.json"


def of_the_launch() -> Path | None:
    """The directory of the launch, which is none of its runs where it has several; None = this was not launched. Raises nothing."""
    with contextlib.suppress(ValueError):
        return run_directory.in_environment()
    return None


def _is_clean(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _refused_by_argparse(error: BaseException) -> tuple[str, str]:
    """What argparse said before it left, and with its usage what it printed; "" = it was not argparse that left. The exit has a number."""
    if isinstance(error, SystemExit):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name == "error" and frame.f_code.co_filename.replace("\\", "/").endswith("/argparse.py"):
                parser, message = frame.f_locals["self"], str(frame.f_locals["message"])
                return message, f"{parser.format_usage()}{parser.prog}: error: {message}\n"
    return "", ""


def describe(error: BaseException) -> str:
    """Type and text of an error; for `sys.exit(1)` in an `except` block, of what led to it.

    Where a library of CUDA failed on a full GPU without saying so, that is added (`errors.full_device`).

    >>> describe(ValueError("boom"))
    'ValueError: boom'
    """
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if refused := _refused_by_argparse(error)[0]:
        return f"{text}: {refused} (options of a script: launch(…, args=[…]), in a terminal after --)"
    if isinstance(error, SystemExit) and (cause := error.__cause__ or error.__context__):
        return f"{describe(cause)} (then sys.exit({error.code!r}))"
    return f"{text} ({full})" if (full := full_device(error)) else text
