"""Alarm: follows the steps of a training in a background thread and reports when a phase, throughput, memory or loss changes for good.

The loop records marks as without it, and pays for its loss alone, which is read about every APART seconds, at least one in EVERY.
A change is reported once, by the phase that explains it, with what else changed: the clocks of cores and GPU, whom the ranks wait for,
and, where it is allowed, a small computation whose time was known before.
Where that is allowed, the training thread then traces a few steps (`traces/measure/profiled_run.py:AlarmTraces`).
"""

import contextlib
import gc
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from workbench.core import units
from workbench.core.checks import choice
from workbench.core.run_directory import ALARMS, ENV_ALARM, LineTail, LineWriter
from workbench.core.vocabulary import PHASES
from workbench.timeline.analysis.alarm_events import (
    COMPUTING,
    DEVICE_MEMORY,
    NOT_FINITE,
    NOT_TIME,
    REDUCTION,
    WAITS,
    AlarmEvent,
    digest,
    waited_for,
)
from workbench.timeline.analysis.change_points import BLOCK, GROUP, Change, ChangePoints
from workbench.timeline.analysis.step_table import blocks_of, blocks_of_losses
from workbench.timeline.steps import Row

INTERVAL, LONGEST = 3.0, 10.0
"""Seconds between two looks for new steps, at least and at most."""
HOLD = 2 * LONGEST
"""Seconds that a longer backward or step waits for an alarm of another rank that explains it."""
AT_A_LOOK = 1000
"""Steps that a look waits for, within these limits. Chosen: a look costs as much as several hundred steps that it looks at."""
SERIES = ("step", *PHASES, "throughput", "memory")
"""What is followed, beside the loss and DEVICE_MEMORY."""
WORTH = 0.03
"""Part of the step by which a phase has to change to be reported: a copy that takes twice 1 % of the step is no alarm."""
HELD = 3
"""Blocks for which a change is held back: the phase that explains it may show later. With 12, half of what lasts 100 steps is lost."""
SAME = 25
"""Blocks in which changes of one direction belong together, and are reported once."""
FAR_MORE = 3
"""A change that is so many times as large as an earlier one is reported, too, however near it is."""
CLOCK = 0.05
"""Relative change of the cores' clock, or of a small computation, that is mentioned."""
APART, EVERY, SETTLED = 0.05, 19, 64
"""Of shorter steps, a loss is read about every so many seconds; of the shortest, one in EVERY. (An odd number: each of two backwards
in a step has its turn.) Judged once, after so many steps. To read a loss takes up to 15 µs on busy cores, whose caches have lost its code.
What rises for 100 losses that are read is found as where all are: so in short steps a rise has to last for 5 s, or for 1,900 steps."""
CONTRAST = 2
"""Deviations of the blocks before by which a phase has to grow to explain a longer step. Half of that step's growth at least, and 1.5 times
as much at most: else another phase shrank, and the two trade places."""
_PROBE = 30_000


class StepAlarm:
    """Follows the steps of one rank: what has changed, and which phase explains it. Arithmetic alone."""

    def __init__(
        self,
        rank: int = 0,
        *,
        memory: Callable[[], float] | None = None,
        device_memory: Callable[[], float] | None = None,
        losses: Callable[[int, int], list[float]] | None = None,
        done: int = 0,
    ) -> None:
        """Nothing is known yet.

        Args:
            rank: rank of this process, from 0.
            memory: bytes that it holds now; None = not followed.
            device_memory: the same of its GPU.
            losses: gives the losses of so many steps that follow, nan = not known, inf = NaN or infinite, and reads one in so many from
                now on; None = they are not followed.
            done: steps that were taken before, such as before a restart.
        """
        self.rank, self._losses, self._done = rank, losses, done
        self._memory = (memory or (lambda: math.nan), *([device_memory] if device_memory else []))
        self._held: list[float] = []
        """What was held at the last look."""
        series = (*SERIES, *([DEVICE_MEMORY] if device_memory else []))
        self._points = ChangePoints(series, worth=dict.fromkeys(PHASES, WORTH))
        self._loss_points = ChangePoints(("loss",), upward=True)
        self._rows: list[Row] = []
        self._loss: list[float] = []
        self._finite, self._positive, self._looked = 0.0, True, done
        """The last finite loss; were all above 0; steps whose losses were looked at."""
        self._lost: int | None = None
        """The first step since which no loss was finite."""
        self._lost_reported = False
        self._every = self._read = 0
        """One loss in so many is read, 0 = not judged yet; how many were."""
        self._pending: list[Change] = []
        self._step = done
        self._reported: list[tuple[int, float]] = []
        """Step and share of each reported change, since the training last lost by a change or gained by it otherwise than before."""
        self._slower = True

    def see(self, rows: Sequence[Row], *, waits: bool = True, pause: bool = False, last: bool = False) -> list[AlarmEvent]:
        """Finished steps, in their order; the alarms that are due now. They are looked at in whole blocks of `change_points.BLOCK`.

        Args:
            rows: rows of the finished steps.
            waits: as `ChangePoints.add_blocks` has it.
            pause: no step follows for now, so what waits for other phases to change with it is reported now.
            last: no step follows at all; then a single loss that is not finite is reported, too.
        """
        events = self._not_finite(self._losses(len(rows), self._every), last=last) if self._losses is not None else []
        self._rows += rows
        if not self._every and self._step - self._done + len(self._rows) >= SETTLED:
            length = median(sum(row[:-1]) for row in self._rows[-9:]) / 1e9
            self._every = min(EVERY, int(APART / length) | 1) if length > 0 else 1
        count = len(self._rows) // BLOCK * BLOCK
        if not count and waits:
            return events
        rows = self._rows[:count]
        del self._rows[:count]
        held = [held() for held in self._memory]
        blocks = blocks_of(rows, self._held or held)  # of the memory of these steps, nothing is known but what they end with
        blocks[-1:, :, -len(held) :] = self._held = held
        events += self._higher_losses(waits=waits)
        for change in self._points.add_blocks(self._step, blocks, waits=waits):
            events += self._explained(change.reported - BLOCK)
            self._pending.append(change)
        self._step += count
        events += self._explained(math.inf if pause or last else self._points.steps - 1)
        return sorted(events, key=lambda each: each.step)

    @property
    def pending(self) -> bool:
        """Does a change wait for the phase that explains it?"""
        return bool(self._pending)

    def _not_finite(self, losses: Sequence[float], *, last: bool) -> list[AlarmEvent]:
        """Take losses of steps that follow; the alarm, once, where they are no finite numbers any more.

        A second one has to follow, unless the training ends: a GradScaler skips the step of a single one, else weights are lost with it.
        """
        again = False
        for step, loss in enumerate(losses, self._looked):
            if math.isfinite(loss) and not again:
                self._finite, self._lost = loss, None
            elif math.isinf(loss):
                again = again or self._lost is not None
                self._lost = step if self._lost is None else self._lost
        self._looked += len(losses)
        self._loss += [math.nan if math.isinf(loss) else loss for loss in losses]
        if self._lost_reported or self._lost is None or not (again or last):
            return []
        self._lost_reported = True
        return [AlarmEvent(rank=self.rank, step=self._lost + 1, phase=NOT_FINITE, before=self._finite, after=self._finite, share=0.0)]

    def _higher_losses(self, *, waits: bool) -> list[AlarmEvent]:
        """The alarms of the losses: of so many steps, of the first whose loss is known."""
        if self._losses is None or not self._every:
            return []
        self._positive = self._positive and not any(loss <= 0 for loss in self._loss)  # some may be NaN
        if not self._positive:
            self._loss.clear()  # that it falls is what a training is for; of one that is 0 or less, no part can be said
            return []
        count = len(self._loss) // (BLOCK * self._every) * BLOCK * self._every
        changes = self._loss_points.add_blocks(self._read, blocks_of_losses(self._loss[:count], self._every), waits=waits)
        del self._loss[:count]
        self._read += count // self._every
        return [self._event(replace(change, step=self._done + change.step * self._every), 0.0) for change in changes]

    def _explained(self, step: float) -> list[AlarmEvent]:
        """The pending changes, if they are due at a step: of those that belong together, the phase that changes most."""
        if not self._pending or step - self._pending[0].reported < HELD * BLOCK:
            return []
        changes, self._pending = self._pending, []
        known = {change.series: change for change in changes}
        events = []
        events += [self._event(known.pop(name), 0.0) for name in ("memory", DEVICE_MEMORY) if name in known]
        length = known["step"].before if "step" in known else self._points.level("step")
        phases = [change for name, change in known.items() if name in PHASES]
        phases = [change for change in phases if abs(change.after - change.before) >= WORTH * length]
        chosen = max(phases, key=lambda change: abs(change.after - change.before), default=None)
        chosen = chosen or (self._longer(known["step"]) if "step" in known else known.get("throughput"))
        if chosen is not None:
            after = self._points.around(chosen.series, chosen.step)[1]  # by now more blocks are known than when the change was
            if (after - chosen.before) / (chosen.after - chosen.before) > 1:
                chosen = replace(chosen, after=after)
            rate = chosen.series == "throughput"
            share = abs(chosen.ratio - 1) if rate else (chosen.after - chosen.before) / length if length > 0 else 0.0
            slower = (chosen.after < chosen.before) == rate
            if slower != self._slower:
                self._slower, self._reported = slower, []
            near = [earlier for step, earlier in self._reported if abs(chosen.step - step) < SAME * BLOCK]
            if abs(share) >= FAR_MORE * max(near, default=0.0):
                self._reported.append((chosen.step, abs(share)))
                events.append(self._event(chosen, share))
        return events

    def _longer(self, step: Change) -> Change:
        """A longer step as the phase that by its level, and beyond its noise, explains it; as it is where none does."""
        grown, change = {}, abs(step.after - step.before)
        for name in PHASES:
            before, after, noise = self._points.around(name, step.step)
            by = (after - before) * (1 if step.after > step.before else -1)
            if max(change / 2, CONTRAST * noise) <= by <= 1.5 * change:
                grown[by] = replace(step, series=name, before=before, after=after)
        return grown[max(grown)] if grown else step

    def _event(self, change: Change, share: float) -> AlarmEvent:
        return AlarmEvent(rank=self.rank, step=change.step + 1, phase=change.series, before=change.before, after=change.after, share=share)


class Circumstances:
    """What else may have changed: the clocks of the cores and of the GPU, and a small computation."""

    def __init__(self, *, experiments: bool, device: int | None = None, cpufreq: str = "/sys/devices/system/cpu") -> None:
        """Read them now, for later.

        Args:
            experiments: may a small computation be timed as well?
            device: index of the GPU; None = there is none.
            cpufreq: for tests: where clocks are read.
        """
        self._cpufreq, self._device = Path(cpufreq), device
        self._clock, self._device_clocks = self._clocks(), deque[float](maxlen=50)
        self._probe = self._computed() if experiments else None

    def note(self) -> None:
        """Nothing has changed: read the clock of the GPU, which works by now, for later."""
        if clock := device_clock(self._device):
            self._device_clocks.append(clock)

    def changed(self) -> tuple[str, ...]:
        """What is other than before, in words."""
        words = []
        clocks = [("the cores", self._clock, self._clocks())]
        if self._device_clocks:
            clocks.append(("the GPU", median(self._device_clocks), device_clock(self._device)))
        for whose, before, clock in clocks:
            if clock and before and abs(clock / before - 1) > CLOCK:
                way = "fell" if clock < before else "rose"
                words.append(f"the clock of {whose} {way} from {before / 1e6:.1f} to {clock / 1e6:.1f} GHz")
        if self._probe is not None:
            (cpu, wall), (cpu_before, _) = self._computed(), self._probe
            if cpu > (1 + 2 * CLOCK) * cpu_before:
                words.append(
                    f"a small computation takes {units.percent(cpu / cpu_before - 1)} more CPU time than before: the machine is slower"
                )
            elif wall > 1.5 * cpu:
                words.append(f"a thread gets {units.percent(cpu / wall)} of a core: others have the rest")
            else:
                words.append("a small computation takes as long as before: it is not the cores")
        return tuple(words)

    def _clocks(self) -> float | None:
        """Mean kHz of the cores; None where the kernel does not say."""
        values = []
        for path in self._cpufreq.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
            with contextlib.suppress(OSError, ValueError):
                values.append(float(path.read_text()))
        return sum(values) / len(values) if values else None

    def _computed(self) -> tuple[float, float]:
        """CPU and wall seconds of a small sum, the best of five."""
        best = (float("inf"), float("inf"))
        for _ in range(5):
            wall, cpu = time.perf_counter(), time.thread_time()
            sum(map(abs, range(_PROBE)))
            best = min(best, (time.thread_time() - cpu, time.perf_counter() - wall))
        return best


class PartsOfBackward:
    """Which part of a backward takes longer, by what a model in DDP notes of itself: it times one backward in 100."""

    def __init__(self, model: Callable[[], Any]) -> None:
        """`model` gives it, None = there is none; it is not kept alive."""
        self._model = model
        self._before: dict[str, deque[float]] = {name: deque(maxlen=50) for name in (REDUCTION, COMPUTING)}

    @classmethod
    def of_process(cls) -> "PartsOfBackward":
        """Of the first model in DDP among the living objects, some 300,000, which are searched once."""
        models = (weakref.ref(each) for each in gc.get_objects() if type(each).__name__ == "DistributedDataParallel")
        return cls(next(models, lambda: None))

    def _now(self) -> dict[str, float]:
        """Seconds of the latest backward that was timed: of the reduction, as far as no computing hides it, and of computing."""
        try:
            noted = self._model()._get_ddp_logging_data()
            names = ("backward_comm_time", "backward_compute_comm_overlap_time", "backward_compute_time")
            reduction, hidden, computing = (noted[name] / 1e9 for name in names)
        except Exception:  # no DDP, nothing timed yet, or another release of torch
            return {}
        return {REDUCTION: reduction - hidden, COMPUTING: computing}

    def note(self) -> None:
        """Nothing has changed: read them, for later."""
        for name, seconds in self._now().items():
            self._before[name].append(seconds)

    def part(self, event: AlarmEvent) -> AlarmEvent:
        """The alarm of a longer backward as that of the part that explains half of it or more; as it is where none is known to."""
        for name, seconds in self._now().items() if event.phase == "backward" and event.slower else ():
            before = median(self._before[name] or [math.inf])
            if seconds - before >= (event.after - event.before) / 2:
                return replace(event, phase=name, before=before, after=seconds)
        return event


def resident() -> float:
    """Bytes of main memory that this process holds now; nan off Linux."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return math.nan


def device_clock(device: int | None) -> float | None:
    """kHz of a GPU's multiprocessors now; None where there is no GPU, or no NVML (extra `gpu`) to ask."""
    torch = sys.modules.get("torch")
    try:
        return 1e3 * torch.cuda.clock_rate(device) if torch is not None and device is not None else None
    except Exception:  # of NVML, which is not installed everywhere, and of its errors
        return None


class OtherRanks:
    """The alarms of all ranks of a run, each in a small file of its own rank in the run directory."""

    def __init__(self, folder: Path, rank: int) -> None:
        """`folder` need not be there yet."""
        self._folder, self._own = folder, f"events{rank}.jsonl"

    def put(self, event: AlarmEvent) -> None:
        """Let the others know of an alarm of this rank."""
        with contextlib.suppress(OSError):  # it is in the rank's own file, too
            self._folder.mkdir(exist_ok=True)
            writer = LineWriter(self._folder / self._own)
            writer.write([event.to_row()])
            writer.close()

    def __call__(self) -> list[AlarmEvent]:
        """What the others have reported so far."""
        files = [path for path in sorted(self._folder.glob("events*.jsonl")) if path.name != self._own]
        rows = [row for path in files for row in LineTail(path).read(salvage=True)]
        return [event for event in map(AlarmEvent.of_row, rows) if event]


class Alarm:
    """A background thread that looks at what a recording has finished, and reports changes."""

    def __init__(
        self,
        take: Callable[[], Sequence[Row]],
        report: Callable[[AlarmEvent, str], object],
        *,
        rank: int = 0,
        ranks: int = 1,
        done: int = 0,
        experiments: bool = False,
        traces: Any = None,
        losses: Callable[[int, int], list[float]] | None = None,
        device: int | None = None,
        others: Callable[[], Sequence[AlarmEvent]] | None = None,
    ) -> None:
        """Begin to follow the steps that `take` gives: those finished since it was called last.

        `report` gets each alarm and its sentence ("" if another of the `ranks` reports it), `done` and `losses` are as `StepAlarm` takes
        them, `device` is the index of the GPU. `experiments` allows a small computation, `traces`, an `AlarmTraces`, those of steps
        after something became slower. `others` gives what other ranks have reported so far.
        """
        self._traces = traces
        self._take, self._report, self._ranks = take, report, ranks
        held = None if device is None else lambda: float(sys.modules["torch"].cuda.memory_allocated(device))  # a counter of the host
        self._alarm = StepAlarm(rank, memory=resident, device_memory=held, losses=losses, done=done)
        self._around = Circumstances(experiments=experiments, device=device)
        self._parts = PartsOfBackward.of_process() if ranks > 1 else None
        self.events: list[AlarmEvent] = []
        self._others, self._held = others, list[tuple[AlarmEvent, float]]()
        """Alarms that another rank may explain, and since when they wait for it."""
        self._looked, self._wait = time.monotonic(), INTERVAL
        self.paused = False
        """Is no loop open? Then what waits for steps that may not follow is reported."""
        self._pid = os.getpid()
        self._lock, self._stop = threading.Lock(), threading.Event()
        threading.Thread(target=self._follow, name="workbench-alarm", daemon=True).start()

    def look(self, *, last: bool = False) -> None:
        """Look at what is new; with `last`, also at what still waits."""
        with self._lock:
            self._look(last)

    def pause(self, free: Callable[[], bool] = lambda: True) -> None:
        """A loop is over: look, unless a look was a moment ago or is under way, or locks are not `free`; then the thread does so later."""
        self.paused = True
        if os.getpid() != self._pid or time.monotonic() - self._looked < INTERVAL / 10 or not self._lock.acquire(blocking=False):
            return  # a loop that was left is collected in any thread, in the midst of a look, too
        try:
            with contextlib.suppress(Exception):  # the thread meets the error as well, and says so
                if free():
                    self._look(last=False)
        finally:  # after a KeyboardInterrupt, too
            self._lock.release()

    def _look(self, last: bool) -> None:
        rows, before = self._take(), self._looked
        self._looked = time.monotonic()
        pause = self.paused or last
        for event in self._alarm.see(rows, waits=not pause and len(rows) >= GROUP * BLOCK, pause=pause, last=last):
            slow = self._traces if event.slower and event.phase not in NOT_TIME else None
            around = self._around.changed() if event.phase not in ("loss", NOT_FINITE) else ()
            event = self._parts.part(event) if self._parts else event
            full = replace(event, circumstances=around, trace=slow.ask(event.step) if slow else "")
            self._held.append((full, self._looked))
        if self._held:
            self._report_held(last)
        if not self._alarm.pending:
            self._around.note()
            if self._parts:
                self._parts.note()
        self._wait = seconds_to_wait(len(rows), self._looked - before, pending=self._alarm.pending or bool(self._held))

    def _report_held(self, last: bool) -> None:
        """Tell what is due: what another rank may explain waits for it for some time, since ranks look at different times."""
        others, held = self._others() if self._others else (), self._held
        self._held = []
        for event, since in held:
            reason = waited_for(event, others)
            if self._others and not reason and event.phase in WAITS and not last and self._looked - since < HOLD:
                self._held.append((event, since))
                continue
            event = replace(event, waits_for=reason.rank) if reason else event
            self.events.append(event)
            self._report(event, "" if reason else event.words(self._ranks))

    def close(self) -> str:
        """Look a last time, and end. Returns the digest: "" if nothing was reported."""
        self._stop.set()
        if os.getpid() == self._pid:
            self.look(last=True)
        traces = [event.trace for event in self.events if event.trace and self._traces and self._traces.written(event.trace)]
        return digest(self.events, self._ranks, traces)

    def _follow(self) -> None:
        while not self._stop.wait(self._wait):
            try:
                self.look()
            except Exception as error:  # an alarm never ends a training
                self._stop.set()
                print(f"workbench: no more alarms: {error!r}", file=sys.stderr, flush=True)


def seconds_to_wait(steps: int, seconds: float, *, pending: bool) -> float:
    """How long until the next look."""
    return INTERVAL if pending else min(max(INTERVAL, AT_A_LOOK * seconds / max(steps, 1)), LONGEST)


def allowed(alarm: bool | str) -> str:
    """What an `alarm=` argument allows, one of ALARMS; "" = no alarm, unless the launch asks for one.

    Raises:
        ValueError: another word.
    """
    if alarm is True:
        return "always"
    if alarm is False:
        asked = os.environ.get(ENV_ALARM, "")
        return asked if asked in ALARMS else ""
    choice("alarm", alarm, ALARMS, meant={"always": "always"}, also=", True, False")
    return alarm
