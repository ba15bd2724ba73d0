"""Ranges: a prediction lies between two ends; and the two ranges that every predicted step comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.cost import Cluster

ENDS = ("low", "mid", "high")


class PlanError(ValueError):
    """Something that cannot be planned; the message says what was given, what is allowed and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Where a quantity lies.

    >>> Range(low=1, mid=2, high=4).of(lambda value: 10 * value)
    Range(low=10, mid=20, high=40)
    """

    low: float
    """Lower end."""
    mid: float
    """What is reckoned with where one number is needed."""
    high: float
    """Upper end."""

    def __post_init__(self) -> None:
        if not self.low <= self.mid <= self.high:
            raise PlanError(f"a range from {self.low} over {self.mid} to {self.high}: low ≤ mid ≤ high is wanted")

    def of(self, function: Callable[[float], float]) -> "Range":
        """A function of it, rising or falling."""
        ends = sorted((function(self.low), function(self.high)))
        return Range(low=ends[0], mid=function(self.mid), high=ends[1])

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def reversed(self) -> tuple[float, float, float]:
        """High, mid, low."""
        return self.high, self.mid, self.low

    def to_json(self) -> dict[str, float]:
        """As plain JSON values."""
        return {name: getattr(self, name) for name in ENDS}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Range":
        """Inverse of `to_json`."""
        return cls(**value)


EFFICIENCY = Range(low=0.35, mid=0.5, high=0.65)
"""Share of the dense peak that a GPU reaches while it computes, on average over a step's kernels, of which nothing was measured. Round
figures for what published steps on A100 imply, bubbles and communication taken out: 5th percentile 0.37, median 0.53, 95th 0.64 of 177 in
Hagemann et al. 2023 (arXiv 2311.05610) and 8 in Korthikanti et al. 2022 (2205.05198); `benchmarks/reality_layouts.py` prints them. Eager
FSDP2 on H100 comes to 0.36 of the peak, communication and all (torchtitan's tables). Small models and short sequences reach less."""
LINKS = Range(low=0.6, mid=0.8, high=0.95)
"""Share of a datasheet's bandwidth that collectives reach. 0.8: protocol overhead of about 20 % on NVLink, 370 of 450 GB/s, as a maintainer
of NCCL says (github.com/NVIDIA/nccl-tests, issue 212). 0.95: InfiniBand at its best, 96 of 100 GB/s (issue 119 there). 0.6: assumed for
messages of some ten MiB, of which a published sweep on 8 B200 reaches 0.4 to 0.6 with latency and all."""
MEASURED_LINKS = Range(low=0.9, mid=1.0, high=1.05)
"""The same of links that were measured, at least: they repeat within a few percent, and fall a little with more nodes. Where a link has an
interval of its own that is wider, it counts."""


def share_of(cluster: Cluster) -> Range:
    """Of the bandwidth of a cluster's links that collectives reach: by datasheet LINKS; measured, the wider of both links' intervals.

    >>> share_of(Cluster.named("DGX-H100")) == LINKS
    True
    """
    if not cluster.measured:
        return LINKS
    fitted = [(link.bandwidths, link.bandwidth) for link in (cluster.intra, cluster.inter) if link.bandwidths is not None]
    return Range(
        low=min([MEASURED_LINKS.low, *(ends[0] / mid for ends, mid in fitted)]),
        mid=MEASURED_LINKS.mid,
        high=max([MEASURED_LINKS.high, *(ends[1] / mid for ends, mid in fitted)]),
    )


def given(value: Any, name: str, default: Range) -> Range:
    """A share of a peak, as it was given: one number, (low, mid, high), a Range, or None for the default.

    Raises:
        PlanError: none of these, or not above 0.
    """
    if value is None:
        return default
    if isinstance(value, Range):
        found = value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = Range(low=float(value), mid=float(value), high=float(value))
    else:
        try:
            low, mid, high = (float(end) for end in value)
        except (TypeError, ValueError) as error:
            raise PlanError(f"{name}={value!r:.80}: a share of the peak is wanted, such as 0.5, or (low, mid, high)") from error
        found = Range(low=low, mid=mid, high=high)
    if not 0 < found.low <= found.high <= 1.5:
        raise PlanError(f"{name}={value!r:.80}: a share of the datasheet's peak above 0 is wanted, such as 0.5, or (0.4, 0.5, 0.6)")
    return found
