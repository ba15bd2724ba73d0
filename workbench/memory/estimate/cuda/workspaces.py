"""Workspaces: what CUDA's kernels take while they run, where it can be said, and a place to say it where it must be measured.

Sources: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu (sorted indices, sums of partial segments), EmbeddingBag.cu
(`offset2bag`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.memory.estimate.cuda.overrides import Overrides, kept_by_graph, temporary

SORTED = 5
"""int64 per index while indices are sorted: sorted and original positions, and the sort's own two buffers and a range."""

FEW_INDICES = 3072
"""Up to so many indices an embedding's gradient is summed without sorting."""

ROWS = 10
"""Rows that one thread sums before partial sums are added (`NROWS_PER_THREAD`)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One run of a convolution, as cuDNN is asked for it."""

    direction: Literal["forward", "backward"]
    input: tuple[int, ...]
    """Shape: batch, channels, height, width (or as many dimensions as it has)."""
    weight: tuple[int, ...]
    """Shape: channels out, channels in / groups, height, width; the first two swapped if transposed."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int
    dtype: torch.dtype
    channels_last: bool


def convolution_workspace(convolution: Convolution, capability: tuple[int, int]) -> int:
    """Bytes of scratch that cuDNN takes for a convolution: 0, for it is not known without having been measured.

    Pass a function of these arguments as `cuda_semantics(convolution_workspace=…)` where it has been.
    """
    return 0


def distinct(indices: int, rows: int) -> int:
    """Expected number of different rows among so many drawn uniformly: what an embedding's gradient touches, at most."""
    return round(rows * -math.expm1(-indices / rows)) if rows else 0


class Workspaces:
    """Scratch around convolutions, embeddings and indexing.

    Attributes:
        convolutions: how many convolutions ran.
    """

    def __init__(self, measured: Callable[[Convolution, tuple[int, int]], int], capability: tuple[int, int]) -> None:
        self._measured, self._capability = measured, capability
        self.convolutions = 0

    def install(self, overrides: Overrides) -> None:
        """Lay it around torch's own."""
        overrides.around("convolution", self._forward)
        overrides.around("convolution_backward", self._backward)
        overrides.around("embedding_dense_backward", embedding_backward)
        overrides.around("_embedding_bag", embedding_bag)
        overrides.around("native_group_norm_backward", group_norm_backward)

    def _forward(self, original: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Any:
        self.convolutions += 1
        held = self._take("forward", input, weight, settings)
        result = original(input, weight, bias, *settings)
        del held
        return result

    def _backward(
        self, original: Callable[..., Any], gradient: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, *settings: Any
    ) -> Any:
        held = self._take("backward", input, weight, settings)
        result = original(gradient, input, weight, bias_sizes, *settings)
        del held
        return result

    def _take(self, direction: Literal["forward", "backward"], input: Tensor, weight: Tensor, settings: Sequence[Any]) -> Tensor | None:
        stride, padding, dilation, transposed, _, groups = settings[:6]
        last = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
        convolution = Convolution(
            direction=direction,
            input=tuple(input.shape),
            weight=tuple(weight.shape),
            stride=tuple(stride),
            padding=tuple(padding),
            dilation=tuple(dilation),
            transposed=transposed,
            groups=groups,
            dtype=input.dtype,
            channels_last=input.dim() in (4, 5) and not input.is_contiguous() and input.is_contiguous(memory_format=last),
        )
        size = self._measured(convolution, self._capability)
        return temporary(size, like=input, dtype=torch.uint8) if size else None


def embedding_backward(original: Callable[..., Any], gradient: Tensor, indices: Tensor, rows: int, *args: Any) -> Any:
    """The gradient of an embedding: beyond 3,072 indices they are sorted, and rows summed in parts, in fp32.

    The number of parts depends on the indices; it is taken as if they were drawn uniformly.
    """
    count = indices.numel()
    held = []
    if count > FEW_INDICES:
        held.append(temporary(SORTED, count, like=indices, dtype=torch.int64))
        parts = distinct(count, rows) + count // ROWS
        held.append(temporary(parts, gradient.size(-1), like=gradient, dtype=torch.float32))
    result = original(gradient, indices, rows, *args)
    del held
    return result


def embedding_bag(original: Callable[..., Any], weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
    """An embedding bag: CUDA always keeps the bag of every index for backward, the CPU's fast path does not."""
    result = original(weight, indices, *args, **kwargs)
    if result[1].numel() == 0:
        kept_by_graph(result[0], temporary(indices.numel(), like=indices))
    return result


def group_norm_backward(
    original: Callable[..., Any],
    gradient: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    samples: int,
    channels: int,
    elements: int,
    groups: int,
    *args: Any,
) -> Any:
    """The gradient of a group norm: two sums and a factor per sample and channel, two terms per sample and group, in fp32.

    Source: aten/src/ATen/native/cuda/group_norm_kernel.cu, `GroupNormBackwardKernelImplInternal` (ds, db; c1; c2, c3).
    """
    held = [temporary(samples, channels, like=input, dtype=torch.float32) for _ in range(3)]
    held += [temporary(samples, groups, like=input, dtype=torch.float32) for _ in range(2)]
    result = original(gradient, input, mean, rstd, weight, samples, channels, elements, groups, *args)
    del held
    return result
