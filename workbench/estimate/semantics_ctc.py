"""CTC loss on fake tensors, which torch refuses since the size of what it saves depends on the targets' lengths.

Saved are the log-probabilities, the targets, and (batch, steps, 2 × longest target + 1) numbers; backward takes as many again
(derivatives.yaml `_ctc_loss`; aten/src/ATen/native/cuda/LossCTC.cu `log_alpha`, `log_beta`). cuDNN's own CTC, taken for int32 targets in
the host's memory, is not modelled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.estimate.semantics_overrides import Overrides, composed, has_values


class _Ctc(torch.autograd.Function):
    """The losses of a batch, by what they hold."""

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


def _kernel(name: str) -> Callable[..., Tensor]:
    """The kernel of `ctc_loss.IntList` or `ctc_loss.Tensor`."""

    def kernel(
        log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Tensor:  # fmt: skip
        if has_values(log_probs):
            plain: Tensor = composed(name, log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
            return plain
        batch = log_probs.size(1) if log_probs.dim() == 3 else 1
        losses: Tensor = _Ctc.apply(log_probs, targets, longest_target(targets, target_lengths, batch))  # type: ignore[no-untyped-call]
        if zero_infinity:
            losses = torch.where(losses == float("inf"), torch.zeros((), dtype=losses.dtype), losses)
        return losses.mean() if reduction == 1 else losses.sum() if reduction == 2 else losses

    return kernel


def install(overrides: Overrides) -> None:
    """Lay it over torch's own."""
    for name in ("ctc_loss.IntList", "ctc_loss.Tensor"):
        overrides.composite(name, _kernel(name))
