"""Estimator: the worker as seen from outside. Started at the first question, started again after a crash, gone with this process."""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from workbench.estimators.wire import Answer, Question

LINES = 12
"""Of what a worker wrote before it ended, for its error."""
PATIENCE = 5.0
"""Seconds that a worker has to end when asked to."""


class EstimatorError(RuntimeError):
    """The worker ended before it had answered; the message has its last words."""


class Estimator:
    """A process that makes fake runs, one after another. Threads may share it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the worker; None while there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, question: Question) -> Answer:
        """Make a fake run; returns when it has ended.

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
        found: dict[str, Any] = json.loads(line)
        return found

    def _start(self) -> "subprocess.Popen[str]":
        """In a session of its own: an interrupt is for the cell that runs, not for the worker."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _end
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "workbench.estimators", str(os.getpid())],  # unbuffered: the last words of one that dies
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        return self._process

    def _last_words(self) -> str:
        process, said = self._process, self._said
        if process is None or said is None:
            return "the process that estimates was ended"
        try:
            code: int | None = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        said.seek(0)
        words = said.read().decode(errors="replace").strip().splitlines()[-LINES:]
        self._end()
        how = "closed its output" if code is None else f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
        return "\n".join([f"the process that estimates {how} before it answered; the next question starts another", *words])

    def close(self) -> None:
        """End the worker, whatever it does."""
        self._end()

    def _end(self) -> None:
        process, said = self._process, self._said
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
        if said:
            said.close()

    def __repr__(self) -> str:
        return f"Estimator(pid={self.pid})"


SHARED = Estimator()
"""The one of this process: several would each hold torch in memory."""
atexit.register(SHARED.close)
