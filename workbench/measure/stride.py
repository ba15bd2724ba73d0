"""Stride: how often to look, where looking costs something, so that all of it costs little."""

import statistics
import time
from collections import deque
from collections.abc import Callable

SHARE = 0.05
"""Of the time of all steps that looking may take."""
FIRST, LAST = 4, 64
"""Strides to begin and to end with."""
_COMPARED, _WARM_UP = 8, 4
"""Steps of a kind that are compared, each once: looking again and again at the same ones would see a difference in the end. Those of the
warm-up are not."""


class Stride:
    """Looks at each n-th step, and doubles n while that costs more than a twentieth of the time.

    It only ever doubles, so the steps that a rank looks at are among those of any rank that looks more often.
    """

    def __init__(self, every: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            every: a fixed one; None = found, from 4 on.
            clock: seconds.
        """
        self.every = every or FIRST
        self._fixed, self._clock = every is not None, clock
        self._last: float | None = None
        self._steps = 0
        self._looked_at: list[float] = []
        self._others: deque[float] = deque(maxlen=_COMPARED)
        self.looking = True

    def step(self) -> bool:
        """A step is over, with what looking at it took; says whether the next one is to be looked at."""
        if not self._fixed:
            self._note()
        self._steps += 1
        self.looking = self._steps % self.every == 0
        return self.looking

    def _note(self) -> None:
        now = self._clock()
        if self._last is not None and self._steps >= _WARM_UP:
            (self._looked_at if self.looking else self._others).append(now - self._last)
            if self.looking:
                self._adapt()
        self._last = now

    def _adapt(self) -> None:
        if self.every >= LAST or len(self._looked_at) < _COMPARED:
            return
        plain = statistics.median(self._others)
        if statistics.median(self._looked_at) - plain > SHARE * self.every * plain:
            self.every *= 2
        self._looked_at.clear()
