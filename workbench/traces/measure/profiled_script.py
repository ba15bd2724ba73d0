"""Starts and stops the profiler between steps of an unedited script, whose loops are only known as they run."""

import atexit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.core import run_directory
from workbench.runs.profile import Profile
from workbench.timeline import rank_log
from workbench.timeline.loops import Loop

if TYPE_CHECKING:
    from workbench.traces.measure.capture import TimedStep
    from workbench.traces.measure.profiled_run import RunProfiler


T = TypeVar("T")


class StepBoundaries:
    """Counts the steps of a watched script as its timeline does: one is over when its loop asks for the next batch."""

    def __init__(self, profile: Profile, leave_out: Callable[[int, int], None]) -> None:
        """The traced steps are chosen at the first loop, whose loader has the length of the prefetch queue."""
        self._profile, self._leave_out = profile, leave_out
        self._profiled: RunProfiler | None = None
        self._in: Loop | None = None  # the loop in which an optimizer step was taken since its last border
        self._lap: TimedStep | None = None  # of a loop without a loader: from border to border
        self._done = 0

    def begin(self, loader: Any = None) -> None:
        if self._in is not None:  # the one before was left in the middle
            self._lap = None  # what came since its last batch may be anything
            self.reached(self._in)
        if self._profiled is None and (path := rank_log.default_path()):
            from workbench.traces.measure.profiled_run import RunProfiler

            queue = int(getattr(loader, "num_workers", 0) or 0) * int(getattr(loader, "prefetch_factor", 0) or 0)
            folder = Path(path).parent / run_directory.TRACES
            self._profiled = RunProfiler(self._profile, folder, self._leave_out, rank=rank_log.rank(), queue=queue)
            atexit.register(self.close)
            self._profiled.step(0)

    def stepped(self, loop: Loop | None) -> None:
        """An optimizer step was taken in a loop."""
        self._in = loop

    def reached(self, loop: Loop, lap: "TimedStep | None" = None) -> bool:
        """A loop is at a place where a step ends, if one was taken in it.

        Args:
            loop: the loop that is at such a place.
            lap: the step, timed; None = from the last border to here, where there is no loader to wait for.

        Returns:
            Did a step end?
        """
        if self._in is not loop:
            return False
        self._in = None
        self._done += 1
        if self._profiled is None:
            self.begin()
        if self._profiled:
            self._profiled.step(self._done, lap or self._lap)
            self._lap = self._new_lap()
            if self._lap:
                self._lap.begin()
        return True

    def _new_lap(self) -> "TimedStep | None":
        if self._profiled is None or not self._profiled.measuring:
            return None
        from workbench.traces.measure.capture import TimedStep

        return TimedStep()

    def between(self, loop: Loop, batches: Iterator[T]) -> Iterator[T]:
        """The batches of a loop, with a border before each."""
        lap: TimedStep | None = None
        while True:
            if lap:
                lap.pause()
            if self.reached(loop, lap):
                lap = None
            try:
                batch = next(batches)
            except StopIteration:
                return
            lap = lap or self._new_lap()
            if lap:
                lap.begin()
            yield batch

    def close(self) -> None:
        """No step will be traced any more; the last one may have ended in the middle of its loop."""
        if self._in is not None:
            self._lap = None
            self.reached(self._in)
        if self._profiled:
            self._profiled.close()
