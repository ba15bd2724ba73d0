"""Reads the workload to plan from a Task, a RunSpec or a module: parameters, FLOPs and memory are counted by dry runs on one rank."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.plan.ranges import LAUNCH, PlanError, peak_of
from workbench.cluster.analysis.plan.workload import MICRO_BATCHES, Workload
from workbench.core import units
from workbench.core.device import Device
from workbench.core.progress import tick
from workbench.runs import combinations
from workbench.runs.spec import AUTO, RunSpec
from workbench.runs.target import read_program

if TYPE_CHECKING:
    from workbench.memory.analysis.log import MemoryLog
    from workbench.memory.estimate.plan import Plan as Program
    from workbench.memory.estimate.roofline_time import Roofline


DRY_RUN_SIZES = (12, 32)
"""Micro-batches of the dry runs. The memory of all others follows exactly (`memory.family`); their time is a straight line."""
CHECKPOINTINGS = ("none", "full")
"""Kinds of checkpointing that are planned by default: each costs two dry runs."""
SINGLE_SIZES = (2, 4, 8, 16, 32, 64)
"""Micro-batches that are run one by one where memory does not follow."""
_ONE_RANK = {
    "nproc_per_node": 1,
    "parallel": "ddp",
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "expert_parallel": 1,
    "local_sgd": "none",
    "shard_ranks": None,
    "accumulation": 1,
}
_WITHOUT = {"checkpointing": "none", "compile": "none", "offload": "none", "gradient_compression": "none", "noise_scale": False}
MICRO_BATCH = 8
"""Samples of the dry run that counts FLOPs, where a run chooses their number itself."""


def read(
    target: Any,
    cluster: Cluster,
    *,
    batch: Any = None,
    sequence: int | None = None,
    precision: str | None = None,
    checkpointing: str | Sequence[str] | None = None,
    **knobs: Any,
) -> Workload:
    """The workload of a program: its step on one rank, run on fake tensors, for each kind of checkpointing.

    Args:
        target: as `estimate_memory` takes it.
        cluster: the cluster on whose GPUs it runs.
        batch: a batch, as `estimate_memory` takes it.
        sequence: tokens of each sample, as `estimate_memory` takes them.
        precision: of a RunSpec; None = that of the spec, else "amp_bf16".
        checkpointing: kinds; None = "none", and "full" if the model has blocks.
        knobs: as `estimate_memory` takes them.

    Raises:
        PlanError, ValueError: as `estimate_memory`.
    """
    target = read_program("plan", target, batch, others="a Transformer, ", error=PlanError)
    if isinstance(target, RunSpec):
        combinations.check_task(target)
        target = target.replace(**{**_ONE_RANK, "noise_scale": False})
        precision = precision or target.precision
    knobs |= {**_ONE_RANK, "precision": precision or "amp_bf16", "batch": batch, "sequence": sequence, "device": cluster.device}
    peak_of(cluster.device, knobs["precision"])  # refuse before any dry run
    kinds = list(CHECKPOINTINGS) if checkpointing is None else [checkpointing] if isinstance(checkpointing, str) else list(checkpointing)
    counted: dict[str, _Counted] = {}
    missing = []
    numbers = itertools.count(1)

    def begin() -> None:
        tick(f"dry run {next(numbers)} of {(len(DRY_RUN_SIZES) + 1) * len(kinds)}, then every layout")

    for kind in kinds:
        try:
            counted[kind] = _count(target, {**knobs, "checkpointing": kind}, cluster, begin)
        except ValueError as error:
            if kind == "none" or checkpointing is not None:
                raise
            missing.append(f'checkpointing="{kind}" is left out: {error}')
    return _workload(counted, precision or "amp_bf16", target, tuple(missing))


def flops_per_sample(spec: RunSpec) -> float:
    """Floating-point operations of a sample's forward and backward, without what is computed again, counted in a dry run on one rank.

    Raises:
        ValueError: the program cannot run without values, or none of its operators has FLOPs that are known.
    """
    from workbench.memory.estimate.plan import plan_of
    from workbench.memory.ladder import counted

    device = Device.named("H100")  # any: only their number counts
    alone = spec.replace(**_ONE_RANK, micro_batch=MICRO_BATCH if spec.micro_batch == AUTO else spec.micro_batch, **_WITHOUT)
    plan = plan_of(alone, device=device, steps=1, asked="report")
    _, floor = counted(plan, device)
    total = sum(call.flops * calls for call, calls in floor.calls.items() if call.phase != "update")
    if not total:
        raise ValueError(f"{plan.title}: no operator has FLOPs that are known; give flops_per_sample= a number")
    return total / plan.spec.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """A step on one rank."""

    flops: float
    """Per sample."""
    equivalent: float
    """The same, where memory-bound operators count as the FLOPs that would take as long at the peak."""
    once: float
    """FLOPs of every micro-batch whatever its size, without the optimizer's step, likewise."""
    adding: float
    """Bytes that are moved to add the gradients of a micro-batch to those before."""
    operators: int
    """Of a micro-batch, without the optimizer's step."""
    states: Mapping[str, float]
    """Memory group → bytes, independent of the batch; the gradients with the buckets of DDP, which a launched run has on one rank, too."""
    peaks: Mapping[int, tuple[float, ...]]
    """Micro-batch → peak bytes of the allocator, and those of `Family.beside_states`, where they are known."""
    blocks: int
    tensors: int
    """Parameter tensors."""
    outside: float
    """Share of the time at the roofline, without the optimizer's step, of operators that have no FLOPs: elementwise, norms and copies."""
    name: str
    spec: RunSpec


def _count(target: Any, options: dict[str, Any], cluster: Cluster, begin: Callable[[], None]) -> _Counted:
    from workbench.memory.api import breakdown_of, record
    from workbench.memory.estimate.plan import plan_of
    from workbench.memory.estimate.roofline_time import Roofline

    device = cluster.device
    peak = peak_of(device, options["precision"])
    rooflines: list[Roofline] = []  # one per attempt; the last counts

    def watch() -> Roofline:
        rooflines.append(Roofline(device))
        return rooflines[-1]

    logs: dict[int, MemoryLog] = {}
    seen: dict[int, Roofline] = {}
    for size in DRY_RUN_SIZES:
        begin()
        program = plan_of(target, **{**options, "micro_batch": size})
        logs[size], _ = record(program, watch=watch)
        seen[size] = rooflines[-1]
    few, many = (seen[size] for size in DRY_RUN_SIZES)
    begin()
    record(plan_of(target, **{**options, "micro_batch": DRY_RUN_SIZES[0], "accumulation": 2}), watch=watch)
    two = rooflines[-1]
    moved = [sum(call.bytes * count for call, count in one.calls.items() if call.phase == "backward") for one in (few, two)]
    adding = moved[1] - 2 * moved[0]  # a second micro-batch also adds its gradients to those before
    each = two.seconds - few.seconds - adding / device.bandwidth  # one more micro-batch without that, and without the optimizer's step
    launched = two.operators - few.operators
    # a few samples may be bound by loading the weights: more of them are not
    per_sample = max(many.computing / DRY_RUN_SIZES[1], (many.seconds - few.seconds) / (DRY_RUN_SIZES[1] - DRY_RUN_SIZES[0]))
    shown = breakdown_of(program, logs[DRY_RUN_SIZES[-1]], 0)
    blocks, tensors = _pieces(program)
    return _Counted(
        flops=many.flops / (DRY_RUN_SIZES[1] * program.steps),
        equivalent=per_sample / program.steps * peak,
        once=max(0.0, each - per_sample * DRY_RUN_SIZES[0]) / program.steps * peak,
        adding=max(0.0, adding / program.steps),
        operators=max(0, launched) // program.steps,
        states={name: float(shown.largest[name]) for name in ("parameters", "gradients", "optimizer_states")},
        peaks=_peaks(target, options, logs),
        blocks=blocks,
        tensors=tensors,
        outside=_outside_products(many, device),
        name=program.task.name or program.spec.task,
        spec=program.spec,
    )


def _outside_products(seen: "Roofline", device: Device) -> float:
    """Share of forward's and backward's time at the roofline that operators without FLOPs take: all but products and attention."""
    taken = {True: 0.0, False: 0.0}
    for call, count in seen.calls.items():
        if call.phase != "update":
            peak = device.flops_per_sec.get(call.dtype) or device.flops_per_sec.get("fp32") or max(device.flops_per_sec.values())
            taken[call.flops > 0] += count * max(call.flops / peak, call.bytes / device.bandwidth)
    return taken[False] / (sum(taken.values()) or 1.0)


def _peaks(target: Any, options: dict[str, Any], logs: "Mapping[int, MemoryLog]") -> dict[int, tuple[float, ...]]:
    """As `_Counted.peaks`; if the program depends on the batch, from a dry run each of a few."""
    from workbench.memory.analysis.family import Family

    try:
        family = Family(logs)
    except ValueError:
        from workbench.memory.api import estimate_memory

        return {size: (float(estimate_memory(target, **{**options, "micro_batch": size}).reserved or 0),) for size in SINGLE_SIZES}
    return {size: (float(family.reserved(size)), *map(float, family.beside_states(size))) for size in MICRO_BATCHES}


def _pieces(program: "Program") -> tuple[int, int]:
    """Numbers of repeated blocks and of parameter tensors."""
    from workbench.memory.estimate.building import BuildError, build
    from workbench.train.blocks import find_blocks
    from workbench.train.trainer import build_model

    try:
        model = build(lambda: build_model(program.task), on_meta=True)
    except BuildError:
        return 1, 1
    return max(1, len(find_blocks(model))), max(1, sum(1 for _ in model.parameters()))


def _beside(whole: float, *parts: float) -> tuple[float, float, float, float]:
    """An entry of `Workload.counted`; where parts are not known, nothing is taken to be split."""
    step, growing, update = parts or (whole, whole, 0.0)
    return max(0.0, whole), step, growing, update


def _workload(counted: Mapping[str, _Counted], precision: str, target: Any, notes: tuple[str, ...]) -> Workload:
    first = next(iter(counted.values()))
    count = first.states["parameters"] / 4
    states = tuple(first.states[name] / count for name in ("parameters", "gradients", "optimizer_states"))
    weights, gradients, optimizer = states[0], min(states[:2]), states[2]  # a gradient is as large as its weight; the rest are buckets
    return Workload(
        name=f"{first.name}, {units.count(count)} parameters",
        parameters=count,
        layers=first.blocks,
        shared=0.0,
        broadcasts=first.tensors,
        operators={kind: float(step.operators) for kind, step in counted.items()},
        flops=min(step.flops for step in counted.values()),
        computed={kind: step.equivalent for kind, step in counted.items()},
        once={kind: step.once for kind, step in counted.items()},
        adding=first.adding / count,
        kept=dict.fromkeys(counted, 0.0),
        counted={
            kind: {size: _beside(peak - sum(step.states.values()), *rest) for size, (peak, *rest) in step.peaks.items()}
            for kind, step in counted.items()
        },
        states=(weights, gradients, optimizer),
        buckets=4.0,
        buckets_alone=states[1] > 1.5 * weights,
        micro_batches=sorted(set.intersection(*(set(step.peaks) for step in counted.values()))),
        precision=precision,
        spec=target if isinstance(target, RunSpec) else None,
        clips=isinstance(target, RunSpec) and target.clip_grad_norm is not None,
        notes=(
            f"{units.percent(first.outside)} of forward and backward at the roofline are operators without FLOPs (elementwise, norms, "
            "copies), as the model has them: compiled or fused they take less",
            "all operators are taken to reach the same share of the roofline; wb.estimate_time has a share for each kind of operator, so "
            "its step of one GPU differs, though as a rule within these ranges",
            f"bytes per parameter as counted: {weights:.3g} of weights, {gradients:.3g} of gradients, {optimizer:.3g} of the optimizer's "
            "states; a Transformer by its sizes is planned with 16-bit weights unless it is fp32: 2, 4 and 12",
            f"no step is faster than the host launches the {first.operators:,} operators of each micro-batch "
            f"({units.seconds(first.operators * LAUNCH.mid)}; {units.seconds(first.operators * LAUNCH.low)} … "
            f"{units.seconds(first.operators * LAUNCH.high)})",
            "counted by fake runs on one rank, operators at the roofline of the GPU; tensor and pipeline parallelism are planned for "
            "a Transformer only",
            *notes,
        ),
    )
