"""Trials by a fake clock: how many pairs of blocks an arm gets, what is left out, and which variants are tried."""

import contextlib
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.played_steps import Clock
from workbench.core.system_load import Noise, RunQueueDelay, usable_cores
from workbench.diagnosis.measure.experiment import as_words
from workbench.diagnosis.measure.trials import (
    FEW_PAIRS,
    MAX_CORE_WAIT,
    MAX_PAIRS,
    MAX_REMEDY_PAIRS,
    Trials,
    reaching,
    treatments,
)
from workbench.harness.ablations import Variant, thread_counts
from workbench.harness.batches import CachedBatches
from workbench.harness.blocks import BlockTimer
from workbench.harness.observe import Replays, recorded_replays
from workbench.harness.peers import Peers
from workbench.harness.tf32 import set_tf32, uses_tf32


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock of a machine on which nobody takes a core."""
    monkeypatch.setattr(BlockTimer, "knows_delays", True)
    monkeypatch.setattr(RunQueueDelay, "read", lambda _: 0.0)
    return Clock()


def tried(clock: Clock, seconds: float, arms: dict[str, Callable[[], float]], *, budget: float) -> tuple[Trials, BlockTimer]:
    """Trials of arms whose steps take what they are said to."""

    def spend(get: Callable[[], float]) -> Callable[[Any], None]:
        def step(batch: Any) -> None:
            clock.now += get()

        return step

    with BlockTimer(spend(lambda: seconds), Peers(), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)] * 3)
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=seconds)
        trials.run([Variant(name=name, wrap=lambda _, get=get: spend(get)) for name, get in arms.items()], budget)  # type: ignore[misc]
    return trials, bench


@pytest.mark.parametrize(("seconds", "pairs"), [(0.008, 2), (0.0073, FEW_PAIRS), (0.004, 2)])
def test_an_arm_without_noise_needs_few_pairs(clock: Clock, seconds: float, pairs: int) -> None:
    """Three near its limit, 30 % of the step, and two where it is clear of it."""
    trials, _ = tried(clock, 0.01, {"no_optimizer": lambda: seconds}, budget=1000)
    arm = trials.results()["no_optimizer"]
    assert len(arm.pairs) == pairs
    assert arm.saved.mid == pytest.approx(1 - seconds / 0.01)


@pytest.mark.parametrize(("arms", "baselines"), [(1, 2), (2, 2), (3, 3), (4, 3)])
def test_two_variants_share_the_baseline_around_them(clock: Clock, arms: int, baselines: int) -> None:
    trials, bench = tried(clock, 0.01, {f"optimizer={number}": lambda: 0.008 for number in range(arms)}, budget=1000)
    assert {len(arm.pairs) for arm in trials.results().values()} == {2}
    assert len(bench.timings.blocks["cached"]) == 2 + 2 * (baselines - 1)  # one before the trials, one before all turns, and in two turns


def test_a_slow_drift_does_no_harm(clock: Clock) -> None:
    def drifting(seconds: float) -> Callable[[], float]:
        return lambda: seconds * (1 + clock.now / 20)

    def step(batch: Any) -> None:
        clock.now += drifting(0.01)()

    with BlockTimer(step, Peers(), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)])
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=0.01)
        half = Variant(name="no_optimizer", wrap=lambda _: lambda batch: setattr(clock, "now", clock.now + drifting(0.005)()))
        trials.run([half], 1000)
    assert trials.results()["no_optimizer"].saved.mid == pytest.approx(0.5, abs=0.01)


def test_a_hopeless_arm_is_not_asked_a_second_time(clock: Clock) -> None:
    trials, bench = tried(clock, 0.01, {"threads=2": lambda: 0.9}, budget=1000)
    assert len(trials.results()["threads=2"].pairs) == 1
    assert all(len(block.laps[0].calls) == 1 for block in bench.timings.blocks["threads=2"])  # nor for long
    assert clock.now < 3.1  # two steps to warm up, and one


@pytest.mark.parametrize(("seconds", "pairs"), [(0.005, 1), (0.0095, 2), (0.010, 2), (0.02, 1)])
def test_one_pair_tells_a_gain_beyond_doubt(clock: Clock, seconds: float, pairs: int) -> None:
    """Or that there is none; where it may be small, a second one is needed."""
    trials, _ = tried(clock, 0.01, {"no_optimizer": lambda: 0.01, "threads=2": lambda: seconds}, budget=1000)
    assert {name: len(arm.pairs) for name, arm in trials.results().items()} == {"no_optimizer": 2, "threads=2": pairs}


@pytest.mark.parametrize("stalled", range(3, 9))
def test_a_long_step_among_quick_ones_does_not_decide_what_is_gained(clock: Clock, stalled: int) -> None:
    """Two steps of 80 ms fill a block, and two of 17 ms do not."""
    calls = [0]

    def fused() -> float:
        calls[0] += 1
        return 0.063 if calls[0] == stalled else 0.017

    trials, _ = tried(clock, 0.08, {"optimizer=fused": fused}, budget=1000)
    assert trials.results()["optimizer=fused"].speedup.mid == pytest.approx(0.08 / 0.017, rel=0.05)


@pytest.mark.parametrize(("known", "waited"), [(False, 0.0), (True, 0.01)])
def test_one_pair_tells_nothing_where_the_thread_may_have_waited_for_a_core(
    clock: Clock, known: bool, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockTimer, "knows_delays", known)
    monkeypatch.setattr(RunQueueDelay, "read", lambda _: waited * clock.now)
    trials, _ = tried(clock, 0.01, {"threads=2": lambda: 0.005, "precision=amp_bf16": lambda: 0.05}, budget=1000)
    assert {len(arm.pairs) for arm in trials.results().values()} == {1 if waited < MAX_CORE_WAIT and known else 2}


def test_another_implementation_is_not_tried_where_the_better_one_can_be(clock: Clock) -> None:
    def run(fused: Callable[[Any], Any]) -> set[str]:
        with BlockTimer(lambda _: setattr(clock, "now", clock.now + 0.01), Peers(), torch.device("cpu"), clock=clock) as bench:
            replay = CachedBatches()
            replay.hold([torch.zeros(2)] * 3)
            bench.run("cached", replay.give(4), 4)
            trials = Trials(bench, replay, lambda: None, full=0.01)
            first = Variant(name="optimizer=fused", wrap=lambda step: fused)
            trials.run([first, Variant(name="optimizer=foreach", instead_of="optimizer=fused")], 1000)
        return set(trials.results())

    assert run(lambda _: setattr(clock, "now", clock.now + 0.009)) == {"optimizer=fused"}
    assert run(full_device) == {"optimizer=foreach"}


def test_noise_makes_more_pairs(clock: Clock) -> None:
    chance = random.Random(1)
    names = ("no_optimizer", "doubled", "optimizer=fused", "optimizer=foreach")  # one knows how the others vary
    trials, _ = tried(clock, 0.06, dict.fromkeys(names, lambda: 0.04 * math.exp(chance.gauss(0, 0.3))), budget=1e6)
    counts = [len(arm.pairs) for arm in trials.results().values()]
    assert FEW_PAIRS < sum(counts) / len(counts) <= MAX_PAIRS


@pytest.mark.parametrize("seconds", [1.2, 2.0, 8.0])
def test_steps_of_seconds_still_get_an_answer_within_the_budget(clock: Clock, seconds: float) -> None:
    names = ["no_optimizer", "doubled", "threads=2", "optimizer=fused", "precision=amp_bf16"]
    trials, _ = tried(clock, seconds, {name: lambda: 0.8 * seconds for name in names}, budget=60)
    results = trials.results()
    assert all(arm.saved.mid == pytest.approx(0.2) for arm in results.values())
    assert len(results["no_optimizer"].pairs) >= 2
    assert clock.now < 90
    assert len(results) == len(names) or trials.left_out
    assert "doubled" not in trials.left_out  # a name of ours


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("seconds", [0.2, 1.2, 2.0, 8.0])
def test_a_budget_that_was_too_short_says_which_suffices(clock: Clock, seconds: float, noise: float) -> None:
    chance = random.Random(1)
    names = ["no_optimizer", "doubled", "threads=2", "optimizer=fused", "precision=amp_bf16"]
    arms = dict.fromkeys(names, lambda: 0.8 * seconds * math.exp(chance.gauss(0, noise)))
    short, _ = tried(clock, seconds, arms, budget=5 * seconds)
    assert short.left_out
    budget = short.enough
    clock.now = 0.0
    trials, _ = tried(clock, seconds, arms, budget=budget)
    assert (trials.left_out, trials.enough) == ([], 0.0)
    assert set(trials.results()) == set(names)
    assert budget <= 2 * clock.now + 1, "and no far larger one"


def unsteady(clock: Clock, seconds: float, chance: random.Random) -> Callable[[], float]:
    """A step beside other processes, which take the cores for a while now and then: each while, it has another length."""
    drift, until = 1.0, 0.0

    def get() -> float:
        nonlocal drift, until
        if clock.now >= until:
            drift, until = math.exp(chance.gauss(0, 0.5)), clock.now + 3 * seconds
        return seconds * drift

    return get


def beside_others(clock: Clock, seed: int, budget: float) -> Trials:
    """Trials of a step of 1.5 s, of which one thread saves half, and mixed precision nothing."""
    chance = random.Random(seed)
    arms = {"threads=1": unsteady(clock, 0.8, chance), "precision=amp_bf16": unsteady(clock, 1.5, chance)}
    slow = unsteady(clock, 1.5, chance)
    with BlockTimer(lambda _: setattr(clock, "now", clock.now + slow()), Peers(), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)] * 3)
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=1.5)
        variants = [
            Variant(name=name, wrap=lambda _, get=get: lambda _: setattr(clock, "now", clock.now + get()))  # type: ignore[misc]
            for name, get in arms.items()
        ]
        trials.run(variants, budget)
    return trials


def test_what_is_left_of_the_budget_is_spent_on_what_is_not_clear(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step whose equal blocks took 1.1 to 1.9 s, one thread took a quarter. After four pairs it was not clear, and was dropped."""
    monkeypatch.setattr(BlockTimer, "knows_delays", False)
    more = 0
    for seed in range(12):
        clock.now = 0.0
        trials = beside_others(clock, seed, 1000.0)
        counts = {name: len(arm.pairs) for name, arm in trials.results().items()}
        more += max(counts.values()) > MAX_REMEDY_PAIRS
        for name, count in counts.items():
            saved = trials.saved(name, looks=1)
            assert count == MAX_PAIRS or saved.low > 0 or saved.high < 0.1, (name, saved)
        assert counts["threads=1"] < MAX_PAIRS
        clock.now = 0.0
        beside_others(clock, seed, 30.0)
        assert clock.now < 50
    assert more >= 4


def test_what_was_not_clear_is_not_tried_again_where_it_failed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockTimer, "knows_delays", False)
    calls = [0]

    def step(_: Any) -> None:
        calls[0] += 1
        clock.now += 0.4 if calls[0] % 2 else 2.0
        if calls[0] > 8:
            full_device()

    with BlockTimer(lambda _: setattr(clock, "now", clock.now + 1.0), Peers(), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)] * 3)
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=1.0)
        trials.run([Variant(name="channels_last", wrap=lambda _: step)], 1000)
    assert len(trials.notes) == 1
    assert calls[0] == 9


def test_the_baseline_that_was_just_made_is_not_counted_a_second_time(clock: Clock) -> None:
    """In small budgets the first variant was left out though it fitted, after a block of the unchanged step that nothing used."""

    def step(_: Any) -> None:
        clock.now += 0.01

    with BlockTimer(step, Peers(), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)] * 3)
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=0.01)
        variant = Variant(name="no_optimizer", wrap=lambda _: step)
        block = (trials.count + trials.warm) * 0.01
        trials.late = bench.elapsed + block + (trials.count + trials._warm_up(variant)) * 0.01 + block / 2
        trials.run([variant], 0.0)
        assert trials.warm > 0
        assert bench.elapsed <= trials.late
    assert [*trials.results()] == ["no_optimizer"]


def test_the_rest_is_tried_where_the_first_variants_leave_time(clock: Clock) -> None:
    """With long steps few variants fit into the budget at first; one thread takes less, and the time that it leaves is not wasted."""
    trials, _ = tried(clock, 2.0, {"threads=1": lambda: 0.25, "doubled": lambda: 4.0, "precision=amp_bf16": lambda: 1.0}, budget=42.0)
    assert "threads=1" in trials.results()
    assert len(trials.results()) > 1
    assert clock.now < 60


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.lists(st.floats(0.01, 10), min_size=1, max_size=4))
def test_no_variant_saves_more_than_the_whole_step(full: float, cached: float, arms: list[float]) -> None:
    """The cached step may be timed while the machine is busier than for the full one: one thread saved 107 % and 274 %."""
    clock, seconds = Clock(), itertools.cycle(arms)
    with BlockTimer(lambda _: setattr(clock, "now", clock.now + cached), Peers(), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)] * 3)
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=full)
        trials.run([Variant(name="threads=1", wrap=lambda _: lambda _: setattr(clock, "now", clock.now + next(seconds)))], 60)
    saved = trials.saved("threads=1")
    assert saved.low <= saved.mid <= saved.high <= 1
    shown = re.match(r"1 thread: (\d+) % less \((-?\d+) to (\d+)\)", as_words("1 thread", saved))
    assert shown is None or 0 <= int(shown[1]) <= int(shown[3]) <= 100


def test_remedies_are_not_measured_as_closely_as_parts_of_the_step(clock: Clock) -> None:
    numbers = {name: iter([0.006, 0.010, 0.008, 0.012] * 10_000) for name in ("no_optimizer", "optimizer=fused")}
    trials, _ = tried(clock, 0.06, {name: lambda name=name: 5 * next(numbers[name]) for name in numbers}, budget=1e6)  # type: ignore[misc]
    found = {name: len(arm.pairs) for name, arm in trials.results().items()}
    assert 2 <= found["optimizer=fused"] <= min(found["no_optimizer"], MAX_REMEDY_PAIRS)


class Pair(Peers):
    """Two ranks, of which the other one does well."""

    def gather(self, value: Any) -> Any:
        failed = isinstance(value, tuple) and isinstance(value[0], str)
        return [value, "" if isinstance(value, str) else ("", *value[1:]) if failed else value]


def full_device(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@contextlib.contextmanager
def full_switch() -> Iterator[None]:
    full_device()
    yield


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "variant",
    [
        Variant(name="doubled", batch=full_device),
        Variant(name="doubled", on=full_switch),
        Variant(name="doubled", wrap=lambda step: full_device),
    ],
    ids=["batch", "switch", "step"],
)
def test_a_variant_for_which_memory_runs_out_is_left_out(clock: Clock, variant: Variant, world_size: int) -> None:
    """Wherever it does: on each rank the others hear of it, and the next variants are tried."""

    def spend(_: Any) -> None:
        clock.now += 0.01

    peers = Peers() if world_size == 1 else Pair(world_size=2)
    with BlockTimer(spend, peers, torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)] * 3)
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=0.01)
        trials.run([variant, Variant(name="no_optimizer")], 1000)
    assert list(trials.results()) == ["no_optimizer"]
    assert trials.notes == ["doubled could not be tried: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]


def test_a_rank_whose_switch_fails_the_second_time_leaves_nobody_in_a_reduction(clock: Clock) -> None:
    """The first time ranks step without reductions; the second time a rank that trains alone would wait for ever."""
    words = list[str]()

    class Other(Peers):
        """Two ranks; the other one fails as it switches the variant on again."""

        def gather(self, value: Any) -> Any:
            if isinstance(value, str):
                words.append(value)
                return [value, "OutOfMemoryError: full" if len(words) == 3 else ""]
            return [value, value]

    steps = [0]

    def step(_: Any) -> None:
        steps[0] += 1

    with BlockTimer(lambda _: setattr(clock, "now", clock.now + 0.01), Other(world_size=2), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)] * 3)
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=0.01)
        trials.run([Variant(name="doubled", wrap=lambda _: step)], 1000)
    assert steps == [1]  # without reductions
    assert trials.notes == ["doubled could not be tried: OutOfMemoryError: full"]


def test_a_variant_for_which_memory_runs_out_later(clock: Clock) -> None:
    calls = [0]

    def step(_: Any) -> None:
        clock.now += 0.01
        calls[0] += 1
        if calls[0] == 10:  # in a timed block
            full_device()

    with BlockTimer(lambda _: setattr(clock, "now", clock.now + 0.01), Peers(), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)] * 3)
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=0.01)
        trials.run([Variant(name="doubled", wrap=lambda _: step)], 1000)
    assert calls == [10]
    assert "OutOfMemoryError" in trials.notes[0]


def test_after_threads_that_look_for_work_some_steps_do_not_count(clock: Clock) -> None:
    calls: list[str] = []

    def step(batch: Any) -> None:
        calls.append("cached")
        clock.now += 0.02 if calls[-3:-1] and "threads" in calls[-4:-1] else 0.01  # the first three beside them are slow

    def threads(batch: Any) -> None:
        calls.append("threads")
        clock.now += 0.012

    with BlockTimer(step, Peers(), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)])
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=0.01)
        trials.run([Variant(name="threads=2", wrap=lambda _: threads)], 1000)
    assert trials.results()["threads=2"].saved.mid == pytest.approx(-0.2, abs=0.01)


def test_more_threads_are_not_tried_where_others_take_the_cores() -> None:
    replay = CachedBatches()
    replay.hold([torch.zeros(2)])

    def names(foreign: float, ranks: int = 1) -> list[str]:
        noise, cpu = Noise(cores=2.0, foreign=foreign), torch.device("cpu")
        some = treatments([], [], replay, device=cpu, precision="fp32", micro_batches=1, world_size=ranks, gc_share=0.0, noise=noise)
        return [one.name for one in some]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert {f"threads={count}" for count in thread_counts()} <= set(names(0.1))
        assert not any(name.startswith("threads=") for name in names(0.6))
        assert not any(name.startswith("threads=") for name in names(0.0, ranks=1 + int(usable_cores()) // 2))  # nor where other ranks do
        torch.set_num_threads(2)
        assert names(0.6)[0] == "threads=1"  # fewer may help then, and come first where time is short
        assert "threads=1" in names(0.0)[1:]
        assert "threads=1" in names(0.6, ranks=2)[1:]  # ranks try all in one order, whatever each sees of others
    finally:
        torch.set_num_threads(before)


def test_no_more_threads_are_tried_than_the_quota_of_a_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.harness.ablations.usable_cores", lambda: 3.5)
    assert max(thread_counts()) == 3
    monkeypatch.setattr("workbench.harness.ablations.usable_cores", lambda: 0.5)
    assert set(thread_counts()) <= {1}


@pytest.mark.parametrize(
    ("gpu", "precision", "setting", "tried"),
    [
        (True, "fp32", None, True),
        (True, "amp_bf16", None, False),
        (True, "fp32", True, False),
        (False, "fp32", None, False),
    ],
    ids=["strict", "mixed", "in TF32 already", "no TF32"],
)
def test_tf32_is_tried_where_products_are_strict(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, precision: str, setting: bool | None, tried: bool
) -> None:
    """Or mixed precision would seem to gain what TF32 gains alone: on an H100 a third of the step is left with it."""
    monkeypatch.setattr("workbench.diagnosis.measure.trials.has_tf32", lambda device: gpu)
    replay, model = CachedBatches(), torch.nn.Linear(2, 2)
    replay.hold([torch.zeros(2)])
    options: dict[str, Any] = {
        "device": torch.device("cpu"),
        "micro_batches": 1,
        "world_size": 1,
        "gc_share": 0.0,
        "noise": Noise(cores=2.0),
    }
    try:
        set_tf32(setting)
        variants = {variant.name: variant for variant in treatments([model], [], replay, precision=precision, **options)}
    finally:
        set_tf32(None)
    assert ("tf32" in variants) is tried
    if tried:
        with variants["tf32"].on():
            assert uses_tf32()
        assert not uses_tf32()


def test_what_cuda_graphs_hold_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer and autocast that were captured stay as they are: their variants had saved 0 %."""

    class Graph:
        def replay(self) -> str:
            return "done"

    replay = Graph.replay
    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    with recorded_replays() as whole:
        assert Graph().replay() == Graph().replay() == "done"
    assert Graph.replay is replay
    assert whole == Replays(graphs=2, optimizer=False)
    weight = torch.nn.Parameter(torch.ones(1))
    with recorded_replays() as partial:
        Graph().replay()
        torch.optim.SGD([weight]).step()
    assert partial == Replays(graphs=1, optimizer=True)
    names = ["no_sync", "no_optimizer", "device_batch", "doubled", "optimizer=fused", "precision=amp_bf16", "tf32", "channels_last"]
    variants = [Variant(name=name) for name in names]
    left, note = reaching(variants, whole)
    assert [variant.name for variant in left] == ["device_batch", "doubled"]
    assert note.startswith("step() launches 2 captured CUDA graphs, which no experiment can change, so no_sync, no_optimizer, ")
    assert [variant.name for variant in reaching(variants, partial)[0]] == ["no_optimizer", "device_batch", "doubled", "optimizer=fused"]
    assert reaching(variants, Replays()) == (variants, "")
    assert reaching(variants[2:4], whole)[1] == ""


@pytest.mark.parametrize(("most", "pairs"), [(1.0, 3), (0.09, 1)])
def test_what_cannot_be_to_blame_takes_one_pair(clock: Clock, most: float, pairs: int) -> None:
    """A trace shows how little of the step the optimizer takes: however much blocks vary, its share of the step is not asked again."""
    with BlockTimer(lambda _: setattr(clock, "now", clock.now + 0.01), Peers(), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)] * 3)
        bench.run("cached", replay.give(4), 4)
        trials = Trials(bench, replay, lambda: None, full=0.01, most={"no_optimizer": most})
        faster = lambda step: lambda _: setattr(clock, "now", clock.now + 0.0073)  # noqa: E731
        trials.run([Variant(name="no_optimizer", wrap=faster)], 1000)
    assert len(trials.results()["no_optimizer"].pairs) == pairs
