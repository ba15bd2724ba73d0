"""Offload: the same numbers with copies in the host's memory; what a dry run is told; and that a CPU has nothing to offload from."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tests import toy_tasks
from workbench.runs.spec import RunSpec, SpecError
from workbench.train.offload import DryRunHooks, HostOptimizer, activations_on_host, offloading_dry_run
from workbench.train.optimizers import build_optimizer, place_optimizer
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer


@pytest.fixture
def told() -> Iterator[list[Tensor]]:
    """What a dry run is told of, as if this were a GPU."""
    copies: list[Tensor] = []
    with offloading_dry_run(DryRunHooks(on_host=copies.append, host_computes=contextlib.nullcontext)):
        yield copies


@pytest.mark.parametrize("offload", ["activations", "optimizer"])
def test_a_cpu_has_nothing_to_offload_from(offload: str) -> None:
    spec = RunSpec(task="toy", device="cpu", offload=offload)
    ranks = Ranks.join(spec)
    try:
        with pytest.raises(SpecError, match=f'offload="{offload}" on the CPU: there is nothing to offload from, .* wb.estimate_memory'):
            Trainer(spec, toy_tasks.numbers(), ranks)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "optimizer", ["sgd(lr=0.1, momentum=0.9)", "adamw(fused=True)", "adam(foreach=True)", "rmsprop", torch.optim.AdamW]
)
def test_an_optimizer_on_the_host_does_the_same(told: list[Tensor], optimizer: Any) -> None:
    torch.manual_seed(0)
    usual = toy_tasks.network()
    other = toy_tasks.network()
    other.load_state_dict(usual.state_dict())
    batch = torch.randn(8, 4)
    steps = []
    for model, on_host in ((usual, False), (other, True)):
        one = place_optimizer(build_optimizer(model, optimizer, lr=0.01), share=False, on_host=on_host)
        scheduler = LambdaLR(one, lambda step: 1 / (1 + step))
        for _ in range(3):
            model(batch).square().mean().backward()
            one.step()
            one.zero_grad()
            scheduler.step()
        steps.append(one)
    assert isinstance(steps[1], HostOptimizer)
    assert all(torch.equal(one, two) for one, two in zip(usual.parameters(), other.parameters(), strict=True))
    count = sum(weight.numel() for weight in other.parameters())
    assert sum(copy.numel() for copy in told) == count * (1 + 3)
    assert steps[1].state_dict()["param_groups"][0]["lr"] == pytest.approx(0.0025)
    assert not steps[1].state  # all of it is the inner one's
    steps[1].load_state_dict(steps[1].state_dict())


def test_an_optimizer_on_the_host_and_a_weight_without_a_gradient(told: list[Tensor]) -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    one = HostOptimizer([{"params": [used, unused]}], torch.optim.SGD, lr=0.5)
    assert one.step(lambda: used.sum().backward() or 7.0) == 7.0
    assert (used.tolist(), unused.tolist()) == ([0.5, 0.5], [1.0, 1.0])


def test_activations_wait_and_weights_stay(told: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    batch = torch.randn(3, 4)
    model(batch).square().mean().backward()
    expected = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    with activations_on_host():
        loss = model(batch).square().mean()
    loss.backward()
    assert all(torch.equal(one, weight.grad) for one, weight in zip(expected, model.parameters(), strict=True) if weight.grad is not None)
    assert sorted(tuple(copy.shape) for copy in told) == [(3, 2), (3, 4), (3, 8), (3, 8)]
