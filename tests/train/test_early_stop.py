"""A training ends when its evaluations do not become better, and so does one that is resumed."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests import toy_tasks
from tests.train.test_checkpoints import spec_of, train
from workbench.core import run_directory
from workbench.runs.task import TaskError
from workbench.train.checkpoints import Checkpoints
from workbench.train.early_stop import EarlyStop
from workbench.train.ranks import Ranks


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    yield Ranks.join(spec_of())
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("stop_when", "last"),
    [("score(patience=2)", 8), ("score(patience=2, best=max)", 14), ("score(patience=1, by=10)", 4), ("score(patience=20)", 20)],
)
def test_it_ends_after_as_many_evaluations_as_it_has_patience(alone: Ranks, tmp_path: Path, stop_when: str, last: int) -> None:
    values = iter([5.0, 4.0, 6.0, 7.0, 8.0, 7.5, 7.9, 1.0, 1.0, 1.0])

    def score(model: nn.Module) -> dict[str, float]:
        return {"score": next(values)}

    train(spec_of(stop_when=stop_when, evaluate="every(steps=2)"), toy_tasks.numbers(evaluate=score), alone, tmp_path)
    rows: list[dict[str, Any]] = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    assert rows[-1]["step"] == last
    assert [row["step"] for row in rows if "lr" in row] == [*range(1, last + 1)]
    before = len(rows)
    values = iter([9.0] * 20)
    train(
        spec_of(stop_when=stop_when, evaluate="every(steps=2)"), toy_tasks.numbers(evaluate=score), alone, tmp_path
    )  # from its checkpoint
    rows = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    assert rows[-1]["step"] == (last if stop_when != "score(patience=2, best=max)" else 18)  # 9 was better than 8, at step 14
    assert len(rows) >= before


def test_a_run_that_was_killed_where_it_was_to_stop_takes_no_further_step(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(stop_when="score(patience=1)", evaluate="every(steps=6)")
    values = iter([1.0, 2.0, 0.5])
    task = toy_tasks.numbers(evaluate=lambda model: {"score": next(values)})
    with monkeypatch.context() as killed:
        killed.setattr("workbench.train.early_stop.EarlyStop.after", lambda stop, step: False)  # killed after the checkpoint of step 12
        write = Checkpoints.write

        def last(checkpoints: Checkpoints, step: int, *arguments: Any, **options: Any) -> None:
            write(checkpoints, step, *arguments, **{**options, "wait": True})
            if step == 12:
                raise KeyboardInterrupt

        killed.setattr(Checkpoints, "write", last)
        with pytest.raises(KeyboardInterrupt):
            train(spec, task, alone, tmp_path)
    train(spec, task, alone, tmp_path)
    rows = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    assert rows[-1]["step"] == 12
    assert next(values) == 0.5


def test_no_rank_waits_for_the_decision_of_one_that_failed(alone: Ranks, tmp_path: Path) -> None:
    (tmp_path / run_directory.EVALUATIONS).write_text('{"step": 2, "figures": {"score": 1.0}}\n')
    said: list[str] = []

    def after(rank: int) -> None:
        with pytest.raises(TaskError) as error:
            EarlyStop("loss", dataclasses.replace(alone, rank=rank, world_size=2), tmp_path).after(2)
        said.append(str(error.value))

    threads = [threading.Thread(target=after, args=(rank,), daemon=True) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert said == ["stop_when: the evaluation has no figure 'loss'; it has score"] * 2


def test_a_figure_that_there_is_not_is_named(alone: Ranks, tmp_path: Path) -> None:
    task = toy_tasks.numbers(evaluate=lambda model: {"score": 1.0})
    with pytest.raises(TaskError, match="stop_when: the evaluation has no figure 'loss'; it has score"):
        train(spec_of(stop_when="loss", evaluate="every(steps=2)"), task, alone, tmp_path)
