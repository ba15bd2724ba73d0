"""Reading: a Task, a RunSpec or a module as a subject of planning; parameters, times and memory are counted by fake runs on one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.plan.ranges import PlanError, peak_of
from workbench.cluster.analysis.plan.subject import MICRO_BATCHES, Subject
from workbench.core import units
from workbench.runs.spec import RunSpec
from workbench.runs.target import check_program

if TYPE_CHECKING:
    from workbench.memory.analysis.log import MemoryLog
    from workbench.memory.estimate.plan import Plan as Program


RUNS = (12, 32)
"""Micro-batches of the fake runs: the memory of all others follows exactly (`memory.family`), and the roofline as a line."""
KINDS = ("none", "full")
"""Checkpointing that is planned where nothing is said: each kind costs two fake runs."""
ALONE = (2, 4, 8, 16, 32, 64)
"""Micro-batches that are run one by one where it does not follow."""
_FIXED = ("nproc_per_node", "parallel", "tensor_parallel", "shard_ranks", "accumulation", "micro_batch", "checkpointing")
_ONE_RANK = {"nproc_per_node": 1, "parallel": "ddp", "tensor_parallel": 1, "shard_ranks": None, "accumulation": 1}


def read(
    target: Any,
    cluster: Cluster,
    *,
    batch: Any = None,
    sequence: int | None = None,
    precision: str | None = None,
    checkpointing: str | Sequence[str] | None = None,
    **knobs: Any,
) -> Subject:
    """What is planned of a program: its step on one rank, run on tensors without values, for each kind of checkpointing.

    Args:
        target: as `estimate_memory` takes it.
        cluster: whose GPUs.
        batch: as there.
        sequence: as there.
        precision: of a RunSpec; None = that of the spec, else "amp_bf16".
        checkpointing: kinds; None = none and full, if the model has blocks.
        knobs: as `estimate_memory` takes them.

    Raises:
        PlanError: a knob that the plan is to find.
        ValueError: as `estimate_memory`.
    """
    for name in _FIXED:
        if name in knobs:
            raise PlanError(f"{name}={knobs[name]!r}: this is what a plan finds; give gpus, global_batch, sharing, checkpointing")
    check_program("plan", target, batch, others="a cost.Transformer, ", error=PlanError)
    if isinstance(target, RunSpec):
        target = target.replace(**{**_ONE_RANK, "noise_scale": False})
        precision = precision or target.precision
    knobs |= {**_ONE_RANK, "precision": precision or "amp_bf16", "batch": batch, "sequence": sequence, "device": cluster.device}
    peak_of(cluster.device, knobs["precision"])  # before all fake runs
    kinds = list(KINDS) if checkpointing is None else [checkpointing] if isinstance(checkpointing, str) else list(checkpointing)
    found: dict[str, _Counted] = {}
    missing = []
    for kind in kinds:
        try:
            found[kind] = _counted(target, {**knobs, "checkpointing": kind}, cluster)
        except ValueError as error:
            if kind == "none" or checkpointing is not None:
                raise
            missing.append(f'checkpointing="{kind}" is left out: {error}')
    return _subject(found, precision or "amp_bf16", target, tuple(missing))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """A step on one rank."""

    flops: float
    """Per sample."""
    equivalent: float
    """The same, with what waits for the memory counted as the FLOPs that would take as long at the peak."""
    once: float
    """What every micro-batch takes whatever its size, but the optimizer's step, likewise."""
    operators: int
    """Of a step."""
    states: Mapping[str, float]
    """Group → bytes, whatever the batch."""
    peaks: Mapping[int, float]
    """Micro-batch → bytes of the allocator at the fullest moment."""
    blocks: int
    tensors: int
    """Of parameters."""
    name: str
    spec: RunSpec


def _counted(target: Any, options: dict[str, Any], cluster: Cluster) -> _Counted:
    from workbench.memory.api import breakdown_of, record
    from workbench.memory.estimate.plan import plan_of
    from workbench.memory.estimate.roofline import Roofline

    device = cluster.device
    peak = peak_of(device, options["precision"])
    rooflines: list[Roofline] = []  # one per attempt; the last one counts

    def watch() -> Roofline:
        rooflines.append(Roofline(device))
        return rooflines[-1]

    logs: dict[int, MemoryLog] = {}
    seen: dict[int, Roofline] = {}
    for size in RUNS:
        program = plan_of(target, **{**options, "micro_batch": size})
        logs[size], _ = record(program, watch=watch)
        seen[size] = rooflines[-1]
    few, many = (seen[size] for size in RUNS)
    record(plan_of(target, **{**options, "micro_batch": RUNS[0], "accumulation": 2}), watch=watch)
    each = rooflines[-1].seconds - few.seconds  # one more micro-batch, and no more of the optimizer's step
    # few samples may only wait for the weights: more of them compute all the same
    per_sample = max(many.computing / RUNS[1], (many.seconds - few.seconds) / (RUNS[1] - RUNS[0]))
    shown = breakdown_of(program, logs[RUNS[-1]], 0)
    blocks, tensors = _pieces(program)
    return _Counted(
        flops=many.flops / (RUNS[1] * program.steps),
        equivalent=per_sample / program.steps * peak,
        once=max(0.0, each - per_sample * RUNS[0]) / program.steps * peak,
        operators=many.operators // program.steps,
        states={name: float(shown.largest[name]) for name in ("parameters", "gradients", "optimizer_states")},
        peaks=_peaks(target, options, logs),
        blocks=blocks,
        tensors=tensors,
        name=program.task.name or program.spec.task,
        spec=program.spec,
    )


def _peaks(target: Any, options: dict[str, Any], logs: "Mapping[int, MemoryLog]") -> dict[int, float]:
    """Micro-batch → bytes; where the program depends on the batch, a fake run for each of a few."""
    from workbench.memory.analysis.family import Family

    try:
        family = Family(logs)
    except ValueError:
        from workbench.memory.api import estimate_memory

        return {size: float(estimate_memory(target, **{**options, "micro_batch": size}).reserved or 0) for size in ALONE}
    return {size: float(family.reserved(size)) for size in MICRO_BATCHES}


def _pieces(program: "Program") -> tuple[int, int]:
    """Blocks, by which gradients come and weights are gathered, and tensors of parameters."""
    from workbench.memory.estimate.building import BuildError, build
    from workbench.train.blocks import find_blocks
    from workbench.train.trainer import build_model

    try:
        model = build(lambda: build_model(program.task), on_meta=True)
    except BuildError:
        return 1, 1
    return max(1, len(find_blocks(model))), max(1, sum(1 for _ in model.parameters()))


def _subject(found: Mapping[str, _Counted], precision: str, target: Any, notes: tuple[str, ...]) -> Subject:
    first = next(iter(found.values()))
    count = first.states["parameters"] / 4
    least = min(found.values(), key=lambda one: one.flops)
    states = tuple(first.states[name] / count for name in ("parameters", "gradients", "optimizer_states"))
    weights, gradients, optimizer = states
    return Subject(
        name=f"{first.name}, {units.count(count)} parameters",
        parameters=count,
        layers=first.blocks,
        shared=0.0,
        broadcasts=first.tensors,
        flops=least.flops,
        computed={kind: one.equivalent for kind, one in found.items()},
        once={kind: one.once for kind, one in found.items()},
        kept=dict.fromkeys(found, 0.0),
        counted={
            kind: {size: max(0.0, held - sum(one.states.values())) for size, held in one.peaks.items()} for kind, one in found.items()
        },
        states=(weights, gradients, optimizer),
        buckets=4.0,
        micro_batches=sorted(set.intersection(*(set(one.peaks) for one in found.values()))),
        precision=precision,
        spec=target if isinstance(target, RunSpec) else None,
        notes=(
            "counted by fake runs on one rank, operators at the roofline of the GPU; tensor and pipeline parallelism are planned for "
            f"cost.Transformer only; launching the {first.operators:,} operators of a step is left out, which small models wait for",
            *notes,
        ),
    )
