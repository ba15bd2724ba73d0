"""Profiled: the stretch of a training run that torch's profiler traces, on the ranks that want it, beside steps without it."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from workbench.measure.inside import hindrance, without_kineto_lines
from workbench.measure.tracing import FETCH, Options, export, file_name, keep, profiling
from workbench.profiling import PLAIN, Profile
from workbench.traces.captured import Captured


class Profiled:
    """Starts and stops the profiler between steps, writes the trace, and keeps what it cost.

    On every rank of the run, traced or not, the steps that a profiler on any of them slows down are marked, so that no figure of the run
    counts them. What goes wrong with the profiler is said in the file beside the trace, and is no matter of the training.
    """

    def __init__(
        self,
        profile: Profile,
        folder: Path,
        leave_out: Callable[[int, int], None],
        *,
        rank: int = 0,
        queue: int = 0,
        steps: int | None = None,
    ) -> None:
        """Say which steps will not count.

        Args:
            profile: what is traced.
            folder: where the file goes; it is made when there is one.
            leave_out: is told the first and the last step that will not count.
            rank: of this process.
            queue: steps whose batches the loader makes ahead at most.
            steps: of the run; None = not known.
        """
        self._profile, self._rank, self._folder = profile, rank, folder
        self._on = profile.on(rank)
        self._start = profile.start(queue)
        self._end = self._start + 1 + profile.steps
        plain = min(PLAIN, profile.steps)
        self._early = max(0, min(plain, self._start - 1))  # steps to compare with: not the first of all
        self._late = plain if steps is None else max(0, min(plain, steps - self._end - 1))  # nor the one in which its memory is freed
        self._undo = contextlib.ExitStack()
        self._profiler: Any = None
        self._finished = False
        self._done = 0
        self._clock, self._seconds = 0.0, {"before": 0.0, "traced": 0.0, "after": 0.0}
        self._captured = Captured(path=folder / file_name(f"rank{rank}_"))
        # from the step at whose end a profiler starts, to the one in which the other ranks wait for one that writes its file
        leave_out(max(0, self._start - 1), self._end if steps is None else min(self._end, steps - 1))

    def batches(self, batches: Generator[Any, None, None]) -> Iterator[Any]:
        """The same batches; waiting for each that is traced is marked, the start of a pass included, which torch's own marks leave out."""
        while True:
            with torch.profiler.record_function(FETCH) if self._profiler else contextlib.nullcontext():
                batch = next(batches)  # there is no end
            yield batch

    def step(self, done: int) -> None:
        """Before the first step, and after each.

        Args:
            done: how many there have been.
        """
        if not self._on:
            return
        try:
            self._step(done)
        except Exception as error:
            self.close()
            with contextlib.suppress(OSError):  # the disk may be what is wrong
                self._say(str(error))

    def _say(self, why: str) -> None:
        """Why there is no trace."""
        self._captured.notes.append(f"rank {self._rank} was not traced: {why}")
        print(f"workbench: {self._captured.notes[-1]}", file=sys.stderr, flush=True)
        self._write()

    def _step(self, done: int) -> None:
        self._done = done
        if done > self._start and not (self._profiler or self._finished):
            raise RuntimeError(f"the run went on from step {done}, and the profiler is started after {self._start}")
        if done == self._start - self._early and self._early:
            self._lap()
        if done == self._start:
            if self._early:
                self._lap("before")
            self._begin()
        elif done == self._start + 1:
            self._wait()
            self._profiler.step()
            self._lap()
        elif self._start + 1 < done < self._end:
            self._profiler.step()
        elif done == self._end:
            self._lap("traced")
            self._finish()
        elif done == self._end + 1 and self._late:
            self._lap()
        elif done == self._end + 1 + self._late and self._late:
            self._lap("after")
            self._write()

    def close(self) -> None:
        """Stop the profiler, if the training ends while it runs."""
        early = self._profiler is not None and sys.exception() is None
        self._on, self._profiler = False, None
        with contextlib.suppress(Exception):
            self._undo.close()
            if early:
                self._say(f"the run ended after {self._done} steps, and the traced ones end after {self._end}")

    def _wait(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    def _lap(self, what: str = "") -> None:
        """Note the time; and how much has passed."""
        self._wait()
        now = time.perf_counter()
        if what:
            self._seconds[what] = now - self._clock
        self._clock = now

    def _begin(self) -> None:
        if why := hindrance():
            raise RuntimeError(why)
        options = Options(**{field.name: getattr(self._profile, field.name) for field in fields(Options)})
        self._profiler = self._undo.enter_context(profiling(self._profile.steps, options, self._wait, at=self._start))

    def _finish(self) -> None:
        with without_kineto_lines():
            self._profiler.step()
        profiler, self._profiler, self._finished = self._profiler, None, True
        self._undo.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        export(profiler, self._captured.path)
        self._write()

    def _write(self) -> None:
        """What is known so far, beside the trace."""
        captured, seconds = self._captured, self._seconds
        captured.compared = self._early + (self._late if seconds["after"] else 0)
        if seconds["traced"] and captured.compared:
            captured.plain = (seconds["before"] + seconds["after"]) / captured.compared
        captured.traced = seconds["traced"] / self._profile.steps or math.nan
        self._folder.mkdir(parents=True, exist_ok=True)
        keep(captured)
