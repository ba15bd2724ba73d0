"""The average of the weights: exact, evaluated in place of the weights, and kept in checkpoints; and weight decay of matrices alone."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import workbench as wb
from tests import toy_tasks
from tests.forked import Forks
from tests.train.test_checkpoints import names, spec_of, train, weights
from workbench.core import run_directory
from workbench.runs.launch import environment
from workbench.runs.launch.sweep import run_all
from workbench.runs.restarts import checkpoints_of
from workbench.runs.spec import RunSpec, SpecError
from workbench.train import checkpoint_file, named_state, optimizers
from workbench.train.checkpoints import part_path
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer
from workbench.train.weight_average import WeightAverage


class Tied(nn.Module):
    """Two layers with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))  # type: ignore[no-any-return]


def test_it_is_torchs_average_of_what_follows_the_start() -> None:
    torch.manual_seed(0)
    model = Tied()
    start = [weight.detach().clone() for weight in model.parameters()]
    ours = WeightAverage(model, 0.9)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # torch's begins with the parameters of its first call
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = start
    for _ in range(5):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ours.update()
        theirs.update_parameters(model)
        expected = [0.9 * mean + 0.1 * weight.detach() for mean, weight in zip(expected, model.parameters(), strict=True)]
    for mine, other, exact in zip(ours.tensors.values(), theirs.module.parameters(), expected, strict=True):
        assert torch.equal(mine, other)
        assert torch.allclose(mine, exact, atol=1e-6)
        assert not mine.requires_grad


def test_it_takes_the_place_of_the_weights_and_gives_it_back() -> None:
    model = Tied()
    average = WeightAverage(model, 0.5)
    with torch.no_grad():
        model.first.weight.add_(1.0)
    before, addresses = weights(model).clone(), [weight.data_ptr() for weight in model.parameters()]

    def fails() -> None:
        with average.in_place():
            assert torch.equal(model.first.weight, model.second.weight)  # they are still one
            assert torch.allclose(weights(model)[:16], before[:16] - 1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(weights(model), before)
    assert [weight.data_ptr() for weight in model.parameters()] == addresses


SHARING = Path(__file__).parents[1] / "scripts" / "sharing.py"
SHARED: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2": {"parallel": "zero2"},
    "fsdp": {"parallel": "fsdp"},
    "hsdp": {"parallel": "hsdp", "shard_ranks": 1},
    "split": {"tensor_parallel": 2, "accumulation": 2},
    "split, fsdp": {"tensor_parallel": 2, "accumulation": 2, "parallel": "fsdp"},
    "experts": {"expert_parallel": 2},
}


@pytest.mark.slow
def test_averages_of_shared_models_are_those_of_one_process(forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluated by all ranks or by one, and exported; and no step is another because of an evaluation of averages before it."""
    monkeypatch.setattr(environment, "torchrun", forks.torchrun)
    about: dict[str, Any] = {"device": "cpu", "micro_batch": 2, "steps": 4, "seed": 1, "checkpoint_every": 4, "nproc_per_node": 2}
    about |= {"evaluate": "every(steps=2)", "evaluate_batches": 4, "optimizer": "sgd(lr=0.3, momentum=0.9)", "ema": 0.5}
    two, one = {}, {}
    for mode, knobs in SHARED.items():
        kind = "mixture" if mode == "experts" else "gpt"
        by_one = [kind] if mode in ("ddp", "fsdp", "split", "experts") else []
        for task in (*by_one, f"validated_{kind}"):
            two[mode, task] = RunSpec(task=f"{SHARING}:{task}", **{**about, **knobs})
            one[task] = RunSpec(task=f"{SHARING}:{task}", **{**about, "nproc_per_node": 1, "accumulation": 2})
        two[mode, "plain"] = two[mode, task].replace(ema=None)
    found = {name: Found(run) for specs in (two, one) for name, run in zip(specs, launched(specs, tmp_path), strict=True)}
    for mode, task in two:
        if task == "plain":
            continue
        alone, shared, plain = found[task], found[mode, task], found[mode, "plain"]
        assert shared.losses == plain.losses, mode
        assert shared.validation == pytest.approx(alone.validation, abs=1e-5), (mode, task)
        assert shared.averages.keys() == alone.averages.keys()
        assert all(torch.allclose(shared.averages[name], value, atol=1e-5) for name, value in alone.averages.items()), (mode, task)
        if task.startswith("validated"):
            assert shared.validation[-1] != pytest.approx(plain.validation[-1], abs=1e-3), mode


def launched(specs: dict[Any, RunSpec], folder: Path) -> list[wb.Run]:
    runs = run_all([(str(name), spec) for name, spec in specs.items()], "sweep", budget_s=None, runs_dir=folder / "runs")
    assert all(run.ok for run in runs), [run.error for run in runs]
    return runs


class Found:
    """The losses of a run, those of its evaluations, and the averages that it exports."""

    def __init__(self, run: wb.Run) -> None:
        rows = run_directory.LineTail(run.path / run_directory.METRICS).read()
        self.losses = [row["loss"] for row in rows if "loss" in row]
        self.validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
        state = checkpoint_file.load(checkpoints_of(run.path)[-1], torch.device("cpu"))
        self.averages = named_state.whole_tensors(state, partial(part_path, checkpoints_of(run.path)[-1]), average=True)


def evaluated(model: nn.Module) -> dict[str, float]:
    return {"sum": float(weights(model).double().sum())}


@pytest.mark.parametrize("knobs", [{}, {"accumulation": 2, "precision": "amp_bf16"}, {"parallel": "zero1", "checkpoint_every": None}])
def test_the_average_is_evaluated_and_the_training_does_not_change(alone: Ranks, tmp_path: Path, knobs: dict[str, Any]) -> None:
    task = toy_tasks.numbers(evaluate=evaluated)
    ends, figures = [], []
    for ema in (None, 0.9):
        (folder := tmp_path / str(ema)).mkdir()
        ends.append(weights(train(spec_of(ema=ema, evaluate=True, **knobs), task, alone, folder)))
        figures.append(run_directory.LineTail(folder / run_directory.METRICS).read()[-1]["sum"])
    assert torch.equal(*ends)
    assert figures[0] == float(ends[0].double().sum())
    assert figures[1] != figures[0]


def test_a_run_that_goes_on_goes_on_averaging(alone: Ranks, tmp_path: Path) -> None:
    recipe = {"ema": 0.9, "schedule": "warmup_stable_decay(decay=0.5)", "weight_decay_on": "matrices", "warmup_steps": 2}
    spec = spec_of(optimizer="adamw(lr=0.01, weight_decay=0.1)", evaluate=True, **recipe)
    task, ends = toy_tasks.numbers(evaluate=evaluated), []
    whole = train(spec, task, alone, tmp_path)
    ends.append(run_directory.LineTail(tmp_path / run_directory.METRICS).read()[-1])
    assert names(tmp_path) == ["step00000012.pt", "step00000018.pt"]
    (tmp_path / run_directory.CHECKPOINTS / "step00000018.pt").unlink()  # as if it had been ended after step 17
    again = train(spec, task, alone, tmp_path)
    ends.append(run_directory.LineTail(tmp_path / run_directory.METRICS).read()[-1])
    assert torch.equal(weights(again), weights(whole))
    assert ends[0]["sum"] == ends[1]["sum"]
    state = torch.load(tmp_path / run_directory.CHECKPOINTS / "step00000018.pt", weights_only=True)
    assert list(state["ema"]) == [name for name, _ in whole.named_parameters()]
    assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.1, 0.0]


def test_a_step_that_is_skipped_is_not_averaged(alone: Ranks) -> None:
    trainer = Trainer(spec_of(ema=0.5), toy_tasks.numbers(), alone)
    average = trainer._average
    assert average
    before = [tensor.clone() for tensor in average.tensors.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.precision, "step", lambda *_, **__: False)
        trainer.update()
    assert all(map(torch.equal, before, average.tensors.values()))


def test_only_matrices_are_decayed(alone: Ranks) -> None:
    """Without a gradient, decoupled decay is all that moves a weight: by lr × weight_decay of it."""
    for own in ("adamw(lr=0.1, weight_decay=0.5)", lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.5)):
        task = toy_tasks.numbers(optimizer=own, loss=lambda model, batch: 0.0 * model(batch[0]).sum())
        trainer = Trainer(spec_of(weight_decay_on="matrices"), task, alone)
        before = {name: weight.detach().clone() for name, weight in trainer.module.named_parameters()}
        trainer.step([next(trainer.batches())])
        for name, weight in trainer.module.named_parameters():
            assert torch.allclose(weight, before[name] * (0.95 if name.endswith("weight") else 1.0)), name


def test_weight_decay_that_there_is_not_cannot_be_split(alone: Ranks) -> None:
    with pytest.raises(SpecError, match=r'weight_decay_on="matrices": the SGD has no weight'):
        Trainer(spec_of(weight_decay_on="matrices"), toy_tasks.numbers(optimizer="sgd(lr=0.1)"), alone)


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix_and_is_not_sharded(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(spec_of(optimizer="adafactor(lr=0.05)", weight_decay_on="all"), toy_tasks.numbers(), alone)
    batch = next(trainer.batches())
    losses = [trainer.step([batch]).item() for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    for weight in trainer.module.parameters():
        state = trainer.optimizer.state[weight]
        kept = sum(value.numel() for name, value in state.items() if name != "step")
        assert kept == (sum(weight.shape) if weight.dim() == 2 else weight.numel())
    monkeypatch.setattr(optimizers, "dtensor_spec", lambda weight: "split")
    with pytest.raises(SpecError, match=r'adafactor on parameters that ranks share .*; try parallel="ddp"'):
        optimizers.place_optimizer(trainer.optimizer, share=False)
