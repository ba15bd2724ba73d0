"""MemoryTimeline: bytes per group over some steps, downsampled for a picture; marks and peaks are always kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from workbench.core.codec import JsonDataclass
from workbench.core.display import table
from workbench.core.vocabulary import GROUPS
from workbench.memory.analysis.replay import Numbers, Replay

MOST = 2000
"""Approximate number of points that are kept; marks and the peaks between them always are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline(JsonDataclass):
    """Columns, one entry per point. Time is counted in events (allocations and frees): a prediction knows no seconds."""

    position: tuple[int, ...] = ()
    """Position in the log's events."""
    phase: tuple[str, ...] = ()
    """Of `vocabulary.MEMORY_PHASES`."""
    step: tuple[int, ...] = ()
    """Optimizer step, from 0."""
    micro: tuple[int, ...] = ()
    """Forward and backward, counted over all steps."""
    held: Mapping[str, tuple[int, ...]]
    """Group → bytes after the event."""
    peak: int = 0
    """Index of the peak."""
    moment: str = ""
    """Moment of the peak, in words."""

    @classmethod
    def from_replay(cls, replay: Replay, peak: int | None = None, most: int = MOST) -> "MemoryTimeline":
        """The points of a replayed log that a picture needs: both sides of every mark, the largest and the last of every bin between.

        Args:
            replay: the log of the allocator, replayed.
            peak: position of the moment to mark; None: where the total is largest.
            most: points that are kept, about.
        """
        peak = replay.peak if peak is None else peak
        kept = _kept(replay, peak, most)
        marks = [mark for a, b, mark in replay.stretches for _ in range(int(np.searchsorted(kept, b) - np.searchsorted(kept, a)))]
        return cls(
            position=tuple(kept.tolist()),
            phase=tuple(mark.phase for mark in marks),
            step=tuple(mark.step for mark in marks),
            micro=tuple(mark.micro for mark in marks),
            held={group: tuple(replay.held[kept, column].tolist()) for column, group in enumerate(GROUPS)},
            peak=int(np.searchsorted(kept, peak)),
            moment=replay.moment(peak),
        )

    @property
    def total(self) -> tuple[int, ...]:
        """Bytes of all groups at each point."""
        return tuple(map(sum, zip(*(self.held[group] for group in GROUPS), strict=True)))

    @property
    def spans(self) -> list[tuple[str, int, int, int]]:
        """(phase, step, first point, last point) of each run of points in one phase of one micro-step."""
        runs: list[tuple[str, int, int, int]] = []
        last = None
        for point, key in enumerate(zip(self.phase, self.step, self.micro, strict=True)):
            if key == last:
                runs[-1] = (*runs[-1][:3], point)
            else:
                runs.append((key[0], key[1], point, point))
            last = key
        return runs

    def to_frame(self) -> Any:
        """A DataFrame with one row per point: position, phase, step, micro, bytes per group, total."""
        rows = zip(self.position, self.phase, self.step, self.micro, *(self.held[g] for g in GROUPS), self.total, strict=True)
        names = ("position", "phase", "step", "micro", *GROUPS, "total")
        return table.frame((dict(zip(names, row, strict=True)) for row in rows), columns=names)

    def __repr__(self) -> str:
        return f"MemoryTimeline({len(self.position)} points, {self.step[-1] + 1 if self.step else 0} steps)"


EMPTY = MemoryTimeline(held=dict.fromkeys(GROUPS, ()))
"""The timeline of a measurement that has no log."""


def _kept(replay: Replay, peak: int, most: int) -> Numbers:
    total, count = replay.total, len(replay.total)
    if count <= most:
        return np.arange(count)
    kept = {0, count - 1, replay.peak, peak}
    for a, b, _ in replay.stretches:
        kept |= {a, b - 1, a + int(total[a:b].argmax())}
    bins = max(1, (most - len(kept)) // 2)
    borders = np.linspace(0, count, bins + 1).astype(np.int64).tolist()
    for a, b in pairwise(borders):
        if b > a:
            kept |= {a + int(total[a:b].argmax()), b - 1}
    return np.array(sorted(kept), np.int64)
