"""Searches all layouts for those that fit, selects the short list of plans, and says what would help where nothing fits."""

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
from workbench.cluster.analysis.plan.layouts import SHARINGS, Floats, Layouts, list_layouts
from workbench.cluster.analysis.plan.memory import Memory, memory
from workbench.cluster.analysis.plan.plans import Front, Plan, Plans, Power
from workbench.cluster.analysis.plan.ranges import (
    HELD_SOURCES,
    LAUNCH,
    LEVELS,
    PlanError,
    between,
    intervals_around,
)
from workbench.cluster.analysis.plan.timing import PARTS, HardwareRates, Seconds, seconds
from workbench.cluster.analysis.plan.workload import MEGATRON, Trainer, Version, Workload
from workbench.core import units
from workbench.core.statistics import Interval
from workbench.memory.analysis.non_pytorch import non_pytorch_memory

SLACK = 0.25
"""The leanest plan may be this much slower than the fastest, the best value this much more expensive than the cheapest."""
NEAR = 0.10
"""The simplest plan may be this much slower than the fastest."""
FASTER = 0.05
"""Memory limits a plan if a layout that does not fit would be faster by this much."""
FAST = 5
"""Layouts with the most expected throughput that come before all other roles."""
MEASURED = 0.01
"""Part by which a measured step may differ from the next."""
UNLIKELY = "; so far from 35 … 65 % that the loader, a straggler, links or the host may explain the step instead"
MOST_LISTED = 1000
"""Most layouts of a list."""


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
    measured: bool = False
    """Was a step measured?"""
    unlikely: bool = False
    """Is it outside the ranges of all versions?"""

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
        intra, inter = (getattr(share, links) for share in self.links)
        slow = {"low": "high", "high": "low"}
        host = LAUNCH.mid if self.efficiency_given else getattr(LAUNCH, slow.get(efficiency, "mid"))
        rates = HardwareRates.of(
            self.cluster,
            self.peak,
            getattr(version.efficiency, efficiency),
            (intra, inter),
            host,
            (self.links[0].mid / intra, self.links[1].mid / inter),
            getattr(version.message, slow.get(links, "mid")),
            {"low": 1.0, "high": -1.0}.get(links, 0.0),
        )
        return seconds(version.workload, layouts, rates, self.cluster.gpus_per_node)

    @property
    def efficiency(self) -> Interval:
        """Share of the peak while a GPU computes, of all versions."""
        shares = [version.efficiency for version in self.versions]
        mid = statistics.geometric_mean(share.mid for share in shares) if len({*shares}) > 1 else shares[0].mid
        return Interval(low=min(share.low for share in shares), mid=mid, high=max(share.high for share in shares))

    def calibrated(self, plan: Plan, measured: float) -> "PlanSearch":
        """The same where a step of this plan was measured: with the trainer's versions in whose range it lies, or else the nearest, each
        at the level at which its middle takes as long.

        A level is a place in the ranges of kernels and of messages between hosts at once, from -1 (all fast) through 0 (the middle) to 1.
        PlanError: no version takes as long at any of LEVELS, nor does the range of the plan hold it.
        """
        kinds = list(self.unrestricted.computed)
        row = {name: getattr(plan, name) for name in ("gpus", "data", "tensor", "pipeline", "chunks", "micro_batch", "accumulation")}
        inside = plan.data if plan.gpus <= plan.gpus_per_node else math.gcd(plan.data, max(1, plan.gpus_per_node // plan.tensor))
        row |= {"sharing": SHARINGS.index(plan.sharing), "checkpointing": kinds.index(plan.checkpointing), "inside": inside}
        row |= {"shard": inside if plan.sharing == "hsdp" else plan.data}
        layout = Layouts(**{name: np.array([value]) for name, value in row.items()})

        def taken(version: Version, level: float) -> float:
            return float(self._taken(layout, version.at(level), "mid", "mid").total[0])

        def slowest(version: Version, seconds: float) -> float:
            """The slowest level at which it takes no longer."""
            low, high = LEVELS
            for _ in range(30):
                level = (low + high) / 2
                low, high = (low, level) if taken(version, level) > seconds else (level, high)
            return low

        found, ranges = [], []
        for version in self.versions:
            whole = replace(version, workload=replace(version.workload, computed=self.unrestricted.computed))
            least, most = (taken(whole, level) for level in LEVELS)
            ranges.append(f"{units.seconds(least)} … {units.seconds(most)}" + f" ({version.words})" * bool(self.trainer))
            nearest = min(max(measured, least), most)
            missed = max(0.0, abs(math.log(measured) - math.log(nearest)) - MEASURED)
            fast, slow = slowest(whole, nearest / (1 + MEASURED)), slowest(whole, nearest * (1 + MEASURED))
            level = min(max(fast, 0.0), slow)  # whole naps take as long at many levels: the one next to the middle
            found.append((missed, abs(level), version.at(level), nearest))
        missed, _, version, nearest = min(found, key=lambda each: each[:2])
        if missed and measured not in plan.seconds:
            raise PlanError(
                f"measured={units.seconds(measured)}: a step of {plan.layout}, {plan.batch}, may take {'; '.join(ranges)} where "
                f"kernels reach 100 % … 12 % of the dense peak. Is it one step, of this layout and a global batch of {plan.global_batch:,}?"
            )
        likely = tuple(version for missed, far, version, _ in found if not missed and far <= 1)
        return replace(self, versions=likely or (version,), efficiency_given=True, measured=True, unlikely=not likely)

    def memory(self, layouts: Layouts) -> Memory:
        """Memory of the GPU that needs most."""
        return memory(self.workload, layouts, self.cluster.device.name, self.held)

    def _plan(self, selection: "Selection", layouts: Layouts, row: int, parts: Seconds, held: Memory, fits: Any, total: Floats) -> Plan:
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
        reached = (
            "as the measured step implies, and published layouts differ" + UNLIKELY * self.unlikely
            if self.measured
            else "as given"
            if self.efficiency_given
            else "as published runs on A100 and H100 imply; with a measured step: efficiency=plan.implied_efficiency(seconds)"
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
            f"between: the range of a step's time, if kernels reach {kernels} of the dense peak ({reached}), and collectives {links}",
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
        words += "; measured=(plan, seconds) of a step says which it can have been" * (several and not self.measured)
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
        larger = sorted({gpus * 2, *(each * 2**power for power in range(18))})
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
        layouts: that fit.
        total: seconds of a step of each.
        used: bytes of each.
        gpu_seconds: GPUs × seconds of each.
        sure: does the upper end of its memory fit, too?
        chance: that its memory suffices.
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
    leanest = _first(np.where(soon, used, np.inf), total)
    simplest = _first(np.where(near, parts, np.inf), total)
    picks.append(("simplest", simplest, f"the fewest kinds of parallelism within {100 * NEAR:.0f} % of the fastest"))
    picks.append(("leanest", leanest, f"the least memory within {100 * SLACK:.0f} % of the fastest"))
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


def limiting_part(layouts: Layouts, total: Floats, fits: np.ndarray[tuple[int], np.dtype[np.bool_]], parts: Seconds, row: int) -> str:
    """What limits a layout: memory, if a layout of the same ranks that does not fit would be faster; else its largest part."""
    same = (layouts.gpus == layouts.gpus[row]) & (layouts.tensor == layouts.tensor[row])
    same &= layouts.pipeline == layouts.pipeline[row]
    if (same & ~fits).any() and total[same & ~fits].min() * (1 + FASTER) < total[same & fits].min():
        return "memory"
    sizes = {name: float(getattr(parts, name)[row]) for name in PARTS}
    return max(sizes, key=lambda name: sizes[name])
