"""What the loop writes down: the first step whose loss is not finite, and seconds that go on when the run does."""

import contextlib
import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests import toy_tasks
from tests.train.test_checkpoints import train
from workbench.core import run_directory
from workbench.runs.rows import check_metric
from workbench.runs.spec import RunSpec
from workbench.runs.task import TaskError
from workbench.train.loop import LOOK_EVERY, FirstNotFinite, Metrics
from workbench.train.ranks import Ranks


def test_notes_the_first_bad_step_and_the_weights_that_are_bad_by_then_and_a_sound_training_notes_nothing() -> None:
    said: list[dict[str, Any]] = []
    now = [0.0]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    watch = FirstNotFinite(model, said.append, clock=lambda: now[0])
    for step in range(1, 5):
        now[0] += LOOK_EVERY
        watch.step(step, torch.tensor(0.5))
    watch.look()
    assert said == []

    for step, loss in enumerate((0.4, math.inf, 0.3, math.nan), 5):
        watch.step(step, torch.tensor(loss))
    with torch.no_grad():
        model[1].weight.fill_(math.nan)
    watch.look()
    watch.step(9, torch.tensor(math.nan))
    watch.look()

    assert said == [{"not_finite": {"step": 6, "weights": "1 of 4 weights are not finite, the first of them 1.weight"}}]


def test_norms_of_clipped_gradients_are_those_of_their_steps(tmp_path: Path) -> None:
    metrics, losses = Metrics(tmp_path, steps=9), torch.tensor([3.0, 2.0, 1.0])
    for step, norm in enumerate((torch.tensor(4.0), None, torch.tensor(math.inf)), 1):
        if norm is not None:
            metrics.norm(norm)
        metrics.step(step, loss=losses[step - 1], lr=0.1, samples=step)
    metrics.flush()
    metrics.step(4, loss=losses[0], lr=0.1, samples=4)
    metrics.flush()
    metrics.close()
    rows = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    assert [row.get("grad_norm") for row in rows] == [4.0, None, math.inf, None]
    assert [check_metric(row) for row in rows] == [""] * 4


@pytest.mark.parametrize("failed", [False, True])
def test_the_losses_before_an_error_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    metrics = Metrics(tmp_path, steps=9)
    with contextlib.suppress(ValueError), contextlib.closing(metrics):
        for step in (1, 2, 3):
            metrics.step(step, loss=torch.tensor(1.0 / step), lr=0.1, samples=step)
        if failed:  # as after a device-side assert
            monkeypatch.setattr(torch, "stack", Mock(side_effect=RuntimeError("CUDA error")))
        raise ValueError("of the task")
    assert [row["step"] for row in run_directory.LineTail(tmp_path / run_directory.METRICS).read()] == ([] if failed else [1, 2, 3])


def test_the_seconds_of_a_run_that_goes_on_behind_an_evaluation_go_on_as_well(tmp_path: Path) -> None:
    path = tmp_path / run_directory.METRICS
    rows = [{"step": 8, "steps": 20, "seconds": 100.0, "loss": 1.0}, {"step": 8, "steps": 20, "accuracy": 0.5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = Metrics(tmp_path, steps=20)
    metrics.step(9, loss=torch.tensor(0.5), lr=0.1, samples=90)
    metrics.flush()
    metrics.close()
    assert run_directory.LineTail(path).read()[-1]["seconds"] >= 100.0


@pytest.mark.parametrize(("code", "error"), [(None, TaskError), (0, TaskError), (3, SystemExit)])
def test_a_task_that_leaves_before_the_last_step_has_failed(
    alone: Ranks, tmp_path: Path, code: int | None, error: type[BaseException]
) -> None:
    """A clean exit would be taken for the end of the training."""
    steps = itertools.count(1)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if next(steps) == 3:
            sys.exit(code)
        return toy_tasks.squared_error(model, batch)

    spec = RunSpec(task="toy", device="cpu", micro_batch=8, steps=6)
    with pytest.raises(error) as caught:
        train(spec, toy_tasks.numbers(loss=loss), alone, tmp_path)
    assert caught.traceback[-1].name == "loss"  # where it left
    if error is TaskError:
        assert re.match(r"the training was ended before its last step by sys\.exit\(0?\)\. .* stop_when=", str(caught.value))
