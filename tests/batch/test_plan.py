"""Batch plans: what a global batch is made of comes out exactly, every number has its reason, and a spec can take it over."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.batch.analysis.plan import BatchPlan, split_batch
from workbench.runs.spec import RunSpec

PLAN = BatchPlan(micro_batch=32, accumulation=2, world_size=2, lr=0.1, warmup_steps=10, optimizer="sgd(momentum=0.9)")


@given(share=st.integers(1, 5000), ranks=st.integers(1, 64), most=st.integers(1, 600))
def test_it_is_divided_without_a_remainder(share: int, ranks: int, most: int) -> None:
    parts = split_batch(share * ranks, ranks, most)
    assert parts.micro_batch * parts.accumulation * ranks == share * ranks
    assert parts.micro_batch <= most
    assert all(share % more or share // more * more < parts.micro_batch for more in range(parts.micro_batch + 1, min(most, share) + 1))
    assert bool(parts.notes) is (parts.micro_batch * 2 < min(most, share))


def test_what_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match=r"global_batch=100 cannot be divided over 8 ranks without a remainder: try 96 or 104, or other"):
        split_batch(100, 8, 32)
    with pytest.raises(ValueError, match=r"global_batch=3 cannot be divided over 8 ranks .* try 8, or other ranks"):
        split_batch(3, 8, 32)
    with pytest.raises(ValueError, match=r"micro_batch=0: a whole number of at least 1 is allowed"):
        split_batch(8, 8, 0)


def test_a_batch_that_divides_badly_names_better_ones() -> None:
    parts = split_batch(2 * 73, 2, 32)
    assert (parts.micro_batch, parts.accumulation) == (1, 73)
    assert "73 samples per rank have no better divisor up to 32 than 1: a global batch of 128 or 192 would" in parts.notes[0]
    assert "a global batch of 64 would" in split_batch(2 * 31, 2, 30).notes[0] or split_batch(2 * 31, 2, 30).notes[0].endswith(
        "larger micro-batches"
    )


def test_another_global_batch() -> None:
    bigger = PLAN.scaled_to(global_batch=1024)
    assert (bigger.micro_batch, bigger.accumulation, bigger.world_size, bigger.global_batch) == (32, 16, 2, 1024)
    assert bigger.lr == pytest.approx(0.8)
    assert bigger.warmup_steps == 2  # 1,280 samples as before
    assert bigger.scaled is not None
    assert bigger.scaled.valid == "unknown"
    assert bigger.reasons["micro_batch"] == "the largest divisor of the 512 samples per rank that is not above 32"
    assert bigger.reasons["accumulation"] == "512 samples per rank / 32 at once"
    assert bigger.reasons["lr"].startswith("linear, because SGD's steps add up")
    assert "1,280 samples as before" in bigger.reasons["warmup_steps"]


def test_more_ranks_go_on_as_before() -> None:
    wider = PLAN.scaled_to(world_size=8, noise_scale=500)
    assert (wider.micro_batch, wider.accumulation, wider.world_size, wider.global_batch) == (32, 2, 8, 512)
    assert wider.reasons["micro_batch"] == "as before: each rank keeps its share"
    assert wider.lr == pytest.approx(0.1 * (1 + 500 / 128) / (1 + 500 / 512))


def test_the_same_batch_on_more_ranks_is_the_same_training() -> None:
    wider = PLAN.scaled_to(global_batch=128, world_size=4, micro_batch=64)
    assert (wider.micro_batch, wider.accumulation, wider.world_size) == (32, 1, 4)
    assert (wider.lr, wider.warmup_steps, wider.scaled.valid if wider.scaled else "") == (0.1, 10, "inside")


def test_adam_takes_its_averages_along() -> None:
    spec = RunSpec(task="text-gpt", micro_batch=16, optimizer="adamw(betas=(0.9, 0.95))", lr=1e-3)
    bigger = BatchPlan.of(spec).scaled_to(global_batch=64)
    assert bigger.optimizer is not None
    assert bigger.optimizer.startswith("adamw(betas=(0.6, 0.8), eps=")
    assert bigger.reasons["optimizer"] == "its averages keep their length in samples"
    changed = spec.replace(**bigger.changes())
    assert (changed.global_batch, changed.lr, changed.optimizer) == (64, 0.002, bigger.optimizer)


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_spec_there_and_back(parallel: int) -> None:
    spec = RunSpec(
        task="text-gpt", micro_batch=8, accumulation=3, nproc_per_node=4, lr=0.1, warmup_steps=5, optimizer="sgd", tensor_parallel=parallel
    )
    plan = BatchPlan.of(spec)
    assert plan.global_batch == spec.global_batch
    assert spec.replace(**plan.changes()) == spec
    assert plan.reasons["lr"] == "as in the spec"
    wider = spec.replace(**plan.scaled_to(world_size=8).changes())
    assert wider.nproc_per_node == 8 * parallel
    assert wider.global_batch == 8 * 3 * 8


def test_the_tasks_own_optimizer_stays() -> None:
    spec = RunSpec(task="fashion-mlp", micro_batch=8)
    with pytest.raises(ValueError, match=r"leaves the learning rate to the task's own optimizer: give lr=… and optimizer=…"):
        BatchPlan.of(spec)
    plan = BatchPlan.of(spec, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.0})
    assert (plan.lr, plan.optimizer, plan.own) == (0.1, "sgd", True)
    assert "optimizer" not in plan.scaled_to(global_batch=32).changes()
    adam = BatchPlan.of(spec.replace(optimizer="fused"), lr=0.01, optimizer="adam").scaled_to(global_batch=16)
    assert adam.changes()["optimizer"].startswith("adam(betas=(0.8,")
    assert BatchPlan.of(spec.replace(optimizer="adamw(lr=0.3)")).lr == 0.3
    assert BatchPlan.of(spec.replace(optimizer="adamw")).lr == 1e-3


def test_no_optimizer_is_known() -> None:
    plan = BatchPlan.of(RunSpec(task="fashion-mlp", micro_batch=8, lr=0.1))
    assert plan.optimizer is None
    with pytest.raises(ValueError, match=r"rule=\"auto\" depends on the optimizer, and this plan does not say which"):
        plan.scaled_to(global_batch=16)
    assert plan.scaled_to(global_batch=16, rule="linear").lr == 0.2


def test_it_shows_itself() -> None:
    text = str(PLAN)
    assert "32 × 2 × 2 samples per optimizer step" in text
    assert "as given" in text
    assert "global batch" in PLAN._repr_html_()
    assert PLAN.to_frame().set_index("name").loc["global_batch", "value"] == 128
    assert repr(PLAN) == "BatchPlan(32 × 2 × 2 = 128, lr=0.1)"
    assert "global batch of 128 or 192" in str(PLAN.scaled_to(global_batch=146))


@pytest.mark.parametrize("plan", [PLAN, PLAN.scaled_to(global_batch=512, noise_scale=100)])
def test_there_and_back_as_json(plan: BatchPlan) -> None:
    assert BatchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"micro_batch": 0}, "micro_batch=0: a whole number of at least 1 is allowed"),
        ({"world_size": 2.0}, r"world_size=2\.0: a whole number of at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1: a whole number of at least 0"),
        ({"lr": -1.0}, r"lr=-1\.0: a number above 0 is allowed"),
        ({"optimizer": "sgdd"}, "did you mean 'sgd'"),
    ],
)
def test_what_makes_no_plan(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BatchPlan(**{"micro_batch": 8, "lr": 0.1, **changes})


def test_what_it_cannot_be_scaled_to() -> None:
    with pytest.raises(ValueError, match=r"scaled_to\(\) needs global_batch=…, world_size=… or both"):
        PLAN.scaled_to()
    with pytest.raises(ValueError, match="cannot be divided over 3 ranks without a remainder: try 63 or 66"):
        PLAN.scaled_to(global_batch=64, world_size=3)
    with pytest.raises(ValueError, match=r"world_size=0: a whole number of at least 1"):
        PLAN.scaled_to(world_size=0)
    with pytest.raises(ValueError, match="outside the rule's domain"):
        PLAN.scaled_to(global_batch=12800, rule="linear", noise_scale=10, strict=True)
    with pytest.raises(ValueError, match='micro_batch="auto" is chosen when a run starts'):
        BatchPlan.of(RunSpec(task="text-gpt", micro_batch="auto", lr=0.1, optimizer="sgd"))


def test_numbers_of_numpy_become_plain() -> None:
    given = BatchPlan(micro_batch=np.int64(32), accumulation=np.int64(2), world_size=np.int64(2), lr=np.float64(0.1), optimizer="sgd")  # type: ignore[arg-type]
    for plan in (
        given,
        given.scaled_to(global_batch=np.int64(512)),  # type: ignore[arg-type]
        given.scaled_to(world_size=np.int64(4), micro_batch=np.int64(16)),  # type: ignore[arg-type]
    ):
        assert BatchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert split_batch(np.int64(96), np.int64(2), np.int64(20)) == split_batch(96, 2, 20)  # type: ignore[arg-type]


def test_a_mapping_is_kept_as_its_text() -> None:
    plan = BatchPlan(micro_batch=8, lr=0.1, optimizer={"name": "sgd", "momentum": 0.9})  # type: ignore[arg-type]
    assert plan.optimizer == "sgd(momentum=0.9)"
    with pytest.raises(ValueError, match="sgd has no option 'momentun'; did you mean 'momentum'"):
        BatchPlan(micro_batch=8, lr=0.1, optimizer="sgd(momentun=0.9)")
