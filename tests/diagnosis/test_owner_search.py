"""Which difference owns a regression: planted owners under noise, with the measurements made by arithmetic in the place of launches."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.progress import BudgetError
from workbench.core.statistics import USUAL_SPREAD, Interval
from workbench.diagnosis.analysis import bisection
from workbench.diagnosis.analysis.owner_search import (
    FAR,
    FURTHER,
    MOST,
    Changes,
    Decision,
    Rerun,
    change_of_launches,
    decide,
    effects,
    one_owner,
    recorded_change,
    trainings_to_go,
)
from workbench.diagnosis.regression import SPARE, search
from workbench.diagnosis.rerun import RerunError

Cost = Callable[[Changes], float]


class Trainings:
    """Trainings that take what a function says, on a machine that varies and becomes slower."""

    def __init__(self, cost: Cost, *, noise: float = 0.01, drift: float = 0.0, seed: int = 0) -> None:
        self.cost, self.noise, self.drift = cost, noise, drift
        self.chance, self.count = random.Random(seed), 0

    def __call__(self, changes: Changes) -> float:
        self.count += 1
        value = self.cost(changes)
        if math.isnan(value):
            raise RerunError("ValueError: boom")
        return value * math.exp(self.chance.gauss(0, self.noise) + self.drift * self.count)


def found(trainings: Trainings, names: Changes, recorded: tuple[float, float]) -> Decision:
    return search(trainings, lambda made: decide(made, names, recorded, USUAL_SPREAD))[1]


def product(factors: Mapping[str, float]) -> Cost:
    return lambda changes: 0.1 * math.prod(factors.get(name, 1.0) for name in changes)


NAMES = ("precision", "num_workers", "NCCL_ALGO", "PYTHONPATH", "code", "data", "optimizer", "threads")


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_owner_is_named_among_others_on_a_machine_that_drifts(seed: int) -> None:
    names = NAMES[: 2 + seed % 7]
    owner, factor = names[seed % len(names)], (0.7, 1.05, 1.1, 1.3, 2.0)[seed % 5]
    trainings = Trainings(product({owner: factor}), drift=0.003, seed=seed)
    assert found(trainings, names, (0.1, 0.1 * factor)) == Decision(kind="owner", owner=(owner,))
    assert trainings.count < 80


@pytest.mark.parametrize(("today", "kind"), [(0.14, "still"), (0.1, "over")])
@pytest.mark.parametrize("names", [(), ("lr",), NAMES])
def test_the_machine_is_said_where_no_difference_brings_it(names: Changes, today: float, kind: str) -> None:
    trainings = Trainings(lambda changes: today, noise=0.02)
    assert found(trainings, names, (0.1, 0.14)).kind == kind
    assert trainings.count <= 2 * MOST + 1


def test_a_run_that_became_faster_has_an_owner_too_and_the_machine_the_same_words() -> None:
    assert found(Trainings(product({"lr": 0.7})), ("lr", "code"), (0.1, 0.07)).owner == ("lr",)
    assert found(Trainings(lambda changes: 0.07), ("lr",), (0.1, 0.07)).kind == "still"


def test_what_is_slower_today_is_the_owner_though_it_was_recorded_as_faster() -> None:
    """Trainings by turns are on one machine; run A was recorded on a busier one than run B."""
    trainings = Trainings(product({"code": 2.26}))
    decision = found(trainings, ("lr", "code"), (0.458, 0.317))
    assert decision == Decision(kind="owner", owner=("code",))
    assert found(Trainings(product({"code": 0.9})), ("code",), (0.1, 0.5)).kind == "over"  # too little against what was recorded


def test_two_owners_with_half_of_it_each_are_both_named() -> None:
    halves = product({"lr": 1.3, "code": 1.3})
    owners = [set(found(Trainings(halves, seed=seed), ("lr", "code", "data"), (0.1, 0.169)).owner) for seed in range(30)]
    assert owners.count({"lr", "code"}) >= 27, "half of it is the limit from which on a part is one of two"


def test_differences_that_act_only_together_are_named_together() -> None:
    both = {"pin_memory", "num_workers"}
    decision = found(Trainings(lambda changes: 0.2 if both <= {*changes} else 0.1), ("pin_memory", "num_workers"), (0.1, 0.2))
    assert (set(decision.owner), decision.together) == (both, True)


def alone_noisy(effects: Mapping[str, float], noise: Mapping[str, float]) -> Cost:
    """What brings its effect only on average: a training with it alone is off by so much, up and down in turns, after the first."""
    turns = {name: itertools.chain([0.0], itertools.cycle([1.0, -1.0])) for name in noise}

    def cost(changes: Changes) -> float:
        value = 0.1 * math.prod(effects.get(name, 1.0) for name in changes)
        if len(changes) == 1 and changes[0] in noise:
            value *= math.exp(next(turns[changes[0]]) * noise[changes[0]])
        return value

    return cost


def test_parts_that_vary_too_much_are_called_unclear_and_not_together() -> None:
    cost = alone_noisy({"lr": 1.2, "code": 1.2}, {"lr": 0.8, "code": 0.8})
    decision = found(Trainings(cost, noise=0.001), ("lr", "code"), (0.1, 0.144))
    assert (decision.kind, decision.owner, decision.together) == ("unclear", (), False)
    assert decision.why == "lr and code bring it, and 48 trainings with lr or code vary too much to say which"


def test_an_owner_of_half_is_named_and_what_may_bring_the_rest_is_said() -> None:
    cost = alone_noisy({"lr": 1.3, "code": 1.4}, {"lr": 1.5})
    decision = found(Trainings(cost, noise=0.001), ("lr", "code", "data"), (0.1, 0.182))
    assert (decision.kind, decision.owner, decision.together) == ("owner", ("code",), False)  # it brings half of it and more
    assert decision.why == "lr or data may bring a part of it as well"


def test_a_training_that_the_budget_ends_ends_the_search() -> None:
    def late(changes: Changes) -> float:
        if changes:
            raise BudgetError
        return 0.1

    reruns, decision, notes = search(late, lambda made: decide(made, ("lr",), (0.1, 0.11), USUAL_SPREAD))
    assert [rerun.error for rerun in reruns] == [""]
    assert decision.kind == "unclear"
    assert notes == ("the budget ended training 2",)


def test_what_does_not_run_alone_is_the_owner_by_elimination() -> None:
    cost: Cost = lambda changes: math.nan if changes == ("code",) else 0.2 if "code" in changes else 0.1  # noqa: E731
    decision = found(Trainings(cost), ("lr", "code"), (0.1, 0.2))
    assert (decision.owner, decision.why) == (("code",), "by elimination: alone it does not run")


@pytest.mark.parametrize(("broken", "name"), [((), "run A"), (("lr", "code"), "run B")])
def test_a_run_that_cannot_be_repeated_is_said_so(broken: Changes, name: str) -> None:
    trainings = Trainings(lambda changes: math.nan if changes == broken else 0.1)
    decision = found(trainings, ("lr", "code"), (0.1, 0.2))
    assert (decision.kind, decision.why) == ("cannot run", f"{name} does not run today: ValueError: boom")
    assert trainings.count <= 2


def test_no_verdict_comes_out_of_noise() -> None:
    """Two per cent under noise of thirty: nothing is named, and after so many trainings nothing more is tried."""
    trainings = Trainings(product({"lr": 1.02}), noise=0.3)
    decision = found(trainings, ("lr", "code"), (0.1, 0.102))
    assert decision.kind == "unclear"
    assert trainings.count <= 2 * MOST + 1


def test_what_falls_into_a_pause_of_others_once_is_no_owner() -> None:
    """As happened on a busy machine: one training with everything of B, and one with its seed, ran while others paused."""
    quick = [("ema", "seed", "NCCL_ALGO", "code"), ("seed",)]

    def training(changes: Changes) -> float:
        if changes in quick:
            quick.remove(changes)
            return 0.007
        return 0.02

    trainings = Trainings(training, noise=0.05)
    assert found(trainings, ("ema", "seed", "NCCL_ALGO", "code"), (0.0061, 0.028)).kind == "still"
    assert not quick or trainings.count < 12


@pytest.mark.parametrize("recorded", [(0.006, 0.028), (0.01, 0.013), (0.03, 0.02)])
def test_bursts_of_other_jobs_own_nothing(recorded: tuple[float, float]) -> None:
    """The machine is up to 3.3 times slower for some trainings, and nothing that differs matters."""
    for seed in range(40):
        chance, now = random.Random(seed), [1.0]

        def cost(changes: Changes, chance: random.Random = chance, now: list[float] = now) -> float:
            if chance.random() < 0.4:
                now[0] = math.exp(chance.uniform(0, 1.2))
            return 0.008 * now[0]

        assert found(Trainings(cost, noise=0.03, seed=seed), NAMES[:4], recorded).kind != "owner"


def test_run_a_s_own_trainings_tell_the_noise() -> None:
    values = iter((0.02, 0.05, 0.06, 0.05, 0.02, 0.05, 0.021, 0.052))
    made = [Rerun(changes=("lr",) if place % 2 else (), value=next(values)) for place in range(8)]
    assert decide(made, ("lr",), (0.02, 0.05), USUAL_SPREAD).kind == "measure", "A took 20, 60, 20 and 21 ms"
    steady = [replace(rerun, value=rerun.value if rerun.changes else 0.02) for rerun in made]
    assert decide(steady, ("lr",), (0.02, 0.05), USUAL_SPREAD).owner == ("lr",)


def test_two_per_cent_are_found_on_a_quiet_machine() -> None:
    assert found(Trainings(product({"data": 1.02}), noise=0.002), ("lr", "data"), (0.1, 0.102)).owner == ("data",)


@pytest.mark.parametrize("seed", range(6))
def test_where_noise_asks_for_them_more_trainings_are_made_until_a_small_effect_has_its_owner(seed: int) -> None:
    """2 % where trainings vary by 1.2 %: a dozen of each leave it open, and up to four dozen do not. Run A stays between two of a kind."""
    trainings = Trainings(product({"data": 1.02}), noise=0.012, drift=0.001, seed=seed)
    reruns, decision, _ = search(trainings, lambda made: decide(made, ("lr", "data"), (0.1, 0.102), USUAL_SPREAD))
    assert decision == Decision(kind="owner", owner=("data",))
    counts = {changes: len(values) for changes, values in effects(reruns).items()}
    assert MOST < max(counts.values()) <= FURTHER[-1]
    assert all(before.changes != after.changes for before, after in itertools.pairwise(reruns))


@pytest.mark.parametrize("recorded", [(0.1, 0.101), (0.1, 0.0995)])
def test_a_recorded_difference_within_the_noise_has_an_owner_where_trainings_show_it(recorded: tuple[float, float]) -> None:
    change = Interval(low=-0.01, mid=math.log(recorded[1] / recorded[0]), high=0.03)
    decide_perhaps = lambda made: decide(made, ("lr", "code"), recorded, USUAL_SPREAD, change=change)  # noqa: E731
    assert search(Trainings(product({"code": 1.03})), decide_perhaps)[1] == Decision(kind="owner", owner=("code",))
    for noise in (0.001, 0.1):
        trainings = Trainings(lambda changes: 0.1, noise=noise)
        assert search(trainings, decide_perhaps)[1].kind == "nothing"
        assert trainings.count <= 2 * MOST + 1


def test_the_budget_and_ctrl_c_end_the_search_with_what_is_known() -> None:
    noisy = Trainings(product({"lr": 1.1}), noise=0.2)
    reruns, decision, notes = search(
        noisy,
        lambda made: decide(made, ("lr",), (0.1, 0.11), USUAL_SPREAD),
        left=lambda: 95.0 - 10 * noisy.count,
        more=lambda made, each: f", {len(made)} of {each:g} s",
    )
    assert (decision.kind, len(reruns)) == ("unclear", 9)
    assert notes == ("the budget ended the search after 9 trainings, 9 of 10 s",)

    def interrupted(changes: Changes) -> float:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(changes)
        return 0.1

    done: list[Changes] = []
    reruns, decision, notes = search(interrupted, lambda made: decide(made, ("lr",), (0.1, 0.11), USUAL_SPREAD))
    assert (len(reruns), decision.kind, notes) == (4, "unclear", ("stopped by Ctrl-C after 4 trainings",))


@given(st.floats(-0.02, 0.02), st.lists(st.sampled_from(["lr", "code"]), min_size=1, max_size=8), st.floats(0.5, 2))
def test_a_drift_that_is_even_is_in_no_effect(drift: float, order: list[str], factor: float) -> None:
    sequence: list[Changes] = [()]
    for name in order:
        sequence += [(name,), ()]
    reruns = [Rerun(changes=changes, value=(factor if changes else 1) * math.exp(drift * place)) for place, changes in enumerate(sequence)]
    for values in effects(reruns).values():
        assert values == pytest.approx([math.log(factor)] * len(values), abs=1e-9)


def test_the_recorded_change_has_the_interval_of_its_blocks() -> None:
    assert 0 in recorded_change((1.0, 1.02), ([1.0, 1.1, 0.9], [1.02, 1.12, 0.92]))
    assert recorded_change((1.0, 1.2), ([1.0, 1.01, 0.99], [1.2, 1.21, 1.19])).low > 0.1
    assert recorded_change((1.0, 1.5), ([1.0], [1.2])).mid == pytest.approx(math.log(1.5))  # which the title of the table shows


def test_a_budget_that_the_forecast_names_suffices_nine_times_of_ten() -> None:
    """Forecasts before the first training and after some, for planted owners under noise of 1 to 6 %; 161 of 173 sufficed."""
    suffices = list[bool]()
    for seed in range(36):
        names = NAMES[: 1 + seed % 7]
        factor, noise = (0.7, 1.1, 1.3, 2.0)[seed % 4], (0.01, 0.03, 0.06)[seed % 3]

        def follows(made: Sequence[Rerun], names: Changes = names, factor: float = factor) -> Decision:
            return decide(made, names, (0.1, 0.1 * factor), USUAL_SPREAD)

        reruns, _, _ = search(Trainings(product({names[seed % len(names)]: factor}), noise=noise, seed=seed), follows)
        for made in (reruns[:count] for count in (0, 3, 7) if count < len(reruns)):
            to_go = trainings_to_go(made, follows, one_owner(made, names, math.log(factor)), USUAL_SPREAD, recorded=0.1)
            if to_go is not None and to_go < FAR:  # else nothing is promised
                suffices.append(SPARE * (len(made) + to_go) >= len(reruns))
    assert len(suffices) > 60
    assert statistics.fmean(suffices) >= 0.9, statistics.fmean(suffices)
    hopeless = [Rerun(changes=changes, value=value) for changes, value in [((), 0.1), (("lr",), 0.2), ((), 0.4), (("lr",), 0.1), ((), 0.1)]]
    assert trainings_to_go(hopeless, lambda made: decide(made, ("lr",), (0.1, 0.11), 0.03), one_owner(hopeless, ("lr",), 0.1), 0.03) is None
    doubtful = [Rerun(changes=changes, value=value) for changes, value in [((), 0.1), (("9",), 0.13), ((), 0.1)]]
    commits = [f"{number}" for number in range(10)]

    def commit(made: Sequence[Rerun]) -> Decision:
        return bisection.decide(made, commits, USUAL_SPREAD)

    to_go = trainings_to_go(doubtful, commit, bisection.one_commit(doubtful, commits, USUAL_SPREAD), USUAL_SPREAD)
    assert to_go is not None
    assert 4 <= to_go <= 40


# --- commits


@pytest.mark.parametrize("seed", range(10))
def test_a_planted_commit_is_found_in_as_many_tries_as_halves(seed: int) -> None:
    count = (1, 2, 3, 5, 8, 13, 21, 34, 55, 100)[seed]
    commits, place = [f"{number:040x}" for number in range(count)], random.Random(seed).randrange(count)
    trainings = Trainings(lambda changes: 0.1 * (1.15 if changes and commits.index(changes[0]) >= place else 1), drift=0.002, seed=seed)
    reruns, decision, _ = search(trainings, lambda made: bisection.decide(made, commits, USUAL_SPREAD))
    assert decision == Decision(kind="owner", owner=(commits[place],))
    assert len(effects(reruns)) <= 2 + math.ceil(math.log2(count))


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_commits_that_do_not_run_are_passed_over(count: int, data: st.DataObject) -> None:
    commits = [str(number) for number in range(count)]
    place = data.draw(st.integers(0, count - 1))
    broken = data.draw(st.sets(st.integers(0, count - 2))) if count > 1 else set()

    def cost(changes: Changes) -> float:
        number = int(changes[0]) if changes else -1
        return math.nan if number in broken else 0.2 if number >= place else 0.1

    trainings = Trainings(cost)
    decision = search(trainings, lambda made: bisection.decide(made, commits, USUAL_SPREAD))[1]
    assert decision.kind == "owner"
    assert str(place) in decision.owner
    assert len(decision.owner) == 1 or {int(name) for name in decision.owner[:-1]} <= broken


def test_the_commits_that_are_in_doubt_become_fewer_with_each_that_is_decided() -> None:
    commits = [str(number) for number in range(16)]
    doubtful = [bisection.in_doubt((), commits, USUAL_SPREAD)]
    trainings = Trainings(lambda changes: 0.2 if changes and int(changes[0]) >= 11 else 0.1)

    def decide_commit(made: Sequence[Rerun]) -> Decision:
        doubtful.append(bisection.in_doubt(made, commits, USUAL_SPREAD))
        return bisection.decide(made, commits, USUAL_SPREAD)

    assert search(trainings, decide_commit)[1].owner == doubtful[-1] == ("11",)
    sizes = [len(each) for each in doubtful]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16
    assert {8, 4, 2} <= set(sizes)
    assert all("11" in each for each in doubtful)


def test_a_range_without_a_change_has_no_first_bad_commit() -> None:
    decide_commit = lambda made: bisection.decide(made, ["1", "2"], USUAL_SPREAD)  # noqa: E731
    assert search(Trainings(lambda changes: 0.1), decide_commit)[1].kind == "nothing"
    broken = search(Trainings(lambda changes: math.nan if changes == ("2",) else 0.1), decide_commit)[1]
    assert (broken.kind, broken.why) == ("cannot run", "the bad commit does not run: ValueError: boom")


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 3), (5, 4)])
def test_the_interval_of_launches_holds_in_nine_of_ten_cases(before: int, after: int) -> None:
    chance, right, cases = random.Random(3), 0, 2000
    for _ in range(cases):
        values = [[level * chance.lognormvariate(0, 0.1) for _ in range(count)] for level, count in ((1.0, before), (1.5, after))]
        right += math.log(1.5) in change_of_launches(values)
    assert 0.88 < right / cases < 0.92
