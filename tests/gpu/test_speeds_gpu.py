"""The GPU part of a machine's speeds, on a real GPU, against plain loops by the wall clock."""

import time
from pathlib import Path

import pytest
import torch

from workbench.core.machine_speeds import MachineSpeeds
from workbench.harness.measure_speeds import COPY_BYTES, GPU, HOST, machine_speeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False here"),
]


def test_speeds_of_a_gpu_agree_with_plain_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    speeds = machine_speeds(HOST + GPU)
    assert speeds.notes == ()
    assert set(speeds.speeds) == set(HOST + GPU)
    medians = {name: speed.median for name, speed in speeds.speeds.items()}
    assert medians["event"] < medians["launch"] < 1e-3
    assert medians["timer"] < medians["sync"] < 1e-3
    assert medians["pageable"] < 1.2 * medians["pinned"]

    values = torch.ones(16, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(500):  # fewer than the queue holds
        values.add_(1)
    assert medians["launch"] == pytest.approx((time.perf_counter() - begin) / 500, rel=0.6)

    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory(), torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):  # the first one warms up
        before.record()
        target.copy_(source, non_blocking=True)
        after.record()
        after.synchronize()
    assert medians["pinned"] == pytest.approx(COPY_BYTES / (before.elapsed_time(after) / 1e3), rel=0.3)

    kept = MachineSpeeds.load()
    assert kept.speeds == speeds.speeds
    assert kept.machine.gpus or not Path("/proc/driver/nvidia/gpus").exists()
