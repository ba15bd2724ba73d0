"""Lists all layouts of a model on given numbers of GPUs, as columns of numbers, so that 100,000 take a fraction of a second; selects the
short list of those that fit.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.plan.ranges import PlanError
from workbench.cluster.analysis.plan.workload import Workload
from workbench.core import units
from workbench.core.checks import whole_number

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SHARINGS = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
"""What data-parallel ranks share: nothing; optimizer states (ZeRO-1); gradients too (ZeRO-2); weights too (ZeRO-3); weights too, inside a
node only. As in `RunSpec(parallel=…)`, except that ZeRO-1 of a Transformer is Megatron's (`Workload.broadcasts`)."""
MAX_WASTE = 0.25
"""Share of a step that pipeline stages may wait for the one with most layers. Their time has it; this leaves out what can hardly be fast.
The fastest published layout of 80B on 128 H100 has 80 layers on 32 stages, a share of 0.2."""
SLACK = 0.25
"""The leanest plan may be this much slower than the fastest, the best value this much more expensive than the cheapest."""
NEAR = 0.10
"""The simplest plan may be this much slower than the fastest."""
FAST = 5
"""Layouts with the most expected throughput that come before all other roles."""
MOST_LISTED = 1000
"""Most layouts of a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Columns of equal length, one row per layout. gpus = data × tensor × pipeline; micro_batch × accumulation × data = the batch."""

    gpus: Ints
    data: Ints
    tensor: Ints
    pipeline: Ints
    chunks: Ints
    micro_batch: Ints
    accumulation: Ints
    sharing: Ints
    """Index in SHARINGS."""
    checkpointing: Ints
    """Index in the workload's `computed`."""
    shard: Ints
    """Ranks that share one copy of the states."""
    inside: Ints
    """Ranks of a data-parallel group that are in one node."""

    def __len__(self) -> int:
        return len(self.gpus)

    def select(self, rows: "Ints | NDArray[np.bool_]") -> "Layouts":
        """Some of the rows."""
        return Layouts(**{name: getattr(self, name)[rows] for name in self.__slots__})

    def share(self, layers: int) -> Floats:
        """Share of all layers on the stage with most of them, for which the others wait: 1/p if they divide evenly."""
        pieces = self.pipeline * self.chunks
        share: Floats = -(-layers // pieces) * self.chunks / layers
        return share

    @property
    def nodes(self) -> Ints:
        """Nodes over which a data-parallel group extends."""
        return self.data // self.inside


def list_layouts(
    workload: Workload, cluster: Cluster, gpus: Sequence[int], batch: int, sharings: Sequence[str], ruled_out: Counter[str]
) -> Layouts:
    """All layouts. Tensor parallelism stays within a node, then come data-parallel ranks; pipelines go across nodes.

    Args:
        workload: what is trained, with its layers and sizes.
        cluster: the cluster on which it is trained.
        gpus: numbers of GPUs.
        batch: samples per step, of all GPUs.
        sharings: some of SHARINGS.
        ruled_out: counts layouts that are impossible, by their reason.
    """
    rows: list[tuple[int, ...]] = []
    for count in gpus:
        for tensor in workload.tensors:
            for pipeline in workload.stages:
                rows += _rows_of(workload, cluster, count, tensor, pipeline, batch, ruled_out)
    if not rows:
        return Layouts(**{name: np.zeros(0, np.int64) for name in Layouts.__slots__})
    kinds = len(workload.computed)
    ways = np.array([(SHARINGS.index(sharing), kind) for sharing in sharings for kind in range(kinds)])
    table = np.repeat(np.array(rows, np.int64), len(ways), 0)
    ways = np.tile(ways, (len(rows), 1))
    count, data, tensor, pipeline, chunks, micro, accumulation = table.T
    whole_nodes = np.gcd(data, np.maximum(1, cluster.gpus_per_node // tensor))
    inside = np.where(count <= cluster.gpus_per_node, data, whole_nodes)
    hybrid = ways[:, 0] == SHARINGS.index("hsdp")
    columns = Layouts(
        gpus=count,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks,
        micro_batch=micro,
        accumulation=accumulation,
        sharing=ways[:, 0],
        checkpointing=ways[:, 1],
        shard=np.where(hybrid, inside, data),
        inside=inside,
    )
    possible = np.where(data == 1, ways[:, 0] == SHARINGS.index(sharings[0]), True)  # a single rank shares nothing
    possible &= np.where(hybrid, (inside > 1) & (inside < data), True)  # within one node it is fsdp
    return columns.select(possible)


def waste(layers: int, pipeline: int, chunks: int) -> float:
    """Share of a step that stages wait for the one with most layers.

    >>> waste(80, 8, 2), round(waste(126, 16, 1), 3)
    (0.0, 0.016)
    """
    pieces = pipeline * chunks
    return -(-layers // pieces) * pieces / layers - 1


def _rows_of(
    workload: Workload, cluster: Cluster, gpus: int, tensor: int, pipeline: int, batch: int, ruled_out: Counter[str]
) -> list[tuple[int, ...]]:
    data, rest = divmod(gpus, tensor * pipeline)
    if rest or not data:
        ruled_out["GPUs that tensor × pipeline does not divide"] += 1
        return []
    if batch % data:
        ruled_out[f"a batch of {batch:,} that its copies do not divide"] += 1
        return []
    rows: list[tuple[int, ...]] = []
    for micro in workload.micro_batches:
        if (batch // data) % micro:
            continue
        accumulation = batch // data // micro
        for chunks in workload.chunks if pipeline > 1 else (1,):
            if waste(workload.layers, pipeline, chunks) > MAX_WASTE:
                continue
            if chunks > 1 and accumulation % pipeline:
                ruled_out["an interleaved pipeline whose micro-batches are not a multiple of its stages"] += 1
                continue
            rows.append((gpus, data, tensor, pipeline, chunks, micro, accumulation))
    return rows


def gpu_counts(cluster: Cluster, gpus: int | None, most: int) -> list[int]:
    """The numbers of GPUs to consider: the given one, or doublings up to `most`.

    Raises:
        PlanError: not a whole number, or several nodes of which one is incomplete.
    """
    if gpus is None:
        sizes = [size for size in range(1, min(most, cluster.gpus_per_node) + 1) if cluster.gpus_per_node % size == 0]
        while sizes[-1] * 2 <= most and sizes[-1] >= cluster.gpus_per_node:
            sizes.append(sizes[-1] * 2)
        return sizes
    whole_number("gpus", gpus, least=1, also=", or None for any", error=PlanError)
    if gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node:
        whole = gpus // cluster.gpus_per_node * cluster.gpus_per_node
        raise PlanError(
            f"gpus={gpus}: {cluster.name} has {cluster.gpus_per_node} in a node, and past one node whole nodes are planned: "
            f"try {whole} or {whole + cluster.gpus_per_node}"
        )
    return [gpus]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The row of a selected layout, and why it was selected."""

    row: int
    roles: tuple[str, ...]
    why: str


def short_list(
    layouts: Layouts,
    total: Floats,
    used: Floats,
    gpu_seconds: Floats,
    sure: np.ndarray[tuple[int], np.dtype[np.bool_]],
    chance: Floats,
    *,
    top: int,
    one_size: bool,
) -> list[Selection]:
    """First the FAST layouts of all with the most throughput to expect: speed times the chance that the memory suffices, since a plan that
    runs out of memory trains nothing. They may differ only in what ranks share. A role marks one of them, or adds a layout while there are
    fewer than `top`: the fastest, whatever its chance; the cheapest and the best value where the number of GPUs is open; the fastest
    whose upper end fits, if that of the fastest does not; the fewest GPUs; the simplest and the leanest. The best of each other kind
    (`_kinds`) follow. All are in the order of the throughput to expect.

    Args:
        layouts: the layouts that fit, as columns.
        total: seconds of a step of each.
        used: bytes of each.
        gpu_seconds: GPUs × seconds of each.
        sure: does the upper end of its memory fit, too?
        chance: probability that its memory suffices, for each layout.
        top: most layouts to select; roles of one layout count once.
        one_size: do all have the same number of GPUs?
    """
    expected = total / np.maximum(chance, 1e-9)
    order = _order(expected, used)
    fastest, likely = int(_order(total, used)[0]), int(order[0])
    near = total <= (1 + NEAR) * total[fastest]
    soon = total <= (1 + SLACK) * total[fastest]
    parts = complexity(layouts)
    following = [("next", int(row), "the next most throughput to expect") for row in order[:FAST]]
    picks: list[tuple[str, int, str]] = [("fastest", fastest, "the least time per step")]
    if likely != fastest:
        odds = f"its memory suffices with a chance of {units.percent(float(chance[likely]))}, that of the fastest with "
        odds += units.percent(float(chance[fastest]))
        picks.insert(0, ("best bet", likely, f"the most throughput to expect: {odds}"))
    if not one_size:
        cheapest = _first(gpu_seconds, total)
        cheap = np.where(gpu_seconds <= (1 + SLACK) * gpu_seconds[cheapest], total, np.inf)
        picks.append(("cheapest", cheapest, "the fewest GPU-seconds per sample"))
        picks.append(
            ("best value", _first(cheap, gpu_seconds), f"the fastest that is at most {100 * SLACK:.0f} % more expensive than the cheapest")
        )
    if sure.any() and not sure[fastest]:
        picks.append(("safe", _first(np.where(sure, total, np.inf), used), "the fastest whose memory fits by its upper end too"))
    if not one_size:
        picks.append(("fewest GPUs", _first(layouts.gpus.astype(float), total), "the fewest GPUs on which it fits"))
    as_few = layouts.gpus <= layouts.gpus[[fastest, likely]].max()  # more GPUs always need less each
    leanest = _first(np.where(soon & as_few, used, np.inf), total)
    simplest = _first(np.where(near, parts, np.inf), total)
    picks.append(("simplest", simplest, f"the fewest kinds of parallelism within {100 * NEAR:.0f} % of the fastest"))
    picks.append(("leanest", leanest, f"the least memory within {100 * SLACK:.0f} % of the fastest, on as many GPUs at most"))
    rows: dict[int, list[tuple[str, str]]] = {}
    for role, row, why in following + picks + [("next", row, following[0][2]) for row in _kinds(layouts, order)]:
        known = row in rows
        if (known and role != "next") or (not known and len(rows) < top):
            rows.setdefault(row, []).append((role, why))
    places = {int(row): place for place, row in enumerate(order)}
    ordered = sorted(rows, key=lambda row: places[row])
    chosen = []
    for place, row in enumerate(ordered, 1):
        reasons = [(role, why) for role, why in rows[row] if role != "next"] or [(f"choice {place}", rows[row][0][1])]
        chosen.append(Selection(row=row, roles=tuple(role for role, _ in reasons), why="; ".join(why for _, why in reasons)))
    return chosen


def _first(value: Floats, then: Floats) -> int:
    """The row of the least value; of those equal to six digits, the least by another column."""
    least = value.min()
    return int(np.argmin(np.where(value <= least * (1 + 1e-6), then, np.inf)))


def complexity(layouts: Layouts) -> Floats:
    """How much has to be set up: stages count more than split layers, these more than shared states, these more than recomputation."""
    shared = np.array([0.0, 0.5, 0.75, 1.0, 1.25])[layouts.sharing] * (layouts.data > 1)
    total: Floats = 4.0 * (layouts.pipeline > 1) + 1.0 * (layouts.chunks > 1) + 2.0 * (layouts.tensor > 1) + shared
    return total + 0.25 * (layouts.checkpointing > 0)


def _order(value: Floats, then: Floats) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Rows by rising value, which is positive; those equal to about six digits by another column."""
    return np.lexsort((then, np.round(np.log(value), 6)))


def _kinds(layouts: Layouts, order: np.ndarray[tuple[int], np.dtype[np.intp]]) -> list[int]:
    """Rows in the given order; of layouts that differ only in what ranks share, or in the pieces of a pipeline, the first."""
    columns = ("gpus", "tensor", "pipeline", "micro_batch", "checkpointing")
    kinds = np.stack([getattr(layouts, name)[order] for name in columns], 1)
    _, first = np.unique(kinds, axis=0, return_index=True)
    return [int(order[index]) for index in np.sort(first)[:MOST_LISTED]]
