"""`Cluster`: nodes of GPUs with the links inside and between them, from the makers' datasheets or from your own measurements."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from workbench.cluster.analysis.collective_cost import CostError, Link, all_reduce, checked_ranks, hierarchical_all_reduce
from workbench.cluster.analysis.links import Sweep
from workbench.core import units
from workbench.core.checks import nearest
from workbench.core.codec import JsonDataclass, fields_from_json
from workbench.core.device import NOT_READ, Device
from workbench.core.display import table as display

if TYPE_CHECKING:
    from workbench.cluster.analysis.links import Links


NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 14e-6
"""Seconds per hop of a ring, inside and between nodes, with which NCCL chooses algorithms.
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
    """Name of the kind of node."""
    device: Device
    """Kind of GPU."""
    gpus_per_node: int
    """GPUs of a node, joined by `intra`."""
    intra: Link
    """Link of two GPUs of a node."""
    inter: Link
    """Link of two GPUs of different nodes, when all GPUs of both send."""
    source: str
    """Source of the figures."""
    measured_links: tuple[str, ...] = ()
    """The LINKS that were measured. No program reaches a datasheet's bandwidth."""

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device):
            raise CostError(f"device={self.device!r}: expected a Device, such as Device.named('H100-SXM')")
        checked_ranks(self.gpus_per_node)
        if isinstance(self.measured_links, str) or not set(self.measured_links) <= set(LINKS):
            raise CostError(f"measured_links={self.measured_links!r}: expected some of {LINKS}")

    @property
    def measured(self) -> bool:
        """Whether all links were measured."""
        return set(self.measured_links) == set(LINKS)

    @classmethod
    def named(cls, name: str) -> "Cluster":
        """The cluster of that name in the catalogue.

        Raises:
            CostError: not in the catalogue; the message lists the known clusters.
        """
        known = {cluster.name.lower(): cluster for cluster in CLUSTERS}
        if str(name).lower() not in known:
            near = nearest(str(name).lower(), known, cutoff=0.4)
            hint = f"did you mean {known[near].name!r}? Known" if near else "known"
            raise CostError(
                f"unknown cluster {name!r}: {hint} are {', '.join(cluster.name for cluster in CLUSTERS)}. For another one, define it: "
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
        """Your own cluster, from the results of `wb.measure_collectives`, from sweeps or from links.

        Args:
            device: kind of GPU, or its name.
            gpus_per_node: GPUs in a node.
            intra: link between GPUs of a node.
            inter: links between nodes, per GPU while all GPUs of a node send.
            name: name of the cluster.
            source: where the figures come from.
            measured: True = the links were measured. Real links are slower than their datasheet.
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
        """The same nodes with measured links: Links, a Sweep, or a Link, such as from `Link.from_sweep`; their intervals are kept.

        A link that is not given stays as it is.
        """
        links = {name: _link(link) for name, link in (("intra", intra), ("inter", inter)) if link is not None}
        known = tuple(name for name in LINKS if name in links or name in self.measured_links)
        return replace(self, **links, source=f"{source}; {self.source}", measured_links=known)  # type: ignore[arg-type]

    def nodes(self, gpus: int) -> int:
        """Number of nodes for this number of GPUs.

        Raises:
            CostError: several nodes, one of which would be incomplete.
        """
        if checked_ranks(gpus) > self.gpus_per_node and gpus % self.gpus_per_node:
            raise CostError(
                f"{gpus} GPUs are not whole nodes of {self.gpus_per_node}: try {-(-gpus // self.gpus_per_node) * self.gpus_per_node}"
            )
        return -(-gpus // self.gpus_per_node)

    def all_reduce(self, size: float, gpus: int) -> float:
        """Seconds of an all-reduce of `size` bytes over this number of GPUs: a ring inside a node, hierarchical over several nodes."""
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
            ["inside a node, each way", _describe(self.intra)],
            ["between nodes, per GPU", _describe(self.inter)],
        ]
        return display.Table(columns=("cluster", self.name), rows=rows, note=f"{self.how}; {self.source}")

    @property
    def how(self) -> str:
        """Which links were measured, as text."""
        by_datasheet = "at best, by datasheet: measured ones are slower"
        if self.measured or not self.measured_links:
            return "links measured" if self.measured else f"links {by_datasheet}"
        known, other = sorted(_PLACES, key=lambda name: name not in self.measured_links)
        return f"links {_PLACES[known]} measured, {_PLACES[other]} {by_datasheet}"

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; older files have one `measured` for both links."""
        own = {name: kept for name, kept in value.items() if name != "measured"}
        return fields_from_json(cls, {"measured_links": LINKS if value.get("measured") else (), **own})

    def __repr__(self) -> str:
        return f"Cluster({self.name!r})"


def _link(value: "Link | Sweep | Links") -> Link:
    link = getattr(value, "link", value)
    if not isinstance(link, Link):
        raise CostError(f"{value!r:.60}: expected a Link, a Sweep or Links")
    return link


def _describe(link: Link) -> str:
    between = "" if link.bandwidths is None else f" ({' … '.join(units.count(end, 'B/s') for end in link.bandwidths)})"
    return f"{units.count(link.bandwidth, 'B/s')}{between}, {units.seconds(link.latency)} a hop"


def _cluster(name: str, device: str, gigabits: float, source: str) -> Cluster:
    """Nodes of eight GPUs with NVLink. `gigabits`: per second, a GPU's share of the network."""
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
        "AWS-p4d", "A100-40GB", 50, f"NVLink 3, 600 GB/s both ways; 400 Gb/s Ethernet (EFA) per node of 8: Amazon EC2 P4 page, {NOT_READ}"
    ),
    _cluster(
        "AWS-p5", "H100-SXM", 400, f"NVLink 4, 900 GB/s both ways; 3,200 Gb/s Ethernet (EFA) per node of 8: Amazon EC2 P5 page, {NOT_READ}"
    ),
)
"""The catalogue: figures of the makers' datasheets, until you measure."""
