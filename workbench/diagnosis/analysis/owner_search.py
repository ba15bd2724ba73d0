"""Decides which trainings to run next to find the difference between two runs that owns a regression, and when that is clear.

The trainings are short ones of run A with some differences of run B: `Rerun.changes` names them, none = run A as it was. They run in the
order A, changed, A, changed, …, A, and each changed one is compared with the A's around it, so that a machine which becomes slower in the
meantime is not taken for a change. Nothing is kept between two decisions: each follows from the trainings so far.
"""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.core.codec import JsonDataclass
from workbench.core.statistics import SPREAD_DEGREES, USUAL_SPREAD, Interval, Spread, repeated_interval, student_t

Changes = tuple[str, ...]
"""Names of differences, in the order in which they are listed."""
MOST = 12
"""Trainings of one set of differences, each looked at as it comes. Chosen: with the usual spread of 3 % the interval is then ± 3 %."""
FURTHER = (16, 24, 32, 48)
"""How many more of them are made, and looked at, where noise asks for it and so many may decide. Derived: with the first dozen these are
the `LOOKS` that an interval allows for."""
SINGLY = 4
"""Up to so many differences are tried one by one; of more, halves are."""
REPRODUCED = 0.25
"""Part of the recorded regression, of the least in its interval, that the differences must bring again before its owner is looked for.
Chosen: below it, the machine explains more than the differences."""
LEAST = 2
"""Trainings of a set of differences before it is said to bring a change of time. Chosen: on two cores that ten processes wanted, one
training fell into a pause of the others and was three times as fast as those beside it."""
MINE = 0.5
"""Part of a set's effect from which on a part of the set is said to bring it. Derived: of two halves that add up, one brings so much."""
DRAWS, LIKELY = 7, 6
"""How many searches are simulated to say how far one is from its end, and how many of them have ended by then. Chosen: with a third
more trainings than that, 161 of 173 forecasts sufficed for planted owners under a noise of 1 to 6 %."""
FAR = 100
"""Trainings after which a simulated search is given up."""
CONTRARY = 0.1
"""Log ratio from which on the contrary of what was recorded is looked into. Chosen: less is not worth a dozen more trainings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun(JsonDataclass):
    """A short training of run A with some differences of run B."""

    changes: Changes
    """The differences; empty = run A as it was."""
    value: float
    """What was measured: seconds, bytes or loss; nan = it failed."""
    error: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from the trainings so far."""

    kind: str
    """A key of `what_changed.KINDS`, or "measure"."""
    owner: Changes = ()
    """The differences that bring the regression, of kind "owner"."""
    together: bool = False
    """Do they bring it only together?"""
    measure: tuple[Changes, ...] = ()
    """What to run next, of kind "measure"; run A comes after it."""
    why: str = ""
    """What stands in the way, in words."""

    def trainings(self, begun: bool) -> list[Changes]:
        """The trainings to make, of kind "measure": with run A after them, and before them where nothing has `begun`."""
        listed: list[Changes] = [*self.measure, ()] if self.measure != ((),) else [()]
        return listed if begun or listed == [()] else [(), *listed]


def effects(reruns: Sequence[Rerun]) -> dict[Changes, list[float]]:
    """Compare each training with the A's before and after it, interpolated by their places: set of differences → log ratios."""
    base = [(place, math.log(rerun.value)) for place, rerun in enumerate(reruns) if not rerun.changes and rerun.value > 0]
    found: dict[Changes, list[float]] = {}
    for place, rerun in enumerate(reruns):
        if not rerun.changes or not rerun.value > 0 or not base:
            continue
        before = max((at for at in base if at[0] < place), default=None)
        after = min((at for at in base if at[0] > place), default=None)
        if before and after:
            part = (place - before[0]) / (after[0] - before[0])
            level = before[1] + part * (after[1] - before[1])
        else:
            level = (before or after or base[0])[1]
        found.setdefault(rerun.changes, []).append(math.log(rerun.value) - level)
    return found


def effect(reruns: Sequence[Rerun], changes: Changes, usual: float) -> Interval | None:
    """Estimate the log ratio that some differences bring, with its interval, in which the spread of other sets counts; None = not measured.

    Args:
        reruns: the trainings so far, in their order.
        changes: names of the differences.
        usual: standard deviation of such ratios, as known beforehand.
    """
    each = effects(reruns)
    if changes not in each:
        return None
    spread = Spread(usual**2, SPREAD_DEGREES)
    for other, values in each.items():
        if other != changes:
            spread = spread.with_values(values)
    return repeated_interval(each[changes], spread=spread)


def level(reruns: Sequence[Rerun], usual: float) -> Interval | None:
    """Estimate the log of what run A gives today, with its interval; None = not measured."""
    values = [math.log(rerun.value) for rerun in reruns if not rerun.changes and rerun.value > 0]
    return repeated_interval(values, spread=Spread(usual**2, SPREAD_DEGREES)) if values else None


def _noise(reruns: Sequence[Rerun], usual: float) -> float:
    """Return the standard deviation of an effect: `usual`, or what follows from how run A's own trainings differ from one to the next.

    A training and the mean of the two A's beside it vary by 3/2 of the variance of one, two successive A's by twice that variance.
    """
    logs = [math.log(rerun.value) for rerun in reruns if not rerun.changes and rerun.value > 0]
    steps = [(after - before) ** 2 for before, after in itertools.pairwise(logs)]
    return max(usual, math.sqrt(0.75 * statistics.fmean(steps))) if steps else usual


Guess = Callable[[random.Random], Callable[[Changes], float]]
"""A possible truth, drawn by chance: set of differences → log ratio that it brings."""


def trainings_to_go(
    reruns: Sequence[Rerun], decide: Callable[[Sequence[Rerun]], Decision], guess: Guess, usual: float, *, recorded: float = 1.0
) -> int | None:
    """Predict how many more trainings a search takes, if they vary as those so far: LIKELY of DRAWS simulated ones have ended by then.

    Args:
        reruns: the trainings so far, in their order.
        decide: function that decides from some trainings what to do next.
        guess: function that draws what differences may bring.
        usual: standard deviation of an effect, as in `effect`.
        recorded: what run A gave, which counts where it was not trained yet.

    Returns:
        A number of trainings, FAR where it may be more; None = most searches end without an answer.
    """
    numbers = list[int]()
    logs = [math.log(rerun.value) for rerun in reruns if not rerun.changes and rerun.value > 0] or [math.log(recorded)]
    for seed in range(DRAWS):
        chance, made = random.Random(seed), list(reruns)
        brings, degrees = guess(chance), SPREAD_DEGREES + len(logs) - 1
        noise = _noise(reruns, usual) / math.sqrt(1.5) * math.sqrt(degrees / chance.gammavariate(degrees / 2, 2))  # which is not known well
        while (decision := decide(made)).kind == "measure" and len(made) < len(reruns) + FAR:
            for changes in decision.trainings(bool(made))[: len(reruns) + FAR - len(made)]:
                value = statistics.fmean(logs) + chance.gauss(0, noise) + (brings(changes) if changes else 0.0)
                made.append(Rerun(changes=changes, value=math.exp(value)))
        if decision.kind != "unclear":
            numbers.append(len(made) - len(reruns))
    return sorted(numbers)[min(LIKELY, len(numbers)) - 1] if len(numbers) > DRAWS / 2 else None


def one_owner(reruns: Sequence[Rerun], whole: Changes, expected: float) -> Guess:
    """Guess that each difference brings what it brought alone so far, and one of the others, drawn by chance, the rest.

    Args:
        reruns: the trainings so far, in their order.
        whole: names of all differences.
        expected: log ratio that all of them bring together, where that was not measured.
    """
    means = {changes: statistics.fmean(values) for changes, values in effects(reruns).items()}
    known = {name: means[name,] for name in whole if (name,) in means}

    def guess(chance: random.Random) -> Callable[[Changes], float]:
        brings = dict(known)
        if left := [name for name in whole if name not in known]:
            brings[chance.choice(left)] = means.get(whole, expected) - sum(known.values())
        return lambda changes: sum(brings.get(name, 0.0) for name in changes)

    return guess


def decide(
    reruns: Sequence[Rerun], differences: Sequence[str], recorded: tuple[float, float], usual: float, *, change: Interval | None = None
) -> Decision:
    """Decide what to run next, or which difference is to blame.

    Args:
        reruns: the trainings so far, in their order.
        differences: names of the differences, the most suspect first.
        recorded: what runs A and B gave: seconds, bytes or loss.
        usual: standard deviation of an effect, as in `effect`.
        change: log ratio of what was recorded. If 0 is in it, and today's trainings bring no change either, there is nothing to explain.
    """
    whole, regression = tuple(differences), math.log(recorded[1] / recorded[0])
    near, far = sorted((abs(change.low), abs(change.high))) if change else (abs(regression),) * 2
    perhaps = change is not None and 0 in change
    failed = {rerun.changes: rerun.error for rerun in reruns if rerun.error}
    if () in failed:
        return Decision(kind="cannot run", why=f"run A does not run today: {failed[()]}")
    if not whole:
        return _machine(reruns, recorded, usual)
    if whole in failed:
        return Decision(kind="cannot run", why=f"run B does not run today: {failed[whole]}")
    least, usual = LEAST if usual >= USUAL_SPREAD else 1, _noise(reruns, usual)
    seen, count = effect(reruns, whole, usual), len(effects(reruns).get(whole, ()))
    if seen is None:
        return Decision(kind="measure", measure=(whole,))
    sign = math.copysign(1.0, seen.mid if perhaps else regression)
    low, _, high = _along(seen, sign)
    contrary = not perhaps and -high > max(CONTRARY, MINE * abs(regression))  # of what was recorded
    if contrary or low > (0 if perhaps else REPRODUCED * near):
        if count < least and len(whole) == 1:
            return Decision(kind="measure", measure=(whole,))
        return _owner(reruns, whole, -sign if contrary else sign, usual, failed, least)
    if high < MINE * (far if perhaps else abs(regression)):
        return Decision(kind="nothing") if perhaps else _machine(reruns, recorded, usual)
    if more := _further(seen, count, far if perhaps else regression):
        return Decision(kind="measure", measure=_in_turns({whole: more}))
    return Decision(kind="nothing" if perhaps else "unclear", why=f"{count} trainings of each vary too much")


def _further(seen: Interval, count: int, expected: float) -> int:
    """Return how many more trainings of a set to make; 0 = as many as are allowed would hardly tell its effect from none.

    Args:
        seen: its effect so far, a log ratio.
        count: its trainings so far.
        expected: log ratio from which the effect is to be told.
    """
    if count < MOST:
        return 1
    if count >= FURTHER[-1] or seen.width / 2 * math.sqrt(count / FURTHER[-1]) > abs(expected):
        return 0
    return next(each for each in FURTHER if each > count) - count


def _in_turns(numbers: Mapping[Changes, int]) -> tuple[Changes, ...]:
    """Order so many trainings of each set, with run A between two of the same."""
    rounds = [[changes for changes, number in numbers.items() if number > i] for i in range(max(numbers.values()))]
    return tuple(changes for i, each in enumerate(rounds) for changes in ([()] if i else []) + each)


def _along(seen: Interval, sign: float) -> tuple[float, float, float]:
    """Return an effect in the direction of the regression: low, mid, high."""
    return (seen.low, seen.mid, seen.high) if sign > 0 else (-seen.high, -seen.mid, -seen.low)


def _machine(reruns: Sequence[Rerun], recorded: tuple[float, float], usual: float) -> Decision:
    """Decide whether run A is today as run B was ("still"), or as it was itself ("over")."""
    now = level(reruns, usual)
    if now is None:
        return Decision(kind="measure", measure=((),))
    middle, up = (math.log(recorded[0]) + math.log(recorded[1])) / 2, recorded[1] > recorded[0]
    if now.low > middle:
        return Decision(kind="still" if up else "over")
    if now.high < middle:
        return Decision(kind="over" if up else "still")
    if (count := sum(not rerun.changes for rerun in reruns)) >= MOST:
        return Decision(kind="unclear", why=f"{count} trainings of run A lie between what the two runs gave")
    return Decision(kind="measure", measure=((),))


def _owner(reruns: Sequence[Rerun], whole: Changes, sign: float, usual: float, failed: Mapping[Changes, str], least: int) -> Decision:
    """Decide which parts of a set bring its effect: try up to SINGLY differences one by one, of more their halves."""
    if len(whole) == 1:
        return Decision(kind="owner", owner=whole)
    total = effect(reruns, whole, usual)
    assert total is not None
    limit = MINE * sign * total.mid
    half = len(whole) // 2
    parts = [(name,) for name in whole] if len(whole) <= SINGLY else [whole[:half], whole[half:]]
    counts = {part: len(values) for part, values in effects(reruns).items()}
    most, some, vague, taken = list[Changes](), list[Changes](), list[Changes](), 0.0
    undecided = dict[Changes, int]()
    for part in parts:
        if part in failed:
            continue
        seen = effect(reruns, part, usual)
        low, _, high = _along(seen, sign) if seen else (-math.inf, 0.0, math.inf)
        if low > limit and counts[part] < least:
            undecided[part] = 1
        elif low > limit:
            most.append(part)
            taken += high
        elif high >= limit and (count := counts.get(part, 0)) < MOST:
            undecided[part] = 1
        elif low > 0:
            some.append(part)
        elif seen and high >= limit and (more := _further(seen, count, total.mid)):
            undecided[part] = more
        elif high >= limit:
            vague.append(part)
    rest = taken < (1 - REPRODUCED) * sign * total.mid
    if undecided and (rest or not most):
        return Decision(kind="measure", measure=_in_turns(undecided))
    names = " or ".join(", ".join(part) for part in vague)
    if most or some:
        found = _each(reruns, most or some, sign, usual, failed, least)
        if vague and rest and found.kind == "owner":
            found = replace(found, why="; ".join(filter(None, [found.why, f"{names} may bring a part of it as well"])))
        return found
    if vague:
        all_ = f"{', '.join(whole[:-1])} and {whole[-1]}"
        return Decision(
            kind="unclear",
            why=f"{all_} bring it, and {max(counts[part] for part in vague)} trainings with {names} vary too much to say which",
        )
    if left := tuple(name for part in parts if part in failed for name in part):
        return Decision(kind="owner", owner=left, why="by elimination: alone it does not run")
    return Decision(kind="owner", owner=whole, together=True)


def _each(
    reruns: Sequence[Rerun], parts: Sequence[Changes], sign: float, usual: float, failed: Mapping[Changes, str], least: int
) -> Decision:
    """Decide on each of some parts of a set that bring its effect, and put the owners together."""
    decisions = [_owner(reruns, part, sign, usual, failed, least) for part in parts]
    if wanted := tuple(changes for decision in decisions if decision.kind == "measure" for changes in decision.measure):
        return Decision(kind="measure", measure=wanted)
    if len(decisions) == 1:
        return decisions[0]
    owners = tuple(name for decision in decisions for name in decision.owner)
    why = "; ".join(decision.why for decision in decisions if decision.why)
    return Decision(kind="owner" if owners else "unclear", owner=owners, why=why)


def recorded_change(values: tuple[float, float], blocks: tuple[Sequence[float], Sequence[float]]) -> Interval:
    """The log ratio of B's to A's recorded values, with Welch's interval over blocks of steps, which follow one another.

    Args:
        values: what each run gave.
        blocks: what each gave in some blocks of steps, at least one each; those of one step follow each other too closely.
    """
    logs = [[math.log(value) for value in each] for each in blocks]
    mid = math.log(values[1] / values[0])
    variance = sum(statistics.variance(each) / len(each) for each in logs if len(each) > 1)
    half = 2.0 * math.sqrt(variance)
    return Interval(low=mid - half, mid=mid, high=mid + half)


def change_of_launches(values: Sequence[Sequence[float]]) -> Interval:
    """The log ratio of two programs' values from several launches of one of them or of both, with its interval of 90 % (Student's t).

    Launches of the two are taken to vary alike. How the steps within a launch vary says little of that, so it is not counted.

    Args:
        values: what the launches of each program gave; at least three in all.
    """
    logs = [[math.log(value) for value in each] for each in values]
    mid = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    degrees = len(logs[0]) + len(logs[1]) - 2
    variance = sum((value - statistics.fmean(each)) ** 2 for each in logs for value in each) / degrees
    half = student_t(0.1, degrees) * math.sqrt(variance * sum(1 / len(each) for each in logs))
    return Interval(low=mid - half, mid=mid, high=mid + half)
