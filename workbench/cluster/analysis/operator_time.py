"""The seconds of an operator on a GPU: at its share of the peak or of the bandwidth, or as fast as instructions can be issued."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.core.codec import JsonDataclass
from workbench.core.device import Device
from workbench.core.statistics import Interval

KINDS = {
    "products": "matrix products",
    "convolutions": "convolutions",
    "attention": "fused attention",
    "memory": "elementwise, norms, copies and sums: bound by memory",
    "update": "the optimizer's update",
}
"""Kind of operator → what it is, in words."""
SHARES: Mapping[str, Interval] = {
    "products": Interval(low=0.45, mid=0.65, high=0.85),
    "convolutions": Interval(low=0.2, mid=0.4, high=0.65),
    "attention": Interval(low=0.2, mid=0.3, high=0.7),
    "memory": Interval(low=0.55, mid=0.75, high=0.92),
    "update": Interval(low=0.5, mid=0.75, high=0.92),
}
"""Kind → share of the datasheet's dense peak, or of its bandwidth, that kernels of it reach where nothing was measured. Attention:
FlashAttention-2 reaches 0.3 … 0.7 on A100 forward and backward and 0.35 on H100, its predecessor 0.25 … 0.4 (Dao 2023, arXiv 2307.08691;
Shah et al. 2024, 2407.08608), of the FLOPs that are left with a causal mask; the middle is that of the times at both ends, rounded.
The others are round figures for what kernels reach, assumed; `benchmarks/estimate_time.py` holds the sum against published steps."""
BEST_PRODUCT: Mapping[str, float] = {
    "A100-40GB": 0.869,
    "A100-80GB": 0.869,
    "A100-PCIe-40GB": 0.811,
    "A100-PCIe-80GB": 0.811,
    "H100-SXM": 0.803,
    "H200": 0.803,
    "GH200-144GB": 0.838,
    "B200": 0.776,
    "B300": 0.786,
    "GB200": 0.729,
}
"""GPU → share of its dense peak that the best bf16 product of a search over shapes reached in PyTorch: "Maximum Achievable Matmul FLOPS" in
compute/accelerator/README.md of github.com/stas00/ml-engineering (torch 2.5 to 2.10). It takes the place of the upper end of SHARES in 16
bits, and the others keep their ratio to it: the faster the tensor cores, the less of their peak power and memory allow."""
KERNEL = 3e-6
"""Seconds of the shortest kernel. Assumed: launching and retiring its blocks."""
UNALIGNED = 3.7
"""FLOPs of a product in 16 bits per instruction that the GPU can issue to a thread (`issued`), where the leading dimension of any of its
three matrices is odd: such kernels load each element by itself, or 2 or 4 where these divide it, and the tensor cores wait. An H200 reached
2.8 to 4.5 with 50,257 columns (`benchmarks/RESULTS.md`). That is 0.12 of an H100's peak, and 0.23 of an A100's slower tensor cores."""
ONE_BY_ONE = 90
"""Instructions of an element in kernels that do not move 16 bytes at a time: its place in each tensor, conversion, load, store. There: 50
for permuted copies, 90 for a broadcast mask, 95 for bf16 to fp32, 113 to 130 for transposed copies, `cat` and sums of two formats."""


def issued(device: Device) -> float:
    """Instructions of threads that a GPU can issue per second; infinite where this is not known.

    A multiply-add counts as two FLOPs, so the FP32 peak has twice as many FLOP/s; from capability 7.0 to 8.0 it has as many, since FP32
    then has 64 lanes for 128 threads (CUDA C++ programming guide, arithmetic instructions).
    """
    peak = device.flops_per_sec.get("fp32", math.inf)
    return math.inf if device.capability is None else peak if (7, 0) <= device.capability < (8, 6) else peak / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator(JsonDataclass):
    """An operator with its sizes, as often as it is called in a step."""

    name: str
    """Such as "aten.mm"."""
    phase: str
    """"forward", "backward" or "update"."""
    dtype: str
    """Number format in which it computes."""
    flops: float
    """Of one call."""
    bytes: float
    """Read and written by one call."""
    calls: float
    """Per step."""
    elements: float = 0.0
    """Of one call, that its kernel handles one by one; 0 = it moves 16 bytes at a time."""
    stride: int = 0
    """Of a product in 16 bits: a leading dimension of its matrices, in elements, that is not a multiple of 8; 0 = none."""

    @property
    def kind(self) -> str:
        """A key of KINDS."""
        if "attention" in self.name:
            return "attention"
        if "convolution" in self.name:
            return "convolutions"
        if self.flops:
            return "products"
        return "update" if self.phase == "update" else "memory"

    def seconds(self, device: Device, share: float) -> float:
        """Of all its calls, at a share of the device's peak and, for those that are bound by memory, of its bandwidth.

        Args:
            device: the device whose datasheet counts.
            share: of the peaks, that of products for a GPU that is not in BEST_PRODUCT; the bandwidth's is that of "memory" at best.
        """
        if not self.flops and not self.bytes:
            return 0.0  # there is no kernel
        peak = device.flops_per_sec.get(self.dtype) or device.flops_per_sec.get("fp32") or max(device.flops_per_sec.values())
        moved = self.bytes / (device.bandwidth * (share if self.kind in ("memory", "update") else SHARES["memory"].mid))
        rate, instructions = share * peak, issued(device) * share / SHARES[self.kind].mid
        if self.kind == "products" and self.dtype in ("bf16", "fp16"):
            rate *= BEST_PRODUCT.get(device.name, SHARES["products"].high) / SHARES["products"].high
        if self.stride:
            rate = min(rate, UNALIGNED * math.gcd(self.stride, 8) * instructions)
        return self.calls * max(self.flops / rate, moved, self.elements * ONE_BY_ONE / instructions, KERNEL)
