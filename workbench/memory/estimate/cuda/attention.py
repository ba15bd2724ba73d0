"""Attention: `scaled_dot_product_attention` as CUDA runs it — which backend, what it saves for backward, what it takes meanwhile.

The operators called are torch's own for CUDA (their derivatives and shape rules are in every build), so what is saved is what autograd
saves there: q, k, v, the additive mask, the output and an fp32 logsumexp, per query for flash, padded to 32 queries for memory-efficient.

Sources: aten/src/ATen/native/transformers/attention.cpp (`scaled_dot_product_attention`, `preprocess_mask`, `pad_last_dim`),
cuda/sdp_utils.cpp (`use_flash_attention`, `use_mem_efficient_attention`, `check_…`), sdp_utils_cpp.h, cuda/flash_attn/flash_api.cpp
(`mha_bwd`), cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h (`workspace_size`, `kKernelComputesDelta`).
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from workbench.memory.estimate.cuda.overrides import Overrides, aten, composed, temporary

Backend = Literal["flash", "efficient", "cudnn", "math"]

HALF = (torch.float16, torch.bfloat16)


def up(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
    capability: tuple[int, int],
    prefer_cudnn: bool = False,
) -> Backend:
    """The backend that CUDA takes: the first of flash, memory-efficient and math (cuDNN before them, if preferred) that can and may.

    `torch.nn.attention.sdpa_kernel` and `torch.backends.cuda.enable_…_sdp` are heeded. With grouped queries only flash (and cuDNN) is
    fused. Math wants no particular shape: it is what three-dimensional tensors and double precision get.
    """
    allowed: Any = torch.backends.cuda
    sizes = (query, key, value)
    heads_agree = query.size(1) == key.size(1) == value.size(1) if query.dim() == 4 else False
    heads_divide = query.dim() == 4 and key.dim() == 4 and query.size(1) % key.size(1) == 0 and query.size(1) % value.size(1) == 0
    fusable = (
        all(tensor.dim() == 4 for tensor in sizes)
        and query.size(0) == key.size(0) == value.size(0)
        and query.dtype is key.dtype is value.dtype
        and all(tensor.stride(-1) == 1 or tensor.size(-1) == 1 for tensor in sizes)
        and all(tensor.size(-2) > 0 for tensor in sizes)
    )
    if not fusable:
        return "math"
    flash = (
        query.dtype in HALF
        and capability >= (8, 0)
        and mask is None
        and (heads_agree or (grouped and heads_divide))
        and query.size(-1) == key.size(-1) == value.size(-1) <= 256
        and not (causal and query.size(-2) != key.size(-2))
        and not _too_wide_for_backward(query, key, value, dropout, capability)
    )
    if prefer_cudnn and flash and query.size(-1) <= 128 and query.size(-1) % 8 == 0 and (dropout * 16).is_integer():
        return "cudnn"
    if flash and allowed.flash_sdp_enabled():
        return "flash"
    alignment = _alignment(query.dtype, capability)
    efficient = (
        query.dtype in (torch.float32, torch.float16, *([torch.bfloat16] if capability >= (8, 0) else []))
        and heads_agree
        and query.size(-1) == key.size(-1)
        and query.size(-1) % alignment == 0
        and value.size(-1) % alignment == 0
        and _mask_fits(mask, query, key)
    )
    return "efficient" if efficient and allowed.mem_efficient_sdp_enabled() else "math"


def _too_wide_for_backward(query: Tensor, key: Tensor, value: Tensor, dropout: float, capability: tuple[int, int]) -> bool:
    """Heads wider than 192 have no flash backward on sm86 … sm89 and sm120, sm121 (but 225 … 256 without dropout have)."""
    narrow = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    wants_gradient = any(tensor.requires_grad for tensor in (query, key, value))
    width = query.size(-1)
    return narrow and wants_gradient and not (width <= 192 or (dropout == 0 and width > 224))


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Of head sizes for the memory-efficient kernel, in elements (`minimum_gemm_alignment`)."""
    half = dtype in HALF
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    return max(4 if capability >= (8, 0) else 1, (8 if half else 4) if tensor_cores else 1)


def _mask_fits(mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    """Whether the mask has one of the shapes that `check_attn_mask_shape` takes: (L, S) or (B, H, L, S), any of them 1."""
    if mask is None:
        return True
    wanted = (query.size(0), query.size(1), query.size(-2), key.size(-2))[-mask.dim() :]
    return mask.dim() in (2, 4) and all(have in (1, want) for have, want in zip(mask.shape, wanted, strict=True))


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as one to be added, of the same shape: 0 where True, −∞ elsewhere."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), float("-inf"), dtype=dtype))


def aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as the memory-efficient kernel takes it: rows at multiples of 16 elements (a padded copy if they are not), expanded."""
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % 16 for stride in mask.stride()[:-1]):
        width = mask.size(-1)
        mask = functional.pad(mask, [0, 16 - width % 16])[..., :width]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


class Attention:
    """CUDA's attention on CPU tensors.

    Attributes:
        taken: how often each backend was taken.
    """

    def __init__(self, capability: tuple[int, int], prefer_cudnn: bool) -> None:
        self._capability, self._prefer_cudnn = capability, prefer_cudnn
        self.taken: Counter[Backend] = Counter()

    def install(self, overrides: Overrides) -> None:
        """Override torch's own."""
        overrides.composite("scaled_dot_product_attention", self.attend)
        overrides.around("_scaled_dot_product_flash_attention_backward", flash_backward)
        overrides.around("_scaled_dot_product_efficient_attention", efficient_forward)
        overrides.around("_scaled_dot_product_efficient_attention_backward", efficient_backward)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`scaled_dot_product_attention`, with its arguments."""
        if query.is_nested:
            unchanged: Tensor = composed(
                "scaled_dot_product_attention", query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return unchanged
        backend = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, self._capability, self._prefer_cudnn)
        self.taken[backend] += 1
        scale = scale if scale is not None else query.size(-1) ** -0.5
        mask = additive(attn_mask, query.dtype)
        wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        result: Tensor
        if backend == "flash":
            width = query.size(-1)
            padded = [functional.pad(tensor, [0, -width % 8]) if width % 8 else tensor for tensor in (query, key, value)]
            result = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
            return result[..., :width] if width % 8 else result
        if backend == "cudnn":
            result = aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, wants_gradient, dropout_p, is_causal, False, scale=scale
            )[0]
            return result
        if backend == "efficient":
            bias = aligned(mask, query, key)
            result = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, wants_gradient, dropout_p, is_causal, scale=scale
            )[0]
            return result
        result = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return result


def flash_backward(original: Callable[..., Any], gradient: Tensor, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Flash attention's backward with what it takes: the sum of gradient × output per query, and dq in fp32.

    fp32 of (batch, heads, queries rounded up to 128) and (batch, queries rounded up to 128, heads, head size rounded up to 32, above
    128 to 64); a contiguous copy of the gradient where it is none; with grouped queries dk and dv for every query head.
    """
    batch, heads, queries, width = query.shape
    rows, columns = up(queries, 128), up(width, 32 if width <= 128 else 64)
    held = [temporary(batch, heads, rows, like=query, dtype=torch.float32)]
    held.append(temporary(batch, rows, heads, columns, like=query, dtype=torch.float32))
    if not gradient.transpose(1, 2).is_contiguous():
        held.append(temporary(*gradient.shape, like=gradient))
    if key.size(1) != heads:
        held += [temporary(batch, key.size(2), heads, width, like=key) for _ in "kv"]
    result = original(gradient, query, key, *args, **kwargs)
    del held
    return result


def efficient_forward(original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Memory-efficient attention's forward: 16-bit values wider than 128 are summed in fp32 of the output's shape."""
    wide = query.dtype in HALF and value.size(-1) > 128
    held = temporary(*query.shape[:-1], value.size(-1), like=query, dtype=torch.float32) if wide else None
    result = original(query, key, value, *args, **kwargs)
    del held
    return result


def efficient_backward(
    original: Callable[..., Any], gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Memory-efficient attention's backward with what it takes.

    The sum of gradient × output per query (of fp32 by way of their product, of 16 bits inside the kernel), and a workspace in fp32 for
    dq: tiles of 64 × 64, of 128 × 128 for heads wider than 64, each with four counters (`workspace_elements_gq`). 16-bit heads wider
    than 128 add a tile row of dk and dv per head. Splitting over keys, for few heads, is left out.
    """
    batch, heads, queries, width = query.shape
    half = query.dtype in HALF
    product = None if half else temporary(*gradient.shape, like=gradient)
    held = [temporary(batch, heads, queries, like=query, dtype=torch.float32)]
    del product
    side = 64 if width <= 64 else 128
    tiles = up(queries, side) // side * (up(width, side) // side)
    held.append(temporary(batch, heads, tiles, side * side + 4, like=query, dtype=torch.float32))
    if half and width > 128:
        held += [temporary(batch, heads, side, up(tensor.size(-1), side), like=tensor, dtype=torch.float32) for tensor in (key, value)]
    result = original(gradient, query, key, value, *args, **kwargs)
    del held
    return result
