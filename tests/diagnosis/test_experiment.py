"""The experiment: what is planted shows in the arms, everything is as it was afterwards, and errors say what to do."""

import contextlib
import gc
import itertools
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.forked import Forks
from tests.played_steps import Clock, laps
from workbench.core import units
from workbench.core.statistics import LOOKS
from workbench.core.system_load import LoadMeter, Noise, RunQueueDelay
from workbench.diagnosis.analysis.costs import Costs
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.measure import experiment as experiment_module
from workbench.diagnosis.measure.evidence import EvidenceBuilder, new_pages_note
from workbench.diagnosis.measure.experiment import LATE_SECONDS, MIN_CALLS, _Experiment, _is_decided, experiment
from workbench.diagnosis.measure.trials import FEW_PAIRS
from workbench.harness import ablations
from workbench.harness.ab_test import measure_change
from workbench.harness.batches import CachedBatches
from workbench.harness.blocks import BlockTimer, DiagnoseError, StepFailed
from workbench.harness.peers import Peers
from workbench.harness.stack_sampler import StackSampler

BUDGET = 4.0


def test_rows_of_embedding_tables_without_a_gradient_are_counted() -> None:
    model = nn.ModuleDict({"rare": nn.EmbeddingBag(2000, 64), "tied": nn.Embedding(2000, 64), "small": nn.Embedding(20, 64)})
    model["sparse"] = nn.Embedding(2000, 64, sparse=True)
    dense = [weight for name, weight in model.named_parameters() if not name.startswith("sparse")]
    optimizers = torch.optim.Adam(dense, 0.01), torch.optim.SparseAdam(model["sparse"].parameters(), 0.01)
    rows = torch.arange(20)

    def step(batch: Tensor) -> None:
        used = model["rare"](rows[None]) + model["small"](rows) + model["tied"](rows) + model["sparse"](rows)
        loss = (used @ model["tied"].weight.T + batch.mean()).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    tables = experiment(step, [torch.ones(4)] * 8, budget_s=1.0).tables
    assert tables is not None
    assert (tables.names, tables.numbers) == (("rare", "tied"), 256_000)
    assert tables.touched == pytest.approx((0.01 + 1) / 2)


@pytest.mark.parametrize("kind", ["wasteful", "no_grad", "critic", "master copy"])
def test_gradients_of_a_model_that_stays_as_it_is_are_noted(kind: str) -> None:
    """Its backward took half of a step of distillation, and the diagnosis said nothing of it."""
    student, other = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    held = [weight.detach().clone() for weight in student.parameters()] if kind == "master copy" else list(student.parameters())
    optimizer = torch.optim.SGD(held, 0.01)

    def step(batch: Tensor) -> None:
        with torch.set_grad_enabled(kind != "no_grad"):
            target = other(student(batch) if kind == "critic" else batch)
        student.zero_grad()
        (student(batch) - target).square().mean().backward()
        for copy, weight in zip(held, student.parameters(), strict=True):
            copy.grad = weight.grad
        optimizer.step()
        with torch.no_grad():
            for copy, weight in zip(held, student.parameters(), strict=True):
                weight.copy_(copy)

    notes = [note for note in experiment(step, [torch.rand(4, 8)] * 8, budget_s=1.0).notes if "a backward computes gradients of" in note]
    assert len(notes) == (kind != "no_grad")
    if notes:
        assert "gradients of Sequential" in notes[0]
        assert "requires_grad_(False) saves that, and, if no gradient has to pass through it" in notes[0]


def test_rounds_end_after_as_many_looks_as_their_interval_allows_for() -> None:
    equal, noisy = [(1.0, 0.5)] * LOOKS, [(1.0, 0.1), (1.0, 0.9)] * LOOKS
    near = [(1.0, 0.88)] * LOOKS
    assert [_is_decided(equal[:count]) for count in (0, 1, 2)] == [False, False, True]
    assert [_is_decided(equal[:count], least=3) for count in (2, 3)] == [False, True]
    assert [_is_decided(near[:count]) for count in (2, 4)] == [False, True]
    assert [_is_decided(noisy[:count]) for count in (4, LOOKS - 1, LOOKS, LOOKS + 1)] == [False, False, True, True]


@pytest.mark.parametrize(("shares", "decided"), [((0.8, 1.2, 1.0), True), ((0.7, 1.0, 0.9), False), ((1.0, 1.0), False)])
def test_noise_of_a_loader_that_takes_next_to_nothing_is_not_measured_again(shares: tuple[float, ...], decided: bool) -> None:
    """Unless three pairs of blocks seem to say that it matters."""
    pairs = [(1.0, share) for share in shares]
    assert _is_decided(pairs, cheap=True, least=FEW_PAIRS) is decided
    assert not _is_decided(pairs, cheap=False, least=FEW_PAIRS)


class Pair(Peers):
    """Two ranks that do the same."""

    def gather(self, value: Any) -> Any:
        return [value, value]


@pytest.mark.parametrize(("elapsed", "known"), [(2.0, True), (20.0, True), (29.0, False)])
def test_which_rank_pauses_is_found_out_even_late(elapsed: float, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine half of the budget was spent before a rank was seen to pause on its own; it was called stalled."""
    clock = Clock()
    monkeypatch.setattr(ablations, "can_skip_reduction", lambda _: True)
    monkeypatch.setattr(ablations, "without_reduction", lambda _: contextlib.nullcontext())

    def step(_: Any) -> None:
        clock.now += 0.13 if bench.called % 12 == 7 else 0.01

    with BlockTimer(step, Pair(world_size=2), torch.device("cpu"), clock=clock) as bench:
        replay = CachedBatches()
        replay.hold([torch.zeros(2)] * 3)
        for arm, count in (("full", 60), ("alone", 6), ("cached", 60)):
            bench.run(arm, [None] * count, count)
        clock.now = elapsed
        rounds: Any = SimpleNamespace(replay=replay, pairs=1)
        feed: Any = SimpleNamespace(forks=False)
        trial = _Experiment(bench, feed, None, SimpleNamespace(models=[], optimizers=[]), 30.0, [], None)  # type: ignore[arg-type]
        trial.rounds, trial.sums = rounds, EvidenceBuilder(bench, feed, rounds)
        bench.tick()
        trial._wait_for_stalls(0.01, MIN_CALLS)
    assert len(trial.sums.stalls().at) >= 10
    assert (len(trial.sums.stalls(alone=True).at) >= 3) is known
    assert clock.now < elapsed + 1.5  # and no longer


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Some samples, each of which takes its time, or 10 µs of a clock."""

    def __init__(self, seconds: float = 0.0, count: int = 200, clock: Clock | None = None) -> None:
        self.seconds, self.count, self.clock = seconds, count, clock

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        if self.clock:
            self.clock.now += 1e-5
        return torch.full((8,), float(index % 7)), torch.tensor(index % 3)


class Training:
    """A model, its optimizer, and a step that may take longer than it should."""

    def __init__(self, sleep: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.sleep = sleep

    def step(self, batch: Any) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        if self.sleep:
            time.sleep(self.sleep)

    @property
    def weights(self) -> list[Tensor]:
        return [value.detach().clone() for value in self.model.state_dict().values()]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The clock of the experiment, which only work moves: where time is really spent is not seen, and nothing is collected."""
    clock = Clock()
    monkeypatch.setattr(experiment_module, "BlockTimer", partial(BlockTimer, clock=clock))
    for read in ("read", "own"):
        monkeypatch.setattr(RunQueueDelay, read, lambda _: 0.0)
    monkeypatch.setattr(StackSampler, "places", lambda *_: {})
    gc.collect()
    gc.disable()
    yield clock
    gc.enable()


def test_a_slow_loader_shows_and_nothing_else_changes() -> None:
    training, generator = Training(), torch.Generator().manual_seed(5)
    loader = DataLoader(Samples(0.005), batch_size=4, shuffle=True, generator=generator)  # far more than a busy machine adds
    for batch in list(loader)[:3]:
        training.step(batch)
    weights, moments = training.weights, json.dumps(training.optimizer.state_dict(), default=lambda value: value.tolist())
    states = torch.get_rng_state(), generator.get_state(), random.getstate(), np.random.get_state()[1].tolist()
    evidence = experiment(training.step, loader, model=training.model, optimizer=training.optimizer, budget_s=BUDGET)
    assert evidence.arms["cached"].saved.low > 0.5
    assert evidence.arms["loader"].seconds == pytest.approx(evidence.step, rel=0.4)
    assert evidence.loading is not None
    assert evidence.loading.blocked is not None
    assert 0.018 < evidence.loading.blocked < 1.5 * evidence.arms["loader"].seconds  # a sleep may last longer, and does so in both
    assert (evidence.samples, evidence.world_size, evidence.optimizer) == (4.0, 1, "AdamW(single)")
    assert evidence.ranks[0].wait > 0.5 * evidence.step
    assert evidence.ranks[0].timeline.share("data_wait") > 0.5
    assert evidence.inside is not None
    assert evidence.inside.op_count > 10
    assert all(torch.equal(a, b) for a, b in zip(weights, training.weights, strict=True))
    assert json.dumps(training.optimizer.state_dict(), default=lambda value: value.tolist()) == moments
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], generator.get_state())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[2:]
    assert Evidence.from_json(json.loads(json.dumps(evidence.to_json()))).arms == evidence.arms


@pytest.mark.slow
@pytest.mark.alone
def test_a_full_queue_hides_nothing() -> None:
    training = Training(0.005)
    loader = DataLoader(Samples(0.003, 400), batch_size=4, num_workers=1, prefetch_factor=8)
    evidence = experiment(training.step, loader, budget_s=6)
    assert evidence.arms["cached"].saved.mid == pytest.approx(0.5, abs=0.25)  # 12 ms to load, 6 to train


@pytest.mark.slow
@pytest.mark.alone
def test_a_step_that_sleeps_is_not_the_loaders_fault() -> None:
    training = Training(0.01)
    evidence = experiment(training.step, DataLoader(Samples(), batch_size=4), budget_s=BUDGET)
    assert abs(evidence.arms["cached"].saved.mid) < 0.2
    assert evidence.arms["no_optimizer"].saved.high < 0.3
    assert evidence.inside is not None
    assert evidence.inside.blocked == pytest.approx(0.01, rel=0.5)
    assert any("found behind step: the model Sequential" in note for note in evidence.notes)


@pytest.mark.parametrize("extra", [0.0, 0.1])
def test_stalls_are_counted_apart(extra: float, work: Clock) -> None:
    training, calls = Training(), [0]

    def step(batch: Any) -> None:
        calls[0] += 1
        training.step(batch)
        work.now += 0.005 + extra * (calls[0] % 20 == 0)

    evidence = experiment(step, DataLoader(Samples(clock=work), batch_size=4), budget_s=12)
    assert evidence.stalls.every == (20 if extra else None)
    assert evidence.stalls.extra == pytest.approx(extra, rel=0.01)
    # what is planted, 5 ms per step, is in the step and not in the arm
    assert evidence.arms["cached"].seconds == pytest.approx(0.005, rel=0.01)
    assert evidence.step - evidence.arms["cached"].seconds == pytest.approx(4e-5 + extra / 20, rel=0.01)
    assert calls == [0]  # it was counted back, too


@pytest.mark.slow
@pytest.mark.alone
def test_stalls_are_counted_apart_by_a_real_clock_too_with_accumulation() -> None:
    training, calls, lengths = Training(0.002), [0], set[int]()

    def step(batches: tuple[Any, ...]) -> None:
        calls[0] += 1
        lengths.add(len(batches))
        for batch in batches:
            training.step(batch)
        if calls[0] % 20 == 0:
            time.sleep(0.1)
        assert len(batches) == 2

    evidence = experiment(step, DataLoader(Samples(), batch_size=4), accumulation=2, budget_s=8)
    assert evidence.stalls.every == 20
    assert 0.09 < evidence.stalls.extra < 0.2
    assert evidence.step > evidence.arms["cached"].seconds  # the pause, 5 ms per step, is in the step and not in the arm
    assert (evidence.accumulation, evidence.samples, calls, lengths) == (2, 8.0, [0], set())


def test_the_step_may_take_its_batch_apart_and_write_into_it() -> None:
    training = Training()
    sums = set[float]()

    class Note:
        __slots__ = ()

        def __call__(self, value: float) -> None:
            sums.add(value)

    note = Note()

    def step(batch: dict[str, Tensor]) -> None:
        note(float(batch["x"].sum()))
        x = batch.pop("x")
        x.mul_(0.5)
        training.step((x, batch.pop("y")))

    loader = [{"x": torch.full((4, 8), float(i)), "y": torch.zeros(4, dtype=torch.long)} for i in (1, 2, 3)]

    class Fresh:
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return ({name: value.clone() for name, value in batch.items()} for batch in loader)

    evidence = experiment(step, Fresh(), budget_s=1)
    assert evidence.arms["cached"].pairs
    assert all(total % 16 == 0 for total in sums)  # never one that was halved before and not given anew


def test_accumulation_gives_tuples(work: Clock) -> None:
    training, lengths = Training(), set[int]()

    def step(batches: tuple[Any, ...]) -> None:
        assert isinstance(batches, tuple)
        lengths.add(len(batches))
        for batch in batches:
            training.step(batch)
            work.now += 0.005
        assert len(batches) == 3

    evidence = experiment(step, DataLoader(Samples(clock=work), batch_size=4), accumulation=3, budget_s=12)
    assert (evidence.accumulation, evidence.samples) == (3, 12.0)
    assert evidence.arms["doubled"].samples == 2
    assert not lengths  # it was emptied again


@pytest.mark.parametrize(("backwards", "micro_batches"), [(3, 3), (1, 1)])
def test_a_list_of_micro_batches(work: Clock, backwards: int, micro_batches: int) -> None:
    """It holds as many as backward is called; where it is called once, they may be samples."""
    training = Training()

    def step(batches: list[Any]) -> None:
        for batch in batches[:backwards]:
            training.step(batch)
        work.now += 0.004 * backwards + 0.001 * sum(len(batch[0]) for batch in batches)

    made = [next(iter(DataLoader(Samples(clock=work), batch_size=4))) for _ in range(3)]
    evidence = experiment(step, [made] * 8, budget_s=12)
    assert evidence.micro_batches == micro_batches
    assert (evidence.accumulation, evidence.samples) == (1, None)
    if micro_batches > 1:
        assert 0.006 < Costs.of(evidence).fixed < 0.018, "of 0.012, beside what the optimizer is taken to need"


def test_a_step_that_fails_at_its_third_call() -> None:
    training = Training()
    before, calls = training.weights, [0]

    def step(batch: Any) -> None:
        calls[0] += 1
        training.step(batch)
        if calls[0] == 3:
            raise RuntimeError("out of luck")

    with pytest.raises(StepFailed, match=r"step\(\) raised RuntimeError at its call number 3: out of luck") as caught:
        experiment(step, DataLoader(Samples(), batch_size=4), budget_s=2)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (caught.value.call, isinstance(caught.value, ValueError)) == (3, True)
    assert all(torch.equal(a, b) for a, b in zip(before, training.weights, strict=True))
    assert not training.optimizer.state


@pytest.mark.parametrize("at", [2, "no loader", "no optimizer step"])
def test_interrupted_at_any_time(at: int | str) -> None:
    """What is known by then is returned, and an interrupt before anything is known goes on; everything is as before either way.

    It comes at a call, or at the first one while this is tried: of the first round, "no loader", nothing is known yet.
    """
    training, calls, doing = Training(), [0], [""]
    before, threads, own = training.weights, torch.get_num_threads(), torch.optim.AdamW.step

    def step(batch: Any) -> None:
        calls[0] += 1
        if at in (calls[0], doing[-1]):
            doing.append("")
            raise KeyboardInterrupt
        training.step(batch)

    def run() -> Evidence:
        return experiment(step, DataLoader(Samples(), batch_size=4, num_workers=1), budget_s=15, progress=lambda now, _: doing.append(now))

    if at != "no optimizer step":
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        evidence = run()
        assert any(note.startswith("stopped by Ctrl-C after") for note in evidence.notes)
        assert evidence.arms["cached"].pairs
    assert all(torch.equal(a, b) for a, b in zip(before, training.weights, strict=True))
    assert (torch.get_num_threads(), type(training.optimizer).step) == (threads, own)
    assert not training.optimizer.state
    assert "step" not in vars(training.optimizer)


def test_a_training_whose_numbers_are_none_is_said_to_be_that() -> None:
    class Nan(Training):
        def step(self, batch: Any) -> None:
            super().step((batch[0] * float("nan"), batch[1]))

    training = Nan()
    before = training.weights
    evidence = experiment(training.step, DataLoader(Samples(), batch_size=4), budget_s=1.0)
    assert any(re.search("weights are NaN or infinite, such as 0.weight: look at the data", note) for note in evidence.notes)
    assert all(torch.equal(*pair) for pair in zip(training.weights, before, strict=True))


def test_a_step_that_trains_nothing_is_said_to_be_that() -> None:
    training = Training()
    evidence = experiment(lambda batch: training.model(batch[0]), DataLoader(Samples(), batch_size=4), budget_s=1.0)
    assert any(note.startswith("step() changed no weight in the first calls, and neither a backward nor an") for note in evidence.notes)
    assert not any("no optimizer was found" in note for note in evidence.notes)


def test_an_arm_that_cannot_be_tried_is_noted() -> None:
    training = Training()

    def step(batch: Any) -> None:
        if len(batch[1]) > 4:
            raise RuntimeError("four samples and no more")
        training.step(batch)

    evidence = experiment(step, DataLoader(Samples(), batch_size=4), budget_s=8)
    assert "doubled" not in evidence.arms
    assert any("doubled could not be tried: RuntimeError: four samples and no more" in note for note in evidence.notes)
    assert "no_optimizer" in evidence.arms


def test_an_empty_loader() -> None:
    with pytest.raises(ValueError, match="the loader is empty"):
        experiment(Training().step, [], budget_s=1)


def test_a_loader_of_one_batch() -> None:
    evidence = experiment(Training().step, DataLoader(Samples(count=4), batch_size=4), budget_s=1)
    assert evidence.arms["cached"].pairs
    assert any("the loader has one batch" in note for note in evidence.notes)


def batches(count: int) -> Iterator[Any]:
    return ((torch.ones(4, 8), torch.zeros(4, dtype=torch.long)) for _ in range(count))


def test_a_generator_that_can_be_read_once() -> None:
    evidence = experiment(Training(0.002).step, batches(60), budget_s=2)
    assert evidence.loading is not None
    assert evidence.loading.kind == "once"
    assert any("can be read only once" in note for note in evidence.notes)
    assert evidence.arms["no_optimizer"].pairs


class Elsewhere(nn.Linear):
    """Its weight is on a device that this machine lacks."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(device=torch.device("mps:0"), is_cuda=False, is_meta=False)


@pytest.mark.parametrize(
    "measure", [partial(experiment, accumulation=1), partial(measure_change, change={"threads": 1})], ids=["diagnose", "prove"]
)
def test_a_device_whose_clock_is_not_read_is_refused(measure: Callable[..., object]) -> None:
    def step(batch: Tensor) -> None:
        pytest.fail("it was called")

    with pytest.raises(
        DiagnoseError, match=r"the model is on mps:0: .* The host runs ahead of MPS.* Try the model and its batches on a CPU"
    ):
        measure(step, [torch.ones(2, 8)] * 4, model=Elsewhere(8, 1), budget_s=1.0)


def test_a_generator_that_ends_too_soon() -> None:
    with pytest.raises(DiagnoseError, match="could be read only once, and gave 4 batches: too few"):
        experiment(Training().step, batches(4), budget_s=2)


def test_a_step_that_does_not_use_its_batch() -> None:
    training, (fixed, *_) = Training(), batches(1)
    evidence = experiment(lambda batch: training.step(fixed), DataLoader(Samples(), batch_size=4), budget_s=1)
    assert any("does not use its batch" in note for note in evidence.notes)


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (3, {}, "step is a int: it has to be a function"),
        (lambda: None, {}, "step cannot be called with one argument, the batch"),
        (lambda a, b: None, {}, "functools.partial for the other arguments"),
        (print, {"budget_s": 0}, "budget_s=0: seconds above 0 are allowed"),
        (print, {"accumulation": 0}, "accumulation=0: a whole number"),
        (print, {"model": nn.Linear}, "model= was given the class Linear: it takes a torch.nn.Module"),
        (print, {"optimizer": "adam"}, "optimizer= was given a str"),
    ],
)
def test_what_is_refused_before_anything_is_called(step: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DiagnoseError, match=message):
        experiment(step, [1], **options)


@pytest.mark.parametrize("given", [True, False])
def test_a_model_without_values_is_refused_and_its_step_not_blamed(given: bool) -> None:
    model, called = nn.Linear(4, 4, device="meta"), []

    def step(batch: Any) -> None:
        called.append(batch)
        model(batch).sum().backward()

    with pytest.raises(DiagnoseError, match=r"the weights of Linear.* are on the device meta: .* wb\.estimate_memory"):
        experiment(step, [torch.zeros(2, 4, device="meta")] * 9, model=model if given else None, budget_s=1)
    assert called == []


def test_not_even_a_model_is_needed() -> None:
    evidence = experiment(lambda batch: sum(range(2000)), [[1, 2]] * 30, budget_s=1)
    assert (evidence.parameters, evidence.optimizer, evidence.samples) == (None, None, None)
    assert any("no model was found behind step" in note for note in evidence.notes)


def on_two_ranks(forks: Forks, folder: Path, budget: float, *modes: str) -> dict[str, Evidence]:
    """The evidence of two ranks about each of these troubles, from one run of a script that asks for it on each rank."""
    script = Path(__file__).parents[1] / "scripts" / "two_ranks.py"
    done = forks.ranks(2, folder, script, folder / "found.json", str(budget), *modes, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return {mode: Evidence.from_json(found) for mode, found in json.loads((folder / "found.json").read_text()).items()}


CHECKS: dict[str, Callable[[Evidence], bool]] = {
    "gradients": lambda found: "no_sync" in found.arms and found.arms["no_sync"].saved.low > 0.2,
    "compute": lambda found: found.ranks[1].compute > 2 * found.ranks[0].compute,
    "input": lambda found: found.ranks[1].wait > 5 * found.ranks[0].wait and found.ranks[1].alone > 2 * found.ranks[0].alone,
}


CALLS = {"gathered": "all_gather", "sharded": "all_gather and reduce_scatter", "zero": "broadcast"}


@pytest.mark.slow
@pytest.mark.alone
def test_two_ranks(tmp_path: Path, forks: Forks) -> None:
    """Each trouble is found; where `no_sync` does not take all communication away, that is said."""
    found = on_two_ranks(forks, tmp_path, 4, *CHECKS, "plain", *CALLS)
    if doubtful := [mode for mode, check in CHECKS.items() if not check(found[mode])]:  # a machine that is shared: once more
        found |= on_two_ranks(forks, tmp_path, 6, *doubtful)
    for mode, evidence in found.items():
        assert mode not in CHECKS or CHECKS[mode](evidence), (mode, evidence)
        assert (evidence.world_size, len(evidence.ranks), evidence.samples) == (2, 2, 16.0)
        waits = [rank.wait for rank in evidence.ranks]
        assert 0.999 * max(waits) <= evidence.longest_wait <= 1.001 * sum(waits)
        taken_away = mode not in ("gathered", "sharded")
        assert ("no_sync" in evidence.arms) is taken_away
        if taken_away:
            assert evidence.gradients is not None
            assert (evidence.gradients.size, evidence.gradients.buckets > 0) == (4 * (evidence.parameters or 0), True)
        said = [note for note in evidence.notes if "true cost was not measured" in note]
        assert len(said) == (mode in CALLS)
        assert all(
            "no_sync is DDP's, and all that could be taken away besides is the step's own all_reduce; this step also calls "
            f"{CALLS[mode]}, so" in note
            for note in said
        ), said


def test_a_schedule_with_a_last_step_stands_still() -> None:
    training = Training()
    schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.1, total_steps=10)

    def step(batch: Any) -> None:
        training.step(batch)
        schedule.step()

    before = schedule.state_dict()
    evidence = experiment(step, DataLoader(Samples(), batch_size=4), budget_s=6)
    assert evidence.steps > 10
    assert schedule.state_dict() == before


@pytest.mark.parametrize("count", [1, 3])
def test_a_generator_of_a_few_batches(count: int) -> None:
    some = ((torch.randn(4, 8), torch.zeros(4, dtype=torch.long)) for _ in range(count))
    with pytest.raises(DiagnoseError, match="could be read only once"):
        experiment(Training().step, some, budget_s=2)


class Hidden:
    """Nobody looks for state in a class."""

    optimizer: Any = None
    momentum = 0.0


def test_an_optimizer_that_is_found_only_as_it_steps_is_put_back() -> None:
    training = Training()
    model, Hidden.optimizer = training.model, training.optimizer

    def step(batch: Any) -> None:
        Hidden.optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        Hidden.optimizer.step()

    before, loader = training.weights, DataLoader(Samples(), batch_size=4)
    evidence = experiment(step, loader, budget_s=1)
    assert any("AdamW was found only as it stepped: it was put back, but gradients may differ" in note for note in evidence.notes)
    assert "found only as it stepped" in str(Diagnosis.of(evidence))
    assert not training.optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, training.weights, strict=True))
    step(next(iter(loader)))
    state = json.dumps(training.optimizer.state_dict(), default=lambda value: value.tolist())
    experiment(step, loader, budget_s=1)
    assert json.dumps(training.optimizer.state_dict(), default=lambda value: value.tolist()) == state


def test_what_stays_changed_is_said() -> None:
    model, more = nn.Linear(8, 3), (torch.ones(1) for _ in itertools.count())

    def step(batch: Any) -> None:
        nn.functional.cross_entropy(model(batch[0]) + next(more), batch[1]).backward()
        Hidden.momentum += 1
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(weight.grad, alpha=0.01)

    class Own:
        def __init__(self) -> None:
            self.rows, self.lines = DataLoader(Samples(), batch_size=4), itertools.count()

        def __iter__(self) -> Iterator[Any]:
            return (batch for batch, _ in zip(self.rows, self.lines, strict=False))

    said = str(Diagnosis.of(experiment(step, Own(), budget_s=1)))
    assert "if it remembers anything, that was not put back. Try optimizer=…" in said
    assert "step() reaches what could not be put back to what it was before: a generator (test_what_stays" in said
    assert "the loader holds what could not be put back to what it was before: a count" in said


def test_steps_that_get_new_memory_from_the_kernel_are_noted() -> None:
    """The usual step touches a few new pages, and one that reads files is in the kernel for long: neither is noted."""
    step = laps(0.02, 0.02)
    (note,) = new_pages_note([replace(step, faults=4000, kernel=0.008), replace(step, faults=2000, kernel=0.004)])
    assert note.startswith("30 % of the step without its loader passes in the kernel, which gives it new pages of memory 3,000 times")
    assert "MALLOC_TRIM_THRESHOLD_=4294967296" in note
    assert new_pages_note([replace(step, faults=4000, kernel=0.001)]) == []
    assert new_pages_note([replace(step, faults=10, kernel=0.015)]) == []
    assert new_pages_note([]) == []


def test_a_budget_that_is_too_short_for_the_step_is_said_to_be_so_at_once() -> None:
    """With a budget of 5 s a diagnosis of a step of 0.6 s took 25 s without a word."""
    said: list[str] = []
    model = nn.Linear(4, 1)

    def step(batch: Tensor) -> None:
        time.sleep(0.03)
        model(batch).sum().backward()

    def calls(budget: float) -> Evidence:
        said.clear()
        return experiment(step, [torch.zeros(2, 4)], budget_s=budget, progress=lambda now, known: said.append(now))

    short, enough = calls(0.3), calls(30.0)
    assert not any("not all experiments fit" in text for text in (*said, *enough.notes))
    assert any(re.search(r"^with steps of .* no time was left .*: budget_s=", note) for note in short.notes)
    assert short.steps < enough.steps
    calls(0.3)
    assert "no loader (with steps of" in said[1]


@pytest.mark.parametrize("budget", [0.3, 1.5])
def test_a_diagnosis_of_slow_steps_takes_its_budget_and_a_few_steps(budget: float) -> None:
    """Steps of 0.5 s took 27 calls with any budget. On a busy machine they take longer, and are fewer."""
    seconds, calls = 0.3, [0]
    training = Training(seconds)

    def step(batch: Any) -> None:
        calls[0] += 1
        training.step(batch)

    evidence = experiment(step, DataLoader(Samples(), batch_size=4), budget_s=budget)
    assert calls[0] * seconds <= budget + 6 * seconds
    found = Diagnosis.of(evidence)
    if not evidence.inside and not {*evidence.arms} - {"cached", "loader"}:
        assert (found.verdict, found.cause) == ("inconclusive", "not enough was tried")
        assert found.next.startswith(f"Diagnose again with budget_s={evidence.enough}: no time was left ")
    assert "no optimizer step" in evidence.left_out


def test_steps_that_get_slower_once_blocks_are_planned_do_not_exceed_the_budget(work: Clock) -> None:
    """Blocks of 0.3 s of a quiet moment took 6 s each beside other processes: 36 s of a budget of 8 s."""
    training, calls = Training(), [0]

    def step(batch: Any) -> None:
        calls[0] += 1
        training.step(batch)
        work.now += 5e-4 if calls[0] < 20 else 0.05

    evidence = experiment(step, DataLoader(Samples(), batch_size=4), budget_s=8.0)
    assert evidence.seconds <= 8.0 + 1.0
    assert evidence.arms["cached"].pairs


def beside_others(work: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, budget: float, foreign: float) -> Evidence:
    """The evidence of steps of so many seconds on two cores of which others take some; with one thread they take half as long."""
    monkeypatch.setattr(LoadMeter, "noise", lambda _, spread=0.0, gpu=(): Noise(cores=2.0, foreign=foreign, spread=spread))
    training = Training()
    torch.set_num_threads(2)
    work.now = 0.0

    def step(batch: Any) -> None:
        training.step(batch)
        work.now += seconds / (1 if torch.get_num_threads() > 1 else 2)

    return experiment(step, DataLoader(Samples(), batch_size=4), budget_s=budget)


@pytest.mark.parametrize("foreign", [0.0, 1.5])
@pytest.mark.parametrize("seconds", [2.0, 5.0, 8.0, 11.0, 14.0, 25.0])
def test_nothing_is_begun_for_which_a_slow_step_would_not_fit(
    work: Clock, seconds: float, foreign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 11 s took 99 s of a budget of 60 s, and on a busy machine one thread was not tried. Four steps are needed at the least."""
    evidence = beside_others(work, monkeypatch, seconds, 60.0, foreign)
    assert evidence.seconds <= max(60.0 + LATE_SECONDS, 4 * seconds)
    (note,) = [note for note in evidence.notes if "no time was left" in note]
    assert note.startswith(f"with steps of {units.seconds(seconds)} no time was left ")
    assert evidence.enough is not None
    assert note.endswith(f": budget_s={evidence.enough} would probably suffice")
    if foreign and 5 * seconds <= 60:
        assert evidence.arms["threads=1"].saved.mid == pytest.approx(0.5)
        assert "1 thread" not in evidence.left_out
    if foreign and seconds in (8.0, 11.0):
        assert "a trace of the step" in evidence.left_out, "one thread comes first"
    if not foreign and seconds == 5.0:
        assert evidence.inside, "and else the trace"
    enough = beside_others(work, monkeypatch, seconds, evidence.enough, foreign)
    assert not enough.left_out
    assert not any("no time was left" in note for note in enough.notes)
    assert evidence.enough <= 3 * enough.seconds, "and no far larger one"


def test_a_slow_loader_is_probed_by_a_few_batches() -> None:
    """Batches of 0.5 s took 20 of them for the probe alone."""
    made = []

    class Slow(Samples):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            made.append(index)
            return super().__getitem__(index)

    found = Diagnosis.of(experiment(Training().step, DataLoader(Slow(0.15), batch_size=2), budget_s=1.0))
    assert len(made) <= 2 * 14, "beside those of the probe's worker"
    assert found.verdict == "input-bound"
    assert found.remedies[0].name.startswith("num_workers=")
