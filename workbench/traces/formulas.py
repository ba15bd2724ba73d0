"""Formulas: FLOPs and bytes of an operator, from the shapes and types of its inputs as a trace has them. 1 MAC = 2 FLOPs.

The same operators count as in torch's `FlopCounterMode`, and give the same numbers (a test compares them): products of matrices,
convolutions, attention. Two differ, as torch 2.13 does not count flash attention on a CPU, and the gradient of the weights of a grouped
convolution once per group too often. Of the elementwise operators `add`, `sub`, `mul` and `div` have a number, one FLOP per element.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WIDTHS = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4, "short": 2, "short int": 2,
    "signed char": 1, "unsigned char": 1, "char": 1, "bool": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
    "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip
"""Bytes per element, by the names that torch writes into "Input type" (on Linux)."""
FORMATS = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "double": "fp64"}
"""Names of `Device.flops_per_sec`."""

Shape = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one call has to do."""

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
        """Of a tensor.

        Raises:
            ValueError: there is none of known shape.
        """
        found = self.dims[at]
        if not isinstance(found, list) or not found or not all(type(one) is int and one >= 0 for one in found):
            raise ValueError("no shape")
        return found

    def value(self, at: int) -> Any:
        """Of what is no tensor: numbers, truth values, lists.

        Raises:
            ValueError: it was not recorded.
        """
        return json.loads(self.concrete[at].lower())

    def pick(self, at: int, length: int) -> Shape:
        """A list of whole numbers, one for each dimension, as a convolution's stride.

        Raises:
            ValueError: it is none.
        """
        found = self.value(at)
        if not isinstance(found, list) or len(found) not in (1, length) or not all(type(one) is int for one in found):
            raise ValueError("no list of whole numbers")
        return found * length if len(found) == 1 else found

    @property
    def dtype(self) -> str:
        """Type of the first tensor."""
        return next((kind for kind in self.types if kind in WIDTHS), "")

    @property
    def read(self) -> int | None:
        """Bytes of all tensors that go in; None where a type is not known."""
        found = 0
        for shape, kind in zip(self.dims, self.types, strict=False):
            if kind in WIDTHS and isinstance(shape, list) and all(type(one) is int for one in shape):
                found += math.prod(shape) * WIDTHS[kind]
        return found or None


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
    """As much again for the gradient of the input, and for that of the weights, as far as they are wanted."""
    given, taken, weight = call.shape(0), call.shape(1), call.shape(2)
    mask = call.value(10)
    meets = math.prod(taken[2:] if bool(call.value(7)) else given[2:]) * given[0]
    wanted = [math.prod(taken), math.prod(weight)]
    chosen = [elements for elements, want in zip(wanted, mask, strict=False) if want]
    return Work(flops=2 * meets * math.prod(weight) * len(chosen), elements=sum(chosen), matrix=True)


def _attention(call: Call, at: int = 0, products: int = 2) -> Work:
    """q·kᵀ and scores·v; five such products for the gradients, scores made again among them. A causal mask halves nothing here."""
    (*batch, rows, width), (*_, columns, _), (*_, wide) = call.shape(at), call.shape(at + 1), call.shape(at + 2)
    cells = math.prod(batch) * rows * columns
    flops = 2 * cells * (width + wide) if products == 2 else 2 * cells * (3 * width + 2 * wide)
    elements = math.prod(batch) * (rows * wide if products == 2 else rows * width + columns * (width + wide))
    return Work(flops=flops, elements=elements, matrix=True)


def _elementwise(call: Call) -> Work:
    shapes = [one for one in call.dims[:2] if isinstance(one, list) and all(type(n) is int and n >= 0 for n in one)]
    deep = max(map(len, shapes))
    wide = [[1] * (deep - len(one)) + one for one in shapes]
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
    """What one call has to do; None where that is not known.

    Args:
        name: of the operator.
        dims: "Input Dims" as the file has them.
        types: "Input type".
        concrete: "Concrete Inputs".
    """
    formula = FORMULAS.get(name) or OTHERWISE.get(name)
    if formula is None:
        return None
    try:
        call = Call(dims=_list(dims), types=[str(one) for one in _list(types)], concrete=[str(one) for one in _list(concrete)])
        found = formula(call)
    except (ValueError, IndexError, TypeError, RecursionError):
        return None
    return (found, call) if 0 <= found.flops < 2**62 and found.elements >= 0 else None


def _list(text: str) -> list[Any]:
    found = json.loads(text) if text else []
    return found if isinstance(found, list) else []
