"""Traces a stretch of a training run on the chosen ranks, or at an alarm, and times steps without the profiler before and after it."""

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from workbench.core import run_directory, units
from workbench.runs.profile import PLAIN, Profile
from workbench.traces.analysis.captured import Captured
from workbench.traces.measure.capture import FETCH, Options, TimedStep, export, file_name, profiling, seconds_of, write_captured
from workbench.traces.measure.profiler import why_no_profiler, without_kineto_lines


class RunProfiler:
    """Starts and stops the profiler between steps, writes the trace, and keeps what it cost.

    On every rank of the run, traced or not, the steps that a profiler on any of them slows down are marked, so that no figure of the run
    counts them. What goes wrong with the profiler is written into the file beside the trace, and does not stop the training.
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
        name: str = "",
        hurry: Callable[[int], bool] = lambda done: False,
    ) -> None:
        """Mark the steps that will not count.

        Args:
            profile: which steps are traced, and what of them.
            folder: where the file goes; it is made when there is one.
            leave_out: called before the first step with the first and the last that will not count, from 0 for the first that this
                process takes: a run that goes on from a checkpoint counts its rows anew.
            rank: rank of this process, from 0.
            queue: steps whose batches the loader makes ahead at most.
            steps: of the run; None = not known.
            name: how the file's name begins; "" = with the rank.
            hurry: is asked after each step, with the number done, whether the trace is to be written soon: two steps are traced then, if
                none is yet. All ranks have to hear it after the same step, as by `hurry_together`.
        """
        self._hurry, self._hurried = hurry, False
        self._profile, self._rank, self._folder, self._leave_out = profile, rank, folder, leave_out
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
        self._steps, self._first_call, self._base = steps, True, 0
        self._laps: dict[str, list[TimedStep]] = {"plain": [], "traced": []}
        self._stretch = ""
        self._lap = TimedStep()
        self._captured = Captured(path=folder / file_name(name or f"rank{rank}_"))

    @property
    def path(self) -> Path:
        """Of the file that it writes."""
        return self._captured.path

    @property
    def over(self) -> bool:
        """Is nothing traced or timed any more?"""
        return not self._on or self._done > self._end + self._late

    @property
    def measuring(self) -> bool:
        """Is the step that comes next, or runs, timed?"""
        return bool(self._stretch)

    def batches(self, batches: Generator[Any, None, None]) -> Iterator[Any]:
        """The same batches; the wait for each traced one is marked, also at the start of a pass, which torch's own marks leave out."""
        while True:
            self._lap.pause()
            with torch.profiler.record_function(FETCH) if self._profiler else contextlib.nullcontext():
                batch = next(batches)  # there is no end
            if self._stretch:
                self._lap.begin()
            yield batch

    def step(self, done: int, lap: TimedStep | None = None) -> None:
        """Before the first step, and after each.

        Args:
            done: how many there have been.
            lap: the step, timed; None = by its `batches`.
        """
        lap, self._lap = lap or self._lap, TimedStep()
        if self._first_call:
            self._first_call, self._base = False, done
            self._say_which(done)
        elif not self._hurried and done < self._end and self._hurry(done):
            self._hurried, self._late = True, 0
            self._start = min(self._start, done)
            self._end = max(done, self._start + 1 + min(2, self._profile.steps))
            if (steps := self._end - self._start - 1) < self._profile.steps:
                self._captured.notes.append(f"{steps} of {self._profile.steps} steps were traced: the budget ended")
            if done == self._start:
                self._leave_out(max(0, done - 1) - self._base, self._end - self._base)
        if not self._on:
            return
        try:
            lap.pause()
            if self._stretch:
                self._laps[self._stretch].append(lap)
            self._step(done)
            self._stretch = self._stretch_after(done)
        except Exception as error:
            self.close()
            with contextlib.suppress(OSError):  # the disk may be what is wrong
                self._say(str(error))

    def _say_which(self, done: int) -> None:
        """Which steps will not count: from the one at whose end a profiler starts, to the one in which the other ranks wait for one that
        writes its file. None of a run that went on behind its window: no rank is traced.
        """
        first, last = max(0, self._start - 1), self._end if self._steps is None else min(self._end, self._steps - 1)
        if done <= self._start:
            self._leave_out(max(0, first - done), last - done)

    def _stretch_after(self, done: int) -> str:
        """The purpose for which the next step is measured; "" = it is not."""
        if self._start - self._early <= done < self._start or self._end < done <= self._end + self._late:
            return "plain"
        return "traced" if self._start < done < self._end else ""

    def _say(self, why: str) -> None:
        """Write why there is no trace."""
        self._captured.notes.append(f"rank {self._rank} was not traced: {why}")
        print(f"workbench: {self._captured.notes[-1]}", file=sys.stderr, flush=True)
        self._write()

    def _step(self, done: int) -> None:
        self._done = done
        if done > self._start and not (self._profiler or self._finished):
            raise RuntimeError(f"the run went on from step {done}, and the profiler is started after {self._start}")
        if done == self._start:
            self._begin()
        elif done == self._start + 1:
            self._wait()
            self._profiler.step()
        elif self._start + 1 < done < self._end:
            self._profiler.step()
        elif done == self._end:
            self._wait()
            self._finish()
        elif done == self._end + 1 + self._late and self._late:
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

    def _begin(self) -> None:
        if why := why_no_profiler():
            raise RuntimeError(why)
        options = Options(**{field.name: getattr(self._profile, field.name) for field in fields(Options)})
        self._profiler = self._undo.enter_context(profiling(self._profile.steps, options, self._wait, at=self._start))

    def _finish(self) -> None:
        if not self._hurried:
            with without_kineto_lines():
                self._profiler.step()
        profiler, self._profiler, self._finished = self._profiler, None, True
        self._undo.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        export(profiler, self._captured.path)
        self._write()

    def _write(self) -> None:
        """Write the facts so far beside the trace."""
        self._captured.compare(*(seconds_of(self._laps[stretch]) for stretch in ("plain", "traced")))
        self._folder.mkdir(parents=True, exist_ok=True)
        write_captured(self._captured)


def hurry_together(run_dir: Path) -> Callable[[int], bool]:
    """`hurry` of a rank of a launched run, whose directory gets the file FINISH when the budget ends.

    The first rank that sees it says in another file after which step all heed it: two later, since others may be
    a step ahead where a collective makes the host wait. On GPUs they may be further: then they trace later steps.
    """
    asked, agreed = run_dir / run_directory.FINISH, run_dir / run_directory.FINISH_AFTER

    def hurry(done: int) -> bool:
        if not asked.exists():
            return False
        with contextlib.suppress(OSError), agreed.open("x", encoding="utf-8") as file:
            file.write(str(done + 2))
        after = agreed.read_text(encoding="utf-8") if agreed.exists() else ""
        return bool(after) and done >= int(after)

    return hurry


ALARM_STEPS = 3
"""Steps that are traced at an alarm; as many without the profiler are timed before and after them."""
MOST_ALARMS = 3
"""Traces that a process makes at alarms."""
MOST_BYTES = 64 * 2**20
"""Of such a file; a larger one is removed."""
NO_OPTIMIZER = 32
"""Batches in a row without an optimizer's step from which on each batch counts as a step."""


class AlarmTraces:
    """Traces a few steps when an alarm asks for it. The alarm's thread asks, and the one that trains does it between two of its batches.

    A step ends at the batch border after an optimizer's step, as in a timeline. Shapes are left out, which keeps files small.
    """

    def __init__(self, folder: Path, steps_now: Callable[[], int], leave_out: Callable[[int, int], None], *, rank: int = 0) -> None:
        """Nothing is asked for.

        Args:
            folder: where the files go, in the run directory; it is made when there is one.
            steps_now: steps that this process has finished.
            leave_out: called with the first and the last step that will not count, from 0 for the first that this process took.
            rank: of this process.
        """
        self._folder, self._steps_now, self._leave_out, self._rank = folder, steps_now, leave_out, rank
        self._asked = 0
        self._profiled: RunProfiler | None = None
        self._hook: Any = None
        self._base = self._done = self._batches = 0
        self._stepped = False
        self._lap: TimedStep | None = None

    def ask(self, step: int) -> str:
        """Have the next steps traced.

        Returns:
            The file's name in the run directory; "" = none will be made, since one is under way or there are enough.
        """
        if self._profiled is not None or self._asked >= MOST_ALARMS:
            return ""
        self._asked += 1
        profile = Profile(steps=ALARM_STEPS, ranks="all", wait=ALARM_STEPS + 1, shapes=False)
        name = f"rank{self._rank}_step{step}_"
        self._profiled = RunProfiler(profile, self._folder, self._not_counted, rank=self._rank, name=name)
        return f"{self._folder.name}/{self._profiled.path.name}"

    def written(self, name: str) -> bool:
        """Is the file there?"""
        return (self._folder.parent / name).exists()

    def between(self) -> None:
        """The training is between two batches."""
        if self._profiled is None:
            return
        if self._hook is None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._base, self._done, self._batches, self._stepped = self._steps_now(), 0, 0, False
            self._hook = register_optimizer_step_post_hook(self._optimizer_stepped)
            self._profiled.step(0)
        elif self._stepped or self._batches >= NO_OPTIMIZER:
            self._stepped = False
            self._done += 1
            self._profiled.step(self._done, self._lap)
            if self._profiled.over:
                self.close()
                return
        else:
            self._batches += 1
            return
        self._lap = TimedStep()
        self._lap.begin()

    def close(self) -> None:
        """Stop a trace that is under way."""
        profiled, hook, self._profiled, self._hook = self._profiled, self._hook, None, None
        if hook is not None:
            hook.remove()
        if profiled is None:
            return
        profiled.close()
        with contextlib.suppress(OSError):
            if (size := profiled.path.stat().st_size) > MOST_BYTES:
                profiled.path.unlink()
                self._asked = MOST_ALARMS
                print(f"workbench: the trace at an alarm had {units.bytes_(size)}, and was removed", file=sys.stderr, flush=True)

    def _optimizer_stepped(self, *_: Any) -> None:
        self._stepped, self._batches = True, 0

    def _not_counted(self, first: int, last: int) -> None:
        self._leave_out(self._base + first, self._base + last)
