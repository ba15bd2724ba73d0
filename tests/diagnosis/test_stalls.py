"""Stalls: found among steps of several lengths and under foreign load, named by where they were seen, and not found in healthy steps."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from workbench.diagnosis.analysis.evidence import Stalls
from workbench.diagnosis.analysis.stalls import Call, find_stalls, is_open, stalled_at_most, within
from workbench.harness.results import Place

STEP = 0.01


def found(make: Callable[[int, random.Random], dict[str, Any]], *, calls: int = 200, seed: int = 0, **arguments: Any) -> Stalls:
    """Stalls in calls in blocks of ten, by turns "full" and "cached", which take 1.3 and 1 of STEP; `make` says what differs from that."""
    chance, made = random.Random(seed), []
    for i in range(calls):
        arm = "cached" if i // 10 % 2 else "full"
        values = {"extra": 0.0, "times": 1.0} | make(i, chance)
        usual = STEP * (1.3 if arm == "full" else 1.0) * chance.gauss(1, 0.04) * values.pop("times")
        made.append(Call(number=i, seconds=usual + values.pop("extra"), arm=arm, **values))
    return find_stalls(made, **arguments)


@pytest.mark.parametrize("every", [10, 25, 50, 100])
def test_a_regular_stall(every: int) -> None:
    stalls = found(lambda i, _: {"extra": 5 * STEP * (i % every == every - 1)}, calls=3 * every + every // 2)
    assert stalls.every == every
    assert stalls.at == tuple(range(every - 1, 3 * every, every))
    assert stalls.extra == pytest.approx(5 * STEP, rel=0.1)
    assert stalls.share == pytest.approx(5 / every / (5 / every + 1.3), rel=0.1)


def test_neighbours_and_two_stalls_have_no_period() -> None:
    """Three steps in a row that other processes slowed down were said to come "every 1 steps"."""
    for at in ((100, 101, 102), (100, 102, 104), (60, 130)):
        stalls = found(lambda i, _, at=at: {"extra": 20 * STEP * (i in at)})  # type: ignore[misc]
        assert stalls.at == at
        assert stalls.every is None


def test_share_and_seconds_of_stalls_are_of_one_rule() -> None:
    """On a busy machine the timed step is longer than the calls among which stalls were found: their seconds stay those that are said."""
    stalls = found(lambda i, _: {"extra": 20 * STEP * (i % 20 == 19)})
    busy = within(stalls, 3 * STEP)
    assert stalls.per_step == pytest.approx(stalls.extra / 20)
    step = 3 * STEP + busy.per_step
    assert step * busy.share == pytest.approx(stalls.extra / 20)
    assert within(Stalls(steps=9), STEP) == Stalls(steps=9)


def test_a_regular_stall_among_batches_of_different_lengths() -> None:
    stalls = found(lambda i, chance: {"times": chance.choice([1, 1, 3]), "extra": 8 * STEP * (i % 25 == 24)})
    assert stalls.every == 25
    assert stalls.at == tuple(range(24, 200, 25))


def test_a_small_regular_stall_and_the_wait_for_data() -> None:
    """A log at every tenth step that takes as long as two steps."""
    alone = found(lambda i, _: {"extra": 2 * STEP * (i % 10 == 0)})
    waiting = found(lambda i, _: {"extra": 2 * STEP * (i % 10 == 0)}, wait=2 * STEP)
    assert (alone.every, len(alone.at)) == (10, 20)
    assert alone.share == pytest.approx(0.2 / 1.5, rel=0.1)
    assert waiting.share == pytest.approx(0.2 / 3.5, rel=0.1)


def test_two_regular_stalls_the_larger_names_itself() -> None:
    stalls = found(lambda i, _: {"extra": STEP * (5 * (i % 25 == 24) + 20 * (i % 50 == 49))})
    assert stalls.every == 50
    assert stalls.at == tuple(range(24, 200, 25))


def test_numbers_of_calls_count_not_their_places_in_the_list() -> None:
    """Calls that nobody timed are missing; the user's counter went on."""
    calls = [Call(number=i, seconds=STEP * (6 if i % 20 == 0 else 1)) for i in range(200) if i % 30 > 4]
    assert find_stalls(calls).every == 20


def test_irregular_pauses_are_found_if_they_are_long_and_rare() -> None:
    stalls = found(lambda i, chance: {"extra": 8 * STEP * (chance.random() < 0.04)})
    assert 3 <= len(stalls.at) <= 15
    assert stalls.every is None
    assert stalls.share == pytest.approx(8 * len(stalls.at) / 200 / (8 * len(stalls.at) / 200 + 1.3), rel=0.15)


def test_one_stall_is_a_stall_without_a_period() -> None:
    stalls = found(lambda i, _: {"extra": 50 * STEP * (i == 99)}, calls=120)
    assert (stalls.at, stalls.every) == ((99,), None)


HEALTHY: dict[str, Callable[[int, random.Random], dict[str, Any]]] = {
    "steady": lambda i, chance: {},
    "two lengths": lambda i, chance: {"times": chance.choice([1, 3])},
    "rare long ones": lambda i, chance: {"times": 3 if chance.random() < 0.08 else 1},
    "sequences": lambda i, chance: {"times": min(3, max(0.4, chance.lognormvariate(0, 0.6)))},
    "a GAN": lambda i, chance: {"times": 3 if i % 5 == 0 else 1},
    "accumulation": lambda i, chance: {"times": 1.6 if i % 4 == 3 else 1},
}


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_healthy_steps_do_not_stall(make: Callable[[int, random.Random], dict[str, Any]]) -> None:
    for seed in range(50):
        stalls = found(make, seed=seed)
        assert stalls.share < 0.02, f"seed {seed}: {stalls}"


def test_waiting_for_a_core_is_no_stall() -> None:
    def loaded(i: int, chance: random.Random) -> dict[str, Any]:
        delay = chance.expovariate(1 / (4 * STEP)) if chance.random() < 0.1 else 0.0
        return {"extra": delay, "delay": delay}

    for seed in range(20):
        assert found(loaded, seed=seed).at == ()


def test_pauses_of_the_garbage_collector_are_known_as_such() -> None:
    def collecting(i: int, _: random.Random) -> dict[str, Any]:
        pause = 2 * STEP * (i % 13 == 5)
        return {"extra": pause, "gc": pause}

    stalls = found(collecting)
    assert stalls.kind == "garbage collection"
    assert stalls.every == pytest.approx(13)
    assert stalls.extra == pytest.approx(2 * STEP)


SAVE, TRAIN, UPDATE = Place("train.py:41 save", "checkpoint"), Place("train.py:12 step", None), Place("train.py:13 step", "optimizer")


def seen(place: Place, every: int) -> Callable[[int], Mapping[Place, float]]:
    """The places of a call: all are in the training line, and each `every`-th one at another place, too."""
    return lambda number: {TRAIN: STEP} | ({place: 5 * STEP} if number % every == every - 1 else {})


def test_a_stall_is_named_by_what_normal_calls_do_not_do() -> None:
    stalls = found(lambda i, _: {"extra": 5 * STEP * (i % 25 == 24)}, places=seen(SAVE, 25))
    assert (stalls.kind, stalls.where) == ("checkpoint", "train.py:41 save")


def test_an_optimizer_that_updates_now_and_then_is_no_stall() -> None:
    assert found(lambda i, _: {"extra": 5 * STEP * (i % 16 == 15)}, places=seen(UPDATE, 16)).at == ()
    assert found(lambda i, _: {"extra": 5 * STEP * (i % 16 == 15)}, places=seen(SAVE, 16)).every == 16


def test_without_calls_or_with_too_few_of_an_arm_there_is_nothing_to_say() -> None:
    assert find_stalls([]) == Stalls()
    assert find_stalls([Call(number=1, seconds=9.0, arm="doubled"), Call(number=2, seconds=1.0)]) == Stalls()


@settings(max_examples=60, deadline=None)
@example([(0.0, 0.0, 0.0, "full")] * 4)  # a step that gives its device no work takes no time there
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["full", "cached"])), max_size=60))
def test_whatever_the_times_the_answer_is_possible(rows: list[tuple[float, float, float, str]]) -> None:
    calls = [Call(number=i, seconds=s, delay=s * d, gc=s * g, arm=arm) for i, (s, d, g, arm) in enumerate(rows)]
    stalls = find_stalls(calls)
    assert 0 <= stalls.share <= 1
    assert set(stalls.at) <= set(range(len(rows)))
    assert stalls.extra >= 0
    assert stalls.steps <= len(rows)


def stalling(count: int, steps: int, times: float) -> Stalls:
    """So many irregular stalls in so many steps, each as long as some steps."""
    added = times * count / steps
    return Stalls(steps=steps, at=tuple(range(count)), extra=times * STEP, share=added / (1 + added))


@pytest.mark.parametrize(
    ("stalls", "clear"),
    [
        (stalling(0, 100, 0.0), True),
        (stalling(1, 100, 3.0), True),  # even five of them would take no more than 13 %
        (stalling(1, 100, 8.0), False),  # five would take 28 %
        (stalling(1, 400, 8.0), True),
        (stalling(2, 100, 20.0), False),
        (stalling(3, 100, 20.0), True),
    ],
)
def test_stalls_that_cannot_be_to_blame_are_not_waited_for(stalls: Stalls, clear: bool) -> None:
    assert is_open(stalls, []) is not clear


def test_what_seldom_happens_by_chance_is_less_than_stalls_may_take() -> None:
    chance = random.Random(0)
    below = 0
    for _ in range(400):
        count = sum(chance.random() < 0.02 for _ in range(150))
        below += stalled_at_most(stalling(count, 150, 10.0)) < 0.2 / 1.2 if count else 0
    assert below < 0.05 * 400


@pytest.mark.parametrize(
    ("together", "own", "clear"),
    [
        (stalling(8, 96, 12.0), (stalling(0, 12, 0.0), stalling(0, 12, 0.0)), False),  # one is to be expected in a dozen steps
        (stalling(8, 96, 12.0), (stalling(0, 16, 0.0), stalling(1, 16, 12.0)), False),
        (stalling(8, 96, 12.0), (stalling(0, 36, 0.0), stalling(3, 36, 12.0)), True),
        (stalling(8, 96, 12.0), (stalling(0, 130, 0.0), stalling(1, 130, 12.0)), True),  # it is the reductions that stall
        (stalling(1, 300, 5.0), (stalling(0, 40, 0.0), stalling(0, 40, 0.0)), True),  # whoever it is, it does not matter
    ],
)
def test_whose_stalls_they_are_is_open_until_a_rank_on_its_own_shows_it(together: Stalls, own: tuple[Stalls, ...], clear: bool) -> None:
    assert is_open(together, own) is not clear
