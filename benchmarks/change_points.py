"""Change points of made step times and losses: slowdowns and rises found, false alarms in healthy steps, and microseconds a step.

    python benchmarks/change_points.py [--steps 2000000] [--slowdowns 400]

Noise as trainings have it: independent and correlated variation, 3 % of steps far longer, a level that drifts by 8 % over 20,000 steps.
Losses fall by a power law, and at once where the learning rate is lowered, and vary by 6 % from batch to batch; 1 % of batches have a far
larger one. Beside it the usual rule of thumb: a step is slow when the mean of the last 50 is 10 % above that of the 500 before.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.core.display.table import Table
from workbench.core.vocabulary import PHASES
from workbench.timeline.alarm import StepAlarm, resident
from workbench.timeline.analysis.alarm_events import AlarmEvent
from workbench.timeline.analysis.change_points import BLOCK, ChangePoints

SIZES = (1.1, 1.15, 1.25, 1.5, 2.0)
LASTS = 100
"""Steps of a slowdown."""


def noisy(count: int, chance: np.random.Generator, *, level: float = 0.1, first: int = 0) -> NDArray[np.float64]:
    """Step times of a healthy training, in seconds, wherever they begin."""
    del first
    own = chance.normal(0, 0.03, count)
    correlated = np.array(list(itertools.accumulate(chance.normal(0, 0.006, count).tolist(), lambda before, new: 0.9 * before + new)))
    long = np.where(chance.random(count) < 0.03, chance.exponential(0.6, count), 0.0)
    drift = 0.04 * np.sin(2 * np.pi * np.arange(count) / 20_000 + 6 * chance.random())
    result: NDArray[np.float64] = level * np.exp(own + correlated + long + drift)
    return result


def losses(count: int, chance: np.random.Generator, *, first: int = 0) -> NDArray[np.float64]:
    """Losses of a healthy training from its step `first` on, whose learning rate is lowered every 300,000 steps."""
    steps = first + np.arange(count)
    correlated = np.array(list(itertools.accumulate(chance.normal(0, 0.006, count).tolist(), lambda before, new: 0.9 * before + new)))
    far = np.where(chance.random(count) < 0.01, chance.exponential(0.5, count), 0.0)
    level = (1.7 + 9 * (1 + steps / 50) ** -0.3) * 0.9 ** (steps // 300_000)
    result: NDArray[np.float64] = level * np.exp(chance.normal(0, 0.06, count) + correlated + far)
    return result


def reported(values: Sequence[float], *, upward: bool = False) -> list[tuple[int, float]]:
    """Steps since which the level is another one, or a higher one, and by how much."""
    blocks = np.array(values[: len(values) // BLOCK * BLOCK]).reshape(-1, BLOCK, 1)
    return [(change.step, change.ratio) for change in ChangePoints(["step"], upward=upward).add_blocks(0, blocks)]


def rule_of_thumb(values: Sequence[float]) -> list[tuple[int, float]]:
    """The mean of the last 50 steps against that of the 500 before, reported again when it was below in between."""
    recent: deque[float] = deque(maxlen=50)
    before: deque[float] = deque(maxlen=500)
    now = then = 0.0
    slow, found = False, []
    for step, value in enumerate(values):
        if len(recent) == 50:
            if len(before) == 500:
                then -= before[0]
            before.append(recent[0])
            then += recent[0]
            now -= recent[0]
        recent.append(value)
        now += value
        if len(before) == 500:
            ratio = (now / 50) / (then / 500)
            if ratio > 1.1 and not slow:
                found.append((step - 50, ratio))
            slow = ratio > 1.1
    return found


def comes_and_goes(size: float, *, apart: int, runs: int) -> tuple[int, int, int, int]:
    """Slowdowns of LASTS steps that come again so many steps after the last one has ended: how many, found, ends found, other changes."""
    chance = np.random.default_rng(3)
    counts = np.zeros(4, dtype=int)
    for _ in range(runs):
        values, starts = noisy(4000, chance), range(1000, 3400, LASTS + apart)
        for start in starts:
            values[start : start + LASTS] *= size
        changes = reported(values.tolist())
        found = [
            sum(any((ratio > 1) == up and abs(step - start - after) <= LASTS // 2 for step, ratio in changes) for start in starts)
            for up, after in ((True, 0), (False, LASTS))
        ]
        counts += (len(starts), *found, len(changes) - sum(found))
    return tuple(counts.tolist())


def phases(count: int, chance: np.random.Generator) -> NDArray[np.float64]:
    """Seconds of each phase of healthy steps of 0.1 s, each with noise of its own: (steps, phases)."""
    levels = (0.004, 0.001, 0.03, 0.05, 0.012, 0.003)
    return np.stack([noisy(count, chance, level=level) for level in levels], axis=1)


def of_two_lengths(count: int, chance: np.random.Generator, part: float, longer: float) -> NDArray[np.float64]:
    """The same; of a part, drawn at random, the forward is longer by so much of the step, as batches of two resolutions have it."""
    seconds = phases(count, chance)
    seconds[:, PHASES.index("forward")] += np.where(chance.random(count) < part, 0.1 * longer, 0.0)
    return seconds


def alarms_of(seconds: NDArray[np.float64]) -> list[AlarmEvent]:
    """What an alarm reports over a whole training."""
    rows, follower = [(*row, 32) for row in (1e9 * seconds).astype(int).tolist()], StepAlarm()
    some = [event for first in range(0, len(rows), 300) for event in follower.see(rows[first : first + 300])]
    return some + follower.see([], waits=False, last=True)


def planted_in_phases(runs: int) -> tuple[int, int, int]:
    """Slowdowns of LASTS steps by 10 to 50 % of a step, in one of its phases: how many were reported, by that phase, and what else was."""
    right = near = other = 0
    for seed in range(runs):
        chance, place, share = np.random.default_rng(seed), seed % len(PHASES), (0.1, 0.12, 0.15, 0.25, 0.5)[seed % 5]
        seconds, start = phases(2200, chance), int(chance.integers(1000, 1900))
        seconds[start : start + LASTS, place] += share * 0.1
        slower = [event for event in alarms_of(seconds) if event.slower]
        there = [event for event in slower if abs(event.step - start) <= 60]
        near, right, other = (
            near + bool(there),
            right + any(event.phase == PHASES[place] for event in there),
            other + len(slower) - bool(there),
        )
    return near, right, other


def cost_of_alarm(steps: int, look: int) -> float:
    """CPU seconds a step of all that an alarm follows of a rank, its nine series and the loss, where it looks after so many steps."""
    chance = np.random.default_rng(2)
    phases = np.array([1e6, 5e5, 1e7, 2e7, 3e6, 1e6]) * np.exp(chance.normal(0, 0.03, (steps, len(PHASES))))
    rows = [(*row, 32) for row in phases.astype(int).tolist()]
    waiting = iter(losses(steps, chance).tolist())
    follower = StepAlarm(memory=resident, losses=lambda count, _: [next(waiting) for _ in range(count)])
    begin = time.thread_time()
    for first in range(0, steps, look):
        follower.see(rows[first : first + look])
    return (time.thread_time() - begin) / steps


def main() -> None:
    """Run both, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--slowdowns", type=int, default=400)
    given = parser.parse_args()
    rows = []
    by_hand = "mean of 50 against 500"
    tried: list[tuple[str, Callable[..., NDArray[np.float64]], str, Callable[..., list[tuple[int, float]]]]] = [
        ("step times", noisy, "Bayesian change points", reported),
        ("step times", noisy, by_hand, rule_of_thumb),
        ("losses", losses, "Bayesian change points", functools.partial(reported, upward=True)),
        ("losses", losses, by_hand, rule_of_thumb),
    ]
    for kind, made, name, method in tried:
        chance = np.random.default_rng(1)
        each: dict[float, list[bool]] = {size: [] for size in SIZES}
        for number in range(given.slowdowns):
            values = made(3000, chance, first=int(chance.integers(100_000)))
            start, size = int(chance.integers(1000, 2600)), SIZES[number % len(SIZES)]
            values[start : start + LASTS] *= size
            each[size].append(any(abs(step - start) <= LASTS and ratio > 1 for step, ratio in method(values.tolist())))
        healthy = made(given.steps, chance).tolist()
        begin = time.process_time()
        alarms = method(healthy)
        cost = (time.process_time() - begin) / given.steps
        false = [ratio for _, ratio in alarms if ratio > 1]
        counts = [f"{sum(some)} of {len(some)}" for some in each.values()]
        rows.append([f"{kind}: {name}", *counts, len(alarms), len(false), f"{1e6 * cost:.1f} µs"])
    columns = ("", *(f"+{100 * (size - 1):.0f} %" for size in SIZES), "changes", "upwards", "CPU a step")
    days = given.steps / 864_000
    note = f"rises of {LASTS} steps that were found; changes in {given.steps:,} healthy steps: {days:.1f} days at 10 steps a second"
    print(Table(columns=columns, rows=rows, title="Slowdowns and higher losses under noise", note=note))
    again = []
    for apart in (LASTS, 2 * LASTS):
        for size in SIZES:
            every, slow, ended, other = comes_and_goes(size, apart=apart, runs=given.slowdowns // 10)
            again.append([f"{apart} steps apart, +{100 * (size - 1):.0f} %", f"{slow} of {every}", f"{ended} of {every}", other])
    print(Table(columns=("", "slowdowns", "their ends", "other changes"), rows=again, title=f"Slowdowns of {LASTS} steps that come and go"))
    planted = given.slowdowns // 5 * 3
    near, right, other = planted_in_phases(planted)
    false_alarms = len(alarms_of(phases(given.steps, np.random.default_rng(4))))
    print(
        f"whole alarms: {near} of {planted} slowdowns in one phase are reported, {right} by that phase, {other} other slowdowns;", end=" "
    )
    print(f"{false_alarms} alarms in {given.steps:,} healthy steps")
    for part, longer in itertools.product((0.25, 0.33, 0.4), (0.1, 0.3)):
        false_alarms = len(alarms_of(of_two_lengths(given.steps, np.random.default_rng(5), part, longer)))
        print(f"{100 * part:.0f} % of steps longer by {100 * longer:.0f} %: {false_alarms} alarms in {given.steps:,} steps")
    costs = ", ".join(f"{look}: {1e6 * statistics.median(cost_of_alarm(6000, look) for _ in range(9)):.1f} µs" for look in (3, 30, 200))
    print(f"CPU a step of an alarm's nine series and the loss, by the steps from look to look: {costs}")
    assert statistics.fmean(len(row) for row in rows) == len(columns)


if __name__ == "__main__":
    main()
