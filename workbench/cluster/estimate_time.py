"""`estimate_time`: predicts the seconds of a training step on a device that need not be here, from the operators of a dry run."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.operator_time import Operator
from workbench.cluster.analysis.pipeline_idle import bubble_of
from workbench.cluster.analysis.plan.ranges import FORMATS, link_share
from workbench.cluster.analysis.step_time import CPU, EstimateTimeError, StepTime, TimeCalibration, checked_calibration
from workbench.core.device import Device
from workbench.core.progress import predicts
from workbench.core.synonyms import accept_synonyms

if TYPE_CHECKING:
    from workbench.memory.analysis.breakdown import MemoryBreakdown
    from workbench.memory.estimate.plan import Plan
    from workbench.memory.estimate.roofline_time import Roofline
    from workbench.runs.spec import RunSpec
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
        target: as in `estimate_memory`.
        batch: likewise.
        device: a name such as "H100", or a Device; "cpu" only with `measured` or a calibration.
        cluster: nodes and links: a name or a Cluster; needed for several ranks.
        measured: calibrates the estimate: seconds of a step of this very program on this device, or a Run or a Trace of it, or the traces
            of its ranks (a TraceSet, another mapping from rank to Trace, or a list).
        calibration: `.calibration` of a calibrated estimate of a similar program on the same device.
        options: as in `estimate_memory`: loss, optimizer, sequence, image, and knobs such as precision="amp_bf16".

    Raises:
        EstimateTimeError: the estimate would be a guess: an unknown device or number format, several ranks without a cluster, compiled
            steps or a CPU without a measured step, or a calibration from a program with other operators. The error says what to measure.
        ValueError: as in `estimate_memory`.
    """
    if measured is not None and calibration is not None:
        raise EstimateTimeError("measured= and calibration= both set the level: give one of them")
    where = _device(device, known=measured is not None or calibration is not None)
    from workbench.memory.estimate.plan import plan_of

    plan = plan_of(target, batch, device="cpu" if where is CPU else where, asked="estimate_time", **options)
    _check(plan.spec, where, known=measured is not None or calibration is not None)
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
    if measured is not None:
        return step.calibrate(measured)
    return checked_calibration(step, calibration) if calibration is not None else step


def refuse(spec: "RunSpec", device: str | Device, cluster: str | Cluster | None, *, known: bool) -> None:
    """Refuse what needs no dry run to be refused.

    Args:
        spec: what to predict.
        device: where.
        cluster: its links.
        known: is a step there measured, or its calibration known?

    Raises:
        ValueError: the device, precision, compiling or cluster, or its absence with several ranks, allows no prediction.
    """
    _check(spec, _device(device, known=known), known=known)
    if cluster is not None or spec.world_size > 1:
        _cluster(cluster, spec.world_size)


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
        raise EstimateTimeError(f"device={device!r}: {error}") from None


def _check(spec: "RunSpec", device: Device, *, known: bool) -> None:
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
    from dataclasses import replace

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
    from dataclasses import replace

    from workbench.cluster.count_collectives import collectives_of_plan

    where = _cluster(cluster, step.ranks)
    sent = collectives_of_plan(plan).on(where)
    shares = link_share(where, "inter" if step.ranks > where.gpus_per_node else "intra")
    return replace(step, traffic=sent, links=shares).with_exposed()


def _cluster(cluster: str | Cluster | None, ranks: int) -> Cluster:
    if cluster is None:
        raise EstimateTimeError(
            f"{ranks} ranks exchange messages, and their links are not known: give cluster=, such as 'DGX-H100', or a Cluster with "
            "your own links (wb.measure_collectives)"
        )
    return Cluster.named(cluster) if isinstance(cluster, str) else cluster
