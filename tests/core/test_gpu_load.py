"""What is noted of a GPU while something is timed, with a fake NVML and a fake nvidia-smi."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.core.gpu_load import GpuLoad


class Nvml:
    """Counts nanoseconds, and knows processes."""

    NVML_PERF_POLICY_THERMAL, NVML_PERF_POLICY_POWER = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.held = {1: 5_000_000_000, 0: 7_000_000_000}
        self.pids = [os.getpid()]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetViolationStatus(self, device: str, policy: int) -> Any:
        if policy not in self.held:
            raise self.NVMLError
        return SimpleNamespace(violationTime=self.held[policy])

    def nvmlDeviceGetComputeRunningProcesses(self, device: str) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.pids]


def never(arguments: Sequence[str]) -> str:
    raise FileNotFoundError("nvidia-smi")


def test_what_nvml_counts_is_noted_with_its_share() -> None:
    nvml, now = Nvml(), [100.0]
    load = GpuLoad("GPU-1", nvml=nvml, ask=never, clock=lambda: now[0])
    now[0] += 10
    assert load.notes() == ()
    nvml.held[1] += 1_200_000_000
    nvml.held[0] += 100_000_000  # 1 %
    assert load.notes() == ("heat held the GPU's clocks down for 12 % of the time",)
    nvml.held = {0: nvml.held[0] + 9_000_000_000}  # the other cannot be read any more
    assert load.notes() == ("the power limit held the GPU's clocks down for 91 % of the time",)


def test_other_processes_are_counted_without_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for pid, parent in ((70, os.getpid()), (71, 70), (80, 1), (81, os.getppid())):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (strange) name) S {parent} 0 0")
    nvml = Nvml()
    load = GpuLoad("GPU-1", nvml=nvml, ask=never, proc=tmp_path)
    nvml.pids = [os.getpid(), 71]
    assert load.notes() == ()
    nvml.pids += [80]
    assert load.notes() == ("1 other process has the GPU open for computing",)
    nvml.pids += [81]
    assert load.notes() == ("2 other processes have the GPU open for computing",)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # then that is another rank
    assert load.notes() == ("1 other process has the GPU open for computing",)
    nvml.pids = [80, 4000]  # numbers of another namespace
    assert load.notes() == ()


def test_nvidia_smi_is_asked_where_nvml_is_not_there(tmp_path: Path) -> None:
    asked, answers = [], {"--query-gpu": "Not Active, Active, Not Active\n", "--query-compute-apps": f"{os.getpid()}\n80\n"}

    def ask(arguments: Sequence[str]) -> str:
        asked.append(list(arguments))
        return answers[arguments[0].partition("=")[0]]

    load = GpuLoad("GPU-1", ask=ask, proc=tmp_path)
    assert not asked
    assert load.notes() == ("heat holds the GPU's clocks down", "1 other process has the GPU open for computing")
    assert all("--id=GPU-1" in arguments for arguments in asked)
    answers |= {"--query-gpu": "[N/A], [N/A], [N/A]", "--query-compute-apps": "[Insufficient Permissions]"}
    assert load.notes() == ()


@pytest.mark.parametrize("error", [FileNotFoundError("no"), subprocess.TimeoutExpired("nvidia-smi", 5)])
def test_without_an_answer_nothing_is_noted(error: Exception) -> None:
    def ask(arguments: Sequence[str]) -> str:
        raise error

    assert GpuLoad("GPU-1", ask=ask).notes() == ()
    assert GpuLoad("GPU-9", nvml=Nvml(), ask=ask).notes() == ()
