"""Sets the steps of several ranks side by side, and finds the rank that makes the others wait, by how much and in which part of its step.

Ranks of a synchronous training meet in collectives, and the rank that comes last waits least: the rank with the *shortest* time in
collectives holds the others up. Durations show that without a common clock.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.breakdown import PARTS, Breakdown


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts(display.Shown, JsonDataclass):
    """The parts of the steps that all ranks have. Get it from `trace_set.breakdown()`."""

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    """Numbers of the steps that count: those that every rank has."""
    breakdowns: tuple[Breakdown, ...]
    """Of these steps, in the order of the ranks."""
    notes: tuple[str, ...] = ()

    def values(self, part: str = "total") -> NDArray[np.float64]:
        """Seconds of a part, or of the step: a row per rank, a column per step.

        Raises:
            ValueError: no such part.
        """
        for rank in self.breakdowns:
            rank.mean(part)  # refuses what is none
        return np.array([[getattr(step, part) for step in rank.steps] for rank in self.breakdowns], dtype=np.float64)

    def mean(self, rank: int, part: str = "total") -> float:
        """Mean seconds of a part of a rank's steps.

        Raises:
            ValueError: no such rank, or no such part.
        """
        if rank not in self.ranks:
            raise ValueError(f"no rank {rank!r}: there are {', '.join(map(str, self.ranks))}")
        return self.breakdowns[self.ranks.index(rank)].mean(part)

    def spread(self, part: str = "total") -> float:
        """Seconds between the rank that has most of a part and the one that has least, by their means."""
        means = [self.mean(rank, part) for rank in self.ranks]
        return max(means) - min(means)

    @property
    def caption(self) -> str:
        """What the numbers mean."""
        text = f"means of {len(self.steps)} steps that all {len(self.ranks)} ranks have, taken under the profiler"
        return display.notes([text, *self.notes])

    @property
    def table(self) -> display.Table:
        """One row per rank, a column per part that any of them has, and the spread between ranks."""
        parts = [part for part in (*PARTS, "total") if part == "total" or any(self.mean(rank, part) for rank in self.ranks)]
        rows = [[f"rank {rank}", *(units.seconds(self.mean(rank, part)) for part in parts)] for rank in self.ranks]
        rows.append(["spread", *(units.seconds(self.spread(part)) for part in parts)])
        return display.Table(columns=("", *parts), rows=rows, title="Where the traced step of each rank goes", note=self.caption)

    def to_frame(self) -> Any:
        """A DataFrame with one row per rank and step; seconds."""
        rows = [
            {"rank": rank, **dataclasses.asdict(step)}
            for rank, steps in zip(self.ranks, self.breakdowns, strict=True)
            for step in steps.steps
        ]
        return display.frame(rows, columns=("rank", "step", *PARTS, "total"))

    plot = display.plot_method("ranks")

    def __repr__(self) -> str:
        return f"RankParts(ranks={list(self.ranks)}, {len(self.steps)} steps)"


def rank_parts(breakdowns: Mapping[int, Breakdown], *, marked: bool, notes: tuple[str, ...] = ()) -> RankParts:
    """Keep the steps that every rank has, by the numbers in their marks.

    Where files have no marks, or none in common, the n-th step of one rank is taken for the n-th of another, from the last backwards.
    """
    common = set.intersection(*({step.step for step in breakdown.steps} for breakdown in breakdowns.values()))
    remarks = list(notes)
    if marked and common:
        kept = {rank: [step for step in breakdown.steps if step.step in common] for rank, breakdown in breakdowns.items()}
        most = max(len(breakdown.steps) for breakdown in breakdowns.values())
        if most > len(common):
            remarks.append(f"of up to {most} steps {len(common)} are in all traces, and these count")
    else:
        count = min(len(breakdown.steps) for breakdown in breakdowns.values())
        kept = {rank: list(breakdown.steps[len(breakdown.steps) - count :]) for rank, breakdown in breakdowns.items()}
        if len(breakdowns) > 1:
            remarks.append("the traces have no step marks in common: the last steps of each are taken for the same ones")
    first = next(iter(kept.values()))
    return RankParts(
        ranks=tuple(kept),
        steps=tuple(step.step for step in first),
        breakdowns=tuple(dataclasses.replace(breakdowns[rank], steps=tuple(steps)) for rank, steps in kept.items()),
        notes=tuple(remarks),
    )


CLEAR = 0.05
"""Fraction of the step from which on waiting for a rank is worth a name."""
CLOSE = 0.5
"""A rank that waits less than this times as long as the one that waits most belongs to those that hold it up."""
ENOUGH = 0.25
"""Fraction of the waiting that a longer part has to explain to be named."""
Seconds: TypeAlias = NDArray[np.float64]
OWN = tuple(part for part in PARTS if part != "communication")
"""What a rank does by itself."""
WHY = {
    "data_wait": "its loader is slower",
    "h2d": "its copies to the device take longer",
    "compute": "its operators take longer",
    "host": "Python or the operating system takes longer between its operators",
    "idle": "its device and its operators are idle longer",
    "other": "the time outside of every mark is longer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWait:
    """One rank; mean seconds per step."""

    rank: int
    step: float
    collectives: float
    """In collectives that computing does not hide."""
    waits: float
    """Of that, what the rank that waits least in each step does not have: waiting for others."""
    last: int
    """Steps in which it waits least, so that it came last."""
    held_up: float
    """What the others wait in those steps, their median, spread over all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers(display.Shown, JsonDataclass):
    """Who waits for whom. Get it from `trace_set.stragglers()`."""

    rows: tuple[RankWait, ...]
    ranks: tuple[int, ...]
    """Those that hold the others up in most steps; empty where none does, or where ranks take turns."""
    lost: float
    """What a step loses to its slowest rank, whichever it is: the mean, over all steps, of what the others wait for the last one."""
    phase: str | None
    """The part of their step that is longer than that of the others; None where none is."""
    excess: Mapping[str, float]
    """Part → seconds by which it is longer on them, in the steps in which one of them comes last."""
    steps: int
    details: tuple[str, ...] = ()
    """Which operators, in words."""
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank that holds the others up most; None where none does."""
        return max(self.ranks, key=lambda rank: self._row(rank).held_up, default=None)

    @property
    def seconds(self) -> float:
        """Seconds per step that the others wait for `ranks`."""
        return sum(self._row(rank).held_up for rank in self.ranks)

    @property
    def share(self) -> float:
        """That time as a fraction 0..1 of the step."""
        return self._of_step(self.seconds)

    def _of_step(self, seconds: float) -> float:
        step = sum(row.step for row in self.rows) / len(self.rows) if self.rows else 0.0
        return seconds / step if step else float("nan")

    def _row(self, rank: int) -> RankWait:
        return next(row for row in self.rows if row.rank == rank)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if len(self.rows) < 2:
            return "one rank has a trace: waiting shows only in traces of several"
        if not self.steps:
            return "the traces have no step in common"
        if not self.ranks:
            lost = f"{units.seconds(self.lost)} a step, {units.percent(self._of_step(self.lost))}"
            if self._of_step(self.lost) < CLEAR:
                return f"none: waiting for the last rank costs {lost}"
            turns = sum(row.last > 0 for row in self.rows) > 1
            return f"no rank in particular: {'they take turns in coming last' if turns else 'several come late'}, which costs {lost}"
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        often = sum(self._row(rank).last for rank in self.ranks)
        when = "" if often == self.steps else f", last in {often} of {self.steps} steps"
        return f"{who}{when}: the others wait {units.seconds(self.seconds)} a step, {units.percent(self.share)} of its time"

    @property
    def why(self) -> str:
        """What is longer on the slow ranks, in words; empty where no rank is slow."""
        if not self.ranks:
            return ""
        if self.phase is None:
            return "no part of its own work is longer: the traces do not tell why"
        text = f"{WHY[self.phase]}: {self.phase} is {units.seconds(self.excess[self.phase])} longer than on the others"
        return "; ".join([text, *self.details])

    @property
    def table(self) -> display.Table:
        """One row per rank."""
        rows = [
            [
                row.rank,
                units.seconds(row.step),
                units.seconds(row.collectives),
                units.seconds(row.waits),
                f"{row.last} of {self.steps}",
                units.seconds(row.held_up),
            ]
            for row in self.rows
        ]
        columns = ("rank", "step", "in collectives", "waits for others", "comes last", "others wait for it")
        note = "\n".join([f"Straggler: {self.verdict}", *([f"Why: {self.why}"] if self.why else []), *self.notes])
        return display.Table(columns=columns, rows=rows, title="Who waits for whom, per step", note=note)

    to_frame = display.frame_method("rows", RankWait)

    def __repr__(self) -> str:
        return f"Stragglers(ranks={list(self.ranks)}, {units.seconds(self.seconds)} a step)"


def stragglers(parts: RankParts) -> Stragglers:
    """Judge the parts of all ranks.

    With c the exposed time in collectives, the wait of a rank in a step is c minus the least c of all ranks, which is the exchange itself.
    """
    collectives, totals = parts.values("communication"), parts.values()
    if not totals.size:
        return Stragglers(rows=(), ranks=(), lost=0.0, phase=None, excess={}, steps=0, notes=parts.notes)
    count = len(parts.steps)
    waits = collectives - collectives.min(axis=0)
    last = collectives.argmin(axis=0)
    held = np.zeros(count)
    if len(parts.ranks) > 1:
        # of an even number the lower value in the middle, so that one rank faster than two others makes no straggler
        held = np.array([np.sort(np.delete(waits[:, step], place))[(len(waits) - 2) // 2] for step, place in enumerate(last.tolist())])
    rows = tuple(
        RankWait(
            rank=rank,
            step=float(totals[place].mean()),
            collectives=float(collectives[place].mean()),
            waits=float(waits[place].mean()),
            last=int((last == place).sum()),
            held_up=float(held[last == place].sum() / count),
        )
        for place, rank in enumerate(parts.ranks)
    )
    slow = _slow(waits, last, held, totals)
    excess, phase = _excess(parts, slow, np.isin(last, slow))
    alone = len(parts.ranks) > 1 and not collectives.any()
    notes = ["no collective shows in these traces: ranks without collectives do not wait for each other"] if alone else []
    return Stragglers(
        rows=rows,
        ranks=tuple(parts.ranks[place] for place in slow),
        lost=float(held.mean()),
        phase=phase,
        excess=excess,
        steps=count,
        notes=(*parts.notes, *notes),
    )


def _slow(waits: Seconds, last: NDArray[np.int64], held: Seconds, totals: Seconds) -> list[int]:
    """Places of the ranks that the others wait for: they wait much less than the rank that waits most, are at most half of all ranks, and
    the others wait for them for at least CLEAR of the step, in the median step and on average. Single slow steps do not make a straggler.

    Where most ranks wait much less than one does, only the one that comes last in most steps may be blamed.
    """
    mean = waits.mean(axis=1)
    places = [place for place, wait in enumerate(mean.tolist()) if wait <= CLOSE * mean.max()]
    if len(places) > len(mean) / 2:
        least = int(mean.argmin())
        places = [least] if (last == least).sum() > last.size / 2 else []
    if len(mean) < 2 or not places:
        return []
    theirs = np.isin(last, places)
    usual = float(np.median(np.where(theirs, held, -held)))
    mean_lost = float(np.where(theirs, held, 0.0).mean())
    return places if usual >= CLEAR * float(np.median(totals)) and mean_lost >= CLEAR * float(totals.mean()) else []


def _excess(parts: RankParts, slow: Sequence[int], when: NDArray[np.bool_]) -> tuple[dict[str, float], str | None]:
    """Seconds by which each part is longer on slow ranks than on the median of the others, in the steps in which a slow rank comes last;
    and the part that is longer in the median of these steps.
    """
    if not slow:
        return {}, None
    others = [place for place in range(len(parts.ranks)) if place not in slow]
    longer = {}
    for part in OWN:
        values = parts.values(part)[:, when]
        longer[part] = values[list(slow)].mean(axis=0) - np.median(values[others], axis=0)
    usual = {part: float(np.median(values)) for part, values in longer.items()}
    most = max(usual, key=lambda part: usual[part])
    held = parts.values("communication")[:, when]
    waited = float(np.median(np.median(held[others], axis=0) - held[list(slow)].min(axis=0)))
    return {part: float(values.mean()) for part, values in longer.items()}, most if usual[most] >= ENOUGH * waited else None
