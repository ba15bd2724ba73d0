"""Finds lasting changes in series of a training while it runs: Bayesian online change points of several series at once.

Source: Adams and MacKay, "Bayesian Online Changepoint Detection", 2007 (arXiv 0710.3742): the probability of each length of the present
regime is updated with every value. A value here is the logarithm of the median of a block of steps, which takes single long steps away;
what lies far out counts no more than `FAR` deviations. A change is told when the posterior is sure of it, and when it is also larger than
what windows of the same length have varied by before: noise of trainings is neither normal nor independent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK = 8
"""Steps of a block. Chosen: a slowdown of 100 steps is a dozen blocks, and a long step out of eight moves their median little."""
WARM_UP = 25
"""Blocks from which noise and level are known, before anything is told."""
OLD = 200.0
"""Blocks by which the level of an old regime is known: it follows what drifts, such as a clock that warms up over hours."""
HAZARD = 1 / 2000
"""Probability that a regime ends in a block: every 16,000 steps or so. Chosen; a factor of 10 moves a verdict by a block."""
NEW_LEVEL = 0.2
"""Spread of the level of a new regime around the old one, as a logarithm: 20 %."""
FAR = 4.0
"""Deviations beyond which a value counts as so far."""
FREEDOM = 12.0
"""Degrees of freedom of the values around their level, and blocks by which the noise is known: it follows slow changes."""
LEAST_BLOCKS, MOST_BLOCKS = 4, 40
"""Blocks of a new regime from which on it is told, and until when it is looked at."""
SURE = 0.95
"""Posterior probability that the present regime is no older than the one that is told."""
LEAST_CHANGE = 0.07
"""Relative change below which nothing is told. Chosen: slowdowns of 10 % must be found."""
BEYOND = 1.3
"""How far a change must exceed the largest change between neighbouring windows before. Chosen on made series with heavy tails and drift
(`benchmarks/change_points.py`): with 1, a day of steps has false alarms; with 2, a slowdown of 10 % under such noise may be missed."""
CONTRAST = 5.0
"""Standard errors of the two medians by which they must differ."""
SAME = 12
"""Blocks before a change that do not count as what was before: the posterior may take it for younger than it is."""
HISTORY = 300
"""Blocks that are remembered for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A series has another level since a step."""

    series: str
    """Its name."""
    step: int
    """The first step at the new level, about: the beginning of a block."""
    before: float
    """The level before, in the unit of the series."""
    after: float

    @property
    def ratio(self) -> float:
        """New level over old one."""
        return self.after / self.before if self.before > 0 else math.inf


class ChangePoints:
    """Follows several series; `add` takes one value of each per step, `add_blocks` many steps at once."""

    def __init__(self, series: Sequence[str], *, floor: float = 0.02, upward: bool | Sequence[str] = False) -> None:
        """Nothing is known yet.

        Args:
            series: their names.
            floor: added to each value, as a part of the first series' first level: what is close to 0 does not matter, however it varies.
                To a series that is `upward`, as a part of its own.
            upward: tell only what rises, and hold it only against earlier rises: of what is meant to fall, such as a loss. True = of all
                series, or the names of some.
        """
        self.series, self._floor = tuple(series), floor
        rising = (self.series if upward else ()) if isinstance(upward, bool) else upward
        self._upward = np.array([name in rising for name in self.series])
        count = len(self.series)
        self._block: list[Sequence[float]] = []
        self._steps = self._blocks = self._length = 0
        self._history = np.zeros((count, 2 * _KEPT))
        """Logarithms of the latest blocks, the first `_length` columns."""
        self._since = np.full(count, -1)
        """Of each series: its first block with a value; -1 = there was none yet."""
        self._first = np.zeros(count, dtype=np.int64)
        """Number of the block with which its history begins."""
        self._begun = np.zeros(count, dtype=bool)
        """Are its noise and level known?"""
        self._added, self._reference = np.zeros(count), 0.0
        shape = (count, MOST_BLOCKS + 2)
        # the posterior: of each series, a row of regimes of age 0, 1, … MOST_BLOCKS, and one of all that are older
        self._log, self._mean, self._variance = np.full(shape, -700.0), np.zeros(shape), np.ones(shape)
        self._log[:, -1] = 0.0
        self._variance0 = np.ones(count)
        self._wider, self._follow, self._shrink = np.ones(shape), np.zeros(shape), np.ones(shape)
        self._learn = 1 / (np.minimum(np.arange(shape[1]), FREEDOM) + FREEDOM + 1)
        self._rows, self._best = np.arange(count), np.full(count, MOST_BLOCKS + 1)

    def add(self, step: int, values: Sequence[float]) -> list[Change]:
        """The values of a step, in the order of the series; nan = not known in this step. Returns the changes that are told now.

        Args:
            step: its number.
            values: of each series; times, bytes or rates, 0 or more.
        """
        self._block.append(values)
        if len(self._block) < BLOCK:
            return []
        block = np.array([self._block], dtype=np.float64)
        self._block.clear()
        return self.add_blocks(step + 1 - BLOCK, block)

    def add_blocks(self, step: int, values: Floats) -> list[Change]:
        """The values of whole blocks of steps; as `add` of each of them, in a fraction of the time.

        Args:
            step: number of the first.
            values: (blocks, BLOCK, series), as `add` takes them.
        """
        changes = []
        for middle in _middles(values):
            step += BLOCK
            self._steps = step
            changes += self._add_block(middle)
        return changes

    def level(self, name: str) -> float:
        """The level of a series now; nan before it is known."""
        place = self.series.index(name)
        if self._since[place] < 0:
            return math.nan
        return math.exp(_middle(self._known(place)[-WARM_UP:].tolist())) - float(self._added[place])

    def _known(self, place: int) -> Floats:
        """The history of a series, which begins with its first value."""
        count = min(self._blocks - int(self._since[place]), self._length, _KEPT)
        return self._history[place, self._length - count : self._length]

    def _add_block(self, values: Floats) -> list[Change]:
        if not self._reference and values[0] > 0:
            self._reference = self._floor * float(values[0])
        ready = bool(self._begun.all())
        if not ready:
            fresh = (self._since < 0) & (values == values)
            self._since[fresh] = self._first[fresh] = self._blocks
            self._added[fresh] = np.where(self._upward, self._floor * values, self._reference)[fresh]
        logs = np.log(np.maximum(values + self._added, 1e-12))
        if self._length == 2 * _KEPT:
            self._history[:, :_KEPT] = self._history[:, _KEPT:]
            self._length = _KEPT
        if self._length:
            np.copyto(logs, self._history[:, self._length - 1], where=logs != logs)  # unknown: as it was before
        else:
            np.nan_to_num(logs, copy=False, nan=0.0)
        self._history[:, self._length] = logs
        self._length += 1
        self._blocks += 1
        changes = []
        if self._begun.any():
            self._update(logs)
            changes = self._told()
        if not ready:
            due = ~self._begun & (self._since >= 0) & (self._blocks - self._since >= WARM_UP)
            if due.any():
                self._begin(due)
        return changes

    def _begin(self, due: "NDArray[np.bool_]") -> None:
        """Prior of all regimes of some series: the level anywhere within 20 % of the present one, the noise as it was seen."""
        history = self._history[due, self._length - WARM_UP : self._length]
        middle = np.median(history, axis=1)[:, None]
        noise = np.maximum(_spread(history, middle, upward=self._upward[due]), 2e-3)[:, None]
        kappa = noise**2 / NEW_LEVEL**2 + np.arange(MOST_BLOCKS + 2)[None, :]
        kappa[:, -1] = OLD
        self._variance0[due], self._variance[due], self._mean[due] = noise[:, 0] ** 2, noise**2, middle
        self._wider[due], self._follow[due], self._shrink[due] = 1 + 1 / kappa, 1 / (kappa + 1), kappa / (kappa + 1)
        self._log[due, :-1], self._log[due, -1], self._best[due] = -700.0, 0.0, MOST_BLOCKS + 1
        self._begun |= due

    def _update(self, values: Floats) -> None:
        """One value of each series."""
        log, mean, variance = self._log, self._mean, self._variance
        level = mean[self._rows, self._best]
        far = FAR * np.sqrt(variance[self._rows, self._best])
        off = np.minimum(np.maximum(values, level - far), level + far)[:, None] - mean
        square = off * off
        scale = variance * self._wider
        likely = square / scale
        likely /= FREEDOM
        np.log1p(likely, out=likely)
        likely *= -0.5 * (FREEDOM + 1)
        np.log(scale, out=scale)
        scale *= 0.5
        likely -= scale
        log += likely
        # all that are older than the oldest that is told are one: it keeps the level of the more probable one
        older = log[:, -2] > log[:, -1]
        merged = np.logaddexp(log[:, -2], log[:, -1])
        off *= self._follow
        off += mean
        square *= self._shrink
        square -= variance
        square *= self._learn
        square += variance
        np.maximum(square, 0.25 * self._variance0[:, None], out=square)
        mean[:, -1] = np.where(older, off[:, -2], off[:, -1])
        variance[:, -1] = np.where(older, square[:, -2], square[:, -1])
        mean[:, 1:-1], mean[:, 0] = off[:, :-2], level
        variance[:, 1:-1], variance[:, 0] = square[:, :-2], self._variance0
        log += _LOG_STAY
        log[:, 1:-1] = log[:, :-2].copy()
        log[:, -1] = merged
        log[:, -1] += _LOG_STAY
        log[:, 0] = likely[:, 0]
        log[:, 0] += _LOG_CHANGE
        self._best = log.argmax(axis=1)
        log -= log[self._rows, self._best][:, None]

    # What is told

    def _told(self) -> list[Change]:
        changes = []
        best = self._best
        for place in np.nonzero((best >= LEAST_BLOCKS) & (best <= MOST_BLOCKS))[0].tolist():
            age = int(best[place])
            if len(self._known(place)) < age + WARM_UP or self._blocks - age <= self._first[place]:
                continue  # it was told, or the series begins there
            weights = np.exp(self._log[place])
            if weights[: age + 2].sum() < SURE * weights.sum():
                continue
            if change := self._checked(place, age):
                changes.append(change)
        return changes

    def _checked(self, place: int, age: int) -> Change | None:
        """The change, if it is beyond what the series has done before."""
        row, upward, added = self._known(place), bool(self._upward[place]), float(self._added[place])
        start = max(0, len(row) - self._blocks + int(self._first[place]))
        earlier, later = row[start : len(row) - age], row[len(row) - age :]
        if len(earlier) < WARM_UP:
            return None
        near = earlier[-max(50, 2 * age) :]
        old, new = float(np.median(near)), float(np.median(later))
        before, after = math.exp(old) - added, math.exp(new) - added
        change = new - old
        if upward and change < 0:
            return None
        noise = float(_spread(near, old, upward=self._upward[place]))
        error = 1.2533 * noise * math.sqrt(1 / age + 1 / len(near))
        settled = earlier[:-SAME] if len(earlier) >= WARM_UP + age + SAME else earlier
        earlier_changes = _largest(settled, age, upward=upward)
        if abs(change) < max(math.log1p(LEAST_CHANGE), CONTRAST * error, BEYOND * earlier_changes):
            return None
        self._first[place] = self._blocks - age
        return Change(series=self.series[place], step=self._steps - age * BLOCK, before=max(0.0, before), after=max(0.0, after))


_KEPT = HISTORY + MOST_BLOCKS
_LOG_STAY, _LOG_CHANGE = math.log1p(-HAZARD), math.log(HAZARD)


def _middle(values: Sequence[float]) -> float:
    """Their upper median without nan; nan if none is left."""
    known = sorted(value for value in values if value == value)
    return known[len(known) // 2] if known else math.nan


def _middles(values: Floats) -> Floats:
    """The same of each block and series, of (blocks, BLOCK, series)."""
    rising = np.sort(values, axis=1)  # nan comes last
    unknown = (rising != rising).sum(axis=1)
    if not unknown.any():
        return rising[:, BLOCK // 2]
    return np.take_along_axis(rising, (BLOCK - unknown)[:, None] // 2, axis=1)[:, 0]


def _spread(values: Floats, middle: Floats | float, *, upward: "NDArray[np.bool_]") -> Floats:
    """Standard deviation of each row around its middle, by the median of deviations; of what falls, by those of neighbours."""
    around = 1.4826 * np.median(np.abs(values - middle), axis=-1)
    if not upward.any():
        return np.asarray(around)
    return np.where(upward, 1.4826 / math.sqrt(2) * np.median(np.abs(np.diff(values)), axis=-1), around)


def _largest(values: Floats, width: int, *, upward: bool) -> float:
    """The largest change, or rise, between the median of a window and that of the blocks before it, as it was before."""
    changes = [0.0]
    reach = max(50, 2 * width)
    for end in range(len(values), WARM_UP + width - 1, -max(1, width // 2)):
        window, before = values[end - width : end], values[max(0, end - width - reach) : end - width]
        if len(before) >= WARM_UP:
            change = float(np.median(window)) - float(np.median(before))
            changes.append(change if upward else abs(change))
    return max(changes)
