"""Numerical precision of a run: autocast, loss scaling, and the optimizer step with gradient clipping."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from workbench.harness.tf32 import has_tf32
from workbench.runs.spec import SpecError
from workbench.train.sharded_tensors import clip_gradients

TYPES = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
"""Precision → dtype of the computation; None = that of the weights."""


def check_tf32(on: bool | None, device: torch.device) -> None:
    """Check that a device can compute in TF32 where a run is to.

    Raises:
        SpecError: it cannot.
    """
    if on and not has_tf32(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this rank's device, {device},"
        raise SpecError(
            f"tf32=True: {name} has no TF32, which NVIDIA GPUs have from Ampere on (such as A100, RTX 3090); leave tf32 out, or try "
            'precision="amp_fp16" on a GPU'
        )


class Precision:
    """How a run computes: `autocast()` around the forward, then `backward(loss)` and `step(…)`.

    fp16 gradients underflow unless the loss is scaled; the scale grows until gradients overflow, then halves, and that step is skipped.
    bf16 has the range of fp32 and needs no scale.
    """

    def __init__(self, name: str, device: torch.device, *, by_weights: bool = False) -> None:
        """Check that the device can do it.

        Args:
            name: "fp32", "amp_bf16" or "amp_fp16".
            device: the device on which the run computes.
            by_weights: FSDP2 gathers the weights in this precision, so that no autocast is needed.

        Raises:
            SpecError: the GPU has no bf16 units (it would emulate them, slower than fp32).
        """
        self._type = TYPES[name]
        self._device = device
        self._by_weights = by_weights
        if self._type is torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            gpu = torch.cuda.get_device_name(device)
            raise SpecError(f'precision="amp_bf16": {gpu} has no bf16 units and would emulate them; try precision="amp_fp16" or "fp32"')
        self.scaler = GradScaler(device.type, enabled=self._type is torch.float16)
        self.on_norm: Callable[[Tensor], object] | None = None
        """Called with the norm of the gradients in each step that clips them, before they are clipped; it is not waited for."""
        self.skipped = 0
        """Optimizer steps skipped because fp16 gradients overflowed."""

    def autocast(self) -> AbstractContextManager[None]:
        """Context of the forward pass and the loss. In fp32 a null context: it may run inside another autocast, of an experiment."""
        if self._type is None or self._by_weights:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._type)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, scaled if need be."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def loss_scale(self) -> Tensor | None:
        """The factor of `backward` at the moment, without waiting for the device; None = no scaling."""
        if not self.scaler.is_enabled():
            return None
        scale: Tensor = self.scaler.scale(torch.ones((), device=self._device))
        return scale

    def step(
        self, optimizer: Optimizer, model: nn.Module, *, clip_grad_norm: float | None = None, across: dist.ProcessGroup | None = None
    ) -> bool:
        """One optimizer step: unscale, clip, update; the gradients are cleared.

        Returns:
            False if the step was skipped because gradients overflowed.
        """
        scale = self.scaler.get_scale()
        if clip_grad_norm is not None:
            self.scaler.unscale_(optimizer)  # a norm of scaled gradients would be clipped to nothing
            norm = clip_gradients(model.parameters(), clip_grad_norm, self._device, across)
            if self.on_norm:
                self.on_norm(norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        done = self.scaler.get_scale() >= scale  # both 1 without a scaler; update() has waited for the device already otherwise
        self.skipped += not done
        return done
