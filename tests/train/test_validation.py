"""Evaluations during a training: exact sums, no trace in the training, a phase of their own, and a resume that keeps them."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import toy_tasks
from tests.forked import Forks
from tests.toy_tasks import Numbers
from tests.train.test_checkpoints import spec_of, train
from workbench.core import run_directory
from workbench.runs.rows import first_difference
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.task import TaskError
from workbench.timeline.timeline import Timeline
from workbench.train import export_weights, validation
from workbench.train.random_numbers import seed_all
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import full_tensor
from workbench.train.sharding import distribute
from workbench.train.trainer import Trainer, build_model
from workbench.train.validation import summary, sums_of


def rows(path: Path, name: str = run_directory.EVALUATIONS) -> list[dict[str, Any]]:
    return run_directory.LineTail(path / name).read()


def timeline(path: Path) -> Timeline:
    return Timeline.from_lines(rows(path, "rank0.jsonl"))


def folders(path: Path, *names: str) -> list[Path]:
    for name in names:
        (path / name / run_directory.FINGERPRINTS).mkdir(parents=True)
    return [path / name for name in names]


class Normed(nn.Module):
    """Batch norm, dropout, and a part that its author keeps in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last, self.frozen = nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2), nn.Dropout(0.9)
        self.frozen.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.drop(self.norm(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("evaluate", [toy_tasks.classify, None, toy_tasks.parameters], ids=["per batch", "the loss", "whole"])
def test_training_goes_on_bit_for_bit_and_a_resume_keeps_it(alone: Ranks, tmp_path: Path, evaluate: Any) -> None:
    validation = None if evaluate is toy_tasks.parameters else lambda: toy_tasks.Numbers(13)
    task = toy_tasks.validated(model=Normed, evaluate=evaluate, validation=validation)
    without, often, interrupted = folders(tmp_path, "without", "often", "interrupted")
    spec = spec_of(steps=10, checkpoint_every=4, ema=0.9, accumulation=2)
    train(spec, task, alone, without)
    changed = spec.replace(evaluate="every(steps=2)")
    module = train(changed, task, alone, often)
    assert first_difference(without, often, 1) is None
    assert (module.training, module.frozen.training) == (True, False)
    assert [row["step"] for row in rows(often)] == [2, 4, 6, 8, 10]
    measured = timeline(often)
    assert len(measured.validations) == 5
    assert measured.table.rows[-1][0] == "validation"
    assert 0 < measured.validation_share < 1
    assert len(measured.steps) == 10

    train(changed, task, alone, interrupted)
    (interrupted / run_directory.CHECKPOINTS / "step00000008.pt").unlink()  # as if it had been ended after its seventh step
    train(changed, task, alone, interrupted)
    whole, resumed = ([{**row, "seconds": 0} for row in rows(path)] for path in (often, interrupted))
    assert resumed == whole
    figures = [[row for row in rows(path, run_directory.METRICS) if "lr" not in row] for path in (often, interrupted)]
    assert figures[0] == figures[1]
    assert len(timeline(interrupted).validations) == 5


def test_when_it_runs(alone: Ranks, tmp_path: Path) -> None:
    expected = {"end": [7], True: [7], "epoch": [2, 4, 6, 7], "checkpoint": [3, 6, 7], "every(3)": [3, 6, 7]}
    for number, (when, steps) in enumerate(expected.items()):
        (path := tmp_path / str(number)).mkdir()
        spec = spec_of(steps=7, checkpoint_every=3, micro_batch=32, evaluate=when, evaluate_batches=1)
        train(spec, toy_tasks.validated(validation=lambda: toy_tasks.Numbers(100)), alone, path)
        assert [row["step"] for row in rows(path)] == steps, when
        assert {row["samples"] for row in rows(path)} == {32}


def everywhere(value: Any) -> list[Any]:
    """What the ranks have, on each of them."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def statistics_of_two_ranks(parallel: str, folder: str) -> None:
    """On two ranks: whose statistics of batch norm a step, an evaluation and a checkpoint have, beside the same by hand."""
    task = toy_tasks.validated(
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), loss=toy_tasks.squared_error, evaluate=None
    )
    spec = spec_of(nproc_per_node=2, parallel=parallel, steps=3, checkpoint_every=3, evaluate="end")
    ranks = Ranks.join(spec)
    trainer = Trainer(spec, task, ranks)
    first = build_model(task)
    first.load_state_dict(everywhere({name: full_tensor(value) for name, value in trainer.module.state_dict().items()})[0])
    models = [first, copy.deepcopy(first)]  # of the ranks, by hand
    batches = trainer.batches()
    for _ in range(spec.steps):
        batch = next(batches)
        both = everywhere(batch)
        if parallel != "fsdp":  # DDP sends the buffers of rank 0 before each forward
            models[1].load_state_dict(models[0].state_dict())
        losses = [toy_tasks.squared_error(model, its) for model, its in zip(models, both, strict=True)]
        sum(losses).backward()  # type: ignore[union-attr]
        for weights in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(weight.grad for weight in weights) / 2
            for weight in weights:
                weight.data -= 0.1 * mean
                weight.grad = None
        assert trainer.step([batch]).item() == pytest.approx(losses[ranks.rank].item(), rel=1e-5)
        trainer.update()
    for name, value in models[ranks.rank].state_dict().items():
        torch.testing.assert_close(full_tensor(trainer.module.state_dict()[name]), value)
    own = {name: buffer.clone() for name, buffer in trainer.module.named_buffers()}
    apart = everywhere(own)
    assert not torch.equal(apart[0]["1.running_mean"], apart[1]["1.running_mean"])

    path = Path(folder)
    module = train(spec, task, ranks, path)
    ranks.agree(True)  # it has written all, and the next training may use the same topics
    evaluated = everywhere(dict(module.named_buffers()))
    for name, buffer in evaluated[ranks.rank].items():
        assert torch.equal(buffer, own[name]), name  # an evaluation leaves each rank its own
    data = Numbers(13)
    error = toy_tasks.squared_error(first.eval(), (data.inputs, data.targets))
    assert rows(path)[-1]["figures"]["validation_loss"] == pytest.approx(error.item(), rel=1e-5)
    saved = export_weights.last_weights(path)
    assert all(torch.equal(saved[name], value) for name, value in apart[0].items())
    longer = spec.replace(steps=4)
    resumed = dict(train(longer, task, ranks, path).named_buffers())
    ranks.agree(True)
    whole = dict(train(longer.replace(checkpoint_every=4), task, ranks, path.parent).named_buffers())
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    if parallel != "fsdp":  # device_turns wraps a training anew
        for again in (True, False):
            distribute(trainer.module, spec, trainer.layout, ranks.device, again=again)
            mine = apart[ranks.rank if again else 0]
            assert all(torch.equal(buffer, mine[name]) for name, buffer in trainer.module.named_buffers()), again
    Ranks.leave()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_each_rank_keeps_its_statistics_and_those_of_the_first_are_evaluated_and_saved(forks: Forks, tmp_path: Path, parallel: str) -> None:
    for name in ("", "parts"):
        (tmp_path / "run" / name / run_directory.FINGERPRINTS).mkdir(parents=True, exist_ok=True)
    code = f"from {__name__} import statistics_of_two_ranks\nstatistics_of_two_ranks({parallel!r}, {str(tmp_path / 'run' / 'parts')!r})"
    done = forks.ranks(2, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


def test_figures_follow_from_counts() -> None:
    """Over batches and ranks in any division, and through JSON."""
    torch.manual_seed(0)
    logits, targets = torch.randn(50, 3) * 3, torch.randint(-1, 3, (50,))

    def of(*places: range) -> dict[str, Any]:
        parts = [sums_of({"logits": logits[p], "targets": targets[p], "odd": targets[p].float()}, [*p]) for p in map(list, places)]
        return summary(json.loads(json.dumps(parts)), ["a", "b", "c"])

    whole, parts = of(range(50)), of(range(7), range(7, 8), range(8, 50))
    assert parts["figures"] == pytest.approx(whole["figures"])
    assert [row["index"] for row in parts["worst"]] == [row["index"] for row in whole["worst"]]
    kept, predicted = targets >= 0, logits.argmax(1)
    assert whole["figures"]["accuracy"] == pytest.approx((predicted == targets)[kept].float().mean().item())
    assert whole["figures"]["odd"] == pytest.approx(targets.float().mean().item())
    assert whole["classes"]["b"]["recall"] == pytest.approx((predicted == 1)[targets == 1].float().mean().item())
    assert whole["classes"]["b"]["precision"] == pytest.approx((targets == 1)[kept & (predicted == 1)].float().mean().item())
    assert sum(each["count"] for each in whole["calibration"]) == int(kept.sum())
    sure = summary([sums_of({"logits": torch.eye(3) * 100, "targets": torch.arange(3)}, [0, 1, 2])])
    assert sure["figures"] == pytest.approx({"accuracy": 1.0, "validation_loss": 0.0, "ece": 0.0})
    wrong = summary([sums_of({"logits": torch.eye(3) * 100, "targets": torch.tensor([1, 2, 0])}, [0, 1, 2])])
    assert wrong["figures"]["ece"] == pytest.approx(1.0)
    tokens = summary([sums_of({"logits": torch.zeros(2, 5, 3), "targets": torch.zeros(2, 5, dtype=torch.long)}, [7, 9])])
    assert {row["index"] for row in tokens["worst"]} == {7, 9}


class Largest(TorchDispatchMode):
    """Inside, the bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)}
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return made


def test_targets_beyond_the_classes_are_refused() -> None:
    """As those of two classes beside a single output."""
    with pytest.raises(TaskError, match=r"logits \(4, 1\).*targets up to 1.*for two classes give two logits"):
        sums_of({"logits": torch.zeros(4, 1), "targets": torch.tensor([0, 1, 1, 0])}, [0, 1, 2, 3])


@pytest.mark.parametrize("shape", [(3, 70, 500), (600, 500)], ids=["tokens", "pictures"])
@pytest.mark.parametrize("shifted", [False, True])
def test_large_logits_are_not_copied_whole(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], shifted: bool) -> None:
    """And the figures are those of all at once."""
    torch.manual_seed(0)
    logits, targets = (torch.randn(shape) * 3).bfloat16(), torch.randint(-50, shape[-1], shape[:-1])
    logits, targets = (logits[:, :-1], targets[..., :-1] if len(shape) > 2 else targets) if shifted else (logits, targets)
    targets = targets.clamp(max=logits.shape[-1] - 1)
    given, indices = {"logits": logits, "targets": targets}, list(range(len(targets)))
    whole = summary([sums_of(given, indices)])
    monkeypatch.setattr(validation, "PIECE", 8192)
    with Largest() as made:
        pieces = summary([sums_of(given, indices)])
    assert made.bytes <= max(4 * 8192, logits[0].nbytes)
    for name in ("figures", "calibration", "classes", "worst"):
        for one, other in zip(*map(tree_leaves, (whole[name], pieces[name])), strict=True):
            assert one == pytest.approx(other)
    rows, kept = logits.reshape(-1, logits.shape[-1]).double(), targets.reshape(-1) >= 0
    exact = nn.functional.cross_entropy(rows[kept], targets.reshape(-1)[kept]).item()
    assert pieces["figures"]["validation_loss"] == pytest.approx(exact)
    sure = rows[kept].softmax(1).max(1).values.sum().item()
    assert sum(row["count"] * row["confidence"] for row in pieces["calibration"]) == pytest.approx(sure)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0.5, "returned a float; expected figures by name"),
        ({"error": "small"}, "returned error='small'; expected numbers"),
        ({"logits": torch.zeros(2, 3)}, r"Tensor\(2, 3\), NoneType\(\) of 2 samples"),
        ({"logits": torch.zeros(2, 3), "targets": torch.zeros(2)}, "whole numbers as targets"),
    ],
)
def test_what_an_evaluation_may_not_return(given: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        sums_of(given, [0, 1])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"evaluate": "often"}, r'evaluate=\'often\': True, False, "end", "epoch", "checkpoint" or "every\(steps=500\)" is allowed'),
        ({"evaluate": "every(0)"}, "is allowed"),
        ({"evaluate": "checkpoint"}, "say after how many steps"),
        ({"evaluate_batches": 3}, 'say when, as in evaluate="end"'),
    ],
)
def test_knobs_that_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RunSpec(task="toy", **knobs)


class Noisy(Numbers):
    """Each sample is drawn anew from the generators of torch, numpy and Python."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + torch.randn(4) * float(np.random.rand()) * random.random(), y


@pytest.mark.parametrize("data", [Noisy(12), None], ids=["per batch", "whole"])
def test_an_evaluation_alone_leaves_random_numbers_and_modes(data: Any) -> None:
    def whole(model: nn.Module) -> dict[str, float]:
        return {"drawn": float(torch.rand(()))}

    task, model, device = toy_tasks.validated(**{} if data else {"evaluate": whole}), Normed(), torch.device("cpu")
    seed_all(5)
    undisturbed = float(torch.rand(())), float(np.random.rand()), random.random()
    seed_all(5)
    validation.evaluate_alone(task, model, data, 4, device)
    assert (float(torch.rand(())), float(np.random.rand()), random.random()) == undisturbed
    assert model.training
    assert not model.frozen.training


def test_data_that_are_refused(alone: Ranks, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="a stream, whose epochs have no length"):
        train(spec_of(evaluate="epoch"), toy_tasks.parted_stream(), alone, tmp_path)
    with pytest.raises(TaskError, match="expected a dataset with a length above 0"):
        train(spec_of(evaluate=True, steps=1), toy_tasks.validated(validation=list), alone, tmp_path)


def test_logits_of_pixels_have_their_classes_where_torchs_losses_take_them() -> None:
    """A U-Net's logits (samples, classes, height, width) were refused, without a way out."""
    logits, targets = torch.randn(2, 5, 3, 4), torch.randint(-1, 5, (2, 3, 4))
    given = [{"logits": each, "targets": targets} for each in (logits, logits.movedim(1, -1))]
    assert validation.sums_of(given[0], [7, 9]) == validation.sums_of(given[1], [7, 9])
    square = {"logits": torch.randn(2, 4, 4, 4), "targets": torch.randint(0, 4, (2, 4, 4))}
    kept = validation.sums_of(square, [0, 1])["classification"]["loss"]
    assert kept == pytest.approx(float(nn.functional.cross_entropy(square["logits"].movedim(-1, 1), square["targets"], reduction="sum")))
    ways = {
        "For one yes or no per output, give figures": (torch.randn(2), torch.tensor([0.0, 1.0])),
        "or below 0 if they are to be left out": (logits, targets.masked_fill(targets < 0, 255)),
    }
    for words, (outputs, wanted) in ways.items():
        with pytest.raises(TaskError, match=words):
            validation.sums_of({"logits": outputs, "targets": wanted}, [7, 9])
