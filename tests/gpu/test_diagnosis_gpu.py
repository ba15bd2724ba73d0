"""Causes under a verdict on a GPU: what the host does while it has nothing to do, and what no experiment can change."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from workbench.diagnosis.measure.inside import look

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")]

WIDTH = 128


def small_kernels(*, item: int = 10, sleep: float = 0.0) -> Callable[[Tensor], None]:
    """Sixty layers that take the GPU less long than the host takes to launch them."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(60))).cuda()
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), [0]

    def step(x: Tensor) -> None:
        steps[0] += 1
        time.sleep(sleep)
        optimizer.zero_grad()
        loss = model(x.cuda(non_blocking=True)).square().mean()
        loss.backward()
        optimizer.step()
        if steps[0] % item == 0:
            loss.item()

    return step


def test_small_kernels_are_launched_too_slowly() -> None:
    found = wb.diagnose(small_kernels(), [torch.randn(256, WIDTH, device="cuda")] * 50, budget_s=10)
    assert (found.verdict, found.cause) == ("host-bound", "launches"), str(found)
    assert [one.name for one in found.remedies[:2]] == ["torch.compile", "CUDA graphs"]
    assert found.evidence.inside is not None
    assert found.evidence.inside.blocked < 0.2 * found.evidence.inside.step  # backward has a thread, and the other one waits for it


def test_a_sleep_in_the_step_is_told_to_go() -> None:
    found = wb.diagnose(small_kernels(sleep=0.03), [torch.randn(256, WIDTH, device="cuda")] * 50, budget_s=10)
    assert (found.verdict, found.cause) == ("host-bound", "sleeping or I/O"), str(found)
    assert found.remedies[0].name == "no waiting in the step"
    assert "test_diagnosis_gpu.py" in found.next


def test_a_copy_is_waited_for_and_that_is_no_sync() -> None:
    weights = [torch.randn(2048, 2048, device="cuda", requires_grad=True) for _ in range(8)]

    def step(x: Tensor) -> None:
        for _ in range(4):
            for weight in weights:
                x = (x @ weight) / 45
        x.square().mean().backward()

    batch = torch.randn(2048, 2048)
    inside, why = look(lambda: step(batch.cuda()), traced=5, plain=10, synchronize=torch.cuda.synchronize)
    assert why is None
    assert inside.syncs == 0  # the copy is waited for, and that is the copy's
    assert inside.ops > 0.6 * inside.step


def test_a_captured_step_has_variants_that_reach_nothing() -> None:
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer, static = torch.optim.AdamW(model.parameters(), lr=1e-5, capturable=True), torch.zeros(64, WIDTH, device="cuda")

    def train() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(static).square().mean().backward()
        optimizer.step()

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            train()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()

    def step(x: Tensor) -> None:
        static.copy_(x)
        graph.replay()

    found = wb.diagnose(step, [torch.randn(64, WIDTH)] * 50, model=model, optimizer=optimizer, budget_s=8)
    assert any("step() launches 1 captured CUDA graph, which no experiment can change" in note for note in found.evidence.notes)
    assert not {"no_optimizer", "precision=amp_bf16"} & set(found.evidence.arms)
    assert found.evidence.inside is not None
    assert found.evidence.inside.graphs == 1
