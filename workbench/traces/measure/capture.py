"""Captures a trace of some steps in this process, after the prefetch queue is emptied, and times steps without the profiler beside them."""

import contextlib
import gzip
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.core import run_directory
from workbench.core.progress import INTERRUPTED, Waiting
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.observe import check_arguments, device_of, discover_training
from workbench.harness.restore import SavedState
from workbench.traces.analysis.captured import Captured
from workbench.traces.measure.profiler import keep_cupti_for_graphs, why_no_profiler, without_kineto_lines

SETTLING = 3
"""Steps after the queue was emptied, before anything counts."""
READING = 1.3
"""Seconds that it takes to write a trace and to read it, over those to write it. Measured: 1.2, of 1.4 million events."""
LEVEL = 5
"""Of gzip: its own 9 takes several times as long for a few per cent."""
FETCH = "enumerate(DataLoader)#Feed.__next__"
"""The mark around waiting for a batch, start-ups of a pass included; readers of traces know its first word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Data that the profiler records in addition to operators."""

    shapes: bool = True
    """Of the inputs of operators."""
    stacks: bool = False
    """Python's frames: expensive."""
    memory: bool = False
    """Every request for memory."""
    flops: bool = False
    """Of operators whose formula torch knows; they are in the profiler's own tables, not in the file."""


def capture(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    steps: int,
    into: Path,
    options: Options | None = None,
    model: Any = None,
    optimizer: Any = None,
    line: Waiting | None = None,
) -> Captured:
    """Trace some steps; everything is left as it was.

    The order is: warm up, empty the prefetch queue (a full one hides a slow loader), settle, half of the plain steps, the traced ones, the
    other half. The profiler has a schedule with one warm-up step and one cycle, so that the file has marks of steps and nothing else.

    Args:
        step: `step(batch)` does one optimizer step.
        loader: gives the batches of the step.
        steps: how many are traced, and how many are timed without the profiler.
        into: the directory; the file has the name that TensorBoard's profiler plugin looks for.
        options: what is recorded of each step.
        model: the module, or several; None = those that the step uses.
        optimizer: what updates it; None = found as well.
        line: shows the progress, and has the budget; None = there is no limit.

    Raises:
        DiagnoseError: step cannot be called so.
        ValueError: the loader is empty, or ends too early; a profiler is running already; the directory cannot be written.
        KeyboardInterrupt: Ctrl-C came before the first traced step was over.
    """
    check_arguments(step, 1.0)
    if why := why_no_profiler():
        raise ValueError(f"{why}. Try again when it has ended")
    notes: list[str] = []
    training = discover_training(step, model, optimizer, loader, notes)
    device = device_of(training.models)
    _make(into)
    captured = Captured(path=into / file_name(), notes=notes)
    with contextlib.ExitStack() as undo:
        undo.callback(SavedState(training).restore)
        run = _Run(step, undo.enter_context(Feed(loader)), device, line or Waiting("trace", None))
        try:
            _take(run, captured, steps, options or Options())
        except Exhausted:
            raise ValueError(
                f"the loader could be read only once, and it ended after {run.feed.batches} batches: give one that has at least "
                f"{2 * steps + SETTLING + 4}, or that can be read again"
            ) from None
    write_captured(captured)
    return captured


def _make(into: Path) -> None:
    try:
        into.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(into, os.W_OK) else "it cannot be written"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise ValueError(f"into={str(into)!r}: no traces can be put there ({why}): give a directory that can be made or written")


def write_captured(captured: Captured) -> None:
    """Write the facts about a trace into a file beside it.

    Raises:
        OSError: the disk is full.
    """
    run_directory.write_json(Captured.beside(captured.path), captured.to_json())


def file_name(prefix: str = "") -> str:
    """File name of a trace of this process: `host_pid.nanoseconds.pt.trace.json.gz`, as TensorBoard's profiler plugin expects it."""
    host = re.sub(r"[^\w-]", "-", socket.gethostname())
    return f"{prefix}{host}_{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"


def export(profiler: Any, path: Path, half: str = "") -> None:
    """Write what a profiler has recorded, packed: a whole file or none.

    Args:
        profiler: a profiler of torch that has ended.
        path: path of the file to write.
        half: the mark of a step that was interrupted, and is not to be counted.

    Raises:
        OSError: the disk is full.
    """
    plain, packed = (path.with_name(f".{path.name}.{end}") for end in ("json", "part"))  # no reader of traces takes these for one
    try:
        profiler.export_chrome_trace(str(plain))
        if half:
            text = plain.read_text(encoding="utf-8").replace(f'"{half}"', '"interrupted step"')
            plain.write_text(text, encoding="utf-8")
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=LEVEL) as target:
            shutil.copyfileobj(source, target, 2**20)
        packed.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


Mark = tuple[float, torch.cuda.Event | None]


class TimedStep:
    """Times a step, in pieces: each from a batch to the request for the next batch, or to the end of the step.

    A device works later than the host that gives it its work, so that there its own events are the clock: from the end of the work before
    the piece to the end of the work in it, or as long as the host takes where that is longer.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Nothing is marked yet.

        Args:
            device: that computes; None = the current one, if this process uses CUDA.
        """
        self._device = device
        self._begun: Mark | None = None
        self._pieces: list[tuple[Mark, Mark]] = []

    def begin(self) -> None:
        """A batch was returned."""
        self._begun = self._mark()

    def pause(self) -> None:
        """The loop waits for the next batch, or the step is over."""
        if self._begun is not None:
            self._pieces.append((self._begun, self._mark()))
            self._begun = None

    @property
    def seconds(self) -> float | None:
        """Seconds of all pieces, when the device has finished them; None without any."""
        return sum(_between(*piece) for piece in self._pieces) if self._pieces else None

    def _mark(self) -> Mark:
        event = None
        if torch.cuda.is_initialized() and (self._device is None or self._device.type == "cuda"):  # type: ignore[no-untyped-call]
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return time.perf_counter(), event


def seconds_of(laps: list[TimedStep]) -> list[float]:
    """Seconds of the steps in which something was marked; waits for the device."""
    return [seconds for lap in laps if (seconds := lap.seconds) is not None]


def _between(start: Mark, end: Mark) -> float:
    (begun, first), (ended, last) = start, end
    if first is None or last is None:
        return ended - begun
    try:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
    except (RuntimeError, ValueError):  # they are of two devices
        return ended - begun


class _Run:
    """Takes steps, while the budget lasts."""

    def __init__(self, step: Callable[[Any], Any], feed: Feed, device: torch.device, line: Waiting) -> None:
        self._step, self.feed, self._device, self.line = step, feed, device, line
        self.cut = ""  # why fewer steps were taken than were to be

    def once(self) -> TimedStep:
        """Take one step."""
        lap = TimedStep(self._device)
        with torch.profiler.record_function(FETCH):
            batch = self.feed.next()
        lap.begin()
        self._step(batch)
        lap.pause()
        return lap

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def timed(self, steps: int, between: Callable[[], object] = int) -> list[float]:
        """Seconds that each of some steps takes, without the wait for its batch; where Ctrl-C or the budget ends them, of those so far."""
        self.wait()
        self.cut, laps = "", list[TimedStep]()
        while len(laps) < steps and not self.cut:
            self.line.tick()
            try:
                if laps:
                    between()
                laps.append(self.once())
            except KeyboardInterrupt:
                if not laps:
                    raise
                self.cut = INTERRUPTED
            if 1 < len(laps) < steps and self.line.left <= 0:
                self.cut = "the budget ended"
        self.wait()
        return seconds_of(laps)


def _take(run: _Run, captured: Captured, steps: int, options: Options) -> None:
    with profiling(1, options, run.wait) if math.isfinite(run.line.left) else contextlib.nullcontext() as profiler:
        for _ in range(2):  # states of the optimizer, caches of the allocator
            run.once()
            run.wait()
            began = run.line.seconds
            if profiler:
                with without_kineto_lines():
                    profiler.step()
    if profiler:  # to know how long writing takes: of many small operators, far longer than the step
        try:
            export(profiler, captured.path)
        finally:
            captured.path.unlink(missing_ok=True)
    writing = run.line.seconds - began
    run.feed.drain()
    for _ in range(SETTLING):
        began = run.line.seconds
        run.once()
    pace = max(run.line.seconds - began, 1e-9)
    fit = int(min(steps, max(2, (run.line.left - 2 * pace) / (2 * pace + READING * writing))))
    run.line.say(f"{fit} steps are traced, and {fit} timed without the profiler")
    plain = run.timed((fit + 1) // 2)
    if run.cut == INTERRUPTED:
        raise KeyboardInterrupt
    traced = _profiled(run, captured, fit, options)
    if len(traced) < steps:
        captured.notes.append(f"{len(traced)} of {steps} steps were traced: {run.cut or 'the budget would not allow more'}")
    captured.compare(plain, traced)
    write_captured(captured)  # a later step may fail, and the trace is there
    if not run.cut:
        try:
            run.once()  # the profiler's end frees much memory
            plain += run.timed(fit - len(plain))
            captured.compare(plain, traced)
        except KeyboardInterrupt:
            run.cut = INTERRUPTED
        if run.cut:
            captured.notes.append(f"{len(plain)} of {fit} steps were timed without the profiler: {run.cut}")
    if run.feed.queue:
        captured.notes.append(f"the prefetch queue of {run.feed.queue} batches was emptied before: it would have hidden a slow loader")


def _profiled(run: _Run, captured: Captured, steps: int, options: Options) -> list[float]:
    """Trace and write the file.

    Returns:
        Seconds of each traced step.
    """
    with profiling(steps, options, run.wait) as profiler:
        run.once()
        run.wait()
        profiler.step()
        seconds = run.timed(steps, profiler.step)
        run.line.say(f"writing the trace of {len(seconds)} steps")
        if not run.cut:
            with without_kineto_lines():
                profiler.step()
    export(profiler, captured.path, f"ProfilerStep#{profiler.step_num}" if run.cut == INTERRUPTED else "")
    return seconds


@contextlib.contextmanager
def profiling(steps: int, options: Options, wait: Callable[[], object], *, at: int = 0) -> Iterator[Any]:
    """A profiler that runs: after one step of warm-up it traces `steps`; `step()` of it is called after each.

    Args:
        steps: number of steps that are traced.
        options: what is recorded of each step.
        wait: waits for the device.
        at: the number of the step that comes next, of which marks of steps go on.
    """
    keep_cupti_for_graphs()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=_schedule(steps, at),
        record_shapes=options.shapes,
        with_stack=options.stacks,
        profile_memory=options.memory,
        with_flops=options.flops,
    )
    profiler.step_num = at
    wait()
    with without_kineto_lines():
        profiler.start()
    try:
        yield profiler
    finally:
        with without_kineto_lines():
            profiler.stop()


def _schedule(steps: int, at: int) -> Callable[[int], torch.profiler.ProfilerAction]:
    """The profiler's schedule: one step of warm-up, then the recorded steps, once."""
    plan = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    return lambda number: plan(max(0, number - at))  # a profiler asks for step 0 when it is made
