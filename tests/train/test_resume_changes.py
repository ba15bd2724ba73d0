"""What a resume refuses or tells: another optimizer, changed code, other buckets of PowerSGD, another best, weights that are NaN."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import toy_tasks
from tests.train.test_checkpoints import names, train, weights
from tests.train.test_checkpoints import spec_of as twenty_steps
from tests.train.test_named_state import edit
from workbench.core import run_directory
from workbench.runs.task import TaskError
from workbench.train import checkpoint_file, provenance, sharding
from workbench.train.ranks import Ranks

spec_of = functools.partial(twenty_steps, steps=12)


def resumes(run_dir: Path) -> list[dict[str, Any]]:
    return run_directory.LineTail(run_dir / run_directory.RESUMES).read()


@pytest.mark.parametrize(("before", "now"), [("adamw", "sgd"), ("sgd", "adamw"), ("adamw", "muon"), ("adam", "adamw")])
@pytest.mark.parametrize("knobs", [{}, {"parallel": "zero1"}])
def test_a_checkpoint_of_another_optimizer_is_refused(alone: Ranks, tmp_path: Path, knobs: dict[str, Any], before: str, now: str) -> None:
    classes = {"adamw": "AdamW", "sgd": "SGD", "muon": "MuonWithAdamW", "adam": "Adam"}
    if knobs and now == "muon":
        pytest.skip("ZeRO-1 takes no muon")
    train(spec_of(**knobs, optimizer=before), toy_tasks.numbers(), alone, tmp_path)
    here = names(tmp_path)
    with pytest.raises(TaskError, match=f"step00000012.pt: .* of {classes[before]}, and the optimizer .* {classes[now]}.*import_weights"):
        train(spec_of(**knobs, optimizer=now, steps=18), toy_tasks.numbers(), alone, tmp_path)
    assert names(tmp_path) == here
    train(spec_of(**knobs, optimizer=f"{before}(lr=0.02)", steps=18), toy_tasks.numbers(), alone, tmp_path)  # another value of an option
    words = "the optimizer has the options of the checkpoint; in the task, these are not used: lr=0.02 (0.001 is)"
    assert resumes(tmp_path)[0]["notes"] == [words]


def grouped(parameters: Iterable[nn.Parameter], *, together: bool, decay: float = 0.0) -> torch.optim.Optimizer:
    first, *rest = parameters
    groups = [{"params": [first, *rest]}] if together else [{"params": [first]}, {"params": rest, "weight_decay": decay}]
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp"])
def test_other_groups_of_parameters_are_refused_and_other_options_are_told(alone: Ranks, tmp_path: Path, parallel: str) -> None:
    spec = spec_of(parallel=parallel)
    one, two = (
        dataclasses.replace(toy_tasks.numbers(), optimizer=functools.partial(grouped, together=together)) for together in (True, False)
    )
    for place, (before, now, said) in enumerate([(one, two, "are in two groups .* now, .* in one"), (two, one, "in one group .* in two")]):
        (tmp_path / str(place)).mkdir()
        train(spec, before, alone, tmp_path / str(place))
        with pytest.raises(TaskError, match=rf"{said} \(the two: weight_decay=0.0\d* and 0.0\d*\)\. To resume, make the groups"):
            train(spec.replace(steps=18), now, alone, tmp_path / str(place))
    other = dataclasses.replace(toy_tasks.numbers(), optimizer=functools.partial(grouped, together=False, decay=0.1))
    train(spec.replace(steps=18), other, alone, tmp_path / "1")
    assert any("these are not used: weight_decay=0.1 (0.0 is)" in note for row in resumes(tmp_path / "1") for note in row["notes"])


def test_checkpoints_that_do_not_name_their_optimizer_resume(alone: Ranks, tmp_path: Path) -> None:
    train(spec_of(optimizer="adamw"), toy_tasks.numbers(), alone, tmp_path)
    edit(tmp_path / "checkpoints" / "step00000012.pt", lambda state: [state.pop(name) for name in ("optimizer class", "code", "finite at")])
    train(spec_of(optimizer="adamw", steps=18), toy_tasks.numbers(), alone, tmp_path)
    assert resumes(tmp_path)[0]["notes"] == []
    assert resumes(tmp_path)[0]["step"] == 12


def test_powersgd_begins_anew_with_other_buckets_or_another_rank(alone: Ranks, tmp_path: Path) -> None:
    wide = toy_tasks.numbers(model=lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 2)))
    spec = spec_of(gradient_compression="powersgd(start=2)")
    train(spec, wide, alone, tmp_path)
    other = spec.replace(gradient_compression="powersgd(rank=2, start=2)")
    train(other.replace(steps=18), wide, alone, tmp_path)
    train(other.replace(steps=24), wide, alone, tmp_path)
    first, second = (row["notes"] for row in resumes(tmp_path))
    assert "gradient_compression=powersgd(rank=2, start=2) (it was powersgd(start=2)): PowerSGD goes on compressing, without" in first[0]
    assert second == []
    said = sharding.changed_buckets(other.replace(bucket_cap_mb=40), {"spec": other.to_json()})
    assert said == "bucket_cap_mb=40 (it was None)"
    assert sharding.changed_buckets(other, {}) == ""


def test_a_best_checkpoint_that_another_figure_chose_is_told(alone: Ranks, tmp_path: Path) -> None:
    task = toy_tasks.numbers(validation=lambda: toy_tasks.Numbers(16), evaluate=None)
    spec = spec_of(evaluate="checkpoint")
    train(spec, task, alone, tmp_path)
    train(spec.replace(steps=18), task, alone, tmp_path)
    train(spec.replace(steps=24, best="validation_loss(max)"), task, alone, tmp_path)
    first, second = (row["notes"] for row in resumes(tmp_path))
    assert first == []
    assert "its best checkpoint so far" in second[0]
    assert "was chosen with best=None; from here on the best is chosen with best='validation_loss(max)'" in second[0]


TASK = """
import torch
import workbench as wb
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


SCALE = 1.0


def build() -> wb.Task:
    data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 2))
    return wb.Task(model=Net, dataset=lambda: data, loss=loss)
"""


def test_functions_that_have_changed_are_named(tmp_path: Path) -> None:
    file = tmp_path / "changing.py"

    def parts(text: str) -> dict[str, str]:
        file.write_text(text)
        names: dict[str, Any] = {}
        exec(compile(text, str(file), "exec"), names)
        return provenance.code_parts(names["build"](), "constant")

    was = parts(TASK)
    remarks = TASK.replace("SCALE", "# a remark\nSCALE").replace("tanh(self", "tanh( self")
    assert provenance.code_changes(was, parts(remarks)) == ""
    for before, after, name in (
        ("torch.tanh(", "torch.relu(", "Net"),
        ("square()", "abs()", "loss"),
        ("SCALE = 1.0", "SCALE = 2.0", "top level"),
        ("loss=loss)", "loss=loss, optimizer='sgd')", "build"),
    ):
        assert provenance.code_changes(was, parts(TASK.replace(before, after))).endswith(f"present code: {name} in changing.py")
    assert provenance.code_changes({}, was) == provenance.code_changes("of somebody else", was) == ""


def test_weights_that_are_nan_do_not_drive_out_the_last_finite_ones(
    alone: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return toy_tasks.squared_error(model, batch) * (math.nan if calls >= 15 else 1.0)

    spec = spec_of(steps=40)
    train(spec, toy_tasks.numbers(loss=loss), alone, tmp_path)
    assert names(tmp_path) == ["step00000012.pt", "step00000030.pt", "step00000036.pt"]
    told = "weights in the checkpoint after step 18 are NaN or infinite; after step 12 they are finite: that checkpoint is kept"
    assert capsys.readouterr().err.count(told) == 1
    whole = train(spec_of(steps=40), toy_tasks.numbers(), alone, tmp_path)
    assert bool(torch.isfinite(weights(whole)).all())
    row = resumes(tmp_path)[0]
    assert row["step"] == 12
    assert "its weights are NaN or infinite" in row["passed_over"]["step00000036.pt"]
    assert names(tmp_path)[:1] == ["step00000030.pt"]
    assert "step00000036.pt.not-finite" in names(tmp_path)


def test_weights_are_finite_where_their_sum_overflows_or_cannot_be_taken() -> None:
    large = torch.full((2,), torch.finfo(torch.float32).max)
    assert checkpoint_file.are_finite([large, torch.ones(2, dtype=torch.float8_e4m3fn), torch.ones(2, dtype=torch.long), None])
    assert not checkpoint_file.are_finite([large, torch.tensor([math.inf, 1.0], dtype=torch.bfloat16)])
    assert not checkpoint_file.are_finite([torch.tensor([math.inf, -math.inf])])


@pytest.mark.parametrize("parallel", ["ddp", "zero1"])
def test_a_run_without_finite_weights_resumes_from_its_last_checkpoint(alone: Ranks, tmp_path: Path, parallel: str) -> None:
    task = toy_tasks.numbers(loss=lambda model, batch: toy_tasks.squared_error(model, batch) * math.nan)
    train(spec_of(parallel=parallel), task, alone, tmp_path)
    train(spec_of(parallel=parallel, steps=18), task, alone, tmp_path)
    assert [(row["step"], row["passed_over"]) for row in resumes(tmp_path)] == [(12, {})]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_more_steps(alone: Ranks, tmp_path: Path, schedule: str) -> None:
    """The schedule is that of the new number of steps from the first step on that is taken."""
    spec = spec_of(schedule=schedule, lr=0.1)
    train(spec, toy_tasks.numbers(), alone, tmp_path)
    longer = train(spec.replace(steps=24), toy_tasks.numbers(), alone, tmp_path)
    (tmp_path / "whole").mkdir()
    whole = train(spec.replace(steps=24), toy_tasks.numbers(), alone, tmp_path / "whole")
    rates, other = (
        [row["lr"] for row in run_directory.LineTail(path / run_directory.METRICS).read()] for path in (tmp_path, tmp_path / "whole")
    )
    assert rates[12:] == other[12:]
    assert torch.equal(weights(longer), weights(whole)) == (schedule == "constant")
    notes = resumes(tmp_path)[0]["notes"]
    if schedule == "constant":
        assert notes == []
    else:
        assert 'with steps=24 (12 before) and schedule="cosine", the learning rate of step 13 is 0.05, and was 0' in notes[0]
