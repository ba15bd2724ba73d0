"""TF32 on a GPU: a step in strict fp32 is told of it, with a gain that then shows. And what else happens on the GPU is noted."""

import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from workbench.diagnosis.measure.experiment import _gpu_load
from workbench.harness.tf32 import has_tf32, uses_tf32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False here"),
]


def test_a_strict_step_is_told_of_tf32() -> None:
    if not has_tf32(torch.device("cuda", 0)):
        pytest.skip("needs a GPU with TF32: compute capability 8.0 or newer")
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    batches = [torch.randn(4096, 4096, device="cuda")] * 20
    diagnosis = wb.diagnose(step, batches, model=model, optimizer=optimizer, budget_s=30)
    assert diagnosis.verdict == "compute-bound"
    remedy = next(remedy for remedy in diagnosis.remedies if remedy.name == "tf32=True")
    assert remedy.speedup > 1.5
    assert not uses_tf32(), "as torch was set up"
    proof = diagnosis.prove(remedy)
    assert proof.measured.mid == pytest.approx(remedy.speedup, rel=0.15)
    assert not uses_tf32()


def test_what_else_happens_on_the_gpu_can_be_asked() -> None:
    load = _gpu_load(torch.device("cuda", 0))
    assert load is not None
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(100):
        x = (x @ x).clamp(-1, 1)
    torch.cuda.synchronize()
    assert all("GPU" in note for note in load.notes())
