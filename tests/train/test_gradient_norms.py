"""The norms of gradients by layer are those of the whole gradients, however ranks share the model, and a resume keeps each row once."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests import toy_tasks
from tests.conftest import HandMade
from tests.forked import Forks
from tests.train.test_checkpoints import spec_of, train
from workbench.core import run_directory
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, SpecError
from workbench.train.gradient_norms import GradientNorms
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer


def rows(path: Path, name: str = run_directory.GRADIENTS) -> list[dict[str, Any]]:
    return run_directory.LineTail(path / name).read()


@pytest.mark.parametrize("knobs", [{}, {"parallel": "fsdp"}, {"parallel": "zero1"}], ids=["ddp", "fsdp", "zero1"])
def test_norms_are_those_of_the_gradients(alone: Ranks, tmp_path: Path, knobs: dict[str, Any]) -> None:
    spec = spec_of(**knobs, gradient_norms=2)
    trainer = Trainer(spec, toy_tasks.numbers(), alone)
    norms = GradientNorms(trainer, tmp_path / "g.jsonl", 2)
    batches = trainer.batches()
    for step in (1, 2):
        for left in reversed(range(spec.accumulation)):
            trainer.micro_step(next(batches), last=not left)
        grads = {name: weight.grad for name, weight in trainer.module.named_parameters()}
        whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}  # type: ignore[union-attr]
        expected = {layer: math.hypot(*(float(g.norm()) for name, g in whole.items() if name.startswith(layer))) for layer in ("0", "2")}  # type: ignore[union-attr]
        norms.step(step)
        trainer.update()
    norms.close()
    batches.close()
    (row,) = rows(tmp_path, "g.jsonl")
    assert row["step"] == 2
    assert row["norms"] == pytest.approx(expected, rel=1e-5)


def test_a_training_writes_them_and_a_resume_keeps_each_once(alone: Ranks, tmp_path: Path) -> None:
    train(spec_of(steps=4, checkpoint_every=4, gradient_norms=1), toy_tasks.numbers(), alone, tmp_path)
    writer = run_directory.LineWriter(tmp_path / run_directory.GRADIENTS)
    writer.write([{"step": 5, "norms": {"0": 1.0}}])  # of a step after the checkpoint, which is taken again
    writer.close()
    train(spec_of(steps=6, checkpoint_every=4, gradient_norms=1), toy_tasks.numbers(), alone, tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert all(set(row["norms"]) == {"0", "2"} for row in rows(tmp_path))
    usage = rows(tmp_path, run_directory.USAGE)
    assert usage
    assert {"step", "time", "memory"} <= usage[-1].keys()


@pytest.mark.parametrize("knobs", [{}, {"parallel": "fsdp"}, {"precision": "amp_bf16"}], ids=["ddp", "fsdp", "bf16"])
def test_a_step_that_clips_its_gradients_records_their_norm(alone: Ranks, tmp_path: Path, knobs: dict[str, Any]) -> None:
    train(spec_of(steps=4, checkpoint_every=None, gradient_norms=1, clip_grad_norm=0.01, **knobs), toy_tasks.numbers(), alone, tmp_path)
    norms = [math.hypot(*row["norms"].values()) for row in rows(tmp_path)]
    assert [row["grad_norm"] for row in rows(tmp_path, run_directory.METRICS) if "lr" in row] == pytest.approx(norms, rel=1e-4)
    assert min(norms) > 0.01  # as they were before


def test_the_knob_is_checked() -> None:
    with pytest.raises(SpecError, match="gradient_norms=0"):
        RunSpec(task="text-gpt", gradient_norms=0)


@pytest.mark.slow
def test_ranks_that_share_a_model_write_what_one_process_writes(tmp_path: Path, by_hand: Callable[..., HandMade], forks: Forks) -> None:
    spec = wb.RunSpec(task=f"{toy_tasks.__file__}:numbers", device="cpu", micro_batch=8, steps=3, gradient_norms=1)
    of_one, of_two = spec, spec.replace(parallel="fsdp", nproc_per_node=2, micro_batch=4)
    one, shared = (Run.load(by_hand(spec=each.to_json()).path) for each in (of_one, of_two))
    for run in (one, shared):
        done = forks.train(run.spec.world_size, tmp_path, run.path)
        assert done.returncode == 0, done.stderr
    for mine, its in zip(one.gradient_norms, shared.gradient_norms, strict=True):
        assert its["norms"] == pytest.approx(mine["norms"], rel=1e-4)
    assert torch.isfinite(torch.tensor([*one.gradient_norms[0]["norms"].values()])).all()
    assert "gradient norm of 0" in wb.report(one).html
