"""Operators that take other memory on CUDA than on the CPU: what they save for backward, and their scratch.

Sources, below aten/src/ATen/native: Dropout.cpp (`is_fused_kernel_acceptable`), SoftMax.cpp (half to float), layer_norm.cpp
(`rms_norm_symint`), group_norm.cpp; cuda/LossCTC.cu, Indexing.cu (`index_put_with_sort_kernel`), Embedding.cu and
EmbeddingBackwardKernel.cu (sorted indices, sums of partial segments), EmbeddingBag.cu (`offset2bag`).

CTC loss: torch refuses it on fake tensors, since the size of what it saves depends on the targets' lengths. It saves the
log-probabilities, the targets, and (batch, steps, 2 × longest target + 1) numbers; backward takes as many again (derivatives.yaml
`_ctc_loss`). cuDNN's own CTC, which takes int32 targets in the host's memory, is not modelled.

Indexing: its derivatives write into zeros. For real tensors they do so in place; for fake ones they take another operator, which returns
a copy (`areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and aten TensorAdvancedIndexing.cpp): one tensor of the size
of the indexed one too many.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.memory.estimate.cuda.overrides import Overrides, aten, composed, exists, has_values, kept_by_graph, operator, temporary

SORTED = 5
"""int64 per index while indices are sorted: sorted and original positions, and the sort's own two buffers and a range."""

FEW_INDICES = 3072
"""Most indices for which an embedding's gradient is summed without sorting."""

ROWS = 10
"""Rows that one thread sums before partial sums are added (`NROWS_PER_THREAD`)."""


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


class _Ctc(torch.autograd.Function):
    """CTC loss: outputs and gradients by the memory they take."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, targets: Tensor, longest: int) -> Tensor:
        steps, batch = (log_probs.size(0), log_probs.size(1)) if log_probs.dim() == 3 else (log_probs.size(0), 1)
        losses = log_probs.new_empty((batch,) if log_probs.dim() == 3 else ())
        ctx.save_for_backward(log_probs, targets, losses, log_probs.new_empty(batch, steps, 2 * longest + 1))
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, _, _, alpha = ctx.saved_tensors
        beta = torch.empty_like(alpha)
        result = torch.empty_like(log_probs)
        del beta
        return result, None, None


def longest_target(targets: Tensor, lengths: Tensor | Sequence[int], batch: int) -> int:
    """The longest target, as far as it is known: of lengths in a tensor the targets' width is taken, or their mean length."""
    if not isinstance(lengths, Tensor):
        return max(lengths, default=0)
    return targets.size(1) if targets.dim() == 2 else -(-targets.numel() // max(batch, 1))


def _ctc_loss(name: str) -> Callable[..., Tensor]:
    """The kernel of `ctc_loss.IntList` or `ctc_loss.Tensor`."""

    def kernel(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Tensor:
        if has_values(log_probs):
            plain: Tensor = composed(name, log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
            return plain
        batch = log_probs.size(1) if log_probs.dim() == 3 else 1
        losses: Tensor = _Ctc.apply(log_probs, targets, longest_target(targets, target_lengths, batch))  # type: ignore[no-untyped-call]
        if zero_infinity:
            losses = torch.where(losses == float("inf"), torch.zeros((), dtype=losses.dtype), losses)
        return losses.mean() if reduction == 1 else losses.sum() if reduction == 2 else losses

    return kernel


WRITERS = {
    "index_put": ("Index", "UnsafeIndex"),
    "scatter_add": ("Gather",),
    "index_add": ("IndexSelect",),
    "put": ("Take",),
    "scatter.src": ("Max", "Min", "Topk", "Sort", "Median", "Nanmedian", "Kthvalue", "Mode", "Cummax", "Cummin"),
}
"""Operator that returns a copy → derivatives that give it fresh zeros."""


def _in_derivative_of(names: Sequence[str]) -> bool:
    """Whether autograd is at one of these nodes, and not to be differentiated itself."""
    node = torch._C._current_autograd_node()
    return node is not None and not torch.is_grad_enabled() and node.name().rstrip("0123456789").removesuffix("Backward") in names


def _in_place(name: str) -> Callable[..., Any]:
    """A kernel that writes into the zeros it is given, where they are the derivative's own."""
    packet, _, overload = name.partition(".")
    there = operator(f"{packet}_.{overload}" if overload else f"{packet}_")
    nodes = WRITERS[name]

    def kernel(original: Callable[..., Any], zeros: Tensor, *args: Any, **kwargs: Any) -> Any:
        return there(zeros, *args, **kwargs) if _in_derivative_of(nodes) else original(zeros, *args, **kwargs)

    return kernel


def _sorting(original: Callable[..., Any], self: Tensor, indices: Sequence[Tensor | None], *args: Any, **kwargs: Any) -> Any:
    """Writing at indices: they are sorted where values are added up, as the derivative of indexing does."""
    accumulate = args[1] if len(args) > 1 else kwargs.get("accumulate", False)
    shapes = [index.shape for index in indices if index is not None]
    count = math.prod(torch.broadcast_shapes(*shapes)) if accumulate and shapes else 0  # type: ignore[no-untyped-call]
    held = temporary(SORTED, count, like=self, dtype=torch.int64) if count else None
    result = original(self, indices, *args, **kwargs)
    del held
    return result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One call of a convolution, with the arguments of cuDNN."""

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
    """Bytes of scratch that cuDNN takes for a convolution: 0, since it is known only by measuring.

    Pass a function of these arguments as `emulate_cuda(convolution_workspace=…)` where it has been.
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
        """Wrap torch's operators."""
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


def install(overrides: Overrides) -> None:
    """Override torch's operators."""
    overrides.composite("dropout", dropout)
    overrides.composite("group_norm", group_norm)
    for name in ("softmax", "log_softmax"):
        overrides.composite(f"{name}.int", _softmax(name))
    if exists("_fused_rms_norm"):  # torch 2.9 and newer
        overrides.composite("rms_norm", rms_norm)
        overrides.below("_fused_rms_norm", _rms_norm_values)
        overrides.below("_fused_rms_norm_backward", _rms_norm_gradients)
    for name in ("ctc_loss.IntList", "ctc_loss.Tensor"):
        overrides.composite(name, _ctc_loss(name))
    for name in WRITERS:
        overrides.around(name, _in_place(name))
    for name in ("index_put_", "_index_put_impl_"):
        if exists(name):
            overrides.around(name, _sorting)
