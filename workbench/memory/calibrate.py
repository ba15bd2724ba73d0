"""Calibrates a GPU: fits, from a few runs on it, the memory that a process takes outside of PyTorch's allocator."""

import csv
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.core.checks import check_budget, whole_number
from workbench.core.display import table as display
from workbench.core.progress import INTERRUPTED, Waiting, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.non_pytorch import FEWEST, MIB, NonPyTorchFit, fit_non_pytorch, fits_file, save_fit, set_damaged_aside
from workbench.memory.api import measure_memory
from workbench.runs.failure import RunError
from workbench.runs.launch import environment
from workbench.runs.spec import RunSpec
from workbench.runs.task import label

MODELS = (
    "workbench.train.tasks:wide_gpt",
    "clipart-resnet",
    "text-gpt",
    "workbench.train.tasks:wide_resnet",
    "workbench.train.tasks:middle_gpt",
    "workbench.train.tasks:deep_resnet",
)
"""Tasks to run, in this order; they reserve very different amounts."""
BATCHES = (8, 32, 128)
"""Micro-batches of each."""
STEPS = 3
"""Optimizer steps of each run; all memory that a step needs has been taken after two."""
_QUERY = ("name", "driver_version", "memory.used", "memory.reserved")
"""Drivers that tell what they reserve for themselves (since 510) do not count it as used, as CUDA's `mem_get_info` does not."""
_OLD_QUERY = ("name", "driver_version")
_PATIENCE = 30.0
"""Seconds within which nvidia-smi answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """This machine's GPU, as its driver describes it."""

    name: str
    """Name of the GPU, by its maker."""
    driver: str
    """Version of the driver."""
    used: int
    """Bytes of its memory that processes use now, without what the driver reserves for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The memory of one run."""

    task: str
    """Task of the run."""
    micro_batch: int
    """Micro-batch."""
    reserved: int
    """Peak of the allocator's segments, in bytes."""
    used: int
    """Memory of the device, in bytes, above what was in use before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(display.Shown):
    """The memory outside of the allocator on this machine's GPU, fitted from runs; `estimate_memory(device=…)` uses it from now on."""

    points: tuple[Point, ...]
    """The runs."""
    fit: NonPyTorchFit
    """The line that fits them."""
    path: Path | None = None
    """File of the fit; None = it could not be written."""
    notes: tuple[str, ...] = field(default=())
    """Notes for the reader."""

    @property
    def word(self) -> str:
        """The fit, and its file."""
        fit = self.fit
        line = f"device used = {units.bytes_(fit.base)} + {fit.slope:.4f} · reserved, at most {units.percent(fit.worst)} off"
        return f"{line}; {'not kept' if self.path is None else f'kept in {self.path}'}"

    @property
    def table(self) -> display.Table:
        """One row per run: reserved, device used, as fitted, and how far off that is."""
        rows = [
            [
                point.task,
                point.micro_batch,
                units.bytes_(point.reserved),
                units.bytes_(point.used),
                units.bytes_(round(self._fitted(point))),
                f"{100 * residual:+.2f} %",
            ]
            for point, residual in zip(self.points, self.fit.residuals, strict=True)
        ]
        fit = self.fit
        return display.Table(
            columns=("task", "micro-batch", "reserved", "device used", "fitted", "measured over fitted"),
            rows=rows,
            title=f"{fit.device}, driver {fit.driver or 'unknown'}, torch {fit.torch or 'unknown'}, {fit.date}",
            note=display.notes([self.word, *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per run, in bytes."""
        pairs = zip(self.points, self.fit.residuals, strict=True)
        names = ("task", "micro_batch", "reserved", "used")
        rows = [{**{name: getattr(p, name) for name in names}, "fitted": self._fitted(p), "residual": residual} for p, residual in pairs]
        return display.frame(rows)

    def _fitted(self, point: Point) -> float:
        return self.fit.base + self.fit.slope * point.reserved

    def __repr__(self) -> str:
        return f"Calibration({self.fit.device!r}, {len(self.points)} runs)"


@accept_synonyms
def calibrate(models: int = 4, *, budget_s: float | None = 600.0, tell: Callable[[str], None] | None = None) -> Calibration:
    """Fit the memory that a process uses on this machine's GPU outside PyTorch's allocator: CUDA context, kernel code and libraries.

    A few models take some steps at three batch sizes, each in fresh processes. The line used = a + b · reserved with the smallest relative
    error is kept, with GPU, driver, torch version and date. `estimate_memory` uses it from then on for this GPU.

    Args:
        models: number of models, 1 … 6; each takes about half a minute.
        budget_s: seconds after which no further run starts; None = no limit. Then, and at Ctrl-C, the runs so far are fitted, if there are
            at least three, and a note says so.
        tell: called with a line of text before each run.

    Raises:
        ValueError: this machine has no NVIDIA GPU, or the number of models is invalid.
        KeyboardInterrupt: Ctrl-C came before three runs had ended.
        RunError: a run failed for a reason other than running out of memory. Runs that do run out of memory are left out, and a note says
            so.
    """
    whole_number("models", models, least=1, most=len(MODELS), also=f", each of them runs at {len(BATCHES)} sizes")
    check_budget(budget_s)
    look()  # says at once that there is none
    with tempfile.TemporaryDirectory(prefix="workbench-calibrate-") as folder, say_what_was_interrupted("calibrate"):
        specs, line = specs_of(models), Waiting("calibrate", budget_s, begin=units.several(models, "model"))
        return calibrated(specs, look, lambda spec: measure_memory(spec, steps=STEPS, budget_s=600, runs_dir=folder), tell=tell, line=line)


def calibrated(
    specs: Sequence[RunSpec],
    look: Callable[[], Gpu],
    measure: Callable[[RunSpec], MemoryBreakdown],
    *,
    torch: str | None = None,
    path: Path | None = None,
    tell: Callable[[str], None] | None = None,
    line: Waiting | None = None,
) -> Calibration:
    """Run specs, fit the line through their memory, and write it to the file of fits.

    Args:
        specs: the runs whose memory is measured.
        look: at the GPU; called before each of them, since what others have there is subtracted.
        measure: runs one, as `measure_memory` does.
        torch: its version; None = of the one that is installed.
        path: file of the fits; None = the user's.
        tell: called with a line of text before each run.
        line: has the budget; None = there is no limit.

    Raises:
        ValueError: too few of them fit the GPU, or what was measured is not of a GPU.
        RunError: one failed for another reason.
    """
    points, notes = list[Point](), list[str]()
    gpu = look()
    busiest = 0
    for number, spec in enumerate(specs):
        if line and line.left <= 0 and len(points) >= FEWEST:
            notes.append(f"the budget ended after {number} of {len(specs)} runs")
            break
        gpu, name = look(), f"{label(spec.task)}, {spec.micro_batch} samples"
        busiest = max(busiest, gpu.used)
        if tell:
            tell(f"run {number + 1} of {len(specs)}: {name} on {gpu.name} …")
        try:
            breakdown = measure(spec)
            if any(note.startswith(INTERRUPTED) for note in breakdown.notes):
                raise KeyboardInterrupt  # it was measured over fewer steps than the others
            points.append(_point(spec, breakdown, gpu.used))
        except KeyboardInterrupt:
            if len(points) < FEWEST:
                raise
            notes.append(f"{INTERRUPTED} after {number} of {len(specs)} runs")
            break
        except RunError as error:
            if error.failure.kind != "out-of-memory":
                raise
            notes.append(f"left out, since memory ran out: {name}")
    if len(points) < FEWEST:
        raise ValueError(
            f"only {len(points)} of {len(specs)} runs had enough memory on {gpu.name}, and a fit needs {FEWEST}: end other processes "
            f"({units.bytes_(busiest)}), or take more models"
        )
    if busiest > 100 * MIB:
        notes.append(f"others had up to {units.bytes_(busiest)} of the GPU, which was subtracted: end other processes for an exact fit")
    version = environment.versions().get("torch", "") if torch is None else torch
    fit = fit_non_pytorch([(point.reserved, point.used) for point in points], gpu.name, driver=gpu.driver, torch=version)
    kept, more = _kept(fit, path)
    return Calibration(points=tuple(points), fit=fit, path=kept, notes=(*notes, *more))


def _point(spec: RunSpec, breakdown: MemoryBreakdown, before: int) -> Point:
    if breakdown.reserved is None or breakdown.outside is None or breakdown.kind != "measured":
        raise ValueError(
            f"{breakdown.title}: {breakdown.kind} on {breakdown.device}; only measurements on a GPU show what is outside its allocator"
        )
    used = breakdown.reserved + max(0, breakdown.outside.mid - before)
    return Point(task=label(spec.task), micro_batch=spec.micro_batch, reserved=breakdown.reserved, used=used)


def _kept(fit: NonPyTorchFit, path: Path | None) -> tuple[Path | None, list[str]]:
    """The file of a fit, and a note; if it cannot be written, the result is kept."""
    notes = []
    try:
        if aside := set_damaged_aside(path):
            notes.append(f"the file of the fits could not be read; it is now {aside}")
        return save_fit(fit, path), notes
    except OSError as error:
        return None, [*notes, f"{path or fits_file()} cannot be written ({error.strerror or error}): set WORKBENCH_CACHE to another folder"]


def specs_of(models: int) -> list[RunSpec]:
    """The specs that `calibrate` runs: the first models, each at all batch sizes, small ones first."""
    return [
        RunSpec(task=task, device="cuda", micro_batch=batch, num_workers=0, precision="fp32")
        for task in MODELS[:models]
        for batch in BATCHES
    ]


def look() -> Gpu:
    """The first GPU that a rank would use, by nvidia-smi.

    Raises:
        ValueError: there is none, or nvidia-smi does not answer.
    """
    if environment.gpu_count() == 0:
        raise ValueError(
            "no NVIDIA GPU is visible here (/dev/nvidia0, CUDA_VISIBLE_DEVICES), and only runs on one show the memory outside of its "
            f"allocator: run `workbench calibrate` on the machine that has it, and copy {fits_file()} from there"
        )
    command = _nvidia_smi("gpu", _QUERY)
    try:
        try:
            return next(_gpus(_answer(command)))
        except (subprocess.CalledProcessError, ValueError):  # an older driver, which counts as used what it reserves
            (name, driver), *_ = csv.reader(_answer(_nvidia_smi("gpu", _OLD_QUERY)).splitlines(), skipinitialspace=True)
            apps = _answer(_nvidia_smi("compute-apps", ("used_memory",))).split()
            return Gpu(name=name.strip(), driver=driver.strip(), used=sum(int(size) for size in apps if size.isdigit()) * MIB)
    except (OSError, subprocess.SubprocessError, StopIteration, ValueError) as error:
        raise ValueError(
            f"no NVIDIA GPU was found: `{' '.join(command)}` did not answer ({type(error).__name__}: {error}). Is its driver "
            "installed, and does CUDA_VISIBLE_DEVICES name a whole GPU?"
        ) from error


def _nvidia_smi(what: str, fields: Sequence[str]) -> list[str]:
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return [*command, f"--id={first}"] if first else command


def _answer(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE).stdout


def _gpus(output: str) -> Iterator[Gpu]:
    """The output of nvidia-smi, in lines of comma-separated values."""
    for name, driver, used, reserved in csv.reader(output.splitlines(), skipinitialspace=True):
        int(reserved)  # else the driver does not tell, and counts it as used
        yield Gpu(name=name.strip(), driver=driver.strip(), used=int(used) * MIB)
