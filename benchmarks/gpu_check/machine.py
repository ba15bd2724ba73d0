"""The machine that the parts run on: what it is (`facts`), and a Bench that synchronises and times work on its device."""

import gc
import itertools
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from typing import Any, TypeVar

T = TypeVar("T")

WARM_UP = 3
"""Steps before anything is timed."""


def facts() -> dict[str, Any]:
    """Device, driver, versions and date. `device` is missing where torch sees no GPU, `torch` where it cannot be imported."""
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
    }
    try:
        import torch
    except ImportError:
        return found
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if not torch.cuda.is_available():
        return found
    about = torch.cuda.get_device_properties(0)
    found |= {
        "device": about.name,
        "capability": [about.major, about.minor],
        "memory": about.total_memory,
        "processors": about.multi_processor_count,
        "gpus": torch.cuda.device_count(),
        "driver": driver_version(),
    }
    cudnn = torch.backends.cudnn.version()
    return found | {"cudnn": cudnn or 0}


def driver_version() -> str:
    """Version of the GPU's driver by nvidia-smi; empty where that does not answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.strip().splitlines()[0].strip() if answer.strip() else ""


def headline(machine: dict[str, Any]) -> str:
    """The facts in a line, for a caption."""
    capability = ".".join(map(str, machine.get("capability", ())))
    gpu = f"{machine['device']} (capability {capability}, {machine['memory'] / 2**30:.1f} GiB)" if "device" in machine else "no GPU"
    words = [gpu]
    words += [f"driver {machine['driver']}"] if machine.get("driver") else []
    words += [f"torch {machine.get('torch', 'missing')}, CUDA {machine.get('cuda') or 'none'}"]
    words += [f"Python {machine['python']}", f"{machine['cores']} cores", machine["date"]]
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Bench:
    """A device and how to wait for it. On a CPU, where the parts can be tried without a GPU, sizes are small and nothing is judged."""

    kind: str = "cuda"
    """"cuda" or "cpu"."""

    @property
    def gpu(self) -> bool:
        return self.kind == "cuda"

    def pick(self, gpu: T, cpu: T) -> T:
        """One of two sizes: that for a GPU, or the small one for a trial on a CPU."""
        return gpu if self.gpu else cpu

    def sync(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.gpu:
            import torch

            torch.cuda.synchronize()

    def clear(self) -> None:
        """Give back what is no longer used, the workspaces of cuBLAS included."""
        gc.collect()
        if self.gpu:
            import torch

            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def wall(self, work: Callable[[], object]) -> float:
        """Seconds from sync to sync."""
        self.sync()
        start = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - start

    def seconds_per_step(self, step: Callable[[Any], Any], loader: Iterable[Any], *, at_least: float = 1.0) -> float:
        """Wall time of a step over whole passes, one after the other, from sync to sync, after a few steps to warm up.

        Args:
            step: takes a batch.
            loader: can be read again and again.
            at_least: seconds that the passes take together, about.
        """
        for batch in itertools.islice(loader, WARM_UP):
            step(batch)
        steps = 0

        def passes(count: int) -> None:  # no wait between them: the start of a pass may be hidden behind queued work
            nonlocal steps
            steps = 0
            for _ in range(count):
                for batch in loader:
                    step(batch)
                    steps += 1

        seconds = self.wall(lambda: passes(1))
        if seconds < at_least:  # the end of a short pass would count too much
            count = math.ceil(at_least / seconds)
            seconds = self.wall(lambda: passes(count))
        return seconds / steps


def percent(value: float, digits: int = 0) -> str:
    """A fraction as a percentage with its sign."""
    return f"{100 * value:+.{digits}f} %"


def spread(values: list[float]) -> float:
    """Largest less smallest, over the median."""
    return (max(values) - min(values)) / statistics.median(values)
