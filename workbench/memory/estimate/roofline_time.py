"""Roofline: the least time that a device needs for a step's operators, counted in the dry run that gives the memory."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from workbench.core.device import Device
from workbench.harness.tf32 import uses_tf32
from workbench.memory.estimate.fake_tensors import asked_device


class Call(NamedTuple):
    """An operator with its sizes, as often as it was called."""

    name: str
    """Such as "aten.mm"."""
    phase: str
    """"forward", "backward" or "update"."""
    dtype: str
    """Number format in which it computes."""
    flops: int
    bytes: int
    """Of all tensors that it reads and writes."""


_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        calls: each of them with its sizes → how often it was called.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.seconds, self.computing, self.flops, self.bytes, self.operators = 0.0, 0.0, 0, 0, 0
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
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
        flops = count(*args, **kwargs, out_val=out) if count else _attention_flops(func, args)
        if flops and "attention" in getattr(func, "__name__", ""):
            flops = round(flops * _attended(func, args, kwargs))
        self.operators += 1
        self.flops += flops
        self.bytes += moved
        dtype, peak = self._format(func, tensors)
        computing = flops / peak
        name = f"{getattr(func, 'namespace', '')}.{getattr(getattr(func, 'overloadpacket', func), '__name__', func)}"
        self.calls[Call(name, _phase(), dtype, int(flops), moved)] += 1
        self.computing += computing
        self.seconds += max(computing, moved / self._device.bandwidth)

    def _format(self, func: Any, tensors: list[Tensor]) -> tuple[str, float]:
        """The format in which an operator computes, and its FLOP/s: 16 bits if its largest tensor has them, else fp32 as set up."""
        peaks = self._device.flops_per_sec
        widest = max(tensors, key=Tensor.numel, default=None)
        name = _NAMES.get(widest.dtype, "fp32") if widest is not None else "fp32"
        if name == "fp32" and uses_tf32(convolution="convolution" in func.__name__):
            name = "tf32"
        return name, peaks.get(name) or peaks.get("fp32") or max(peaks.values())


def _phase() -> str:
    """Of a step: an operator of the engine's threads is of the backward, one without gradients of the optimizer's update."""
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "update"


def _attention_flops(func: Any, args: Any) -> int:
    """FLOPs of the CPU's fused attention, which torch's counter lacks (pytorch #195460): two products forward, five backward."""
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    if not name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return 0
    query, key = (args[1], args[2]) if name.endswith("backward") else (args[0], args[1])
    *batch, rows, width = query.shape
    product: int = 2 * torch.Size(batch).numel() * rows * key.shape[-2] * width
    return product * (5 if name.endswith("backward") else 2)


def _attended(func: Any, args: Any, kwargs: Any) -> float:
    """Share of the scores that a fused attention computes: with a causal mask its kernels skip what lies above the diagonal; 1 without.

    torch's counter counts all, which is what attention made of single products (the math backend) computes.
    """
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if not given.get("is_causal") and given.get("custom_mask_type") != 1:  # 1: of `_efficient_attention_forward`, from the top left
        return 1.0
    length = -2 if func.__name__.startswith("_scaled") else 1  # (samples, heads, length, width), or the length second
    rows, columns = given["query"].shape[length], given["key"].shape[length]
    full = max(0, rows - columns)  # rows below the diagonal's end, which attend to all columns
    part = rows - full
    cells: int = part * (part + 1) // 2 + full * columns
    return cells / int(rows * columns)


def _is_view(func: Any) -> bool:
    """Is its result only a view of another tensor's memory?"""
    schema = getattr(func, "_schema", None)
    aliases = [result.alias_info for result in schema.returns] if schema is not None else []
    return any(alias is not None and not alias.is_write for alias in aliases)
