"""Searches all layouts for those that fit, sets the level by measured steps, and says what would help where nothing fits."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_cost import CostError
from workbench.cluster.analysis.energy import Energy
from workbench.cluster.analysis.plan.layouts import SHARINGS, Floats, Layouts, Selection, list_layouts, short_list
from workbench.cluster.analysis.plan.memory import Memory, memory
from workbench.cluster.analysis.plan.plans import Front, Plan, Plans, Power
from workbench.cluster.analysis.plan.ranges import (
    EFFICIENCY,
    HELD_SOURCES,
    OTHER_LAYOUT,
    SLOWEST_LEVEL,
    PlanError,
    between,
    efficiency_of,
    furthest_levels,
    intervals_around,
)
from workbench.cluster.analysis.plan.timing import PARTS, HardwareRates, Seconds, seconds
from workbench.cluster.analysis.plan.workload import MEGATRON, Trainer, Version, Workload, at_level
from workbench.core import units
from workbench.core.statistics import Interval
from workbench.memory.analysis.non_pytorch import non_pytorch_memory

FASTER = 0.05
"""Memory limits a plan if a layout that does not fit would be faster by this much."""
MEASURED = 0.01
"""Part by which a measured step may differ from the next of the same run, at the 95th percentile."""
P95, P90 = 1.645, 1.2816
"""Standard deviations of a normal law from its middle to its 95th and to its 90th percentile."""
DEVIATION = math.log(OTHER_LAYOUT.high / OTHER_LAYOUT.low) / (2 * P90) / math.sqrt(2)
"""Standard deviation of the logarithm of a layout's seconds over those at the level of its model: two layouts differ by OTHER_LAYOUT."""
HOSTS = (-1.0, 2.0)
"""Furthest places of the host in its range: 4 and 102 µs an operator, as long as SLOWEST_LAUNCH."""
SIDES, FINEST = (25, 13, 13), 1e-3
"""Places of kernels, messages and host that are tried at once, and the distance of two places of kernels at which the search ends."""
UNLIKELY = "; so far from {:.0f} … {:.0f} %{} that the loader, a straggler, links or the host may explain the step instead"
TELLING = (
    "a measured step says which it can have been, best one of a layout on several nodes with both a pipeline and tensor parallelism: "
    "measured=(plan, seconds), or a list of such pairs"
)
"""Note where a trainer has several versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """The inputs of a search for plans."""

    workload: Workload
    cluster: Cluster
    batch: int
    """Samples per step of all GPUs."""
    peak: float
    """FLOP/s of a GPU in the precision."""
    versions: tuple[Version, ...]
    """Of the trainer; the first is that of `workload`."""
    links: tuple[Interval, Interval]
    """Share of the links' bandwidth, inside nodes and between them."""
    held: Interval
    """What the allocator holds over the predicted bytes."""
    usable_memory: float
    """Bytes that may be used of a GPU."""
    steps: int
    """Steps for money and energy."""
    top: int
    """Most plans to return."""
    power: Power
    """Prices, carbon intensity and so on."""
    unrestricted: Workload
    """`workload` with all the degrees and kinds of checkpointing that it can have."""
    efficiency_given: bool
    """Was the efficiency given?"""
    held_given: bool
    """Was `held` given?"""
    trainer: Trainer | None = None
    """Its name was given."""
    measured: int = 0
    """Steps that were measured."""
    unlikely: bool = False
    """Are they outside the ranges of all versions?"""

    def plans(self, sizes: Sequence[int], sharings: Sequence[str]) -> Plans:
        """The short list for given numbers of GPUs, of layouts whose predicted memory fits. Those whose upper end does not are tight and
        stay; those of which only the lower end fits are ruled out and counted separately.

        Raises:
            PlanError: there is no layout, or none fits.
        """
        out: Counter[str] = Counter()
        candidates = list_layouts(self.workload, self.cluster, sizes, self.batch, sharings, out)
        if not len(candidates):
            raise PlanError(self._no_layout(sizes, sharings, out))
        considered = len(candidates) + sum(out.values())
        held = self.memory(candidates)
        used = held.total
        fits = used <= self.usable_memory
        if not fits.any():
            raise PlanError(self._too_large(candidates, used, sharings))
        parts = self.seconds(candidates)
        total = parts.total
        where = np.flatnonzero(fits)
        fitting = candidates.select(where)
        gpu_seconds = fitting.gpus * total[where]
        sure = held.high[where] <= self.usable_memory
        chance = held.chance(self.usable_memory)[where]
        picks = short_list(fitting, total[where], used[where], gpu_seconds, sure, chance, top=self.top, one_size=len(sizes) == 1)
        plans = [self._plan(pick, candidates, int(where[pick.row]), parts, held, fits, total) for pick in picks]
        perhaps = ~fits & (held.low <= self.usable_memory)
        out["memory"] = int((~fits & ~perhaps).sum())
        out["memory, though its lower end fits"] = int(perhaps.sum())
        out["a faster plan"] = len(where) - len(plans)
        return Plans(
            plans=tuple(plans),
            front=self._front(candidates, where, total, parts, held),
            considered=considered,
            ruled_out={reason: count for reason, count in out.items() if count},
            name=self.workload.name,
            cluster=self.cluster,
            global_batch=self.batch,
            versions=tuple(version.words for version in self.versions),
            notes=self._notes(plans),
        )

    def seconds(self, layouts: Layouts) -> Seconds:
        """Seconds of a step at the middle of all rates: the geometric mean of the trainer's versions, whose parts are those of their mean.

        In the order of it layouts lose the least on average, as ratios to the fastest, if each version is as likely as the others.
        """
        each = [self._taken(layouts, version, "mid", "mid") for version in self.versions]
        if len(each) == 1:
            return each[0]
        scale = np.exp(np.mean([np.log(one.total) for one in each], 0)) / np.mean([one.total for one in each], 0)
        return Seconds(**{name: scale * np.mean([getattr(one, name) for one in each], 0) for name in (*PARTS, "hidden")})

    def corners(self, layouts: Layouts) -> list[Seconds]:
        """Seconds of a step at all ends of both ranges, with every version of the trainer: fast kernels with slow links, for instance,
        expose the most communication.
        """
        ends = ("low", "high")
        return [self._taken(layouts, version, kernels, links) for version in self.versions for kernels in ends for links in ends]

    def _taken(self, layouts: Layouts, version: Version, efficiency: str, links: str) -> Seconds:
        return seconds(version.workload, layouts, self.rates(version, efficiency, links), self.cluster.gpus_per_node)

    def rates(self, version: Version, efficiency: str = "mid", links: str = "mid") -> HardwareRates:
        """What the hardware achieves with a version of the trainer, at an end of kernels' share of the peak and at one of all others."""
        intra, inter = (getattr(share, links) for share in self.links)
        slow = {"low": "high", "high": "low"}
        host = version.host.mid if self.efficiency_given else getattr(version.host, slow.get(efficiency, "mid"))
        return HardwareRates.of(
            self.cluster,
            self.peak,
            getattr(version.efficiency, efficiency),
            (intra, inter),
            host,
            (self.links[0].mid / intra, self.links[1].mid / inter),
            getattr(version.message, slow.get(links, "mid")),
            {"low": 1.0, "high": -1.0}.get(links, 0.0),
        )

    @property
    def efficiency(self) -> Interval:
        """Share of the peak while a GPU computes, of all versions."""
        shares = [version.efficiency for version in self.versions]
        mid = statistics.geometric_mean(share.mid for share in shares) if len({*shares}) > 1 else shares[0].mid
        return Interval(low=min(share.low for share in shares), mid=mid, high=max(share.high for share in shares))

    def memory(self, layouts: Layouts) -> Memory:
        """Memory of the GPU that needs most."""
        return memory(self.workload, layouts, self.cluster.device.name, self.held)

    def _plan(self, selection: Selection, layouts: Layouts, row: int, parts: Seconds, held: Memory, fits: Any, total: Floats) -> Plan:
        layout = layouts.select(np.array([row]))
        corners = self.corners(layout)
        span = intervals_around([corner.total for corner in corners], total[[row]])[0]
        numbers = {name: int(getattr(layout, name)[0]) for name in ("gpus", "data", "tensor", "pipeline", "chunks", "micro_batch")}
        useful = self.workload.flops * self.batch / numbers["gpus"] / self.peak
        sharing = SHARINGS[int(layout.sharing[0])]
        taken = {name: float(getattr(parts, name)[row]) for name in PARTS}
        spans, shares = {}, {}
        for name, mid in taken.items():
            each = [getattr(corner, name) for corner in corners]
            spans[name] = intervals_around(each, np.array([mid]))[0]
            of_step = [part / corner.total for part, corner in zip(each, corners, strict=True)]
            shares[name] = intervals_around(of_step, mid / total[[row]])[0]
        return Plan(
            **numbers,
            accumulation=int(layout.accumulation[0]),
            sharing=sharing,
            shard_ranks=1 if sharing == "ddp" else int(layout.shard[0]),
            checkpointing=list(self.workload.computed)[int(layout.checkpointing[0])],
            precision=self.workload.precision,
            seconds=span,
            parts=taken,
            spans=spans,
            shares=shares,
            hidden=float(parts.hidden[row]),
            memory={name: float(values[row]) for name, values in held.groups.items()},
            needed=Interval(low=float(held.low[row]), mid=float(held.total[row]), high=float(held.high[row])),
            capacity=self.usable_memory,
            mfu=span.of(lambda value: useful / value),
            steps=self.steps,
            energy=self._energy(numbers["gpus"], span, spans["compute"]),
            power=self.power,
            node=self.cluster.name,
            broadcasts=self.workload.broadcasts > 0,
            bound=limiting_part(layouts, total, fits, parts, row),
            roles=selection.roles,
            why=selection.why,
            gpus_per_node=self.cluster.gpus_per_node,
            device=self.cluster.device.name,
            efficiency=self.efficiency.mid,
            model=self.workload.name,
            flops=self.workload.flops,
            trainer=self.trainer.name if self.trainer else "",
            versions=len(self.versions),
        )

    def _energy(self, gpus: int, span: Interval, computing: Interval) -> Energy | None:
        where = self.cluster
        try:
            return self.power.energy(
                gpus=gpus,
                steps=self.steps,
                seconds=span,
                computing=computing,
                device=where.device.name,
                node=where.name,
                per_node=where.gpus_per_node,
            )
        except CostError as error:
            if self.power.watts is None and "is not known" in str(error) and not self.power.prices_given:
                return None
            raise PlanError(str(error)) from error

    def _front(self, layouts: Layouts, where: Any, total: Floats, parts: Seconds, held: Memory) -> tuple[Front, ...]:
        fits = held.total <= self.usable_memory
        by_size = [where[layouts.gpus[where] == size] for size in np.unique(layouts.gpus[where])]
        rows = np.array([same[np.argmin(total[same])] for same in by_size])
        fastest = layouts.select(rows)
        spans = intervals_around([corner.total for corner in self.corners(fastest)], total[rows])
        return tuple(
            Front(
                gpus=int(fastest.gpus[i]),
                seconds=span,
                bound=limiting_part(layouts, total, fits, parts, int(row)),
                layout=f"dp {fastest.data[i]} × tp {fastest.tensor[i]} × pp {fastest.pipeline[i]}",
                compute=float(parts.compute[row]),
                tight=bool(held.high[row] > self.usable_memory),
            )
            for i, (row, span) in enumerate(zip(rows, spans, strict=True))
        )

    # --- notes and messages

    def _notes(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        implied = "as the measured step implies" if self.measured == 1 else f"as {self.measured} measured steps imply"
        usual, device = efficiency_of(self.cluster.device, self.workload.precision), self.cluster.device.name
        others = ", or from each other," * (self.measured > 1)
        of_device = f" and the best products on {device}, which reach less of its peak," * (usual != EFFICIENCY)
        reached = (
            f"{implied}, and published layouts differ" + UNLIKELY.format(100 * usual.low, 100 * usual.high, others) * self.unlikely
            if self.measured
            else "as given"
            if self.efficiency_given
            else f"as published runs on A100{of_device} imply; with a measured step: efficiency=plan.implied_efficiency(seconds)"
        )
        kernels, intra, inter = (
            "{} … {} (predicted with {})".format(*(units.percent(getattr(share, end)) for end in ("low", "high", "mid")))
            for share in (self.efficiency, *self.links)
        )
        links = (
            f"{intra} of the links' bandwidth" if intra == inter else f"{intra} of the links' bandwidth inside nodes, {inter} between them"
        )
        beside, held = non_pytorch_memory(self.cluster.device.name, 2), self.held
        times = f"{held.low:g}" if held.low == held.high else f"{held.low:g} … {held.high:g}"
        source = "as given" if self.held_given else HELD_SOURCES[bool(self.workload.counted)]
        return (
            f"between: the range of a step's time, if kernels reach {kernels} of the dense peak, and collectives {links}",
            f"that share of the peak: {reached}",
            f"memory between: the allocator holds {times} times what is predicted, {source}, "
            f"and context and NCCL {units.bytes_(beside.low)} … {units.bytes_(beside.high)}; tight: the upper end does not fit",
            "left out: the work of a pipeline's first and last stage outside their layers, stragglers, the loader, checkpoints on disk",
            *([self.trainer.zero1 if self.trainer else MEGATRON] if any(plan.megatron for plan in plans) else []),
            *([self._waits()] if any(version.workload.poll or version.workload.checked for version in self.versions) else []),
            *self.workload.notes,
        )

    def _waits(self) -> str:
        """Note on what the trainer waits for."""
        several = len(self.versions) > 1
        words = f"{self.trainer.name if self.trainer else 'the trainer'}: {', or '.join(version.words for version in self.versions)}"
        words += "; ranges hold all of these, and plans are in the order of their geometric mean" * several
        words += f"; {TELLING}" * several
        return words + ". Neither wait has to be: leave TORCH_DISTRIBUTED_DEBUG unset, and receive messages without sleeping"

    def _no_layout(self, sizes: Sequence[int], sharings: Sequence[str], out: Counter[str]) -> str:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in out.most_common(3))
        numbers = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} … {sizes[-1]:,}"
        below = self.batch - self.batch % sizes[0]
        batches = [below, below + sizes[0]] if len(sizes) == 1 else []
        works = [f"{size}" for size in batches if size and len(list_layouts(self.workload, self.cluster, sizes, size, sharings, Counter()))]
        hint = (
            f"try global_batch={' or '.join(works)}, or another number of GPUs" if works else "try another number of GPUs or global_batch"
        )
        return f"no layout of {numbers} GPUs makes a batch of {self.batch:,} samples ({reasons}): {hint}"

    def _too_large(self, layouts: Layouts, used: Floats, sharings: Sequence[str]) -> str:
        least = int(np.argmin(used))
        size, gpus = used[least], int(layouts.gpus[least])
        layout = layouts.select(np.array([least]))
        ends = self.memory(layout)
        span = Interval(low=float(ends.low[0]), mid=float(size), high=float(ends.high[0]))
        text = (
            f"dp {layout.data[0]} ({SHARINGS[int(layout.sharing[0])]}) × tp {layout.tensor[0]} × pp {layout.pipeline[0]}, "
            f"{layout.micro_batch[0]} at once"
        )
        room, device = self.usable_memory, self.cluster.device
        remedies = "; or ".join(self._remedies(gpus, math.ceil(size / room), sharings))
        return (
            f"{self.workload.name} fits nowhere on {gpus:,} × {device.name}: of {len(layouts):,} layouts the nearest ({text}) takes "
            f"{between(span, units.bytes_)} of each GPU, {units.bytes_(size - room)} more than the {units.bytes_(room)} that may be used. "
            f"It would fit {remedies}; or try a shorter sequence"
        )

    def _remedies(self, gpus: int, more: int, sharings: Sequence[str]) -> list[str]:
        """Changes that make the model fit while all else stays as given; each was checked."""
        each = self.cluster.gpus_per_node
        larger = sorted({*(gpus * 2**power for power in range(1, 18)), *(each * 2**power for power in range(18))})
        larger = [size for size in larger if size > gpus and (size <= each or size % each == 0)]
        enough = next((size for size in larger if self._fits(self.workload, size, sharings)), None)
        remedies = [] if enough is None else [f"on {enough:,} GPUs"]
        remedies += [f"on GPUs with {more} times the memory"]
        known = self.trainer.sharings if self.trainer else SHARINGS
        other = [name for name in known if name not in sharings and self._fits(self.workload, gpus, [name])]
        remedies += [f'with sharing="{other[0]}"'] if other else []
        for kind, flops in self.unrestricted.computed.items():
            if kind not in self.workload.computed and self._fits(replace(self.workload, computed={kind: flops}), gpus, sharings):
                return [*remedies, f'with checkpointing="{kind}"']
        return remedies

    def _fits(self, workload: Workload, gpus: int, sharings: Sequence[str]) -> bool:
        candidates = list_layouts(workload, self.cluster, [gpus], self.batch, sharings, Counter())
        if not len(candidates):
            return False
        return bool((memory(workload, candidates, self.cluster.device.name, self.held).total <= self.usable_memory).any())


def calibrated(search: PlanSearch, steps: Sequence[tuple[Plan, float]]) -> PlanSearch:
    """The search at the level of measured steps, see `at_level_of`.

    Args:
        search: of this model, cluster and trainer.
        steps: plans, each with the seconds of a step.

    Raises:
        PlanError: no version takes as long as one of them at any of its levels, nor does the range of its plan hold it.
    """
    kinds = list(search.unrestricted.computed)
    rows = [(_layout(plan, kinds), measured) for plan, measured in steps]
    for (plan, measured), (layout, _) in zip(steps, rows, strict=True):
        furthest = furthest_levels(search.efficiency)
        ends = [_seconds(search, version, layout, *np.array([furthest, furthest, HOSTS])).tolist() for version in search.versions]
        if measured not in plan.seconds and not any(
            low <= measured * (1 + MEASURED) and measured <= high * (1 + MEASURED) for low, high in ends
        ):
            slowest = units.percent(float(at_level(search.efficiency, -SLOWEST_LEVEL)))
            ranges = [
                f"{units.seconds(low)} … {units.seconds(high)}" + f" ({version.words})" * bool(search.trainer)
                for version, (low, high) in zip(search.versions, ends, strict=True)
            ]
            raise PlanError(
                f"measured={units.seconds(measured)}: a step of {plan.layout}, {plan.batch}, may take {'; '.join(ranges)} where "
                f"kernels reach 100 % … {slowest} of the dense peak. Is it one step, of this layout and a global batch of "
                f"{plan.global_batch:,}?"
            )
    return at_level_of(search, rows)


def at_level_of(search: PlanSearch, steps: Sequence[tuple[Layouts, float]]) -> PlanSearch:
    """The search at the level of measured steps, and with the versions of the trainer that they can be of.

    A level is a place in the range of kernels, one in that of messages between hosts and one in that of launches by the host, from -1
    (fast) through 0 (the middle) to 1. It is the likeliest one, if ranges go from the 5th to the 95th percentile of normal laws, and a
    layout's seconds differ by DEVIATION from
    those at its level; those of a single layout are met. Versions are left out that are less likely than the likeliest by as much as the
    end of a range is than its middle.

    Args:
        search: of this model, cluster and trainer.
        steps: rows of one layout each, with the seconds of a step; of those of the same layout the median counts.
    """
    same: dict[str, list[tuple[Layouts, float]]] = {}
    for layout, measured in steps:
        same.setdefault(str(layout), []).append((layout, measured))
    rows = [(some[0][0], statistics.median(measured for _, measured in some)) for some in same.values()]
    deviation = DEVIATION if len(rows) > 1 else MEASURED / P95
    found = [_at_level(search, version, rows, deviation) for version in search.versions]
    least = min(far for far, _ in found)
    likely = tuple(version for far, version in found if far <= least + P95**2)
    return replace(search, versions=likely, measured=len(steps), unlikely=least > len(rows) * P95**2)


def _layout(plan: Plan, kinds: list[str]) -> Layouts:
    """The row of a plan, whose checkpointing is one of these kinds."""
    row = {name: getattr(plan, name) for name in ("gpus", "data", "tensor", "pipeline", "chunks", "micro_batch", "accumulation")}
    inside = plan.data if plan.gpus <= plan.gpus_per_node else math.gcd(plan.data, max(1, plan.gpus_per_node // plan.tensor))
    row |= {"sharing": SHARINGS.index(plan.sharing), "checkpointing": kinds.index(plan.checkpointing), "inside": inside}
    row |= {"shard": inside if plan.sharing == "hsdp" else plan.data}
    return Layouts(**{name: np.array([value]) for name, value in row.items()})


def _seconds(search: PlanSearch, version: Version, layout: Layouts, kernels: Floats, messages: Floats, host: Floats) -> Floats:
    """Seconds of a step of one layout at each place of kernels, messages and host."""
    rates = replace(
        search.rates(version),
        flops_per_sec=search.peak * np.minimum(1.0, at_level(version.efficiency, -kernels)),
        message=at_level(version.message, messages),
        host=at_level(version.host, host),
    )
    workload = replace(version.workload, computed=search.unrestricted.computed)
    return seconds(workload, layout.select(np.zeros(len(kernels), int)), rates, search.cluster.gpus_per_node).total


def _fitted(
    search: PlanSearch, version: Version, steps: Sequence[tuple[Layouts, float]], deviation: float, host: float | None = None
) -> tuple[float, tuple[float, float, float]]:
    """How unlikely the likeliest level of a version is (twice the negative logarithm), and its places of kernels, messages and host.

    A grid of levels around the likeliest of a coarser one: sleeps make stairs, on which no slope leads down.

    Args:
        search: of the model and cluster.
        version: version of the trainer whose steps were measured.
        steps: rows of one layout each, with the seconds of a step.
        deviation: of the logarithm of these seconds from those at the level.
        host: its place; None = the likeliest.
    """
    far = math.inf
    furthest = furthest_levels(version.efficiency)
    spans = [furthest, furthest if version.workload.checked else (0.0, 0.0), (host, host) if host is not None else HOSTS]
    centre, halves = [(low + high) / 2 for low, high in spans], [(high - low) / 2 for low, high in spans]
    while halves[0] * 2 / (SIDES[0] - 1) > FINEST:
        axes = [place + np.linspace(-half, half, side if half else 1) for place, half, side in zip(centre, halves, SIDES, strict=True)]
        grid = [axis.ravel() for axis in np.meshgrid(*(np.clip(axis, *span) for axis, span in zip(axes, spans, strict=True)))]
        missed = np.array([np.log(_seconds(search, version, layout, *grid) / measured) for layout, measured in steps])
        coarse = max(deviation, np.ptp(missed, 1).max() / min(SIDES))  # the grid may pass by the levels that meet the steps
        distance, missed = P95**2 * np.square(grid).sum(0), np.square(missed).sum(0)
        best = int(np.argmin(distance + missed / coarse**2))
        far, halves = float(distance[best] + missed[best] / deviation**2), [half / 3 for half in halves]
        centre = [float(axis[best]) for axis in grid]
    return far, (centre[0], centre[1], centre[2])


def _at_level(search: PlanSearch, version: Version, steps: Sequence[tuple[Layouts, float]], deviation: float) -> tuple[float, Version]:
    """How unlikely the likeliest level of a version is, and the version at it. The host's range is that of all its places that are less
    likely by no more than the end of a range is than its middle: a step that waits for kernels says only how slow the host is at most.
    """
    hosts = (None, *np.linspace(*HOSTS, 7).tolist()) if version.workload.operators else (0.0,)
    tried = [_fitted(search, version, steps, deviation, host) for host in hosts]
    far, (kernels, messages, host) = min(tried)
    likely = [places[2] for other, places in tried if other <= far + P95**2]
    return far, version.at(kernels, messages, Interval(low=min(likely), mid=host, high=max(likely)), len(steps))


def limiting_part(layouts: Layouts, total: Floats, fits: np.ndarray[tuple[int], np.dtype[np.bool_]], parts: Seconds, row: int) -> str:
    """What limits a layout: memory, if a layout of the same ranks that does not fit would be faster; else its largest part."""
    same = (layouts.gpus == layouts.gpus[row]) & (layouts.tensor == layouts.tensor[row])
    same &= layouts.pipeline == layouts.pipeline[row]
    if (same & ~fits).any() and total[same & ~fits].min() * (1 + FASTER) < total[same & fits].min():
        return "memory"
    sizes = {name: float(getattr(parts, name)[row]) for name in PARTS}
    return max(sizes, key=lambda name: sizes[name])
