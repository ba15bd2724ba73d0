"""Roofline: the least time that a device needs for a step's operators, counted in the dry run that gives the memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from workbench.core.device import Device
from workbench.harness.tf32 import uses_tf32
from workbench.memory.estimate.fake_tensors import DryRunMode

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Roofline(DryRunMode):  # type: ignore[no-untyped-call]
    """Adds up, operator by operator, the longer of two times: its floating point operations at the device's dense peak, and the bytes of
    its tensors at the device's bandwidth (Williams, Waterman and Patterson 2009).

    That is a floor, for one device: kernels reach less than the peak, launches and communication cost time that is not counted. Ratios
    between two programs of the same model hold better than either.

    Attributes:
        seconds: the floor.
        computing: the same by floating point operations alone.
        flops: floating point operations.
        bytes: read and written.
        operators: that do something (views do nothing).
    """

    def __init__(self, device: Device) -> None:
        """
        Args:
            device: whose datasheet counts.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.seconds, self.computing, self.flops, self.bytes, self.operators = 0.0, 0.0, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it unwraps itself, and its local tensors come back here
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not _is_view(func) and getattr(func, "namespace", "") != "prim":  # prim.device asks a tensor where it is
            self._add(func, args, kwargs, out)
        return out

    def _add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        count: Callable[..., int] | None = flop_registry.get(getattr(func, "overloadpacket", None))
        flops = count(*args, **kwargs, out_val=out) if count else 0
        self.operators += 1
        self.flops += flops
        self.bytes += moved
        computing = flops / self._peak(func, tensors)
        self.computing += computing
        self.seconds += max(computing, moved / self._device.bandwidth)

    def _peak(self, func: Any, tensors: list[Tensor]) -> float:
        """FLOP/s of the format in which an operator computes: 16 bits if its largest tensor has them, else fp32 as torch is set up."""
        peaks = self._device.flops_per_sec
        widest = max(tensors, key=Tensor.numel, default=None)
        name = _NAMES.get(widest.dtype, "fp32") if widest is not None else "fp32"
        if name == "fp32" and uses_tf32(convolution="convolution" in func.__name__):
            name = "tf32"
        return peaks.get(name) or peaks.get("fp32") or max(peaks.values())


def _is_view(func: Any) -> bool:
    """Is its result only a view of another tensor's memory?"""
    schema = getattr(func, "_schema", None)
    aliases = [result.alias_info for result in schema.returns] if schema is not None else []
    return any(alias is not None and not alias.is_write for alias in aliases)
