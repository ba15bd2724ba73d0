"""`Plan`: one way to train a model on a cluster, with predicted time, memory and energy; `Plans`: the short list of them."""

import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.energy import Energy, estimated
from workbench.cluster.analysis.plan.ranges import ENDS, PlanError, at_ends, between, peak_of
from workbench.cluster.analysis.plan.timing import PARTS
from workbench.cluster.analysis.plan.workload import MEGATRON, TRAINERS
from workbench.core import units
from workbench.core.checks import nearest
from workbench.core.display import table as display
from workbench.core.statistics import Interval

BOUNDS = {
    "compute": "computing is the largest part: faster GPUs, or more of them",
    "communication": "waiting for other GPUs is the largest part: faster links, fewer copies, larger micro-batches",
    "bubble": "waiting for the pipeline is the largest part: more micro-batches, fewer stages",
    "memory": "a faster layout of the same GPUs exists but does not fit: more memory per GPU",
}
"""Limit of a plan → its meaning."""
NARROWEST = 80
"""Letters that a table of plans has in a terminal, where that is narrower."""
_SUCH = {"price": 2.5, "electricity": 0.2, "intensity": 400, "pue": 1.2, "watts": 700}
"""Input of energy → an example of its value, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Prices and power. None = not given."""

    price: float | None = None
    """Money per GPU and hour."""
    electricity: float | None = None
    """Money per kWh, if it is paid separately."""
    intensity: float | None = None
    """gCO2e per kWh of the grid."""
    pue: float = 1.0
    """Power of the building over that of the machines."""
    watts: float | None = None
    """Power of a GPU under load; None = by its datasheet."""

    def __post_init__(self) -> None:
        checked_energy_inputs(asdict(self))

    @property
    def prices_given(self) -> bool:
        """Was a price or an intensity given?"""
        return any(value is not None for value in (self.price, self.electricity, self.intensity))

    def energy(
        self, *, gpus: int, steps: int, seconds: Interval, computing: Interval, device: str, node: str, per_node: int, **changes: Any
    ) -> Energy:
        """Energy of some steps: the middle by the middle step; the low end by the fastest step while it computes; the high end by whole
        nodes during the slowest.

        Args:
            gpus: number of GPUs that work.
            steps: number of optimizer steps.
            seconds: seconds of a step, with their interval.
            computing: the part of them in which GPUs compute.
            device: name of each GPU.
            node: name of the cluster.
            per_node: GPUs of a node.
            changes: inputs that replace these.

        Raises:
            PlanError: unknown or wrong inputs.
            CostError: a device of unknown power, or numbers out of bounds.
        """
        power = replace(self, **checked_energy_inputs(changes))
        inputs = asdict(power) | {"node": node, "per_node": per_node}
        low, mid, high = (
            estimated(each * steps, gpus, device, utilization=min(1.0, busy / each), **inputs)
            for each, busy in ((getattr(seconds, end), getattr(computing, end)) for end in ENDS)
        )
        least, most = (used.joules if end is None else end for used, end in ((low, low.low), (high, high.high)))
        return replace(mid, low=min(least, mid.joules), high=max(most, mid.joules))


INPUTS = tuple(field.name for field in fields(Power))


def checked_energy_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Check inputs of energy: known names, each a number or None.

    Raises:
        PlanError: another name, or not a number.
    """
    for name, value in inputs.items():
        if name not in INPUTS:
            near = nearest(name, INPUTS)
            raise PlanError(f"{name}={value!r:.60}: allowed are {', '.join(INPUTS)}" + (f"; did you mean {near}?" if near else ""))
        if value is None and name != "pue":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PlanError(f"{name}={value!r:.60}: expected a number, such as {name}={_SUCH[name]}")
    return dict(inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(display.Shown):
    """One layout with its predictions. gpus = data × tensor × pipeline; micro_batch × accumulation × data = global_batch."""

    gpus: int
    data: int
    """Copies of the model, each with its own samples."""
    tensor: int
    """Ranks that split each layer."""
    pipeline: int
    """Stages."""
    chunks: int
    """Pieces of layers on each stage; above 1 the schedule is interleaved."""
    micro_batch: int
    """Samples of a micro-batch."""
    accumulation: int
    """Micro-batches per step."""
    sharing: str
    """How states are sharded: "ddp", "zero1", "zero2", "fsdp" or "hsdp"."""
    shard_ranks: int
    """Ranks over which one copy of the states is sharded; 1 = none."""
    checkpointing: str
    """What the backward recomputes."""
    precision: str
    seconds: Interval
    """Seconds of a step."""
    parts: Mapping[str, float]
    """Parts of the middle of `seconds`: compute, exposed communication, bubble."""
    spans: Mapping[str, Interval]
    """The same with their ends, which do not add up: communication is most exposed where kernels are fast and links are slow."""
    shares: Mapping[str, Interval]
    """Part → its share of the step."""
    hidden: float
    """Seconds of communication hidden behind computing, per step."""
    memory: Mapping[str, float]
    """Memory group → bytes of the GPU that needs most."""
    needed: Interval
    """Bytes of the GPU that needs most. The middle decides whether a plan fits; if the upper end does not fit, the plan is `tight`."""
    capacity: float
    """Bytes that may be used of a GPU."""
    mfu: Interval
    """Model FLOPs per second over the peak, without recomputation."""
    steps: int
    """Steps of `energy`."""
    energy: Energy | None
    """Estimated for `steps` steps; None = the device's power is unknown."""
    power: Power
    """Prices and power behind `energy`."""
    node: str
    """Name of the cluster."""
    broadcasts: bool
    """Is ZeRO-1 torch's, as in a RunSpec, which broadcasts? Otherwise Megatron's."""
    bound: str
    """What limits it: "compute", "communication", "bubble" or "memory"."""
    roles: tuple[str, ...]
    """Why it is on the list: "fastest", "cheapest" …"""
    why: str
    """Reasons for the roles."""
    gpus_per_node: int
    """Of the cluster."""
    device: str
    """Name of each GPU."""
    efficiency: float
    """Share of the GPU's peak behind the middle."""
    model: str = ""
    """What is trained."""
    flops: float = 0.0
    """FLOPs of the model per sample, forward and backward, without recomputation."""
    trainer: str = ""
    """Name of the training program that was given."""
    versions: int = 1
    """Of that program which its ranges hold."""

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
        """Bytes of the GPU that needs most: the middle of `needed`."""
        return self.needed.mid

    @property
    def tight(self) -> bool:
        """Whether the upper end of its memory does not fit."""
        return self.needed.high > self.capacity

    @property
    def gpu_seconds(self) -> float:
        """GPUs × seconds per sample."""
        return self.gpus * self.seconds.mid / self.global_batch

    @property
    def money(self) -> Interval | None:
        """Of `steps` steps: rent, GPUs × hours × price, and electricity if paid separately, as in `energy`; None without a price."""
        return self._span("money")

    @property
    def kwh(self) -> Interval | None:
        """Of `steps` steps, the building's share included; None = the device's power is unknown."""
        return self._span("kwh")

    @property
    def grams(self) -> Interval | None:
        """gCO2e of `steps` steps' electricity; None without an intensity."""
        return self._span("grams")

    def _span(self, name: str) -> Interval | None:
        return None if self.energy is None else at_ends(self.energy, name, self.seconds.of(lambda each: self.steps * each))

    def drawn(self, steps: int | None = None, **inputs: Any) -> Energy:
        """Energy of another number of steps, or with other prices or watts; see `wb.energy`."""
        return self.power.energy(
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
        """Whether it uses ZeRO-1 as Megatron or another trainer has it, and a RunSpec does not."""
        return self.sharing == "zero1" and self.data > 1 and not self.broadcasts

    def implied_efficiency(self, seconds: float) -> float:
        """The share of the peak that a measured step of this plan implies, communication and bubble taken as predicted: for
        `wb.plan(…, efficiency=plan.implied_efficiency(1.7))`, which narrows all ranges to the links'.

        Raises:
            PlanError: the seconds leave too little time to compute in, even at the peak; or the trainer has several versions.
        """
        if self.versions > 1:
            raise PlanError(f"{self.trainer} has {self.versions} versions that may take {seconds!r} s: try measured=(plan, {seconds!r})")
        compute, sent, bubble = (self.parts[name] for name in PARTS)
        left = seconds * (compute + sent) / (compute + sent + bubble) - sent
        implied = self.efficiency * compute / left if left > 0 else math.inf
        if not implied <= 1:
            kernels = f"kernels would reach {units.percent(implied)} of the dense peak" if left > 0 else "nothing is left to compute in"
            waits = f"{seconds!r} s, of which {units.seconds(sent + bubble)} are communication and bubble"
            raise PlanError(f"{waits}: {kernels}; is it a step of this layout and batch?")
        return implied

    @property
    def not_built(self) -> str:
        """Why `wb.launch` cannot run the layout, parts of which only other trainers have; "" = it can."""
        shared = f"layers that {self.sharing} shares" if self.sharing in ("zero2", "fsdp", "hsdp") and self.data > 1 else ""
        parts = "split layers" if self.tensor > 1 else shared
        return f"stages of {parts} are not built here" if self.pipeline > 1 and parts else ""

    @property
    def layout(self) -> str:
        """The layout as text, such as `dp 8 (fsdp) × tp 4 × pp 2`."""
        words = [f"dp {self.data}" + (f" ({self.sharing})" if self.data > 1 else "")]
        words += [f"tp {self.tensor}"] if self.tensor > 1 else []
        words += [f"pp {self.pipeline}" + (f" (v {self.chunks})" if self.chunks > 1 else "")] if self.pipeline > 1 else []
        return " × ".join(words)

    @property
    def batch(self) -> str:
        """micro_batch × accumulation, and what is recomputed."""
        again = "" if self.checkpointing == "none" else f", checkpointing {self.checkpointing}"
        return f"{self.micro_batch} × {self.accumulation}{again}"

    def changes(self) -> dict[str, Any]:
        """The knobs of a RunSpec: `spec.replace(**plan.changes())`.

        Raises:
            PlanError: it has Megatron's pipeline or ZeRO-1, which a RunSpec does not have, or is `not_built`.
        """
        from workbench.runs.spec import RunSpec

        if self.pipeline > 1:
            own = f", or try RunSpec(pipeline_parallel={self.pipeline}), of which wb.estimate_memory has the memory" * (not self.not_built)
            why = self.not_built or "its pipeline is planned as Megatron runs it"
            raise PlanError(f"{self.layout}: {why}. Plan without, wb.plan(…, pipeline=1){own}")
        if self.megatron:
            other = TRAINERS[self.trainer].zero1 if self.trainer else MEGATRON
            raise PlanError(f'{self.layout}: {other}. Plan without: wb.plan(…, sharing="zero2"), or one of ddp, fsdp, hsdp')
        knobs: dict[str, Any] = {
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "precision": self.precision,
            "parallel": self.sharing,
            "tensor_parallel": self.tensor,
            "pipeline_parallel": 1,
            "expert_parallel": 1,
            "local_sgd": "none",
            "checkpointing": self.checkpointing,
            "shard_ranks": self.shard_ranks if self.sharing == "hsdp" else None,
            "nproc_per_node": self.gpus,
        }
        if "nnodes" in {field.name for field in fields(RunSpec)} and self.gpus > self.gpus_per_node:
            knobs |= {"nnodes": self.gpus // self.gpus_per_node, "nproc_per_node": self.gpus_per_node}
        return knobs

    @property
    def table(self) -> display.Table:
        """Layout, times, memory and costs."""
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
        cannot = f"; wb.launch cannot run it: {self.not_built}" if self.not_built else ""
        return display.Table(columns=("plan", ", ".join(self.roles)), rows=rows, note=f"predicted; {self.why}{cannot}")

    def row(self) -> dict[str, Any]:
        """As a row of a DataFrame."""
        plain = ("gpus", "data", "tensor", "pipeline", "chunks", "micro_batch", "accumulation", "global_batch", "sharing", "checkpointing")
        row: dict[str, Any] = {"roles": ", ".join(self.roles), **{name: getattr(self, name) for name in plain}}
        spans: dict[str, Interval | None] = {
            "seconds": self.seconds,
            **self.spans,
            "samples_per_sec": self.samples_per_sec,
            "mfu": self.mfu,
        }
        spans |= {"bytes": self.needed, "money": self.money, "kwh": self.kwh, "grams": self.grams}
        for name, span in spans.items():
            row |= {name: span and span.mid, f"{name}_low": span and span.low, f"{name}_high": span and span.high}
        row |= {"capacity": self.capacity, "tight": self.tight}
        return {**row, "gpu_seconds": self.gpu_seconds, "bound": self.bound, "why": self.why}

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
    """Seconds of a step."""
    bound: str
    layout: str
    compute: float
    """Seconds of computing, of the middle."""
    tight: bool
    """Whether the upper end of its memory does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans(Sequence[Plan], display.Shown):
    """The short list; `plans[0]` has the highest expected throughput: its speed times the probability that its memory suffices."""

    plans: tuple[Plan, ...]
    front: tuple[Front, ...]
    """The fastest layout for every number of GPUs, fewest first."""
    considered: int
    """Number of layouts."""
    ruled_out: Mapping[str, int]
    """Reason → how many layouts it ruled out."""
    name: str
    """What is trained."""
    cluster: Cluster
    global_batch: int
    """Samples per step."""
    versions: tuple[str, ...] = ()
    """How the trainer may wait: one entry for each of its versions, or of those that a measured step can be of."""
    notes: tuple[str, ...] = ()
    """Sources of the ranges, and what is left out."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            for plan in self.plans:
                if key in plan.roles:
                    return plan
            raise KeyError(f"no plan is the {key!r} one: there are {', '.join(self.roles)}; a larger top= may list more")
        return self.plans[key]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    @property
    def roles(self) -> list[str]:
        """Keys of the plans: `plans["cheapest"]`."""
        return list(dict.fromkeys(role for plan in self.plans for role in plan.roles))

    @property
    def best(self) -> Plan:
        """The first plan."""
        return self.plans[0]

    def changes(self) -> dict[str, Any]:
        """The knobs of a RunSpec for the best plan; see `Plan.changes`."""
        return self.best.changes()

    @property
    def table(self) -> display.Table:
        """One row per plan with intervals; below, how many layouts were ruled out, and why."""
        priced = any(plan.money for plan in self.plans)
        columns = ["plan", "GPUs", "layout", "micro-batch × accumulation", "step", "between", "throughput", "MFU", "memory"]
        columns += ["exposed", "bubble", f"money of {self.best.steps:,} steps" if priced else "GPU time per sample", "bound"]
        rows = [
            [
                ", ".join(plan.roles),
                f"{plan.gpus:,}",
                plan.layout,
                plan.batch,
                units.seconds(plan.seconds.mid),
                f"{units.seconds(plan.seconds.low)} … {units.seconds(plan.seconds.high)}",
                units.rate(plan.samples_per_sec.mid),
                units.percent(plan.mfu.mid),
                between(plan.needed, units.bytes_) + ", tight" * plan.tight,
                units.percent(plan.shares["communication"].mid),
                units.percent(plan.shares["bubble"].mid),
                between(plan.money, lambda value: f"{value:,.4g}") if plan.money else units.seconds(plan.gpu_seconds),
                plan.bound,
            ]
            for plan in self.plans
        ]
        reasons: dict[str, list[str]] = {}
        for plan in self.plans:
            reasons.setdefault(plan.why, []).extend(plan.roles)
        lines = [f"{', '.join(roles).replace(', choice ', ', ')}: {why}" for why, roles in reasons.items()]
        out = "; ".join(f"{count:,} by {reason}" for reason, count in self.ruled_out.items() if count)
        if (times := [plan.seconds.mid for plan in self.plans]) != sorted(times):
            lines.append("in the order of speed × the chance that memory suffices, not of time alone")
        for why in dict.fromkeys(filter(None, (plan.not_built for plan in self.plans))):
            lines.append(f"wb.launch cannot run {', '.join({plan.layout: 0 for plan in self.plans if plan.not_built == why})}: {why}")
        lines.append(f"{self.considered:,} layouts looked at; ruled out: {out or 'none'}")
        lines += [f"bound {bound}: {BOUNDS[bound]}" for bound in dict.fromkeys(plan.bound for plan in self.plans)]
        peak = units.count(peak_of(self.cluster.device, self.best.precision), "FLOP/s")
        lines.append(f"MFU: of the dense peak of a GPU in {self.best.precision}, {peak}")
        return display.Table(
            columns=columns,
            rows=rows,
            title=f"{self.name} on {self.cluster.name}, {self.global_batch:,} samples a step: predicted",
            note="\n".join([*lines, *self.notes]),
        )

    def for_terminal(self, width: int) -> str:
        """As text without what matters least, as long as a row has more than `width` characters: ranges, columns, further roles."""
        table, left_out = self.table, []
        if table.width > width:
            short = [[*row[:6], *(re.sub(r" \([^()]*\)", "", str(cell)) for cell in row[6:])] for row in table.rows]
            table, left_out = replace(table, rows=short), ["ranges in brackets"]
        for name in ("bubble", "exposed", "bound", "MFU", table.columns[11], "throughput", "between", "GPUs"):
            if table.width <= width:
                break
            if name == "GPUs":  # the product of a layout's numbers; first, what is written shorter: the note below has all roles
                cells = [[str(cell).replace(" × ", "×").replace("checkpointing", "ckpt") for cell in row] for row in table.rows]
                short = [[re.sub(r", .+", f" +{row[0].count(', ')}", row[0]), *row[1:]] for row in cells]
                columns = [column.replace("micro-batch × accumulation", "micro×accum.") for column in table.columns]
                table = replace(table, columns=columns, rows=short)
            if table.width > width:
                table = table.without(name)
                left_out.append(name)
        all_ = "to see everything, pipe the command into less -S, or print(plans.table) in Python"
        more = [f"left out to fit {width} characters: {', '.join(left_out)}; {all_}"] * bool(left_out)
        return replace(table, note="\n".join([str(table.note), *more])).wrapped(width)

    def __str__(self) -> str:
        if sys.stdout is not None and sys.stdout.isatty():
            return self.for_terminal(max(NARROWEST, shutil.get_terminal_size().columns))
        return str(self.table)

    def to_frame(self) -> Any:
        """A DataFrame with one row per plan; seconds and bytes."""
        return display.frame([plan.row() for plan in self.plans])

    plot = display.plot_method("plan")

    def __repr__(self) -> str:
        return f"Plans({self.name!r} on {self.cluster.name}: {', '.join(repr(plan)[5:-1] for plan in self.plans[:2])} …)"
