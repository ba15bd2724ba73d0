"""A model on two ranks: in whatever way they share it, it learns the same; and what does not fit is said."""

import contextlib
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel, distributed

import workbench as wb
from tests import toy_tasks
from tests.forked import Forks
from tests.scripts import sharing
from workbench.batch.measure.noise_watch import NoiseLog
from workbench.cluster.analysis.pipeline_idle import pipeline_idle
from workbench.core import run_directory
from workbench.memory.measure.at_oom import held
from workbench.runs.rows import RunRows
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.task import TaskError
from workbench.train import loop, sharding
from workbench.train.models import Gpt
from workbench.train.optimizers import build_optimizer, place_optimizer
from workbench.train.ranks import Layout, Ranks
from workbench.train.sharded_tensors import clip_gradients, keeping_attributes
from workbench.train.tensor_parallel import _own_plan, styles_of
from workbench.train.trainer import Trainer

TOYS = Path(__file__).parents[1] / "toy_tasks.py"
SCRIPT = Path(__file__).parents[1] / "scripts" / "sharing.py"

CLIPPED = {"optimizer": "sgd(lr=0.3)", "clip_grad_norm": 0.5}
MANY = {
    "steps": 3,
    "accumulation": 2,
    "clip_grad_norm": 0.5,
    "warmup_steps": 2,
    "schedule": "cosine",
    "optimizer": "sgd(lr=0.3, momentum=0.9)",
}
SPLIT = {"micro_batch": 8, "tensor_parallel": 2}
BOTH = {**SPLIT, **CLIPPED}
STAGED = {"micro_batch": 4, "accumulation": 4, "pipeline_parallel": 2, "clip_grad_norm": 0.5, "optimizer": "sgd(lr=0.3, momentum=0.9)"}
GROUPS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "plain": {
        "ddp": ("gpt", {}),
        "bucket view": ("gpt", {"gradient_as_bucket_view": True}),
        "static graph": ("gpt", {"static_graph": True}),
        "static graph, full": ("gpt", {"static_graph": True, "checkpointing": "full"}),
        "static graph, zero1": ("gpt", {"static_graph": True, "parallel": "zero1"}),
        "zero1": ("gpt", {"parallel": "zero1"}),
        "zero2": ("gpt", {"parallel": "zero2"}),
        "fsdp": ("gpt", {"parallel": "fsdp"}),
        "hsdp, shards of 1": ("gpt", {"parallel": "hsdp", "shard_ranks": 1}),
        "hsdp, shards of 2": ("gpt", {"parallel": "hsdp", "shard_ranks": 2}),
        "full": ("gpt", {"checkpointing": "full"}),
        "selective": ("gpt", {"checkpointing": "selective"}),
        "fsdp, selective": ("gpt", {"parallel": "fsdp", "checkpointing": "selective"}),
        "fsdp, full": ("gpt", {"parallel": "fsdp", "checkpointing": "full"}),
        "optimizer on the host": ("gpt", {"offload": "optimizer"}),
        "zero1, on the host": ("gpt", {"parallel": "zero1", "offload": "optimizer"}),
        "fsdp, on the host": ("gpt", {"parallel": "fsdp", "offload": "optimizer"}),
        "activations on the host": ("gpt", {"offload": "activations"}),
        "fsdp, activations on the host": ("gpt", {"parallel": "fsdp", "offload": "activations"}),
    },
    "many": {
        "ddp": ("gpt", MANY),
        "zero1": ("gpt", {**MANY, "parallel": "zero1"}),
        "zero2": ("gpt", {**MANY, "parallel": "zero2"}),
        "fsdp": ("gpt", {**MANY, "parallel": "fsdp"}),
        "hsdp, shards of 1": ("gpt", {**MANY, "parallel": "hsdp", "shard_ranks": 1}),
    },
    "grouped": {
        "ddp": ("grouped", {"optimizer": "fused"}),
        "zero1, fused": ("grouped", {"parallel": "zero1", "optimizer": "fused"}),
        "zero1, foreach": ("grouped", {"parallel": "zero1", "optimizer": "foreach"}),
        "fsdp, foreach": ("grouped", {"parallel": "fsdp", "optimizer": "foreach"}),
        "fsdp, fused": ("grouped", {"parallel": "fsdp", "optimizer": "fused"}),
    },
    "dropout": {
        "ddp": ("dropping", {}),
        "full": ("dropping", {"checkpointing": "full"}),
        "selective": ("dropping", {"checkpointing": "selective"}),
    },
    "unseeded": {
        "ddp": ("unseeded", {}),
        "fsdp": ("unseeded", {"parallel": "fsdp"}),
        "split": ("unseeded", SPLIT),
    },
    "tied": {
        "ddp": ("tied", {}),
        "zero1": ("tied", {"parallel": "zero1"}),
        "fsdp": ("tied", {"parallel": "fsdp"}),
        "full": ("tied", {"checkpointing": "full"}),
    },
    "pictures": {
        "ddp": ("pictures", {"channels_last": True}),
        "fsdp": ("pictures", {"channels_last": True, "parallel": "fsdp"}),
        "selective": ("pictures", {"channels_last": True, "checkpointing": "selective"}),
    },
    "split": {  # two ranks of 8 samples each are those of two ranks of 4, dealt out otherwise
        "ddp": ("gpt", CLIPPED),
        "split": ("gpt", BOTH),
        "split, static graph": ("gpt", {**BOTH, "static_graph": True}),
        "split, zero1": ("gpt", {**BOTH, "parallel": "zero1"}),
        "split, fsdp": ("gpt", {**BOTH, "parallel": "fsdp"}),
        "split, hsdp": ("gpt", {**BOTH, "parallel": "hsdp"}),
        "split, fsdp, foreach": ("gpt", {**BOTH, "parallel": "fsdp", "optimizer": "sgd(lr=0.3, foreach=True)"}),
        "split, full": ("gpt", {**BOTH, "checkpointing": "full"}),
    },
    "stages": {  # two ranks of 2 samples each are a pipeline of 4
        "ddp": ("gpt", {**STAGED, "micro_batch": 2, "pipeline_parallel": 1}),
        "gpipe": ("counted", {**STAGED, "pipeline_schedule": "gpipe"}),
        "1f1b, full": ("gpt", {**STAGED, "checkpointing": "full"}),
        "interleaved": ("counted", {**STAGED, "pipeline_schedule": "interleaved"}),
        "zero_bubble": ("counted", {**STAGED, "pipeline_schedule": "zero_bubble"}),
        "zero1": ("gpt", {**STAGED, "parallel": "zero1"}),
    },
    "experts": {
        "ddp": ("mixture", CLIPPED),
        "divided": ("counted_mixture", {**CLIPPED, "expert_parallel": 2}),
        "divided, static graph": ("mixture", {**CLIPPED, "expert_parallel": 2, "static_graph": True}),
        "divided, full": ("mixture", {**CLIPPED, "expert_parallel": 2, "checkpointing": "full"}),
        "divided, in two": ("mixture", {**CLIPPED, "expert_parallel": 2, "micro_batch": 2, "accumulation": 2}),
    },
    "stages of pictures": {
        "ddp": ("pictures", {**STAGED, "pipeline_schedule": "gpipe"}),
        "interleaved": ("pictures", {**STAGED, "pipeline_schedule": "interleaved", "channels_last": True}),
    },
}
LAYERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"parallel": "zero1"},
    "fsdp": {"parallel": "fsdp"},
    "fsdp, on the host": {"parallel": "fsdp", "offload": "optimizer"},
    "split": SPLIT,
    "split, fsdp": {**SPLIT, "parallel": "fsdp"},
}
"""For optimizers that need norms of whole parameters."""
NORMS = {
    group: {name: ("gpt", {"optimizer": optimizer, **knobs}) for name, knobs in LAYERS.items()}
    for group, optimizer in (("lars", "lars(lr=5.0, weight_decay=0.01)"), ("lamb", "lamb(lr=0.01)"))
}
HALF: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "bf16": {"ddp": ("gpt", {"precision": "amp_bf16"}), "fsdp": ("gpt", {"precision": "amp_bf16", "parallel": "fsdp"})},
    "fp16": {"ddp": ("gpt", {"precision": "amp_fp16"}), "fsdp": ("gpt", {"precision": "amp_fp16", "parallel": "fsdp"})},
    "bf16 pictures": {
        "ddp": ("pictures", {"precision": "amp_bf16"}),
        "fsdp": ("pictures", {"precision": "amp_bf16", "parallel": "fsdp"}),
    },
}
LAUNCHED: list[dict[str, Any]] = [{}, {"parallel": "fsdp"}, {"parallel": "hsdp", "shard_ranks": 1}, {"parallel": "fsdp", "accumulation": 2}]
LAUNCHED += [{"accumulation": 2, "pipeline_parallel": 2}]
LOCAL: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (6, {}),
    "before its start": (6, {"local_sgd": "periodic(period=3, start=6)"}),
    "each step": (6, {"local_sgd": "periodic(period=1, start=0)", "clip_grad_norm": None}),
    "ddp, not clipped": (6, {"clip_grad_norm": None}),
    "periodic": (6, {"local_sgd": "periodic(period=3, start=0)"}),
    "among both": (6, {"local_sgd": "periodic(period=3, start=0, local_ranks=2)"}),
}
COMPRESSED = {kind: {"gradient_compression": kind} for kind in ("fp16", "powersgd(start=2)", "powersgd(rank=2, start=2)")}
RAGGED = {"micro_batch": 2, "accumulation": 4, "optimizer": "sgd(lr=0.3)"}
WEIGHED: dict[str, tuple[str, dict[str, Any]]] = {
    "at once": ("weighed", {**RAGGED, "micro_batch": 8, "accumulation": 1}),
    "ddp": ("weighed", RAGGED),
    "zero1": ("weighed", {**RAGGED, "parallel": "zero1"}),
    "fsdp": ("weighed", {**RAGGED, "parallel": "fsdp"}),
    "split": ("weighed", {**RAGGED, "micro_batch": 4, "tensor_parallel": 2}),
    "1f1b": ("weighed", {**RAGGED, "micro_batch": 4, "pipeline_parallel": 2}),
    "zero_bubble": ("weighed", {**RAGGED, "micro_batch": 4, "pipeline_parallel": 2, "pipeline_schedule": "zero_bubble"}),
    "each the same": ("ragged", RAGGED),
}
"""Micro-batches with different numbers of targets; of the same samples in each step. Where both ranks read the same, there is one mean."""
PAIRS = [(group, name) for group, cases in GROUPS.items() for name in cases if name != "ddp"]


def spec_of(**knobs: Any) -> RunSpec:
    return RunSpec(**{"task": "toy", "device": "cpu", "micro_batch": 8, "steps": 4, **knobs})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, dict[str, Any]]:
    """What two ranks found out, by "group: name"; one launch for all."""
    cases: dict[str, Any] = {f"{group}: {name}": case for group, some in {**GROUPS, **NORMS, **HALF}.items() for name, case in some.items()}
    cases["fused sgd"] = ("gpt", {"parallel": "fsdp", "optimizer": "sgd(lr=0.1, fused=True)"})
    cases["split, fused"] = ("gpt", {**SPLIT, "parallel": "fsdp", "optimizer": "adamw(fused=True)"})
    cases |= {f"local: {name}": ("counted", {**CLIPPED, "steps": steps, **knobs}) for name, (steps, knobs) in LOCAL.items()}
    cases |= {f"compressed: {name}": ("compressed", {"steps": 4, **knobs}) for name, knobs in COMPRESSED.items()}
    cases |= {f"weighed: {name}": case for name, case in WEIGHED.items()}
    muon = {**STAGED, "optimizer": "muon(lr=0.02)"}  # with one of two blocks in each stage
    cases |= {"muon": ("gpt", {**muon, "micro_batch": 2, "pipeline_parallel": 1}), "muon in stages": ("gpt", muon)}
    cases["denoising"] = ("denoising", STAGED)
    cases |= {"no plan": ("unplanned", SPLIT), "bypassed": ("bypassed", {"accumulation": 2}), "taught": ("taught", {})}
    path = tmp_path_factory.mktemp("sharing") / "cases.json"
    path.write_text(json.dumps(cases))
    folders = [path.parent / f"{place}" for place in range(len(LAUNCHED))]
    for folder, knobs in zip(folders, LAUNCHED, strict=True):
        folder.mkdir()
        spec = RunSpec(task=f"{TOYS}:numbers", device="cpu", micro_batch=8, steps=6, nproc_per_node=2, evaluate=True, **knobs)
        run_directory.write_json(folder / run_directory.RUN_JSON, {"spec": spec.to_json()})
    done = forks.ranks(2, path.parent, SCRIPT, path, *folders, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(path.with_suffix(".out").read_text())
    for folder in folders:
        found[f"launched: {folder.name}"] = {
            "rows": run_directory.LineTail(folder / run_directory.METRICS).read(),
            **(info := run_directory.read_json(folder / run_directory.RUN_JSON)),
            "idle": pipeline_idle(RunSpec.from_json(info["spec"]), RunRows(folder).all_means),
        }
    return found


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """A process group of this process alone."""
    threads = torch.get_num_threads()
    yield Ranks.join(spec_of())
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("group", "name"), PAIRS)
def test_two_ranks_learn_the_same(results: dict[str, dict[str, Any]], group: str, name: str) -> None:
    usual, other = results[f"{group}: ddp"], results[f"{group}: {name}"]
    assert "error" not in other
    assert other["losses"] == pytest.approx(usual["losses"], abs=1e-5)
    assert other["figures"] == pytest.approx(usual["figures"], rel=1e-6)
    assert usual["losses"][-1] != pytest.approx(usual["losses"][0], abs=1e-3)  # it has gone somewhere


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "ddp"])
@pytest.mark.parametrize("group", NORMS)
def test_norms_are_those_of_whole_parameters(results: dict[str, dict[str, Any]], group: str, name: str) -> None:
    usual, other = results[f"{group}: ddp"], results[f"{group}: {name}"]
    assert other["losses"] == pytest.approx(usual["losses"], abs=1e-5)
    assert other["figures"] == pytest.approx(usual["figures"], rel=1e-6)
    assert usual["losses"][-1] < usual["losses"][0] - 1e-3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it from 2.9 on")
def test_stages_of_one_block_use_muon_for_the_same_matrices(results: dict[str, dict[str, Any]]) -> None:
    usual, other = results["muon"], results["muon in stages"]
    assert other["losses"] == pytest.approx(usual["losses"], abs=1e-5)
    assert other["figures"] == pytest.approx(usual["figures"], rel=1e-5)  # it computes in bf16
    assert usual["losses"][-1] < usual["losses"][0] - 1e-3


@pytest.mark.parametrize("group", HALF)
def test_mixed_precision_is_near(results: dict[str, dict[str, Any]], group: str) -> None:
    usual, other = results[f"{group}: ddp"], results[f"{group}: fsdp"]
    assert other["losses"] == pytest.approx(usual["losses"], abs=5e-3)
    assert other["losses"][0] != results["plain: ddp"]["losses"][0]


def test_ranks_exchange_batches_of_different_sizes_in_an_evaluation(results: dict[str, dict[str, Any]]) -> None:
    assert 0 <= results["experts: divided"]["uneven"] < 1e-5


def test_ranks_exchange_batches_of_different_sizes_and_lengths_in_a_training(results: dict[str, dict[str, Any]]) -> None:
    for name in ("divided", "divided, full", "divided, in two"):
        assert 0 < results[f"experts: {name}"]["uneven gradients"] < 1e-4, name


def test_each_target_counts_the_same_in_whatever_micro_batch_and_rank_it_is(results: dict[str, dict[str, Any]]) -> None:
    found = {name: results[f"weighed: {name}"]["figures"] for name in WEIGHED}
    usual = found.pop("1f1b")  # all samples of a step have one mean
    other = found.pop("each the same")
    for name, figures in found.items():
        assert figures == pytest.approx(usual, rel=1e-6), name
    assert other != pytest.approx(usual, rel=1e-4)
    losses = {name: results[f"weighed: {name}"]["losses"] for name in ("ddp", "at once", "fsdp")}
    assert losses["ddp"] == pytest.approx(losses["at once"], abs=1e-5) == losses["fsdp"]


def test_what_each_rank_keeps(results: dict[str, dict[str, Any]]) -> None:
    plain = {name: (results[f"plain: {name}"]["weights"], results[f"plain: {name}"]["states"]) for name in GROUPS["plain"]}
    weights = sum(weight.numel() for weight in Gpt(**sharing.SIZES).parameters())
    whole, half = (weights, 2 * weights), (weights // 2, weights)
    assert plain["ddp"] == plain["hsdp, shards of 1"] == whole
    assert plain["zero2"] == plain["fsdp"] == plain["hsdp, shards of 2"] == half
    assert plain["zero1"][0] == weights
    assert plain["zero1"][1] == pytest.approx(weights, rel=0.2)  # whole parameters are dealt out
    assert results["split: split"]["weights"] < weights
    halves = {results[f"stages: {name}"]["weights"] for name in ("gpipe", "1f1b, full", "zero1")}
    assert len(halves) == 1
    assert 0.4 * weights < max(halves) < 0.6 * weights  # the other stage has the head


def test_what_a_dry_run_is_told_of_the_host(results: dict[str, dict[str, Any]]) -> None:
    """Bytes of the copies: weights once, gradients in each step; of activations a good deal."""
    weights = 4 * results["plain: ddp"]["weights"]
    assert results["plain: ddp"]["host"] == 0
    assert results["plain: optimizer on the host"]["host"] == weights * (1 + sharing.STEPS)
    assert results["plain: zero1, on the host"]["host"] == pytest.approx(weights * (1 + sharing.STEPS) / 2, rel=0.2)
    assert results["plain: fsdp, on the host"]["host"] == weights * (1 + sharing.STEPS) / 2
    assert results["plain: activations on the host"]["host"] > weights


def test_a_launch_evaluates_the_whole_model_once(results: dict[str, dict[str, Any]]) -> None:
    """One spec after the other in the same processes; the evaluation, on rank 0, takes the weights to be whole."""
    runs = [results[f"launched: {place}"] for place in range(len(LAUNCHED))]
    assert [run["outcome"]["state"] for run in runs] == ["finished"] * len(runs)
    usual, *others = ([value for name, value in run["rows"][-1].items() if name[0] == "p"] for run in runs)
    assert len(usual) == 58
    assert others[0] == others[1] == pytest.approx(usual, abs=1e-6)
    assert others[3] == pytest.approx(usual, abs=1e-6)  # two micro-batches through two stages
    idle = runs[4]["idle"]
    assert (idle.bubble, idle.predicted, len(idle.stages)) == (0.5, pytest.approx(1 / 3), 2)
    assert all(0 < stage.idle < 1 and stage.computes > 0 for stage in idle.stages), idle
    assert runs[0]["idle"] is None
    assert len(others[2]) == 58
    assert others[2] != pytest.approx(usual, abs=1e-4)  # with twice the samples per step
    assert runs[0]["rows"][-2]["samples"] == runs[1]["rows"][-2]["samples"] == 6 * 16


def test_both_ends_of_a_pipeline_draw_the_same_random_numbers_for_a_loss(results: dict[str, dict[str, Any]]) -> None:
    assert results["denoising"]["losses"] == [0.0] * sharing.STEPS


def test_local_sgd_averages_parameters_now_and_then(results: dict[str, dict[str, Any]]) -> None:
    found = {name: results[f"local: {name}"] for name in LOCAL}
    assert found["before its start"]["losses"] == pytest.approx(found["ddp"]["losses"], abs=1e-6)
    assert found["each step"]["losses"] == pytest.approx(
        found["ddp, not clipped"]["losses"], abs=1e-5
    )  # the mean of steps is a step of means
    assert found["among both"]["losses"] == pytest.approx(found["ddp"]["losses"], abs=1e-5)
    losses = found["periodic"]["losses"]
    assert losses[0] == pytest.approx(found["ddp"]["losses"][0], abs=1e-6)
    assert losses[-1] < losses[0]
    assert losses[-1] != pytest.approx(found["ddp"]["losses"][-1], abs=1e-4)
    assert all(each["equal"] for each in found.values())  # after the last step at the latest all ranks have one model


def test_the_bytes_that_ranks_send_are_those_predicted(results: dict[str, dict[str, Any]]) -> None:
    for name, task, knobs, kind in (
        ("experts: divided", sharing.mixture(), {"expert_parallel": 2}, "all_to_all"),
        ("local: periodic", sharing.gpt(), LOCAL["periodic"][1], "all_reduce"),
    ):
        traffic = wb.collectives(task, world_size=2, micro_batch=4, **{**CLIPPED, **knobs})
        measured, steps = results[name]["sent"], 6 if name.startswith("local") else sharing.STEPS
        predicted = steps * sum(call.size for call in traffic.calls if call.kind == kind)
        assert 0 < measured[kind] == pytest.approx(predicted, abs=steps), name  # a third of the bytes is rounded in each step
    usual = wb.collectives(sharing.gpt(), world_size=2, micro_batch=4)
    assert traffic.sent() == pytest.approx(usual.sent() / 3, rel=1e-3)
    assert traffic.notes[-1].endswith("averaged once in 3 steps, and each step is counted with 1/3 of their bytes and seconds")


def test_the_bytes_of_compressed_gradients_are_those_predicted(results: dict[str, dict[str, Any]]) -> None:
    usual = wb.collectives(sharing.gpt(), world_size=2, micro_batch=4).size()
    sizes = []
    for name, knobs in COMPRESSED.items():
        traffic = wb.collectives(sharing.gpt(), world_size=2, micro_batch=4, **knobs)
        assert results[f"compressed: {name}"]["hooked"] == traffic.size() > 0, name
        assert traffic.calls[-1].waited
        assert traffic.notes[-1].endswith("bytes are those sent; the time to compress is not predicted")
        sizes.append(traffic.size())
    half, thin, thicker = sizes
    assert half == usual / 2
    assert thin < thicker < half
    assert wb.collectives(sharing.gpt(), world_size=2, micro_batch=4, gradient_compression="bf16").size() == half


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble"])
def test_the_messages_between_stages_are_those_predicted(results: dict[str, dict[str, Any]], schedule: str) -> None:
    traffic = wb.collectives(sharing.gpt(), world_size=2, **{**STAGED, "pipeline_schedule": schedule})
    assert "rank 0 is shown" in traffic.notes[0]
    measured = results[f"stages: {schedule}"]["sent"]
    for kind in ("send", "recv", "broadcast"):
        assert 0 < measured[kind] == sharing.STEPS * sum(call.size for call in traffic.of(kind)), kind


def test_a_split_without_a_plan(results: dict[str, dict[str, Any]]) -> None:
    assert results["no plan"]["error"].startswith("SpecError: tensor_parallel=2: the task has no plan, and its Gpt brings none of its own")


def test_a_loss_that_bypasses_the_wrapper(results: dict[str, dict[str, Any]]) -> None:
    """It would train a model on each rank. Calls without gradients do not count; nor does it matter what is called beside the model."""
    assert results["bypassed"]["error"].startswith(
        "TaskError: the task's loss(model, batch) did not call model(…) itself, and only then are the gradients of the ranks averaged"
    )
    assert results["taught"]["equal"]


def test_fused_where_weights_are_shared(results: dict[str, dict[str, Any]]) -> None:
    assert "for sharded parameters torch has fused steps of adam and adamw only; try foreach" in results["fused sgd"]["error"]
    assert len(results["split, fused"]["losses"]) == sharing.STEPS


def test_checkpoints_go_on_in_the_same_layout_and_in_others(results: dict[str, dict[str, Any]]) -> None:
    found = results["checkpoints"]
    assert len(found) == 8 + 7
    assert not {name: text for name, text in found.items() if text}


# --- alone


def test_the_wrapper_is_known_by_its_name(alone: Ranks) -> None:
    """Alarms find DistributedDataParallel by it, to tell the reduction of a backward from its computing."""
    layout = Layout(readers=alone, data=dist.group.WORLD)
    model = sharding.distribute(nn.Linear(3, 3), spec_of(), layout, torch.device("cpu"))
    assert type(model).__name__ == "DistributedDataParallel"
    assert type(model).__module__.startswith("torch."), "else its flags are put back after a diagnosis"
    assert model.in_features == 3


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("parallel", ["ddp", "zero1", "zero2", "fsdp", "hsdp"])
def test_a_single_rank(alone: Ranks, parallel: str) -> None:
    usual, other = (Trainer(spec_of(parallel=name), toy_tasks.numbers(), alone) for name in ("ddp", parallel))
    for batch in [next(usual.batches()) for _ in range(3)]:
        assert other.step([batch]).item() == pytest.approx(usual.step([batch]).item(), abs=1e-6)
    assert isinstance(other.model, DistributedDataParallel | FSDPModule)
    assert other.figures() == pytest.approx(usual.figures(), abs=1e-6)


def test_gradients_are_compressed_by_powersgd(alone: Ranks) -> None:
    """From its start on, it reduces a matrix of rank 1, and adds what was left out later; before, it reduces what is there."""
    parameters = []
    for kind in ("none", "powersgd(rank=1, start=3)"):
        wide = toy_tasks.numbers(model=lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)))
        trainer, losses = Trainer(spec_of(gradient_compression=kind, optimizer="sgd(lr=0.05)"), wide, alone), []
        for batch, _ in zip(trainer.batches(), range(6), strict=False):
            losses.append(trainer.step([batch]).item())
            parameters.append([weight.detach().clone() for weight in trainer.module.parameters()])
        assert losses[-1] < losses[0]
    equal = [all(map(torch.equal, *pair)) for pair in zip(parameters[:6], parameters[6:], strict=True)]
    assert equal[:2] == [True, True]
    assert equal[4:] == [False, False]


def test_older_versions_of_torch(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6: DDP takes no init_sync, and FSDP2 does not work on a CPU."""

    class Older:
        def __init__(self, module: nn.Module, **options: Any) -> None:
            assert "init_sync" not in options
            distributed._sync_module_states("the first broadcast")

    begun, known = list[str](), inspect.signature(DistributedDataParallel.__init__)
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "_sync_module_states", begun.append)
        patch.setattr(
            inspect,
            "signature",
            lambda _: known.replace(parameters=[each for each in known.parameters.values() if each.name != "init_sync"]),
        )
        patch.setattr(sharding, "_WithAttributes", Older)
        for again in (True, False):
            sharding.distribute(nn.Linear(1, 1), spec_of(), Layout.of(spec_of(), alone), alone.device, again=again)
            assert begun == ["the first broadcast"] * (not again)
        assert distributed._sync_module_states == begun.append
    monkeypatch.setattr(torch.cpu, "Stream", object)
    with pytest.raises(
        SpecError, match=r'parallel="fsdp": FSDP2 of torch .* needs a GPU; on a CPU take torch 2.7 or newer, or parallel="zero1"'
    ):
        Trainer(spec_of(parallel="fsdp"), toy_tasks.numbers(), alone)


def test_a_knob_of_ddp_reaches_it(alone: Ranks) -> None:
    one = Trainer(spec_of(gradient_as_bucket_view=True, bucket_cap_mb=3, find_unused_parameters=True), toy_tasks.numbers(), alone)
    assert isinstance(one.model, DistributedDataParallel)
    assert (one.model.gradient_as_bucket_view, one.model.find_unused_parameters) == (True, True)
    assert one.model.bucket_bytes_cap == 3 * 2**20
    assert not one.model.static_graph
    assert Trainer(spec_of(static_graph=True), toy_tasks.numbers(), alone).model.static_graph


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_that_ranks_share(alone: Ranks, register: str) -> None:
    """FSDP2 would replace the parameter, and the training would be another."""

    def build() -> nn.Module:
        model = toy_tasks.network()
        getattr(model[2].weight, register)(lambda given: given)  # type: ignore[index]
        return model

    task = toy_tasks.numbers(model=build)
    with pytest.raises(TaskError, match=rf"the parameter '2.weight' has a hook \({register}\).* try parallel=\"zero1\""):
        Trainer(spec_of(parallel="fsdp"), task, alone)
    Trainer(spec_of(parallel="zero1"), task, alone)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_attributes_of_parameters_that_ranks_share(alone: Ranks) -> None:
    """By them, an optimizer may divide its groups."""

    def build() -> nn.Module:
        model = toy_tasks.network()
        model[0].bias.decays = False  # type: ignore[index]
        return model

    def optimizer(weights: Any) -> torch.optim.Optimizer:
        fixed = [weight for weight in weights if not getattr(weight, "decays", True)]
        return torch.optim.SGD([{"params": fixed, "weight_decay": 0.0}], lr=0.1)

    for parallel in ("ddp", "fsdp"):
        trainer = Trainer(spec_of(parallel=parallel), toy_tasks.numbers(model=build, optimizer=optimizer), alone)
        assert [weight.shape for weight in trainer.optimizer.param_groups[0]["params"]] == [(8,)], parallel


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
class Momentum(nn.Module):
    """Its teacher follows it, in each forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.student = how, toy_tasks.network()
        self.teacher = toy_tasks.network().requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for its, mine in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.how == "data":
                its.data = 0.5 * its.data + 0.5 * mine.data
            elif self.how == "in place":
                with torch.no_grad():
                    its.lerp_(mine, 0.5)
        out: torch.Tensor = self.student(inputs) + self.teacher(inputs)
        return out


def test_attributes_of_a_parameter_that_becomes_two() -> None:
    """FSDP2 gives each block a parameter of its own, and refuses then what they share in its own words."""
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    layers[1].weight = layers[0].weight
    layers[0].weight.decays = False  # type: ignore[union-attr]
    with keeping_attributes(layers):
        for layer in layers:
            layer.weight = nn.Parameter(torch.zeros(1, 2))
            layer.weight._dtensor_spec = "in parts"  # type: ignore[attr-defined]
    assert [layer.weight.decays for layer in layers] == [False, False]  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("how", ["in place", "data", "not at all"])
def test_parameters_that_a_forward_changes(alone: Ranks, how: str, tmp_path: Path) -> None:
    """FSDP2 would drop the change with the parameters that it has gathered. DDP keeps it."""
    task = toy_tasks.numbers(model=lambda: Momentum(how), evaluate=None)
    for parallel in ("fsdp", "zero1"):
        refused = how != "not at all" and parallel == "fsdp"
        words = r"the forward changes the parameter 'teacher.0.weight', and parallel=\"fsdp\" .* try parallel=\"zero1\""
        (folder := tmp_path / parallel).mkdir()
        with pytest.raises(TaskError, match=words) if refused else contextlib.nullcontext():
            loop.train(spec_of(parallel=parallel), task, alone, folder, held=held, noise_log=NoiseLog)


class Uncertain(nn.Module):
    """Returns learned weights of its losses beside its outputs: parameters of its own and of a block, one of them as a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Scaled() for _ in range(2))
        self.logarithms = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        scales = []
        for layer in self.layers:
            x, scale = layer(x)
            scales.append(scale)
        return {"x": x, "logarithms": (self.logarithms, self.logarithms[:1]), "scales": scales}


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor([0.8]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.scale


def _uncertain_loss(model: Any, batch: Any) -> torch.Tensor:
    given = model(batch[0])
    both, first = given["logarithms"]
    error: torch.Tensor = ((-both).exp() * given["x"].square().mean() + both).sum() + first.square().sum()
    return error + torch.cat(given["scales"]).square().sum()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("parallel", "compiled"), [("fsdp", "none"), ("zero2", "none"), ("fsdp", "blocks(backend=eager)")])
def test_parameters_that_a_forward_returns(alone: Ranks, parallel: str, compiled: str) -> None:
    """The loss read memory that FSDP2 had freed after the forward, and the process crashed with SIGSEGV."""
    task = toy_tasks.numbers(model=Uncertain, loss=_uncertain_loss, evaluate=None)
    specs = spec_of(), spec_of(parallel=parallel, compile=compiled)
    usual, other = (Trainer(spec, task, alone) for spec in specs)
    for batch in [next(usual.batches()) for _ in range(3)]:
        assert other.step([batch]).item() == pytest.approx(usual.step([batch]).item(), abs=1e-6)
    for (name, weight), (_, expected) in zip(other.module.named_parameters(), usual.module.named_parameters(), strict=True):
        assert torch.allclose(weight.full_tensor(), expected, atol=1e-6), name  # type: ignore[attr-defined]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_sparse_buffer(alone: Ranks, parallel: str) -> None:
    def build() -> nn.Module:
        model = toy_tasks.network()
        model[1].register_buffer("edges", torch.eye(4).to_sparse())  # type: ignore[index]
        return model

    with pytest.raises(TaskError, match=r"the model's buffer '1.edges' is sparse, and torch cannot broadcast it .* to_dense\(\)"):
        Trainer(spec_of(parallel=parallel), toy_tasks.numbers(model=build), alone)


def test_embeddings_with_sparse_gradients_are_not_sharded(alone: Ranks) -> None:
    """The error was "Could not run 'fsdp::chunk_cat' with arguments from the 'SparseCPU' backend", with forty backends."""
    sparse = lambda: nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 1))  # noqa: E731
    with pytest.raises(
        TaskError, match=r'parallel="fsdp": the gradients of the embedding .0. are sparse, .* sparse=False, or parallel="ddp"'
    ):
        Trainer(spec_of(parallel="fsdp"), toy_tasks.numbers(model=sparse), alone)
    other = nn.Linear(4, 1)
    other.sparse = True  # type: ignore[assignment]  # a name of the user's own
    frozen = nn.EmbeddingBag(9, 4, sparse=True)
    frozen.weight.requires_grad_(False)
    for sound in (other, nn.Sequential(frozen, nn.Linear(4, 1))):
        sharding.distribute(sound, spec_of(parallel="fsdp"), Layout.of(spec_of(parallel="fsdp"), alone), torch.device("cpu"))


def test_an_optimizer_that_cannot_be_dealt_out(alone: Ranks) -> None:
    class Stubborn(torch.optim.SGD):
        def __init__(self, weights: Any) -> None:
            super().__init__(list(weights), lr=0.1)
            assert isinstance(self.param_groups[0]["params"][0], nn.Parameter)
            if any(isinstance(weight, dict) for weight in self.seen(weights)):
                raise TypeError("no groups here")

        @staticmethod
        def seen(weights: Any) -> list[Any]:
            return list(weights) if isinstance(weights, list) else []

    optimizer = build_optimizer(toy_tasks.network(), Stubborn)
    with pytest.raises(
        TaskError, match=r'parallel="zero1": the Stubborn cannot be built on a part .* no groups here; try another optimizer'
    ):
        place_optimizer(optimizer, share=True)
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    with pytest.raises(TaskError, match="the SGD cannot be built on a part"):
        place_optimizer(build_optimizer(mixed, "sgd"), share=True)


def test_ranks_that_cannot_be_dealt_out(alone: Ranks) -> None:
    with pytest.raises(SpecError, match="tensor_parallel=2 does not divide the 1 ranks of this launch"):
        Layout.of(spec_of(nproc_per_node=2, tensor_parallel=2), alone)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"layers.*.mlp.0": "columns"}, r"tensor_parallel plan 'layers\.\*\.mlp\.0': 'columns': allowed are 'colwise', 'rowwise'"),
        ({"blocks.*.mlp.0": "colwise"}, r"'blocks\.\*\.mlp\.0': the model has no such module; near are 'layers"),
        ({"norm": "colwise"}, "'norm': a LayerNorm; a Linear or an Embedding can be split"),
        ({"head": "colwise"}, r"'head': colwise splits axis 0 of its weight, \(256, 96\), and 3 ranks do not divide 256"),
        ({"layers.*.attention.out": "rowwise"}, ""),
    ],
)
def test_a_plan_that_does_not_fit(plan: dict[str, str], said: str) -> None:
    with pytest.raises(TaskError, match=said) if said else contextlib.nullcontext():
        assert list(styles_of(Gpt(), plan, 3)) == [f"layers.{i}.attention.out" for i in range(3)]


def test_a_tied_weight_is_not_split() -> None:
    model = Gpt()
    model.head.weight = model.tokens.weight
    with pytest.raises(TaskError, match="its weight is also that of another module"):
        styles_of(model, {"head": "colwise"}, 2)


def test_the_own_plan_of_a_model_leaves_tied_weights_whole() -> None:
    """As that of a Llama whose head is its embedding; nobody has written that plan."""
    model = Gpt()
    model._tp_plan = {"head": "colwise_rep", "layers.*.mlp.0": "colwise"}  # type: ignore[assignment]
    assert set(_own_plan(model)) == {"head", "layers.*.mlp.0"}
    model.head.weight = model.tokens.weight
    assert set(_own_plan(model)) == {"layers.*.mlp.0"}


def test_clipping_is_that_of_torch() -> None:
    gradients = torch.randn(3, 5)
    one, other = (nn.Parameter(torch.zeros(3, 5)) for _ in range(2))
    one.grad, other.grad = gradients.clone(), gradients.clone()
    norm = clip_gradients([one, nn.Parameter(torch.zeros(1))], 0.1, torch.device("cpu"))
    assert norm.item() == pytest.approx(gradients.norm().item())
    nn.utils.clip_grad_norm_([other], 0.1)
    assert torch.equal(one.grad, other.grad)
    clip_gradients([nn.Parameter(torch.zeros(1))], 0.1, torch.device("cpu"))  # none has a gradient
