"""Answering: the plans of one question, with all that is fixed; and what to say where there are none."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench import units
from workbench.cost import Cluster, CostError
from workbench.cost.energy import estimated
from workbench.planning import choosing
from workbench.planning.choosing import Chosen
from workbench.planning.memory import Memory, memory
from workbench.planning.plans import Plan
from workbench.planning.ranges import PlanError, Range
from workbench.planning.short_list import Front, Plans
from workbench.planning.space import SHARINGS, Floats, Layouts, layouts
from workbench.planning.subject import CHECKPOINTINGS, Subject
from workbench.planning.timing import PARTS, Pace, Seconds, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that is fixed."""

    subject: Subject
    cluster: Cluster
    batch: int
    """Samples per step of all GPUs."""
    peak: float
    """FLOP/s of a GPU in the precision."""
    efficiency: Range
    """Share of it while it computes."""
    links: Range
    """Share of the links' bandwidth."""
    room: float
    """Bytes that may be used of a GPU."""
    steps: int
    """That money and energy are of."""
    top: int
    """Plans at most."""
    power: dict[str, Any]
    """Price, intensity and so on, of `cost.energy.Energy`."""
    watts: float | None
    """Of a GPU; None = by its datasheet."""
    own: bool
    """Was the efficiency given?"""

    def answer(self, sizes: Sequence[int], sharings: Sequence[str]) -> Plans:
        """The short list for some numbers of GPUs.

        Raises:
            PlanError: nothing can be made, or nothing fits.
        """
        out: Counter[str] = Counter()
        everything = layouts(self.subject, self.cluster, sizes, self.batch, sharings, out)
        if not len(everything):
            raise PlanError(self._no_layout(sizes, out))
        held = memory(self.subject, everything, self.cluster.device.name)
        used = held.total
        fits = used <= self.room
        if not fits.any():
            raise PlanError(self._too_large(everything, used))
        parts = self.seconds(everything, "mid")
        total = parts.total
        where = np.flatnonzero(fits)
        found = everything.chosen(where)
        gpu_seconds = found.gpus * total[where]
        picks = choosing.short_list(found, total[where], used[where], gpu_seconds, top=self.top, one_size=len(sizes) == 1)
        plans = [self._plan(one, everything, int(where[one.place]), parts, held, fits, total) for one in picks]
        out["memory"] = int((~fits).sum())
        out["a faster plan"] = len(where) - len(plans)
        return Plans(
            plans=tuple(plans),
            front=self._front(everything, where, total, parts, fits),
            considered=len(everything) + sum(out.values()) - out["memory"] - out["a faster plan"],
            ruled_out={reason: count for reason, count in out.items() if count},
            name=self.subject.name,
            cluster=self.cluster,
            global_batch=self.batch,
            notes=self._notes(),
        )

    def seconds(self, found: Layouts, end: str) -> Seconds:
        """Of a step, at one end of what the hardware reaches, or in the middle."""
        pace = Pace.of(self.cluster, self.peak, getattr(self.efficiency, end), getattr(self.links, end))
        return seconds(self.subject, found, pace, self.cluster.gpus_per_node)

    def _ranges(self, found: Layouts, mid: Floats) -> list[Range]:
        slow, fast = self.seconds(found, "low").total, self.seconds(found, "high").total
        return [Range(low=float(a), mid=float(b), high=float(c)) for a, b, c in zip(fast, mid, slow, strict=True)]

    def _plan(self, chosen: Chosen, found: Layouts, place: int, parts: Seconds, held: Memory, fits: Any, total: Floats) -> Plan:
        one = found.chosen(np.array([place]))
        span = self._ranges(one, total[[place]])[0]
        numbers = {name: int(getattr(one, name)[0]) for name in ("gpus", "data", "tensor", "pipeline", "chunks", "micro_batch")}
        useful = self.subject.flops * self.batch / numbers["gpus"] / self.peak
        sharing = SHARINGS[int(one.sharing[0])]
        shares = {name: float(getattr(parts, name)[place]) for name in PARTS}
        return Plan(
            **numbers,
            accumulation=int(one.accumulation[0]),
            sharing=sharing,
            shard_ranks=1 if sharing == "ddp" else int(one.shard[0]),
            checkpointing=list(self.subject.computed)[int(one.checkpointing[0])],
            precision=self.subject.precision,
            seconds=span,
            parts=shares,
            hidden=float(parts.hidden[place]),
            memory={name: float(values[place]) for name, values in held.groups.items()},
            capacity=self.room,
            mfu=span.of(lambda value: useful / value),
            steps=self.steps,
            energy=self._energy(numbers["gpus"], span.mid, shares["compute"]),
            bound=choosing.bounds(found, total, fits, parts, place),
            roles=chosen.roles,
            why=chosen.why,
            gpus_per_node=self.cluster.gpus_per_node,
            device=self.cluster.device.name,
            efficiency=self.efficiency.mid,
        )

    def _energy(self, gpus: int, each: float, compute: float) -> Any:
        try:
            return estimated(
                each * self.steps,
                gpus,
                self.cluster.device.name,
                utilization=min(1.0, compute / each),
                watts=self.watts,
                node=self.cluster.name,
                per_node=self.cluster.gpus_per_node,
                **self.power,
            )
        except CostError as error:
            if self.watts is None and "is not known" in str(error) and all(self.power[name] is None for name in ("price", "intensity")):
                return None
            raise PlanError(str(error)) from error

    def _front(self, found: Layouts, where: Any, total: Floats, parts: Seconds, fits: Any) -> tuple[Front, ...]:
        best = [where[found.gpus[where] == size] for size in np.unique(found.gpus[where])]
        places = np.array([some[np.argmin(total[some])] for some in best])
        some = found.chosen(places)
        return tuple(
            Front(
                gpus=int(some.gpus[i]),
                seconds=span,
                bound=choosing.bounds(found, total, fits, parts, int(place)),
                layout=f"dp {some.data[i]} × tp {some.tensor[i]} × pp {some.pipeline[i]}",
                compute=float(parts.compute[place]),
            )
            for i, (place, span) in enumerate(zip(places, self._ranges(some, total[places]), strict=True))
        )

    # --- what to say

    def _notes(self) -> tuple[str, ...]:
        reached = (
            "as given"
            if self.own
            else "as published runs on A100 and H100 imply; with a measured step: efficiency=plan.implied_efficiency(seconds)"
        )
        ends = [f"{units.percent(getattr(self.efficiency, end))}" for end in ("low", "mid", "high")]
        share = [f"{units.percent(getattr(self.links, end))}" for end in ("low", "mid", "high")]
        return (
            f"between: kernels reach {ends[0]} … {ends[2]} (reckoned {ends[1]}) of the dense peak ({reached}), and collectives "
            f"{share[0]} … {share[2]} (reckoned {share[1]}) of the links' bandwidth",
            "left out: what stages have beside layers, stragglers, the loader, checkpoints on disk",
            *self.subject.notes,
        )

    def _no_layout(self, sizes: Sequence[int], out: Counter[str]) -> str:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in out.most_common(3))
        numbers = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} … {sizes[-1]:,}"
        near = self.batch - self.batch % sizes[0]
        hint = f"try global_batch={near or sizes[0]} or {(near or 0) + sizes[0]}" if len(sizes) == 1 else "try another global_batch"
        return f"no layout of {numbers} GPUs makes a batch of {self.batch:,} samples ({reasons}): {hint}, or another number of GPUs"

    def _too_large(self, found: Layouts, used: Floats) -> str:
        least = int(np.argmin(used))
        size, gpus = used[least], int(found.gpus[least])
        one = found.chosen(np.array([least]))
        said = (
            f"dp {one.data[0]} ({SHARINGS[int(one.sharing[0])]}) × tp {one.tensor[0]} × pp {one.pipeline[0]}, {one.micro_batch[0]} at once"
        )
        room, device = self.room, self.cluster.device
        more = math.ceil(size / room)
        return (
            f"{self.subject.name} fits nowhere on {gpus:,} × {device.name}: of {len(found):,} layouts the nearest ({said}) takes "
            f"{units.bytes_(size)} of each GPU, {units.bytes_(size - room)} more than the {units.bytes_(room)} that may be used. "
            f"{self._cures(one, gpus, more)}"
        )

    def _cures(self, one: Layouts, gpus: int, more: int) -> str:
        larger = [self.cluster.gpus_per_node * 2**power for power in range(18)]
        for size in [gpus * 2, *larger]:
            if size <= gpus or (size > self.cluster.gpus_per_node and size % self.cluster.gpus_per_node):
                continue
            other = layouts(self.subject, self.cluster, [size], self.batch, SHARINGS, Counter())
            if len(other) and (memory(self.subject, other, self.cluster.device.name).total <= self.room).any():
                return f"It would fit on {size:,} GPUs; or on GPUs with {more} times the memory, with a shorter sequence"
        kinds = [kind for kind in CHECKPOINTINGS if kind not in self.subject.computed]
        allow = f', or checkpointing="{kinds[-1]}"' if kinds else ""
        return f"It would fit on GPUs with {more} times the memory; or try a shorter sequence, a larger global_batch{allow}"
