"""Gradients of a tensor that is used more than once are summed in place, as in a run that nobody records."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from workbench.core.gc import collected_before
from workbench.memory.api import record
from workbench.memory.estimate.plan import plan_of
from workbench.memory.measure.recorder import GradientAccumulationProbe, Recorder, is_dense

WIDTH, SAMPLES = 64, 512


class Fan(nn.Module):
    """Its hidden layer is used several times."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.layer, self.uses = nn.Linear(WIDTH, WIDTH), uses

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).sin()
        used: Tensor = torch.stack([(hidden * i).cos().sum() for i in range(self.uses)]).sum()
        return used


def sums_of(build: Any) -> list[int]:
    """Bytes that sums take in the backward of a dry run."""
    log, _ = record(plan_of(build, torch.empty(SAMPLES, WIDTH, device="meta"), device="cpu"))
    return [one.size for one in log.records if one.phase == "backward" and one.op == "aten.add.Tensor"]


@pytest.mark.parametrize("uses", [2, 3, 5])
def test_sums_of_gradients_take_nothing(uses: int) -> None:
    assert sums_of(lambda: Fan(uses)) == []


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_dry_run_is_what_the_allocator_says() -> None:
    """The profiler counts an ordinary run; with a sum that is not in place both would differ by a layer."""
    batch = torch.randn(SAMPLES, WIDTH)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model = Fan(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            given = batch.clone()
            model(given).backward()
            optimizer.step()
            optimizer.zero_grad()
    result: Any = profile.profiler
    taken = sorted((event.start_ns(), event.nbytes()) for event in result.kineto_results.events() if event.name() == "[memory]")
    held = peak = 0
    for _, size in taken:
        held += size
        peak = max(peak, held)
    assert wb.estimate_memory(lambda: Fan(3), batch, optimizer="sgd", device="cpu").total == pytest.approx(peak, abs=64)


class Twice(torch.autograd.Function):
    """Its own backward adds two tensors that it holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        one, other = gradient * 1, gradient * 1
        total = one + other
        return total * one


def test_other_sums_are_what_they_are() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Twice.apply(self.layer(x)).sum()  # type: ignore[no-untyped-call]
            return out

    assert sums_of(Own) == [4 * SAMPLES * WIDTH] * 2  # one in each step


def test_real_tensors_are_counted_alike() -> None:
    model = Fan(3)
    with collected_before():
        recorder = Recorder(model)
        with recorder, recorder.hooks():
            recorder.mark("forward")
            loss = model(torch.randn(SAMPLES, WIDTH))
            recorder.mark("backward")
            loss.backward()
            recorder.mark("end")
    assert not [one for one in recorder.log.records if one.phase == "backward" and one.op == "aten.add.Tensor"]


def test_where_torch_does_not_say_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    sums = GradientAccumulationProbe()
    sums.learn()
    with torch.no_grad():
        assert not sums.in_place(torch.ops.aten.add.Tensor, (torch.zeros(2), torch.zeros(2)), {})


def test_dense() -> None:
    assert is_dense(torch.zeros(2, 3, 4).permute(2, 0, 1))
    assert is_dense(torch.zeros(()))
    assert not is_dense(torch.zeros(4, 4)[:, ::2])
    assert not is_dense(torch.zeros(4, 1).expand(4, 4))
