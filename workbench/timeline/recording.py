"""Collects the steps of one timer, from however many loops, as a Timeline and in the file of its rank."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.core import late, run_directory
from workbench.core.checks import number_or_default
from workbench.core.package import code_record, imported_sources
from workbench.core.system_load import LoadMeter, Noise
from workbench.timeline import alarm as alarm_module
from workbench.timeline import hooks, rank_log
from workbench.timeline.analysis.alarm_events import AlarmEvent
from workbench.timeline.loops import Loop
from workbench.timeline.marks import MarkRecorder
from workbench.timeline.steps import Row, StepRules, StepsBy
from workbench.timeline.timeline import WARNING, Clock, Pause, Step, Timeline


class Recording:
    """Opens a loop per pass and keeps the steps that they finish."""

    def __init__(
        self,
        *,
        recorder: Callable[[], MarkRecorder],
        steps_by: StepsBy,
        log: Path | None = None,
        notes: Iterable[str] = (),
        expected: Mapping[int, str] | None = None,
        alarm: bool | str = False,
        load: bool = False,
    ) -> None:
        """Start with no steps.

        Args:
            recorder: Makes the mark recorder of each loop.
            steps_by: What ends a step.
            log: File of JSON lines to write; None = that of this rank if a run directory is set in the environment, else no file.
            notes: What the timeline should say about the way it was measured.
            expected: Notes by phase, to be added if no step spent any time in that phase.
            alarm: report when a phase changes for good, see `alarm.Alarm`; False = only if the launch asks for it.
            load: on a CPU, measure what other processes take while a loop runs; not in a run, whose launch looks at the machine.
        """
        self._new_recorder, self._rules, self._expected = recorder, StepRules(steps_by=steps_by), expected or {}
        self._notes = (*notes, *rank_log.notes_on_environment())
        self._loops: list[Loop] = []
        self._rows: list[Row] = []
        self._profiled: tuple[int, ...] = ()
        self._validations: tuple[float, ...] = ()
        self._pauses: list[Pause] = []
        self._done = 0
        self._lock = threading.Lock()
        self.clock: Clock | None = None  # not known before the first loop
        self.device: int | None = None  # of the latest loop: asked for on its thread, as every thread has a current device of its own
        self._log = rank_log.attach(log, self) if log else self._default_log()
        self._logging = self._log is not None
        self._load = load and not self._logging
        self._meter: LoadMeter | None = None
        self._noise: Noise | None = None
        self._busiest: Noise | None = None  # of the passes over the loader that have ended
        self._threads: int | None = None
        self._alarms, self._seen = alarm_module.allowed(alarm), 0
        self._alarm: alarm_module.Alarm | None = None
        self._losses: hooks.Losses | None = None
        self._traces: Any = None  # `AlarmTraces`, where they are allowed
        self._other_ranks: alarm_module.OtherRanks | None = None
        self._alarms_before: tuple[AlarmEvent, ...] = ()  # of passes before the last close()

    def _default_log(self) -> "rank_log.RankLog | None":
        """The file in the run directory of the environment; None = there is none, or it cannot be written: then a note says so."""
        path = rank_log.default_path()
        try:
            return rank_log.attach(path, self) if path else None
        except OSError as error:
            self._notes += (f"the steps are not written: {path} cannot be opened ({error.strerror or error})",)
            return None

    def open(self) -> Loop:
        """A new loop, to be run once."""
        recorder = self._new_recorder()
        self.clock = recorder.clock
        self.device = rank_log.current_device() if recorder.device is None else recorder.device
        loop = Loop(recorder, self._rules)
        if self._load and self.clock == "host" and self._meter is None:
            self._meter = LoadMeter()
        with self._lock:
            self._loops.append(loop)
        if self._alarms and self._alarm is None:
            if self._alarms == "trace" and self._traces is None:
                self._traces = self._alarm_traces()
            self._losses, ranks = hooks.Losses(), number_or_default("WORLD_SIZE", 1)
            if self._log and ranks > 1:
                self._other_ranks = alarm_module.OtherRanks(self._log.path.parent / run_directory.ALARM_TRACES, rank_log.rank())
            self._alarm = alarm_module.Alarm(
                self._unseen,
                self._report,
                losses=self._losses.take,
                traces=self._traces,
                device=self.device,
                rank=rank_log.rank(),
                ranks=ranks,
                others=self._other_ranks,
                done=self._done + self._seen,
                experiments=self._alarms in ("experiments", "trace"),
            )
            if not self._logging:
                rank_log.close_at_exit(self)
        if self._alarm:
            self._alarm.paused = False
        if self._traces:
            loop.between = self._traces.between
        loop.loss = self._losses.add if self._losses else None
        return loop

    def _read_load(self) -> None:
        if self._meter:
            now, self._threads = self._meter.noise(), hooks.threads_per_operator()
            earlier = self._busiest
            self._noise = earlier if earlier and earlier.foreign > now.foreign else now

    def end_pass(self) -> None:
        """A loop is over, and perhaps the training: the alarm reports what it has, and other processes do not concern it any more."""
        self._end_load()
        if self._alarm:
            self._alarm.pause(self._free)

    def _free(self) -> bool:
        """Can this thread take the locks that a look needs? Not if it holds one itself: a loop that was left is collected anywhere."""
        return rank_log.can_take(self._lock) and (self._log is None or self._log.free)

    def _end_load(self) -> None:
        self._read_load()
        if self._meter:
            self._busiest = self._noise
            self._meter.close()
            self._meter = None

    def loss(self, loss: Any) -> None:
        """Let the alarm, if there is one, know the loss of the step under way: a tensor, on any device."""
        if self._losses:
            self._losses.add(loss)

    def _alarm_traces(self) -> Any:
        """What traces steps at an alarm; None without a run directory."""
        if self._log is None:
            self._notes += ('alarm="trace": without a run directory nothing is traced; wb.launch makes one',)
            return None
        folder = self._log.path.parent / run_directory.ALARM_TRACES
        return late.load("AlarmTraces")(folder, self._steps_now, self.leave_out, rank=rank_log.rank())

    def _steps_now(self) -> int:
        """Finished steps, of this process."""
        self.settle()
        return len(self._rows)

    def _unseen(self) -> list[Row]:
        """The steps finished since the alarm looked last."""
        if not (self._log and self._logging):
            self.harvest()  # else the writer of the file does
        with self._lock:
            rows, self._seen = self._rows[self._seen :], len(self._rows)
        return rows

    def _report(self, event: AlarmEvent, words: str) -> None:
        if words:
            self.warn(words)
        self.say({"alarm": event.to_row()})
        if self._other_ranks:
            self._other_ranks.put(event)

    @property
    def alarm_events(self) -> tuple[AlarmEvent, ...]:
        """The alarms so far."""
        return (*self._alarms_before, *(self._alarm.events if self._alarm else ()))

    def harvest(self) -> list[Row]:
        """The steps finished since the last harvest, in their order. Never waits for the device, so any thread may do it at any time."""
        rows: list[Row] = []
        with self._lock:
            try:
                for loop in self._loops:
                    unread = loop.recorder.unread  # asked first: it may be read meanwhile
                    rows += loop.harvest()
                    if unread:
                        break
            except Exception:
                self._loops.clear()  # half read: nothing they say from here on could be trusted
                raise
            self._loops = [loop for loop in self._loops if not loop.ended]
            self._rows += rows
            return rows

    def settle(self) -> None:
        """Wait until the device has done all that was marked, and harvest it."""
        for loop in list(self._loops):
            loop.recorder.settle()
        if self._log and self._logging:
            self._log.flush()
        else:
            self.harvest()

    def close(self) -> None:
        """Settle, report and write what is left, and detach from the file."""
        self.settle()
        self._end_load()
        if self._traces:
            self._traces.close()
        if self._alarm:
            words = self._alarm.close()
            self._alarms_before, self._alarm = self.alarm_events, None
            if words:
                self._notes += (f"alarms: {words}",)
                print(f"workbench: alarms: {words}", file=sys.stderr, flush=True)
        if self._log and self._logging:
            self._log.detach(self)
            self._logging = False

    def unfinished_row(self, samples: int) -> str:
        """Write the finished steps; the line of the step under way, if its optimizer step is done. See `StepTimer.unfinished_row`."""
        self.settle()
        with self._lock:
            rows = [row for loop in self._loops if (row := loop.unfinished())]
        return self._log.line((*rows[-1][:6], samples)) if rows and self._log and self._logging else ""

    def leave_out(self, first: int, last: int) -> None:
        """Let statistics leave out the steps from `first` to `last`."""
        self._profiled += tuple(range(first, last + 1))
        if self._log and self._logging:
            self._log.say({"profiled": [self._done + first, self._done + last]})

    def validated(self, step: int, seconds: float) -> None:
        """Note the seconds of an evaluation after so many steps."""
        self._validations += (seconds,)
        self.say({"validation": seconds, "after": step})

    def paused(self, pause: Pause) -> None:
        """Note what made a step longer."""
        self._pauses.append(pause)
        self.say({"pause": list(pause)})

    def warn(self, text: str) -> None:
        """Add a warning about the training to the notes, and print it. It goes into the file at once, in case the process is killed."""
        self._notes += (WARNING + text,)
        self.say({"note": WARNING + text})
        print(f"workbench: {WARNING}{text}", file=sys.stderr, flush=True)

    def say(self, row: dict[str, Any]) -> None:
        """Write a row that is no step to the file, if there is one."""
        if self._log and self._logging:
            self._log.say(row)

    def record_code(self) -> None:
        """Write, on rank 0 of a run, what it keeps of the code that it has imported, once the first step was taken."""
        if self._log and self._logging and rank_log.rank() == 0:
            with contextlib.suppress(OSError):
                run_directory.write_json(self._log.path.parent / run_directory.ENVIRONMENT, code_record(imported_sources()))

    def go_on(self, done: int) -> None:
        """Count the steps in the file on from `done`."""
        self._done = done
        if self._log:
            self._log.go_on(done)

    @property
    def failed(self) -> Exception | None:
        """Why the file is no longer written; None if it is."""
        return self._log.failed if self._log else None

    def note_device(self, device: str) -> None:
        """Say so if the host runs ahead of a device, such as "mps:0", and no clock of the device is read."""
        if device.partition(":")[0] not in ("cpu", "cuda", "meta"):
            note = (
                f"the model is on {device}, and times are from the host's clock, which runs ahead of that device: the line that waits "
                "(.item(), printing the loss) seems to take what was queued before. Only CUDA's clock is read; the mean step is right"
            )
            self._notes = tuple(dict.fromkeys((*self._notes, note)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on how the steps were measured."""
        notes = [*self._notes]
        if self._rows:
            notes += [note for phase, note in self._expected.items() if not any(row[phase] for row in self._rows)]
        if count := self._rules.left_out:
            notes.append(f"{count} batches with no optimizer step after them are not steps (evaluation, or the rest of an accumulation)")
        return tuple(notes)

    @property
    def timeline(self) -> Timeline:
        """The steps so far; the one that is under way is not among them."""
        self.settle()
        self._read_load()
        steps = tuple(Step(index=i, phases=tuple(ns / 1e9 for ns in row[:6]), samples=row[6]) for i, row in enumerate(self._rows))
        return Timeline(
            rank=rank_log.rank(),
            clock=self.clock or "host",
            steps=steps,
            notes=self.notes,
            profiled=self._profiled,
            validations=self._validations,
            pauses=tuple(self._pauses),
            threads=self._threads,
            noise=self._noise,
        )
