"""Answering: the plans of one question, with all that is fixed; and what to say where there are none."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collectives import CostError
from workbench.cluster.analysis.energy import Energy
from workbench.cluster.analysis.plan import select as choosing
from workbench.cluster.analysis.plan.energy import Power
from workbench.cluster.analysis.plan.layouts import MEGATRON, SHARINGS, Floats, Layouts, layouts
from workbench.cluster.analysis.plan.memory import Memory, memory
from workbench.cluster.analysis.plan.plans import Front, Plan, Plans
from workbench.cluster.analysis.plan.ranges import HELD_SOURCES, PlanError, between, hull
from workbench.cluster.analysis.plan.select import Chosen
from workbench.cluster.analysis.plan.subject import Subject
from workbench.cluster.analysis.plan.timing import PARTS, Pace, Seconds, seconds
from workbench.core import units
from workbench.core.statistics import Interval
from workbench.memory.analysis.non_pytorch import non_pytorch_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that is fixed."""

    subject: Subject
    cluster: Cluster
    batch: int
    """Samples per step of all GPUs."""
    peak: float
    """FLOP/s of a GPU in the precision."""
    efficiency: Interval
    """Share of it while it computes."""
    links: tuple[Interval, Interval]
    """Share of the links' bandwidth, inside nodes and between them."""
    held: Interval
    """What the allocator holds over what is reckoned."""
    room: float
    """Bytes that may be used of a GPU."""
    steps: int
    """That money and energy are of."""
    top: int
    """Plans at most."""
    power: Power
    """Prices, intensity and so on."""
    whole: Subject
    """`subject` with all that it can have, nothing narrowed."""
    own: bool
    """Was the efficiency given?"""
    own_held: bool
    """Was `held` given?"""

    def answer(self, sizes: Sequence[int], sharings: Sequence[str]) -> Plans:
        """The short list for some numbers of GPUs: of layouts whose memory fits as it is reckoned. One whose upper end does not is tight,
        and stays; one of which only the lower end fits is ruled out, and counted by itself.

        Raises:
            PlanError: nothing can be made, or nothing fits.
        """
        out: Counter[str] = Counter()
        everything = layouts(self.subject, self.cluster, sizes, self.batch, sharings, out)
        if not len(everything):
            raise PlanError(self._no_layout(sizes, sharings, out))
        considered = len(everything) + sum(out.values())
        held = self.memory(everything)
        used = held.total
        fits = used <= self.room
        if not fits.any():
            raise PlanError(self._too_large(everything, used, sharings))
        parts = self.seconds(everything, "mid")
        total = parts.total
        where = np.flatnonzero(fits)
        found = everything.chosen(where)
        gpu_seconds = found.gpus * total[where]
        sure = held.high[where] <= self.room
        picks = choosing.short_list(found, total[where], used[where], gpu_seconds, sure, top=self.top, one_size=len(sizes) == 1)
        plans = [self._plan(one, everything, int(where[one.place]), parts, held, fits, total) for one in picks]
        perhaps = ~fits & (held.low <= self.room)
        out["memory"] = int((~fits & ~perhaps).sum())
        out["memory, though its lower end fits"] = int(perhaps.sum())
        out["a faster plan"] = len(where) - len(plans)
        return Plans(
            plans=tuple(plans),
            front=self._front(everything, where, total, parts, held),
            considered=considered,
            ruled_out={reason: count for reason, count in out.items() if count},
            name=self.subject.name,
            cluster=self.cluster,
            global_batch=self.batch,
            notes=self._notes(plans),
        )

    def seconds(self, found: Layouts, end: str) -> Seconds:
        """Of a step, at one end of what the hardware reaches, or in the middle."""
        return seconds(self.subject, found, self._pace(end, end), self.cluster.gpus_per_node)

    def _pace(self, efficiency: str, links: str) -> Pace:
        intra, inter = (getattr(one, links) for one in self.links)
        return Pace.of(self.cluster, self.peak, getattr(self.efficiency, efficiency), (intra, inter))

    def corners(self, found: Layouts) -> list[Seconds]:
        """Of a step, at both ends of both ranges: fast kernels and slow links leave the most communication bare, for instance."""
        paces = [self._pace(efficiency, links) for efficiency in ("low", "high") for links in ("low", "high")]
        return [seconds(self.subject, found, pace, self.cluster.gpus_per_node) for pace in paces]

    def memory(self, found: Layouts) -> Memory:
        """Of the fullest GPU."""
        return memory(self.subject, found, self.cluster.device.name, self.held)

    def _plan(self, chosen: Chosen, found: Layouts, place: int, parts: Seconds, held: Memory, fits: Any, total: Floats) -> Plan:
        one = found.chosen(np.array([place]))
        corners = self.corners(one)
        span = hull([corner.total for corner in corners], total[[place]])[0]
        numbers = {name: int(getattr(one, name)[0]) for name in ("gpus", "data", "tensor", "pipeline", "chunks", "micro_batch")}
        useful = self.subject.flops * self.batch / numbers["gpus"] / self.peak
        sharing = SHARINGS[int(one.sharing[0])]
        taken = {name: float(getattr(parts, name)[place]) for name in PARTS}
        spans, shares = {}, {}
        for name, mid in taken.items():
            each = [getattr(corner, name) for corner in corners]
            spans[name] = hull(each, np.array([mid]))[0]
            shares[name] = hull([part / corner.total for part, corner in zip(each, corners, strict=True)], mid / total[[place]])[0]
        return Plan(
            **numbers,
            accumulation=int(one.accumulation[0]),
            sharing=sharing,
            shard_ranks=1 if sharing == "ddp" else int(one.shard[0]),
            checkpointing=list(self.subject.computed)[int(one.checkpointing[0])],
            precision=self.subject.precision,
            seconds=span,
            parts=taken,
            spans=spans,
            shares=shares,
            hidden=float(parts.hidden[place]),
            memory={name: float(values[place]) for name, values in held.groups.items()},
            needed=Interval(low=float(held.low[place]), mid=float(held.total[place]), high=float(held.high[place])),
            capacity=self.room,
            mfu=span.of(lambda value: useful / value),
            steps=self.steps,
            energy=self._energy(numbers["gpus"], span, spans["compute"]),
            power=self.power,
            node=self.cluster.name,
            broadcasts=self.subject.broadcasts > 0,
            bound=choosing.bounds(found, total, fits, parts, place),
            roles=chosen.roles,
            why=chosen.why,
            gpus_per_node=self.cluster.gpus_per_node,
            device=self.cluster.device.name,
            efficiency=self.efficiency.mid,
        )

    def _energy(self, gpus: int, span: Interval, computing: Interval) -> Energy | None:
        where = self.cluster
        try:
            return self.power.drawn(
                gpus=gpus,
                steps=self.steps,
                seconds=span,
                computing=computing,
                device=where.device.name,
                node=where.name,
                per_node=where.gpus_per_node,
            )
        except CostError as error:
            if self.power.watts is None and "is not known" in str(error) and not self.power.asked:
                return None
            raise PlanError(str(error)) from error

    def _front(self, found: Layouts, where: Any, total: Floats, parts: Seconds, held: Memory) -> tuple[Front, ...]:
        fits = held.total <= self.room
        best = [where[found.gpus[where] == size] for size in np.unique(found.gpus[where])]
        places = np.array([some[np.argmin(total[some])] for some in best])
        some = found.chosen(places)
        spans = hull([corner.total for corner in self.corners(some)], total[places])
        return tuple(
            Front(
                gpus=int(some.gpus[i]),
                seconds=span,
                bound=choosing.bounds(found, total, fits, parts, int(place)),
                layout=f"dp {some.data[i]} × tp {some.tensor[i]} × pp {some.pipeline[i]}",
                compute=float(parts.compute[place]),
                tight=bool(held.high[place] > self.room),
            )
            for i, (place, span) in enumerate(zip(places, spans, strict=True))
        )

    # --- what to say

    def _notes(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        reached = (
            "as given"
            if self.own
            else "as published runs on A100 and H100 imply; with a measured step: efficiency=plan.implied_efficiency(seconds)"
        )
        kernels, intra, inter = (
            "{} … {} (reckoned {})".format(*(units.percent(getattr(one, end)) for end in ("low", "high", "mid")))
            for one in (self.efficiency, *self.links)
        )
        links = (
            f"{intra} of the links' bandwidth" if intra == inter else f"{intra} of the links' bandwidth inside nodes, {inter} between them"
        )
        beside, held = non_pytorch_memory(self.cluster.device.name, 2), self.held
        times = f"{held.low:g}" if held.low == held.high else f"{held.low:g} … {held.high:g}"
        source = "as given" if self.own_held else HELD_SOURCES[bool(self.subject.counted)]
        return (
            f"between: kernels reach {kernels} of the dense peak ({reached}), and collectives {links}",
            f"memory between: the allocator holds {times} times what is reckoned, {source}, "
            f"and context and NCCL {units.bytes_(beside.low)} … {units.bytes_(beside.high)}; tight: the upper end does not fit",
            "left out: what stages have beside layers, stragglers, the loader, checkpoints on disk",
            *([MEGATRON] if any(one.megatron for one in plans) else []),
            *self.subject.notes,
        )

    def _no_layout(self, sizes: Sequence[int], sharings: Sequence[str], out: Counter[str]) -> str:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in out.most_common(3))
        numbers = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} … {sizes[-1]:,}"
        below = self.batch - self.batch % sizes[0]
        batches = [below, below + sizes[0]] if len(sizes) == 1 else []
        works = [f"{size}" for size in batches if size and len(layouts(self.subject, self.cluster, sizes, size, sharings, Counter()))]
        hint = (
            f"try global_batch={' or '.join(works)}, or another number of GPUs" if works else "try another number of GPUs or global_batch"
        )
        return f"no layout of {numbers} GPUs makes a batch of {self.batch:,} samples ({reasons}): {hint}"

    def _too_large(self, found: Layouts, used: Floats, sharings: Sequence[str]) -> str:
        least = int(np.argmin(used))
        size, gpus = used[least], int(found.gpus[least])
        one = found.chosen(np.array([least]))
        ends = self.memory(one)
        span = Interval(low=float(ends.low[0]), mid=float(size), high=float(ends.high[0]))
        said = (
            f"dp {one.data[0]} ({SHARINGS[int(one.sharing[0])]}) × tp {one.tensor[0]} × pp {one.pipeline[0]}, {one.micro_batch[0]} at once"
        )
        room, device = self.room, self.cluster.device
        cures = "; or ".join(self._cures(gpus, math.ceil(size / room), sharings))
        return (
            f"{self.subject.name} fits nowhere on {gpus:,} × {device.name}: of {len(found):,} layouts the nearest ({said}) takes "
            f"{between(span, units.bytes_)} of each GPU, {units.bytes_(size - room)} more than the {units.bytes_(room)} that may be used. "
            f"It would fit {cures}; or try a shorter sequence"
        )

    def _cures(self, gpus: int, more: int, sharings: Sequence[str]) -> list[str]:
        """What makes it fit while all else stays as it was asked for; each was looked at."""
        each = self.cluster.gpus_per_node
        larger = sorted({gpus * 2, *(each * 2**power for power in range(18))})
        larger = [size for size in larger if size > gpus and (size <= each or size % each == 0)]
        enough = next((size for size in larger if self._fits(self.subject, size, sharings)), None)
        cures = [] if enough is None else [f"on {enough:,} GPUs"]
        cures += [f"on GPUs with {more} times the memory"]
        other = [name for name in SHARINGS if name not in sharings and self._fits(self.subject, gpus, [name])]
        cures += [f'with sharing="{other[0]}"'] if other else []
        for kind, flops in self.whole.computed.items():
            if kind not in self.subject.computed and self._fits(replace(self.subject, computed={kind: flops}), gpus, sharings):
                return [*cures, f'with checkpointing="{kind}"']
        return cures

    def _fits(self, subject: Subject, gpus: int, sharings: Sequence[str]) -> bool:
        found = layouts(subject, self.cluster, [gpus], self.batch, sharings, Counter())
        return bool(len(found) and (memory(subject, found, self.cluster.device.name, self.held).total <= self.room).any())
