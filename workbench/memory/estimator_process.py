"""Estimator: makes dry runs in a worker process (`python -m workbench.programs.estimate_worker`), so that the caller does not wait.

A dry run replaces functions of torch for the whole process while it lasts, and takes seconds, which would disturb other cells of a
notebook. The worker starts at the first Question, starts again after a crash, and ends with this process. A Question and its Answer,
the log of a dry run, are one line of JSON each; reading it needs numpy only.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from workbench.core.codec import JsonDataclass
from workbench.core.device import Device
from workbench.memory.analysis.log import Event, Mark, MemoryLog, Record
from workbench.runs.entrypoints import ESTIMATE_WORKER, START
from workbench.runs.spec import RunSpec

AXES = ("micro_batch", "sequence", "image")
"""Numbers along which memory is interpolated between dry runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(JsonDataclass):
    """A dry run to make."""

    spec: RunSpec
    """All knobs; nproc_per_node is the number of ranks."""
    device: str | Device = "cuda"
    """Device whose memory behaviour is emulated, as in `estimate_memory`."""
    sequence: int | None = None
    """Length of the batch's sequences; None = the sample's own."""
    image: int | None = None
    """Side of the batch's images in pixels; None = the sample's own."""

    def along(self, axis: str) -> int | None:
        """Its value on one of AXES."""
        value: int | None = self.spec.micro_batch if axis == "micro_batch" else getattr(self, axis)
        return value

    def at(self, axis: str, value: int | None) -> "Question":
        """The same question with another value on one of AXES."""
        if axis == "micro_batch":
            return replace(self, spec=self.spec.replace(micro_batch=value))
        return replace(self, sequence=value) if axis == "sequence" else replace(self, image=value)

    @property
    def key(self) -> str:
        """Equal for equal questions."""
        return repr(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a dry run."""

    log: MemoryLog
    """Every storage of its steps."""
    device: str
    """"cpu", "cuda" or a device's name."""
    rank: int = 0
    """Rank whose memory it is."""
    world_size: int = 1
    """Ranks."""
    sequence: int | None = None
    """Length of its batch's sequences; None = it has none."""
    image: int | None = None
    """Side of its batch's images; None = it has none, or none that are square."""
    first: bool = False
    """The first run of sharded layers of its kind in its process: torch fills caches in it, so its events are not those of later ones."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain = {name: getattr(self, name) for name in ("device", "rank", "world_size", "sequence", "image", "first")}
        return {**plain, "log": log_to_json(self.log)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Answer":
        return cls(**{**value, "log": log_from_json(value["log"])})


_WORDS = ("category", "phase", "module", "op")
_NUMBERS = ("size", "step", "micro", "allocated_at", "freed_at")


def log_to_json(log: MemoryLog) -> dict[str, Any]:
    """A log in columns of JSON; texts are indices of a list."""
    places: dict[str | None, int] = {}
    records: dict[str, list[Any]] = {
        name: [places.setdefault(getattr(record, name), len(places)) for record in log.records] for name in _WORDS
    }
    records |= {name: [getattr(record, name) for record in log.records] for name in _NUMBERS}
    return {
        "words": list(places),
        "records": records,
        "events": [[event[column] for event in log.events] for column in range(3)],
        "marks": [list(mark) for mark in log.marks],
        "modules": log.modules,
        "notes": log.notes,
    }


def log_from_json(value: Mapping[str, Any]) -> MemoryLog:
    """Inverse of `log_to_json`."""
    words: Sequence[Any] = value["words"]
    columns = {name: [words[place] for place in value["records"][name]] for name in _WORDS}
    columns |= {name: value["records"][name] for name in _NUMBERS}
    rows = zip(*columns.values(), strict=True)
    return MemoryLog(
        records=[Record(**dict(zip(columns, row, strict=True))) for row in rows],
        events=list(map(Event, *value["events"])),
        marks=[Mark(*mark) for mark in value["marks"]],
        modules=dict(value["modules"]),
        notes=list(value["notes"]),
    )


LINES = 12
"""Last lines of a worker's output that its error shows."""
PATIENCE = 5.0
"""Seconds to wait for the exit status of a worker that no longer answers."""


class EstimatorError(RuntimeError):
    """The worker ended before it had answered; the message has its last output."""


class Estimator:
    """A process that makes dry runs, one after another. Threads may share it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process ID of the worker; None = it is not running."""
        return None if self._process is None else self._process.pid

    def ask(self, question: Question) -> Answer:
        """Have a dry run made; returns when it has ended.

        Raises:
            ValueError: it cannot be estimated; the message says why.
            EstimatorError: the worker ended; the next question starts another.
        """
        with self._lock:
            answer = self._ask(question)
            if "edited" in answer:  # it has imported what is no longer there
                self._end()
                answer = self._ask(question)
        if "error" in answer:
            raise ValueError(answer["error"])
        return Answer.from_json(answer)

    def _ask(self, question: Question) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(json.dumps({"folder": os.getcwd(), **question.to_json()}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # it is gone, or was just ended by `close`
            line = ""
        if not line:
            raise EstimatorError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> "subprocess.Popen[str]":
        """Start the worker in a session of its own: an interrupt is for the running cell, not for the worker."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _end
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", START, ESTIMATE_WORKER, str(os.getpid())],  # unbuffered: the last words of one that dies
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        return self._process

    def _last_words(self) -> str:
        process, stderr = self._process, self._said
        if process is None or stderr is None:
            return "the process that estimates was ended"
        try:
            code: int | None = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        stderr.seek(0)
        words = stderr.read().decode(errors="replace").strip().splitlines()[-LINES:]
        self._end()
        how = "closed its output" if code is None else f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
        return "\n".join([f"the process that estimates {how} before it answered; the next question starts another", *words])

    def close(self) -> None:
        """End the worker at once."""
        self._end()

    def _end(self) -> None:
        process, stderr = self._process, self._said
        self._process = self._said = None
        if process:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                try:
                    assert stream
                    stream.close()
                except OSError:  # what was not written yet has no reader any more
                    pass
        if stderr:
            stderr.close()

    def __repr__(self) -> str:
        return f"Estimator(pid={self.pid})"


SHARED = Estimator()
"""The estimator of this process; each would hold its own torch in memory."""
atexit.register(SHARED.close)
