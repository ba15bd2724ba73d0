"""Shows the progress of a run or a long call: in a terminal or a notebook a line that is written over itself, in a log one now and then."""

import contextlib
import functools
import math
import os
import select
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from workbench.core import units
from workbench.core.checks import is_number
from workbench.core.run_directory import CHECKPOINTS

PAUSE, LOG_PAUSE = 0.25, 30.0
"""Seconds between two looks in a terminal or a notebook; and between two lines in a log, such as that of CI."""
ENV = "WORKBENCH_PROGRESS"
"""Variable that keeps lines out of logs if it is "off"."""
INTERRUPTED = "stopped by Ctrl-C"
"""How the note on a measurement that was interrupted begins."""
PATIENCE = 3.0
"""Seconds after which a prediction says that it goes on."""
_CELLS = 20
_waiting = list["Waiting"]()
"""The calls under way in the main thread that have a line, the innermost last."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


class BudgetError(Exception):
    """The budget is spent; whoever catches it has what is known by then."""


@contextlib.contextmanager
def say_what_was_interrupted(name: str) -> Iterator[None]:
    """Inside, Ctrl-C raises a KeyboardInterrupt that says so, without the lines of code at which it came."""
    try:
        yield
    except KeyboardInterrupt as error:
        said = str(error) or f"{name} was {INTERRUPTED} before it knew anything; all processes it started have ended"
        raise type(error)("\n".join([said, *getattr(error, "__notes__", [])])) from None


def begins(what: str) -> None:
    """Say on stderr what begins: in a log the first progress line comes late."""
    if os.environ.get(ENV) != "off" or sys.stderr.isatty():
        print(f"workbench: {what}", file=sys.stderr, flush=True)


def left_by(path: Path) -> str:
    """What can be done with the directory of a run that was interrupted."""
    there = shlex.quote(str(path))
    whole = any(file.stem.removeprefix("step").isdecimal() for file in (path / CHECKPOINTS).glob("step*.pt"))  # parts of ranks come before
    resume = f'to go on with it: wb.launch(resume="{path}")\n' * whole
    return f"what it measured: workbench report {there}\n{resume}to delete it: rm -r {there}"


class ProgressLine:
    """A line that is rewritten while something runs. Where stderr is no terminal, such as in a log, there is a new line each LOG_PAUSE.

    Nothing is written in a notebook, unless `notebook` is set, nor in ranks, whose logs are the program's own.
    """

    def __init__(self, text: Callable[[], str], *, notebook: bool = False, after: float = 0.0, announced: bool = False) -> None:
        """
        Args:
            text: gives the line; called only when the line is shown.
            after: seconds during which nothing is shown.
            announced: in a log, show it at once, too.
            notebook: show it in a notebook, too: below the cell that runs, and gone at the end; not where the variable CI is set.
        """
        self._text, self._shown = text, False
        self._cell = _CellOutput.here() if notebook and not os.environ.get("CI") else None  # there, outputs are compared
        self._live = self._cell is not None or (sys.stderr is not None and sys.stderr.isatty())
        quiet = os.environ.get(ENV) == "off" or "RANK" in os.environ or sys.stderr is None or _kernel_shell() is not None
        self._pause = PAUSE if self._live else math.inf if quiet else LOG_PAUSE
        self._next = time.monotonic() + (after if self._live or (announced and self._pause < math.inf) else self._pause)

    def show(self) -> None:
        """Write the line, unless that was done a moment ago."""
        if time.monotonic() >= self._next:
            self._next, self._shown = time.monotonic() + self._pause, True
            self._write(self._text())

    def close(self, last: object) -> None:
        """Replace the line, if one was shown, by a last one."""
        if not (self._shown and self._live):
            return
        if self._cell:
            self._cell.clear()
        else:
            self._write(f"{last}\n")

    def _write(self, text: str) -> None:
        if self._cell:
            self._cell.show(text)
        else:
            sys.stderr.write(f"\r\x1b[2K{text}" if self._live else f"{text}\n")
            sys.stderr.flush()


class _CellOutput:
    """An output of the notebook cell that runs: a text that can be replaced."""

    _start: int | None = None  # messages that the kernel had sent when the cell began; None = not known
    _sent = _cleared = 0  # messages of the cell that were lines; how often all outputs of a cell were removed

    def __init__(self, shell: Any, publish: Callable[..., object]) -> None:
        self._shell, self._publish, self._id = shell, publish, uuid.uuid4().hex
        self._shown_since: int | None = None

    @classmethod
    def here(cls) -> Self | None:
        """That of the running cell; None outside of a notebook, and in threads, which belong to no cell."""
        shell = _kernel_shell()
        publish = getattr(getattr(shell, "display_pub", None), "publish", None)
        return cls(shell, publish) if publish is not None and threading.current_thread() is threading.main_thread() else None

    @staticmethod
    def cell_begins(*_: object) -> None:
        """Note how many messages the kernel has sent so far."""
        _CellOutput._start, _CellOutput._sent = _messages(_kernel_shell()), 0

    def show(self, text: str) -> None:
        self._send({"text/plain": text})

    def clear(self) -> None:
        """Leave nothing of it in the notebook that is stored: no output where the cell has no other one, else an empty one."""
        if self._shown_since != self._cleared:  # another line, inside of this one, has removed it
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if self._start is not None and _messages(self._shell) == self._start + self._sent:
            self._shell.display_pub.clear_output()
            _CellOutput._cleared += 1
            _CellOutput._sent += 1
        else:
            self._send({})

    def _send(self, data: dict[str, str]) -> None:
        self._publish(data, transient={"display_id": self._id}, update=self._shown_since == self._cleared)
        self._shown_since = self._cleared
        _CellOutput._sent += 1


def _messages(shell: Any) -> int | None:
    """How many messages a kernel has sent; None = not known."""
    count = getattr(getattr(getattr(shell, "kernel", None), "session", None), "message_count", None)
    return count if isinstance(count, int) else None


def _kernel_shell() -> Any:
    """The shell of the notebook kernel that this process is; None = it is none."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)  # None also where another package has put a stub there
    shell = get_shell() if callable(get_shell) else None
    return shell if getattr(shell, "kernel", None) is not None else None


class Waiting:
    """What a long call does now, and what it knows so far, in a line; the line goes at the end.

    >>> line = Waiting("diagnose", 60)
    >>> line.say("no optimizer step", "no loader: 61 % less so far")
    >>> line.words(8)
    'diagnose: no loader: 61 % less so far; now: no optimizer step … 8 s of at most 60 s'
    """

    def __init__(self, name: str, budget_s: float | None, *, begin: str = "starting", after: float = 0.0) -> None:
        """
        Args:
            name: of the function that was called.
            budget_s: seconds that it may take; None = there is no limit.
            begin: what it will do.
            after: seconds during which nothing is shown.
        """
        self._name, self._budget, self.now, self._known = name, budget_s, begin, ""
        self._began = time.monotonic()
        announced = after == 0 and not _waiting  # no call inside of another
        self._line = ProgressLine(lambda: self.words(self.seconds), notebook=True, after=after, announced=announced)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds that are left of the budget, below 0 when it is spent; inf = there is no limit."""
        return math.inf if self._budget is None else self._budget - self.seconds

    def begin_again(self) -> None:
        """Count from now on."""
        self._began = time.monotonic()

    def spend(self) -> None:
        """Count the budget as spent from now on, as after Ctrl-C: what has to be done yet takes as little time as possible."""
        self._budget = self.seconds

    def say(self, now: str, known: str | None = None) -> None:
        """Tell what comes now, and what is known so far (None = nothing new)."""
        self.now, self._known = now, self._known if known is None else known
        self.tick()

    def tick(self) -> None:
        """Show the time that has passed."""
        self._line.show()

    def words(self, seconds: float) -> str:
        """The line after so many seconds."""
        return status_text(self._name, self.now, self._known, seconds, self._budget)

    def __enter__(self) -> Self:
        self.tick()
        if threading.current_thread() is threading.main_thread():
            _waiting.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _waiting:
            _waiting.remove(self)
        self._line.close(f"{self._name}: {f'{self._known} · ' * bool(self._known)}{_whole(self.seconds)}")


def predicts(what: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Show the time that a function takes once it is more than a few seconds, unless it is called by one that has a line."""

    def wrapped(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with Waiting(function.__name__, None, begin=what, after=PATIENCE) if not _waiting else contextlib.nullcontext():
                return function(*args, **kwargs)

        return call

    return wrapped


def tick(now: str | None = None) -> None:
    """Show the time that has passed, and what comes now (None = as before), on the line of the call under way, if there is one."""
    if _waiting and threading.current_thread() is threading.main_thread():
        _waiting[-1].say(_waiting[-1].now if now is None else now)


def status_text(name: str, now: str, known: str, seconds: float, budget_s: float | None) -> str:
    """What a long call does now and knows so far, `seconds` after its start, in one line."""
    limit = "" if budget_s is None else f" of at most {_whole(budget_s)}"
    if budget_s is not None and seconds > budget_s:
        limit = f", its {_whole(budget_s)} are over: it ends as soon as it can"
    begun = f"{known}; now: {now}" if known else now
    return f"{name}: {begun} … {_whole(seconds)}{limit}"


def _whole(seconds: float) -> str:
    """Whole seconds as text: nobody reads tenths while they pass."""
    return f"{seconds:.0f} s" if seconds < 100 else units.seconds(seconds)


def progress_text(
    name: str, done: int, steps: int | None, seconds: float, rows: Sequence[Mapping[str, Any]], limit: float | None = None
) -> str:
    """The progress of a run in one line.

    Args:
        name: name of the run.
        done: number of steps that are done.
        steps: how many there will be; None = not known.
        seconds: since its start.
        rows: what it reported, oldest first: step, loss, samples and seconds since the first step began.
        limit: seconds after which it is stopped; None = there is no limit.

    >>> rows = [{"step": 4, "seconds": 1.6}, {"step": 5, "loss": 2.5, "samples": 80, "seconds": 2.0}]
    >>> progress_text("gpt", 5, 20, 3.0, rows, limit=60)
    'gpt █████░░░░░░░░░░░░░░░ 5/20 · 40.0 samples/s · loss 2.500 · 3.00 s of at most 60 s, about 6 s to go'
    """
    bar = f"{'█' * (_CELLS * done // steps):░<{_CELLS}} {done}/{steps}" if steps else f"{done} steps" if done else ""
    bar = bar if done else f"{bar} starting, no step yet".strip()
    last: Mapping[str, Any] = next((row for row in reversed(rows) if row.get("loss") is not None), {})
    pace = f" · {units.rate(last['samples'] / last['seconds'])}" if last.get("seconds") and last.get("samples") is not None else ""
    loss = f" · loss {last['loss']:.3f}" if last else ""
    most = f" of at most {_whole(limit)}" if is_number(limit, above=0) else ""
    timed = [row for row in rows[-30:] if row.get("seconds") is not None][-11:]  # an evaluation has rows of its own, without
    count, took = (timed[-1][key] - timed[0][key] for key in ("step", "seconds")) if timed else (0, 0.0)
    left = took / count * (steps - timed[-1]["step"]) if steps and count > 0 else 0.0
    return f"{name} {bar}{pace}{loss} · {units.seconds(seconds)}{most}" + f", about {_whole(left)} to go" * (left > 1)


if (_shell := _kernel_shell()) is not None and hasattr(_shell, "events"):
    _shell.events.register("pre_run_cell", _CellOutput.cell_begins)


def has_no_reader(descriptor: int) -> bool:
    """Whether a descriptor is the end of a pipe that nobody reads any more."""
    pipe = select.poll()
    pipe.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0))
