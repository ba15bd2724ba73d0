"""What basic operations cost on this machine: `MachineSpeeds`, measured in half a second, kept in a file for each machine and its versions.

`harness/measure_speeds.py` measures it. Verdicts use it for limits that would otherwise be those of the machine on which they were fitted.
"""

import hashlib
import importlib.metadata
import json
import math
import platform
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from workbench.core import units
from workbench.core.cache import cache_folder, host_name, write_private
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.system_load import PROC, text_of, usable_cores

SPEEDS: Mapping[str, tuple[str, str]] = {
    "timer": ("s", "read the clock"),
    "call": ("s", "call a torch.nn.Module that does nothing"),
    "dispatch": ("s", "call an operator on 16 numbers, with autograd"),
    "open": ("s", "open, read and close a small file in the page cache"),
    "copy": ("B/s", "copy memory, one thread"),
    "gloo": ("s", "reduce one number over two ranks on this machine"),
    "gloo_rate": ("B/s", "reduce 8 MiB over two ranks on this machine"),
    "launch": ("s", "launch a kernel on the GPU"),
    "event": ("s", "record a CUDA event"),
    "sync": ("s", "wait for an idle GPU"),
    "pageable": ("B/s", "copy pageable memory to the GPU"),
    "pinned": ("B/s", "copy pinned memory to the GPU"),
    "nccl": ("s", "reduce one number over two GPUs"),
    "nccl_rate": ("B/s", "reduce 8 MiB over two GPUs"),
}
"""What can be measured: its unit, and what is done. Rates are bytes of the message or copy per second."""
FITTED_ON: Mapping[str, float] = {"call": 0.77e-6, "dispatch": 2.0e-6, "open": 8.0e-6, "copy": 1.25e10}
"""The same on the machine on which the limits of verdicts were fitted: two cores of a virtual AMD EPYC, Python 3.11, torch 2.13."""
MOST_SCALED = 8.0
"""Limits follow the machine by at most this factor, up and down. Chosen: machines that train differ by less; more is a disturbed
measurement. With half, very slow machines keep limits that are twice too small, which changes causes of host-bound steps only."""
MAX_SPREAD = 0.5
"""Interquartile range over median above which a figure is too noisy: it is not used, and measured again at the next chance. Measured on a
busy machine with two cores: 0.01 to 0.3 for calls and copies, above 1 for reductions that were disturbed. With half, busy machines keep the
limits as they were fitted; with twice, a limit may be off by half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(JsonDataclass):
    """What the speeds belong to. Another machine, or other versions, have a file of their own."""

    host: str
    cpu: str = ""
    """Model of the processor."""
    cores: float = 1.0
    """That a process may use (affinity, cgroup quota)."""
    python: str = ""
    torch: str = ""
    """Version; "" = not installed."""
    gpus: tuple[str, ...] = ()
    """Models of the NVIDIA GPUs, as the driver lists them."""

    @classmethod
    def here(cls, proc: Path = PROC) -> Self:
        """This machine. Loads no torch, and touches no GPU."""
        model = re.search(r"^(?:model name|Hardware|CPU part)\s*:\s*(.+)$", text_of(proc / "cpuinfo"), re.MULTILINE)
        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = ""
        told = [text_of(path) for path in sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information"))]
        gpus = [match[1].strip() for text in told if (match := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE))]
        return cls(
            host=platform.node(),
            cpu=model[1].strip() if model else platform.processor() or platform.machine(),
            cores=usable_cores(),
            python=platform.python_version(),
            torch=torch,
            gpus=tuple(gpus),
        )

    @property
    def file(self) -> Path:
        """Where its speeds are kept."""
        digest = hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]
        return cache_folder() / f"speeds-{host_name()}-{digest}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed(JsonDataclass):
    """One figure: seconds, or bytes per second."""

    median: float
    """Of some blocks."""
    spread: float = 0.0
    """Interquartile range of the blocks over their median."""
    blocks: int = 1
    """Number of blocks."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median) and self.median > 0 and self.spread >= 0 and self.blocks >= 1):
            raise ValueError(f"{self}: expected a positive number, measured in at least one block")

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The median and the spread of what blocks took."""
        middle = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (middle,) * 3
        return cls(median=middle, spread=(high - low) / middle if middle > 0 else 0.0, blocks=len(values))

    @property
    def noisy(self) -> bool:
        """Do the blocks differ too much?"""
        return self.spread > MAX_SPREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeeds(display.Shown, JsonDataclass):
    """What basic operations cost on a machine."""

    machine: Machine
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    """By names of SPEEDS. What is not there was not measured, or could not be."""
    date: str = ""
    """When the latest of them was measured: "2026-01-31"."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    def get(self, name: str) -> float | None:
        """The median of one speed; None if it is not known, or too noisy.

        Raises:
            ValueError: no such speed.
        """
        if name not in SPEEDS:
            raise ValueError(f"no speed {name!r}: there are {', '.join(SPEEDS)}")
        speed = self.speeds.get(name)
        return None if speed is None or speed.noisy else speed.median

    def slowness(self, name: str) -> float:
        """How many times as long this machine takes as the one on which the limits were fitted; 1 if that is not known."""
        here = self.get(name)
        if here is None:
            return 1.0
        ratio = here / FITTED_ON[name] if SPEEDS[name][0] == "s" else FITTED_ON[name] / here
        return min(MOST_SCALED, max(1 / MOST_SCALED, ratio))

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of some speeds that have to be measured: not known, or too noisy."""
        return [name for name in names if self.get(name) is None]

    def with_measured(self, speeds: Mapping[str, Speed], notes: Sequence[str] = ()) -> Self:
        """The same with what was measured just now; of two noisy figures the quieter counts."""
        better = {
            name: new for name, new in speeds.items() if not new.noisy or name not in self.speeds or new.spread < self.speeds[name].spread
        }
        return replace(self, speeds={**self.speeds, **better}, date=time.strftime("%Y-%m-%d"), notes=tuple(notes))

    @property
    def table(self) -> display.Table:
        """One row per speed: what is done, what it takes, the spread, and how that compares with the machine of the limits."""
        rows = []
        for name, (unit, what) in SPEEDS.items():
            if speed := self.speeds.get(name):
                value = units.seconds(speed.median) if unit == "s" else f"{units.bytes_(speed.median)}/s"
                spread = f"± {units.percent(speed.spread / 2)}" + " (too noisy to be used)" * speed.noisy
                rows.append([what, value, spread, units.times(self.slowness(name)) if name in FITTED_ON else units.MISSING])
        m = self.machine
        return display.Table(
            columns=("to …", "takes, or gives", "middle half", "slower by"),
            rows=rows,
            title=f"Speeds of {m.host}: {m.cpu}, {m.cores:g} cores, Python {m.python}, torch {m.torch or 'not installed'}",
            note=display.notes(
                [
                    f"measured {self.date}, medians, and the middle half of the blocks" if self.date else "not measured yet",
                    "slower by: seconds here over those where the limits of verdicts were fitted, which are multiplied by it; below 1×: "
                    "faster than there",
                    *self.notes,
                ]
            ),
        )

    @classmethod
    def load(cls, machine: Machine | None = None) -> Self:
        """Those on file for this machine; none, with a note, if the file is damaged."""
        here = machine or Machine.here()
        try:
            kept = cls.from_json(json.loads(here.file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls(machine=here)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            return cls(machine=here, notes=(f"{here.file} could not be read ({type(error).__name__}): measured again",))
        if kept.machine != here or not set(kept.speeds) <= set(SPEEDS):
            return cls(machine=here, notes=(f"{here.file} is of another machine or version: measured again",))
        return replace(kept, notes=())

    def save(self) -> str:
        """Keep them for this machine; returns why that failed, or ""."""
        try:
            write_private(self.machine.file, json.dumps(replace(self, notes=()).to_json(), indent=1))
        except OSError as error:
            return f"{self.machine.file} cannot be written ({error.strerror or error}): set WORKBENCH_CACHE to another folder"
        return ""


def slowness(speeds: MachineSpeeds | None, name: str) -> float:
    """`MachineSpeeds.slowness`; 1 where nothing was measured."""
    return 1.0 if speeds is None else speeds.slowness(name)
