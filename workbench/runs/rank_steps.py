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
from workbench.core.checks import is_number
from workbench.core.vocabulary import PHASES
from workbench.timeline.timeline import LARGEST, Clock, Pause, Step, StepSums, Timeline, warmup_of

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
    def means(self) -> tuple[float, ...]:
        """Mean seconds per phase, in the order of PHASES; nan without a measured step."""
        return self.sums.means

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
        skip: how many steps the means leave out; None = the warm-up.
    """

    def __init__(self, path: Path) -> None:
        self._tail, self._rank = run_directory.BytesTail(path), run_directory.rank_of(path.name) or 0
        self.plain = True
        self.skip: int | None = None
        self._clear()

    def _clear(self) -> None:
        self._index = array("q")
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
        return self.take(lines)

    def take(self, lines: bytes) -> bool:
        """Take whole lines that follow those taken before; returns `plain`."""
        if lines:
            self._means = None
            try:
                self._take(lines)
            except (ValueError, OverflowError, RecursionError):  # a damaged row, or one that nobody writes
                self.plain = False
                self._clear()
        return self.plain

    def _take(self, lines: bytes) -> None:
        """Take whole lines."""
        rows = _DECODER.decode_lines(lines)
        if len(rows) != lines.count(b"\n"):
            raise ValueError("an empty line")
        numbers, *columns = [list(map(column, rows)) for column in _COLUMNS]
        if None in numbers:
            others = [place for place, number in enumerate(numbers) if number is None]
            texts = lines.split(b"\n", others[-1] + 1)
            for place in others:
                self._take_other(json.loads(texts[place]))
            numbers, *columns = [
                list(itertools.compress(values, (number is not None for number in numbers))) for values in (numbers, *columns)
            ]
        self._take_numbers(numbers)
        for column, values in zip((*self._phases, *self._readings), columns, strict=True):
            with contextlib.suppress(TypeError):
                column.extend(array("d", values))
                continue
            column.extend([math.nan if value is None else value for value in values])
        read = [value for value in columns[len(PHASES) + _READINGS.index("memory")] if value is not None and value == value]
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

    def __len__(self) -> int:
        return len(self._index)

    @property
    def means(self) -> RankMeans:
        """Of all steps that were read. Each call adds what is new."""
        if self._means is None:
            sums, skip = self._sums, warmup_of(len(self)) if self.skip is None else self.skip
            if skip != sums.skip:
                sums = self._sums = _Sums(skip)
            new, sums.end = slice(sums.end, len(self._index)), len(self._index)
            phases, samples = [column[new] for column in self._phases], self._samples[new]
            added = [sum(column) for column in phases]
            timed = sum(added)
            if math.isnan(sum(samples)):  # those of some steps are not known
                known = [not math.isnan(value) for value in samples]
                timed = sum(map(sum, itertools.compress(zip(*phases, strict=True), known)))
                samples = array("d", itertools.compress(samples, known))
            sums.phases = [before + seconds for before, seconds in zip(sums.phases, added, strict=True)]
            sums.samples, sums.timed, sums.seconds = sum(samples, sums.samples), sums.timed + timed, sums.seconds + sum(added)
            rank, clock = self._rank_and_clock()
            steps, count = len(self) if self.skip is None else max(self._index, default=-1) + 1, sums.end - skip
            self._means = RankMeans(
                rank=rank,
                clock=clock,
                steps=steps,
                left_out=steps - count,
                sums=StepSums(count=count, phases=tuple(sums.phases), samples=_plain(sums.samples), timed=sums.timed),
                seconds=sums.seconds,
                memory=None if math.isnan(self._peak) else _plain(self._peak),
                notes=self._notes,
            )
        return self._means

    def timeline(self) -> Timeline:
        """Every step, as an object."""
        rank, clock = self._rank_and_clock()
        shared = [column if any(column) else itertools.repeat(0.0, len(column)) for column in self._phases]  # shared objects take no memory
        columns = zip(self._index, zip(*shared, strict=True), self._samples, self._memory, self._cpu, strict=True)
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
        pauses = tuple(filter(None, map(Pause.of, self.other_rows)))
        told = [float(row["validation"]) for row in self.other_rows if is_number(row.get("validation"), least=0, most=LARGEST)]
        return Timeline(rank=rank, clock=clock, steps=steps, notes=self._notes, validations=tuple(told), pauses=pauses)

    def _rank_and_clock(self) -> tuple[int, Clock]:
        head: dict[str, Any] = next((row for row in reversed(self.other_rows) if "rank" in row and "note" not in row), {})
        rank = head.get("rank", self._rank)
        return rank if type(rank) is int else self._rank, "device" if head.get("clock") == "device" else "host"

    @property
    def _notes(self) -> tuple[str, ...]:
        return tuple(str(row["note"]) for row in self.other_rows if "note" in row)


def _plain(value: float) -> Any:
    """The number as it was written: whole numbers as int."""
    return int(value) if float(value).is_integer() else value
