"""Stride: how often to look, where looking costs something, so that all of it costs little."""

import statistics
import time
from collections.abc import Callable

SHARE = 0.04
"""Of the time of all steps that looking may take. All of it may cost a twentieth: the rest is for what does not show in the steps that are
looked at, as what the one after it pays for caches that it finds cold."""
FIRST, LAST = 4, 64
"""Strides to begin and to end with."""
_WARM_UP = 8
"""Steps that are not compared."""
_COMPARED, _MANY = 8, 1024
"""Steps that are looked at, each compared with the one before it: the question is asked when there are 8, 16, 32, … of them, for who asks
it of the same ones again and again hears in the end what chance says; after so many, new ones are awaited."""


class Stride:
    """Looks at each n-th step, and doubles n while that costs more than a twenty-fifth of the time.

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
        self._steps = 0
        self._began: float | None = None
        self._plain: float | None = None
        self._pairs: list[tuple[float, float]] = []
        self._due = _COMPARED
        self.looking = True

    def step(self) -> bool:
        """A step is over, with what looking at it took; says whether the next one is to be looked at."""
        self._steps += 1
        place = self._steps % self.every
        if not self._fixed and (self.looking or place == 0 or place == self.every - 1):
            self._note(place)
        self.looking = place == 0
        return self.looking

    def _note(self, place: int) -> None:
        """At the borders of a step that is looked at and of the one before; others are not timed."""
        now = self._clock()
        took = now - self._began if self._began is not None else None
        self._began = now if place in (0, self.every - 1) else None
        if not self.looking:
            self._plain = took
        elif took is not None and self._plain is not None and self._steps > _WARM_UP and self.every < LAST:
            self._pairs.append((self._plain, took))
            if len(self._pairs) == self._due:
                self._adapt()

    def _adapt(self) -> None:
        usual = statistics.median(plain for plain, _ in self._pairs)
        if statistics.median(took - plain for plain, took in self._pairs) > SHARE * self.every * usual:
            self.every *= 2
            self._pairs, self._due = [], _COMPARED
        elif self._due < _MANY:
            self._due *= 2
        else:
            self._pairs = []
