"""Notes what else happens on an NVIDIA GPU while something is timed: clocks that heat or the power limit hold down, and other processes.

By NVML where nvidia-ml-py is installed (extra `gpu`), which counts how long clocks were held down, else by nvidia-smi, which says whether
they are at the end. Where neither answers nothing is noted: it is an explanation of noise, and no measurement.
"""

import contextlib
import csv
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.core import units

MIN_HELD_SHARE = 0.02
"""Fraction of the time: clocks that are held down for less are not worth a note. Chosen: less than a block varies by."""
PATIENCE = 5.0
"""Seconds that nvidia-smi may take to answer."""
_REASONS = {"heat": "NVML_PERF_POLICY_THERMAL", "the power limit": "NVML_PERF_POLICY_POWER"}
_FIELDS = {"hw_thermal_slowdown": "heat", "sw_thermal_slowdown": "heat", "hw_power_brake_slowdown": "the power supply"}


def ask_nvidia_smi(arguments: Sequence[str]) -> str:
    """What nvidia-smi answers.

    Raises:
        OSError, subprocess.SubprocessError: it is not there, takes too long, or refuses.
    """
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=PATIENCE).stdout


def load_nvml() -> Any:
    """NVML, initialised; None without nvidia-ml-py or a driver."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        return None
    return pynvml


class GpuLoad:
    """What happens on one GPU from the creation of this on."""

    def __init__(
        self,
        uuid: str,
        *,
        nvml: Any = None,
        ask: Callable[[Sequence[str]], str] = ask_nvidia_smi,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        """Begin to look.

        Args:
            uuid: of the GPU, as NVML and nvidia-smi have it: "GPU-…".
            nvml: the module, initialised; None = nvidia-smi is asked, at the end.
            ask: for tests: in place of nvidia-smi.
            clock: for tests: in place of the real one.
            proc: for tests: in place of `/proc`.
        """
        self._uuid, self._nvml, self._ask, self._clock, self._proc = uuid, nvml, ask, clock, proc
        self._device = None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                self._device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._start, self._before = clock(), self._held()

    def notes(self) -> tuple[str, ...]:
        """What happened since the start, in words; empty where nothing did, or nothing is known."""
        notes = self._held_notes() if self._device is not None else self._notes_of_nvidia_smi()
        if others := self._other_processes():
            notes.append(f"{others} other process{'es have' if others > 1 else ' has'} the GPU open for computing")
        return tuple(notes)

    def _held(self) -> dict[str, int]:
        """Nanoseconds by reason, from an arbitrary zero."""
        held = {}
        for reason, policy in _REASONS.items() if self._device is not None else ():
            with contextlib.suppress(self._nvml.NVMLError, AttributeError):  # not on every GPU
                held[reason] = int(self._nvml.nvmlDeviceGetViolationStatus(self._device, getattr(self._nvml, policy)).violationTime)
        return held

    def _held_notes(self) -> list[str]:
        seconds = max(self._clock() - self._start, 1e-9)
        shares = {reason: (now - self._before.get(reason, now)) / 1e9 / seconds for reason, now in self._held().items()}
        return [
            f"{reason} held the GPU's clocks down for {units.percent(min(1.0, share))} of the time"
            for reason, share in shares.items()
            if share >= MIN_HELD_SHARE
        ]

    def _notes_of_nvidia_smi(self) -> list[str]:
        fields = ",".join(f"clocks_throttle_reasons.{name}" for name in _FIELDS)
        try:
            words = self._ask([f"--query-gpu={fields}", "--format=csv,noheader", f"--id={self._uuid}"]).strip().split(", ")
        except (OSError, subprocess.SubprocessError):
            return []
        reasons = dict.fromkeys(reason for reason, word in zip(_FIELDS.values(), words, strict=False) if word.strip() == "Active")
        return [f"{reason} holds the GPU's clocks down" for reason in reasons]

    def _other_processes(self) -> int:
        """Processes that compute on the GPU and are not of ours; 0 where the list does not have ours, as in some containers."""
        pids = set(self._pids())
        return sum(not self._is_ours(pid) for pid in pids) if os.getpid() in pids else 0

    def _pids(self) -> list[int]:
        if self._device is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                return [int(process.pid) for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)]
        try:
            answer = self._ask(["--query-compute-apps=pid", "--format=csv,noheader", f"--id={self._uuid}"])
            return [int(row[0]) for row in csv.reader(answer.splitlines()) if row and row[0].strip().isdigit()]
        except (OSError, subprocess.SubprocessError):
            return []

    def _is_ours(self, pid: int) -> bool:
        """Does it descend from this process, or from the one that started it, as other ranks do?"""
        ours = {os.getpid(), *([os.getppid()] if "TORCHELASTIC_RUN_ID" in os.environ else [])}
        while pid > 1 and pid not in ours:
            try:
                pid = int((self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                return False
        return pid in ours
