"""`estimate_time`: predicts the seconds of a training step on a device that need not be here, from the operators of a dry run."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.operator_time import Operator
from workbench.cluster.analysis.pipeline_idle import bubble_of
from workbench.cluster.analysis.plan.ranges import FORMATS, link_share
from workbench.cluster.analysis.step_time import CPU, EstimateTimeError, StepTime, TimeCalibration, checked_calibration
from workbench.core.device import Device
from workbench.core.progress import predicts
from workbench.core.synonyms import accept_synonyms
from workbench.runs.rows import said_by
from workbench.runs.spec import RunSpec
from workbench.runs.target import read_program

if TYPE_CHECKING:
    from workbench.memory.analysis.breakdown import MemoryBreakdown
    from workbench.memory.estimate.plan import Plan
    from workbench.memory.estimate.roofline_time import Roofline
    from workbench.runs.task import Task


@accept_synonyms
@predicts("dry runs of a step")
def estimate_time(
    target: "RunSpec | Task | Callable[[], Any] | Any",
    batch: Any = None,
    *,
    device: str | Device,
    cluster: str | Cluster | None = None,
    measured: Any = None,
    calibration: TimeCalibration | None = None,
    **options: Any,
) -> StepTime:
    """Predict the seconds of an optimizer step, with an interval, on a device that this machine need not have.

    A dry run counts the operators of the step with their shapes, number formats, FLOPs and bytes; nothing is computed. For each kind of
    operator, a range says what share of the datasheet's peak or bandwidth its kernels reach. If the host launches operators more slowly
    than the device runs them, the device waits. Only communication that computing does not hide counts. In a pipeline, the slowest stage
    sets the pace, and the schedule determines how long stages wait. One measured step narrows the interval.

    Args:
        target: what is trained, as `estimate_memory` takes it.
        batch: a batch for it, as `estimate_memory` takes it.
        device: a name such as "H100", or a Device; "cpu" only with `measured` or a calibration.
        cluster: nodes and links: a name or a Cluster; needed for several ranks.
        measured: calibrates the estimate: seconds of a step of this very program on this device, or a Run or a Trace of it, or the traces
            of its ranks (a TraceSet, another mapping from rank to Trace, or a list). A Run of the same task with other knobs, such as
            another batch, sets the level as a calibration by it does, and a note says so.
        calibration: `.calibration` of a calibrated estimate of a similar program on the same device.
        options: as in `estimate_memory`: loss, optimizer, sequence, image, and knobs such as precision="amp_bf16".

    Raises:
        EstimateTimeError: the estimate would be a guess: an unknown device or number format, several ranks without a cluster, compiled
            steps or a CPU without a measured step, a measured run of another task or device, seconds that no such step can take, or a
            calibration from a program with other operators. The error says what to measure.
        ValueError: as in `estimate_memory`.
    """
    if measured is not None and calibration is not None:
        raise EstimateTimeError("measured= and calibration= both set the level: give one of them")
    if isinstance(calibration, StepTime):
        known = "its .calibration" if calibration.calibration else "that of one with measured=, since this one has none"
        raise EstimateTimeError(f"calibration= is an estimate itself: give {known}")
    if not isinstance(calibration, TimeCalibration | None):
        raise EstimateTimeError(f"calibration={calibration!r:.80}: expected the .calibration of an estimate with measured=")
    where = _device(device, known=measured is not None or calibration is not None)
    from workbench.memory.estimate.plan import plan_of

    plan = plan_of(target, batch, device="cpu" if where is CPU else where, asked="estimate_time", **options)
    _check(plan.spec, where, known=measured is not None or calibration is not None)
    other = None
    if hasattr(measured, "timelines"):
        of_spec, resized = isinstance(read_program("estimate_time", target, batch), RunSpec), bool(options.keys() & {"sequence", "image"})
        other = _other_spec(measured, plan, where, of_spec=of_spec, resized=resized)
    for trace in measured.values() if isinstance(measured, Mapping) else measured if isinstance(measured, list | tuple) else [measured]:
        _check_device("trace", _traced_device(trace), where)
    memory, floor = _counted(plan, where)
    compiled = plan.spec.compile != "none"
    operators = tuple(
        Operator(**{**one._asdict(), "stride": 0 if compiled else one.stride}, calls=calls / plan.steps)  # Inductor pads matrices
        for one, calls in floor.calls.items()
        if not one.name.startswith(("c10d", "_c10d"))
    )
    if not any(one.flops for one in operators):
        raise EstimateTimeError(f"{plan.title}: no operator has FLOPs that are known, so nothing is known of its time; measure a step")
    notes = []
    if where is not CPU and not (fit := memory.fits(where)):
        notes.append(f"it {fit}; wb.memory_ladder finds what would")
    if plan.spec.checkpointing != "none":
        notes.append("FLOPs include what is computed again: the share of the peak is the hardware's utilization")
    step = StepTime(
        title=plan.title,
        device=where,
        operators=operators,
        samples=plan.spec.micro_batch * plan.spec.accumulation * plan.spec.data_ranks,
        ranks=plan.world_size,
        bubble=bubble_of(plan.spec) if plan.spec.pipeline_parallel > 1 else 0.0,
        compiled=compiled,
        notes=tuple(notes),
    )
    if plan.world_size > 1:
        step = _with_communication(step, plan, cluster)
    if other is not None:
        known = estimate_time(other, device=device, cluster=cluster, measured=measured).calibration
        told = ", ".join(f"{name}={theirs} (here {ours})" for name, (ours, theirs) in _turned(plan.spec, other).items())
        note = f"measured= is a run {f'with {told}' if told else f'of {other.task}'}: it sets the level as a calibration does"
        step = replace(step, notes=(*step.notes, note))
        return checked_calibration(step, known) if known else step
    if measured is not None:
        return step.calibrate(measured)
    return checked_calibration(step, calibration) if calibration is not None else step


NOT_IN_A_STEP = (
    *("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "steps", "lr", "warmup_steps", "schedule", "weight_decay_on"),
    *("device", "backend", "find_unused_parameters", "static_graph", "gc", "seed", "evaluate", "stop_when", "evaluate_batches", "profile"),
    *("checkpoint_every", "keep_checkpoints", "best", "noise_scale", "gradient_norms", "step_digests", "label_smoothing"),
)
"""Knobs that change neither the operators of a step nor what is sent."""


def _turned(spec: RunSpec, other: RunSpec) -> dict[str, tuple[Any, Any]]:
    """The knobs that make the steps of two specs of a task differ."""
    return {name: pair for name, pair in spec.changes(other).items() if name not in ("task", *NOT_IN_A_STEP)}


def _other_spec(run: Any, plan: "Plan", where: Device, *, of_spec: bool, resized: bool) -> RunSpec | None:
    """The spec of a measured run whose steps may differ from the plan's; None = they are the same, as far as a script's can be known.

    Of a model or Task (not `of_spec`) the name says nothing; a `resized` step has another length or image size than its task's own.

    Raises:
        EstimateTimeError: another device, task, number of a CPU's threads, or size of a script's batch.
    """
    spec, asked = run.spec, plan.spec
    _check_device("run", _recorded_device(run), where)
    samples = [step.samples for step in run.timelines[0].steps if step.samples] if run.timelines else []
    if of_spec and _function(asked) != _function(spec):
        raise EstimateTimeError(
            f"measured= is a run of {getattr(spec, 'task', None) or spec.script}, and the step is of {asked.task}: give a run of that "
            "task, or the calibration of an estimate of the other (calibration=)"
        )
    if where is CPU and spec.threads != asked.threads:
        raise EstimateTimeError(
            f"measured= is a run with threads={spec.threads}, and the step has threads={asked.threads}: make them equal"
        )
    if not hasattr(spec, "micro_batch"):
        if samples and (own := asked.micro_batch * asked.accumulation) not in samples:
            raise EstimateTimeError(
                f"measured= is a run of {spec.script} with {samples[-1]:,} samples in a step of a rank, and the step has {own:,}"
            )
        return None
    if spec.micro_batch == "auto":
        spec = spec.replace(micro_batch=samples[-1] // spec.accumulation if samples else asked.micro_batch)
    changed = _turned(asked, spec)
    return None if "compile" in changed or (of_spec and not changed and not resized) else spec  # calibrate() refuses a compiled one


def _check_device(what: str, name: str | None, where: Device) -> None:
    """Refuse a run or trace of another device than the step's, where both are known."""
    there = Device.known(name) if name else None
    if name and ((where is CPU) != (name == "cpu") or (there and Device.known(where.name) not in (None, there))):
        raise EstimateTimeError(f"measured= is a {what} on {name}, and the step is for {where.name}: measure it there")


def _traced_device(trace: Any) -> str | None:
    """Name of the device that computes in a trace; None = it has none, or is no trace."""
    on_cpu = hasattr(trace, "kinds") and not trace.kinds.device
    return "cpu" if on_cpu else next(iter(getattr(trace, "devices", ())), None)


def _function(spec: Any) -> str:
    """The task of a spec without the folder of its file, which depends on where the run was started."""
    file, _, function = getattr(spec, "task", "").rpartition(":")
    return f"{Path(file).name}:{function}"


def _recorded_device(run: Any) -> str | None:
    """Name of the device of a run's first rank, as its file has it; None = it has none."""
    device = said_by(run.path).get("device")
    return None if device is None else str(device)


def refuse(spec: RunSpec, device: str | Device, cluster: str | Cluster | None, *, known: bool) -> None:
    """Refuse what needs no dry run to be refused.

    Args:
        spec: the run that is to be predicted.
        device: the GPU that it would run on.
        cluster: the cluster whose links connect the GPUs; None = one GPU or node.
        known: is a step there measured, or its calibration known?

    Raises:
        ValueError: the device, precision, compiling or cluster, or its absence with several ranks, allows no prediction.
    """
    _check(spec, _device(device, known=known), known=known)
    if cluster is not None or spec.world_size > 1:
        _cluster(cluster, spec.world_size, _device(device, known=known))


def _device(device: str | Device, *, known: bool) -> Device:
    if device == "cuda":
        raise EstimateTimeError('device="cuda" is any GPU, and each has other rates: give a name, such as "H100"')
    if device == "cpu":
        if not known:
            raise EstimateTimeError(
                'device="cpu": CPUs have no datasheet whose shares are known. Measure one step of this program there, and give '
                "measured=seconds, or the run: wb.estimate_time(spec, device='cpu', measured=wb.launch(spec).wait())"
            )
        return CPU
    try:
        return device if isinstance(device, Device) else Device.named(device)
    except ValueError as error:
        refusal = EstimateTimeError(f"device={device!r}: {error}")
        refusal.__notes__ = getattr(error, "__notes__", [])
        raise refusal from None


def _check(spec: RunSpec, device: Device, *, known: bool) -> None:
    if spec.compile != "none" and not known:
        raise EstimateTimeError(
            f"compile={spec.compile!r}: how much compiling fuses is not known before it runs. Measure one compiled step on {device.name} "
            "(measured=seconds), or estimate the eager one with compile='none'"
        )
    if device is not CPU and FORMATS[spec.precision] not in device.flops_per_sec:
        raise EstimateTimeError(
            f"precision={spec.precision!r}: the datasheet of {device.name} has {', '.join(device.flops_per_sec)} only; "
            "try another precision"
        )


def _counted(plan: "Plan", device: Device) -> "tuple[MemoryBreakdown, Roofline]":
    """The memory of the fullest rank, and the operators of the slowest: those of a pipeline's stages differ, all others have the same."""
    from workbench.memory.ladder import counted

    ranks = range(0, plan.world_size, plan.world_size // plan.spec.pipeline_parallel)
    if len(ranks) == 1 or plan.rank is not None:
        return counted(plan, device)
    stages = [counted(replace(plan, rank=rank), device) for rank in ranks]
    return max((memory for memory, _ in stages), key=lambda memory: memory.total), max(
        (floor for _, floor in stages), key=lambda one: one.seconds
    )


def _with_communication(step: StepTime, plan: "Plan", cluster: str | Cluster | None) -> StepTime:
    """The same with its collectives, and the seconds that they are exposed at both ends of the links' bandwidth."""
    from workbench.cluster.count_collectives import collectives_of_plan

    where = _cluster(cluster, step.ranks, step.device)
    sent = collectives_of_plan(plan).on(where)
    shares = link_share(where, "inter" if step.ranks > where.gpus_per_node else "intra")
    return replace(step, traffic=sent, links=shares).with_exposed()


def _cluster(cluster: str | Cluster | None, ranks: int, device: Device) -> Cluster:
    if cluster is None:
        raise EstimateTimeError(
            f"{ranks} ranks exchange messages, and their links are not known: give cluster=, such as 'DGX-H100', or a Cluster with "
            "your own links (wb.measure_collectives)"
        )
    found = Cluster.named(cluster) if isinstance(cluster, str) else cluster
    if found.device.name != device.name and device is not CPU:
        raise EstimateTimeError(
            f"device= is {device.name}, and the nodes of cluster={found.name} have {found.device.name}: name the cluster of that device, "
            "or give a Cluster with that device and your links"
        )
    return found
