"""The emulated GPU behaves as a GPU does: what waits and what does not, its memory, its collectives, and its work in a trace."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import workbench as wb
from tests.emulated_device import MIB, EmulatedDevice
from tests.emulated_ranks import Ranks
from workbench.harness import device_clock

pytestmark = pytest.mark.alone  # they compare times


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    return EmulatedDevice(pageable=1e8, pinned=1e9, memory=100 * MIB).install(monkeypatch)


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.zeros(1_000_000, dtype=torch.int8)


def host_seconds(device: EmulatedDevice, batch: torch.Tensor, **options: bool) -> float:
    device.compute(0.05)
    began = time.perf_counter()
    assert batch.to("cuda", **options).is_cuda
    return time.perf_counter() - began


def test_only_copies_from_page_locked_memory_let_the_host_go_on(device: EmulatedDevice, batch: torch.Tensor) -> None:
    assert host_seconds(device, batch, non_blocking=True) >= 0.055
    device.synchronize()
    assert host_seconds(device, batch.pin_memory(), non_blocking=True) < 0.03
    device.synchronize()
    assert host_seconds(device, batch.pin_memory()) >= 0.045


def test_streams_run_beside_each_other_until_one_waits_for_the_other(device: EmulatedDevice) -> None:
    clock = device_clock.DeviceClock(torch.device("cuda"))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        device.compute(0.15)
    device.compute(0.05)
    clock.mark()
    torch.cuda.current_stream().wait_stream(side)
    device.compute(0.05)
    clock.mark()
    steps, _ = clock.read()
    assert steps == pytest.approx([0.05, 0.15], rel=0.1)


def test_a_full_queue_blocks_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(depth=100).install(monkeypatch)
    began = time.perf_counter()
    for _ in range(4):
        device.compute(0.02, kernels=50)
    assert 0.03 < time.perf_counter() - began < 0.06


def test_memory_runs_out_at_its_size(device: EmulatedDevice) -> None:
    block = device.memory.allocate(60 * MIB)
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 60 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        device.memory.allocate(60 * MIB)
    assert torch.cuda.memory_stats()["num_ooms"] == 1
    device.memory.free(block)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (0, 60 * MIB)
    device.compute(0.05)
    began = time.perf_counter()
    device.memory.free(device.memory.allocate(60 * MIB))  # what is cached fits
    assert time.perf_counter() - began < 0.03
    device.memory.allocate(90 * MIB)  # what is cached does not, and is given back when the device has done its work
    assert time.perf_counter() - began >= 0.05
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 1
    assert torch.cuda.mem_get_info() == (10 * MIB, 100 * MIB)


def test_a_collective_ends_when_the_last_rank_is_ready(tmp_path: Path) -> None:
    """Two devices in one process: neither host waits, and both know the end when both have launched."""
    for rank in range(2):
        (tmp_path / f"collectives-of-rank-{rank}").touch()
    first, second = (EmulatedDevice(network=1e8, ranks=Ranks(rank, 2, tmp_path)) for rank in range(2))
    began = time.perf_counter()
    gradients = torch.zeros(1_000_000, dtype=torch.int8)
    works = []
    for seconds in (0.01, 0.02):
        first.compute(seconds)
        works.append(first.all_reduce(gradients, async_op=True))
    first.compute(0.005)  # beside the second collective
    for work in works:
        assert work is not None
        work.wait()
    assert first.ranks.known(first.default.done) is None
    for seconds in (0.03, 0.001):
        second.compute(seconds)
        second.all_reduce(gradients)
    ends = [device.ranks.known(device.default.done) for device in (first, second)]
    assert ends[0] == ends[1]
    assert ends[0] is not None
    # 0.03 on the second rank, 0.01 together, 0.001 on the second rank, 0.01 together
    assert ends[0] - began == pytest.approx(0.051, abs=0.008)  # each other order ends 0.01 sooner or later
    assert time.perf_counter() - began < 0.04


class Loader:
    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(500_000, dtype=torch.int8)] * 30)


def test_a_trace_has_the_work_of_the_device(device: EmulatedDevice, tmp_path: Path) -> None:
    def step(batch: torch.Tensor) -> None:
        batch.to("cuda")  # 5 ms
        device.compute(0.012, kernels=40)
        device.all_reduce(torch.zeros(20_000_000, dtype=torch.int8).expand(20_000_000))  # 2 ms
        device.item()
        time.sleep(0.006)

    trace = wb.trace(step, Loader(), steps=5, into=tmp_path)
    parts = trace.breakdown()
    shares = {part: parts.mean(part) for part in ("h2d", "compute", "communication")}
    assert shares == pytest.approx({"h2d": 0.005, "compute": 0.012, "communication": 0.002}, rel=0.1)
    assert parts.mean("idle") + parts.mean("host") >= 0.0055
