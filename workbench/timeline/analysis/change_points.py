"""Finds lasting changes in series of a training while it runs: Bayesian online change points of several series at once.

Source: Adams and MacKay, "Bayesian Online Changepoint Detection", 2007 (arXiv 0710.3742): the probability of each length of the present
regime is updated with every value. A value here is the logarithm of the median of a block of steps, which takes single long steps away;
what lies far out counts no more than `FAR` deviations. A change is reported when the posterior is sure of it, and when it is also larger
than windows of the same length have varied before: noise of trainings is neither normal nor independent. The posterior costs far more
than the medians, so it is computed only for blocks at which a change may be reported, where a median of the latest blocks has moved.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK = 8
"""Steps of a block. Chosen: a slowdown of 100 steps is a dozen blocks, and a long step out of eight moves their median little."""
WARM_UP = 25
"""Blocks from which noise and level are known, before anything is reported."""
AGAIN = 6
"""The same after a reported change, so that what comes back, or becomes worse, within a hundred steps is reported, too. Until WARM_UP,
noise, and how far windows have varied, are at least what they were before that change."""
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
"""Blocks of a new regime from which on it is reported, and until when it is looked at."""
SURE = 0.95
"""Posterior probability that the present regime is no older than the one that is reported."""
LEAST_CHANGE = 0.07
"""Relative change below which nothing is reported. Chosen: slowdowns of 10 % must be found."""
BEYOND = 1.3
"""How far a change must exceed the largest change between neighbouring windows before. Chosen on made series with heavy tails and drift
(`benchmarks/change_points.py`): with 1, a day of steps has false alarms; with 2, a slowdown of 10 % under such noise may be missed."""
CONTRAST = 5.0
"""Standard errors of the two medians by which they must differ."""
CHANCE = 1e-6
"""Probability, by how often single blocks were beyond the middle of both levels before, that so many of the latest are by chance. Derived:
a day has some 100,000 blocks. Where steps have two lengths, drawn at random, several blocks in a row are of the longer one now and then."""
SAME = 12
"""Blocks before a change that do not count as what was before: the posterior may take it for younger than it is."""
HISTORY = 300
"""Blocks that are remembered for that."""
NEAR = 50
"""Blocks before a change that say what was before; more where the change is older than half of them."""
GROUP = 4
"""Blocks that are looked at together."""
WIDTHS = np.array((4, 6, 8, 12, 20, 36))
"""Lengths in blocks of the windows whose medians are held against those of NEAR blocks before: of each age, two thirds in one of them."""
LOOSE = 0.75
"""Part of a change that is reported at which the posterior is asked: it is reported for other windows than these."""
CAUGHT_UP = MOST_BLOCKS + SAME
"""Blocks back at which a posterior begins anew that was not asked for these and NEAR more."""


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
    reported: int
    """The last step that was known when it was reported."""

    @property
    def ratio(self) -> float:
        """New level over old one."""
        return self.after / self.before if self.before > 0 else math.inf


class ChangePoints:
    """Follows several series, in blocks of steps."""

    def __init__(
        self, series: Sequence[str], *, floor: float = 0.02, upward: bool | Sequence[str] = False, worth: Mapping[str, float] | None = None
    ) -> None:
        """Nothing is known yet.

        Args:
            series: names of the series.
            floor: added to each value, as a part of the first series' first level: what is close to 0 does not matter, however it varies.
                To a series that is `upward`, as a part of its own.
            upward: report only what rises, and hold it only against earlier rises: of what is meant to fall, such as a loss. True = of all
                series, or the names of some.
            worth: of some series, the least change that is reported, as a part of the first series' level then (roughly).
        """
        self.series, self._floor = tuple(series), floor
        self._worth = LOOSE * np.array([(worth or {}).get(name, 0.0) for name in self.series])
        rising = (self.series if upward else ()) if isinstance(upward, bool) else upward
        self._upward = np.array([name in rising for name in self.series])
        count = len(self.series)
        self._waiting = np.empty((0, count))
        """Medians of blocks that are no whole group yet."""
        self.steps = 0
        """The step after those that were looked at."""
        self._blocks = self._length = 0
        self._history = np.zeros((count, 2 * _KEPT))
        """Logarithms of the latest blocks, the first `_length` columns."""
        self._behind = 0
        """The latest blocks that the posterior has not followed."""
        self._since = np.full(count, -1)
        """Of each series: its first block with a value; -1 = there was none yet."""
        self._first = np.zeros(count, dtype=np.int64)
        """Number of the block with which its history begins."""
        self._needed = np.full(count, WARM_UP)
        """Blocks of its history from which on a change is reported."""
        self._usual = np.zeros((count, 2))
        """Before the change that was reported last: its noise, and the largest change between windows."""
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

    def add_blocks(self, step: int, values: Floats, *, waits: bool = True) -> list[Change]:
        """Blocks of steps that follow; nan = not known in that step. Returns the changes that are reported now.

        Args:
            step: number of the first.
            values: (blocks, BLOCK, series), in the order of the series; times, bytes or rates, 0 or more.
            waits: blocks that are less than a group wait for those that follow, which takes the least time; else they are judged now.
        """
        if not len(self._waiting):
            self.steps = step
        waiting, changes = np.concatenate((self._waiting, _median(values.swapaxes(1, 2)))), list[Change]()
        while len(waiting) >= GROUP:
            known = waiting == waiting
            new = ~self._begun & ((self._since >= 0) | known.any(axis=0))
            count = GROUP if new.any() else min(len(waiting), _AT_ONCE) // GROUP * GROUP
            changes += self._add_groups(waiting[:count])
            waiting = waiting[count:]
        if len(waiting) and not waits:
            self._append(waiting)
            changes += self._judge(len(waiting))
            waiting = waiting[:0]
        self._waiting = waiting
        return changes

    def level(self, name: str) -> float:
        """The level of a series now; nan before it is known."""
        place = self.series.index(name)
        if self._since[place] < 0:
            return math.nan
        return math.exp(_median(self._known(place)[-WARM_UP:])) - float(self._added[place])

    def around(self, name: str, step: int) -> tuple[float, float, float]:
        """The level of a series before a step and since it, and the noise before it; nan where they are not known."""
        place, since = self.series.index(name), max(1, (self.steps - step) // BLOCK)
        known = self._known(place) if self._since[place] >= 0 else np.empty(0)
        if len(known) < since + AGAIN:
            return math.nan, math.nan, math.nan
        before, added = np.exp(known[:-since][-NEAR:]) - self._added[place], float(self._added[place])
        old = _median(before)
        return float(old), float(np.exp(_median(known[-since:]))) - added, float(1.4826 * _median(np.abs(before - old)))

    def _known(self, place: int) -> Floats:
        """The history of a series, which begins with its first value."""
        count = min(self._blocks - int(self._since[place]), self._length, _KEPT)
        return self._history[place, self._length - count : self._length]

    def _add_groups(self, middles: Floats) -> list[Change]:
        """Whole groups of blocks, all of whose series have begun, or one group."""
        self._append(middles)
        changes, left = [], len(middles) // GROUP
        while left:
            new = bool((~self._begun & (self._since >= 0)).any())
            for moved in [True] if new else self._moved(left):
                left -= 1
                due = self._judge(GROUP) if moved else []
                changes += due
                if due:
                    break  # what follows is held against the new level
                if not moved:
                    self._behind += GROUP
                    self._go_on(GROUP)
        return changes

    def _go_on(self, blocks: int) -> None:
        self._length, self._blocks, self.steps = self._length + blocks, self._blocks + blocks, self.steps + blocks * BLOCK

    def _append(self, middles: Floats) -> None:
        """Put the logarithms of blocks behind the history, which is not longer by that yet; unknown ones are as they were before."""
        if self._length + len(middles) > 2 * _KEPT:
            self._history[:, :_KEPT] = self._history[:, self._length - _KEPT : self._length]
            self._length = _KEPT
        for number, values in enumerate(middles if (self._since < 0).any() else ()):
            if not self._reference and values[0] > 0:
                self._reference = self._floor * float(values[0])
            fresh = (self._since < 0) & (values == values)
            self._since[fresh] = self._first[fresh] = self._blocks + number
            self._added[fresh] = np.where(self._upward, self._floor * values, self._reference)[fresh]
        logs = np.log(np.maximum(middles + self._added, 1e-12))
        logs[:, self._since < 0] = 0.0
        if (logs != logs).any():
            before = self._history[:, self._length - 1] if self._length else np.zeros(len(self.series))
            for values in logs:
                np.copyto(values, before, where=values != values)
                before = values
        self._history[:, self._length : self._length + len(logs)] = logs.T

    def _moved(self, groups: int) -> list[bool]:
        """May a change be reported at the end of each group of blocks that follow the history? Yes if a late median has moved enough."""
        ends = self._length + GROUP * np.arange(1, groups + 1)
        begin = np.where(self._since < 0, 2 * _KEPT, self._length - self._blocks + self._first)[:, None]
        old, known = self._before(ends, begin)
        latest = self._history[:, np.maximum(ends[:, None] + _LATEST, 0)]
        rise, fall = self._least(old)
        judged = known >= self._needed[:, None, None]
        # at first whether two of the latest values are that far from any level before: a median is, only if as many of its values are
        high = np.where(judged, old + rise, math.inf).min(axis=-1, keepdims=True)
        low = np.where(judged & ~self._upward[:, None, None], old - fall, -math.inf).max(axis=-1, keepdims=True)
        asked = np.nonzero((np.maximum((latest >= high).sum(axis=-1), (latest <= low).sum(axis=-1)) > 1).any(axis=0))[0]
        found = np.zeros(groups, dtype=bool)
        if len(asked):
            found[asked] = self._windows_moved(ends[asked], begin, old[:, asked], known[:, asked], latest[:, asked])
        moved: list[bool] = found.tolist()
        return moved

    def _before(self, ends: NDArray[np.int64], begin: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
        """The level before the latest blocks, `_UNTIL` back from each end, and of how many blocks it is known: (series, ends, _UNTIL)."""
        apart = _UNTIL // GROUP  # a level is that of several ends
        until = ends[0] + GROUP * np.arange(-apart[-1], len(ends) - apart[0])
        values = self._spans(until, begin)
        known = np.clip(until - begin, 0, NEAR)
        level = np.take_along_axis(np.sort(values, axis=-1), known[..., None] // 2, axis=-1)[..., 0]
        places = np.arange(len(ends))[:, None] + apart[-1] - apart
        return level[:, places], known[:, places]

    def _spans(self, until: NDArray[np.int64], begin: NDArray[np.int64]) -> Floats:
        """NEAR blocks of the history before each end, in a last dimension; infinite before the series begins."""
        places = until[..., None] + _BEFORE
        begin = begin.reshape(-1, *[1] * places.ndim)
        values: Floats = np.where(places < begin, math.inf, self._history[:, np.maximum(places, 0)])
        return values

    def _windows_moved(
        self, ends: NDArray[np.int64], begin: NDArray[np.int64], old: Floats, known: NDArray[np.int64], latest: Floats
    ) -> "NDArray[np.bool_]":
        """Of some ends: has the median of any window moved, against its level before, by so much and by so many standard errors?"""
        rise, fall = self._least(old)
        # a median is that much higher if so many of its values are, which costs less than to sort them
        enough = [self._counted(latest[..., None, :] >= (old + rise)[..., None]) >= WIDTHS / 2]
        if not self._upward.all():
            below = self._counted(latest[..., None, :] <= (old - fall)[..., None]) > WIDTHS / 2
            enough.append(~self._upward[:, None, None] & below)
        moved = np.logical_or.reduce(enough) & (known >= self._needed[:, None, None])[..., _PLACES // 2]
        if moved.any():
            before = self._spans(ends[:, None] - _UNTIL, begin)
            ranked = np.sort(np.where(_WITHIN, latest[:, :, None, :], math.inf), axis=-1)
            with np.errstate(invalid="ignore"):  # what is not known is infinite
                change = ranked[..., _PLACES, WIDTHS // 2] - old[..., _PLACES // 2]
                off = np.where(self._upward[:, None, None, None], np.diff(before, prepend=math.inf) / math.sqrt(2), before - old[..., None])
            np.abs(change, out=change, where=~self._upward[:, None, None])
            off = np.sort(np.nan_to_num(np.abs(off), nan=math.inf, posinf=math.inf), axis=-1)
            half = np.maximum(known - self._upward[:, None, None], 0) // 2
            noise = 1.4826 * np.take_along_axis(off, half[..., None], axis=-1)[..., 0]
            error = 1.2533 * noise * np.sqrt(1 / np.maximum(known, 1))
            moved &= change >= LOOSE * CONTRAST * np.hypot(error[..., _PLACES // 2], (1.2533 * noise)[..., _PLACES // 2] / np.sqrt(WIDTHS))
        found: NDArray[np.bool_] = moved.any(axis=(0, 2))
        return found

    def _least(self, old: Floats) -> tuple[Floats, Floats]:
        """By how much a series has to rise, or fall, at which the posterior is asked, by its level before: logarithms."""
        least = LOOSE * math.log1p(LEAST_CHANGE)
        with np.errstate(invalid="ignore"):  # what is not known is infinite
            values = np.exp(old)
            step = values[:1] - self._added[0]
            if not np.isfinite(step).all():  # its change was just reported
                step = np.where(np.isfinite(step), step, self.level(self.series[0]))
            part = self._worth[:, None, None] * step / values
        return np.fmax(least, np.log1p(part)), np.fmax(least, -np.log1p(-np.minimum(part, 1 - 1e-9)))

    @staticmethod
    def _counted(true: "NDArray[np.bool_]") -> "NDArray[np.float32]":
        """How many of the latest blocks are so, by width of their window."""
        counts: NDArray[np.float32] = (true.astype(np.float32) @ _IN)[..., _PLACES // 2, _PLACES]
        return counts

    def _judge(self, blocks: int) -> list[Change]:
        """The blocks that follow the history, and before them those that the posterior was not asked about."""
        if self._behind > CAUGHT_UP + NEAR:
            self._behind = CAUGHT_UP
            self._begin(self._begun, self._history[:, : self._length - CAUGHT_UP], NEAR)
        for column in range(self._length - self._behind, self._length):
            self._update(self._history[:, column])
        self._behind = 0
        return [change for _ in range(blocks) for change in self._add_block()]

    def _add_block(self) -> list[Change]:
        """The block that follows the history."""
        self._go_on(1)
        changes = []
        if self._begun.any():
            self._update(self._history[:, self._length - 1])
            changes = self._due_changes()
        if not self._begun.all():
            due = ~self._begun & (self._since >= 0) & (self._blocks - self._since >= WARM_UP)
            if due.any():
                self._begin(due, self._history[:, : self._length], WARM_UP)
        return changes

    def _begin(self, due: "NDArray[np.bool_]", history: Floats, blocks: int, least: float = 2e-3) -> None:
        """Prior of all regimes of some series: the level anywhere within 20 % of that of the latest blocks, the noise as it was there."""
        history = history[due, -blocks:]
        middle = _median(history)[:, None]
        noise = np.maximum(_spread(history, middle, upward=self._upward[due]), least)[:, None]
        kappa = noise**2 / NEW_LEVEL**2 + np.arange(MOST_BLOCKS + 2)[None, :]
        kappa[:, -1] = OLD
        self._variance0[due], self._variance[due], self._mean[due] = noise[:, 0] ** 2, noise**2, middle
        self._wider[due], self._follow[due], self._shrink[due] = 1 + 1 / kappa, 1 / (kappa + 1), kappa / (kappa + 1)
        self._log[due, :-1], self._log[due, -1], self._best[due] = -700.0, 0.0, MOST_BLOCKS + 1
        self._begun |= due

    def _update(self, values: Floats) -> None:
        """One value of each series."""
        level, far = (each[self._rows, self._best] for each in (self._mean, FAR * np.sqrt(self._variance)))
        off = np.minimum(np.maximum(values, level - far), level + far)[:, None] - self._mean
        scale = self._variance * self._wider
        likely = -0.5 * ((FREEDOM + 1) * np.log1p(off * off / (FREEDOM * scale)) + np.log(scale))
        log = self._log + likely
        variance = self._variance + self._learn * (off * off * self._shrink - self._variance)
        # all that are older than the oldest that is reported are one: it keeps the level of the more probable one
        older = np.where(log[:, -2] > log[:, -1], -2, -1)
        mean, variance = self._mean + self._follow * off, np.maximum(variance, 0.25 * self._variance0[:, None])
        for kept, each, new, last in (
            (self._mean, mean, level, mean[self._rows, older]),
            (self._variance, variance, self._variance0, variance[self._rows, older]),
            (self._log, log, likely[:, 0] + _LOG_CHANGE - _LOG_STAY, np.logaddexp(log[:, -2], log[:, -1])),
        ):
            kept[:, 0], kept[:, 1:-1], kept[:, -1] = new, each[:, :-2], last
        self._best = self._log.argmax(axis=1)
        self._log -= self._log[self._rows, self._best][:, None]

    # What is reported

    def _due_changes(self) -> list[Change]:
        changes = []
        best = self._best
        for place in np.nonzero((best >= LEAST_BLOCKS) & (best <= MOST_BLOCKS))[0].tolist():
            age = int(best[place])
            if len(self._known(place)) < age + WARM_UP or self._blocks - age <= self._first[place]:
                continue  # it was reported, or the series begins there
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
        if len(earlier) < self._needed[place]:
            return None
        usual_noise, usual_change = self._usual[place] if len(earlier) < WARM_UP + age else (0.0, 0.0)
        near = earlier[-max(NEAR, 2 * age) :]
        old, new = float(_median(near)), float(_median(later))
        change = new - old
        if upward and change < 0:
            return None
        if self._worth[place] and abs(math.exp(new) - math.exp(old)) < self._worth[place] * self.level(self.series[0]):
            return None
        noise = max(usual_noise, float(_spread(near, old, upward=self._upward[place])))
        error = 1.2533 * noise * math.sqrt(1 / age + 1 / len(near))
        if abs(change) < max(math.log1p(LEAST_CHANGE), CONTRAST * error):
            return None
        settled = earlier[:-SAME] if len(earlier) >= WARM_UP + age + SAME else earlier
        largest = max(usual_change, _largest(settled, age, upward=upward))
        if abs(change) < BEYOND * largest or _by_chance(settled, later, (old + new) / 2, upward=change > 0) > CHANCE:
            return None
        while age < min(MOST_BLOCKS, len(row) - start) and abs(row[-age - 1] - new) < abs(row[-age - 1] - old):
            age += 1  # the posterior may take it for younger than it is
        self._first[place], self._needed[place], self._usual[place] = self._blocks - age, AGAIN, (noise, largest)
        # as far out, values count less than they are: the posterior would learn the new level slowly, and take it for noise
        self._begin(self._rows == place, self._history[:, : self._length], age, max(noise, 2e-3))
        before, after = max(0.0, math.exp(old) - added), max(0.0, math.exp(new) - added)
        return Change(series=self.series[place], step=self.steps - age * BLOCK, before=before, after=after, reported=self.steps - 1)


_KEPT = HISTORY + MOST_BLOCKS
_AT_ONCE = 128
_PLACES, _BEFORE, _LATEST = np.arange(len(WIDTHS)), np.arange(-NEAR, 0), np.arange(-WIDTHS[-1], 0)
_UNTIL = np.array((8, 12, 36))  # blocks back of what was before, of two windows each: whole groups
_WITHIN = -WIDTHS[:, None] <= _LATEST
_IN = _WITHIN.T.astype(np.float32)
_LOG_STAY, _LOG_CHANGE = math.log1p(-HAZARD), math.log(HAZARD)


def _median(values: Floats) -> Floats:
    """Of each row, without nan; nan if none is left. numpy's takes ten times as long for a few values."""
    rising, known = np.sort(values, axis=-1), (values == values).sum(axis=-1, keepdims=True)  # nan comes last
    both: Floats = np.take_along_axis(rising, np.concatenate(((known - 1) // 2, known // 2), axis=-1), axis=-1).mean(axis=-1)
    return both


def _spread(values: Floats, middle: Floats | float, *, upward: "NDArray[np.bool_]") -> Floats:
    """Standard deviation of each row around its middle, by the median of deviations; of what falls, by those of neighbours."""
    around = 1.4826 * _median(np.abs(values - middle))
    if not upward.any():
        return np.asarray(around)
    return np.where(upward, 1.4826 / math.sqrt(2) * _median(np.abs(np.diff(values))), around)


def _by_chance(before: Floats, latest: Floats, middle: float, *, upward: bool) -> float:
    """Probability that at least as many of the latest blocks are beyond the middle, if each is with probability (k + ½) / (n + WARM_UP).

    n is the number of blocks before, and k how many of those were beyond the middle.
    """
    beyond, count = [int(((values > middle) == upward).sum()) for values in (before, latest)], len(latest)
    often = min(1.0, (beyond[0] + 0.5) / (len(before) + WARM_UP))
    return math.fsum(math.comb(count, k) * often**k * (1 - often) ** (count - k) for k in range(beyond[1], count + 1))


def _largest(values: Floats, width: int, *, upward: bool) -> float:
    """The largest change, or rise, between the median of a window and that of the blocks before it, as it was before."""
    reach = max(NEAR, 2 * width)
    starts = np.arange(len(values), WARM_UP + width - 1, -max(1, width // 2))[:, None] - width
    if not len(starts):
        return 0.0
    before = np.concatenate((np.full(reach, math.nan), values))[starts + np.arange(reach)]
    changes = _median(values[starts + np.arange(width)]) - _median(before)
    return max(0.0, float((changes if upward else np.abs(changes)).max()))
