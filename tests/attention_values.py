"""Values for CUDA's fused attention on real CPU tensors: plain formulas, so that a run on small real tensors can be checked."""

from typing import Any

import torch
from torch import Tensor

from workbench.memory.estimate.cuda.attention import up
from workbench.memory.estimate.cuda.overrides import Overrides


def install(overrides: Overrides) -> None:
    """Give the fused operators CPU kernels; fake tensors have torch's own shape rules and never come here."""
    overrides.below("_scaled_dot_product_flash_attention", _flash)
    overrides.below("_scaled_dot_product_flash_attention_backward", _flash_backward)
    overrides.below("_scaled_dot_product_efficient_attention", _efficient)
    overrides.below("_scaled_dot_product_efficient_attention_backward", _efficient_backward)
    overrides.below("_scaled_dot_product_cudnn_attention", _cudnn)
    overrides.below("_scaled_dot_product_cudnn_attention_backward", _cudnn_backward)


def _spread(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values in fp32, one head per query head."""
    return tensor.float().repeat_interleave(heads // tensor.size(1), 1)


def _gathered(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of `_spread`, in the type and strides of its argument."""
    grouped = gradient.view(gradient.size(0), like.size(1), -1, *gradient.shape[2:]).sum(2)
    return torch.empty_like(like).copy_(grouped)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = query.float() @ _spread(key, query.size(1)).transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores


def _kept(seed: Tensor, shape: torch.Size, dropout: float) -> Tensor | float:
    """What is left of the probabilities after dropout, over them: the same in forward and backward by its seed."""
    if dropout == 0:
        return 1.0
    generator = torch.Generator().manual_seed(int(seed.flatten()[0]))
    return (torch.rand(shape, generator=generator) >= dropout).float() / (1 - dropout)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output in the query's strides, logsumexp, seed."""
    scale = query.size(-1) ** -0.5 if scale is None else scale
    scores = _scores(query, key, bias, causal, scale)
    seed = torch.randint(2**31, ()) if dropout else torch.zeros((), dtype=torch.int64)
    probabilities = torch.softmax(scores, -1) * _kept(seed, scores.shape, dropout)
    output = probabilities @ _spread(value, query.size(1))
    return output.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), torch.logsumexp(scores, -1), seed


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and of the scores."""
    scale = query.size(-1) ** -0.5 if scale is None else scale
    scores = _scores(query, key, bias, causal, scale)
    probabilities, kept = torch.softmax(scores, -1), _kept(seed, scores.shape, dropout)
    of_values = (probabilities * kept).transpose(-2, -1) @ gradient.float()
    of_probabilities = gradient.float() @ _spread(value, query.size(1)).transpose(-2, -1) * kept
    of_scores = probabilities * (of_probabilities - (of_probabilities * probabilities).sum(-1, keepdim=True))
    of_query = torch.empty_like(query).copy_(of_scores @ _spread(key, query.size(1)) * scale)
    of_keys = of_scores.transpose(-2, -1) @ query.float() * scale
    return of_query, _gathered(of_keys, key), _gathered(of_values, value), of_scores


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    output, logsumexp, seed = _forward(query, key, value, None, dropout_p, is_causal, options.get("scale"))
    nothing = torch.empty(0, dtype=query.dtype)
    return output, logsumexp, None, None, query.size(2), key.size(2), seed, torch.zeros((), dtype=torch.int64), nothing


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any, cum_seq_k: Any, *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _, _, dropout, causal, seed, _ = rest
    return _backward(grad_out, query, key, value, None, seed, dropout, causal, scale)[:3]


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    output, logsumexp, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    rows = up(query.size(2), 32) if compute_log_sumexp else 0
    padded = torch.zeros(*query.shape[:2], rows)
    padded[..., : query.size(2)] = logsumexp[..., :rows]
    return output, padded, seed, torch.zeros((), dtype=torch.int64)


def _efficient_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, out: Tensor, logsumexp: Tensor,
    philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: list[bool], is_causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    *gradients, of_scores = _backward(grad_out, query, key, value, attn_bias, philox_seed, dropout_p, is_causal, scale)
    wanted = attn_bias is not None and grad_input_mask[3]
    return *gradients, of_scores.to(query.dtype) if wanted else None


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    output, logsumexp, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    zero = torch.zeros((), dtype=torch.int64)
    return output, logsumexp.unsqueeze(-1), None, None, query.size(2), key.size(2), seed, zero, None


def _cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor,
    attn_bias: Tensor | None, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _backward(grad_out, query, key, value, attn_bias, philox_seed, dropout_p, is_causal, scale)[:3]
