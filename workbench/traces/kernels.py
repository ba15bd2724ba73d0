"""Kernels: how well those of a trace fill the device, by occupancy, blocks per multiprocessor and tensor cores."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench import display, units
from workbench.codec import JsonDataclass
from workbench.traces.columns import Columns
from workbench.traces.details import Details
from workbench.traces.filling import Products, highest, products
from workbench.traces.intervals import Spans, covered, length, union
from workbench.traces.kinds import Kinds
from workbench.traces.nesting import named
from workbench.traces.ops import SHOWN, short
from workbench.traces.tensor_cores import uses
from workbench.traces.windows import Windows

RUNNING = ("kernel", "communication")
"""Kinds of events that are kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """All launches of one kernel; means by time."""

    name: str
    count: int
    seconds: float
    share: float
    """Fraction 0..1 of the time of all kernels that compute."""
    occupancy: float | None
    """Fraction 0..1 of the warps that fit a multiprocessor which this launch can have there, as the profiler estimates; None where the
    file does not tell. A low one may be all it needs, as of a product of matrices."""
    blocks_per_sm: float | None
    """Blocks of the grid per multiprocessor: below 1, some of them have nothing to do."""
    tensor_cores: bool
    """Does its name say that it computes on them?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels(display.Shown, JsonDataclass):
    """The kernels that compute, those that take longest first; collectives and copies have answers of their own.

    Kernels of collectives keep the device busy too: only `utilization` and `sm_efficiency` count them, as torch-tb-profiler does.

    Get them from `trace.kernels()`.
    """

    rows: tuple[Kernel, ...]
    products: tuple[Products, ...]
    """Operators that could use tensor cores, those with most kernel time first."""
    seconds: float
    """Of all these kernels."""
    utilization: float | None
    """Fraction 0..1 of the steps in which a kernel runs, also one of a collective, as nvidia-smi would have it; None without any."""
    sm_efficiency: float | None
    """The same, but a kernel with fewer blocks than the device has multiprocessors counts as the share of them that it can keep busy, and
    one that does not tell its blocks as none; of several at a time the largest counts. None where no kernel tells.
    Source: torch-tb-profiler, gpu_metrics_parser.py."""
    notes: tuple[str, ...] = ()

    @property
    def occupancy(self) -> float | None:
        """Mean over the time of the kernels that tell; None where none does."""
        return _mean([(one.seconds, one.occupancy) for one in self.rows])

    @property
    def blocks_per_sm(self) -> float | None:
        """Likewise."""
        return _mean([(one.seconds, one.blocks_per_sm) for one in self.rows])

    @property
    def tensor_share(self) -> float | None:
        """Fraction 0..1 of kernel time on tensor cores, at least; None without kernels."""
        return sum(one.seconds for one in self.rows if one.tensor_cores) / self.seconds if self.seconds else None

    @property
    def eligible_share(self) -> float | None:
        """Fraction 0..1 of kernel time that operators launched which could use tensor cores; None without kernels."""
        return sum(one.seconds for one in self.products) / self.seconds if self.seconds else None

    @property
    def caption(self) -> str:
        """What they are together."""
        if not self.rows:
            return "; ".join(self.notes)
        said = [
            f"kernels run in {units.percent(self.utilization)} of the steps, those of collectives included",
            f"SM efficiency {units.percent(self.sm_efficiency)}",
            f"occupancy {units.percent(self.occupancy)}",
            f"{units.percent(self.tensor_share)} of kernel time on tensor cores, by their names",
            f"{units.percent(self.eligible_share)} launched by operators that could use them",
        ]
        return "; ".join([*said, *self.notes])

    @property
    def table(self) -> display.Table:
        """The first 15 kernels, then the operators that could use tensor cores."""
        rows = [
            [
                short(one.name),
                f"{one.count:,}",
                units.seconds(one.seconds),
                units.percent(one.share),
                units.percent(one.occupancy),
                units.count(one.blocks_per_sm),
                "yes" if one.tensor_cores else "no",
            ]
            for one in self.rows[:SHOWN]
        ]
        for many in self.products[: SHOWN // 3]:
            name = f"by {many.name}{f' in {many.dtype}' if many.dtype else ''}"
            share = units.percent(many.seconds / self.seconds if self.seconds else None)
            told = [f"{many.count:,}", units.seconds(many.seconds), share, units.MISSING, units.MISSING, units.percent(many.tensor_share)]
            rows.append([name, *told])
        columns = ("kernel", "launches", "time", "share", "occupancy", "blocks per SM", "tensor cores")
        return display.Table(columns=columns, rows=rows, title="Kernels, and how they fill the device", note=self.caption or None)

    to_frame = display.frame_method("rows", Kernel)

    plot = display.plot_method("kernels")

    def __repr__(self) -> str:
        return f"Kernels({len(self.rows)} kernels, {units.percent(self.tensor_share)} of their time on tensor cores)"


def _mean(rows: Sequence[tuple[float, float | None]]) -> float | None:
    told = [(weight, value) for weight, value in rows if value is not None]
    whole = sum(weight for weight, _ in told)
    return sum(weight * value for weight, value in told) / whole if whole else None


def kernels(columns: Columns, kinds: Kinds, windows: Windows, details: Details) -> Kernels:
    """Of a whole file; utilization and SM efficiency are of its steps."""
    events = np.flatnonzero(kinds.where("kernel"))
    utilization, efficiency = _busy(columns, kinds, union(windows.spans), details)
    if not len(events):
        note = "the trace has no kernels that compute" if kinds.device else "the trace has no kernels: a CPU's has operators, trace.ops()"
        return Kernels(rows=(), products=(), seconds=0.0, utilization=utilization, sm_efficiency=efficiency, notes=(note,))
    lengths = (columns.end - columns.start)[events]
    blocks, occupancy = _known(details.blocks[events], 1.0), _known(details.occupancy[events], 100.0)
    with np.errstate(invalid="ignore"):
        failed = (occupancy == 0) & (blocks >= 1)
    occupancy[failed] = np.nan
    told, codes = named(columns)
    keys, at = np.unique(codes[columns.label[events]], return_inverse=True)
    sums = np.bincount(at, weights=lengths) / 1e9
    whole = float(lengths.sum()) / 1e9
    counts = np.bincount(at)
    means = [_by(at, len(keys), lengths, values) for values in (occupancy, blocks)]
    rows = tuple(
        Kernel(
            name=told[keys[i]],
            count=int(counts[i]),
            seconds=float(sums[i]),
            share=float(sums[i]) / whole if whole else 0.0,
            occupancy=means[0][i],
            blocks_per_sm=means[1][i],
            tensor_cores=uses(told[keys[i]]),
        )
        for i in np.argsort(-sums, kind="stable").tolist()
    )
    return Kernels(
        rows=rows,
        products=products(columns, kinds, events, details),
        seconds=whole,
        utilization=utilization,
        sm_efficiency=efficiency,
        notes=(*details.notes, *_notes(blocks, occupancy), *_failed(int(lengths[failed].sum()), int(lengths.sum()))),
    )


def _busy(columns: Columns, kinds: Kinds, steps: Spans, details: Details) -> tuple[float | None, float | None]:
    """Utilization and SM efficiency: of the steps, by all kernels, collectives' too."""
    running = np.flatnonzero(kinds.where(*RUNNING))
    whole = length(steps)
    if not len(running) or not whole:
        return None, None
    busy = int(covered(kinds.cover(*RUNNING), steps).sum()) / whole
    blocks = _known(details.blocks[running], 1.0)
    if not np.isfinite(blocks).any():
        return busy, None
    pieces, values = highest(columns.spans[running], np.minimum(np.nan_to_num(blocks), 1.0))
    return busy, float((covered(steps, pieces) * values).sum()) / whole


def _known(values: NDArray[np.float64], whole: float) -> NDArray[np.float64]:
    """What is below 0 the profiler could not tell either (it overflows there, in some versions)."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(values) & (values >= 0), values / whole, np.nan)


def _by(at: NDArray[np.int64], size: int, lengths: NDArray[np.int64], values: NDArray[np.float64]) -> list[float | None]:
    """Means by time; kernels of no length count evenly where there are no others."""
    told = np.isfinite(values)
    weights = np.maximum(lengths, 1)[told]
    over = np.bincount(at[told], weights=weights, minlength=size)
    sums = np.bincount(at[told], weights=weights * values[told], minlength=size)
    return [float(value / weight) if weight else None for value, weight in zip(sums, over, strict=True)]


def _failed(lost: int, whole: int) -> tuple[str, ...]:
    """An estimate of 0 for a kernel that has a block on each multiprocessor is none: it is wrong where much shared memory is asked for."""
    if not lost:
        return ()
    return (f"for {units.percent(lost / whole)} of kernel time the profiler's occupancy is 0, which cannot be: it counts as not told",)


def _notes(blocks: NDArray[np.float64], occupancy: NDArray[np.float64]) -> tuple[str, ...]:
    silent = [name for name, values in (("occupancy", occupancy), ("blocks per SM", blocks)) if not np.isfinite(values).any()]
    return (f"the file does not tell {' and '.join(silent)} (NVIDIA's profiler does)",) if silent else ()
