"""Reads the steps of a rank into columns as the file grows, which takes far less time and memory than a dict per row.

Only files whose rows are all sound, and without steps that a profiler slowed down, are read this way; `plain` says so. Others, and whoever
needs each single step, take a Timeline.
"""

import contextlib
import itertools
import json
import math
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from workbench.core import run_directory
from workbench.core.vocabulary import PHASES
from workbench.timeline.timeline import LARGEST, Clock, Step, StepSums, Timeline, warmup_of

_READINGS = ("samples", "memory", "cpu")
_Number = Annotated[float, msgspec.Meta(ge=0, lt=LARGEST)]
_Row: Any = msgspec.defstruct(
    "_Row",
    [
        ("step", Annotated[int, msgspec.Meta(ge=0, lt=LARGEST)] | None, None),
        *[(phase, _Number, 0.0) for phase in PHASES],
        *[(reading, _Number | None, math.nan) for reading in _READINGS],
    ],
    gc=False,
)
_DECODER = msgspec.json.Decoder(_Row)
_COLUMNS = [operator.attrgetter(name) for name in ("step", *PHASES, *_READINGS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeans:
    """The means of a rank's steps, equal to those of its Timeline."""

    rank: int
    clock: Clock
    steps: int
    """Steps in all, warm-up included."""
    left_out: int
    """Steps at the start that are left out as warm-up."""
    sums: StepSums
    """Of the measured steps."""
    seconds: float
    """Of the measured steps."""
    memory: int | None
    """Peak bytes of the process."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, timeline: Timeline) -> "RankMeans":
        """Of a timeline."""
        return cls(
            rank=timeline.rank,
            clock=timeline.clock,
            steps=len(timeline.steps),
            left_out=timeline.left_out,
            sums=StepSums.of(timeline.measured),
            seconds=sum(timeline.values()),
            memory=timeline.memory,
            notes=timeline.notes,
        )

    @property
    def count(self) -> int:
        """Steps that were measured."""
        return self.sums.count

    @property
    def samples_per_sec(self) -> float:
        """See `Timeline.samples_per_sec`."""
        return self.sums.samples_per_sec

    def mean(self, phase: str | None = None) -> float:
        """See `Timeline.mean`."""
        whole = self.seconds if phase is None else self.sums.phases[PHASES.index(phase)]
        return whole / self.count if self.count else math.nan

    def share(self, phase: str) -> float:
        """See `Timeline.share`."""
        return self.sums.phases[PHASES.index(phase)] / self.seconds if self.seconds else math.nan


class _Sums:
    """Running sums of the steps from the first one that is measured up to `end`."""

    def __init__(self, skip: int) -> None:
        self.skip = self.end = skip
        self.phases = [0.0] * len(PHASES)
        self.samples = self.timed = self.seconds = 0.0


class RankSteps:
    """The steps of one file.

    Attributes:
        plain: whether they can be read into columns; once false, it stays so.
        other_rows: the rows that are no steps.
    """

    def __init__(self, path: Path) -> None:
        self._tail = run_directory.BytesTail(path)
        self.plain = True
        self._clear()

    def _clear(self) -> None:
        self._index, self._seconds = array("q"), array("d")
        self._phases = [array("d") for _ in PHASES]
        self._readings = self._samples, self._memory, self._cpu = array("d"), array("d"), array("d")  # NaN = not known
        self.other_rows: list[dict[str, Any]] = []
        self._before, self._last = 0, -1
        self._sums, self._peak = _Sums(0), math.nan
        self._means: RankMeans | None = None

    def read(self) -> bool:
        """Take what is new; returns `plain`."""
        if not self.plain:
            return False
        lines = self._tail.read()
        if self._tail.anew:
            self._clear()
        if lines:
            self._means = None
            try:
                self._take(lines)
            except (ValueError, OverflowError, RecursionError):  # a damaged row, or one that nobody writes
                self.plain = False
                self._clear()
        return self.plain

    def _take(self, lines: list[bytes]) -> None:
        """Take whole lines.

        Raises:
            ValueError: one is damaged, or says that a profiler slowed steps down.
        """
        rows = _DECODER.decode_lines(b"\n".join(lines))
        if len(rows) != len(lines):
            raise ValueError("an empty line")
        others = [place for place, row in enumerate(rows) if row.step is None]
        for place in reversed(others):
            del rows[place]
        for place in others:
            self._take_other(json.loads(lines[place]))
        numbers, *columns = [list(map(column, rows)) for column in _COLUMNS]
        self._take_numbers(numbers)
        phases, readings = columns[: len(PHASES)], columns[len(PHASES) :]
        for column, values in zip((*self._phases, *self._readings), (*phases, *readings), strict=True):
            with contextlib.suppress(TypeError):
                column.extend(array("d", values))
                continue
            column.extend([math.nan if value is None else value for value in values])
        self._seconds.extend(array("d", list(map(sum, zip(*phases, strict=True)))))
        read = [value for value in readings[_READINGS.index("memory")] if value is not None and value == value]
        self._peak = max([*read, *([] if math.isnan(self._peak) else [self._peak])], default=math.nan)

    def _take_numbers(self, numbers: Sequence[int]) -> None:
        """Take the numbers of steps; the process of a run that went on counts anew."""
        if all(map(operator.lt, itertools.chain([self._last], numbers), numbers)):
            self._index.extend([self._before + number for number in numbers] if self._before else numbers)
            self._last = numbers[-1] if numbers else self._last
            return
        for number in numbers:
            if number <= self._last:
                self._before += self._last + 1
            self._last = number
            self._index.append(self._before + number)

    def _take_other(self, row: Any) -> None:
        if not isinstance(row, dict) or "step" in row or "profiled" in row:
            raise ValueError("not a plain row")
        self.other_rows.append(row)

    @property
    def means(self) -> RankMeans:
        """Of all steps that were read. Each call adds what is new."""
        if self._means is None:
            sums, skip = self._sums, warmup_of(len(self._index))
            if skip != sums.skip:
                sums = self._sums = _Sums(skip)
            new, sums.end = slice(sums.end, len(self._index)), len(self._index)
            samples, seconds = self._samples[new], self._seconds[new]
            if math.isnan(sum(samples)):  # those of some steps are not known
                known = [not math.isnan(value) for value in samples]
                samples, seconds = (array("d", itertools.compress(values, known)) for values in (samples, seconds))
            sums.phases = [sum(column[new], before) for column, before in zip(self._phases, sums.phases, strict=True)]
            sums.samples, sums.timed = sum(samples, sums.samples), sum(seconds, sums.timed)
            sums.seconds = sum(self._seconds[new], sums.seconds)
            rank, clock = self._rank_and_clock()
            self._means = RankMeans(
                rank=rank,
                clock=clock,
                steps=sums.end,
                left_out=skip,
                sums=StepSums(count=sums.end - skip, phases=tuple(sums.phases), samples=_plain(sums.samples), timed=sums.timed),
                seconds=sums.seconds,
                memory=None if math.isnan(self._peak) else _plain(self._peak),
                notes=self._notes,
            )
        return self._means

    def timeline(self) -> Timeline:
        """Every step, as an object."""
        rank, clock = self._rank_and_clock()
        columns = zip(self._index, zip(*self._phases, strict=True), self._samples, self._memory, self._cpu, strict=True)
        steps = tuple(
            Step(
                index=index,
                phases=phases,
                samples=None if math.isnan(samples) else _plain(samples),
                memory=None if math.isnan(memory) else _plain(memory),
                cpu=None if math.isnan(cpu) else cpu,
            )
            for index, phases, samples, memory, cpu in columns
        )
        return Timeline(rank=rank, clock=clock, steps=steps, notes=self._notes)

    def _rank_and_clock(self) -> tuple[int, Clock]:
        head: dict[str, Any] = next((row for row in reversed(self.other_rows) if "rank" in row and "note" not in row), {})
        rank = head.get("rank", 0)
        return rank if type(rank) is int else 0, "device" if head.get("clock") == "device" else "host"

    @property
    def _notes(self) -> tuple[str, ...]:
        return tuple(str(row["note"]) for row in self.other_rows if "note" in row)


def _plain(value: float) -> Any:
    """The number as it was written: whole numbers as int."""
    return int(value) if float(value).is_integer() else value
