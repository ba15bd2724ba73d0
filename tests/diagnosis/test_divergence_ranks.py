"""One process against ranks that share the model: rounding where they agree, and the module where they do not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb
from tests.toy_tasks import Numbers
from workbench.diagnosis.measure import divergence
from workbench.diagnosis.measure.divergence_ranks import of_ranks, packed, unpacked
from workbench.train.ranks import Ranks


class Halves(nn.Module):
    """Adds something where it runs on several ranks, as a forgotten branch would."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        several = dist.is_initialized() and dist.get_world_size() > 1
        return torch.tanh(x) + (self.by if several else 0.0)


def built(by: float = 0.0) -> wb.Task:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), Halves(by), nn.Linear(16, 2))

    return wb.Task(model=model, dataset=Numbers, loss=loss, optimizer="adamw(lr=0.01)", tensor_parallel={"0": "colwise", "2": "rowwise"})


def wrong() -> wb.Task:
    return built(1e-3)


ONE = wb.RunSpec(task=f"{__file__}:built", device="cpu", micro_batch=8, steps=2)


def test_one_rank_that_shards_is_recorded_as_a_process_is() -> None:
    ranks = Ranks.join(ONE)
    try:
        for knobs in ({"parallel": "fsdp"}, {"parallel": "zero1"}, {}):
            for double in (False, True):
                entries = of_ranks(ONE.replace(**knobs), built(), ranks, 2, double)
                again = unpacked(json.loads(json.dumps(packed(entries))))
                assert again == entries
                points, by = divergence._points(divergence.of_spec(ONE, built(), 2, double), again)
                assert by == "modules"
                assert {point.phase for point in points} == {"start", "forward", "backward", "optimizer"}
                assert {point.module for point in points if point.phase == "forward"} == {"0", "1", "2", "the model", "the loss"}
                assert max(point.difference for point in points) < (1e-12 if double else 1e-4)
        several = ONE.replace(accumulation=2)
        points, _ = divergence._points(divergence.of_spec(several, built(), 2, True), of_ranks(several, built(), ranks, 2, True))
        assert max(point.difference for point in points) < 1e-12  # each micro-batch is compared with the same of the other
        assert len([point for point in points if point.phase == "forward" and point.module == "1"]) == 2 * 2
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "knobs",
    [{"parallel": "fsdp", "micro_batch": 4}, {"tensor_parallel": 2}, {"micro_batch": 2, "accumulation": 2}],
    ids=["fsdp", "tp", "ddp"],
)
def test_ranks_that_agree_with_one_process_differ_by_rounding(tmp_path: Path, knobs: dict[str, Any]) -> None:
    found = wb.diverge(ONE, ONE.replace(nproc_per_node=2, **knobs), budget_s=600, runs_dir=tmp_path)
    assert found.verdict in ("rounding", "identical"), found
    assert found.exact is not None
    assert found.exact < 1e-12
    assert found.by == "modules"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_module_that_differs_on_several_ranks_is_named(tmp_path: Path) -> None:
    spec = ONE.replace(task=f"{__file__}:wrong")
    found = wb.diverge(spec, spec.replace(nproc_per_node=2, parallel="fsdp", micro_batch=4), budget_s=600, runs_dir=tmp_path)
    assert found.verdict == "bug", found
    assert found.first is not None
    assert (found.first.step, found.first.phase, found.first.module) == (1, "forward", "1"), found
