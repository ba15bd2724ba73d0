"""Plan: one way to train a model on a cluster, with what it is predicted to take.

Short list: the plans that were chosen, and the fastest for every number of GPUs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.energy import Energy
from workbench.cluster.analysis.plan.energy import Power, at_ends
from workbench.cluster.analysis.plan.layouts import MEGATRON
from workbench.cluster.analysis.plan.ranges import PlanError, between
from workbench.cluster.analysis.plan.timing import PARTS
from workbench.core import units
from workbench.core.display import table as display
from workbench.core.statistics import Interval

BOUNDS = {
    "compute": "computing is the largest part: faster GPUs, or more of them",
    "communication": "waiting for other GPUs is the largest part: faster links, fewer copies, larger micro-batches",
    "bubble": "waiting for the pipeline is the largest part: more micro-batches, fewer stages",
    "memory": "a faster layout of the same GPUs exists but does not fit: more memory per GPU",
}
"""What limits a plan → what that means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(display.Shown):
    """One layout. gpus = data × tensor × pipeline; micro_batch × accumulation × data = global_batch."""

    gpus: int
    data: int
    """Copies that work on different samples."""
    tensor: int
    """Ranks that split each layer."""
    pipeline: int
    """Stages."""
    chunks: int
    """Pieces of layers on each stage; above 1 the schedule is interleaved."""
    micro_batch: int
    """Samples at once."""
    accumulation: int
    """Micro-batches per step."""
    sharing: str
    """What copies share: "ddp", "zero1", "zero2", "fsdp" or "hsdp"."""
    shard_ranks: int
    """Ranks that share one copy of the states; 1 = nothing is shared."""
    checkpointing: str
    """What the backward computes again."""
    precision: str
    seconds: Interval
    """Of a step."""
    parts: Mapping[str, float]
    """What the middle of `seconds` is made of: compute, communication that nothing hides, bubble."""
    spans: Mapping[str, Interval]
    """The same with their ends, which do not add up: the most communication is bare where kernels are fast and links are slow."""
    shares: Mapping[str, Interval]
    """Part → its share of the step."""
    hidden: float
    """Seconds of communication beside computing, per step."""
    memory: Mapping[str, float]
    """What holds bytes of the fullest GPU → bytes."""
    needed: Interval
    """Bytes of the fullest GPU. The middle decides whether a plan fits; where the upper end does not, the plan is `tight`."""
    capacity: float
    """Bytes that may be used of a GPU."""
    mfu: Interval
    """Model FLOPs per second over the peak; what is computed again does not count."""
    steps: int
    """That `energy` is of."""
    energy: Energy | None
    """Of `steps` steps: estimated; None = the device's power is not known."""
    power: Power
    """Prices and power that `energy` was reckoned with."""
    node: str
    """Name of the cluster."""
    broadcasts: bool
    """Is its ZeRO-1 that of a RunSpec, which broadcasts, or Megatron's?"""
    bound: str
    """What limits it: "compute", "communication", "bubble" or "memory"."""
    roles: tuple[str, ...]
    """Why it is on the list: "fastest", "cheapest" …"""
    why: str
    """The same in words."""
    gpus_per_node: int
    """Of the cluster."""
    device: str
    """Name of each GPU."""
    efficiency: float
    """Share of the GPU's peak that the middle is reckoned with."""

    @property
    def global_batch(self) -> int:
        """Samples per step of all GPUs."""
        return self.micro_batch * self.accumulation * self.data

    @property
    def samples_per_sec(self) -> Interval:
        """Of all GPUs."""
        return self.seconds.of(lambda seconds: self.global_batch / seconds)

    @property
    def bytes(self) -> float:
        """Of the fullest GPU, as reckoned."""
        return self.needed.mid

    @property
    def tight(self) -> bool:
        """Does its memory fit as it is reckoned, but not by its upper end?"""
        return self.needed.high > self.capacity

    @property
    def gpu_seconds(self) -> float:
        """GPUs × seconds per sample."""
        return self.gpus * self.seconds.mid / self.global_batch

    @property
    def money(self) -> Interval | None:
        """Of `steps` steps: rent, GPUs × hours × price, and electricity where it is paid beside, as in `energy`; None without a price."""
        return self._span("money")

    @property
    def kwh(self) -> Interval | None:
        """Of `steps` steps, the building's share included; None = the device's power is not known."""
        return self._span("kwh")

    @property
    def grams(self) -> Interval | None:
        """gCO2e of `steps` steps' electricity; None without an intensity."""
        return self._span("grams")

    def _span(self, name: str) -> Interval | None:
        return None if self.energy is None else at_ends(self.energy, name, self.seconds.of(lambda each: self.steps * each))

    def drawn(self, steps: int | None = None, **inputs: Any) -> Energy:
        """Energy of another number of steps, or with other prices or watts than it was planned with; see `wb.energy`."""
        return self.power.drawn(
            gpus=self.gpus,
            steps=self.steps if steps is None else steps,
            seconds=self.seconds,
            computing=self.spans["compute"],
            device=self.device,
            node=self.node,
            per_node=self.gpus_per_node,
            **inputs,
        )

    @property
    def megatron(self) -> bool:
        """Is it timed with Megatron's ZeRO-1, which is not that of a RunSpec?"""
        return self.sharing == "zero1" and self.data > 1 and not self.broadcasts

    def implied_efficiency(self, seconds: float) -> float:
        """The share of the peak that a measured step of this plan implies, communication and bubble taken as predicted: for
        `wb.plan(…, efficiency=plan.implied_efficiency(1.7))`, which narrows all ranges to the links'.

        Raises:
            PlanError: the seconds leave no time to compute in.
        """
        compute, sent, bubble = (self.parts[name] for name in PARTS)
        left = seconds * (compute + sent) / (compute + sent + bubble) - sent
        if not left > 0:
            raise PlanError(
                f"{seconds!r} s for a step of which {units.seconds(sent + bubble)} are communication and bubble: nothing is left to "
                "compute in; is it a step of this layout and batch?"
            )
        return self.efficiency * compute / left

    @property
    def layout(self) -> str:
        """As people write it, such as `dp 8 (fsdp) × tp 4 × pp 2`."""
        words = [f"dp {self.data}" + (f" ({self.sharing})" if self.data > 1 else "")]
        words += [f"tp {self.tensor}"] if self.tensor > 1 else []
        words += [f"pp {self.pipeline}" + (f" (v {self.chunks})" if self.chunks > 1 else "")] if self.pipeline > 1 else []
        return " × ".join(words)

    @property
    def batch(self) -> str:
        """micro_batch × accumulation, and what is computed again."""
        again = "" if self.checkpointing == "none" else f", checkpointing {self.checkpointing}"
        return f"{self.micro_batch} × {self.accumulation}{again}"

    def changes(self) -> dict[str, Any]:
        """The knobs of a RunSpec: `spec.replace(**plan.changes())`.

        Raises:
            PlanError: it has stages, for which a RunSpec has no knob; or ZeRO-1 of Megatron, which is another than that of a RunSpec.
        """
        from workbench.runs.spec import RunSpec

        if self.pipeline > 1:
            raise PlanError(
                f"{self.layout}: a RunSpec has no pipeline, this is a plan for a framework that has. Plan without: wb.plan(…, pipeline=1)"
            )
        if self.megatron:
            raise PlanError(f'{self.layout}: {MEGATRON}. Plan without: wb.plan(…, sharing="zero2"), or one of ddp, fsdp, hsdp')
        knobs: dict[str, Any] = {
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "precision": self.precision,
            "parallel": self.sharing,
            "tensor_parallel": self.tensor,
            "checkpointing": self.checkpointing,
            "shard_ranks": self.shard_ranks if self.sharing == "hsdp" else None,
            "nproc_per_node": self.gpus,
        }
        if "nnodes" in {one.name for one in fields(RunSpec)} and self.gpus > self.gpus_per_node:
            knobs |= {"nnodes": self.gpus // self.gpus_per_node, "nproc_per_node": self.gpus_per_node}
        return knobs

    @property
    def table(self) -> display.Table:
        """All of it."""
        rows = [
            ["GPUs", f"{self.gpus:,}"],
            ["layout", self.layout],
            ["micro-batch × accumulation", self.batch],
            ["step", between(self.seconds, units.seconds)],
            *([f"  {name}", f"{between(self.spans[name], units.seconds)}, {between(self.shares[name], units.percent)}"] for name in PARTS),
            ["throughput", between(self.samples_per_sec, units.rate)],
            ["MFU", between(self.mfu, units.percent)],
            ["memory of a GPU", f"{between(self.needed, units.bytes_)} of {units.bytes_(self.capacity)}{', tight' * self.tight}"],
            *([f"  {name}", units.bytes_(held)] for name, held in self.memory.items()),
        ]
        rows += [[f"money of {self.steps:,} steps", between(self.money, lambda value: f"{value:,.4g}")]] if self.money else []
        if self.kwh:
            rows.append([f"energy of {self.steps:,} steps", f"{between(self.kwh, lambda kwh: units.count(1000 * kwh, 'Wh'))}, estimated"])
        if self.grams:
            rows.append([f"carbon of {self.steps:,} steps", f"{between(self.grams, lambda grams: units.count(grams, 'g'))} CO2e"])
        rows.append(["bound", f"{self.bound}: {BOUNDS[self.bound]}"])
        return display.Table(columns=("plan", ", ".join(self.roles)), rows=rows, note=f"predicted; {self.why}")

    def row(self) -> dict[str, Any]:
        """As a row of a DataFrame."""
        plain = ("gpus", "data", "tensor", "pipeline", "chunks", "micro_batch", "accumulation", "global_batch", "sharing", "checkpointing")
        found: dict[str, Any] = {"roles": ", ".join(self.roles), **{name: getattr(self, name) for name in plain}}
        spans: dict[str, Interval | None] = {
            "seconds": self.seconds,
            **self.spans,
            "samples_per_sec": self.samples_per_sec,
            "mfu": self.mfu,
        }
        spans |= {"bytes": self.needed, "money": self.money, "kwh": self.kwh, "grams": self.grams}
        for name, span in spans.items():
            found |= {name: span and span.mid, f"{name}_low": span and span.low, f"{name}_high": span and span.high}
        found |= {"capacity": self.capacity, "tight": self.tight}
        return {**found, "gpu_seconds": self.gpu_seconds, "bound": self.bound, "why": self.why}

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        return display.frame([self.row()])

    def __repr__(self) -> str:
        return f"Plan({self.gpus} GPUs, {self.layout}, {self.batch}, {units.seconds(self.seconds.mid)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The fastest plan for one number of GPUs: a point of time against money."""

    gpus: int
    seconds: Interval
    """Of a step."""
    bound: str
    layout: str
    compute: float
    """Seconds of the middle that compute."""
    tight: bool
    """Does its memory not fit by its upper end?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans(Sequence[Plan], display.Shown):
    """The short list, best first; `plans[0]` is the fastest."""

    plans: tuple[Plan, ...]
    front: tuple[Front, ...]
    """The fastest layout for every number of GPUs that was looked at, fewest first."""
    considered: int
    """Layouts that were looked at."""
    ruled_out: Mapping[str, int]
    """Reason → how many layouts it ruled out."""
    name: str
    """What is trained."""
    cluster: Cluster
    global_batch: int
    """Samples per step."""
    notes: tuple[str, ...] = ()
    """Where ranges come from, and what is left out."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, str):
            found = [one for one in self.plans if place in one.roles]
            if not found:
                raise KeyError(f"no plan is the {place!r} one: there are {', '.join(self.roles)}; a larger top= may list more")
            return found[0]
        return self.plans[place]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    @property
    def roles(self) -> list[str]:
        """Names by which a plan can be asked for: `plans["cheapest"]`."""
        return list(dict.fromkeys(role for one in self.plans for role in one.roles))

    @property
    def best(self) -> Plan:
        """The first."""
        return self.plans[0]

    def changes(self) -> dict[str, Any]:
        """The knobs of a RunSpec for the best plan; see `Plan.changes`."""
        return self.best.changes()

    @property
    def table(self) -> display.Table:
        """One row per plan, each figure with its ends; below, what was ruled out by what."""
        priced = any(one.money for one in self.plans)
        columns = ["plan", "GPUs", "layout", "micro-batch × accumulation", "step", "between", "throughput", "MFU", "memory"]
        columns += ["exposed", "bubble", f"money of {self.best.steps:,} steps" if priced else "GPU s a sample", "bound"]
        rows = [
            [
                ", ".join(one.roles),
                f"{one.gpus:,}",
                one.layout,
                one.batch,
                units.seconds(one.seconds.mid),
                f"{units.seconds(one.seconds.low)} … {units.seconds(one.seconds.high)}",
                between(one.samples_per_sec, units.rate),
                between(one.mfu, units.percent),
                between(one.needed, units.bytes_) + ", tight" * one.tight,
                between(one.shares["communication"], units.percent),
                between(one.shares["bubble"], units.percent),
                between(one.money, lambda value: f"{value:,.4g}") if one.money else f"{one.gpu_seconds:.3g}",
                one.bound,
            ]
            for one in self.plans
        ]
        lines = [f"{', '.join(one.roles)}: {one.why}" for one in self.plans]
        out = "; ".join(f"{count:,} by {reason}" for reason, count in self.ruled_out.items() if count)
        lines.append(f"{self.considered:,} layouts looked at; ruled out: {out or 'none'}")
        return display.Table(
            columns=columns,
            rows=rows,
            title=f"{self.name} on {self.cluster.name}, {self.global_batch:,} samples a step: predicted",
            note="\n".join([*lines, *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per plan; seconds and bytes."""
        return display.frame([one.row() for one in self.plans])

    plot = display.plot_method("plan")

    def __repr__(self) -> str:
        return f"Plans({self.name!r} on {self.cluster.name}: {', '.join(repr(one)[5:-1] for one in self.plans[:2])} …)"
