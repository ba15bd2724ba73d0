"""Memory of a process on a GPU outside of PyTorch's allocator (context, kernels' code, NCCL): ranges, each with its source.

device used = reserved + outside. Figures of one GPU are never used for another: where nothing was measured there is the stated range of
what has been published for any, until `fit_non_pytorch` has learned the own GPU's from a few runs on it.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.core import units
from workbench.core.cache import cache_folder
from workbench.core.codec import JsonDataclass
from workbench.core.device import Device

MIB = 2**20
FEWEST = 3
"""Runs that a fit needs at least; two make a line without residuals."""
_GIB = 2**30
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError)
"""Errors of reading a file that does not hold fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonPyTorchMemory(JsonDataclass):
    """Bytes on the device that are not in the caching allocator's segments."""

    low: int
    """Lowest estimate."""
    mid: int
    """Estimate that is used in sums."""
    high: int
    """Highest estimate."""
    source: str
    """Source of the figures."""

    def __add__(self, other: "NonPyTorchMemory") -> "NonPyTorchMemory":
        return NonPyTorchMemory(
            low=self.low + other.low, mid=self.mid + other.mid, high=self.high + other.high, source=f"{self.source}; {other.source}"
        )

    def __str__(self) -> str:
        return f"{units.bytes_(self.mid)} ({units.bytes_(self.low)} … {units.bytes_(self.high)}): {self.source}"


CONTEXT = NonPyTorchMemory(
    low=287_047_680,
    mid=426 * MIB,
    high=round(1.79 * _GIB),
    source="context of any GPU, as published: 274 MiB (pytorch #86509, modules loaded lazily), 426 MiB (unsloth-zoo #1053, torch 2.10), "
    "1.79 GiB (vllm #10511, with libraries)",
)
"""CUDA's context and the kernels' code, on a GPU without better figures; since torch 1.13 modules are loaded at first use."""
NCCL = NonPyTorchMemory(
    low=8 * MIB,
    mid=256 * MIB,
    high=round(1.79 * _GIB),
    source="NCCL: 1 … 32 channels with 4 MiB to send and to receive (its manual: NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS), "
    "at most 1.79 GiB (vllm #10511, two ranks less one)",
)
"""Buffers of the ranks' communication."""


def non_pytorch_memory(device: str, world_size: int = 1, reserved: int = 0, path: Path | None = None) -> NonPyTorchMemory:
    """Bytes outside the allocator on a GPU: by the user's own fit if there is one, else as published.

    Args:
        device: name of a GPU; "cuda" or an unknown one: the range of any.
        world_size: ranks; from 2 on NCCL's buffers are added.
        reserved: bytes of the allocator's segments, by which a fit grows.
        path: file of the fits; None: the user's.
    """
    name = _known(device)
    fits = [fit for fit in load_fits(path) if _known(fit.device) == name]
    alone = fits[-1].outside(reserved) if fits else _published(name)
    return alone + NCCL if world_size > 1 else alone


def is_known(device: str, path: Path | None = None) -> bool:
    """Are figures of this very GPU used, fitted or published, and not the range of all GPUs?"""
    name = _known(device)
    return _published(name) is not CONTEXT or any(_known(fit.device) == name for fit in load_fits(path))


def _published(device: str) -> NonPyTorchMemory:
    """The context of a GPU as the table of devices has it, else that of any."""
    known = Device.known(device)
    if known is None or known.context is None:
        return CONTEXT
    return NonPyTorchMemory(low=CONTEXT.low, mid=CONTEXT.mid, high=known.context, source=known.context_source)


def cublas_workspace(capability: tuple[int, int] | None) -> int:
    """Bytes that cuBLAS keeps inside the allocator, per handle and stream, from the first matrix product on.

    Args:
        capability: of the GPU; None: not known, taken to be older than (9, 0).

    Source: `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8 by default, 32 MiB
    on Hopper and, in newer torch, Blackwell; pytorch #120925. What the environment variable says instead is not looked at.

    >>> cublas_workspace((8, 0)), cublas_workspace((9, 0))
    (8519680, 33554432)
    """
    return 32 * MIB if capability is not None and 9 <= capability[0] <= 12 else (2 * 4096 + 8 * 16) * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NonPyTorchFit(JsonDataclass):
    """device used = base + slope · reserved, on one GPU with one driver and one torch. The slope is near 1."""

    device: str
    """Name of the GPU."""
    base: float
    """Bytes with nothing reserved: the context."""
    slope: float
    """Bytes per byte reserved."""
    residuals: tuple[float, ...]
    """Device used as measured over as fitted, less 1, of each run."""
    spread: tuple[int, int]
    """Bytes that runs lay below (negative) and above the fit, at most."""
    driver: str = ""
    """Version of the GPU's driver."""
    torch: str = ""
    """Version of torch."""
    date: str = ""
    """Day of the fit, year-month-day."""

    @property
    def worst(self) -> float:
        """Largest residual, without its sign."""
        return max(abs(residual) for residual in self.residuals)

    def outside(self, reserved: int = 0) -> NonPyTorchMemory:
        """Bytes outside when so many are reserved."""
        mid = self.base + (self.slope - 1) * reserved
        source = (
            f"fitted on {self.date or 'an unknown day'} to {len(self.residuals)} runs on {self.device}, "
            f"driver {self.driver or 'unknown'}, torch {self.torch or 'unknown'}: "
            f"{units.bytes_(self.base)} + {self.slope:.4f} · reserved, at most {units.percent(self.worst)} off"
        )
        low, high = (max(0, round(mid + reach)) for reach in self.spread)
        return NonPyTorchMemory(low=low, mid=max(0, round(mid)), high=high, source=source)


def fit_non_pytorch(points: Sequence[tuple[int, int]], device: str, *, driver: str = "", torch: str = "") -> NonPyTorchFit:
    """The line through runs on one GPU that is off by the least in relative terms (least squares of measured over fitted, less 1).

    Args:
        points: (reserved, device used) in bytes of each run; the device's use is that of the process, above what was used before it.
        device: name of the GPU.
        driver: version of its driver.
        torch: version of torch.

    Raises:
        ValueError: fewer than FEWEST runs, all with the same reserved memory, or one that used less than it reserved.
    """
    if len(points) < FEWEST:
        raise ValueError(f"{len(points)} runs: a fit needs at least {FEWEST}, better ten models with three batch sizes each")
    reserved, used = (np.array(column, np.float64) for column in zip(*points, strict=True))
    if (used < reserved).any():
        raise ValueError("a run used less of the device than its allocator reserved: was something else subtracted? Give (reserved, used)")
    if reserved.max() == reserved.min():
        raise ValueError("all runs reserved the same: take models and batch sizes that differ")
    design = np.stack([1 / used, reserved / used], axis=1)
    base, slope = np.linalg.lstsq(design, np.ones(len(used)), rcond=None)[0].tolist()
    off = used - (base + slope * reserved)
    return NonPyTorchFit(
        device=_known(device),
        base=base,
        slope=slope,
        residuals=tuple((off / used).tolist()),
        spread=(min(0, round(off.min())), max(0, round(off.max()))),
        driver=driver,
        torch=torch,
        date=time.strftime("%Y-%m-%d"),
    )


def fits_file() -> Path:
    """Where the user's fits are kept: in $WORKBENCH_CACHE, else in the user's cache."""
    return cache_folder() / "memory-outside.json"


def load_fits(path: Path | None = None) -> list[NonPyTorchFit]:
    """The fits on file, oldest first; none where the file is not there or cannot be read."""
    try:
        return _read(path or fits_file())
    except (OSError, *_DAMAGED):
        return []


def _read(path: Path) -> list[NonPyTorchFit]:
    return [NonPyTorchFit.from_json(row) for row in json.loads(path.read_text(encoding="utf-8"))]


def set_damaged_aside(path: Path | None = None) -> Path | None:
    """Rename a file that holds something else than fits, so that it is not overwritten.

    Returns:
        Its new name; None where there is no such file or it can be read.

    Raises:
        OSError: it cannot be renamed.
    """
    where = path or fits_file()
    try:
        _read(where)
    except FileNotFoundError:
        return None
    except _DAMAGED:
        aside = where.with_suffix(".damaged.json")
        os.replace(where, aside)
        return aside
    return None


def save_fit(fit: NonPyTorchFit, path: Path | None = None) -> Path:
    """Add a fit to the file; it takes the place of one for the same GPU, driver and torch. What is no file of fits is set aside first.

    Returns:
        Where it is.

    Raises:
        OSError: it cannot be written.
    """
    where = path or fits_file()
    set_damaged_aside(where)
    own = (_known(fit.device), fit.driver, fit.torch)
    kept = [old for old in load_fits(where) if (_known(old.device), old.driver, old.torch) != own]
    where.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([row.to_json() for row in (*kept, fit)], indent=1)
    with tempfile.NamedTemporaryFile("w", dir=where.parent, suffix=".new", delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, where)
    return where


def _known(device: str) -> str:
    """The name of a device in the table, whatever it is called; another name stays, less its maker's."""
    known = Device.known(device)
    return known.name if known else device.removeprefix("NVIDIA ")
