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
    """Follows several series; `add` takes one value of each per step. About 14 µs a step for nine series on a busy machine."""

    def __init__(self, series: Sequence[str], *, floor: float = 0.02, upward: bool = False) -> None:
        """Nothing is known yet.

        Args:
            series: their names.
            floor: added to each value, as a part of the first series' first level: what is close to 0 does not matter, however it varies.
            upward: tell only what rises, and hold it only against earlier rises: of what is meant to fall, such as a loss.
        """
        self.series, self._floor, self._upward = tuple(series), floor, upward
        count = len(self.series)
        self._block: list[Sequence[float]] = []
        self._steps = 0
        self._first = np.zeros(count, dtype=np.int64)
        """Of each series: number of the block with which its history begins."""
        self._history: list[list[float]] = [[] for _ in range(count)]
        self._blocks = 0
        self._ready = False
        self._added = 0.0

    def add(self, step: int, values: Sequence[float]) -> list[Change]:
        """The values of a step, in the order of the series; nan = not known in this step. Returns the changes that are told now.

        Args:
            step: its number.
            values: of each series; times, bytes or rates, 0 or more.
        """
        self._block.append(values)
        if len(self._block) < BLOCK:
            return []
        self._steps = step + 1
        middle = [_middle(column) for column in zip(*self._block, strict=True)]
        self._block.clear()
        return self._add_block(middle)

    @property
    def begun(self) -> bool:
        """Was there a value?"""
        return bool(self._block or self._blocks)

    def level(self, name: str) -> float:
        """The level of a series now; nan before it is known."""
        row = self._history[self.series.index(name)]
        return math.exp(_middle(row[-WARM_UP:])) - self._added if row else math.nan

    def _add_block(self, values: Sequence[float]) -> list[Change]:
        if not self._blocks and values[0] > 0:
            self._added = self._floor * values[0]
        for row, value in zip(self._history, values, strict=True):
            row.append(math.log(max(value + self._added, 1e-12)) if value == value else row[-1] if row else math.log(self._added or 1e-12))
            if len(row) > HISTORY + MOST_BLOCKS:
                del row[0]
        self._blocks += 1
        if not self._ready:
            if self._blocks >= WARM_UP:
                self._begin()
            return []
        self._update(np.array([row[-1] for row in self._history]))
        return self._told()

    # The posterior: of each series, a row of regimes of age 0, 1, … MOST_BLOCKS, and one of all that are older

    def _begin(self) -> None:
        """Prior of all regimes: the level anywhere within 20 % of the present one, the noise as it was seen."""
        history = np.array([row[-WARM_UP:] for row in self._history])
        middle = np.median(history, axis=1)[:, None]
        noise = np.maximum(_spread(history, middle, upward=self._upward), 2e-3)[:, None]
        self._variance0 = noise**2
        ages = np.arange(MOST_BLOCKS + 2)[None, :]
        kappa = self._variance0 / NEW_LEVEL**2 + ages
        kappa[:, -1] = OLD
        self._wider = 1 + 1 / kappa
        self._follow = 1 / (kappa + 1)
        self._shrink = kappa / (kappa + 1)
        self._learn = 1 / (np.minimum(ages, FREEDOM) + FREEDOM + 1)
        self._log = np.full(kappa.shape, -700.0)
        self._log[:, -1] = 0.0
        self._mean = np.repeat(middle, kappa.shape[1], axis=1)
        self._variance = np.repeat(self._variance0, kappa.shape[1], axis=1)
        self._rows = np.arange(len(self.series))
        self._ready = True

    def _update(self, values: Floats) -> None:
        """One value of each series."""
        best = self._log.argmax(axis=1)
        level, noise = self._mean[self._rows, best], np.sqrt(self._variance[self._rows, best])
        value = (level + np.clip(values - level, -FAR * noise, FAR * noise))[:, None]
        off = value - self._mean
        square = off * off
        scale = self._variance * self._wider
        likely = -0.5 * np.log(scale) - (0.5 * (FREEDOM + 1)) * np.log1p(square / (FREEDOM * scale))
        logs = self._log + likely
        begun = _LOG_CHANGE + likely[:, 0]
        # all that are older than the oldest that is told are one: it keeps the level of the more probable one
        older = logs[:, -2] > logs[:, -1]
        merged = np.logaddexp(logs[:, -2], logs[:, -1])
        mean = self._mean + off * self._follow
        variance = np.maximum(self._variance + (square * self._shrink - self._variance) * self._learn, 0.25 * self._variance0)
        last_mean = np.where(older, mean[:, -2], mean[:, -1])
        last_variance = np.where(older, variance[:, -2], variance[:, -1])
        self._log[:, 1:-1], self._log[:, 0], self._log[:, -1] = logs[:, :-2] + _LOG_STAY, begun, merged + _LOG_STAY
        self._mean[:, 1:-1], self._mean[:, 0], self._mean[:, -1] = mean[:, :-2], level, last_mean
        self._variance[:, 1:-1], self._variance[:, 0], self._variance[:, -1] = variance[:, :-2], self._variance0[:, 0], last_variance
        self._log -= self._log.max(axis=1, keepdims=True)

    # What is told

    def _told(self) -> list[Change]:
        changes = []
        best = self._log.argmax(axis=1)
        for place in np.nonzero((best >= LEAST_BLOCKS) & (best <= MOST_BLOCKS))[0].tolist():
            age = int(best[place])
            if len(self._history[place]) < age + WARM_UP or self._blocks - age <= self._first[place]:
                continue  # it was told, or the series begins there
            weights = np.exp(self._log[place])
            if weights[: age + 2].sum() < SURE * weights.sum():
                continue
            if change := self._checked(place, age):
                changes.append(change)
        return changes

    def _checked(self, place: int, age: int) -> Change | None:
        """The change, if it is beyond what the series has done before."""
        row = self._history[place]
        start = max(0, len(row) - self._blocks + int(self._first[place]))
        earlier = np.array(row[start : len(row) - age])
        if len(earlier) < WARM_UP:
            return None
        later = np.array(row[len(row) - age :])
        near = earlier[-max(50, 2 * age) :]
        old, new = float(np.median(near)), float(np.median(later))
        before, after = math.exp(old) - self._added, math.exp(new) - self._added
        change = new - old
        if self._upward and change < 0:
            return None
        noise = float(_spread(near, old, upward=self._upward))
        error = 1.2533 * noise * math.sqrt(1 / age + 1 / len(near))
        settled = earlier[:-SAME] if len(earlier) >= WARM_UP + age + SAME else earlier
        earlier_changes = _largest(settled, age, upward=self._upward)
        if abs(change) < max(math.log1p(LEAST_CHANGE), CONTRAST * error, BEYOND * earlier_changes):
            return None
        self._first[place] = self._blocks - age
        return Change(series=self.series[place], step=self._steps - age * BLOCK, before=max(0.0, before), after=max(0.0, after))


_LOG_STAY, _LOG_CHANGE = math.log1p(-HAZARD), math.log(HAZARD)


def _middle(values: Sequence[float]) -> float:
    """Their upper median without nan; nan if none is left."""
    known = sorted(value for value in values if value == value)
    return known[len(known) // 2] if known else math.nan


def _spread(values: Floats, middle: Floats | float, *, upward: bool) -> Floats:
    """Standard deviation of each row around its middle, by the median of deviations; of what falls, by those of neighbours."""
    if upward:
        return np.asarray(1.4826 / math.sqrt(2) * np.median(np.abs(np.diff(values)), axis=-1))
    return np.asarray(1.4826 * np.median(np.abs(values - middle), axis=-1))


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
