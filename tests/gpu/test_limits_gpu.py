"""What only a GPU shows about its limits: how it says that it is full, what an estimate takes of it, and what its driver counts."""

import subprocess
import sys

import pytest
import torch

from workbench.harness import ablations
from workbench.memory import calibrate
from workbench.memory.measure.at_oom import on_host
from workbench.runs.errors import is_out_of_memory
from workbench.runs.launch import environment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")]


def test_a_full_gpu_says_so() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(raised.value)
    assert not on_host(raised.value)


def test_nothing_speaks_against_a_gpu_that_works() -> None:
    assert environment.gpu_trouble(environment.gpu_count()) is None
    assert torch.version.hip or environment.torch_cuda() == torch.version.cuda


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_estimate_makes_no_context(device: str) -> None:
    code = (
        "import torch, workbench as wb\n"
        f"wb.estimate_memory(torch.nn.Linear(4, 2), torch.zeros(3, 4), optimizer='adamw', device={device!r})\n"
        "assert torch.cuda.is_available()\n"
        "assert not torch._C._cuda_hasPrimaryContext(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_driver_and_cuda_count_alike() -> None:
    """Both with this process's context, so a process's own memory is what is left after what others had is subtracted."""
    block = torch.zeros(2**28, device="cuda")
    torch.cuda.synchronize()
    try:
        used = calibrate.look().used
    except ValueError as error:
        pytest.skip(str(error))
    free, total = torch.cuda.mem_get_info()
    assert used == pytest.approx(total - free, abs=2**26)
    assert used > block.nbytes


def test_fp16_steps_that_overflow_are_skipped() -> None:
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).float().square().sum().backward()
        optimizer.step()

    mixed = ablations.in_precision(step, "amp_fp16", torch.device("cuda"))
    step(torch.ones(8, 64, device="cuda"))
    before = [weight.detach().clone() for weight in model.parameters()]
    with ablations.overflows_skipped([optimizer], "amp_fp16"):
        mixed(torch.full((8, 64), 60_000.0, device="cuda"))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        mixed(torch.ones(8, 64, device="cuda"))
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert all(values.isfinite().all() for values in (*model.parameters(), *states))
    assert not torch.equal(before[0], model.weight)
