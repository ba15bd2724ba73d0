"""Gradient noise of real steps: the same from ranks, shards and accumulation, and true to the gradients of single samples."""

import contextlib
import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import toy_tasks
from tests.forked import Forks
from workbench.batch import api
from workbench.batch.analysis.noise_scale import NoiseScale, noise_scale_of_ranks
from workbench.batch.analysis.noise_scale_estimator import NoiseScaleError
from workbench.batch.api import noise_scale
from workbench.batch.measure import noise_watch
from workbench.batch.measure.gradient_norms import GroupNorms, SamplingInterval, norm, read_norms
from workbench.batch.measure.noise_watch import NoiseWatch
from workbench.batch.measure.per_sample import exact_noise_of, exact_noise_scale, per_sample_gradients
from workbench.core import run_directory
from workbench.programs import train as program
from workbench.runs.failure import RunError
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec, SpecError

TOYS = Path(toy_tasks.__file__)
Pair = tuple[Tensor, Tensor]


def spec_of(task: str = "numbers", **knobs: Any) -> RunSpec:
    return RunSpec(task=f"{TOYS}:{task}", **{"device": "cpu", "micro_batch": 8, "steps": 6, **knobs})


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def error(model: nn.Module, batch: Pair) -> Tensor:
    found: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return found


def batches(count: int, size: int, seed: int = 0) -> Iterator[Pair]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int = 2) -> Callable[[Pair], None]:
    """A step of several backwards."""

    def step(batch: Pair) -> None:
        for part in zip(*(one.chunk(parts) for one in batch), strict=True):
            (error(model, part) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand_norms(model: nn.Module, batch: Pair, parts: int) -> tuple[float, float]:
    """As the definition says."""
    groups = []
    for part in zip(*(one.chunk(parts) for one in batch), strict=True):
        found = torch.autograd.grad(error(model, part), list(model.parameters()))
        groups.append(torch.cat([one.flatten() for one in found]).double())
    return float(torch.stack(groups).square().sum(1).mean()), float(torch.stack(groups).mean(0).square().sum())


# --- ranks, shards, accumulation


@pytest.mark.slow
def test_every_way_to_spread_a_step_gives_the_same_norms(tmp_path: Path, forks: Forks) -> None:
    """DDP with any buckets and with a user's own hook, FSDP2, HSDP and accumulation: one truth."""
    script = Path(__file__).parents[1] / "scripts" / "noise_ranks.py"
    done = forks.ranks(2, tmp_path, script, tmp_path / "found.json", env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 16
    for how, pairs in found.items():
        truth = found[f"alone × {how.rpartition(' × ')[2]}"]
        rough = 0.02 if "bf16" in how else 1e-3 if "own hook" in how else 1e-5
        assert len(pairs) == len(truth) == 4
        for pair, true in zip(pairs, truth, strict=True):
            assert pair == pytest.approx(true, rel=rough), how
    assert found["ddp, own hook × 1"] != found["ddp × 1"]  # the hook was at work


# --- one process


def test_a_layer_may_be_frozen_in_the_midst_of_a_training() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = step_with(model, optimizer, 2)
    with NoiseWatch(model, optimizer, micro_batch=4, every=2) as watch:
        for number, batch in enumerate(batches(80, 8)):
            if number == 3:
                next(model.parameters()).requires_grad_(False)
            step(batch)
    assert len(watch.rows) == 40


@pytest.mark.parametrize("every", [1, 2])
def test_a_watch_that_has_ended_looks_at_nothing(every: int) -> None:
    model = nn.Linear(4, 2)
    watch = NoiseWatch(model, None, micro_batch=2, every=every)

    def steps(count: int) -> None:
        for _ in range(count):
            for _ in range(2):
                (model(torch.randn(2, 4)).square().mean() / 2).backward()
            watch.step()
            model.zero_grad()

    with watch:
        steps(4)
    seen = len(watch.rows)
    steps(4)
    assert len(watch.rows) == seen == 4 // every
    assert not model._forward_pre_hooks
    assert not model.weight._backward_hooks


def test_each_third_step_only() -> None:
    def watched(every: int) -> NoiseScale:
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        step = step_with(model, optimizer, 2)
        with NoiseWatch(model, optimizer, micro_batch=4, every=every) as watch:
            for batch in batches(90, 8):
                step(batch)
        return watch.result()

    each, some = watched(1), watched(3)
    assert some.pairs == each.pairs[::3]
    assert (some.steps, some.every) == (30 - some.left_out, 3)
    assert "steps (one of 3) of 2 groups of 4 samples" in str(some)
    assert some.over_time[-1].last == 88
    assert some.steps_needed % 3 == 0
    assert NoiseScale.from_json(some.to_json()) == some
    with pytest.raises(NoiseScaleError, match="every=0"):
        watched(0)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_in_one_process(parts: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = step_with(model, optimizer, parts)
    with NoiseWatch(model, optimizer, micro_batch=8 // parts) as watch:
        expected = []
        for batch in batches(3, 8):
            with_rest = watch.rows.copy()
            watch.close()  # what is computed by hand is not seen
            expected.append(by_hand_norms(model, batch, parts))
            watch.__enter__()
            step(batch)
            assert len(watch.rows) == len(with_rest) + 1
    step(next(batches(1, 8)))  # after the block nothing is seen
    found = watch.result()
    assert found.steps == 3
    assert found.groups == parts
    assert [value for pair in found.pairs for value in pair] == pytest.approx([value for pair in expected for value in pair], rel=1e-5)


def test_the_gradients_stay_as_they_are() -> None:
    plain, watched = network(), network()
    for model in (plain, watched):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        watch = NoiseWatch(model, optimizer, micro_batch=4)
        step = step_with(model, optimizer)
        if model is watched:
            watch.__enter__()
        for batch in batches(4, 8):
            step(batch)
        watch.close()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert not any(one._backward_hooks for one in watched.parameters())


def test_the_scale_of_a_grad_scaler_is_taken_out() -> None:
    found = []
    for enabled in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=enabled)
        with NoiseWatch(model, optimizer, micro_batch=4, scaler=scaler) as watch:
            for number, batch in enumerate(batches(6, 8)):
                for part in zip(*(one.chunk(2) for one in batch), strict=True):
                    loss = error(model, part) / 2
                    scaler.scale(loss * math.inf if enabled and number == 1 else loss).backward()
                if not enabled and number == 1:
                    optimizer.zero_grad()  # as the scaler leaves it out
                    assert watch._norms is not None
                    watch._norms.step()
                    continue
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        found.append(watch.result().pairs)
    plain, scaled = found
    assert len(scaled) == 4  # those after the overflow begin with it, and the first of them does not count
    for pair in scaled:
        assert any(pair == pytest.approx(other, rel=1e-4) for other in plain)


def test_layers_that_are_not_used_and_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(9, 3, sparse=True), "head": nn.Linear(3, 1), "unused": nn.Linear(3, 3)})
    norms = GroupNorms(model, 1)
    numbers = [torch.tensor([1, 2, 2]), torch.tensor([4, 5, 6])]
    for one in numbers:
        (model["head"](model["table"](one)).square().mean() / 2).backward()
    ((small, big, count),) = read_norms([row for row in [norms.step()] if row])
    norms.close()
    assert count == 2
    groups = []
    for one in numbers:
        model.zero_grad()
        model["head"](model["table"](one)).square().mean().backward()
        groups.append(torch.cat([weight.grad.to_dense().flatten() for weight in model.parameters() if weight.grad is not None]))
    assert small == pytest.approx(float(torch.stack(groups).square().sum(1).mean()), rel=1e-5)
    assert big == pytest.approx(float(torch.stack(groups).mean(0).square().sum()), rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(reentrant: bool) -> None:
    """A backward inside the backward is no micro-batch of its own."""
    model = network()
    norms = GroupNorms(model, 1)
    parts = list(batches(2, 4))
    for inputs, targets in parts:
        hidden = checkpoint(model[1], model[0](inputs), use_reentrant=reentrant)
        ((checkpoint(model[2], hidden, use_reentrant=reentrant) - targets).square().mean() / 2).backward()
    ((small, big, count),) = read_norms([row for row in [norms.step()] if row])
    norms.close()
    whole = tuple(torch.cat([one[place] for one in parts]) for place in (0, 1))
    assert count == 2
    assert (small, big) == pytest.approx(by_hand_norms(model, (whole[0], whole[1]), 2), rel=1e-5)


class Twice(nn.Module):
    """One layer, in two checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.shared, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 6), reentrant

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=self.reentrant)
        return hidden


def test_gradients_that_come_in_parts_are_refused() -> None:
    found = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        model = Twice(reentrant)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with NoiseWatch(model, optimizer, micro_batch=4) as watch:
            for _ in range(6):
                optimizer.zero_grad()
                for _ in range(2):
                    (model(torch.randn(4, 6)).square().mean() / 2).backward()
                optimizer.step()
        found.append(watch)
    assert found[0].result().groups == 2
    with pytest.raises(NoiseScaleError, match="use_reentrant=False"):
        found[1].result()


def test_a_step_with_another_number_of_backwards_does_not_count() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with NoiseWatch(model, optimizer, micro_batch=4) as watch:
        for number, batch in enumerate(batches(6, 8)):
            step_with(model, optimizer, 4 if number == 2 else 2)(batch)
    found = watch.result(optimizer={"name": "sgd"})
    assert found.steps == 5
    assert "1 steps had another number of backwards than 2" in str(found)
    assert found.optimizer == {"name": "sgd"}


def test_an_error_in_a_backward_spoils_one_step_only() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = step_with(model, optimizer)
    with NoiseWatch(model, optimizer, micro_batch=4) as watch:
        step(next(batches(1, 8)))
        handle = model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(next(batches(1, 8)))
        handle.remove()
        optimizer.zero_grad()
        for batch in batches(4, 8):
            step(batch)
    assert watch.result().steps in (4, 5)


def test_what_cannot_be_watched() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with NoiseWatch(model, optimizer, micro_batch=8) as watch:
        with pytest.raises(NoiseScaleError, match="watched already: leave the other watch"):
            GroupNorms(model, 1)
        for batch in batches(3, 8):
            step_with(model, optimizer, 1)(batch)
    with pytest.raises(NoiseScaleError, match=r"one group of samples only.*the batch in two halves"):
        watch.result()
    with NoiseWatch(model, optimizer, micro_batch=4) as watch:
        step_with(model, optimizer)(next(batches(1, 8)))
    with pytest.raises(NoiseScaleError, match="1 step to go by"):
        watch.result()
    with NoiseWatch(model, optimizer, micro_batch=4) as watch:
        for batch in batches(3, 8):
            step_with(model, optimizer)((batch[0] * math.nan, batch[1]))
    with pytest.raises(NoiseScaleError, match="none of 3 steps has gradients that are numbers"):
        watch.result()
    with pytest.raises(NoiseScaleError, match="nothing is trained"):
        GroupNorms(nn.Linear(2, 2).requires_grad_(False), 1)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_are_right_to_many_digits(kind: torch.dtype) -> None:
    values = (torch.randn(300, 1001, dtype=torch.float64) * 1e-3 + 1).to(kind)
    for one in (values, values.t(), values[::2, 1:]):
        assert float(norm(one)) == pytest.approx(float(one.double().norm()), rel=2e-7)
        assert float(norm(one[:9])) == pytest.approx(float(one[:9].double().norm()), rel=1e-6)


# --- the truth


def test_gradients_of_single_samples() -> None:
    model, batch = network(), next(batches(1, 5))
    found = per_sample_gradients(model, error, batch)
    for place in range(5):
        alone = torch.autograd.grad(error(model, (batch[0][place : place + 1], batch[1][place : place + 1])), list(model.parameters()))
        assert all(torch.allclose(one[place], other, atol=1e-6) for one, other in zip(found.values(), alone, strict=True))


def test_the_exact_noise_scale() -> None:
    model, (inputs, targets) = network(), next(batches(1, 60))
    parts = [(inputs[start : start + 16], targets[start : start + 16]) for start in range(0, 60, 16)]
    gradients = per_sample_gradients(model, error, (inputs, targets))
    rows = torch.cat([one.flatten(1) for one in gradients.values()], 1).double()
    mean = rows.mean(0)
    trace, squares = float((rows - mean).square().sum(1).mean()), float(mean.square().sum())
    found = exact_noise_scale(model, error, parts, dataset_size=60)
    assert (found.trace, found.squares) == pytest.approx((trace, squares), rel=1e-6)
    assert found.low == found.b_simple == found.high == pytest.approx(trace / squares, rel=1e-6)
    assert found.exact
    assert found.enough
    assert "60 gradients" in str(found)
    some = exact_noise_scale(model, error, parts[:2], dataset_size=60)
    assert some.low < some.b_simple < some.high
    with pytest.raises(ValueError, match="no steps to draw"):
        found.plot()


def test_a_loss_that_torch_func_cannot_take() -> None:
    """One by one, and it is said."""
    model, batch = network(), next(batches(1, 6))

    def with_a_branch(model: nn.Module, batch: Pair) -> Tensor:
        loss = error(model, batch)
        return loss if float(loss) >= 0 else -loss

    found = exact_noise_scale(model, with_a_branch, [batch], dataset_size=6)
    assert found.b_simple == pytest.approx(exact_noise_scale(model, error, [batch], dataset_size=6).b_simple, rel=1e-5)
    assert "one sample after the other" in str(found)


def test_what_has_no_gradients_of_single_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    with pytest.raises(NoiseScaleError, match=r"batch norm \(1\).*depends on the others of its batch"):
        exact_noise_scale(model, error, batches(1, 4))
    assert exact_noise_scale(model.eval(), error, batches(1, 4)).exact
    with pytest.raises(NoiseScaleError, match="holds something else"):
        exact_noise_scale(network(), error, [(torch.randn(4, 4), "words")])
    with pytest.raises(NoiseScaleError, match="1 sample: at least 2"):
        exact_noise_scale(network(), error, batches(1, 1))


def test_enough_is_near_the_truth() -> None:
    """Real steps at fixed weights, dealt out of a dataset."""
    (inputs, targets), model = next(batches(1, 600)), network()
    targets = targets * 0.5 + 1
    optimizer = torch.optim.SGD(model.parameters(), 1e-30)
    truth = exact_noise_scale(model, error, [(inputs, targets)], dataset_size=600).b_simple
    generator = torch.Generator().manual_seed(0)
    step = step_with(model, optimizer, 4)
    with NoiseWatch(model, optimizer, micro_batch=32, dataset_size=600) as watch:
        for _ in range(100):
            chosen = torch.randperm(600, generator=generator)[:128]
            step((inputs[chosen], targets[chosen]))
    found = watch.result()
    assert found.enough
    assert found.b_simple == pytest.approx(truth, rel=0.1)


# --- a step in this process, a run, a spec


@pytest.mark.parametrize("grouped", [False, True], ids=["no group", "group of one rank"])
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_step_of_ones_own_is_measured_until_the_budget_is_spent_or_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, interrupt: bool, grouped: bool
) -> None:
    if grouped:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    calls = itertools.count()  # an object of ours would be put back
    monkeypatch.setattr(time, "monotonic", lambda: 1.0 * int(repr(calls).removeprefix("count(").removesuffix(")")))
    plain = step_with(model, optimizer)

    def step(batch: Pair) -> None:
        if next(calls) == 9 and interrupt:
            raise KeyboardInterrupt
        plain(batch)

    found = noise_scale(step, list(batches(5, 8)), model=model, optimizer=optimizer, steps=100, budget_s=20)
    why = "stopped by Ctrl-C after 9 of 100 steps" if interrupt else "the budget was spent after 20 of 100 steps"
    assert any(note.startswith(why) for note in found.notes)


def test_several_ranks_take_all_steps_and_say_when_the_budget_was_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    model = network()
    step = step_with(model, torch.optim.SGD(model.parameters(), 0.01))
    found = noise_watch.measure(step, list(batches(5, 8)), steps=12, go_on=lambda done: done < 7)
    assert found.steps == 12
    assert any(note.startswith("the budget was spent after 7 steps, and more were taken") for note in found.notes)


def test_ctrl_c_while_a_batch_is_loaded_returns_what_it_has() -> None:
    model = network()

    class Loader:
        def __iter__(self) -> Iterator[Pair]:
            yield from batches(9, 8)
            raise KeyboardInterrupt

    found = noise_scale(step_with(model, torch.optim.SGD(model.parameters(), 0.01)), Loader(), model=model, steps=100)
    assert found.steps == 9
    assert found.interrupted


def test_a_step_and_its_loader() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    before = [weight.detach().clone() for weight in model.parameters()]
    generator = torch.get_rng_state()
    found = noise_scale(step_with(model, optimizer), list(batches(5, 8)), steps=12)
    assert (found.steps, found.groups, found.micro_batch) == (12, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert torch.equal(generator, torch.get_rng_state())
    assert noise_scale(step_with(model, optimizer), batches(5, 8), steps=12, micro_batch=3).micro_batch == 3
    with pytest.raises(NoiseScaleError, match="one group of samples only"):
        noise_scale(step_with(model, optimizer, 1), list(batches(5, 8)), steps=3)
    taken: list[Any] = []

    def step(batch: Any) -> None:
        taken.append(batch)
        step_with(model, optimizer, 1)(batch)

    with pytest.raises(NoiseScaleError, match="one group of samples only"):
        noise_scale(step, list(batches(5, 8)), steps=200, model=model, optimizer=optimizer)
    assert len(taken) < 10, "nobody waits for what the first steps show"
    with pytest.raises(NoiseScaleError, match="are 9, which 2 backwards do not share equally"):
        noise_scale(step_with(model, optimizer), list(batches(5, 9)), steps=3)
    other = network()
    with pytest.raises(ValueError, match="one model that is trained is allowed"):
        noise_scale(lambda batch: (model(batch[0]), other(batch[0])), list(batches(5, 9)), steps=3)


Make = Callable[..., Any]


def test_a_run_writes_what_it_sees(by_hand: Make) -> None:
    directory = by_hand(spec=spec_of(accumulation=2, noise_scale=1, steps=8, optimizer="sgd(lr=0.05, momentum=0.9)").to_json()).path
    program.main([str(directory)])
    run = Run.load(directory)
    found = run.noise_scale
    assert (found.steps, found.groups, found.micro_batch, found.dataset_size) == (8, 2, 8, 64)
    assert found.optimizer is not None
    assert (found.optimizer["name"], found.optimizer["momentum"]) == ("sgd", 0.9)
    assert noise_scale(str(directory)) == found
    rows = (directory / run_directory.noise_file(0)).read_text().splitlines()
    (directory / run_directory.noise_file(0)).write_text("\n".join(rows[:4]) + '\n{"step":4,"sm')  # as a crash leaves it
    assert Run.load(directory).noise_scale.steps == 3


def test_each_fourth_step_where_nobody_says(by_hand: Make) -> None:
    directory = by_hand(spec=spec_of(accumulation=2, noise_scale=True, steps=12).to_json()).path
    program.main([str(directory)])
    rows = [json.loads(line) for line in (directory / run_directory.noise_file(0)).read_text().splitlines()]
    assert rows[0]["every"] == 4
    assert [row["step"] for row in rows[1:]] == [1, 5, 9]


@pytest.mark.parametrize(("cost", "every"), [(0.0, 4), (0.15, 4), (0.3, 8), (1.2, 32), (50.0, 64)])
def test_the_stride_grows_until_looking_costs_little(cost: float, every: int) -> None:
    """A step takes 1 s, looking at it so much more: at most a twenty-fifth of all is spent so, or one step in 64 is looked at."""
    now, looked = 0.0, []
    stride = SamplingInterval(clock=lambda: now)
    for step in range(2000):
        now += 1.0 + (cost if stride.looking else 0.0) + (5.0 if step < 3 else 0.0)  # the first steps are slow
        looked.append(step) if stride.looking else None
        stride.step()
    assert stride.every == every
    assert {b - a for a, b in itertools.pairwise(looked[-5:])} == {every}
    assert all(step % 4 == 0 for step in looked)  # those of any rank that looks less often are among them


def test_the_stride_does_not_grow_by_chance() -> None:
    """Looking takes 7 % of a step here, whose own time varies by a fifth: in ten thousand steps no stretch of bad luck is enough."""
    chance = random.Random(0)
    now = 0.0
    stride = SamplingInterval(clock=lambda: now)
    for _ in range(10_000):
        now += chance.uniform(0.9, 1.1) + (0.07 if stride.looking else 0.0)
        stride.step()
    assert stride.every == 4


def test_few_steps_are_timed() -> None:
    asked = itertools.count(0.0)
    stride = SamplingInterval(clock=lambda: next(asked))
    stride.every = 64
    for _ in range(640):
        stride.step()
    assert next(asked) <= 3 * 10 + 1
    for _ in range(64):
        SamplingInterval(3, clock=lambda: math.nan).step()  # who says how often is not timed at all


def test_a_step_that_is_not_looked_at_has_nothing_attached() -> None:
    """A hook costs something by being there, and so does an empty list of them."""
    model = network()
    weights = list(model.parameters())
    seen: list[str] = []
    weights[0].register_hook(lambda _: seen.append("a user's, from before"))
    norms = GroupNorms(model, 1)
    weights[1].register_hook(lambda _: seen.append("one that came meanwhile"))
    assert all(weight._backward_hooks for weight in weights)
    assert len(model._forward_pre_hooks) == 1
    norms.look(False)
    assert not norms.looking
    assert [weight._backward_hooks is None for weight in weights] == [False, False, True, True]
    assert not model._forward_pre_hooks
    (batch,) = batches(1, 8)
    error(model, batch).backward()
    assert norms.step() is None
    assert sorted(seen) == ["a user's, from before", "one that came meanwhile"]
    norms.look(True)
    error(model, batch).backward()
    assert norms.step() is not None
    norms.close()
    assert [len(weight._backward_hooks or ()) for weight in weights] == [1, 1, 0, 0]
    GroupNorms(model, 1).close()  # nobody watches it any more


def test_the_mean_is_not_looked_for_before_the_last_backward() -> None:
    found = []
    for backwards in (1, 2):
        model = network()
        norms = GroupNorms(model, 1, backwards)
        for part in batches(2, 4):
            assert not norms._big or backwards == 1
            (error(model, part) / 2).backward()
        found.append(read_norms([row for row in [norms.step()] if row]))
        norms.close()
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_ranks_that_look_at_different_steps() -> None:
    head = {"world_size": 2, "micro_batch": 4, "accumulation": 1, "every": 4, "dataset_size": None, "optimizer": None}
    often, seldom = ([head, *({"step": step, "small": 2.0, "big": 0.75} for step in range(1, 80, every))] for every in (4, 8))
    found = noise_scale_of_ranks([often, seldom])
    assert (found.every, found.steps) == (8, 10)


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_mixed_precision_changes_little(precision: str, by_hand: Make) -> None:
    found = []
    for one in ("fp32", precision):
        directory = by_hand(spec=spec_of(accumulation=2, noise_scale=1, precision=one).to_json()).path
        program.main([str(directory)])
        found.append([value for pair in Run.load(directory).noise_scale.pairs for value in pair])
    plain, mixed = found
    assert len(mixed) >= len(plain) - 4  # of fp16, the first may overflow
    assert mixed[-2:] == pytest.approx(plain[-2:], rel=0.1)


def test_a_run_that_does_not_measure_it(by_hand: Make) -> None:
    run = Run.load(by_hand(spec=spec_of().to_json()).path)
    with pytest.raises(ValueError, match=r"launch it with noise_scale=True, or wb.noise_scale\(spec\)"):
        _ = run.noise_scale
    with pytest.raises(ValueError, match="a run has taken its steps"):
        noise_scale(run, steps=5)
    started = Run.load(by_hand(spec=spec_of(accumulation=2, noise_scale=True).to_json()).path)
    with pytest.raises(NoiseScaleError, match="wait until the first steps are done"):
        _ = started.noise_scale


@pytest.mark.usefixtures("forked_ranks")
def test_a_spec_is_launched_in_two_halves(tmp_path: Path) -> None:
    found = noise_scale(spec_of(evaluate=True), steps=5, runs_dir=tmp_path)
    assert (found.steps, found.groups, found.micro_batch) == (5, 2, 4)
    assert found.notes[0] == "measured with 2 × 4 samples per step instead of 8, so that there are groups to compare"


TASK = """
import torch
from torch import nn
from workbench import Task

def build():
    seen = []
    def loss(model, batch):
        seen.append(1)
        return model(batch).mean() * {factor}
    return Task(model=lambda: nn.Linear(3, 1), dataset=lambda: torch.randn(64, 3), loss=loss, optimizer="sgd(lr=0.01)")
"""


def test_a_launch_that_fails_keeps_what_it_saw(tmp_path: Path, by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(spec: RunSpec, **_: Any) -> Run:
        made = by_hand(spec=spec.to_json())
        with contextlib.suppress(ZeroDivisionError):
            program.main([str(made.path)])
        dist.destroy_process_group()
        return Run.load(made.ended("failed").path)

    monkeypatch.setattr(api, "launch", here)
    task = tmp_path / "task.py"
    spec = RunSpec(task=f"{task}:build", micro_batch=4, accumulation=2, device="cpu")
    task.write_text(TASK.replace("{factor}", "(1 if len(seen) < 15 else 1 / 0)"))
    found = noise_scale(spec, steps=20)
    assert found.steps == 7
    assert "the run ended early" in found.notes[0]
    assert "this is the result so far" in found.notes[0]
    (tmp_path / "other.py").write_text(TASK.replace("{factor}", "(1 if len(seen) < 2 else 1 / 0)"))
    with pytest.raises(RunError, match="division by zero"):
        noise_scale(spec.replace(task=f"{tmp_path / 'other.py'}:build"), steps=20)


def test_a_loss_that_is_nan_from_the_first_step(by_hand: Make, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(TASK.replace("{factor}", "float('nan')"))
    spec = RunSpec(task=f"{task}:build", micro_batch=4, accumulation=2, device="cpu", noise_scale=1, steps=5)
    directory = by_hand(spec=spec.to_json()).path
    program.main([str(directory)])
    with pytest.raises(NoiseScaleError, match="none of 5 steps has gradients that are numbers above 0: the loss is NaN"):
        _ = Run.load(directory).noise_scale


def test_the_exact_one_of_a_spec() -> None:
    found = noise_scale(spec_of(), exact=True)
    assert (found.groups, found.dataset_size, found.low) == (64, 64, found.b_simple)
    some = exact_noise_of(spec_of(), samples=32)
    assert some.groups == 32
    assert some.low < some.b_simple < some.high
    with pytest.raises(ValueError, match="is a stream"):
        exact_noise_of(spec_of("shared_stream"))
    assert exact_noise_of(spec_of("shared_stream"), samples=32).groups == 32


def test_knobs_that_do_not_go_together() -> None:
    with pytest.raises(SpecError, match=r"a step needs two; try accumulation=2 with micro_batch=4"):
        spec_of(noise_scale=True)
    with pytest.raises(SpecError, match="measure it with tensor_parallel=1"):
        spec_of(noise_scale=True, nproc_per_node=4, tensor_parallel=2)
    for wrong in (-1, "each", 2.5):
        with pytest.raises(SpecError, match=r"noise_scale=.*: allowed are True \(each fourth step, or fewer\), n \(each n-th; 1 = each\)"):
            spec_of(noise_scale=wrong, accumulation=2)
    assert spec_of(noise_scale=10, accumulation=2).noise_scale == 10
    assert spec_of(noise_scale=True, nproc_per_node=2).noise_scale


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: noise_scale(ScriptSpec(script="train.py")), "with workbench.batch.measure.noise_watch.NoiseWatch"),
        (lambda: noise_scale(spec_of(), [1]), "was given a loader, which only goes with a step"),
        (lambda: noise_scale(spec_of(), steps=1), "a whole number of at least 2"),
        (lambda: noise_scale(lambda batch: None), "a step needs the loader of its batches"),
        (lambda: noise_scale(network(), [1]), "a module goes into model="),
        (lambda: noise_scale(7), "allowed are a step function with its loader, a RunSpec"),  # type: ignore[arg-type]
        (lambda: noise_scale(spec_of(), samples=7), "it needs exact=True"),
        (lambda: noise_scale(spec_of(), exact=True, steps=7), "no step is taken"),
        (lambda: noise_scale(lambda batch: None, exact=True), "expected a RunSpec"),
        (lambda: noise_scale(spec_of(), exact=True, samples=1), "a whole number of at least 2"),
        (lambda: noise_scale(spec_of(micro_batch=1)), "one sample per step cannot be compared with others"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
