"""Two ways to do a step take turns: exact with a fake clock, then with real loaders and real changes."""

import gc
import json
import math
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests import drawn
from tests.diagnosis.test_diagnosis import remedy
from workbench.core.system_load import LoadMeter
from workbench.diagnosis.analysis.proof import Proof
from workbench.diagnosis.api import _kept
from workbench.diagnosis.panel import html
from workbench.harness import ablations
from workbench.harness.ab_test import MAX_PAIRS, MIN_PAIRS, WARM_UP_STEPS, measure_change, run_ab_test
from workbench.harness.blocks import DiagnoseError
from workbench.harness.peers import Peers
from workbench.harness.results import VariantTimes


class Clock:
    """Time that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slow = 1.0

    def __call__(self) -> float:
        return self.now


class Fake:
    """A contestant whose steps take what they are said to."""

    def __init__(self, clock: Clock, *seconds: float, log: list[str] | None = None, name: str = "") -> None:
        self.clock, self.seconds, self.log, self.name, self.calls = clock, seconds, log if log is not None else [], name, 0

    def step(self) -> None:
        self.clock.now += self.seconds[self.calls % len(self.seconds)] * self.clock.slow
        self.calls += 1
        self.log.append(self.name)

    def drain(self) -> None:
        self.log.append(f"drain {self.name}")


def test_the_ratio_and_no_more_pairs_than_needed() -> None:
    clock = Clock()
    arm = run_ab_test(Fake(clock, 0.1), Fake(clock, 0.04), budget_s=1000, peers=Peers(), clock=clock)
    assert len(arm.pairs) == MIN_PAIRS
    assert arm.speedup.mid == pytest.approx(2.5)
    assert arm.speedup.width == pytest.approx(0)


def test_the_order_is_swapped_and_each_turn_begins_with_an_empty_queue() -> None:
    clock, log = Clock(), list[str]()
    run_ab_test(Fake(clock, 0.1, log=log, name="a"), Fake(clock, 0.1, log=log, name="b"), budget_s=1000, peers=Peers(), clock=clock)
    turns = [word.removeprefix("drain ") for word in log if word.startswith("drain")]
    assert turns == ["a", "b"] + ["a", "b", "b", "a"] * (MIN_PAIRS // 2)


def test_a_machine_that_gets_slower_does_no_harm() -> None:
    clock = Clock()

    class Drifting(Fake):
        def step(self) -> None:
            self.clock.slow *= 1.002
            super().step()

    arm = run_ab_test(Drifting(clock, 0.1), Drifting(clock, 0.05), budget_s=1000, peers=Peers(), clock=clock)
    assert arm.speedup.mid == pytest.approx(2, rel=0.02)
    assert arm.pairs[-1][0] > 1.1 * arm.pairs[0][0]


class Shared(Fake):
    """A contestant whose blocks all take another time, as on a machine that others use."""

    def __init__(self, clock: Clock, seconds: float, chance: random.Random, noise: float) -> None:
        super().__init__(clock, seconds)
        self.chance, self.noise = chance, noise

    def drain(self) -> None:
        self.clock.slow = math.exp(self.chance.gauss(0, self.noise))


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_a_range_of_one_two_or_three_pairs_holds_the_truth_nine_times_of_ten(noise: float) -> None:
    """The changed side takes 0.8 of the time. Before, the range of two pairs, whose ends were theirs, held it in half of the cases."""
    chance = random.Random(3)
    right: dict[int, list[bool]] = {1: [], 2: [], 3: []}
    before = list[bool]()
    for test in range(900):
        clock = Clock()
        sides = Shared(clock, 0.1, chance, noise), Shared(clock, 0.08, chance, noise)
        arm = run_ab_test(*sides, budget_s=(2.0, 4.0, 5.0)[test % 3], peers=Peers(), clock=clock)
        if (count := len(arm.pairs)) in right:
            right[count].append(1.25 in arm.speedup and 0.2 in arm.surely_saved)
            before += [0.2 in arm.saved] * (count == 2)  # the bootstrap's
    assert min(map(len, right.values())) > 100
    assert {count: statistics.fmean(held) for count, held in right.items() if statistics.fmean(held) < 0.9} == {}
    assert statistics.fmean(before) < 0.6
    assert all(right[1]), "one pair has no range"


def test_one_pair_has_no_range_and_says_so() -> None:
    arm = VariantTimes(name="changed", baseline="full", pairs=((0.2, 0.1),))
    assert (arm.speedup.low, arm.speedup.mid, arm.speedup.high) == (-math.inf, 2.0, math.inf)
    proof = Proof(remedy=drawn.proof().remedy, measured=arm.speedup)
    assert not proof.gained
    assert "measured 2.00× (one pair: no range): not clear whether it helps: one pair has no range" in proof.summary
    assert [str(cell) for cell in proof.table.rows[1]] == ["measured", "2.00×", "–", "–"]
    assert Proof.from_json(json.loads(json.dumps(proof.to_json()))).measured == proof.measured
    assert "one pair: no range" in html.remedy(proof.remedy, proof, 3.0)
    told = replace(drawn.diagnosis(), proofs=[proof])
    assert told.brief()["proved"][0]["measured"] == [None, 2.0, None]
    for result in (proof, told):
        result.plot()


@pytest.mark.parametrize(("seconds", "pairs"), [(2.0, 6), (5.0, 3), (11.0, 1)])
def test_slow_steps_are_not_spent_on_warming_up(seconds: float, pairs: int) -> None:
    """A proof of steps of 11 s took ten of them for its first pair, 110 s of 60 s."""
    clock = Clock()
    arm = run_ab_test(Fake(clock, seconds), Fake(clock, seconds), budget_s=60, peers=Peers(), clock=clock)
    assert len(arm.pairs) == pairs
    assert clock.now <= max(60, 6 * seconds)


def test_noise_makes_more_pairs_and_the_budget_ends_them() -> None:
    clock = Clock()
    noisy = run_ab_test(Fake(clock, *[0.1] * 7, 2.0), Fake(clock, *[0.1] * 5, 1.0), budget_s=10000, peers=Peers(), clock=clock)
    assert MIN_PAIRS < len(noisy.pairs) <= MAX_PAIRS
    clock = Clock()
    short = run_ab_test(Fake(clock, 3.0), Fake(clock, 3.0), budget_s=30, peers=Peers(), clock=clock)
    assert 1 <= len(short.pairs) <= 3
    assert clock.now < 60


@pytest.mark.parametrize("crowding", ["", "other processes took 1.0 of 2 cores"])
def test_a_busy_machine_is_in_the_note(crowding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadMeter, "crowding", lambda meter: crowding)
    clock = Clock()
    arm = run_ab_test(Fake(clock, 0.1), Fake(clock, 0.05), budget_s=1000, peers=Peers(), clock=clock)
    said = f"the machine was busy: {crowding}, so the measured gain may be wrong; prove it again when it is quiet"
    assert arm.note == (said if crowding else None)
    assert _kept(remedy(low=0.0), arm, samples=1.0).notes == ((said,) if crowding else ())


def test_an_interrupted_test_has_what_is_known_by_then() -> None:
    class Interrupted(Fake):
        after = 0

        def step(self) -> None:
            super().step()
            if self.calls == self.after:
                raise KeyboardInterrupt

    def run(after: int, progress: Any = None) -> VariantTimes:
        clock = Clock()
        changed = Interrupted(clock, 0.05)
        changed.after = after
        return run_ab_test(Fake(clock, 0.1), changed, budget_s=1000, peers=Peers(), clock=clock, progress=progress)

    told = list[tuple[str, str]]()
    whole = run(0, lambda *words: told.append(words))
    steps = WARM_UP_STEPS + (2 + 8) * 3  # three blocks of the changed side
    stopped = run(steps)
    assert len(stopped.pairs) == 2
    assert stopped.note is not None
    assert stopped.note.startswith("stopped by Ctrl-C after 2 pairs of blocks")
    assert stopped.speedup.mid == pytest.approx(whole.speedup.mid)
    assert told[0] == ("warming up both sides", "")
    assert told[2] == ("pair 3 of blocks", "the step takes 50 % less with it, after 2 pairs")
    with pytest.raises(KeyboardInterrupt):
        run(5)

    def asked(now: str, known: str) -> None:
        if known:
            raise KeyboardInterrupt

    assert len(run(0, asked).pairs) == 2

    class Late(Clock):
        known = False

        def __call__(self) -> float:
            if self.known:
                self.known = False
                raise KeyboardInterrupt
            return super().__call__()

    late = Late()
    between = run_ab_test(  # it comes after a pair, before the next one
        *(Fake(late, 0.1), Fake(late, 0.05)),
        budget_s=1000,
        peers=Peers(),
        clock=late,
        progress=lambda _, known: setattr(late, "known", bool(known)),
    )
    assert between.note is not None
    assert (len(between.pairs), between.note.partition(";")[0]) == (2, stopped.note.partition(";")[0])

    def at_once(now: str, known: str) -> None:
        told.append((now, known))
        raise KeyboardInterrupt

    told.clear()
    with pytest.raises(KeyboardInterrupt):
        run(0, at_once)
    assert told == [("warming up both sides", "")]
    kept = _kept(remedy(low=1.0), stopped, samples=1.0)
    assert kept.measured.width > 0  # of two pairs that are alike
    assert "stopped by Ctrl-C" in str(kept)


def test_stalls_of_both_count() -> None:
    clock = Clock()
    arm = run_ab_test(Fake(clock, *[0.05] * 9, 0.55), Fake(clock, *[0.05] * 10), budget_s=10000, peers=Peers(), clock=clock)
    assert arm.speedup.mid == pytest.approx(2, rel=0.15)


class Feed:
    """A loader's passes, as a contest sees them."""

    num_workers, accumulation, kind = 0, 1, "DataLoader"

    def __init__(self, epoch: int) -> None:
        self.epoch, self.passes = epoch, 1


class Starting(Fake):
    """Every pass begins with a slow step."""

    def __init__(self, clock: Clock, seconds: float, start: float, epoch: int) -> None:
        super().__init__(clock, seconds)
        self.feed, self.start = Feed(epoch), start

    def step(self) -> None:
        super().step()
        if self.calls % self.feed.epoch == 0:
            self.clock.now += self.start
            self.feed.passes += 1


@pytest.mark.parametrize("epoch", [2, 20])
def test_what_a_pass_costs_is_spread_over_its_steps(epoch: int) -> None:
    clock = Clock()
    arm = run_ab_test(Starting(clock, 0.1, 2.0, epoch), Starting(clock, 0.1, 0.0, epoch), budget_s=1e6, peers=Peers(), clock=clock)
    assert arm.speedup.mid == pytest.approx((0.1 + 2.0 / epoch) / 0.1, rel=0.01)


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4000  # an epoch is long enough for the start of workers not to count

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.004)
        return torch.full((4,), float(index))


def training() -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    seen: Any = type("Seen", (), {"states": set()})  # a class is no state that would be put back

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()
        state = (
            len(batch),
            torch.get_num_threads(),
            gc.isenabled(),
            ablations.implementation_of(optimizer),
            torch.is_autocast_enabled("cpu"),
        )
        seen.states.add(state)

    return step, model, optimizer, seen


def test_workers_make_a_slow_loader_faster_and_all_is_as_it_was() -> None:
    step, model, optimizer, _ = training()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Slow(), batch_size=4, shuffle=True, generator=generator)
    before = [weight.detach().clone() for weight in model.parameters()], torch.get_rng_state(), generator.get_state()
    arm = measure_change(step, loader, {"num_workers": 2}, model=model, optimizer=optimizer, budget_s=5)
    assert 1.5 < arm.speedup.mid < 2.5
    assert all(torch.equal(a, b) for a, b in zip(before[0], model.parameters(), strict=True))
    assert torch.equal(before[1], torch.get_rng_state())
    assert torch.equal(before[2], generator.get_state())
    assert not optimizer.state
    assert loader.num_workers == 0


def test_changes_of_the_step_hold_in_its_turns_only() -> None:
    step, _, optimizer, seen = training()
    loader = [torch.ones(3, 4)] * 10
    change = {"threads": 2, "gc": False, "optimizer": "fused", "precision": "amp_bf16"}
    measure_change(step, loader, change, budget_s=1)
    assert seen.states == {(3, 1, True, "single", False), (3, 2, False, "fused", True)}
    assert (torch.get_num_threads(), gc.isenabled(), ablations.implementation_of(optimizer)) == (1, True, "single")


def test_a_larger_batch_counts_its_samples() -> None:
    step, _, _, seen = training()
    arm = measure_change(step, DataLoader(Slow(), batch_size=4), {"micro_batch": 8}, budget_s=2)
    assert {state[0] for state in seen.states} == {4, 8}
    assert arm.samples == 2
    assert arm.speedup.mid == pytest.approx(1, abs=0.25)  # the loader takes as long per sample


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "nothing cannot be changed from outside"),
        ({"bucket_cap_mb": 50}, "bucket_cap_mb cannot be changed from outside of a step: possible are micro_batch"),
        ({"optimizer": "foreach"}, "no such implementation, or uses it already"),
        ({"num_workers": 2}, "only the knobs of a torch.utils.data.DataLoader can be turned"),
    ],
)
def test_what_cannot_be_changed(change: dict[str, Any], message: str) -> None:
    step, model, _, _ = training()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match=message):
        measure_change(step, [torch.ones(1, 4)], change, optimizer=optimizer, budget_s=1)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_an_optimizer_that_is_found_only_as_it_steps_is_put_back() -> None:
    model = nn.Linear(4, 2)
    hidden: Any = type("Hidden", (), {"optimizer": torch.optim.AdamW(model.parameters())})

    def step(batch: Tensor) -> None:
        model(batch).square().mean().backward()
        hidden.optimizer.step()

    before = model.weight.detach().clone()
    measure_change(step, [torch.ones(3, 4)] * 10, {"threads": 1}, budget_s=0.5)
    assert not hidden.optimizer.state
    assert torch.equal(model.weight, before)


def test_tf32_is_refused_where_there_is_none() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(DiagnoseError, match=r"tf32=True: the model is on cpu, which has no TF32; NVIDIA GPUs have it from Ampere on"):
        measure_change(lambda batch: model(batch).sum().backward(), [torch.ones(1, 2)], {"tf32": True}, model=model, budget_s=1)
