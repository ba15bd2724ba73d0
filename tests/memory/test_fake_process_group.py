"""Dry runs of one rank among many: what is shared is shared, what is not is whole."""

import functools
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb
from workbench.train.models import Gpt

WEIGHTS = 4 * sum(weight.numel() for weight in Gpt(vocabulary=512, length=32, width=64, layers=2, heads=2).parameters())
BATCH = torch.zeros(2, 33, dtype=torch.int64)


def gpt() -> nn.Module:
    return Gpt(vocabulary=512, length=32, width=64, layers=2, heads=2)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@functools.cache
def estimate(world_size: int, device: str = "cpu", **knobs: Any) -> wb.MemoryBreakdown:
    return wb.estimate_memory(gpt, BATCH, loss=loss, device=device, world_size=world_size, **knobs)


def test_ddp_keeps_buckets_beside_the_gradients() -> None:
    alone, two = estimate(1), estimate(2)
    assert alone.largest["gradients"] == WEIGHTS
    assert two.largest["gradients"] == 2 * WEIGHTS
    assert estimate(64).total == two.total
    views = estimate(2, gradient_as_bucket_view=True).largest["gradients"]
    assert WEIGHTS <= views < 1.2 * WEIGHTS  # each gradient is beside its bucket until it has been copied


def test_the_process_ends_as_it_would_have() -> None:
    hook = sys.excepthook
    estimate(2)
    assert sys.excepthook is hook


def test_a_spec_has_ddp_on_one_rank_too() -> None:
    spec = wb.RunSpec(task="text-gpt", micro_batch=2)
    breakdown = wb.estimate_memory(spec, device="cpu")
    assert breakdown.largest["gradients"] == 2 * breakdown.parameters


def test_zero1_deals_out_whole_parameters() -> None:
    states = {ranks: estimate(ranks, parallel="zero1").largest["optimizer_states"] for ranks in (2, 64, 1024)}
    assert WEIGHTS < states[2] < 1.1 * WEIGHTS
    largest = 2 * 4 * 512 * 64  # two moments of the largest parameter
    assert largest <= states[64] < 1.1 * largest
    assert states[1024] == states[64]


def test_the_fullest_rank_is_reported() -> None:
    breakdowns = [estimate(3, parallel="zero1", rank=rank) for rank in range(3)]
    reported = estimate(3, parallel="zero1")
    assert reported.largest["optimizer_states"] == max(breakdown.largest["optimizer_states"] for breakdown in breakdowns)
    assert breakdowns[reported.rank].total == reported.total


def test_the_fullest_rank_of_each_stage_is_looked_at() -> None:
    """ZeRO-1 deals the parameters of each stage by themselves: the second rank of the last stage has two of its three."""

    def model() -> nn.Sequential:
        wide = [nn.Linear(40, 100, bias=False), nn.Linear(100, 30, bias=False), nn.Linear(30, 100, bias=False)]
        return nn.Sequential(nn.Linear(40, 40, bias=False), nn.Sequential(*wide))

    task = wb.Task(
        model=model,
        dataset=lambda: [torch.zeros(40)] * 8,
        loss=lambda model, batch: model(batch).sum(),
        tensor_parallel={"0": "colwise_rep"},
    )
    about: dict[str, Any] = {"device": "cpu", "world_size": 4, "parallel": "zero1", "micro_batch": 2, "accumulation": 2}
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [({"pipeline_parallel": 2}, (3,)), ({"tensor_parallel": 2}, (2, 3))]
    for knobs, fullest in cases:
        totals = [wb.estimate_memory(task, rank=rank, **about, **knobs).total for rank in range(4)]
        assert {rank for rank, total in enumerate(totals) if total == max(totals)} == set(fullest)
        reported = wb.estimate_memory(task, **about, **knobs)
        assert reported.total == max(totals)
        assert reported.rank in fullest


def test_fsdp_shares_everything() -> None:
    for ranks in (2, 64):
        states = estimate(ranks, parallel="fsdp").largest["optimizer_states"]
        assert states == pytest.approx(2 * WEIGHTS / ranks, rel=0.35), ranks  # rows are dealt out whole, and counters
    on_gpu = estimate(64, "cuda", parallel="fsdp")  # to which the host's whole model comes block by block
    assert on_gpu.largest["parameters"] < 0.9 * WEIGHTS + WEIGHTS / 64
    assert estimate(64, "cuda", parallel="zero2").largest["parameters"] > on_gpu.largest["parameters"]


def test_groups_share_under_hsdp() -> None:
    assert (
        estimate(16, parallel="hsdp", shard_ranks=4).largest["optimizer_states"] == estimate(4, parallel="fsdp").largest["optimizer_states"]
    )


def test_a_thousand_ranks() -> None:
    batch = torch.zeros(2, 8), torch.zeros(2, 2048)
    breakdown = wb.estimate_memory(lambda: nn.Linear(8, 2048), batch, device="cpu", world_size=1024, parallel="fsdp", precision="amp_bf16")
    assert breakdown.world_size == 1024
    assert breakdown.largest["optimizer_states"] == pytest.approx(2 * 4 * 9 * 2, abs=16)  # two moments of two rows and their biases


def test_a_model_that_a_function_returns_can_be_sharded_again() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), torch.zeros(4, 8)
    options: dict[str, Any] = {"device": "cpu", "world_size": 2, "parallel": "fsdp"}
    first, second = (wb.estimate_memory(lambda: model, batch, **options).total for _ in range(2))
    assert first == second == wb.estimate_memory(model, batch, **options).total
    assert model not in torch.distributed._composable_state._module_state_mapping


def test_layers_can_be_split() -> None:
    plan = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
    task = wb.Task(model=gpt, dataset=lambda: [BATCH[0]] * 4, loss=loss, tensor_parallel=plan)
    split = wb.estimate_memory(task, micro_batch=2, device="cpu", world_size=4, tensor_parallel=4)
    assert (
        split.largest["optimizer_states"] < wb.estimate_memory(task, micro_batch=2, device="cpu", world_size=4).largest["optimizer_states"]
    )


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_offloaded_states_do_not_count(parallel: str) -> None:
    assert estimate(64, "cuda", parallel=parallel, offload="optimizer").largest["optimizer_states"] == 0
    assert estimate(64, "cuda", parallel=parallel).largest["optimizer_states"] > 0


def test_offloaded_activations_do_not_count() -> None:
    kept = wb.estimate_memory(gpt, BATCH, loss=loss)
    gone = wb.estimate_memory(gpt, BATCH, loss=loss, offload="activations")
    assert gone.largest["activations"] < kept.largest["activations"] / 2


def test_powersgd_keeps_another_gradient() -> None:
    """torch's hook keeps what it left out of each bucket, and copies a bucket while it compresses it."""
    spec = wb.RunSpec(task="text-gpt", micro_batch=8, nproc_per_node=2, device="cpu")
    plain = wb.estimate_memory(spec, device="cpu")
    kept = wb.estimate_memory(spec.replace(gradient_compression="powersgd(rank=2)"), device="cpu")
    gradients = plain.largest["parameters"]
    assert gradients < kept.total - plain.total < 2.2 * gradients
