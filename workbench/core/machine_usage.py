"""Measures what a machine does while something runs: cores, memory, network, disks, GPUs and power, as far as it can be read.

What it reads is Linux's `/proc` and `/sys`, NVML (extra `gpu`) and the energy counters of the hardware. What cannot be read is left out.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.energy_counters import EnergyCounter, energy_counters, visible_gpus
from workbench.core.gpu_load import load_nvml

PROC, BLOCK = Path("/proc"), Path("/sys/block")
SECTOR = 512
"""Bytes of a sector in `/proc/diskstats`, whatever the disk has."""
_VIRTUAL = re.compile(r"loop|ram|zram|dm-|md|sr")
"""Block devices whose bytes are those of another one, or of memory."""
SHORT, SPREAD = 1.0, 600.0
"""Seconds between two rows: `SHORT`, and in long runs a 600th of the time so far, so that a day has 4,000 rows."""


class MachineUsage:
    """Rates since the last reading, of the whole machine."""

    def __init__(
        self,
        gpus: int = 0,
        *,
        proc: Path = PROC,
        block: Path = BLOCK,
        clock: Callable[[], float] = time.monotonic,
        counters: list[EnergyCounter] | None = None,
    ) -> None:
        """Begin to look."""
        self._proc, self._block, self._clock = proc, block, clock
        self._counters = energy_counters(gpus) if counters is None else counters
        self._nvml: Any = None
        if gpus:
            self._nvml = load_nvml()
        self._gpus: list[Any] = []
        for visible in visible_gpus(gpus) if self._nvml else ():
            by = self._nvml.nvmlDeviceGetHandleByIndex if isinstance(visible, int) else self._nvml.nvmlDeviceGetHandleByUUID
            with contextlib.suppress(self._nvml.NVMLError):
                self._gpus.append(by(visible))
        self._at, self._before = clock(), self._totals()

    def read(self) -> dict[str, float]:
        """What can be read, by name.

        `cpu`: share of all cores that were busy; `memory`: bytes in use; `network_in`, `network_out`, `disk_read`, `disk_write`: bytes per
        second; `gpu`: mean share of the time in which the GPUs computed; `watts`: what processors, memory and GPUs drew.
        """
        now, totals = self._clock(), self._totals()
        seconds, before = now - self._at, self._before
        self._at, self._before = now, totals
        if seconds <= 0:
            return {}
        grown = {name: max(0.0, value - before[name]) for name, value in totals.items() if name in before}
        values = {name: grown[name] / seconds for name in grown if name not in ("busy", "all")}
        if grown.get("all"):
            values["cpu"] = min(1.0, grown["busy"] / grown["all"])
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            lines = dict(line.split(":") for line in (self._proc / "meminfo").read_text().splitlines())
            values["memory"] = 1024.0 * (int(lines["MemTotal"].split()[0]) - int(lines["MemAvailable"].split()[0]))
        busy = []
        for gpu in self._gpus:
            with contextlib.suppress(self._nvml.NVMLError):
                busy.append(self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)
        if busy:
            values["gpu"] = sum(busy) / len(busy)
        return values

    def _totals(self) -> dict[str, float]:
        """What only grows: ticks of the cores, bytes, joules."""
        totals: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError, IndexError):
            ticks = [int(word) for word in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
            totals |= {"all": sum(ticks), "busy": sum(ticks) - ticks[3] - ticks[4]}  # idle, and waiting for a disk
        with contextlib.suppress(OSError, ValueError, IndexError):
            rows = [line.split(":") for line in (self._proc / "net" / "dev").read_text().splitlines()[2:]]
            words = [numbers.split() for name, numbers in rows if name.strip() != "lo"]
            totals |= {"network_in": sum(int(row[0]) for row in words), "network_out": sum(int(row[8]) for row in words)}
        with contextlib.suppress(OSError, ValueError, IndexError):
            rows = [line.split() for line in (self._proc / "diskstats").read_text().splitlines()]
            whole = [row for row in rows if not _VIRTUAL.match(row[2]) and (self._block / row[2]).exists()]  # no partitions
            totals |= {"disk_read": SECTOR * sum(int(row[5]) for row in whole), "disk_write": SECTOR * sum(int(row[9]) for row in whole)}
        joules = []
        for counter in self._counters:
            with contextlib.suppress(OSError, ValueError):
                joules.append(counter.joules())
        if joules and len(joules) == len(self._counters):
            totals["watts"] = sum(joules)
        return totals


class UsageLog:
    """Writes the usage of this machine now and then.

    Attributes:
        step: how many steps were taken; the training says so.
    """

    def __init__(self, path: Path, usage: MachineUsage, step: int, every: float = SHORT) -> None:
        """Begin to write, from a thread."""
        self.step = step
        self._path, self._usage, self._every = path, usage, every
        self._over, self._began = threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="usage", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(max(self._every, (time.monotonic() - self._began) / SPREAD)):
            with contextlib.suppress(OSError):  # a full disk ends the run by what it lacks, not by this
                self._write()

    def _write(self) -> None:
        if values := self._usage.read():
            with contextlib.closing(run_directory.LineWriter(self._path)) as writer:
                writer.write([{"step": self.step, "time": time.time(), **values}])

    def close(self) -> None:
        """Write a last row."""
        self._over.set()
        self._thread.join(5)
        with contextlib.suppress(OSError):
            self._write()


@contextlib.contextmanager
def record_usage(run_dir: Path, *, rank: int, gpus: int, step: int) -> Iterator[UsageLog | None]:
    """Write the usage of rank 0's machine into a run directory, while the context lasts. None on the other ranks."""
    if rank:
        yield None
        return
    with contextlib.closing(UsageLog(run_dir / run_directory.USAGE, MachineUsage(gpus), step)) as log:
        yield log
