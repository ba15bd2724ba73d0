"""Checkpoints: a run that goes on ends where one that was never ended does, and no file is ever half there."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy_tasks
from torch import Tensor, nn

from workbench import rundir
from workbench.spec import RunSpec
from workbench.train import loop
from workbench.train.loader import micro_batches
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer


def spec_of(**knobs: Any) -> RunSpec:
    return RunSpec(**{"task": "toy", "device": "cpu", "micro_batch": 8, "steps": 20, "checkpoint_every": 6, **knobs})


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """A process group of this process alone."""
    yield Ranks.join(spec_of())
    dist.destroy_process_group()


def weights(module: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / rundir.CHECKPOINTS).iterdir())


@pytest.mark.parametrize("knobs", [{}, {"accumulation": 2, "schedule": "cosine", "warmup_steps": 3}, {"optimizer": "adam(lr=0.01)"}])
def test_a_run_that_goes_on_ends_where_one_that_was_never_ended_does(alone: Ranks, tmp_path: Path, knobs: dict[str, Any]) -> None:
    spec, task = spec_of(**knobs), toy_tasks.numbers()
    whole = loop.train(spec, task, alone, tmp_path)
    (tmp_path / "parts").mkdir()
    loop.train(spec, task, alone, tmp_path / "parts")
    (tmp_path / "parts" / rundir.CHECKPOINTS / "step00000018.pt").unlink()  # as if it had been ended after step 17
    (tmp_path / "parts" / rundir.METRICS).unlink()
    again = loop.train(spec, task, alone, tmp_path / "parts")
    assert torch.equal(weights(again), weights(whole))
    steps = [row["step"] for row in rundir.LineTail(tmp_path / "parts" / rundir.METRICS).read()]
    assert steps == list(range(13, 21))
    assert names(tmp_path / "parts") == ["step00000012.pt", "step00000018.pt"]


def test_a_run_that_was_at_its_end_has_nothing_to_do(alone: Ranks, tmp_path: Path) -> None:
    spec, task = spec_of(steps=6), toy_tasks.numbers()
    first = loop.train(spec, task, alone, tmp_path)
    assert torch.equal(weights(loop.train(spec, task, alone, tmp_path)), weights(first))


def test_without_the_knob_nothing_is_written(alone: Ranks, tmp_path: Path) -> None:
    loop.train(spec_of(checkpoint_every=None, steps=2), toy_tasks.numbers(), alone, tmp_path)
    assert not (tmp_path / rundir.CHECKPOINTS).exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("PytorchStreamWriter failed writing file data/3")])
def test_a_full_disk_leaves_the_last_one(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    save, calls = torch.save, []

    def full(state: object, file: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            file.write(b"half of it")
            raise error
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(rundir.DiskFullError, match="make room"):
        loop.train(spec_of(), toy_tasks.numbers(), alone, tmp_path)
    assert names(tmp_path) == ["step00000006.pt"]


@pytest.mark.parametrize("done", [0, 1, 3, 4, 9])
def test_the_order_of_samples_goes_on(alone: Ranks, done: int) -> None:
    def first(done: int, count: int) -> list[Tensor]:
        trainer = Trainer(spec_of(accumulation=2, micro_batch=16), toy_tasks.numbers(), alone)
        batches = micro_batches(trainer.loader, 2, alone, done)
        return [next(batches)[0] for _ in range(count)]

    want, got = first(0, 2 * done + 4)[2 * done :], first(done, 4)
    assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
