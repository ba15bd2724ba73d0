"""Measured memory: the record of tensors against the allocator's own word, phases found by hooks, and everything put back."""

import contextlib
import copy
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import workbench as wb
from workbench.core.checks import shown
from workbench.core.progress import Waiting
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.api import measure_memory
from workbench.memory.measure import memory
from workbench.memory.measure.allocator_counters import OnHost, peaks_of
from workbench.memory.measure.memory import measure
from workbench.programs.experiment import Assignment
from workbench.programs.memory import _cut_short

TASKS = Path(__file__).parents[1] / "scripts" / "hungry_task.py"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Decoder(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens, self.blocks, self.head = nn.Embedding(500, 64), nn.ModuleList(Block(64) for _ in range(2)), nn.Linear(64, 500)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        out: Tensor = self.head(x).flatten(0, 1)
        return out


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 100))


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 100))


def vectors(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 128), torch.randint(0, 100, (count,))


def tokens(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 500, (count, 64)), torch.randint(0, 500, (count * 64,))


def images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32), torch.randint(0, 100, (count,))


class Made:
    """A loader that makes each batch anew."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self.make, self.count = make, count

    def __iter__(self) -> Iterator[Any]:
        return (self.make(self.count) for _ in itertools.count())


def stepping(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, kind: torch.dtype | None = None, parts: int = 1
) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        for inputs, targets in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
            with torch.autocast("cpu", dtype=kind) if kind else contextlib.nullcontext():
                loss = F.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), foreach=False)


def scratch(found: MemoryBreakdown) -> int:
    """Bytes that the allocator counted and no tensor had."""
    return sum(holder.bytes for holder in found.holders if holder.op == "scratch")


# --- against the allocator


@pytest.mark.parametrize(
    ("build", "make", "kind", "most"),
    [
        (perceptron, vectors, None, 0.001),
        (Decoder, tokens, None, 0.001),
        (lambda: Decoder(checkpointed=True), tokens, None, 0.001),
        (Decoder, tokens, torch.bfloat16, 0.001),
        (convolutions, images, None, 0.06),
    ],
    ids=["perceptron", "decoder", "checkpointed", "bf16", "convolutions"],
)
def test_the_record_is_the_allocators(
    build: Callable[[], nn.Module], make: Callable[[int], Any], kind: torch.dtype | None, most: float
) -> None:
    model = build()
    optimizer = adam(model)
    found = measure(stepping(model, optimizer, kind=kind), Made(make, 64))
    weights = sum(weight.nbytes for weight in model.parameters())
    assert found.kind == "measured"
    assert scratch(found) <= most * found.total
    assert found.parameters == weights
    assert 2 * weights <= found.optimizer_states <= 2 * weights + 8 * len(list(model.parameters()))
    assert found.largest["gradients"] == weights
    assert found.buffers == sum(buffer.nbytes for buffer in model.buffers())
    assert found.other == 0
    assert found.inputs == sum(part.nbytes for part in make(64))
    assert found.total == max(found.steady, found.first_step)
    assert found.first_step <= found.total
    assert (found.reserved, found.outside) == (None, None)
    assert not any("allocator" in note for note in found.notes)


def test_checkpointing_holds_less() -> None:
    held = []
    for checkpointed in (False, True):
        model = Decoder(checkpointed)
        held.append(measure(stepping(model, adam(model)), Made(tokens, 16)))
    plain, less = held
    assert less.activations < plain.activations
    assert any(holder.recomputed for holder in less.holders) or less.total < plain.total


def test_what_other_tensors_live_is_not_counted() -> None:
    beside = [torch.zeros(10**6)]
    model = perceptron()
    found = measure(stepping(model, adam(model)), Made(vectors, 16))
    assert found.total < beside[0].nbytes


def test_a_batch_that_lived_before_and_one_from_a_worker_count_as_inputs() -> None:
    model = perceptron()
    optimizer = adam(model)
    step = stepping(model, optimizer)
    made = measure(step, Made(vectors, 16))
    listed = measure(step, [vectors(16)] * 4)
    samples = [(torch.randn(128), torch.tensor(1)) for _ in range(96)]
    worker = measure(step, DataLoader(samples, 16, num_workers=1))  # type: ignore[arg-type]
    assert made.total == listed.total == worker.total
    assert made.inputs == listed.inputs == worker.inputs


# --- phases


def test_phases_and_moments() -> None:
    model = Decoder()
    found = measure(stepping(model, adam(model)), Made(tokens, 16), steps=2)
    assert set(found.phases) >= {"data", "forward", "backward", "between", "optimizer", "end"}
    assert found.phases["backward"] == found.total
    assert found.peak_moment.startswith("start of backward, step 2")
    assert {holder.module for holder in found.holders} >= {"blocks.0.up", "blocks.1.up"}


def test_micro_batches_do_not_add_up() -> None:
    activations = []
    for parts in (1, 2):
        model = Decoder()
        activations.append(measure(stepping(model, adam(model), parts=parts), Made(tokens, 16)).activations)
    assert activations[1] == pytest.approx(activations[0] / 2, rel=0.01)


@pytest.mark.parametrize(("device", "ranks", "drifts"), [("cpu", 2, True), ("cpu", 1, False), ("cuda", 2, False)])
def test_the_counters_of_a_gpu_are_exact(monkeypatch: pytest.MonkeyPatch, device: str, ranks: int, drifts: bool) -> None:
    """On a CPU threads of the communication give memory back unseen; on a GPU no step has to be left out for that."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(memory.dist, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(memory.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(memory.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(
        memory, "recorded", lambda *_, **__: contextlib.nullcontext((SimpleNamespace(step=0), None, None, SimpleNamespace(models=[]), []))
    )
    monkeypatch.setattr(memory, "freed_by_collector", lambda recorder: set())
    monkeypatch.setattr(memory, "device_of", lambda models: torch.device(device))
    monkeypatch.setattr(memory, "breakdown", lambda *_, **given: seen.update(given))
    measure(lambda batch: None, [])
    assert seen["drifts"] == drifts


def test_a_step_that_calls_no_module() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(batch: Tensor) -> None:
        (batch @ weight).relu().square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    found = measure(step, [torch.randn(256, 64)] * 3, steps=2)
    assert found.activations >= 256 * 64 * 4
    assert found.inputs == 256 * 64 * 4
    assert "no model was found behind step" in found.caption


def test_reentrant_checkpointing_is_one_backward() -> None:
    layer, head = nn.Linear(128, 128), nn.Linear(128, 4)
    model = nn.ModuleList([layer, head])

    def step(batch: tuple[Tensor, Tensor]) -> None:
        inputs = batch[0].requires_grad_()
        head(checkpoint(lambda x: layer(x).relu(), inputs, use_reentrant=True)).mean().backward()
        model.zero_grad()

    found = measure(step, Made(vectors, 64), model=model, steps=2)
    assert found.phases["backward"] > 0
    assert scratch(found) <= torch.get_rng_state().nbytes  # which checkpointing keeps, and no operator makes


# --- everything is as it was


def test_everything_is_put_back() -> None:
    model = perceptron()
    optimizer = adam(model)
    step = stepping(model, optimizer)
    step(vectors(16))
    F.cross_entropy(model(vectors(4)[0]), vectors(4)[1]).backward()  # type: ignore[no-untyped-call]
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
    torch.manual_seed(5)
    random = torch.get_rng_state()
    backward = torch.autograd.backward
    found = measure(step, Made(vectors, 16))
    assert found.first_step == pytest.approx(found.steady, rel=1e-4)  # the states were there already
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(states)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        assert weight.grad is not None
        assert gradient is not None
        assert torch.equal(weight.grad, gradient)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.autograd.backward is backward


def test_an_error_of_the_step_comes_as_it_is_and_leaves_nothing() -> None:
    model = perceptron()
    before, backward = copy.deepcopy(model.state_dict()), torch.autograd.backward
    train, calls = stepping(model, adam(model)), itertools.count()

    def step(batch: Any) -> None:
        train(batch)
        if next(calls) == 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(step, Made(vectors, 16))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.autograd.backward is backward
    assert measure(train, Made(vectors, 16)).total  # and the profiler is free again


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 says so of every profiler
def test_while_another_profiler_runs() -> None:
    model = perceptron()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        found = measure(stepping(model, adam(model)), Made(vectors, 16), steps=1)
    assert any("a profiler was running already" in note for note in found.notes)
    assert found.parameters == sum(weight.nbytes for weight in model.parameters())


# --- the allocator's record


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(-50, 100))), st.lists(st.integers(0, 100), unique=True))
def test_peaks_count_from_the_beginning_of_each_step(taken: list[tuple[int, int]], starts: list[int]) -> None:
    taken, starts = sorted(taken), sorted(starts)
    ends = [*starts[1:], 10**9][: len(starts)]
    expected = [
        max(0, *itertools.accumulate(size for time, size in taken if start <= time < end), 0)
        for start, end in zip(starts, ends, strict=True)
    ]
    assert peaks_of(taken, starts) == expected


def test_the_profiler_counts_bytes() -> None:
    with OnHost() as truth:
        early = torch.empty(1000)
        truth.begin()
        late = torch.empty(3000)
        del early, late
        truth.begin()
    assert truth.peaks == [12000, 0]


# --- in a launch


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks(tmp_path: Path) -> None:
    spec = wb.RunSpec(task=f"{TASKS}:modest", device="cpu", micro_batch=16, nproc_per_node=2, optimizer="adamw(foreach=False)")
    found = measure_memory(spec, runs_dir=tmp_path, steps=3, budget_s=600)
    run = wb.Run.load(next(tmp_path.iterdir()))
    each = [run.memory_breakdown(rank) for rank in range(2)]
    assert [one.rank for one in each] == [0, 1]
    assert all(one.world_size == 2 for one in each)
    assert run.memory_breakdown().total == found.total == measure_memory(run).total == measure_memory(run.path).total
    weights = 4 * (64 * 64 + 64 + 64 + 1)
    assert (found.parameters, found.largest["gradients"]) == (weights, 2 * weights)  # and DDP's buckets
    assert found.inputs == 16 * 64 * 4
    assert each[0].total == each[1].total
    with pytest.raises(ValueError, match="it has 0, 1"):
        run.memory_breakdown(2)
    with pytest.raises(ValueError, match="a run has taken its steps"):
        measure_memory(run, steps=2)


# --- a model with its batch


@pytest.mark.parametrize("given", ["module", "class", "function", "loader"])
def test_a_model_is_measured_as_it_is_estimated(given: str) -> None:
    """The same arguments: the model, a batch, its loss and its optimizer."""
    model, batch = perceptron().eval(), vectors(64)
    target: Any = {"class": Decoder, "function": perceptron}.get(given, model)
    batch = tokens(2) if given == "class" else batch
    before = {name: value.clone() for name, value in model.state_dict().items()}
    about: dict[str, Any] = {"loss": lambda net, batch: F.cross_entropy(net(batch[0]).flatten(0, -2), batch[1]), "optimizer": "sgd"}
    predicted = wb.estimate_memory(target, batch, **about, device="cpu")
    loader = DataLoader(list(zip(*batch, strict=True)), batch_size=64) if given == "loader" else batch  # type: ignore[arg-type, var-annotated]
    found = wb.measure_memory(target, loader, **about, device="cpu")
    assert abs(found.total - predicted.total) < 0.02 * predicted.total, str(found - predicted)
    assert found.optimizer_states == 0
    assert found.title == f"{shown(target)}, 3 steps"
    assert not model.training
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_a_model_without_a_loss_gets_that_of_an_estimate() -> None:
    found = wb.measure_memory(perceptron(), vectors(64))
    assert "no loss was given, so the loss is the cross-entropy of the output and the batch's last part" in found.notes
    assert found.optimizer_states > 0


def test_a_tuple_without_tensors_of_its_own_is_one_batch_as_for_an_estimate() -> None:
    """It was taken for several batches, and the user's loss ended in a KeyError; only a list is several."""
    x, y = vectors(64)
    about: dict[str, Any] = {"loss": lambda net, batch: F.cross_entropy(net(batch[0]["x"]), batch[1]["y"]), "optimizer": "sgd"}
    predicted = wb.estimate_memory(perceptron(), ({"x": x}, {"y": y}), **about, device="cpu")
    found = wb.measure_memory(perceptron(), ({"x": x}, {"y": y}), **about, device="cpu")
    assert abs(found.total - predicted.total) < 0.02 * predicted.total, str(found - predicted)


# --- what is refused


def test_what_is_refused(by_hand: Any) -> None:
    model = perceptron()
    step = stepping(model, adam(model))
    with pytest.raises(ValueError, match="a module goes into model="):
        measure_memory(model)
    with pytest.raises(ValueError, match=r"a model needs a batch of tensors: measure_memory\(model, batch, loss=…\)"):
        measure_memory(model, device="cpu")
    with pytest.raises(ValueError, match=r"runs on this machine, so 'cpu' .*is allowed; estimate_memory\(model, batch, device='H100'\)"):
        measure_memory(model, vectors(4), device="H100")
    with pytest.raises(ValueError, match=r"was given loss=, which only goes with a model"):
        measure_memory(step, [vectors(4)], loss=lambda model, batch: None)
    with pytest.raises(ValueError, match=r"write loss=lambda model, batch"):
        measure_memory(model, vectors(4), loss=F.cross_entropy)
    with pytest.raises(ValueError, match="it is the other way round"):
        measure_memory([vectors(4)], step)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the loader"):
        measure_memory(step)
    with pytest.raises(ValueError, match="allowed are a step function with its loader, a RunSpec"):
        measure_memory(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a loader, which only goes with a step"):
        measure_memory(wb.RunSpec(task="clipart-resnet"), [1])
    with pytest.raises(ValueError, match="measured by its spec"):
        measure_memory(wb.Task(model=perceptron, dataset=list, loss=lambda model, batch: None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no breakdown of its memory"):
        measure_memory(by_hand().ended("finished").path)
    with pytest.raises(ValueError, match="the loader is empty"):
        measure_memory(step, [])
    empty = perceptron().to("meta")
    with pytest.raises(ValueError, match="are on the device meta: they have shapes but no values"):
        measure_memory(stepping(empty, adam(empty)), [vectors(4)] * 4)
    for steps in (0, True, 1.5):
        with pytest.raises(ValueError, match="a whole number of at least 1"):
            measure_memory(step, [vectors(4)], steps=steps)  # type: ignore[arg-type]


def test_a_loader_that_ends() -> None:
    model = perceptron()
    found = measure(stepping(model, adam(model)), iter([vectors(16)]))
    assert any("the loader ended after 1 of 3 steps" in note for note in found.notes)


@pytest.mark.parametrize("end", ["budget", "Ctrl-C"])
def test_what_was_recorded_is_kept_where_the_budget_or_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    now = [0.0]
    monkeypatch.setattr(Waiting, "seconds", property(lambda self: now[0]))
    model = perceptron()
    inner = stepping(model, adam(model))

    def step(batch: Any) -> None:
        now[0] += 40.0
        inner(batch)

    def batches() -> Iterator[Any]:
        for number in itertools.count():
            if end == "Ctrl-C" and number == 2:
                raise KeyboardInterrupt
            yield vectors(4)

    found = wb.measure_memory(step, batches(), model=model, steps=5, budget_s=60 if end == "budget" else 600)
    said = (
        "the budget ended after 2 of 5 steps: budget_s=240 is enough for all" if end == "budget" else "stopped by Ctrl-C after 2 of 5 steps"
    )
    assert said in found.notes
    assert found.title.endswith(", 2 steps")
    assert found.total > 0
    now[0] = 0.0
    with pytest.raises(
        (ValueError, KeyboardInterrupt), match=r"2 of 8 steps, and 5 are needed.*budget_s=384|find_leaks was stopped by Ctrl-C"
    ):
        wb.find_leaks(step, batches(), model=model, budget_s=60 if end == "budget" else 600)


def test_a_step_that_ctrl_c_ended_is_not_in_the_breakdown() -> None:
    """Its 64 MB would be the peak; and what it freed of earlier steps is still held at their end."""
    model = perceptron()
    inner = stepping(model, adam(model))
    taken = 0

    def step(batch: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == 3:
            held = torch.zeros(16 << 20)
            inner(batch)
            raise KeyboardInterrupt(held.shape)
        inner(batch)

    found = wb.measure_memory(step, [vectors(4)] * 5, model=model, steps=5)
    assert "stopped by Ctrl-C after 2 of 5 steps" in found.notes
    taken = -9
    whole = wb.measure_memory(step, [vectors(4)] * 2, model=model, steps=2)
    assert found.total == whole.total
    assert found.phases == whole.phases


def test_ranks_of_a_step_take_equally_many_whatever_their_clocks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one that took more would wait in its reduction without an end."""
    now = [0.0]
    monkeypatch.setattr(Waiting, "seconds", property(lambda self: now[0]))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    model = perceptron()
    inner = stepping(model, adam(model))

    def step(batch: Any) -> None:
        now[0] += 40.0
        inner(batch)

    found = wb.measure_memory(step, [vectors(4)] * 5, model=model, steps=5, budget_s=60)
    assert found.title.endswith(", 5 steps")


def test_ranks_end_in_the_same_step() -> None:
    """All do what rank 0 says: after the budget, or when Ctrl-C came where the launch is awaited."""

    def word(created: float, told: Callable[[str, str], None] | None) -> str:
        ranks = SimpleNamespace(share=lambda topic, value: [value, b"of another rank"])
        info = {"created": created, "experiment": {"budget_s": 60.0}}
        given = Assignment(run_dir=Path(), info=info, spec=wb.RunSpec(task="text-gpt"), task=None, ranks=ranks)  # type: ignore[arg-type]
        return _cut_short(given, 1, told)

    def interrupted(now: str, known: str) -> None:
        assert known == "1 step recorded"
        raise KeyboardInterrupt

    assert word(time.time(), lambda now, known: None) == ""
    assert word(time.time() - 61, lambda now, known: None) == "the budget ended"
    assert word(time.time(), interrupted) == "stopped by Ctrl-C"


def looked_at(look: str) -> "weakref.ref[nn.Module]":
    """A model that somebody has looked at, and that has gone."""
    model = perceptron()
    optimizer, batch = torch.optim.SGD(model.parameters()), vectors(4)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    if look == "estimate_memory":
        wb.estimate_memory(model, batch)
    else:
        getattr(wb, look)(step, [batch] * 8)
    return weakref.ref(model)


@pytest.mark.parametrize("look", ["measure_memory", "find_leaks", "estimate_memory"])
def test_the_model_is_not_kept_alive(look: str) -> None:
    model = looked_at(look)
    gc.collect()
    assert model() is None


SPARSE = """
import torch
import workbench as wb


def build():
    return wb.Task(
        model=lambda: torch.nn.Sequential(torch.nn.EmbeddingBag(20_000, 16, sparse=True), torch.nn.Linear(16, 1)),
        dataset=lambda: [torch.tensor([i, i + 1]) for i in range(64)],
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
    )
"""


@pytest.mark.usefixtures("forked_ranks")
def test_sparse_gradients_have_no_bucket(tmp_path: Path) -> None:
    """Twice the memory of the tables was measured: a bucket of DDP for each, which it does not make."""
    (tmp_path / "tables.py").write_text(SPARSE)
    spec = wb.RunSpec(task=f"{tmp_path / 'tables.py'}:build", device="cpu", micro_batch=16)
    found = measure_memory(spec, runs_dir=tmp_path, steps=3, budget_s=600)
    predicted = wb.estimate_memory(spec, device="cpu")
    assert found.largest["gradients"] < 0.1 * found.parameters
    assert found.total == pytest.approx(predicted.total, rel=0.05)
    assert wb.estimate_time(spec, device="H100").seconds.mid > 0, "torch: nbytes is not defined for sparse tensors"
