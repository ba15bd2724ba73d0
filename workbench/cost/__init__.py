"""Cost: what training across many GPUs sends and computes, in closed forms, each with its source.

`collectives` and `hierarchy`: seconds on a `Link`, by latency and bandwidth; a measured `Sweep` gives both. `overlap`: what of its buckets
DDP does not hide behind the backward. `volumes`: bytes per rank of DDP, ZeRO and FSDP. `pipeline`: bubbles. `transformer`: parameters,
FLOPs and tensor-parallel messages of a GPT; `iteration`: its seconds under 3-D parallelism; `sharded`: those of a step under ZeRO-3. A
`Cluster` has the GPUs and links that all of it happens on. `Sent` and `Traffic`: the collectives of a program's own step, as they were
counted; `Links`: measured ones; `TwinRun`: DDP's real reducer beside the closed form.
"""

from workbench.cost.cluster import CLUSTERS, Cluster
from workbench.cost.collectives import BUS_FACTORS, CostError, Link, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from workbench.cost.energy import Energy, estimated
from workbench.cost.hierarchy import hierarchical_all_reduce
from workbench.cost.iteration import Layout, Rates, Work, work
from workbench.cost.links import LinkPoint, Links
from workbench.cost.overlap import Overlap, buckets, overlap
from workbench.cost.pipeline import BUBBLES, bubble
from workbench.cost.sent import Sent
from workbench.cost.sharded import gather_seconds, sharded_step
from workbench.cost.sweep import Sweep
from workbench.cost.traffic import Traffic
from workbench.cost.traffic_time import TrafficTime
from workbench.cost.transformer import Transformer
from workbench.cost.twin_run import TwinLayer, TwinRun
from workbench.cost.volumes import Volume, volume

__all__ = [
    "Energy",
    "estimated",
    "Cluster",
    "CLUSTERS",
    "Link",
    "Sweep",
    "Links",
    "LinkPoint",
    "Sent",
    "Traffic",
    "TrafficTime",
    "TwinLayer",
    "TwinRun",
    "CostError",
    "BUS_FACTORS",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "hierarchical_all_reduce",
    "Overlap",
    "buckets",
    "overlap",
    "Volume",
    "volume",
    "gather_seconds",
    "sharded_step",
    "BUBBLES",
    "bubble",
    "Transformer",
    "Layout",
    "Work",
    "work",
    "Rates",
]
