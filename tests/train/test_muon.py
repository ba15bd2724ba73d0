"""Muon for the matrices of the blocks and AdamW for the rest is the same as torch's two optimizers side by side."""

import copy

import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from tests import toy_tasks
from workbench.runs.spec import RunSpec
from workbench.train import optimizers
from workbench.train.models import Gpt
from workbench.train.muon import hidden_matrices, hidden_names
from workbench.train.optimizers import build_optimizer
from workbench.train.stages import cut, keep_only

MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it from 2.9 on")


def gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt(vocabulary=16, length=8, width=8, layers=2, heads=2)


def gradients(model: nn.Module, tokens: Tensor) -> None:
    model.zero_grad()
    model(tokens).square().mean().backward()


def test_only_matrices_of_blocks_are_muons() -> None:
    model = gpt()
    names = {id(weight): name for name, weight in model.named_parameters()}
    matrices, others = ([names[id(weight)] for weight in group["params"]] for group in hidden_matrices(model))
    assert len(matrices) == 8
    assert all(name.startswith("layers.") and name.endswith("weight") and "norm" not in name for name in matrices)
    assert {"tokens.weight", "positions.weight", "head.weight", "norm.bias"} < set(others)
    plain = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    assert [group["params"] for group in hidden_matrices(plain)] == [[plain[1].weight], [plain[0].weight, plain[1].bias]]


@MUON
def test_each_stage_of_a_pipeline_has_those_of_the_whole_model() -> None:
    """Also one with a single block, which by itself would be a model without blocks that repeat."""
    model = gpt()
    hidden = hidden_names(model)
    spec = RunSpec(task="toy", device="cpu", nproc_per_node=2, pipeline_parallel=2, accumulation=2)
    stages = cut(model, toy_tasks.numbers(pipeline=Gpt.pieces), spec)
    assert [sum(type(piece) is type(model.layers[0]) for piece in pieces) for pieces in stages.pieces] == [1, 1]
    found = set[str]()
    for pieces in stages.pieces:
        stage = copy.deepcopy(model)
        kept = {name for name, part in model.named_modules() if any(part is piece for piece in pieces)}
        keep_only(stage, [stage.get_submodule(name) for name in kept])
        names = {id(weight): name for name, weight in stage.named_parameters()}
        groups = build_optimizer(stage, "muon", hidden=hidden).param_groups
        found |= {names[id(weight)] for group in groups if group["muon"] for weight in group["params"]}
    assert found == hidden
    assert len(hidden) == 8


@MUON
def test_it_is_torchs_two_optimizers_and_resumes() -> None:
    ours, theirs, tokens = gpt(), gpt(), torch.arange(16).view(2, 8)
    mine = build_optimizer(ours, "muon(weight_decay=0.1)", lr=0.01)
    matrices, others = (group["params"] for group in hidden_matrices(theirs))
    two = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.1),
    ]
    for step in range(6):
        if step == 3:
            state = mine.state_dict()
            mine = build_optimizer(ours, "muon(weight_decay=0.1)")
            mine.load_state_dict(state)
        gradients(ours, tokens)
        gradients(theirs, tokens)
        for optimizer in (mine, *two):
            optimizer.step()
    for weight, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(weight, other)
    states = [mine.state[weight] for weight in mine.param_groups[0]["params"]]
    assert all(list(state) == ["momentum_buffer"] for state in states)


@MUON
def test_it_is_predicted_with_half_of_adams_states_and_not_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(4, 8, dtype=torch.long)
    adam, muon = (
        wb.estimate_memory(gpt, tokens, loss=lambda model, batch: model(batch).mean(), device="cpu", optimizer=name)
        for name in ("adamw", "muon")
    )
    matrices = sum(weight.nbytes for weight in hidden_matrices(gpt())[0]["params"])
    assert adam.optimizer_states - muon.optimizer_states == pytest.approx(matrices, rel=0.02)  # and a number per parameter: AdamW's step
    monkeypatch.setattr(optimizers, "dtensor_spec", lambda weight: weight)
    with pytest.raises(optimizers.SpecError, match=r"muon on parameters that ranks share .*: it needs whole matrices"):
        optimizers.place_optimizer(build_optimizer(gpt(), "muon"), share=False)


def test_a_torch_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(optimizers.SpecError, match=r"has no Muon, which came with torch 2\.9; try adamw"):
        build_optimizer(gpt(), "muon")
