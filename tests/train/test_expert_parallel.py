"""Divided experts: what is refused, what the exchange does to rows, how the balance is counted, and what is predicted."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import workbench as wb
from tests import toy_tasks
from workbench.diagnosis.measure.step_replay import whole
from workbench.memory.estimate.fake_process_group import fake_process_group
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.task import resolve
from workbench.train.expert_parallel import DividedExperts, Exchange, ExpertBalance
from workbench.train.models import Experts, MoeGpt
from workbench.train.ranks import Layout, Ranks, join_group_creation

MOE = "workbench.train.tasks:moe_gpt"


def spec_of(**knobs: Any) -> RunSpec:
    return RunSpec(**{"task": MOE, "device": "cpu", "nproc_per_node": 4, "expert_parallel": 2, **knobs})


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"expert_parallel": 3}, r"expert_parallel=3 does not divide the 4 ranks \(nproc_per_node\): try expert_parallel=2"),
        ({"expert_parallel": 0}, "expert_parallel=0"),
        ({"parallel": "fsdp"}, 'parallel="fsdp" with expert_parallel=2: experts that are divided and sharded are not built here'),
        ({"parallel": "zero1"}, 'parallel="zero1" with expert_parallel=2'),
        ({"tensor_parallel": 2}, "tensor_parallel=2 with expert_parallel=2: split layers beside divided experts are not built here"),
        (
            {"pipeline_parallel": 2, "accumulation": 2},
            "pipeline_parallel=2 with expert_parallel=2: experts that are divided inside of stages are not built here",
        ),
        ({"micro_batch": "auto"}, 'micro_batch="auto" with expert_parallel=2: .* give a number'),
        ({"precision": "amp_fp16"}, 'precision="amp_fp16" with expert_parallel=2: .* try "amp_bf16"'),
        ({"compile": "blocks"}, 'compile="blocks" with expert_parallel=2'),
        ({"offload": "activations"}, 'offload="activations" with expert_parallel=2'),
        ({"gradient_compression": "fp16"}, 'gradient_compression="fp16" with expert_parallel=2'),
        ({"noise_scale": True}, "noise_scale=True with expert_parallel=2"),
        ({"local_sgd": "periodic"}, 'expert_parallel=2 with local_sgd="periodic": parameters are averaged over all ranks'),
    ],
)
def test_what_does_not_combine_is_refused_before_the_launch(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        spec_of(**knobs)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"local_sgd": "weekly"}, "local_sgd='weekly'.*allowed"),
        ({"local_sgd": "periodic(period=0)"}, "period=0"),
        ({"local_sgd": "periodic(start=-1)"}, "start=-1"),
        ({"local_sgd": "periodic(local_ranks=3)"}, "local_ranks=3 does not divide the 4 ranks"),
        ({"parallel": "zero1"}, 'parallel="zero1" with local_sgd="periodic": the ranks share'),
        ({"evaluate": "every(steps=5)"}, r'evaluate="every\(steps=5\)" with local_sgd.*; try evaluate="end"'),
        ({"gradient_compression": "fp16"}, 'gradient_compression="fp16" with local_sgd'),
        ({"tensor_parallel": 2}, "tensor_parallel=2 with local_sgd"),
        ({"precision": "amp_fp16"}, 'precision="amp_fp16" with local_sgd'),
        ({"ema": 0.9}, "ema=0.9 with local_sgd"),
        ({"offload": "optimizer"}, 'offload="optimizer" with local_sgd.* would not be averaged'),
    ],
)
def test_what_does_not_combine_with_local_sgd(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        spec_of(**{"expert_parallel": 1, "local_sgd": "periodic", **knobs})


@pytest.mark.parametrize(
    "knobs",
    [{"local_sgd": "periodic(local_ranks=2)"}, {"expert_parallel": 2}, {"pipeline_parallel": 2, "accumulation": 2}, {"parallel": "fsdp"}],
)
def test_a_rank_that_a_spec_does_not_use_takes_part_in_creating_its_groups(knobs: dict[str, Any]) -> None:
    with fake_process_group(4, 3):
        join_group_creation(spec_of(**{"expert_parallel": 1, "nproc_per_node": 2, **knobs}), [0, 1])


@pytest.mark.parametrize("knobs", [{"expert_parallel": 2}, {"expert_parallel": 1, "local_sgd": "periodic"}])
def test_experiments_that_step_on_some_ranks_alone_are_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"diagnose: {list(knobs)[-1]}=.* exchange; leave {list(knobs)[-1]} out"):
        wb.diagnose(spec_of(**knobs))


def test_ranks_with_experts_read_different_samples() -> None:
    spec = spec_of(micro_batch=8)
    assert (spec.data_ranks, spec.global_batch, spec.whole_models) == (4, 32, False)


def test_memory_and_bytes_are_predicted() -> None:
    spec = RunSpec(task=MOE, micro_batch=4, device="cpu", nproc_per_node=2, optimizer="adamw")
    layer = 4 * sum(weight.numel() for name, weight in resolve(MOE).model().named_parameters() if name.endswith((".up", ".down")))
    whole, half = (wb.estimate_memory(spec.replace(expert_parallel=ways), device="cpu") for ways in (1, 2))
    assert whole.parameters - half.parameters == layer // 2
    assert whole.largest["optimizer_states"] - half.largest["optimizer_states"] == layer
    traffic = {ways: wb.collectives(spec.replace(expert_parallel=ways)) for ways in (1, 2)}
    exchanged = [call for call in traffic[2].calls if call.kind == "all_to_all"]
    assert len(exchanged) == 2 * 2 * 2  # there and back, in the forward and in the backward of two layers
    capacity = -(-1.25 * 2 * 64 // 4)
    assert {call.size for call in exchanged} == {4 * 4 * 4 * capacity * 64}  # float32 × experts × samples × capacity × width
    assert {(call.axis, call.waited) for call in exchanged} == {("expert", True)}
    reduced = {ways: sum(call.size for call in traffic[ways].calls if call.kind == "all_reduce") for ways in traffic}
    assert reduced[1] - reduced[2] == layer  # the gradients of the experts are not reduced
    copies = wb.collectives(spec.replace(nproc_per_node=4, expert_parallel=2))
    assert sum(call.size for call in copies.calls if call.axis == "copy") == layer // 2
    assert all(call.waited for call in copies.calls if call.axis == "copy")  # after the backward
    assert "inside a node" in next(found.tries for found in traffic[2].lint if found.kind == "waited")
    averaged = wb.collectives(spec.replace(local_sgd="periodic(period=4)"))
    assert "larger period" in next(found.tries for found in averaged.lint if found.kind == "waited")


def test_one_process_repeats_a_run_of_divided_experts() -> None:
    alone = whole(spec_of(nproc_per_node=2))
    assert (alone.expert_parallel, alone.nproc_per_node, alone.replace(nproc_per_node=1).world_size) == (1, 2, 1)


def test_a_plan_for_a_spec_with_local_sgd_leaves_it_out() -> None:
    spec = spec_of(task="text-gpt", expert_parallel=1, local_sgd="periodic(local_ranks=2)")
    plan = wb.plan(spec, "DGX-H100", gpus=8).best
    assert spec.replace(**plan.changes()).local_sgd == "none"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_launch_measures_what_was_predicted_and_shows_the_balance(tmp_path: Any) -> None:
    spec = RunSpec(task=MOE, micro_batch=8, device="cpu", nproc_per_node=2, expert_parallel=2, steps=4, evaluate=True)
    run = wb.launch(spec, runs_dir=tmp_path).wait(check=True)
    rows = [row for row in run.metric_rows if "lr" in row]
    assert all(len(row["expert_shares"]) == 4 and sum(row["expert_shares"]) == pytest.approx(1) for row in rows)
    assert all(0 <= row["dropped_tokens"] < 0.5 for row in rows)
    assert "bits_per_byte" in run.metric_rows[-1]
    predicted, measured = wb.estimate_memory(spec, device="cpu"), wb.measure_memory(spec, runs_dir=tmp_path)
    for part in ("parameters", "gradients", "optimizer_states", "activations"):
        assert abs(getattr(measured, part) - getattr(predicted, part)) < 1024, str(measured - predicted)
    sent = max(call.size for call in wb.collectives(spec).calls if call.kind == "all_to_all")
    held = (measured.total - predicted.total) / sent  # exchanges whose buffers gloo still holds: 0 to 2 were seen, out of 8 in a step
    assert -0.1 < held < 4.1, str(measured - predicted)


def test_an_exchange_with_oneself_changes_nothing(alone: Ranks) -> None:
    torch.manual_seed(0)
    layer, x = Experts(8, 4), torch.randn(2, 6, 8, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    kept, x.grad = (x.grad, layer.up.grad), None
    layer.exchange, layer.up.grad = Exchange(dist.group.WORLD), None  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x))  # an evaluation asks for the sizes
    layer(x).square().sum().backward()
    assert torch.equal(x.grad, kept[0])
    assert torch.equal(layer.up.grad, kept[1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (toy_tasks.network, r"expert_parallel=2: the Sequential has no layers of experts; leave it out, or give .*expert_parameters"),
        (
            partial(MoeGpt, width=16, layers=1, heads=2, experts=3),
            "expert_parallel=2 does not divide the 3 experts of layers.0.mlp; try exp",
        ),
    ],
)
def test_a_model_that_cannot_be_divided(model: Any, said: str, alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh.from_group([dist.group.WORLD] * 2, "cpu", mesh=torch.tensor([[0]]), mesh_dim_names=("copy", "expert"))
    monkeypatch.setattr(type(mesh), "size", lambda mesh, axis=None: 2)
    with pytest.raises(SpecError, match=said):
        DividedExperts(model(), Layout(readers=alone, data=None, experts=mesh), alone.device)
    with pytest.raises(SpecError, match="expert_parallel=2 does not divide the 1 ranks of this launch"):
        Layout.of(spec_of(), alone)


def test_the_balance_is_what_the_router_chose() -> None:
    torch.manual_seed(0)
    model = MoeGpt(length=16, width=16, layers=2, heads=2)
    balance = ExpertBalance(model)
    assert balance.take() is None
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.router.weight.zero_()  # type: ignore[union-attr]
            layer.mlp.router.weight[2:] -= 1.0  # type: ignore[union-attr,index]
    tokens = torch.randint(0, 256, (3, 16))
    model.eval()(tokens)
    assert balance.take() is None  # an evaluation does not count
    model.train()(tokens)
    model(tokens)
    shares = balance.take()
    assert shares is not None
    assert shares.shape == (5,)
    assert float(shares[:4].sum()) == pytest.approx(1.0)
    chosen = model.layers[0].mlp.router.weight  # type: ignore[union-attr]
    assert chosen.shape == (4, 16)
    assert balance.take() is None
    for layer in model.layers:
        layer.mlp.router.weight.data.zero_()  # type: ignore[union-attr,operator]
    model(tokens)  # a tie: each token takes the same two, which have room for 10 of 16 tokens
    shares = balance.take()
    assert shares is not None
    assert sorted(shares[:4].tolist()) == [0.0, 0.0, 0.5, 0.5]
    assert float(shares[4]) == pytest.approx(6 / 16)
    assert ExpertBalance(toy_tasks.network()).take() is None
