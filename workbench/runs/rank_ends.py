"""Reads only the beginning and the end of a rank's file: enough for its means where it has totals, else for those of its last steps."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from workbench.core import run_directory
from workbench.core.checks import is_number, is_whole
from workbench.core.vocabulary import PHASES
from workbench.runs.rank_steps import RankMeans, RankSteps
from workbench.timeline.timeline import LARGEST, MAX_WARMUP, StepSums, Timeline, warmup_of

MANY_RANKS = 128
"""Up to so many ranks, files without totals are read whole. Of more, `RankEnds` reads the ends, and the rest when it is asked for."""
HEAD, TAIL = 4 * 1024, 16 * 1024
"""Bytes read at the beginning of a file (its first row, warnings, what it reads) and at its end: about a hundred steps."""
_TOTALS = b'"totals":'
SAMPLED = "figures of {0:,} ranks are means of the last steps of each (about a hundred); run.timelines[rank] has all steps of a rank"
"""A note on figures that `RankEnds` has read."""


class RankEnds:
    """The ends of one rank's file.

    Attributes:
        complete: are the means those of all measured steps, and `other_rows` all that the file has? So it is with a short one, which is
            read whole, and with a long one that has totals.
        means: of all measured steps, or only of the last ones.
        other_rows: the rows read that are no steps.
    """

    def __init__(self, path: Path) -> None:
        self.complete = False
        self._path, self._rank, self._seen = path, run_directory.rank_of(path.name) or 0, (0, 0, 0)
        self.means = RankMeans.of(Timeline(rank=self._rank))
        self.other_rows: Sequence[Mapping[str, Any]] = ()

    def read(self) -> "RankEnds":
        """Read the ends, if the file has changed; returns itself."""
        try:
            stat = os.stat(self._path)
            seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen != self._seen:
                self._take(*_ends(self._path))
                self._seen = seen
        except FileNotFoundError:  # nothing written yet, or deleted
            pass
        return self

    def whole(self) -> "RankEnds | None":
        """Itself, newly read, where they stand for the whole of a long file: see `complete`."""
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            size = self._seen[1]  # what was read of a file that is gone still stands
        return self if size > HEAD + TAIL and self.read().complete else None

    def _take(self, head: bytes, tail: bytes, start: int) -> None:
        """Take both ends; the tail begins at `start`."""
        self.complete, columns = not tail, RankSteps(self._path)
        if columns.take(head):
            columns.skip = len(columns) if tail else None
            if columns.take(tail):
                whole = self._by_totals(columns, tail, start)
                self.complete |= whole is not None
                self.means, self.other_rows = whole or columns.means, columns.other_rows
                return
        begin, end = ([row for line in part.split(b"\n") if (row := run_directory.parse_row(line)) is not None] for part in (head, tail))
        skip = sum("step" in row for row in begin) if tail else None
        timeline = Timeline.from_lines([*begin, *end], warmup=skip, rank=self._rank)
        means = RankMeans.of(timeline)
        if tail and timeline.steps:
            steps = timeline.steps[-1].index + 1
            means = dataclasses.replace(means, steps=steps, left_out=steps - means.count)
        self.means, self.other_rows = means, [row for row in (*begin, *end) if "step" not in row]

    def _by_totals(self, ends: RankSteps, tail: bytes, start: int) -> RankMeans | None:
        """The means of all measured steps: the last totals in the tail, and the steps after them. None = there are no totals where their
        writer put them (others may have written to the file), or rows that are no steps lie between the ends.
        """
        end = tail.find(b"\n", tail.rfind(_TOTALS)) + 1 if _TOTALS in tail else 0
        line = tail.rfind(b"\n", 0, max(0, end - 1)) + 1
        totals = _totals_in(tail[line:end])
        late = RankSteps(self._path)
        late.skip = 0
        if totals is None or totals["at"] != start + line or not late.take(tail[end:]):
            return None
        steps, rows = totals["steps"] + len(late), totals["rows"] + len(late.other_rows)
        if rows != len(ends.other_rows) or warmup_of(steps) != MAX_WARMUP:
            return None
        counted = StepSums(
            count=totals["steps"] - MAX_WARMUP, phases=tuple(totals["phases"]), samples=totals["samples"], timed=totals["timed"]
        )
        sums, memory = counted + late.means.sums, [peak for peak in (ends.means.memory, totals["memory"]) if peak is not None]
        return dataclasses.replace(
            ends.means, steps=steps, left_out=MAX_WARMUP, sums=sums, seconds=sum(sums.phases), memory=max(memory, default=None)
        )


def _totals_in(line: bytes) -> Mapping[str, Any] | None:
    """What `rank_log.Totals` wrote into a line; None where it is nothing of the kind."""
    totals = (run_directory.parse_row(line) or {}).get("totals")
    whole = ("at", "steps", "rows", "memory")
    if not isinstance(totals, Mapping) or not all(is_whole(totals.get(name), least=0, most=2**53) for name in whole):
        return None
    phases = totals.get("phases")
    numbers = [*(phases if isinstance(phases, list) else []), totals.get("samples"), totals.get("timed")]
    sound = len(numbers) == len(PHASES) + 2 and all(is_number(number, least=0, most=LARGEST) for number in numbers)
    return totals if sound and totals["steps"] > MAX_WARMUP else None


def _ends(path: Path) -> tuple[bytes, bytes, int]:
    """The whole lines at the beginning and at the end of a file, and where the end begins; a short one is all beginning."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= HEAD + TAIL:
            return _whole(file.read()), b"", size
        head = _whole(file.read(HEAD))
        file.seek(size - TAIL)
        tail = file.read()
    begin = tail.find(b"\n") + 1
    return head, _whole(tail[begin:]), size - TAIL + begin


def _whole(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


class HasMeans(Protocol):
    """What is known of a rank's steps: RankMeans, or what a panel shows."""

    @property
    def means(self) -> tuple[float, ...]:
        """Mean seconds per phase, in the order of PHASES; nan without a measured step."""

    @property
    def memory(self) -> int | None: ...


def extremes(ranks: Sequence[HasMeans]) -> list[int]:
    """The places of the ranks that are shown: every one, or of very many the first, and those with the shortest and the longest step, the
    longest of each phase, and the largest memory.
    """
    if len(ranks) <= MANY_RANKS:
        return list(range(len(ranks)))
    steps = {place: sum(rank.means) for place, rank in enumerate(ranks) if not math.isnan(sum(rank.means))}
    chosen = {0, *(pick(steps, key=lambda place: steps[place]) for pick in (min, max) if steps)}
    for column in range(len(PHASES)):
        longest = max(steps, key=lambda place: ranks[place].means[column], default=0)
        if steps and ranks[longest].means[column]:
            chosen.add(longest)
    return sorted({*chosen, max(range(len(ranks)), key=lambda place: ranks[place].memory or 0)})
