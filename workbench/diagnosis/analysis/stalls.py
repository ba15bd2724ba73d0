"""Finds stalls: calls of step() that took far longer than comparable calls, as distinct from noise and from steps of several lengths."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from workbench.core.vocabulary import PHASES
from workbench.diagnosis.analysis.evidence import Evidence, RankEvidence, Stalls
from workbench.harness.results import Place

EXCESS_LEVELS = (15.0, 7.0, 3.0, 1.5, 0.7)
"""Levels of a call's excess, in normal lengths. Calls above a level are examined together, the highest level first, so that a checkpoint
shows among evaluations, and both among batches of different lengths. Chosen: each about half of the one before, so another start finds the
same groups."""
MIN_IRREGULAR_EXCESS = 3.0
"""Without regularity a stall exceeds the normal length by so many of it. Derived: lengths of sequences vary by a factor of 3 in healthy
training. With half, long sequences are stalls; with twice, pauses of less than six steps are not."""
MIN_OVER_SLOWEST_TENTH = 2.0
"""And it is so many times longer than the 90th percentile of the other calls. Chosen. With half, the longest of uneven steps are stalls;
with twice, fewer pauses in uneven steps are seen."""
MIN_STALL_SECONDS = 2e-3
"""Seconds: without regularity, less is what an operating system does now and then. Chosen: interrupts take less, and waits for a core are
left out before. With half or twice as much, only stalls of steps below 1 ms change."""
MAX_IRREGULAR_SHARE = 0.1
"""Irregular stalls are at most this fraction of the calls: what is more frequent is a step of two lengths. Chosen. With half, pauses of
every tenth call are the step's own; with twice, a step of two lengths is called stalled."""
MIN_PERIOD, MIN_PERIOD_OF_SMALL_EXCESS = 4, 8
"""Calls: below the first, regular long steps are how the step works (accumulation, the two networks of a GAN); between the two they are so
if they exceed the normal length by no more than MIN_IRREGULAR_EXCESS. Chosen by the usual numbers of micro-batches, up to 8. Accumulation
by hand over 16 micro-batches is called stalled where the update is long."""
MIN_PERIOD_HITS, MIN_PERIOD_PURITY = 0.8, 0.6
"""A period holds if so many of its turns are long calls, and so many of the long calls are its turns. Chosen: one turn in five may be
missing, and chance hits 0.6 of them hardly ever."""
MIN_TURNS = 3
"""With fewer turns no period is recognised. Chosen: two equal distances may be chance."""
MIN_CALLS_OF_ARM = 4
"""With fewer calls, the normal length of a variant is not known. Chosen: the median of four bears one stall."""
MIN_STALLS = 3
"""Stalls after which their share is known well enough. Chosen: an interval of n ± √n has 42 % of them at its lower end."""
LOOSE_STALLS = 0.04
"""Fraction of the step: where irregular stalls take a share that is known less closely, to `share / √n`, more of them are waited for.
Chosen: as closely as the other parts are known."""
BLAMED_STALLS = 0.15
"""Fraction of the step below which stalls are not to blame. Chosen: that of `verdict.USUAL`."""
EXPECTED_OWN, FEWER_OWN = 10, 4
"""Stalls that a rank should have had on its own after which it is known that it has none: if it has had less than a quarter of them.
Derived as `costs.MIN_EXPECTED_STALLS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of step(). Seconds."""

    number: int
    """Which one it was: the user's own counter (`if step % 100 == 0`) goes by that."""
    seconds: float
    arm: str = "full"
    """Which variant ran: each has its own normal length."""
    delay: float = 0.0
    """Of it: the thread was ready, and waited for a core."""
    gc: float = 0.0
    """Of it: in Python's cyclic garbage collector."""

    @property
    def own(self) -> float:
        """Without what other processes took."""
        return max(0.0, self.seconds - self.delay)


@dataclass(frozen=True, slots=True)
class _Group:
    """Stalls with the same cause."""

    calls: tuple[Call, ...]
    extra: float
    """Mean seconds that each of them adds."""
    every: float | None
    kind: str | None = None
    where: str | None = None

    def per_step(self, steps: int) -> float:
        """Mean seconds that they add to a step."""
        return self.extra / self.every if self.every else self.extra * len(self.calls) / steps


def find_stalls(calls: Iterable[Call], *, wait: float = 0.0, places: Callable[[int], Mapping[Place, float]] | None = None) -> Stalls:
    """Find the calls that took far longer than others of their variant, and what they have in common.

    A call counts if its excess is neither waiting for a core nor usual for this step. It is one of a series at a regular distance
    (checkpoint, evaluation, log), or a pause of the garbage collector, or so long that no healthy step varies so much.

    Args:
        calls: those that were timed, of all variants; untimed calls may be missing if the numbers are right.
        wait: mean seconds of waiting for data per step of the full loop.
        places: seconds that the thread was seen where, during the call of a number.
    """
    arms: dict[str, list[Call]] = {}
    for call in calls:
        arms.setdefault(call.arm, []).append(call)
    judged = sorted((call for arm in arms.values() if len(arm) >= MIN_CALLS_OF_ARM for call in arm), key=lambda call: call.number)
    normal = {name: _normal(arm) for name, arm in arms.items()}
    if not judged:
        return Stalls()
    extras = {call.number: call.own - normal[call.arm] for call in judged}
    groups = _groups(judged, normal, extras)
    stalled = {call.number for group in groups for call in group.calls}
    usual = [call for call in judged if call.number not in stalled]
    groups = [group for group in (_named(group, usual, places) for group in groups) if group.kind != "optimizer"]
    if not groups:
        return Stalls(steps=len(judged))
    numbers = sorted(call.number for group in groups for call in group.calls)
    full = [call.own for call in usual if call.arm == "full"] or [call.own for call in usual]
    added = sum(group.per_step(len(judged)) for group in groups)
    main = max(groups, key=lambda group: group.per_step(len(judged)))
    return Stalls(
        steps=len(judged),
        at=tuple(numbers),
        extra=sum(group.extra * len(group.calls) for group in groups) / len(numbers),
        per_step=added,
        share=added / (added + wait + statistics.fmean(full)) if full else 1.0,
        every=main.every,
        where=main.where,
        kind=main.kind,
    )


def _normal(calls: Sequence[Call]) -> float:
    """The usual length of a call, waiting for cores left out, but where all calls wait for them."""
    return max(statistics.median(call.own for call in calls), statistics.median(call.seconds for call in calls) / 2)


def _groups(judged: Sequence[Call], normal: Mapping[str, float], extras: Mapping[int, float]) -> list[_Group]:
    """Stalls by what they have in common: the collector, a period, or nothing but their length."""
    groups: list[_Group] = []
    collected = [call for call in judged if call.gc > EXCESS_LEVELS[-1] * normal[call.arm] and call.gc > extras[call.number] / 2]
    if collected:
        groups.append(
            _Group(
                tuple(collected),
                statistics.fmean(call.gc for call in collected),
                even_distance([call.number for call in collected]),
                "garbage collection",
            )
        )
    rest = [call for call in judged if call not in set(collected)]
    for level in EXCESS_LEVELS:
        long = [call for call in rest if extras[call.number] > level * normal[call.arm]]
        period, turns = _regular(long, rest, extras, level)
        if turns:
            groups.append(_Group(turns, _mean(turns, extras), period))
            rest = [call for call in rest if call not in set(turns)]
    if odd := _irregular(rest, normal, extras):
        groups.append(_Group(odd, _mean(odd, extras), even_distance([call.number for call in odd])))
    return groups


def _mean(calls: Sequence[Call], extras: Mapping[int, float]) -> float:
    return statistics.fmean(extras[call.number] for call in calls)


def _regular(long: Sequence[Call], rest: Sequence[Call], extras: Mapping[int, float], level: float) -> tuple[float, tuple[Call, ...]]:
    """The distance at which most of the long calls come, if there is one, and the calls that come so."""
    numbers = [call.number for call in long]
    shortest = MIN_PERIOD if level >= MIN_IRREGULAR_EXCESS else MIN_PERIOD_OF_SMALL_EXCESS
    best, turns = 0, list[Call]()
    for period in sorted({b - a for skip in (1, 2, 3) for a, b in zip(numbers, numbers[skip:], strict=False)}):
        if period < shortest:
            continue
        turns_of = Counter(call.number % period for call in rest)
        offset, hits = Counter(number % period for number in numbers).most_common(1)[0]
        if hits >= max(MIN_TURNS, MIN_PERIOD_HITS * turns_of[offset], MIN_PERIOD_PURITY * len(numbers)) and hits > len(turns):
            best, turns = period, [call for call in long if call.number % period == offset]
    if not turns:
        return 0.0, ()
    usual, offset = _mean(turns, extras), turns[0].number % best  # those a little below the level belong to it, too
    return float(best), tuple(call for call in rest if call.number % best == offset and extras[call.number] > usual / 2)


def _irregular(rest: Sequence[Call], normal: Mapping[str, float], extras: Mapping[int, float]) -> tuple[Call, ...]:
    """Calls so long that no healthy step varies so much."""
    if not rest or not min(normal[call.arm] for call in rest) > 0:
        return ()
    ratios = sorted(call.own / normal[call.arm] for call in rest)
    limit = max(1 + MIN_IRREGULAR_EXCESS, MIN_OVER_SLOWEST_TENTH * ratios[int((1 - MAX_IRREGULAR_SHARE) * (len(ratios) - 1))])
    odd = tuple(call for call in rest if call.own / normal[call.arm] > limit and extras[call.number] > MIN_STALL_SECONDS)
    return odd if len(odd) <= max(1, MAX_IRREGULAR_SHARE * len(rest)) else ()


def even_distance(numbers: Sequence[int], least: float = MIN_PERIOD) -> float | None:
    """Their mean distance, if it is about the same each time, and none of neighbours: what slows some steps in a row has no period."""
    distances = [b - a for a, b in pairwise(numbers)]
    if len(distances) < MIN_TURNS - 1:
        return None
    mean = statistics.fmean(distances)
    return mean if mean >= least and statistics.pstdev(distances) <= 0.25 * mean else None


def _named(group: _Group, usual: Sequence[Call], places: Callable[[int], Mapping[Place, float]] | None) -> _Group:
    """The group with the line at which its calls spend their excess."""
    if places is None:
        return group
    surplus = dict[Place, float]()
    for call, weight in [*((call, 1.0) for call in group.calls), *((call, -len(group.calls) / len(usual)) for call in usual)]:
        for place, seconds in places(call.number).items():
            surplus[place] = surplus.get(place, 0.0) + weight * seconds
    kinds = dict[str | None, float]()
    for place, seconds in surplus.items():
        kinds[place.kind] = kinds.get(place.kind, 0.0) + max(0.0, seconds)
    total = sum(kinds.values())
    if total <= 0:
        return group
    kind = max(kinds, key=lambda name: kinds[name])
    where = max((place for place in surplus if place.kind == kind), key=lambda place: surplus[place]).line or None
    return replace(group, kind=group.kind or (kind if kinds[kind] >= total / 2 else None), where=where)


def within(stalls: Stalls, steady: float) -> Stalls:
    """The stalls as a share of the step that takes `steady` seconds without them: share and seconds are of one rule."""
    return replace(stalls, share=stalls.per_step / (steady + stalls.per_step)) if stalls.per_step else stalls


def stalled_phases(e: Evidence) -> dict[str, float]:
    """Phase → seconds per step by which stalled steps exceed the usual ones in it, mean over ranks. Waiting for data is none of theirs."""
    if e.stalls.noted:
        return _saved_phases(e.ranks, e.stalls.per_step)
    at, found = set(e.stalls.at), dict.fromkeys(PHASES, 0.0)
    for i, phase in enumerate(PHASES):
        if not at or phase == "data_wait":
            continue
        for rank in e.ranks:
            long = [step.phases[i] for step in rank.timeline.measured if step.index in at]
            usual = statistics.median([step.phases[i] for step in rank.timeline.measured if step.index not in at] or [0.0])
            found[phase] += max(0.0, sum(long) - len(long) * usual) / rank.timeline.count / len(e.ranks)
    return found


def _saved_phases(ranks: Sequence[RankEvidence], saving: float) -> dict[str, float]:
    """The same for checkpoints that were timed and take up to `saving` per step. They, and what ranks wait for them at barriers, lie
    outside the phases. A rank that saves none, or less, also waits in backward, where gradients are reduced, if it takes longer there.
    """
    found, shortest = dict.fromkeys(PHASES, 0.0), min(rank.timeline.mean("backward") for rank in ranks)
    for rank in ranks:
        own = rank.stalls.per_step if rank.stalls.noted else 0.0
        found["other"] += own / len(ranks)
        found["backward"] += min(saving - own, rank.timeline.mean("backward") - shortest) / len(ranks)
    return found


def stalled_at_most(stalls: Stalls) -> float:
    """Fraction of the time of all steps that stalls take, if as many came by chance as seldom come: above 95 % of a Poisson distribution.

    >>> rare = Stalls(steps=150, at=(70,), extra=0.08, share=0.05)
    >>> round(stalled_at_most(rare), 2)
    0.21
    """
    count = len(stalls.at)
    if not count or stalls.share >= 1:
        return stalls.share
    odds = stalls.share / (1 - stalls.share) * (math.sqrt(count + 1) + 0.8) ** 2 / count
    return odds / (1 + odds)


def stalled_at_least(stalls: Stalls) -> float:
    """The same at the lower end of what is judged: 10 % less where they are regular, else n - √n of n stalls."""
    return stalls.share * (0.9 if stalls.every else 1 - 1 / math.sqrt(len(stalls.at) or 1))


def is_loose(stalls: Stalls) -> bool:
    """Is the share of irregular stalls known too loosely?"""
    return not stalls.every and stalls.share > LOOSE_STALLS * math.sqrt(len(stalls.at))


def is_open(stalls: Stalls, own: Sequence[Stalls]) -> bool:
    """Might more steps change whether stalls are to blame, or which ranks have them?

    Args:
        stalls: in all steps.
        own: of each rank, in steps in which no rank waits for another; empty = of one rank, or of ranks that cannot do without.
    """
    if not stalls.at or stalled_at_most(stalls) < BLAMED_STALLS:
        return False
    if not own:
        return len(stalls.at) < MIN_STALLS
    worst = max(own, key=lambda rank: rank.share)
    expected = len(stalls.at) / stalls.steps * worst.steps
    return len(worst.at) < MIN_STALLS and not (expected >= EXPECTED_OWN and len(worst.at) < expected / FEWER_OWN)
