"""Counts FLOPs and bytes of the operators of a trace, from the shapes and types of their inputs. 1 MAC = 2 FLOPs.

The same operators count as in torch's `FlopCounterMode`, and give the same numbers (a test compares them): products of matrices,
convolutions, attention. Two differ: torch 2.13 does not count flash attention on a CPU, and counts the gradient of the weights of a
grouped convolution once per group too often. Of the elementwise operators `add`, `sub`, `mul` and `div` count, one FLOP per element.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.details import Details
from workbench.traces.analysis.event_kinds import Kinds, calling_places
from workbench.traces.analysis.intervals import Numbers, Spans, covered, union
from workbench.traces.analysis.nesting import Nesting, nest_events

WIDTHS = {
    **dict.fromkeys(("bool", "char", "signed char", "unsigned char", "c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
    **dict.fromkeys(("short", "short int", "c10::Half", "c10::BFloat16"), 2),
    **dict.fromkeys(("int", "float"), 4),
    **dict.fromkeys(("long", "long int", "double", "c10::complex<float>"), 8),
    "c10::complex<double>": 16,
}
"""Bytes per element, by the names that torch writes into "Input type" (on Linux)."""
FORMATS = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "double": "fp64"}
"""Names of `Device.flops_per_sec`."""

Shape = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs and bytes of one call."""

    flops: int
    elements: int
    """That it writes."""
    matrix: bool
    """Is it one of those that model FLOPs are made of?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The inputs of one call, position by position."""

    dims: Sequence[Any]
    types: Sequence[str]
    concrete: Sequence[str]

    def shape(self, at: int) -> Shape:
        """The shape of a tensor argument.

        Raises:
            ValueError: there is none of known shape.
        """
        shape = self.dims[at]
        if not isinstance(shape, list) or not shape or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("no shape")
        return shape

    def value(self, at: int) -> Any:
        """The value of an argument that is no tensor: a number, a truth value or a list.

        Raises:
            ValueError: it was not recorded.
        """
        return json.loads(self.concrete[at].lower())

    def pick(self, at: int, length: int) -> Shape:
        """A list of whole numbers, one for each dimension, as a convolution's stride.

        Raises:
            ValueError: it is none.
        """
        sizes = self.value(at)
        if not isinstance(sizes, list) or len(sizes) not in (1, length) or not all(type(size) is int for size in sizes):
            raise ValueError("no list of whole numbers")
        return sizes * length if len(sizes) == 1 else sizes

    @property
    def dtype(self) -> str:
        """Type of the first tensor."""
        return next((kind for kind in self.types if kind in WIDTHS), "")

    @property
    def read(self) -> int | None:
        """Bytes of all tensors that go in; None where a type is not known."""
        total = 0
        for shape, kind in zip(self.dims, self.types, strict=False):
            if kind in WIDTHS and isinstance(shape, list) and all(type(size) is int for size in shape):
                total += math.prod(shape) * WIDTHS[kind]
        return total or None


def _mm(call: Call, at: int = 0) -> Work:
    (*batch, m, k), (*_, n) = call.shape(at), call.shape(at + 1)
    out = math.prod(batch) * m * n
    return Work(flops=2 * out * k, elements=out, matrix=True)


def _mv(call: Call, at: int = 0) -> Work:
    m, k = call.shape(at)
    return Work(flops=2 * m * k, elements=m, matrix=True)


def _linear(call: Call) -> Work:
    (*rows, k), (*_, n) = call.shape(0), call.shape(1)[:1]
    out = math.prod(rows) * n
    return Work(flops=2 * out * k, elements=out, matrix=True)


def _convolution(call: Call) -> Work:
    """Each element of the output (of the input, if transposed) meets all weights of its group."""
    (batch, channels, *size), (out, per_group, *kernel) = call.shape(0), call.shape(1)
    stride, padding, dilation = (call.pick(at, len(size)) for at in (3, 4, 5))
    transposed, groups = bool(call.value(6)), int(call.value(8))
    if transposed:
        margin = call.pick(7, len(size))
        rows = zip(size, kernel, stride, padding, dilation, margin, strict=True)
        made = math.prod((i - 1) * s - 2 * p + d * (k - 1) + m + 1 for i, k, s, p, d, m in rows)
        return Work(
            flops=2 * batch * math.prod(size) * channels * per_group * math.prod(kernel),
            elements=batch * per_group * groups * made,
            matrix=True,
        )
    rows_ = zip(size, kernel, stride, padding, dilation, strict=True)
    elements = batch * out * math.prod(max(0, (i + 2 * p - d * (k - 1) - 1) // s + 1) for i, k, s, p, d in rows_)
    return Work(flops=2 * elements * per_group * math.prod(kernel), elements=elements, matrix=True)


def _convolution_backward(call: Call) -> Work:
    """FLOPs of the forward once for the gradient of the input and once for that of the weights, where the mask requires them."""
    given, taken, weight = call.shape(0), call.shape(1), call.shape(2)
    mask = call.value(10)
    meets = math.prod(taken[2:] if bool(call.value(7)) else given[2:]) * given[0]
    sizes = [math.prod(taken), math.prod(weight)]
    chosen = [elements for elements, want in zip(sizes, mask, strict=False) if want]
    return Work(flops=2 * meets * math.prod(weight) * len(chosen), elements=sum(chosen), matrix=True)


def _attention(call: Call, at: int = 0, products: int = 2) -> Work:
    """q·kᵀ and scores·v; five such products for the gradients, scores made again among them. A causal mask halves nothing here."""
    (*batch, rows, width), (*_, columns, _), (*_, wide) = call.shape(at), call.shape(at + 1), call.shape(at + 2)
    cells = math.prod(batch) * rows * columns
    flops = 2 * cells * (width + wide) if products == 2 else 2 * cells * (3 * width + 2 * wide)
    elements = math.prod(batch) * (rows * wide if products == 2 else rows * width + columns * (width + wide))
    return Work(flops=flops, elements=elements, matrix=True)


def _elementwise(call: Call) -> Work:
    shapes = [shape for shape in call.dims[:2] if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)]
    deep = max(map(len, shapes))
    wide = [[1] * (deep - len(shape)) + shape for shape in shapes]
    elements = math.prod(max(column) if min(column) else 0 for column in zip(*wide, strict=True))
    return Work(flops=elements, elements=elements, matrix=False)


FORMULAS: dict[str, Callable[[Call], Work]] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::_scaled_mm": _mm,
    "aten::addmm": lambda call: _mm(call, 1),
    "aten::_addmm_activation": lambda call: _mm(call, 1),
    "aten::baddbmm": lambda call: _mm(call, 1),
    "aten::mv": _mv,
    "aten::addmv": lambda call: _mv(call, 1),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::scaled_dot_product_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_backward": lambda call: _attention(call, 1, 5),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda call: _attention(call, 1, 5),
    "aten::_scaled_dot_product_efficient_attention_backward": lambda call: _attention(call, 1, 5),
    "aten::_scaled_dot_product_cudnn_attention_backward": lambda call: _attention(call, 1, 5),
    **{f"aten::{name}{place}": _elementwise for name in ("add", "sub", "mul", "div") for place in ("", "_")},
}
"""Operator → its formula. What is called inside one of them counts with it."""
OTHERWISE = {"aten::linear": _linear}
"""Those that count only where nothing inside them does."""


def work(name: str, dims: str, types: str, concrete: str) -> tuple[Work, Call] | None:
    """Count FLOPs and bytes of one call, by texts of the trace's arguments; None where they are not known."""
    formula = FORMULAS.get(name) or OTHERWISE.get(name)
    if formula is None:
        return None
    try:
        call = Call(dims=_list(dims), types=[str(text) for text in _list(types)], concrete=[str(text) for text in _list(concrete)])
        result = formula(call)
    except (ValueError, IndexError, TypeError, RecursionError):
        return None
    return (result, call) if 0 <= result.flops < 2**62 and result.elements >= 0 else None


def _list(text: str) -> list[Any]:
    items = json.loads(text) if text else []
    return items if isinstance(items, list) else []


BUSY = ("operator", "backward", "optimizer", "collective_call")
"""Kinds of the host whose time is that of operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoofPoint:
    """All calls of an operator on inputs of one shape and type; per step."""

    name: str
    shapes: str
    """Of the inputs, as the file has them."""
    dtype: str
    """Number format of the first input, as `Device.flops_per_sec` names it where it has one."""
    calls: float
    seconds: float
    """Of kernels where a device computes, else of the operator on the CPU with all that it calls."""
    flops: float
    bytes: float | None
    """Of inputs and output, each once: the least that has to move; None where types were not recorded."""
    matrix: bool
    """Is it one of the operators that MFU counts: products of matrices, convolutions, attention?"""
    peak: float | None = None
    """FLOP/s that the device can do in this format at best; None where that is not known."""

    @property
    def flops_per_sec(self) -> float:
        """Reached; nan where it took no time."""
        return self.flops / self.seconds if self.seconds else float("nan")

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCounts:
    """The counts of all operators."""

    rows: tuple[RoofPoint, ...]
    unaccounted: float | None
    """Fraction 0..1 of the time of operators (of kernels, where a device computes) outside of these; None where there is none."""
    notes: tuple[str, ...]


def count_flops(columns: Columns, kinds: Kinds, steps: Spans, details: Details) -> FlopCounts:
    """Count FLOPs and bytes of the operators within the steps.

    Where operators with a formula call others with one, the outermost counts. On a device its time is that of the kernels it launched,
    itself or by what it calls; communication counts for no operator.
    """
    cover = union(steps)
    calls = nest_events(columns, kinds.where(*BUSY, "data_wait", "runtime", "wait"))
    inside = covered(cover, calls.spans) > 0
    keys, code = _signatures(columns, details, calls)
    results = [work(*key) for key in keys]
    chosen = _outermost(calls, [key[0] for key in keys], np.array([each is not None for each in results], dtype=np.bool_), code)
    owner = calls.nearest(chosen)
    time, other = _device_time(columns, kinds, calls, owner, inside) if kinds.device else _host_time(columns, kinds, calls, owner, cover)
    rows: list[RoofPoint] = []
    count = max(1, len(steps))
    picked = np.flatnonzero(chosen & inside)
    for at in np.unique(code[picked]).tolist():
        result = results[at]
        assert result is not None
        done, call = result
        places = picked[code[picked] == at]
        read = call.read
        moved = None if read is None else read + done.elements * WIDTHS[call.dtype]
        each = len(places) / count
        rows.append(
            RoofPoint(
                name=keys[at][0],
                shapes=keys[at][1],
                dtype=FORMATS.get(call.dtype, call.dtype),
                calls=each,
                seconds=float(time[places].sum()) / 1e9 / count,
                flops=done.flops * each,
                bytes=None if moved is None else moved * each,
                matrix=done.matrix,
            )
        )
    spent = float(time[picked].sum())
    whole = spent + other
    return FlopCounts(rows=tuple(rows), unaccounted=other / whole if whole else None, notes=_notes(columns, details, rows))


def _signatures(columns: Columns, details: Details, calls: Nesting) -> tuple[list[tuple[str, str, str, str]], Numbers]:
    """Name, shapes, types and values of the different calls, and which one each place is."""
    events = calls.events
    name = columns.label[events].astype(np.int64)
    wide, deep = len(columns.shapes), len(details.inputs)
    keys, code = np.unique((name * wide + columns.shape[events]) * deep + details.input[events], return_inverse=True)
    signatures = []
    for key in keys.tolist():
        inputs = details.inputs[key % deep]
        label = columns.labels[key // deep // wide]
        signatures.append((label.name, columns.shapes[key // deep % wide], inputs.types, inputs.concrete))
    return signatures, code


def _outermost(calls: Nesting, names: list[str], has: NDArray[np.bool_], code: Numbers) -> NDArray[np.bool_]:
    """Places with a formula that no other with one is around."""
    first = (has & np.array([name in FORMULAS for name in names], dtype=np.bool_))[code]
    second = (has & np.array([name in OTHERWISE for name in names], dtype=np.bool_))[code]
    above = calls.nearest(first)
    outer: NDArray[np.bool_] = first & (above == np.arange(len(first)))
    parents = calls.parent[outer]
    outer[outer] = np.where(parents >= 0, above[np.maximum(parents, 0)] < 0, True)
    if second.any():
        holders = calls.nearest(second)
        filled = np.unique(holders[outer & (holders >= 0)])
        second[filled] = False
        outer |= second
    return outer


def _host_time(columns: Columns, kinds: Kinds, calls: Nesting, owner: Numbers, cover: Spans) -> tuple[Numbers, float]:
    """Nanoseconds of each place with all it calls, and of all operators that none of them is around."""
    total, own = calls.within(cover)
    loader = calls.nearest(kinds.where("data_wait")[calls.events]) >= 0
    rest = (owner < 0) & ~loader & kinds.where(*BUSY)[calls.events]
    return total, float(own[rest].sum())


def _device_time(columns: Columns, kinds: Kinds, calls: Nesting, owner: Numbers, inside: NDArray[np.bool_]) -> tuple[Numbers, float]:
    """Nanoseconds of the kernels that each place launched, itself or by what it calls, and of all kernels that none of them launched."""
    kernels = np.flatnonzero(kinds.where("kernel"))
    lengths = columns.lengths[kernels]
    at = calling_places(columns, kinds, calls, kernels)
    of = np.where(at >= 0, owner[at], -1)
    time = np.zeros(len(calls.events), dtype=np.int64)
    np.add.at(time, of[of >= 0], lengths[of >= 0])
    seen = (of < 0) & (at >= 0)
    seen[seen] = inside[at[seen]]
    return time, float(lengths[seen].sum())


def _notes(columns: Columns, details: Details, rows: list[RoofPoint]) -> tuple[str, ...]:
    notes = list(details.notes)
    if not any(columns.shapes):
        notes.append("shapes were not recorded, and without them there are no FLOPs: profile with record_shapes=True")
    elif not rows:
        notes.append("no operator of the steps has a formula")
    elif any(row.bytes is None for row in rows) and not details.notes:
        notes.append("types of some inputs were not recorded: their bytes are not known")
    return tuple(notes)
