"""Sets the parts of the steps of several ranks side by side, step by step."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        """What the numbers are."""
        text = f"means of {len(self.steps)} steps that all {len(self.ranks)} ranks have, taken under the profiler"
        return "; ".join([text, *self.notes])

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

    Args:
        breakdowns: of each rank.
        marked: do all files have marks of steps?
        notes: what is missing.
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
