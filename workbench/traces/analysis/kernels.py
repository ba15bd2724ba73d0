"""Measures how well the kernels of a trace fill the device: occupancy, blocks per multiprocessor, tensor cores.

Whether a kernel computes on tensor cores, and whether an operator could, is read from its name, since a trace has nothing else. A kernel
whose name says neither counts as without, so shares are lower bounds; Triton's names never say.
"""

import heapq
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.details import Details
from workbench.traces.analysis.event_kinds import Kinds, calling_places
from workbench.traces.analysis.flops import FORMATS, WIDTHS
from workbench.traces.analysis.intervals import Numbers, Spans, covered, length, union
from workbench.traces.analysis.nesting import name_numbers, nest_events
from workbench.traces.analysis.operators import SHOWN, short_name
from workbench.traces.analysis.windows import Windows

USES = re.compile(
    r"(?<![a-z])[hsidc](884|1684|1688|8816|16816|16832|16864)(?!\d)"  # what one instruction multiplies, after the type it adds up in
    r"|tensorop|tensor\d+x\d+x\d+|(?<![a-z])[hiw]mma|gmma|xmma|nvjet"
    r"|flash_fwd_(splitkv_)?kernel|flash_bwd_dq_dk_dv|fmha_cutlass[fb]_b?f16"
    r"|first_layer_wgrad_kernel|dgrad_1x1_stride_2x2|conv1x1|conv2d_c1_k1|direct_group"
    r"|cijk_\w*_mi\d|xdl",
    re.IGNORECASE,
)
"""Names of kernels on tensor cores (on AMD's, matrix cores).

Source: the list of NVIDIA's PyProf, pyprof/prof/tc.py (which torch-tb-profiler has taken over), for the older names of cuBLAS and cuDNN;
CUTLASS's names of operations (tensorop, wmma, the shapes of PTX's mma instructions); those of cuBLAS since 12 (nvjet); FlashAttention
and torch's memory-efficient attention in 16 bits; AMD's Tensile (MI: MatrixInstruction) and Composable Kernel (xdl)."""
WITHOUT = re.compile(r"simt|ffma", re.IGNORECASE)
"""Names that say that it does without, whatever else they say: `sm80_xmma_gemm_…_ffma_…` is no kernel of tensor cores."""

ELIGIBLE = re.compile(
    r"aten::(_?(scaled_|grouped_)?mm|_scaled_grouped_mm|t?bmm|addmm_?|_addmm_activation|baddbmm_?|addbmm_?|mv|addmv_?|linear|matmul"
    r"|conv(_transpose)?[123]d|_?(cudnn_|miopen_|slow_|thnn_)?conv(?!ert)\w*|_cudnn_rnn\w*|_?(flash|efficient|cudnn)_attention_\w+"
    r"|_?scaled_dot_product_\w*attention\w*)$"
)
"""Operators that could use them. Source: torch's docs on amp, "CUDA Ops that can autocast to float16", with attention, with what their
backward passes call, and without cells of recurrent nets, whose own kernels are elementwise."""


def uses_tensor_cores(kernel: str) -> bool:
    """Does a kernel compute on tensor cores, by its name?

    >>> uses_tensor_cores("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_nn"), uses_tensor_cores("ampere_sgemm_128x64_tn")
    (True, False)
    """
    return bool(USES.search(kernel)) and not WITHOUT.search(kernel)


def could_use_tensor_cores(operator: str) -> bool:
    """Could an operator use tensor cores: is it a product of matrices, a convolution, or attention?

    >>> could_use_tensor_cores("aten::addmm"), could_use_tensor_cores("aten::add")
    (True, False)
    """
    return bool(ELIGIBLE.match(operator))


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Kernels that calls of one operator launched which could use tensor cores, by the type of its first input."""

    name: str
    dtype: str
    """As `Device.flops_per_sec` names it where it has one; empty where types were not recorded."""
    count: int
    """Kernels, transposing and the like included."""
    seconds: float
    on_tensor_cores: float
    """Seconds of those whose names say so."""

    @property
    def tensor_share(self) -> float | None:
        """Fraction 0..1 of their time; None where they take none."""
        return self.on_tensor_cores / self.seconds if self.seconds else None


def products(columns: Columns, kinds: Kinds, kernels: Numbers, details: Details) -> tuple[Products, ...]:
    """By operator and type: the innermost operator around the launch that could use tensor cores."""
    calls = nest_events(columns, kinds.where("operator", "backward", "runtime", "wait"))
    could = columns.where(lambda label: could_use_tensor_cores(label.name))
    owner = calls.nearest((could & kinds.where("operator"))[calls.events])
    of = calling_places(columns, kinds, calls, kernels)
    of = np.where(of >= 0, owner[np.maximum(of, 0)], -1) if len(owner) else np.full(len(of), -1, dtype=np.int64)
    on = columns.where(lambda label: uses_tensor_cores(label.name))
    sums_of: dict[tuple[str, str], list[int]] = {}
    lengths = columns.lengths[kernels]
    for event, duration, at in zip(kernels[of >= 0].tolist(), lengths[of >= 0].tolist(), calls.events[of[of >= 0]].tolist(), strict=True):
        key = columns.name(at), _dtype(details.inputs[details.input[at]].types)
        sums = sums_of.setdefault(key, [0, 0, 0])
        sums[0] += 1
        sums[1] += duration
        sums[2] += duration if on[event] else 0
    rows = (
        Products(name=name, dtype=dtype, count=count, seconds=taken / 1e9, on_tensor_cores=there / 1e9)
        for (name, dtype), (count, taken, there) in sums_of.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _dtype(types: str) -> str:
    """The number format of the first tensor, by the "Input type" of the file."""
    try:
        recorded = json.loads(types) if types else []
    except (ValueError, RecursionError):
        return ""
    kind = next((name for name in recorded if isinstance(name, str) and name in WIDTHS), "") if isinstance(recorded, list) else ""
    return FORMATS.get(kind, kind)


def highest(spans: Spans, values: NDArray[np.float64]) -> tuple[Spans, NDArray[np.float64]]:
    """The highest value at any time, in pieces that do not overlap.

    >>> [one.tolist() for one in highest(np.array([[0, 4], [2, 6]]), np.array([0.5, 1.0]))]
    [[[0, 2], [2, 6]], [0.5, 1.0]]
    """
    order = np.argsort(spans[:, 0], kind="stable")
    rows = list(zip(spans[order, 0].tolist(), spans[order, 1].tolist(), values[order].tolist(), strict=True))
    times = sorted({time for start, end, _ in rows if end > start for time in (start, end)})
    running: list[tuple[float, int]] = []
    pieces: list[list[int]] = []
    tops: list[float] = []
    at = 0
    for time, until in pairwise(times):
        while at < len(rows) and rows[at][0] <= time:
            heapq.heappush(running, (-rows[at][2], rows[at][1]))
            at += 1
        while running and running[0][1] <= time:
            heapq.heappop(running)
        if not running:
            continue
        if pieces and pieces[-1][1] == time and tops[-1] == -running[0][0]:
            pieces[-1][1] = until
        else:
            pieces.append([time, until])
            tops.append(-running[0][0])
    return np.array(pieces, dtype=np.int64).reshape(-1, 2), np.array(tops, dtype=np.float64)


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
        """Mean over the time of the kernels with a known occupancy; None without any."""
        return _mean([(row.seconds, row.occupancy) for row in self.rows])

    @property
    def blocks_per_sm(self) -> float | None:
        """Mean over the time of the kernels with known blocks; None without any."""
        return _mean([(row.seconds, row.blocks_per_sm) for row in self.rows])

    @property
    def tensor_share(self) -> float | None:
        """Fraction 0..1 of kernel time on tensor cores, at least; None without kernels."""
        return sum(row.seconds for row in self.rows if row.tensor_cores) / self.seconds if self.seconds else None

    @property
    def eligible_share(self) -> float | None:
        """Fraction 0..1 of kernel time that operators launched which could use tensor cores; None without kernels."""
        return sum(product.seconds for product in self.products) / self.seconds if self.seconds else None

    @property
    def caption(self) -> str:
        """All kernels in a line."""
        if not self.rows:
            return display.notes(self.notes)
        parts = [
            f"kernels run in {units.percent(self.utilization)} of the steps, those of collectives included",
            f"SM efficiency {units.percent(self.sm_efficiency)}",
            f"occupancy {units.percent(self.occupancy)}",
            f"{units.percent(self.tensor_share)} of kernel time on tensor cores, by their names",
            f"{units.percent(self.eligible_share)} launched by operators that could use them",
        ]
        return display.notes([*parts, *self.notes])

    @property
    def table(self) -> display.Table:
        """The first 15 kernels, then the operators that could use tensor cores."""
        rows = [
            [
                short_name(kernel.name),
                f"{kernel.count:,}",
                units.seconds(kernel.seconds),
                units.percent(kernel.share),
                units.percent(kernel.occupancy),
                units.count(kernel.blocks_per_sm),
                "yes" if kernel.tensor_cores else "no",
            ]
            for kernel in self.rows[:SHOWN]
        ]
        for many in self.products[: SHOWN // 3]:
            name = f"by {many.name}{f' in {many.dtype}' if many.dtype else ''}"
            share = units.percent(many.seconds / self.seconds if self.seconds else None)
            cells = [f"{many.count:,}", units.seconds(many.seconds), share, units.MISSING, units.MISSING, units.percent(many.tensor_share)]
            rows.append([name, *cells])
        columns = ("kernel", "launches", "time", "share", "occupancy", "blocks per SM", "tensor cores")
        return display.Table(columns=columns, rows=rows, title="Kernels, and how they fill the device", note=self.caption or None)

    to_frame = display.frame_method("rows", Kernel)

    plot = display.plot_method("kernels")

    def __repr__(self) -> str:
        return f"Kernels({len(self.rows)} kernels, {units.percent(self.tensor_share)} of their time on tensor cores)"


def _mean(rows: Sequence[tuple[float, float | None]]) -> float | None:
    known = [(weight, value) for weight, value in rows if value is not None]
    whole = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / whole if whole else None


def kernels(columns: Columns, kinds: Kinds, windows: Windows, details: Details) -> Kernels:
    """Measure the kernels of a whole file; utilization and SM efficiency are those of its steps."""
    events = np.flatnonzero(kinds.where("kernel"))
    utilization, efficiency = _busy(columns, kinds, union(windows.spans), details)
    if not len(events):
        note = "the trace has no kernels that compute" if kinds.device else "the trace has no kernels: a CPU's has operators, trace.ops()"
        return Kernels(rows=(), products=(), seconds=0.0, utilization=utilization, sm_efficiency=efficiency, notes=(note,))
    lengths = columns.lengths[events]
    blocks, occupancy = _known(details.blocks[events], 1.0), _known(details.occupancy[events], 100.0)
    with np.errstate(invalid="ignore"):
        failed = (occupancy == 0) & (blocks >= 1)
    occupancy[failed] = np.nan
    names, codes = name_numbers(columns)
    keys, at = np.unique(codes[columns.label[events]], return_inverse=True)
    sums = np.bincount(at, weights=lengths) / 1e9
    whole = float(lengths.sum()) / 1e9
    counts = np.bincount(at)
    means = [_by(at, len(keys), lengths, values) for values in (occupancy, blocks)]
    rows = tuple(
        Kernel(
            name=names[keys[i]],
            count=int(counts[i]),
            seconds=float(sums[i]),
            share=float(sums[i]) / whole if whole else 0.0,
            occupancy=means[0][i],
            blocks_per_sm=means[1][i],
            tensor_cores=uses_tensor_cores(names[keys[i]]),
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
    """Values below 0 are unknown too (an overflow of some versions of the profiler)."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(values) & (values >= 0), values / whole, np.nan)


def _by(at: NDArray[np.int64], size: int, lengths: NDArray[np.int64], values: NDArray[np.float64]) -> list[float | None]:
    """Means by time; kernels of no length count evenly where there are no others."""
    known = np.isfinite(values)
    weights = np.maximum(lengths, 1)[known]
    over = np.bincount(at[known], weights=weights, minlength=size)
    sums = np.bincount(at[known], weights=weights * values[known], minlength=size)
    return [float(value / weight) if weight else None for value, weight in zip(sums, over, strict=True)]


def _failed(lost: int, whole: int) -> tuple[str, ...]:
    """An occupancy of 0 is wrong for a kernel with a block on each multiprocessor; it occurs with much shared memory."""
    if not lost:
        return ()
    return (f"for {units.percent(lost / whole)} of kernel time the profiler's occupancy is 0, which is impossible: it counts as unknown",)


def _notes(blocks: NDArray[np.float64], occupancy: NDArray[np.float64]) -> tuple[str, ...]:
    silent = [name for name, values in (("occupancy", occupancy), ("blocks per SM", blocks)) if not np.isfinite(values).any()]
    return (f"the file does not say {' and '.join(silent)} (NVIDIA's profiler does)",) if silent else ()
