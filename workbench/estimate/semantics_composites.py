"""Composites: operators that torch puts together differently on CUDA than on the CPU.

Sources: aten/src/ATen/native/Dropout.cpp (`is_fused_kernel_acceptable`), SoftMax.cpp (`softmax`, `log_softmax`: half to float),
layer_norm.cpp (`rms_norm_symint`), group_norm.cpp (`group_norm`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.estimate.semantics_overrides import Overrides, aten, composed, exists, has_values, operator


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Dropout with a mask of one byte per element; the CPU keeps a factor in the input's type.

    In place (`F.dropout(…, inplace=True)`), by channels and alpha dropout are put together in the same way on both.
    """
    if train and 0 < p < 1 and input.numel() > 0:
        result: Tensor = aten.native_dropout(input, p, True)[0]
        return result
    plain: Tensor = composed("dropout", input, p, train)
    return plain


def _softmax(name: str) -> Any:
    """`softmax.int` or `log_softmax.int`: fp16 in, fp32 out without an fp32 copy of the input."""
    fused = operator(f"_{name}")

    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if input.dtype is torch.float16 and dtype is torch.float32 and not has_values(input):
            result: Tensor = fused(input, dim, True)
            return result
        plain: Tensor = composed(f"{name}.int", input, dim, dtype)
        return plain

    return kernel


def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """RMS norm: fused where input and weight have one type; saves its input, the weight and fp32 of one number per row."""
    mixed = weight is not None and weight.dtype is not input.dtype
    if mixed or input.is_complex():
        plain: Tensor = composed("rms_norm", input, normalized_shape, weight, eps)
        return plain
    result: Tensor = aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]
    return result


def _rms_norm_values(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """The fused operator's output and 1 / RMS, for tensors on the CPU; that it has a kernel there makes autograd take its derivative."""
    wide = input.float() if input.dtype is not torch.float64 else input
    axes = [-1 - axis for axis in range(len(normalized_shape))]
    smallest = torch.finfo(wide.dtype).eps if eps is None else eps
    inverse = torch.rsqrt(wide.square().mean(axes, keepdim=True) + smallest)
    normal = wide * inverse
    return (normal if weight is None else normal * weight).to(input.dtype), inverse


def _rms_norm_gradients(
    gradient: Tensor, input: Tensor, normalized_shape: Sequence[int], inverse: Tensor, weight: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The fused operator's gradients."""
    axes = [-1 - axis for axis in range(len(normalized_shape))]
    wide, normal = gradient.to(inverse.dtype), input.to(inverse.dtype) * inverse
    scaled = wide if weight is None else wide * weight
    of_input = inverse * (scaled - normal * (scaled * normal).mean(axes, keepdim=True))
    rows = list(range(input.dim() - len(normalized_shape)))
    of_weight = None if weight is None else ((wide * normal).sum(rows) if rows else wide * normal).to(weight.dtype)
    return of_input.to(input.dtype), of_weight if wanted[1] else None


def group_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Group norm: CUDA's works on, and saves, a contiguous copy of an input in channels-last or other strides (group_norm.cpp)."""
    result: Tensor = composed("group_norm", input.contiguous(), *args, **kwargs)
    return result


def install(overrides: Overrides) -> None:
    """Lay them over torch's own."""
    overrides.composite("dropout", dropout)
    overrides.composite("group_norm", group_norm)
    for name in ("softmax", "log_softmax"):
        overrides.composite(f"{name}.int", _softmax(name))
    if exists("_fused_rms_norm"):  # torch 2.9 and newer
        overrides.composite("rms_norm", rms_norm)
        overrides.below("_fused_rms_norm", _rms_norm_values)
        overrides.below("_fused_rms_norm_backward", _rms_norm_gradients)
