"""Timeline: where the time of each training step went, on one rank. Measured and predicted timelines have this same type."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from workbench.core import units
from workbench.core.checks import is_number
from workbench.core.display import table as display
from workbench.core.run_directory import short
from workbench.core.system_load import Noise
from workbench.core.vocabulary import PHASES as PHASES

_READINGS = ("samples", "memory", "cpu")
"""What a step may have besides its phases."""

LARGEST = 2**53
"""Larger whole numbers are not exact as floats."""
WARNING = "warning: "
"""Begins a note on the training itself, not on how it was measured."""
LEFT_OUT = "damaged: "
"""Begins a note on rows that were left out."""

Clock = Literal["host", "device"]

MAX_PROFILED = 1_000_000
"""The most steps that a profiler can have traced at a time."""
MAX_WARMUP = 10
"""The most first steps that statistics leave out by themselves."""


def warmup_of(count: int) -> int:
    """How many of `count` steps are warm-up by default: a fifth, at most MOST_WARMUP."""
    return min(MAX_WARMUP, count // 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step. Its phases are neighbouring intervals of one clock, so they sum to its length."""

    index: int
    """Number of the step on this rank, from 0."""
    phases: tuple[float, ...]
    """Seconds per phase, in the order of PHASES."""
    samples: int | None = None
    """Samples this rank trained on in the step; None = not known from the batch."""
    memory: int | None = None
    """Peak bytes of this process so far, where it was read (not at every step)."""
    cpu: float | None = None
    """CPU seconds of this process and its workers so far, where they were read (not at every step)."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Step":
        """From a row of a `rank<r>.jsonl` file; a phase that is not in it took no time.

        Raises:
            ValueError: its number or a value is not a number, or none that was ever measured: infinite, negative, of 400 digits.
        """
        number = row["step"]
        if type(number) is not int or not 0 <= number < LARGEST:
            raise ValueError(f"step is {short(number)}, expected a number from 0")
        for name in (*PHASES, *_READINGS):
            value = row.get(name)
            sound = name not in PHASES or name not in row if value is None else type(value) in (int, float) and 0 <= value < LARGEST
            if not sound:
                raise ValueError(f"{name} of step {number} is {short(value)}, expected a number from 0")
        phases = tuple(float(row.get(phase, 0.0)) for phase in PHASES)
        return cls(index=row["step"], phases=phases, **{name: row.get(name) for name in _READINGS})

    @property
    def seconds(self) -> float:
        """Length of the step, waiting for data included."""
        return sum(self.phases)


class Pause(NamedTuple):
    """An evaluation or a saved checkpoint inside a training loop, which makes a step longer."""

    kind: str
    """"evaluation" or "checkpoint"."""
    seconds: float
    """What it took; an evaluation lasts until its model is back in training mode, or the next optimizer step has ended."""
    after: int
    """Steps before it whose optimizer step was taken: it lies in the last of these, or in the next one."""
    line: str
    """The user's line: "train.py:41 main"."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Pause | None":
        """From a row of a file; None = it is none."""
        match row.get("pause"):
            case [("evaluation" | "checkpoint") as kind, float(seconds), int(after), str(line)] if 0 <= seconds < LARGEST and after >= 0:
                return cls(kind, seconds, after, line[:200])
        return None


def _is_span(value: Any) -> bool:
    """Is it the first and the last of some steps, and of not too many?"""
    whole = isinstance(value, list | tuple) and len(value) == 2 and all(type(number) is int for number in value)
    return whole and 0 <= value[0] <= value[1] + 1 and value[1] - value[0] < MAX_PROFILED and value[1] < LARGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """Sums over steps, of which means are made; they can be added up as steps come, and taken from each other."""

    count: int = 0
    phases: tuple[float, ...] = (0.0,) * len(PHASES)
    """Seconds per phase, in the order of PHASES."""
    samples: int = 0
    timed: float = 0.0
    """Seconds of the steps whose samples are known."""

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "StepSums":
        known = [step for step in steps if step.samples is not None]
        return cls(
            count=len(steps),
            phases=tuple(sum(step.phases[column] for step in steps) for column in range(len(PHASES))),
            samples=sum(step.samples or 0 for step in known),
            timed=sum(step.seconds for step in known),
        )

    def __add__(self, other: "StepSums") -> "StepSums":
        phases = tuple(a + b for a, b in zip(self.phases, other.phases, strict=True))
        return StepSums(count=self.count + other.count, phases=phases, samples=self.samples + other.samples, timed=self.timed + other.timed)

    def __sub__(self, other: "StepSums") -> "StepSums":
        phases = tuple(max(0.0, a - b) for a, b in zip(self.phases, other.phases, strict=True))  # rounding may end below 0
        return StepSums(count=self.count - other.count, phases=phases, samples=self.samples - other.samples, timed=self.timed - other.timed)

    @property
    def means(self) -> tuple[float, ...]:
        """Mean seconds per phase; nan without a step."""
        return tuple(seconds / self.count if self.count else float("nan") for seconds in self.phases)

    @property
    def samples_per_sec(self) -> float:
        """Samples over the time of the steps whose samples are known; nan without one."""
        return self.samples / self.timed if self.timed > 0 else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline(display.Shown):
    """The steps of one rank; statistics leave out the first `warmup` steps, and say so."""

    rank: int = 0
    """Rank of the process in its run."""
    clock: Clock = "host"
    """"host": `perf_counter_ns`. "device": CUDA events, so that a phase is the time the GPU spent in it."""
    steps: tuple[Step, ...] = ()
    """All steps, warm-up included."""
    warmup: int | None = None
    """First steps left out of every statistic (allocator, caches, worker start-up); None = a fifth of the steps, at most 10."""
    notes: tuple[str, ...] = ()
    """What the measurement has to say about itself."""
    profiled: tuple[int, ...] = ()
    """Numbers of the steps that a profiler slowed down; every statistic leaves them out too."""
    predicted: bool = False
    """True for a prediction; False for a measurement."""
    validations: tuple[float, ...] = ()
    """Seconds of each evaluation between the steps; they are in no step."""
    pauses: tuple[Pause, ...] = ()
    """Evaluations and checkpoints inside the steps of a script that was watched."""
    threads: int | None = field(default=None, compare=False)
    """Threads per operator on a CPU while the loop ran; None = not known, or timed by a device."""
    noise: Noise | None = field(default=None, compare=False)
    """What other processes did meanwhile; None = not measured."""

    @classmethod
    def from_lines(cls, rows: Iterable[Mapping[str, Any]], warmup: int | None = None, rank: int = 0) -> "Timeline":
        """From the rows of a `rank<r>.jsonl` file, even while it is written; steps of a resumed run are counted on.

        A row that is not a step is left out, and a note says so. `rank` is the rank of a file whose first row is missing.
        """
        head: Mapping[str, Any] = {}
        steps, notes, profiled = [], [], list[int]()
        pending: list[tuple[int, int]] = []
        damage = list[str]()
        validations, pauses = list[float](), list[Pause]()
        last, before = -1, 0
        for row in rows:
            if "step" in row:
                try:
                    step = Step.of(row)
                except ValueError as error:
                    damage.append(str(error))
                    continue
                if step.index <= last:  # a run that went on from a checkpoint: its process counts anew
                    before += last + 1
                    profiled = [number for number in profiled if number < before]  # it ended before the others
                last = step.index
                profiled += [before + number for pair in pending for number in range(pair[0], pair[1] + 1)]
                pending.clear()
                steps.append(dataclasses.replace(step, index=before + last) if before else step)
            elif "profiled" in row:
                if _is_span(row["profiled"]):
                    pending.append(tuple(row["profiled"]))  # before the first step of its process, or among them
                else:
                    damage.append(f"profiled is {short(row['profiled'])}, expected the first and the last step")
            elif "validation" in row:
                if is_number(row["validation"], least=0, most=LARGEST):
                    validations.append(float(row["validation"]))
            elif pause := Pause.of(row):
                pauses.append(pause)
            elif "note" in row:
                notes.append(str(row["note"]))
            elif "rank" in row:
                head = row
        profiled += [before + number for pair in pending for number in range(pair[0], pair[1] + 1)]
        if damage:
            rows_are = (
                "1 row is not a step and is left out"
                if len(damage) == 1
                else f"{len(damage)} rows are not steps and are left out, the first"
            )
            notes.append(f"{LEFT_OUT}{rows_are}: {damage[0]}")
        return cls(
            rank=head["rank"] if type(head.get("rank")) is int else rank,
            clock="device" if head.get("clock") == "device" else "host",
            steps=tuple(steps),
            warmup=warmup,
            notes=tuple(notes),
            profiled=tuple(profiled),
            validations=tuple(validations),
            pauses=tuple(pauses),
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Timeline":
        parsed = cls.from_lines(value["steps"], value["warmup"])
        if parsed.notes:
            raise ValueError(parsed.notes[0])
        return cls(
            rank=value["rank"],
            clock=value["clock"],
            steps=parsed.steps,
            warmup=parsed.warmup,
            notes=tuple(value["notes"]),
            profiled=tuple(value.get("profiled", ())),
            predicted=value["predicted"],
            validations=tuple(value.get("validations", ())),
            pauses=tuple(Pause(*pause) for pause in value.get("pauses", ())),
            threads=value.get("threads"),
            noise=Noise(**{**value["noise"], "gpu": tuple(value["noise"]["gpu"])}) if value.get("noise") else None,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; seconds and bytes."""
        return {
            "rank": self.rank,
            "clock": self.clock,
            "warmup": self.warmup,
            "notes": list(self.notes),
            "profiled": list(self.profiled),
            "predicted": self.predicted,
            **({"validations": list(self.validations)} if self.validations else {}),
            **({"pauses": [list(pause) for pause in self.pauses]} if self.pauses else {}),
            **({} if self.threads is None else {"threads": self.threads}),
            **({"noise": dataclasses.asdict(self.noise)} if self.noise else {}),
            "steps": [
                {"step": s.index, **dict(zip(PHASES, s.phases, strict=True)), "samples": s.samples, "memory": s.memory, "cpu": s.cpu}
                for s in self.steps
            ],
        }

    @property
    def left_out(self) -> int:
        """How many of the first steps statistics leave out."""
        return warmup_of(len(self.steps)) if self.warmup is None else self.warmup

    @property
    def measured(self) -> tuple[Step, ...]:
        """The steps behind every statistic: all except warm-up and those that a profiler slowed down."""
        steps = self.steps[self.left_out :]
        return tuple(step for step in steps if step.index not in self.profiled) if self.profiled else steps

    @property
    def count(self) -> int:
        """Number of steps behind every statistic."""
        return len(self.measured)

    def values(self, phase: str | None = None) -> list[float]:
        """Seconds of a phase (None = of the whole step) in each measured step.

        Raises:
            ValueError: no such phase.
        """
        if phase is None:
            return [step.seconds for step in self.measured]
        if phase not in PHASES:
            raise ValueError(f"no phase {phase!r}: a step is made of {', '.join(PHASES)}")
        column = PHASES.index(phase)
        return [step.phases[column] for step in self.measured]

    def mean(self, phase: str | None = None) -> float:
        """Mean seconds; nan without a measured step. Means of the phases add up to the mean of the step (medians do not)."""
        values = self.values(phase)
        return sum(values) / len(values) if values else float("nan")

    def median(self, phase: str | None = None) -> float:
        """Median seconds; nan without a measured step."""
        values = self.values(phase)
        return statistics.median(values) if values else float("nan")

    def spread(self, phase: str | None = None) -> tuple[float, float]:
        """First and third quartile, in seconds; nan with fewer than two measured steps."""
        values = self.values(phase)
        if len(values) < 2:
            return float("nan"), float("nan")
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return low, high

    def share(self, phase: str) -> float:
        """Fraction 0..1 of the measured time that a phase took; nan without a measured step."""
        values, whole = self.values(phase), sum(self.values())
        return sum(values) / whole if whole else float("nan")

    @property
    def validation_share(self) -> float:
        """Fraction 0..1 of the total time of steps and evaluations that evaluations took; nan without a step."""
        spent, steps = sum(self.validations), sum(step.seconds for step in self.steps)
        return spent / (spent + steps) if steps else float("nan")

    @property
    def samples_per_sec(self) -> float:
        """Samples of this rank over the measured time, slow steps included; nan if the sizes of the batches are not known."""
        return StepSums.of(self.measured).samples_per_sec

    @property
    def cpu_per_sample(self) -> float:
        """CPU seconds per sample of this rank and its workers, from consecutive readings (one each 0.3 s) without a profiled step between
        them; nan without two such readings.
        """
        seconds, between = self._cpu
        samples = sum(step.samples or 0 for step in between)
        return seconds / samples if samples else float("nan")

    @property
    def cpu_per_step(self) -> float:
        """The same for a step."""
        seconds, between = self._cpu
        return seconds / len(between) if between else float("nan")

    @property
    def _cpu(self) -> tuple[float, list[Step]]:
        """CPU seconds between readings, and the steps that took them."""
        read = [(place, step.cpu) for place, step in enumerate(self.steps) if step.cpu is not None and place >= self.left_out - 1]
        profiled = set(self.profiled)
        seconds, steps = 0.0, list[Step]()
        for (first, before), (last, after) in itertools.pairwise(read):
            between = self.steps[first + 1 : last + 1]
            if after >= before and profiled.isdisjoint(step.index for step in between):  # less: the process of a run that went on is new
                seconds += after - before
                steps += between
        return seconds, steps

    @property
    def memory(self) -> int | None:
        """Peak bytes of the process, including warm-up; None if they were not read.

        If a host's clock times the steps: the peak before profiled steps, since the profiler's own memory would remain in it, as far as it
        was read there.
        """
        return max((step.memory for step in self._unslowed if step.memory is not None), default=None)

    @property
    def _unslowed(self) -> tuple[Step, ...]:
        """The steps whose peak of memory is that of the training; all where none of them was read."""
        slowed = [step.index for step in self.steps if step.index in self.profiled]
        if not slowed or self.clock == "device":  # a profiler takes nothing of torch's allocator there
            return self.steps
        before = tuple(step for step in self.steps if step.index < slowed[0])
        return before if any(step.memory is not None for step in before) else self.steps

    @property
    def caption(self) -> str:
        """What the numbers are: their kind, how many steps, what was left out, how much they vary."""
        kind = "predicted" if self.predicted else "measured"
        if not self.steps:
            return display.notes([f"no step was {kind} on rank {self.rank}", *self.notes])
        text = f"{kind} on rank {self.rank}, {self.clock} clock: {self.count} steps"
        if self.left_out:
            text += f", the first {self.left_out if self.left_out > 1 else 'one'} left out as warm-up"
        if slowed := [step.index for step in self.steps if step.index in self.profiled]:
            text += f", and steps {min(slowed)} to {max(slowed)}, which a profiler slowed down"
            if self.clock == "host" and self.memory is not None:
                text += " (peak memory is as before them)" if len(self._unslowed) < len(self.steps) else " (its memory is in the peak)"
        low, high = self.spread()
        if self.count >= 2 and high - low > 0.1 * self.median():
            text += f"; the step varies by {units.percent((high - low) / self.median())} (middle half over median)"
        return display.notes([text, *self.notes])

    def without(self, *phases: str) -> "Timeline":
        """The same steps as if these phases took no time: a predicted upper bound of the gain, since what replaces them also costs time.

        Raises:
            ValueError: no such phase.

        >>> step = Step(index=0, phases=(0.6, 0.0, 0.1, 0.2, 0.1, 0.0))
        >>> Timeline(steps=(step,)).without("data_wait").mean()
        0.4
        """
        for phase in phases:
            self.values(phase)
        steps = tuple(
            dataclasses.replace(step, phases=tuple(0.0 if name in phases else t for name, t in zip(PHASES, step.phases, strict=True)))
            for step in self.steps
        )
        return dataclasses.replace(
            self, steps=steps, predicted=True, notes=(*self.notes, f"a ceiling: as if {', '.join(phases)} took no time")
        )

    @property
    def table(self) -> display.Table:
        """One row per phase: mean, share, median, middle half; the last row is the step."""
        rows: list[list[object]] = []
        for phase in (*PHASES, None):
            low, high = self.spread(phase)
            rows.append(
                [
                    phase or "step",
                    units.seconds(self.mean(phase)),
                    units.percent(self.share(phase) if phase else (1.0 if self.count else None)),
                    units.seconds(self.median(phase)),
                    f"{units.seconds(low)} … {units.seconds(high)}",
                ]
            )
        if spent := self.validations:  # its share is that of the time of all steps and evaluations
            mean, median = statistics.mean(spent), statistics.median(spent)
            rows.append(["validation", units.seconds(mean), units.percent(self.validation_share), units.seconds(median), "between steps"])
        return display.Table(
            columns=("phase", "mean", "share", "median", "middle half"), rows=rows, title="Where the step goes", note=self.caption
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per step, warm-up marked: seconds per phase, total, samples, peak bytes."""
        return display.frame(
            [
                {
                    "step": s.index,
                    **dict(zip(PHASES, s.phases, strict=True)),
                    "total": s.seconds,
                    "samples": s.samples,
                    "memory": s.memory,
                    "warmup": i < self.left_out,
                }
                for i, s in enumerate(self.steps)
            ],
            columns=("step", *PHASES, "total", "samples", "memory", "warmup"),
        )

    plot = display.plot_method("step_time")

    def __repr__(self) -> str:
        return f"Timeline(rank={self.rank}, {len(self.steps)} steps)"
