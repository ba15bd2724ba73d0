"""The Trainer: its steps are those of the training loop, and each knob of the spec reaches torch."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import toy_tasks
from workbench.batch.measure.noise_watch import NoiseLog
from workbench.harness.tf32 import uses_tf32
from workbench.memory.measure.at_oom import held
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.task import Task, TaskError
from workbench.train import loop, trainer
from workbench.train.optimizers import build_optimizer
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import clip_gradients
from workbench.train.trainer import Trainer


def spec_of(**knobs: Any) -> RunSpec:
    return RunSpec(**{"task": "toy", "device": "cpu", "micro_batch": 8, "steps": 4, **knobs})


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a Trainer sets of the whole process, put back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    gc.enable()


def weights(module: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_is_that_of_the_training_loop(alone: Ranks, tmp_path: Path, accumulation: int) -> None:
    spec, task = spec_of(accumulation=accumulation), toy_tasks.numbers()
    trained = loop.train(spec, task, alone, tmp_path, held=held, noise_log=NoiseLog)
    stepped = Trainer(spec, task, alone)
    batches = stepped.batches()
    for _ in range(spec.steps):
        stepped.step([next(batches) for _ in range(accumulation)])
    assert torch.equal(weights(stepped.module), weights(trained))
    assert not torch.equal(weights(trained), weights(Trainer(spec, task, alone).module))  # it has gone somewhere


def test_the_loss_of_a_step_is_the_mean_over_all_its_batches(alone: Ranks) -> None:
    one, several = (Trainer(spec_of(micro_batch=size, accumulation=16 // size), toy_tasks.numbers(), alone) for size in (16, 4))
    batch = next(one.batches())
    parts = [(inputs, targets) for inputs, targets in zip(batch[0].split(4), batch[1].split(4), strict=True)]
    assert several.step(parts).item() == pytest.approx(one.step([batch]).item())
    assert torch.allclose(weights(several.module), weights(one.module), atol=1e-6)


def test_uneven_micro_batches_have_the_gradient_of_the_whole_batch(alone: Ranks) -> None:
    counted = toy_tasks.numbers(weight=lambda batch: len(batch[0]), optimizer="sgd(lr=1.0)")
    one, several = (Trainer(spec_of(micro_batch=size, accumulation=parts), counted, alone) for size, parts in ((16, 1), (6, 3)))
    usual = Trainer(spec_of(micro_batch=6, accumulation=3), toy_tasks.numbers(optimizer="sgd(lr=1.0)"), alone)
    assert torch.equal(weights(one.module), weights(several.module))
    batches = one.batches()
    for batch in (next(batches), next(batches)):
        parts = list(zip(batch[0].split(6), batch[1].split(6), strict=True))  # of 6, 6 and 4
        assert several.step(parts).item() == pytest.approx(one.step([batch]).item(), rel=1e-5)
        assert (several.counted, one.counted, usual.counted) == (16, 16, None)
        usual.step(parts)
        assert torch.allclose(weights(several.module), weights(one.module), atol=1e-6)
    assert not torch.allclose(weights(usual.module), weights(one.module), atol=1e-4)


def test_a_micro_batch_without_a_target_counts_nothing(alone: Ranks) -> None:
    """The mean over no targets is NaN, as masked prompts have them."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).expand(-1, 2) * Tensor([1.0, -1.0]), batch[1])

    task = toy_tasks.numbers(loss=loss, weight=lambda batch: (batch[1] != -100).sum(), optimizer="sgd(lr=0.1)")
    one, two, three = (Trainer(spec_of(micro_batch=size, accumulation=16 // size), task, alone) for size in (16, 8, 8))
    inputs, _ = next(one.batches())
    targets = (inputs.flatten(1).sum(1) > 0).long()
    targets[8:] = -100
    halves = list(zip(inputs.split(8), targets.split(8), strict=True))
    first = one.step([(inputs, targets)]).item()
    assert two.step(halves).item() == pytest.approx(first, rel=1e-5)
    assert three.step(halves[::-1]).item() == pytest.approx(first, rel=1e-5)
    assert torch.allclose(weights(two.module), weights(one.module), atol=1e-6)
    assert torch.allclose(weights(three.module), weights(one.module), atol=1e-6)
    before = weights(two.module).clone()
    assert two.step([halves[1], halves[1]]).item() == pytest.approx(first, rel=1e-5)  # none at all: nothing is learnt, the loss is repeated
    assert torch.equal(weights(two.module), before)


@pytest.mark.parametrize(
    ("weight", "knobs", "said"),
    [
        (lambda batch: "many", {}, r"the task's weight\(batch\) returned 'many'; expected a number, such as that of its samples"),
        (lambda batch: batch[0], {}, r"(?s)the task's weight\(batch\) returned tensor.*expected a number"),
        (len, {"noise_scale": True, "accumulation": 2}, "the task's weight with noise_scale=True, for which all micro-batches"),
        (len, {"local_sgd": "periodic"}, r'weight with local_sgd="periodic"'),
    ],
)
def test_weights_that_cannot_be_taken(alone: Ranks, weight: Any, knobs: dict[str, Any], said: str) -> None:
    task = toy_tasks.numbers(weight=weight)
    with pytest.raises(TaskError, match=said):
        Trainer(spec_of(**knobs), task, alone).step([next(Trainer(spec_of(), toy_tasks.numbers(), alone).batches())])
    with pytest.raises(TaskError, match=r'weight with micro_batch="auto".*give a number'):
        Trainer(spec_of(), toy_tasks.numbers(weight=len), alone, split_on_oom=True)
    with pytest.raises(TaskError, match=r"Task\(weight=…\) got a int, expected a function or None"):
        toy_tasks.numbers(weight=3)


def test_fp32_gives_way_to_a_precision_that_is_tried_out_around_it(alone: Ranks) -> None:
    seen = []

    def loss(model: nn.Module, batch: toy_tasks.Pair) -> Tensor:
        output: Tensor = model(batch[0])
        seen.append(output.dtype)
        return (output - batch[1]).square().mean()

    tried = Trainer(spec_of(), toy_tasks.numbers(loss=loss), alone)
    batch = next(tried.batches())
    tried.step([batch])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tried.step([batch])
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("own", ["adamw(lr=0.01, foreach=False)", lambda weights: torch.optim.AdamW(weights, lr=0.01)])
def test_the_tasks_own_optimizer_in_another_implementation(alone: Ranks, implementation: str, own: Any) -> None:
    task = toy_tasks.numbers(optimizer=own)
    plain, other = (Trainer(spec_of(optimizer=name), task, alone) for name in (None, implementation))
    flags = other.optimizer.param_groups[0]
    assert bool(flags["fused"]) == (implementation == "fused")
    assert bool(flags["foreach"]) == (implementation == "foreach")
    batches = [next(plain.batches()) for _ in range(3)]
    for batch in batches:
        plain.step([batch])
        other.step([batch])
    assert torch.allclose(weights(plain.module), weights(other.module), atol=1e-6)


def test_a_learning_rate_is_that_of_the_first_group_and_others_keep_their_ratio() -> None:
    def own(rates: list[float]) -> Any:
        def build(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": [weight], "lr": rate} for weight, rate in zip(parameters, rates, strict=False)], lr=7.0)

        return build

    optimizer = build_optimizer(toy_tasks.network(), own([0.001, 0.01, 0.0]), lr=0.005)
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, pytest.approx(0.05), 0.0]
    optimizer = build_optimizer(toy_tasks.network(), own([0.0, 0.0]), lr=0.005)
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005]
    with pytest.raises(SpecError, match=r"lr=0.005: the first group .* has a learning rate of 0, and another has not"):
        build_optimizer(toy_tasks.network(), own([0.0, 0.01]), lr=0.005)


def test_an_implementation_that_is_not_there() -> None:
    with pytest.raises(SpecError, match=r"optimizer='fused': rmsprop refuses it: .*fused"):
        build_optimizer(toy_tasks.network(), "rmsprop", override="fused")
    with pytest.raises(SpecError, match=r"optimizer='fused': the task's RMSprop has no such implementation"):
        build_optimizer(toy_tasks.network(), torch.optim.RMSprop, override="fused")


def test_images_in_channels_last(alone: Ranks) -> None:
    layouts = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        layouts.append(batch.is_contiguous(memory_format=torch.channels_last))
        return model(batch).square().mean()  # type: ignore[no-any-return]

    images = [torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(16)]
    task = Task(model=lambda: nn.Conv2d(3, 4, 3), dataset=lambda: images, loss=loss, optimizer="sgd(lr=0.1)")
    plain, last = (Trainer(spec_of(channels_last=on), task, alone) for on in (False, True))
    assert last.module.weight.is_contiguous(memory_format=torch.channels_last)
    batch = next(plain.batches())
    for one in (plain, last):
        one.step([batch])
    assert layouts == [False, True]
    assert torch.allclose(plain.module.weight, last.module.weight, atol=1e-6)


def test_tf32_is_switched_for_a_trainer_and_refused_where_there_is_none(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (uses_tf32(), uses_tf32(convolution=True)) == (False, True)
    strict = Trainer(spec_of(tf32=False), toy_tasks.numbers(), alone)
    assert not uses_tf32(convolution=True)
    Trainer(spec_of(), toy_tasks.numbers(), alone)
    assert (uses_tf32(), uses_tf32(convolution=True)) == (False, True), "as torch was set up"
    with pytest.raises(SpecError, match="tf32=True on the CPU: only NVIDIA GPUs compute in TF32, from Ampere on; leave tf32 out"):
        Trainer(spec_of(tf32=True, device="auto"), toy_tasks.numbers(), alone)
    monkeypatch.setattr("workbench.train.precision.has_tf32", lambda device: True)
    monkeypatch.setattr("workbench.train.offload.on_cpu", lambda spec: "")
    Trainer(spec_of(tf32=True, device="auto"), toy_tasks.numbers(), alone)
    assert (uses_tf32(), uses_tf32(convolution=True)) == (True, True)
    strict.apply_process_settings()
    assert (uses_tf32(), uses_tf32(convolution=True)) == (False, False)
    Trainer(spec_of(), toy_tasks.numbers(), alone)
    assert (uses_tf32(), uses_tf32(convolution=True)) == (False, True)


def test_a_trainer_takes_the_process_over(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Trainer(spec_of(gc=False, threads=2), toy_tasks.numbers(), alone)
    assert (gc.isenabled(), torch.get_num_threads()) == (False, 2)
    Trainer(spec_of(), toy_tasks.numbers(), alone)
    assert (gc.isenabled(), torch.get_num_threads()) == (True, 1)
    quiet.apply_process_settings()
    assert (gc.isenabled(), torch.get_num_threads()) == (False, 2)

    monkeypatch.setattr(trainer, "COLLECT_EVERY", 3)
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    batch = next(quiet.batches())
    for _ in range(7):
        quiet.step([batch])
    assert len(collected) == 2


def test_phases_are_marked_in_their_order(alone: Ranks) -> None:
    marked: list[str] = []

    def mark(phase: str) -> Any:
        marked.append(phase)
        return contextlib.nullcontext()

    one = Trainer(spec_of(accumulation=2), toy_tasks.numbers(), alone)
    one.phase = mark
    batches = one.batches()
    one.step([next(batches), next(batches)])
    assert marked == ["h2d", "forward", "backward", "h2d", "forward", "backward", "optimizer"]


class Caching(nn.Module):
    """A layer with a buffer that the first forward makes, one that it replaces, and a statistic; with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.register_buffer("made", None)
        self.register_buffer("mask", torch.ones(1, 1))

    def forward(self, batch: Tensor) -> Tensor:
        if self.made is None:
            self.made = torch.zeros(2)
        if self.mask.shape[0] < batch.shape[0]:
            self.mask = torch.tril(torch.ones(batch.shape[0], batch.shape[0]))
        made: Tensor = self.inner(batch)
        return made


def halved(model: nn.Module, batch: Any) -> Tensor:
    """A loss that changes its batch in place."""
    return model(batch[0].mul_(0.5)).square().mean()


@pytest.mark.parametrize(("static", "done", "forwards"), [(False, 1, 1), (False, 5, 1), (True, 1, 1), (True, 2, 2), (True, 5, 2)])
def test_a_static_graph_has_its_buckets_after_two_steps(alone: Ranks, static: bool, done: int, forwards: int) -> None:
    """What 4 ranks then add up bit for bit as the undisturbed ones is compared in `test_named_state.py`, under "static graph"."""
    made, calls = Trainer(spec_of(static_graph=static), toy_tasks.numbers(), alone), []
    made._updates = done
    made.module.register_forward_hook(lambda *_: calls.append(1))
    made.rehearse(next(made.batches()))
    assert len(calls) == forwards


def test_a_rehearsed_step_leaves_nothing_but_buckets(alone: Ranks) -> None:
    """Neither the batch nor buffers, gradients or random numbers."""
    torch.manual_seed(0)
    batch = [torch.randn(8, 4), torch.zeros(8, 1)]
    losses = []
    for rehearsed in (False, True):
        given = [part.clone() for part in batch]
        made = Trainer(spec_of(), toy_tasks.numbers(model=Caching, loss=halved), alone)
        assert isinstance(made.module, Caching)
        if rehearsed:
            made.rehearse(given)
            assert all(torch.equal(a, b) for a, b in zip(given, batch, strict=True))
            assert made.module.made is None
            assert made.module.mask.shape == (1, 1)
            assert all(weight.grad is None or not weight.grad.any() for weight in made.module.parameters())
        losses.append([made.step([given]) for _ in range(2)])
        assert torch.equal(made.module.mask, torch.tril(torch.ones(8, 8)))
    assert losses[0] == losses[1]


def test_an_optimizer_that_cannot_train_here_says_why() -> None:
    with pytest.raises(TaskError, match=r"LBFGS needs a closure, .*: try \"adamw\""):
        build_optimizer(toy_tasks.network(), torch.optim.LBFGS)
    frozen = toy_tasks.network().requires_grad_(False)
    with pytest.raises(
        TaskError, match=r"empty parameter list.*: all parameters that it was given are frozen, as a stage of a pipeline can be"
    ):
        build_optimizer(frozen, lambda weights: torch.optim.AdamW([weight for weight in weights if weight.requires_grad]))
    assert build_optimizer(frozen, torch.optim.AdamW).param_groups
    with pytest.raises(ValueError, match="Invalid learning rate"):
        build_optimizer(toy_tasks.network(), lambda weights: torch.optim.SGD(weights, lr=-1.0))


def test_sparse_gradients_are_not_clipped_and_lazy_modules_not_trained(alone: Ranks) -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(TaskError, match=r"clip_grad_norm=1\.0: the gradient of a parameter of shape \(4, 2\) is sparse, .*sparse=False"):
        clip_gradients(model.parameters(), 1.0, torch.device("cpu"))
    with pytest.raises(TaskError, match="lazy modules, whose parameters have no shape yet: call the model once in it"):
        Trainer(spec_of(), toy_tasks.numbers(model=lambda: nn.Sequential(nn.LazyLinear(2))), alone)
