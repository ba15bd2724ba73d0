"""StepTimer: measures the phases of a training loop that its author marks by `with` blocks. Works without torch."""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from workbench.core.vocabulary import PHASES
from workbench.timeline import watch_script
from workbench.timeline.loops import MeasuredBatches, OpenLoops, check_loader
from workbench.timeline.marks import END_PHASE, IDLE, OTHER, MarkRecorder, new_recorder
from workbench.timeline.recording import Recording
from workbench.timeline.timeline import Timeline

T = TypeVar("T")


class Span:
    """One phase of one timer, to be entered any number of times; nested ones are timed apart (exclusive time)."""

    __slots__ = ("_code", "_open_loops")

    def __init__(self, open_loops: OpenLoops, code: int) -> None:
        self._open_loops, self._code = open_loops, code

    def __enter__(self) -> None:
        open_loops = self._open_loops
        now = open_loops.now
        open_loops.marks.extend((now(), self._code))

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        open_loops = self._open_loops
        now = open_loops.now
        open_loops.marks.extend((now(), END_PHASE))


class StepTimer:
    """Times the phases of each training step, at a few microseconds per step.

    Time that no `with` covers is `other`, so the phases of a step add up to its length. A step lasts from the start of a `next(loader)` to
    the start of the next one that follows a `with timer("optimizer")`; with accumulation it spans several batches. In a loop without such a
    span, every batch is a step. A step that a break or an exception cuts short counts if its optimizer step was done. Time between two
    loops belongs to no step.

    On CUDA, a phase is the time that the *device* spent in it, from events on the current stream; nothing waits for the device inside a
    step.

        >>> timer = StepTimer()
        >>> for batch in timer.batches([1, 2, 3]):
        ...     with timer("forward"):
        ...         _ = batch + 1
        >>> len(timer.timeline.steps)
        3
    """

    def __init__(self, log: Path | None = None, *, device: str | None = None, recorder: Callable[[], MarkRecorder] | None = None) -> None:
        """Make a timer; it costs nothing until its first loop.

        Args:
            log: JSON-lines file to write the steps to; None = `rank<r>.jsonl` in the run directory of this launch, or no file outside one.
            device: "cpu", "cuda" (the current one when a loop begins) or "cuda:1": whose clock to use; None = that of the current
                device if this process uses CUDA when a loop begins.
            recorder: For tests: makes the mark recorder of a loop, in place of a real clock.

        Raises:
            ValueError: no such device.
        """
        if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
            text = f'StepTimer(device={device!r}): it takes "cpu", "cuda", "cuda:1" or None (CUDA if it is in use); try device="cuda"'
            raise ValueError(text)
        watch_script.stop_for_own_timer()
        self._open_loops = OpenLoops()
        self._recording = Recording(recorder=recorder or partial(new_recorder, device), steps_by="undecided", log=log)
        self._spans = {phase: Span(self._open_loops, code) for code, phase in enumerate(PHASES)}

    def __call__(self, phase: str) -> Span:
        """The span of a phase, for `with timer("forward"):`.

        Raises:
            ValueError: no such phase.
        """
        try:
            return self._spans[phase]
        except KeyError:
            text = f"timer({phase!r}): a step is made of {', '.join(PHASES)}; all else counts as other, and needs no span"
            raise ValueError(text) from None

    def batches(self, loader: Iterable[T]) -> MeasuredBatches[T]:
        """Iterate over a loader's batches and time the waits for them; each `for` over the result is one pass.

        Raises:
            ValueError: not an iterable.
        """
        check_loader(loader, "timer.batches")
        return _TimedBatches(loader, self._recording, self._open_loops)

    @property
    def timeline(self) -> Timeline:
        """The steps so far, without the current one."""
        return self._recording.timeline

    def leave_out(self, first: int, last: int) -> None:
        """Leave steps `first` to `last` (counted from 0) out of statistics, because a profiler slows them down."""
        self._recording.leave_out(first, last)

    def warn(self, text: str) -> None:
        """Add a warning about the training to the timeline's notes, and print it."""
        self._recording.warn(text)

    def say(self, row: dict[str, Any]) -> None:
        """Write a row that is not a step to the file, if there is one."""
        self._recording.say(row)

    def loss(self, loss: Any) -> None:
        """Record the current step's loss, a tensor on any device, if the launch asks for alarms; otherwise do nothing."""
        self._recording.loss(loss)

    def go_on(self, done: int) -> None:
        """For a run that resumes from a checkpoint: continue counting steps in the file from `done`; `leave_out` still counts from 0."""
        self._recording.go_on(done)

    @contextlib.contextmanager
    def validation(self, step: int) -> Iterator[None]:
        """Time an evaluation inside this context: it belongs to no step, and its seconds are recorded separately.

        The device must be idle before and after it.
        """
        self._open_loops.mark(IDLE)
        began = time.perf_counter()
        yield
        self._recording.validated(step, time.perf_counter() - began)
        self._open_loops.mark(OTHER)

    def unfinished_row(self, samples: int) -> str:
        """Write the finished steps to the file, and return the line of the step that is under way, as if it ended with its optimizer.

        For a checkpoint after that step: the line itself is written when the next step begins, which may never come. Waits for the device.

        Returns:
            "" without a file, or where no optimizer step is done.
        """
        return self._recording.unfinished_row(samples)

    @property
    def failed(self) -> Exception | None:
        """Why steps are no longer written to their file, such as a full disk; None if they are."""
        return self._recording.failed

    def close(self) -> None:
        """Write the remaining steps to the file, and close it."""
        self._recording.close()

    def __repr__(self) -> str:
        return "StepTimer()"

    def _repr_html_(self) -> str:
        return self.timeline._repr_html_()


class _TimedBatches(MeasuredBatches[T]):
    def __init__(self, loader: Iterable[T], recording: Recording, open_loops: OpenLoops) -> None:
        super().__init__(loader)
        self._recording, self._open_loops = recording, open_loops

    def __iter__(self) -> Iterator[T]:
        return self._recording.open().run(self._open_loops, self._loader)

    def __repr__(self) -> str:
        return "StepTimer().batches(…)"
