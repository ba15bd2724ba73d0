"""Reads and writes the files of a run: JSON by atomic rename, append-only JSON lines, tails that follow them, and the lock of a live run.

A run directory is the contract between processes (the kernel, the guard, every rank). So each reader here copes with a writer that is
still writing, has crashed or met a full disk, and each writer leaves only whole lines and whole files.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.core.checks import folder_in_environment, near_folder

FORMAT = 1
"""Number of the directory's layout; a larger one was written by a newer workbench and is refused."""

RUN_JSON, METRICS, LOCK, RESERVE = "run.json", "metrics.jsonl", "guard.lock", "reserve"
LAUNCHER_LOG, ERRORS, LOGS = "launcher.log", "errors", "logs"
NODES, NODE_JSON, BEAT = "nodes", "node.json", "beat"
"""Of a run on several machines: `nodes/<k>/` holds what the guard of machine k writes, and its heartbeat."""
OUT = "{out}"
"""Stands in a script's arguments for a folder of each launch by itself, where the script keeps its checkpoints."""
HANG, HANG_JSON, ASK, HOLD, RENAMED = "hang", "hang.json", "ask", "hold", "renamed"
"""`hang/` holds what ranks without progress write about themselves, the request that all do so, and, in HANG_JSON, who holds up whom."""
JOB, JOB_SCRIPT, JOB_LOG, STOP = "slurm.json", "job.sh", "slurm.log", "stop"
CHECKPOINTS, RESUMES, PREEMPTED = "checkpoints", "resumes.jsonl", "preempted.json"
"""Of a run that went on from a checkpoint: RESUMES has a row for each time, with what was passed over, and why."""
RESTARTS, NEXT = "restarts.jsonl", "next.json"
"""Of a run that may be restarted: a row when a restart is decided, and one after its first step; what the guard starts next."""
FINGERPRINTS, KILL = "fingerprints", "kill.json"
"""Folder of a run whose ranks write a digest of each step; KILL in it says which rank ends itself by SIGKILL, and in which step."""
EVIDENCE, CONTEST, MEMORY, GAP = "evidence.json", "contest.json", "memory", "gap.json"
PROGRESS, FINISH, FINISH_AFTER = "progress.json", "finish", "finish_after"
"""Of an experiment: what it tries now, and what it knows so far; and the request, after Ctrl-C, to end with that."""
EVALUATIONS = "evaluations.jsonl"
"""A row per evaluation of a training: figures, seconds of each rank, and where there are logits figures per class and the worst."""
GRADIENTS, USAGE = "gradients.jsonl", "usage.jsonl"
"""A row of each n-th step with the norm of each layer's gradients; a row now and then of what rank 0's machine did."""
ENVIRONMENT, GIT = "environment.json", "git.json"
"""What rank 0 saw: versions, devices, switches, the imported code and the variables that it names, the identity of the data; and the state
of its folder in git."""
LR_RANGE, DIVERGENCE = "lr_range.json", "divergence.json"
ENERGY = "energy.json"
LINKS = "links.json"
SCALING, COMMUNICATION = "scaling.json", "communication.json"
"""Of the directory of a curve: what is measured. Of a run: its steps with and without the reduction of gradients."""
TRACES = "traces"
"""Folder of what torch's profiler wrote; TensorBoard finds it there."""
ALARM_TRACES = "alarms"
"""Folder of traces that were made at alarms; not among TRACES, which has one file of each rank."""
ENV_RUN_DIR, ENV_RUN_ID, ENV_MACHINE = "WORKBENCH_RUN_DIR", "WORKBENCH_RUN_ID", "WORKBENCH_RUN_MACHINE"
"""Variables of the processes of a run: its directory, its id, and the number of this machine (torchrun may number machines otherwise)."""
ENV_ARGUMENTS = "WORKBENCH_ARGUMENTS"
"""Variable of a watched script: arguments of its loaders and of DDP, as JSON, in place of its own; see `timeline/script_arguments.py`."""
ENV_ALARM = "WORKBENCH_ALARM"
"""Variable of ranks that raise alarms: one of ALARMS."""
ALARMS = {
    "always": "tells since when a phase takes longer, and where",
    "experiments": "also times a small computation at an alarm",
    "trace": "also traces a few steps after an alarm that something became slower",
}
"""What `launch(watch=…)` takes besides True and False, and `watch(alarm=…)` as well."""
STATES = ("queued", "running", "finished", "failed", "stopped", "timeout", "abandoned", "lost")
"""The states that a run can have."""
METRIC_KEYS = frozenset({"step", "steps", "loss", "lr", "samples", "seconds", "grad_norm", "expert_shares", "dropped_tokens"})
"""What every row of METRICS may hold. Any other key is a figure of an evaluation."""
RESERVE_BYTES = 64 * 1024
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DamagedRunError(ValueError):
    """A file of a run directory is missing or cannot be read."""


class DiskFullError(OSError):
    """A line could not be written because the disk, the quota or the file-size limit is used up; the lines before it are whole."""


def experiment_of(info: Mapping[str, Any]) -> str:
    """The kind of experiment that a run.json orders; empty = it is a training."""
    order = info.get("experiment")
    return str(order.get("kind", "")) if isinstance(order, Mapping) else ""


def in_environment() -> Path | None:
    """The run directory that the launcher names in the environment; None = it names none, as outside of a run.

    Raises:
        ValueError: the variable names something that is not a folder.
    """
    folder = folder_in_environment(ENV_RUN_DIR)
    if folder and not os.path.isdir(folder):
        raise ValueError(
            f"the environment variable {ENV_RUN_DIR} is {str(folder)!r:.80}: the directory of a run is allowed, as wb.launch sets it, "
            f"and there is no such folder. Try: unset {ENV_RUN_DIR}"
        )
    return folder


def rank_file(rank: int) -> str:
    """Name of a rank's file of steps: `rank0.jsonl`."""
    return f"rank{rank}.jsonl"


def rank_of(name: str) -> int | None:
    """The rank whose steps a file of this name has; None = it is another file."""
    number = name.removeprefix("rank").removesuffix(".jsonl")
    return int(number) if number.isascii() and number.isdigit() and name == f"rank{number}.jsonl" else None


def noise_file(rank: int) -> str:
    """Name of a rank's file of gradient norms: `noise0.jsonl`."""
    return f"noise{rank}.jsonl"


def ring_file(rank: int) -> str:
    """Name of a rank's file of its last steps: `ring0.json`."""
    return f"ring{rank}.json"


def part_of(path: Path) -> Path:
    """Where a file is written before it is renamed: a path that no other process uses, on any machine or in any container."""
    return path.with_name(f"{path.name}.{platform.node()}-{uuid.uuid4().hex}.part")


def write_json(path: Path, value: object) -> None:
    """Write a whole JSON file by atomic rename: a reader sees the old file or the new one, never half; nothing is left on failure."""
    text = json.dumps(value, indent=1) + "\n"
    part = part_of(path)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise_if_full(path, error)
        raise


Version = tuple[int, int, int]
"""Number, time and size of a run.json, which is replaced when a run ends or goes on."""


def version_of(run_dir: Path) -> Version | None:
    """Which run.json a run has; None where none can be seen, as when it was deleted after the end."""
    try:
        stat = os.stat(run_dir / RUN_JSON)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DamagedRunError: the file is missing, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        folder = path.parent
        if path.name == RUN_JSON and not folder.exists():
            raise DamagedRunError(f"{folder} is not a run directory: there is no such folder{near_folder(folder, RUN_JSON)}") from None
        raise DamagedRunError(f"{path} is missing: {folder} is not a run directory, or its launch was cut off") from None
    except (ValueError, RecursionError) as error:
        raise DamagedRunError(f"{path} is damaged: {error}. The lines of rank*.jsonl beside it may still be whole") from error
    if not isinstance(value, dict):
        raise DamagedRunError(f"{path} is damaged: it holds a {type(value).__name__}, expected a JSON object")
    return value


_INFO: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("id", "name", "launch_dir", "host"), (str, "a string")),
    **dict.fromkeys(("created", "begun", "seconds_before"), ((int, float), "a number")),
    "spec": (dict, "an object"),
}
_OPTIONAL = ("begun", "seconds_before")
_OUTCOME: Mapping[str, tuple[type | tuple[type, ...], type | tuple[type, ...]]] = {
    "seconds": ((int, float), object),
    **dict.fromkeys(("returncode", "stopped_ns", "oom_kills", "memory_limit", "cause"), (int, object)),
    **dict.fromkeys(("exits", "clocks"), (dict, int)),
    "nodes": (dict, dict),
    "kernel": (list, str),
    "error": (dict, object),
}
"""Of an outcome: the type of each value that is there, and of what is in it."""
_OF_LAYOUT = ("nnodes", "nproc_per_node", "micro_batch", "accumulation")
"""Numbers of the layout with which a run went on after ranks were lost."""


def check_info(path: Path, info: Mapping[str, Any]) -> None:
    """Check the values of a run.json that every reader needs.

    Raises:
        DamagedRunError: one is missing, or is not of its type.
    """
    outcome, layout = info.get("outcome"), info.get("layout")
    if outcome is not None and not (isinstance(outcome, dict) and outcome.get("state") in STATES):
        raise DamagedRunError(f"{path} is damaged: its outcome has no state: {short(outcome)}")
    for name, (kinds, inside) in _OUTCOME.items():
        value = (outcome or {}).get(name)
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        numbered = name != "exits" or all(map(str.isdecimal, value or ()))
        if value is not None and not (isinstance(value, kinds) and all(isinstance(part, inside) for part in parts) and numbered):
            raise DamagedRunError(f"{path} is damaged: the {name} of its outcome is {short(value)}")
    if layout is not None and not (isinstance(layout, dict) and all(isinstance(layout.get(name, 1), int) for name in _OF_LAYOUT)):
        raise DamagedRunError(f"{path} is damaged: its layout is {short(layout)}")
    for name, (kind, expected) in _INFO.items():
        if name not in info and name not in _OPTIONAL:
            raise DamagedRunError(f"{path} is damaged: it has no {name}")
        value = info.get(name, 0 if name in _OPTIONAL else None)
        if name == "id" and isinstance(value, str) and not (0 < len(value) <= 255 and value.isprintable()):  # a part of arguments
            raise DamagedRunError(f"{path} is damaged: its id is {short(value)}, expected up to 255 letters, digits and signs")
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int | float) and not abs(value) < 2**53):
            raise DamagedRunError(f"{path} is damaged: its {name} is {short(value)}, expected {expected}")


def short(value: object, most: int = 60) -> str:
    """A value for a message, cut to some letters."""
    try:
        return f"{value!r:.{most}}"
    except ValueError:  # a whole number of more digits than Python writes
        return "a number with thousands of digits"


def raise_if_full(path: Path, error: OSError, needed: str = "") -> None:
    """Raise DiskFullError if an error means that `path` could not grow; `needed` says how much room it takes.

    Raises:
        DiskFullError: it names the path, what is free there, and what to do.
    """
    if error.errno in _FULL:
        raise DiskFullError(error.errno, full_message(path, error.errno, needed)) from error


def full_message(path: Path, code: int | None = None, needed: str = "") -> str:
    """The error message when `path` could not grow: how much is free, and what to do; `code` is the `errno` of the attempt, if known."""
    if code == errno.EFBIG:
        return f"{path} may not grow any more: files of this process have a limit (ulimit -f). Raise it before the program starts"
    free = "unknown"
    with contextlib.suppress(OSError):
        stat = os.statvfs(path.parent)
        free = f"{stat.f_bavail * stat.f_frsize:,} bytes"
    return f"no space to write {path} (free there: {free}{needed}): make room, or start the run with runs_dir= on another disk"


def free_reserve(run_dir: Path) -> None:
    """Free the bytes set aside at launch, so that the outcome of a run can be written to a full disk."""
    if (run_dir / RUN_JSON).is_file():  # elsewhere a file of this name is somebody else's
        (run_dir / RESERVE).unlink(missing_ok=True)


def log_files(run_dir: Path) -> list[tuple[Path, int]]:
    """The files with what the ranks of a launch printed, each with its rank. torchrun names them by the local rank."""
    found = sorted(run_dir.glob(f"{LOGS}/*/attempt_*/*/std*.log"))
    logs = [(path, int(path.parent.name)) for path in found if path.parent.name.isdecimal()]
    if not (run_dir / NODES).exists():
        return logs
    for folder in sorted((run_dir / NODES).iterdir()):
        with contextlib.suppress(DamagedRunError):  # a machine that has not said anything yet
            ranks = read_json(folder / NODE_JSON).get("ranks")
            if not (isinstance(ranks, dict) and all(isinstance(rank, int) for rank in ranks.values())):
                continue
            if folder.name == "0":
                logs = [(path, ranks.get(str(local), local)) for path, local in logs]
                continue
            paths = sorted(folder.glob(f"{LOGS}/*/attempt_*/*/std*.log"))
            logs += [(path, ranks[path.parent.name]) for path in paths if path.parent.name in ranks]
    return logs


def launcher_logs(run_dir: Path) -> list[Path]:
    """What torchrun printed, on each machine."""
    return [run_dir / LAUNCHER_LOG, *sorted(run_dir.glob(f"{NODES}/*/{LAUNCHER_LOG}"))]


class LineWriter:
    """Append-only JSON lines. Every call appends whole lines or none.

    JSON has no NaN and no infinity: they are written as the texts "NaN", "Infinity" and "-Infinity", which LineTail reads as numbers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._size = os.fstat(self._fd).st_size

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per row.

        Raises:
            DiskFullError: there was no room; the file was cut back to its last whole line.
        """
        self.append("".join(_line(row) for row in rows).encode())

    def append(self, data: bytes) -> None:
        """Append lines that are text already, each with its line feed.

        Raises:
            DiskFullError: as `write` does.
        """
        try:
            written = os.write(self._fd, data) if data else 0
            while written < len(data):  # a nearly full disk takes a part first and refuses at the next call
                written += os.write(self._fd, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise_if_full(self.path, error)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def cut_to_whole_lines(path: Path) -> None:
    """Remove an unfinished last line, before another process appends to the file."""
    keep_rows(path, lambda row: True)


def keep_rows(path: Path, keep: Callable[[Mapping[str, Any]], object]) -> None:
    """Remove the rows of a JSON-lines file for which `keep` is false, lines that are no row, and an unfinished last line.

    The file is replaced, so that a tail of the old one sees that it has to begin anew. Without a change nothing is written.
    """
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    kept = b"".join(line for line in lines if line.endswith(b"\n") and (row := parse_row(line)) is not None and keep(row))
    if kept == data:
        return
    part = part_of(path)
    try:
        part.write_bytes(kept)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise_if_full(path, error)
        raise


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SPELLINGS = tuple(f'"{text}"'.encode() for text in _NOT_FINITE)


def _line(row: Mapping[str, Any]) -> str:
    """A row as a line of strict JSON."""
    try:
        return json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_spelled(row), separators=(",", ":"), allow_nan=False) + "\n"


def _spelled(value: Any) -> Any:
    """A value with numbers that JSON does not have as texts."""
    if isinstance(value, Mapping):
        return {key: _spelled(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(part) for part in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    """The inverse of `_spelled`."""
    if isinstance(value, dict):
        return {key: _read(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_read(part) for part in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def parse_row(line: bytes) -> dict[str, Any] | None:
    """A line's JSON object; None = it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    if any(text in line for text in _SPELLINGS):
        return {key: _read(value) for key, value in row.items()}
    return row


class _Tail:
    """New whole lines of a file that another process appends to."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self._offset, self._rest = start, b""
        self._file: tuple[int, int] | None = None
        self.anew = False
        """Did the last read begin anew, because the file was replaced (a run that went on from a checkpoint)?"""

    def _lines(self) -> list[bytes]:
        return self._new().split(b"\n")[:-1]

    def _new(self) -> bytes:
        """New whole lines, with their line feeds."""
        self.anew = False
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                before, self._file = self._file, (stat.st_dev, stat.st_ino)
                if before is not None and (before != self._file or stat.st_size < self._offset):
                    self._offset, self._rest, self.anew = 0, b"", True
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        data = self._rest + data if self._rest else data
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        return data[:end]


class BytesTail(_Tail):
    """New whole lines, as they are."""

    def read(self) -> bytes:
        """The lines appended since the last call, each with its line feed."""
        return self._new()


class LineTail(_Tail):
    """New whole lines of a growing JSON-lines file; a file that is not there yet has none."""

    damaged, first_damage = 0, ""
    """Lines that were left out so far, and the first of them."""

    def read(self, salvage: bool = False) -> list[dict[str, Any]]:
        """The rows appended since the last call.

        Args:
            salvage: leave out what is no row, and count it in `damaged`.

        Raises:
            DamagedRunError: a whole line is not a JSON object; the message names the file and shows the line.
        """
        rows = []
        before = self._offset, self._rest
        lines = self._lines()
        if self.anew:
            self.damaged, self.first_damage = 0, ""
        for line in lines:
            row = parse_row(line)
            if row is None and salvage:
                self.damaged += 1
                self.first_damage = self.first_damage or f"{line[:80]!r} is not a JSON object"
                continue
            if row is None:
                self._offset, self._rest = before  # the next read says so again: no row is lost silently
                raise DamagedRunError(f"{self.path} is damaged: {line[:80]!r} is not a JSON object")
            rows.append(row)
        return rows


class TextTail(_Tail):
    """New whole lines of a growing log; a carriage return (a progress bar) keeps the last state of its line."""

    def read(self, last: bool = False) -> list[str]:
        """The lines appended since the last call; with `last`, the unfinished one too."""
        lines = self._lines()
        self._rest = b"\r".join(self._rest.rsplit(b"\r", 2)[-2:])  # a bar that never ends its line is kept in its last state only
        if last and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace") for line in lines]


def is_locked(path: Path) -> bool:
    """Does a living process hold the lock on `path`? The kernel frees it when its holder ends, however it ends."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)
