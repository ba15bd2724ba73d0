"""`TwinRun`: a simulated step of DDP's real reducer over a simulated network, bucket by bucket, next to the closed form."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_cost import CostError, Link, all_reduce, checked_ranks
from workbench.cluster.analysis.iteration import Overlap, buckets, overlap
from workbench.cluster.analysis.links import Sweep
from workbench.core import units
from workbench.core.checks import is_whole
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

Network = Link | Sweep | Cluster | str | Callable[[float], float]
"""Gives the seconds of an all-reduce: a link, a measured sweep, a cluster or its name, or a function of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinLayer:
    """A layer with parameters, whose computing is simulated."""

    size: int
    """Bytes of its gradients: a whole number of fp32 numbers."""
    forward: float
    """Seconds."""
    backward: float
    """Seconds, after which its gradients are complete."""

    def __post_init__(self) -> None:
        if not is_whole(self.size, least=4) or self.size % 4:
            raise CostError(f"size={self.size!r}: expected bytes of at least one fp32 number, a multiple of 4")
        if min(self.forward, self.backward) < 0:
            raise CostError(f"forward={self.forward!r}, backward={self.backward!r}: expected seconds of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinBucket:
    """One all-reduce. Seconds since the backward began."""

    size: int
    """Bytes."""
    ready: float
    """When its last gradient was complete, and DDP sent it."""
    start: float
    """When the network started it."""
    end: float
    """When it was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinRun(display.Shown, JsonDataclass):
    """A step of the DDP simulator. Get one from `wb.ddp_twin`."""

    ranks: int
    """Number of simulated ranks."""
    buckets: tuple[TwinBucket, ...]
    """The buckets of the reducer, in order."""
    forward: float
    """Seconds of the forward."""
    backward: float
    """Seconds of computing in the backward."""
    step: float
    """Seconds from the start of the forward to the end of the last bucket."""
    closed: Overlap
    """The closed form of the same layers and network, with its own buckets and times. In real time, for layers as long as they took
    without the network."""
    real: float | None = None
    """Seconds of this machine for each emulated one; None = a virtual clock."""
    title: str = ""
    """Name of the model."""

    @property
    def exposed(self) -> float:
        """Seconds that the step waits after its backward."""
        return max(0.0, self.step - self.forward - self.backward)

    @property
    def closed_step(self) -> float:
        """Seconds of the step by the closed form."""
        return self.forward + max(self.closed.backward, max(self.closed.ends, default=0.0))

    @property
    def ratio(self) -> float:
        """The simulated step over that of the closed form."""
        return self.step / self.closed_step

    @property
    def table(self) -> display.Table:
        """A row per bucket."""
        rows = [
            [number, units.bytes_(bucket.size), units.seconds(bucket.ready), units.seconds(bucket.start), units.seconds(bucket.end)]
            for number, bucket in enumerate(self.buckets, 1)
        ]
        clock = "virtual clock" if self.real is None else f"real time, {self.real:g} s for each emulated one"
        note = (
            f"step {units.seconds(self.step)}: forward {units.seconds(self.forward)}, backward {units.seconds(self.backward)}, "
            f"exposed {units.seconds(self.exposed)}; closed form: step {units.seconds(self.closed_step)}, "
            f"exposed {units.seconds(self.closed.exposed)} ({self.ratio:.3f}); {clock}"
        )
        title = f"DDP's reducer on {units.count(self.ranks)} emulated ranks{': ' if self.title else ''}{self.title}"
        return display.Table(columns=("bucket", "bytes", "ready", "starts", "ends"), rows=rows, title=title, note=note)

    to_frame = display.frame_method("buckets", TwinBucket)
    plot = display.plot_method("twin")

    def __repr__(self) -> str:
        return f"TwinRun({self.ranks} ranks, step {units.seconds(self.step)}, exposed {units.seconds(self.exposed)})"


def seconds_on(network: Network, ranks: int) -> Callable[[float], float]:
    """A function from bytes to the seconds of their all-reduce among some ranks.

    Raises:
        CostError: no network, or no such ranks on it.
    """
    checked_ranks(ranks)
    if isinstance(network, str):
        network = Cluster.named(network)
    if isinstance(network, Link):
        link = network
        return lambda size: all_reduce(size, ranks, link)
    if isinstance(network, Sweep):
        sweep = network
        return lambda size: sweep.seconds(size, ranks)
    if isinstance(network, Cluster):
        cluster = network
        cluster.nodes(ranks)
        return lambda size: cluster.all_reduce(size, ranks)
    if callable(network):
        return _checked(network)
    raise CostError(f"network={network!r:.80}: expected a Link, a Sweep, a Cluster or its name, or a function from bytes to seconds")


def _checked(function: Callable[[float], float]) -> Callable[[float], float]:
    """The user's function, with its results checked."""

    def seconds(size: float) -> float:
        result = function(size)
        if isinstance(result, str | bytes) or not hasattr(result, "__float__") or not 0 <= float(result) < math.inf:
            raise CostError(f"network({size:,.0f}) returned {result!r:.60}: expected seconds of at least 0, such as 0.002")
        return float(result)

    return seconds


def closed_form(layers: Sequence[TwinLayer], seconds_of: Callable[[float], float], cap: int | None = None) -> Overlap:
    """The closed form for layers: `buckets`, the time at which each is complete, and `overlap`.

    Args:
        layers: in the order of the forward.
        seconds_of: of an all-reduce of so many bytes.
        cap: bytes at which a bucket is closed; None = torch's own.
    """
    backward, complete = 0.0, [0.0] * len(layers)
    for index in reversed(range(len(layers))):
        backward += layers[index].backward
        complete[index] = backward
    groups = buckets([layer.size for layer in layers], cap)
    ready = [max(complete[index] for index in group) for group in groups]
    return overlap(ready, [seconds_of(sum(layers[index].size for index in group)) for group in groups], backward)
