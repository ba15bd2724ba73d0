"""Cluster: nodes of GPUs, and the links inside and between them, from their makers' datasheets or from measurements of your own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from workbench.cluster.analysis.collectives import CostError, Link, all_reduce, checked_ranks, hierarchical_all_reduce
from workbench.cluster.analysis.links import Sweep
from workbench.core import units
from workbench.core.checks import nearest
from workbench.core.codec import JsonDataclass, fields_from_json
from workbench.core.device import NOT_READ, Device
from workbench.core.display import table as display

if TYPE_CHECKING:
    from workbench.cluster.analysis.links import Links


NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 14e-6
"""Seconds per hop of a ring, inside and between nodes, that NCCL reckons with when it chooses algorithms.
Source: github.com/NVIDIA/nccl, src/graph/tuning.cc, `hwLat`, Ring/Simple."""

LINKS = ("intra", "inter")
_PLACES = {"intra": "inside a node", "inter": "between nodes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(display.Shown, JsonDataclass):
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
    measured_links: tuple[str, ...] = ()
    """Those of LINKS that were measured. A datasheet's bandwidth is reached by nobody."""

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device):
            raise CostError(f"device={self.device!r}: a Device is wanted, such as Device.named('H100-SXM')")
        checked_ranks(self.gpus_per_node)
        if isinstance(self.measured_links, str) or not set(self.measured_links) <= set(LINKS):
            raise CostError(f"measured_links={self.measured_links!r}: some of {LINKS} are wanted")

    @property
    def measured(self) -> bool:
        """Were all links measured?"""
        return set(self.measured_links) == set(LINKS)

    @classmethod
    def named(cls, name: str) -> "Cluster":
        """The cluster of that name in the catalogue.

        Raises:
            CostError: not in the catalogue; the message lists what is.
        """
        known = {one.name.lower(): one for one in CLUSTERS}
        if str(name).lower() not in known:
            near = nearest(str(name).lower(), known, cutoff=0.4)
            hint = f"did you mean {known[near].name!r}? Known" if near else "known"
            raise CostError(
                f"unknown cluster {name!r}: {hint} are {', '.join(one.name for one in CLUSTERS)}. For another one make it: "
                "Cluster(name=…, device=Device.named(…), gpus_per_node=…, intra=Link(latency=…, bandwidth=…), inter=Link(…), source=…)"
            )
        return known[str(name).lower()]

    @classmethod
    def of(
        cls,
        device: Device | str,
        *,
        gpus_per_node: int,
        intra: "Link | Sweep | Links",
        inter: "Link | Sweep | Links",
        name: str = "own",
        source: str = "measured",
        measured: bool = True,
    ) -> "Cluster":
        """A cluster of one's own, from what `wb.measure_collectives` found on it, from sweeps or from links.

        Args:
            device: each GPU, or its name.
            gpus_per_node: GPUs that `intra` joins.
            intra: inside a node.
            inter: between nodes, per GPU when all of a node send.
            name: of it.
            source: where the figures stand.
            measured: were the links measured? A datasheet's are slower in truth.
        """
        return cls(
            name=name,
            device=Device.named(device) if isinstance(device, str) else device,
            gpus_per_node=gpus_per_node,
            intra=_link(intra),
            inter=_link(inter),
            source=source,
            measured_links=LINKS if measured else (),
        )

    def with_links(
        self, *, intra: "Link | Sweep | Links | None" = None, inter: "Link | Sweep | Links | None" = None, source: str = "measured"
    ) -> "Cluster":
        """The same nodes with links that were measured: Links, a Sweep, or a link such as by `Link.from_sweep`; their intervals stay.

        One that is not given stays as it was, by its datasheet if so.
        """
        links = {name: _link(one) for name, one in (("intra", intra), ("inter", inter)) if one is not None}
        known = tuple(name for name in LINKS if name in links or name in self.measured_links)
        return replace(self, **links, source=f"{source}; {self.source}", measured_links=known)  # type: ignore[arg-type]

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
            ["inside a node, each way", _words(self.intra)],
            ["between nodes, per GPU", _words(self.inter)],
        ]
        return display.Table(columns=("cluster", self.name), rows=rows, note=f"{self.how}; {self.source}")

    @property
    def how(self) -> str:
        """Whether the links were measured, in words."""
        by_datasheet = "at best, by datasheet: measured ones are slower"
        if self.measured or not self.measured_links:
            return "links measured" if self.measured else f"links {by_datasheet}"
        known, other = sorted(_PLACES, key=lambda name: name not in self.measured_links)
        return f"links {_PLACES[known]} measured, {_PLACES[other]} {by_datasheet}"

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; older files say `measured` of both links at once."""
        own = {name: kept for name, kept in value.items() if name != "measured"}
        return fields_from_json(cls, {"measured_links": LINKS if value.get("measured") else (), **own})

    def __repr__(self) -> str:
        return f"Cluster({self.name!r})"


def _link(one: "Link | Sweep | Links") -> Link:
    found = getattr(one, "link", one)
    if not isinstance(found, Link):
        raise CostError(f"{one!r:.60}: a Link, a Sweep or Links are wanted")
    return found


def _words(link: Link) -> str:
    between = "" if link.bandwidths is None else f" ({' … '.join(units.count(end, 'B/s') for end in link.bandwidths)})"
    return f"{units.count(link.bandwidth, 'B/s')}{between}, {units.seconds(link.latency)} a hop"


def _cluster(name: str, device: str, gigabits: float, source: str) -> Cluster:
    """Nodes of eight, joined by NVLink. `gigabits`: per second, a GPU's share of the network."""
    gpu = Device.named(device)
    assert gpu.nvlink is not None, f"the table of devices has no NVLink for {device}"
    return Cluster(
        name=name,
        device=gpu,
        gpus_per_node=8,
        intra=Link(latency=NVLINK_LATENCY, bandwidth=gpu.nvlink),
        inter=Link(latency=NETWORK_LATENCY, bandwidth=gigabits / 8 * 1e9),
        source=source,
    )


CLUSTERS = (
    _cluster(
        "DGX-A100",
        "A100-80GB",
        200,
        "NVLink 3, 600 GB/s both ways; 8 × ConnectX-6 InfiniBand HDR 200 Gb/s for computing: NVIDIA in MLPerf Training v2.0, "
        "github.com/mlcommons/training_results_v2.0, NVIDIA/systems/dgxa100_n128_ngc22.04_pytorch.json",
    ),
    _cluster(
        "DGX-H100",
        "H100-SXM",
        400,
        "NVLink 4, 900 GB/s both ways; 8 × ConnectX-7 InfiniBand NDR 400 Gb/s for computing: NVIDIA in MLPerf Training v3.0, "
        "github.com/mlcommons/training_results_v3.0, NVIDIA/systems/dgxh100_n96_nemo.json",
    ),
    _cluster(
        "DGX-H200",
        "H200",
        400,
        "18 × NVLink 4, 900 GB/s both ways: NVIDIA in MLPerf Inference v4.1, closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json"
        f"; a 400 Gb/s ConnectX-7 card per GPU: NVIDIA DGX H200 datasheet, {NOT_READ}",
    ),
    _cluster(
        "DGX-B200",
        "B200",
        400,
        "NVLink 5, 14.4 TB/s both ways for eight; 8 × ConnectX-7 up to 400 Gb/s: NVIDIA DGX B200 user guide, "
        "docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html",
    ),
    _cluster(
        "AWS-p4d",
        "A100-40GB",
        50,
        f"NVLink 3, 600 GB/s both ways; 400 Gb/s Ethernet (EFA) per node of 8: Amazon EC2 P4 page, {NOT_READ}",
    ),
    _cluster(
        "AWS-p5",
        "H100-SXM",
        400,
        f"NVLink 4, 900 GB/s both ways; 3,200 Gb/s Ethernet (EFA) per node of 8: Amazon EC2 P5 page, {NOT_READ}",
    ),
)
"""Nodes by name; no cluster is slower or faster than what its maker prints, until it is measured."""
