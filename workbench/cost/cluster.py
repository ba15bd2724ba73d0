"""Cluster: nodes of GPUs, and the links inside and between them, from their makers' datasheets or from measurements of your own."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from workbench import display, units
from workbench.cost.collectives import CostError, Link, all_reduce, checked_ranks
from workbench.cost.hierarchy import hierarchical_all_reduce
from workbench.device import Device

NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 14e-6
"""Seconds per hop of a ring, inside and between nodes, that NCCL reckons with when it chooses algorithms.
Source: github.com/NVIDIA/nccl, src/graph/tuning.cc, `hwLat`, Ring/Simple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs.

    >>> cluster = Cluster.named("DGX-H100")
    >>> cluster.device.name, cluster.gpus_per_node
    ('H100-SXM', 8)
    >>> cluster.all_reduce(2**30, 8) < cluster.all_reduce(2**30, 64)
    True
    """

    name: str
    """Of the kind of node."""
    device: Device
    """Each GPU."""
    gpus_per_node: int
    """GPUs that `intra` joins."""
    intra: Link
    """Two GPUs of a node."""
    inter: Link
    """Two GPUs of different nodes, when all GPUs of both send."""
    source: str
    """Where the figures stand."""
    measured: bool = False
    """Were the links measured? A datasheet's bandwidth is reached by nobody."""

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device):
            raise CostError(f"device={self.device!r}: a Device is wanted, such as Device.named('H100-SXM')")
        checked_ranks(self.gpus_per_node)

    @classmethod
    def named(cls, name: str) -> "Cluster":
        """The cluster of that name in the catalogue.

        Raises:
            CostError: not in the catalogue; the message lists what is.
        """
        known = {one.name.lower(): one for one in CLUSTERS}
        if str(name).lower() not in known:
            near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.4)
            hint = f"did you mean {known[near[0]].name!r}? " if near else ""
            raise CostError(
                f"unknown cluster {name!r}: {hint}Known are {', '.join(one.name for one in CLUSTERS)}. For another one make it: "
                "Cluster(name=…, device=Device.named(…), gpus_per_node=…, intra=Link(latency=…, bandwidth=…), inter=Link(…), source=…)"
            )
        return known[str(name).lower()]

    def with_links(self, *, intra: Link | None = None, inter: Link | None = None, source: str = "measured") -> "Cluster":
        """The same nodes with links that were measured, such as by `Link.from_sweep`."""
        return replace(self, intra=intra or self.intra, inter=inter or self.inter, source=f"{source}; {self.source}", measured=True)

    def nodes(self, gpus: int) -> int:
        """Nodes that so many GPUs take.

        Raises:
            CostError: more than a node has, and not whole nodes.
        """
        if checked_ranks(gpus) > self.gpus_per_node and gpus % self.gpus_per_node:
            raise CostError(
                f"{gpus} GPUs are no whole nodes of {self.gpus_per_node}: try {-(-gpus // self.gpus_per_node) * self.gpus_per_node}"
            )
        return -(-gpus // self.gpus_per_node)

    def all_reduce(self, size: float, gpus: int) -> float:
        """Seconds in which so many GPUs sum `size` bytes that each has: inside a node as a ring, over several hierarchically."""
        nodes = self.nodes(gpus)
        if nodes == 1:
            return all_reduce(size, gpus, self.intra)
        ways = (
            hierarchical_all_reduce(size, nodes=nodes, per_node=self.gpus_per_node, intra=self.intra, inter=self.inter, algorithm=algorithm)
            for algorithm in ("ring", "tree")
        )
        return min(ways)

    @property
    def table(self) -> display.Table:
        """GPUs and links."""
        peak = max(self.device.flops_per_sec.values())
        rows = [
            ["GPUs per node", f"{self.gpus_per_node} × {self.device.name}"],
            ["memory of each", units.bytes_(self.device.memory)],
            ["peak of each, dense", units.count(peak, "FLOP/s")],
            ["inside a node, each way", f"{units.count(self.intra.bandwidth, 'B/s')}, {units.seconds(self.intra.latency)} a hop"],
            ["between nodes, per GPU", f"{units.count(self.inter.bandwidth, 'B/s')}, {units.seconds(self.inter.latency)} a hop"],
        ]
        kind = "links measured" if self.measured else "links at best, by datasheet: measured ones are slower"
        return display.Table(columns=("cluster", self.name), rows=rows, note=f"{kind}; {self.source}")

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        own = {name: getattr(self, name) for name in ("name", "gpus_per_node", "source", "measured")}
        return {**own, "device": asdict(self.device), "intra": self.intra.to_json(), "inter": self.inter.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Cluster":
        """Inverse of `to_json`."""
        links = {name: Link.from_json(value[name]) for name in ("intra", "inter")}
        return cls(**{**value, **links, "device": Device(**{**value["device"], "aliases": tuple(value["device"]["aliases"])})})

    def __repr__(self) -> str:
        return f"Cluster({self.name!r})"

    def __str__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def _cluster(name: str, device: str, nvlink: float, gigabits: float, source: str) -> Cluster:
    """Nodes of eight. `nvlink`: GB/s of a GPU, each way (half of what is printed); `gigabits`: per second, a GPU's share of the network."""
    return Cluster(
        name=name,
        device=Device.named(device),
        gpus_per_node=8,
        intra=Link(latency=NVLINK_LATENCY, bandwidth=nvlink * 1e9),
        inter=Link(latency=NETWORK_LATENCY, bandwidth=gigabits / 8 * 1e9),
        source=source,
    )


CLUSTERS = (
    _cluster(
        "DGX-A100", "A100-80GB", 300, 200, "NVIDIA DGX A100 datasheet: NVLink 3, 600 GB/s both ways; a 200 Gb/s HDR InfiniBand card per GPU"
    ),
    _cluster(
        "DGX-H100", "H100-SXM", 450, 400, "NVIDIA DGX H100 datasheet: NVLink 4, 900 GB/s both ways; a 400 Gb/s NDR InfiniBand card per GPU"
    ),
    _cluster(
        "DGX-H200", "H200", 450, 400, "NVIDIA DGX H200 datasheet: NVLink 4, 900 GB/s both ways; a 400 Gb/s NDR InfiniBand card per GPU"
    ),
    _cluster("DGX-B200", "B200", 900, 400, "NVIDIA DGX B200 user guide: NVLink 5, 1.8 TB/s both ways; a 400 Gb/s ConnectX-7 card per GPU"),
    _cluster("AWS-p4d", "A100-40GB", 300, 50, "Amazon EC2 P4 page: NVLink 3, 600 GB/s both ways; 400 Gb/s Ethernet (EFA) per node of 8"),
    _cluster("AWS-p5", "H100-SXM", 450, 400, "Amazon EC2 P5 page: NVLink 4, 900 GB/s both ways; 3,200 Gb/s Ethernet (EFA) per node of 8"),
)
"""Nodes by name; no cluster is slower or faster than what its maker prints, until it is measured."""
