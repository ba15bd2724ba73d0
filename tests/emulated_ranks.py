"""Collectives of emulated GPUs in several processes: each ends when all ranks have launched it and are ready."""

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

POLL = 5e-5
"""Seconds between two looks at what other ranks have launched."""
Moment = Mapping[int, float]
"""The latest of some times: of `moment[n]` seconds after collective n has ended; -1 stands for the zero of the host's clock."""


def at(seconds: float) -> Moment:
    return {-1: seconds}


def plus(moment: Moment, seconds: float) -> Moment:
    return {n: offset + seconds for n, offset in moment.items()}


def latest(*moments: Moment) -> Moment:
    keys = {n for moment in moments for n in moment}
    return {n: max(moment[n] for moment in moments if n in moment) for n in keys}


class Ranks:
    """Processes on one machine, whose collectives wait for each other. They write what they launch to files in a shared folder."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        folder: Path | None = None,
        *,
        not_counted: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Begin without a collective.

        Args:
            rank: of this process.
            world_size: number of processes.
            folder: an empty one; None = alone.
            not_counted: inside, waiting until another process has written its part takes no time on the clock.
        """
        self.rank, self.world_size, self.not_counted = rank, world_size, not_counted
        self._posted: list[list[tuple[Moment, float]]] = [[] for _ in range(world_size)]
        self._ends: dict[int, float] = {}
        self._files: list[Any] = []
        self._begun = [""] * world_size
        if folder:
            paths = [folder / f"collectives-of-rank-{number}" for number in range(world_size)]
            self._own = paths[rank].open("w", buffering=1)
            while not all(path.exists() for path in paths):
                time.sleep(POLL)
            self._files = [path.open() for path in paths]
            for file in (self._own, *self._files):
                weakref.finalize(self, file.close)

    def launch(self, ready: Moment, seconds: float) -> int:
        """Launch the next collective. Returns its number."""
        own = self._posted[self.rank]
        own.append((ready, seconds))
        if self._files:
            self._own.write(json.dumps([list(ready.items()), seconds]) + "\n")
        return len(own) - 1

    def known(self, moment: Moment) -> float | None:
        """A moment on the host's clock; None if some rank has not launched a collective that it depends on."""
        ends = [0.0 if n < 0 else self._end(n) for n in sorted(moment)]
        if None in ends:
            return None
        return max(end + moment[n] for n, end in zip(sorted(moment), ends, strict=True) if end is not None)

    def _end(self, number: int) -> float | None:
        for n in range(len(self._ends), number + 1):
            if any(len(posted) <= n for posted in self._posted):
                self._read()
            if any(len(posted) <= n for posted in self._posted):
                return None
            all_posted = [posted[n] for posted in self._posted]
            ready = [self.known(moment) for moment, _ in all_posted]
            self._ends[n] = max(time for time in ready if time is not None) + max(seconds for _, seconds in all_posted)
        return self._ends[number]

    def _read(self) -> None:
        for rank, file in enumerate(self._files):
            *lines, self._begun[rank] = (self._begun[rank] + file.read()).split("\n") if rank != self.rank else [""]
            for line in lines:
                items, seconds = json.loads(line)
                self._posted[rank].append(({int(n): offset for n, offset in items}, seconds))
