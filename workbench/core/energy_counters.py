"""Reads the hardware's energy counters while a run goes on, and writes the joules into its run directory.

GPUs: NVML's total energy since the driver was loaded (Volta and later), by the package nvidia-ml-py. CPUs: RAPL's packages and memory, in
/sys/class/powercap, which many systems let only root read. A package's counter is that of the whole chip, whoever used it.
"""

import contextlib
import itertools
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from workbench.core import run_directory

POWERCAP = Path("/sys/class/powercap")
INTERVAL = 20.0
"""Seconds between two readings: a RAPL counter of 2**16 J wraps around after 218 s at 300 W, and must be read before."""
_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")


class EnergyCounter(Protocol):
    """A counter of energy."""

    name: str

    def joules(self) -> float:
        """Its reading, from an arbitrary zero; OSError where it cannot be read."""


class RaplCounter:
    """A counter of the powercap tree: microjoules that start again from 0 after `max_energy_range_uj`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self.kind = (folder / "name").read_text().strip()
        self.name = (
            f"RAPL {folder.name.removeprefix('intel-rapl:')} {self.kind}"  # each socket has a zone "dram": the number tells them apart
        )
        self._range = float((folder / "max_energy_range_uj").read_text())
        self._last, self._rounds = float(self._file.read_text()), 0

    def joules(self) -> float:
        """Its reading, wrap-arounds added."""
        now = float(self._file.read_text())
        self._rounds += now < self._last
        self._last = now
        return (now + self._rounds * self._range) / 1e6


class NvmlCounter:
    """The counter of a GPU."""

    def __init__(self, nvml: Any, handle: Any, name: str) -> None:
        self._nvml, self._handle, self.name = nvml, handle, name
        self.joules()

    def joules(self) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        except self._nvml.NVMLError as error:
            raise OSError(f"{self.name}: {error}") from error


def energy_counters(gpus: int = 0, root: Path = POWERCAP) -> list[EnergyCounter]:
    """Every counter that can be read here.

    Args:
        gpus: the first so many visible GPUs.
        root: the powercap tree.
    """
    counters: list[EnergyCounter] = []
    for folder in sorted(root.glob("intel-rapl:*")) if root.is_dir() else ():
        if not _ZONE.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError, ValueError):
            zone = RaplCounter(folder)
            whole = ":" not in folder.name.removeprefix("intel-rapl:") and zone.kind != "psys"  # which has the packages in it
            if whole or zone.kind == "dram":  # cores and so on are in the package
                counters.append(zone)
    return [*counters, *_gpus(gpus)]


def _gpus(count: int) -> Iterator[EnergyCounter]:
    if not count:
        return
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return
    with contextlib.suppress(pynvml.NVMLError, OSError):
        pynvml.nvmlInit()
        for visible in visible_gpus(count):
            by = pynvml.nvmlDeviceGetHandleByIndex if isinstance(visible, int) else pynvml.nvmlDeviceGetHandleByUUID
            yield NvmlCounter(pynvml, by(visible), f"NVML GPU {visible}")


def visible_gpus(count: int, environ: Mapping[str, str] = os.environ) -> list[int | str]:
    """Indices or names, as NVML has them, of the first GPUs that this process sees."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(range(count))
    listed = itertools.takewhile(lambda word: word not in ("", "-1"), (word.strip() for word in visible.split(",")))
    return [int(word) if re.fullmatch("[0-9]{1,9}", word) else word for word in listed][:count]


class EnergyLog:
    """Joules between two moments. A thread reads the counters now and then, since they wrap around.

    Attributes:
        meters: counters that are read; one that stops answering is left out.
    """

    def __init__(self, counters: list[EnergyCounter], every: float = INTERVAL, tell: Callable[[dict[str, Any]], object] = bool) -> None:
        """
        Args:
            counters: the counters that are read.
            every: seconds between two readings.
            tell: called after each reading with what `so_far` returns.
        """
        self._tell = tell
        self.meters: dict[str, EnergyCounter] = {}
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        for meter in counters:
            with contextlib.suppress(OSError, ValueError):
                self._first[meter.name] = self._last[meter.name] = meter.joules()
                self.meters[meter.name] = meter
        self._began, self._over, self._lock = time.perf_counter(), threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, args=(every,), name="energy", daemon=True)
        if self.meters:
            self._thread.start()

    def look(self) -> None:
        """Read every counter once."""
        with self._lock:
            for name, meter in list(self.meters.items()):
                try:
                    self._last[name] = meter.joules()
                except (OSError, ValueError):
                    del self.meters[name]

    def _watch(self, every: float) -> None:
        while not self._over.wait(every):
            self.look()
            self._tell(self.so_far())

    def so_far(self) -> dict[str, Any]:
        """Seconds, and the joules of each counter that has answered till now, at the last reading."""
        with self._lock:
            joules = {name: self._last[name] - self._first[name] for name in self.meters}
        return {"seconds": time.perf_counter() - self._began, "joules": joules}

    def close(self) -> dict[str, Any]:
        """Read for the last time: seconds, and the joules of each counter that answered to the end."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(5)
        self.look()
        return self.so_far()


@contextlib.contextmanager
def record_energy(run_dir: Path, *, rank: int, gpus: int) -> Iterator[None]:
    """Write the energy that the steps inside draw into a run directory. Rank 0 reads the counters of all GPUs of its machine.

    Where no counter can be read nothing is written, and a full disk does not fail the run. It is written now and then, so that a killed
    run has recorded nearly all. A run that goes on from a checkpoint adds to what its earlier attempts drew.
    """
    counters = energy_counters(gpus) if rank == 0 else []
    if not counters:
        yield
        return
    before = _before(run_dir)

    def tell(seen: Mapping[str, Any]) -> None:
        if seen["joules"]:
            run_directory.write_json(run_dir / run_directory.ENERGY, {**_added(before, seen), "gpus": gpus})

    def meanwhile(seen: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            tell(seen)

    log = EnergyLog(counters, tell=meanwhile)
    try:
        yield
    finally:
        try:
            tell(log.close())
        except OSError as error:
            print(f"the energy was not written: {json.dumps(str(error))}", file=sys.stderr)


def _before(run_dir: Path) -> dict[str, Any]:
    """What earlier attempts of the run drew; nothing where their file is damaged."""
    nothing: dict[str, Any] = {"seconds": 0.0, "joules": {}, "lives": 0}
    if not (run_dir / run_directory.ENERGY).exists():
        return nothing
    try:
        written = run_directory.read_json(run_dir / run_directory.ENERGY)
        joules = {name: _number(value) for name, value in written["joules"].items()}
        return {"seconds": _number(written["seconds"]), "joules": joules, "lives": int(written.get("lives", 1))}
    except (OSError, run_directory.DamagedRunError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return nothing


def _number(value: Any) -> float:
    """Joules or seconds; ValueError or TypeError where they cannot be added to."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.40}: expected a finite number")
    return number


def _added(before: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    """Both together, counter by counter."""
    names = dict.fromkeys([*before["joules"], *seen["joules"]])
    joules = {name: before["joules"].get(name, 0.0) + seen["joules"].get(name, 0.0) for name in names}
    return {"seconds": before["seconds"] + seen["seconds"], "joules": joules, "lives": before["lives"] + 1}
