"""The ranges behind every predicted interval of a plan: shares of peak FLOP/s, of link bandwidth and of predicted memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.energy import Energy
from workbench.cluster.analysis.operator_time import BEST_PRODUCT
from workbench.core.checks import choice
from workbench.core.device import Device
from workbench.core.statistics import Interval

Floats = NDArray[np.float64]
ENDS = ("low", "mid", "high")
_ON_A100 = BEST_PRODUCT["A100-80GB"]


class PlanError(ValueError):
    """Something that cannot be planned; the message says what was given, what is allowed and what to try."""


def between(value: Interval, words: Callable[[float], str]) -> str:
    """Text of the middle, with both ends in brackets where they differ."""
    low, mid, high = (words(getattr(value, end)) for end in ENDS)
    return mid if low == high else f"{mid} ({low} … {high})"


def at_ends(used: Energy, name: str, seconds: Interval) -> Interval | None:
    """Interval of a figure of energy such as "money", from the low ends of joules and seconds to the high ends; None = no such figure."""
    if getattr(used, name) is None:
        return None
    joules = (used.joules if used.low is None else used.low, used.joules, used.joules if used.high is None else used.high)
    bare = replace(used, low=None, high=None)
    pairs = zip(joules, (getattr(seconds, end) for end in ENDS), strict=True)
    low, mid, high = (getattr(replace(bare, joules=drawn, seconds=taken), name) for drawn, taken in pairs)
    return Interval(low=low, mid=mid, high=high)


def intervals_around(columns: Sequence[Floats], mid: Floats) -> list[Interval]:
    """The interval from the smallest to the largest of several columns, in each row."""
    low, high = np.min([*columns, mid], 0), np.max([*columns, mid], 0)
    return [Interval(low=float(a), mid=float(b), high=float(c)) for a, b, c in zip(low, mid, high, strict=True)]


EFFICIENCY = Interval(low=0.35, mid=0.5, high=0.65)
"""Share of the dense peak that a GPU reaches while it computes, on average over a step's kernels, if it was not measured. Round
figures for what published steps on A100 imply, bubbles and communication taken out: 5th percentile 0.37, median 0.53, 95th 0.64 of 177 in
Hagemann et al. 2023 (arXiv 2311.05610) and 8 in Korthikanti et al. 2022 (2205.05198); `benchmarks/reality_layouts.py` prints them. Eager
FSDP2 on H100 comes to 0.36 of the peak, communication and all (torchtitan's tables). Small models and short sequences reach less. Other
GPUs: `efficiency_of`."""
SLOWEST_LEVEL = 4.0
"""Furthest level of a measured step, as a multiple of the way from the middle of a range to its slow end: about an eighth of the peak."""
LINKS = Interval(low=0.5, mid=0.8, high=0.95)
"""Share of a datasheet's bandwidth that collectives reach; with another than the middle, the latency is divided by the same ratio (the
share over the middle). 0.8: protocol overhead of about 20 % on NVLink, 370 of 450 GB/s, as a maintainer of NCCL says
(github.com/NVIDIA/nccl-tests, issue 212). 0.95: InfiniBand at its best, 96 of 100 GB/s (issue 119 there). 0.5: for messages of some ten
MiB, of which a published sweep on 8 B200 reaches 0.4 to 0.6 with latency and all."""
MEASURED_LINKS = Interval(low=0.9, mid=1.0, high=1.05)
"""The same of links that were measured, at least: they repeat within a few percent, and fall a little with more nodes. Where a link has an
interval of its own that is wider, it counts."""
LAUNCH = Interval(low=4e-6, mid=12e-6, high=35e-6)
"""Seconds in which the host launches an operator of an eager step, with its part of Python, autograd and autocast. An operator alone takes
5 to 10 µs, and with CUDA graphs less. Whole steps took 20 to 38 µs an operator on a virtual machine with an H200 whose bare launch takes
8.5 µs (`make gpu-check`, part `step_times`); the middle is between the two, rounded. `MachineSpeeds` measures the bare one on your own
machine ("dispatch": 2 µs without a GPU's launch, of 3 to 5 µs)."""
SLOWEST_LAUNCH = 100e-6
"""Beyond it a step's length is not the host's doing: with a checkpointing policy in Python an operator took 56 µs on that machine."""
OTHER_LAUNCH = {"low": 0.7, "mid": 1.0, "high": 1.75}
"""Of another program on the same host, over that of the measured one: each has its own share of Python. Seen there: 0.84 … 1.75."""
OTHER_LAYOUT = Interval(low=0.74, mid=1.0, high=1.35)
"""Efficiency that one published layout of a model implies, over that which another of it implies: 10th and 90th percentile of all pairs of
the same model and length in the grids of Hagemann et al. 2023, on whatever number of GPUs (on the same: 0.75 and 1.32; 5th and 95th 0.67
and 1.49). So far may other layouts be from a measured one."""
MESSAGE = Interval(low=30e-6, mid=60e-6, high=120e-6)
"""Seconds of a small message between two hosts over gloo, by which PyTorch checks collectives. Assumed: between two processes of one busy
machine the quickest hundred took 32 to 42 µs each; the middle was chosen with the published steps of nanotron in view, which wait so."""
HELD = Interval(low=0.95, mid=1.0, high=1.25)
"""What PyTorch's allocator really holds over the predicted bytes: fragmentation, workspaces, buffers that no formula has. Round ends, for
both kinds of model. Programs: 19 published steps on GPUs of which reserved bytes are known have their 5th percentile at 1.00, their median
at 1.05 and their 95th at 1.24 (`benchmarks/memory_published.py`); each on one GPU, so that what several hold beside is in none.
Transformers, by closed forms: of 344 published layouts on 80 GB (`benchmarks/reality_layouts.py`) all 179 that ran had memory for 0.98
times the prediction or more, and the 165 that ran out of memory for 1.24 times at most, but for two (1.44 and 1.45); a normal law of the
logarithm, which these two widen, gives 0.92 … 1.41 and 1.14 in the middle. The middle here is not the median but the prediction itself:
with 1.05 or 1.14 a few layouts more are judged rightly (93 and 94 % for 92 %), but the best ones are ruled out more often (listed in five
grids of ten for eight)."""
HELD_SOURCES = {False: "as 344 published layouts of Transformers bear out", True: "as 19 published steps of programs imply"}
"""Were bytes counted by dry runs instead of closed forms? → where HELD comes from, in words."""


def link_share(cluster: Cluster, name: str) -> Interval:
    """Share of a link's bandwidth that collectives reach: by datasheet LINKS; measured, MEASURED_LINKS or its own wider interval.

    >>> link_share(Cluster.named("DGX-H100"), "inter") == LINKS
    True
    """
    if name not in cluster.measured_links:
        return LINKS
    link = cluster.intra if name == "intra" else cluster.inter
    low, high = link.bandwidths or (link.bandwidth, link.bandwidth)
    return Interval(
        low=min(MEASURED_LINKS.low, low / link.bandwidth), mid=MEASURED_LINKS.mid, high=max(MEASURED_LINKS.high, high / link.bandwidth)
    )


def efficiency_of(device: Device, precision: str) -> Interval:
    """EFFICIENCY on a GPU: that of A100 times what the best product of a search over shapes reaches of this GPU's peak, over what it
    reaches of an A100's (`operator_time.BEST_PRODUCT`). In fp32, and on GPUs that were not searched, EFFICIENCY as it is.

    >>> efficiency_of(Device.named("A100-80GB"), "amp_bf16") == EFFICIENCY
    True
    >>> round(efficiency_of(Device.named("H100-SXM"), "amp_bf16").mid, 3)
    0.462
    """
    ratio = BEST_PRODUCT.get(device.name, _ON_A100) / _ON_A100
    return EFFICIENCY if FORMATS[precision] == "fp32" else EFFICIENCY.of(lambda share: ratio * share)


def furthest_levels(efficiency: Interval) -> tuple[float, float]:
    """Furthest levels of a measured step: that at which kernels reach the peak, and SLOWEST_LEVEL."""
    return math.log(efficiency.mid) / math.log(efficiency.high / efficiency.mid), SLOWEST_LEVEL


def share_interval(value: Any, name: str, default: Interval, what: str = "a share of the datasheet's peak", such: str = "0.5") -> Interval:
    """A share as an Interval, from one number, (low, mid, high), an Interval, or None for the default.

    Raises:
        PlanError: none of these, or not above 0.
    """
    if value is None:
        return default
    if isinstance(value, Interval):
        ends: Any = (value.low, value.mid, value.high)
    else:
        ends = [value] * 3 if isinstance(value, int | float) and not isinstance(value, bool) else value
    try:
        low, mid, high = map(float, ends)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"{name}={value!r:.80}: expected {what}, such as {such}, or (low, mid, high)") from error
    if not low <= mid <= high:
        raise PlanError(f"{name}={value!r:.80}: expected low ≤ mid ≤ high, or one number such as {such}")
    if not 0 < low <= high <= 1.5:
        raise PlanError(f"{name}={value!r:.80}: expected {what} above 0, such as {such}, or (low, mid, high), of at most 1.5")
    return Interval(low=low, mid=mid, high=high)


FORMATS = {"fp32": "fp32", "amp_bf16": "bf16", "amp_fp16": "fp16"}
"""Precision → format of its products. fp32 is not tf32: torch leaves that off, and so do runs of the workbench."""


def peak_of(device: Device, precision: str) -> float:
    """Dense FLOP/s by the datasheet.

    Raises:
        PlanError: an unknown precision, or one that the datasheet does not have.
    """
    choice("precision", precision, FORMATS, error=PlanError)
    if FORMATS[precision] not in device.flops_per_sec:
        raise PlanError(
            f"precision={precision!r} on {device.name}: its datasheet has {', '.join(device.flops_per_sec)} only; "
            "try another precision or GPU"
        )
    return device.flops_per_sec[FORMATS[precision]]
