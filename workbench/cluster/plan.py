"""`plan`: finds the layouts of a model on a cluster that fit and are fast, by closed forms; `energy`: energy of a run or a plan.

The files of `analysis/plan`: `workload` (what is trained, by its sizes or counted by `read_model`), `layouts` (all layouts as columns of
numbers, and the short list), `memory` and `timing` (what each takes), `search` (filter, time, calibrate), `plans` (the results), `ranges`
(the shares of hardware peaks from which all intervals come).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.energy import Energy
from workbench.cluster.analysis.plan.layouts import SHARINGS, gpu_counts
from workbench.cluster.analysis.plan.plans import Plan, Plans, Power, checked_energy_inputs
from workbench.cluster.analysis.plan.ranges import HELD, PlanError, efficiency_of, link_share, peak_of, share_interval
from workbench.cluster.analysis.plan.search import PlanSearch, calibrated
from workbench.cluster.analysis.plan.workload import CHECKPOINTINGS, Trainer, Workload, trainer_named, versions_of, workload_of_transformer
from workbench.cluster.analysis.transformer import Transformer
from workbench.core import units
from workbench.core.checks import is_whole, real_number, whole_number
from workbench.core.progress import predicts
from workbench.core.synonyms import accept_synonyms
from workbench.memory.analysis.fit import MARGIN
from workbench.runs.run import Run
from workbench.runs.spec import KNOBS, RunSpec, SpecError
from workbench.runs.target import is_config, named_task, shown

MAX_GPUS = 65_536
"""Most GPUs of a plan whose number of GPUs is left open."""
GRADIENT_BYTES = (2, 4)
"""Bytes of a gradient while gradients are summed."""


@accept_synonyms
@predicts("dry runs of a step, then every layout")
def plan(
    model: Any,
    cluster: Cluster | str,
    *,
    gpus: int | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    batch: Any = None,
    top: int = 8,
    steps: int = 1000,
    price: float | None = None,
    electricity: float | None = None,
    intensity: float | None = None,
    pue: float = 1.0,
    watts: float | None = None,
    efficiency: Any = None,
    links: Any = None,
    held: Any = None,
    margin: float = MARGIN,
    tensor: int | None = None,
    pipeline: int | None = None,
    sharing: str | Sequence[str] | None = None,
    checkpointing: str | Sequence[str] | None = None,
    chunks: int | None = None,
    sequence_parallel: bool = True,
    fused_attention: bool = True,
    gradient_bytes: float = 4,
    loss_parallel: bool | None = None,
    overlapped_gradients: bool = True,
    trainer: str | None = None,
    poll_interval: float | None = None,
    checked_collectives: bool | None = None,
    measured: tuple[Plan, float] | list[tuple[Plan, float]] | None = None,
    most_gpus: int = MAX_GPUS,
    **knobs: Any,
) -> Plans:
    """Find the layouts of a model on a cluster that fit and are fast: data × tensor × pipeline × sharing × micro-batch × checkpointing.

    Nothing is trained. Step times and memory are closed forms, each with its source. The shares of the hardware's peaks in them are ranges,
    so every figure has a range. A Task's operators are counted by dry runs first, which take minutes for billions of parameters. A measured
    step of yours narrows the ranges: `measured=`, or `efficiency=` with the share that it reached, and `held=` with measured over predicted
    bytes.

    A plan fits if its predicted memory is at most the usable memory of a GPU (all but `margin`). If the upper end of the prediction exceeds
    it, the plan is marked "tight". If the fastest plan is tight, the fastest that is not is marked "safe", and added to the list if `top`
    leaves room. The first five plans are the layouts with the highest expected throughput: speed times the probability that the memory
    suffices.

    Args:
        model: a `Transformer` with its sizes, or the path of a Hugging Face `config.json` that has them; or a Task, a RunSpec, a module or
            a function that builds one. Dry runs count the parameters, FLOPs and memory of the latter, which are planned without tensor and
            pipeline parallelism.
        cluster: a Cluster, or a name from the catalogue.
        gpus: number of GPUs; None = any number up to `most_gpus`, to trade time for money.
        global_batch: samples per step over all GPUs; None = that of the RunSpec.
        sequence: tokens of a sample; None = those of the Transformer or the batch.
        precision: "fp32", "amp_bf16" or "amp_fp16"; None = that of a RunSpec, else "amp_bf16".
        batch: an example batch, for a module.
        top: the largest number of plans to return: the five with the highest expected throughput, then those with other roles.
        steps: number of steps for which money, energy and carbon are computed.
        price: money per GPU and hour.
        electricity: money per kWh, if it is paid separately.
        intensity: gCO2e per kWh of the grid.
        pue: power usage effectiveness: power of the building over power of its machines.
        watts: power of a GPU under load, if the table of devices does not have it.
        efficiency: share of the GPU's dense peak that kernels reach: a number, or (low, mid, high); None = what published runs imply.
        links: share of the links' bandwidth that collectives reach, in the same form.
        held: bytes that PyTorch's allocator holds over the predicted bytes, in the same form; None = what published steps imply
            (`ranges.HELD`).
        margin: share of a GPU's memory that stays free.
        tensor: ranks that split each layer; None = any.
        pipeline: stages; None = any.
        chunks: chunks of layers on each stage; 1 = no interleaved pipelines; None = any.
        sharing: one or several of "ddp", "zero1", "zero2", "fsdp", "hsdp"; None = all.
        checkpointing: one or several of "none", "selective", "full"; None = all (for a module, "none" and "full").
        sequence_parallel: split along the sequence what tensor parallelism leaves whole.
        fused_attention: attention keeps no scores; "selective" checkpointing is planned only without it.
        gradient_bytes: bytes of each gradient while gradients are summed: 4, or 2 if they are summed in 16 bits; for a Transformer.
        loss_parallel: True = the loss is computed on split logits (Megatron; torch's loss_parallel); False = each rank has all logits. None
            = as the trainer does it, False without a trainer.
        overlapped_gradients: True = gradients are reduced during the backward pass, as in DDP, and in Megatron with --overlap-grad-reduce;
            False = after it. For "ddp", "zero1" and "zero2"; FSDP always overlaps.
        trainer: "megatron" or "nanotron": plan what that program's code sends and waits for (`TRAINERS`). If its published versions differ,
            ranges span all of them, and plans are sorted by their geometric mean. None = as Megatron for a Transformer, otherwise as a run
            of the workbench.
        poll_interval: seconds that a pipeline stage sleeps between two polls for a message; None = as the trainer's versions do, or 0.
        checked_collectives: True = ranks compare their calls before each collective, as with TORCH_DISTRIBUTED_DEBUG=DETAIL. None = as in
            the trainer's launch scripts, or False.
        measured: (plan, seconds), or a list of such pairs: plans for this model, cluster and trainer, and the measured seconds of their
            steps. They show how fast kernels and the host are, and which versions of the trainer are possible, of the software with which
            they were measured. Seconds that are impossible for the plan are refused.
        most_gpus: the largest number of GPUs if `gpus` is None.
        knobs: fields of a RunSpec, for a Task, a RunSpec or a module, such as optimizer="sgd(momentum=0.9)".

    Raises:
        PlanError: a wrong argument; or no layout fits. The error says how much memory the nearest one lacks, and what would make it fit.
    """
    where = Cluster.named(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(where, Cluster):
        expected = "expected a wb.Cluster, or a name of the catalogue such as 'DGX-H100'"
        if callable(model):
            raise PlanError(f'plan({shown(model)}, {shown(cluster)}): {expected}, and the batch by name: plan(model, "DGX-H100", batch=…)')
        raise PlanError(f"cluster={cluster!r:.60}: {expected}")
    sizes = gpu_counts(where, gpus, min(_whole("most_gpus", most_gpus), MAX_GPUS * 16))  # refuse before any dry run
    trained_by = trainer_named(trainer)
    sharings = _several("sharing", sharing, trained_by.sharings if trained_by else SHARINGS)
    if trained_by and not trained_by.interleaves and chunks not in (None, 1):
        raise PlanError(f"chunks={chunks!r:.60}: pipelines of {trainer} are not interleaved; allowed is 1")
    if loss_parallel is not None and not isinstance(loss_parallel, bool):
        raise PlanError(f"loss_parallel={loss_parallel!r:.60}: allowed are True, False, and None for what the trainer does")
    splits = loss_parallel if loss_parallel is not None else trained_by is not None and trained_by.loss_parallel
    if isinstance(model, str | Path) and (Path(model).suffix == ".json" or (Path(model) / "config.json").is_file()):
        model = Transformer.from_config(model, sequence)
    if words := _in_a_plan(knobs, where):
        raise PlanError(words)
    if isinstance(model, Transformer):
        if knobs or batch is not None:
            raise PlanError(f"{', '.join(knobs) or 'batch'}: known for a Task, a RunSpec or a module; a Transformer has sizes only")
        workload = workload_of_transformer(
            model,
            sequence=sequence,
            precision=precision or "amp_bf16",
            fused_attention=fused_attention,
            sequence_parallel=sequence_parallel,
            gpus_per_node=where.gpus_per_node,
            gradient_bytes=_gradient_bytes(gradient_bytes, precision),
            loss_parallel=splits,
        )
    else:
        from workbench.cluster.read_model import read

        if global_batch is None and not isinstance(named_task(model) or model, RunSpec) and (callable(model) or is_config(model)):
            also = (
                "" if batch is not None else ", and so is batch: an example of it, batch=(tensors, …), of tensors on any device, even meta"
            )
            raise PlanError(_NO_BATCH + also)
        if global_batch is not None:
            _whole("global_batch", global_batch)
        workload = read(model, where, batch=batch, sequence=sequence, precision=precision, checkpointing=checkpointing, **knobs)
        if workload.spec is not None:
            sharings, left_out = _taken(workload.spec.replace(optimizer=knobs.get("optimizer", workload.spec.optimizer)), sharings)
            workload = replace(workload, notes=(*workload.notes, *left_out))
    given_batch = global_batch if global_batch is not None else getattr(workload.spec, "global_batch", None)
    size = _whole("global_batch", given_batch)
    if not isinstance(overlapped_gradients, bool):
        raise PlanError(f"overlapped_gradients={overlapped_gradients!r:.60}: allowed are True, and False where they are reduced afterwards")
    workload = replace(trained_by.trains(workload) if trained_by else workload, overlapped=overlapped_gradients)
    restricted = _restricted(workload, tensor, pipeline, chunks, checkpointing)
    peak = peak_of(where.device, workload.precision)
    shares = share_interval(efficiency, "efficiency", efficiency_of(where.device, workload.precision))
    margin = real_number("margin", margin, least=0, below=1, what="a share of the memory", also=", such as 0.1", error=PlanError)
    search = PlanSearch(
        workload=restricted,
        cluster=where,
        batch=size,
        peak=peak,
        versions=versions_of(restricted, trained_by, poll_interval, checked_collectives, shares),
        links=(share_interval(links, "links", link_share(where, "intra")), share_interval(links, "links", link_share(where, "inter"))),
        held=share_interval(held, "held", HELD, "what the allocator holds over the predicted bytes", "1.05"),
        usable_memory=where.device.memory * (1 - margin),
        steps=_whole("steps", steps),
        top=_whole("top", top),
        power=Power(price=price, electricity=electricity, intensity=intensity, pue=pue, watts=watts),
        unrestricted=workload,
        efficiency_given=efficiency is not None,
        held_given=held is not None,
        trainer=trained_by,
    )
    if measured is not None:
        pairs = measured if isinstance(measured, list) and measured else [measured]
        search = calibrated(search, [_measured(pair, efficiency, where, workload, trained_by) for pair in pairs])
    return search.plans(sizes, sharings)


def _taken(spec: RunSpec, sharings: Sequence[str]) -> tuple[list[str], list[str]]:
    """The sharings that go with the knobs of a spec, and a note on each of the others.

    Raises:
        SpecError: none does.
    """
    taken, left_out = [], []
    for kind in sharings:
        try:
            spec.replace(parallel=kind)
            taken.append(kind)
        except SpecError as error:
            left_out.append(f'sharing="{kind}" is left out: {error}')
            if kind == sharings[-1] and not taken:
                raise
    return taken, left_out


def _measured(value: Any, efficiency: Any, where: Cluster, workload: Workload, trainer: Trainer | None) -> tuple[Plan, float]:
    """Check that the plan of a measured step is one of this model, cluster and trainer, and its seconds."""
    plan, seconds = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
    if not isinstance(plan, Plan):
        raise PlanError(f"measured={value!r:.80}: expected (plan, seconds), such as (plans.best, 1.7), or a list of such pairs")
    if efficiency is not None:
        raise PlanError(f"measured= and efficiency={efficiency!r:.60}: the measured step says how fast kernels are; leave out one of them")
    of = f"measured={plan!r}"
    if plan.node != where.name or plan.precision != workload.precision or not math.isclose(plan.flops, workload.flops, rel_tol=0.01):
        given = f"{plan.model}, {units.count(plan.flops, 'FLOP')} per sample, on {plan.node} in {plan.precision}"
        expected = f"{workload.name}, {units.count(workload.flops, 'FLOP')} per sample, on {where.name} in {workload.precision}"
        raise PlanError(f"{of}: a plan of {given}; expected one of {expected}")
    if plan.checkpointing not in workload.computed:
        raise PlanError(f"{of}: its checkpointing={plan.checkpointing!r} is not planned here, only {', '.join(workload.computed)}")
    if trainer and ((plan.data > 1 and plan.sharing not in trainer.sharings) or (plan.chunks > 1 and not trainer.interleaves)):
        raise PlanError(f"{of}: {trainer.name} has no {plan.layout}; expected a plan with trainer={trainer.name!r}")
    return plan, real_number("measured", seconds, above=0, what="seconds of a step", also=", such as 1.7", error=PlanError)


def _in_a_plan(knobs: Mapping[str, Any], where: Cluster) -> str:
    """What to write for knobs of a run that a plan has another argument for, or finds; empty = there are none."""
    meant = {other: knob for knob, about in KNOBS.items() for other in about.elsewhere} | {"ranks": "nproc_per_node"}
    of = {name: meant.get(name, name) for name in knobs}
    said = []
    if ranks := [name for name in knobs if of[name] in ("nnodes", "nproc_per_node")]:
        number = dict(zip([of[name] for name in ranks], [knobs[name] for name in ranks], strict=True))
        nodes, each = (value if is_whole(value := number.get(name), least=1) else None for name in ("nnodes", "nproc_per_node"))
        gpus = (nodes or 1) * (each or where.gpus_per_node)
        why = "" if each else f", {nodes or 1} × the {where.gpus_per_node} GPUs of a {where.name}"
        said.append(f"{', '.join(f'{name}={knobs[name]!r:.40}' for name in ranks)}: gpus={gpus} says it{why}")
    for name, value in knobs.items():
        words = _WORDS_OF_PLANS.get(of[name], "")
        choices = {"sharing": SHARINGS, "checkpointing": CHECKPOINTINGS}.get(words)
        if of[name] in ("micro_batch", "accumulation"):
            said.append(f"{name}={value!r:.40}: this is what a plan finds; global_batch= is what all GPUs take in a step")
        elif of[name] in ("expert_parallel", "local_sgd"):
            said.append(f"{name}={value!r:.40}: not planned; give gpus, global_batch, sharing, checkpointing")
        elif words and choices and value not in choices:
            said.append(f"{name}={value!r:.40}: {words}= says it, one or several of {', '.join(choices)}")
        elif words:
            said.append(f"{name}={value!r:.40}: {words}={value!r:.40} says it")
    return "; ".join(said)


_WORDS_OF_PLANS: Mapping[str, str] = {
    "parallel": "sharing",
    "checkpointing": "checkpointing",
    "tensor_parallel": "tensor",
    "pipeline_parallel": "pipeline",
    "shard_ranks": "sharing",
    "precision": "precision",
}
"""A knob of a run → the argument of `plan` that says it."""


def _restricted(workload: Workload, tensor: int | None, pipeline: int | None, chunks: int | None, checkpointing: Any) -> Workload:
    """The workload with the given degrees and kinds of checkpointing only."""
    changes: dict[str, Any] = {}
    for name, degree, allowed in (("tensor", tensor, workload.tensors), ("pipeline", pipeline, workload.stages)):
        if degree is None:
            continue
        if degree not in allowed:
            raise PlanError(f"{name}={degree!r}: {workload.name} on this cluster can have {', '.join(map(str, allowed))}")
        changes["tensors" if name == "tensor" else "stages"] = [degree]
    if chunks is not None:
        changes["chunks"] = [_whole("chunks", chunks)]
    if checkpointing is not None:
        kinds = _several("checkpointing", checkpointing, tuple(workload.computed))
        changes["computed"] = {kind: flops for kind, flops in workload.computed.items() if kind in kinds}
    return replace(workload, **changes) if changes else workload


def _several(name: str, value: Any, allowed: Sequence[str]) -> list[str]:
    """Check one or several of the allowed names; None = all."""
    given = list(allowed) if value is None else [value] if isinstance(value, str) else list(value)
    for choice in given:
        if choice not in allowed:
            raise PlanError(f"{name}={choice!r}: allowed are {', '.join(allowed)}")
    if not given:
        raise PlanError(f"{name}={value!r}: expected at least one of {', '.join(allowed)}")
    return [choice for choice in allowed if choice in given]


_NO_BATCH = "global_batch is missing: samples per step of all GPUs, such as global_batch=1024"


def _whole(name: str, value: Any) -> int:
    if value is None and name == "global_batch":
        raise PlanError(_NO_BATCH)
    return whole_number(name, value, least=1, error=PlanError)


def _gradient_bytes(value: Any, precision: str | None) -> float:
    if isinstance(value, bool) or value not in GRADIENT_BYTES:
        raise PlanError(f"gradient_bytes={value!r:.60}: allowed are 4, or 2 where gradients are summed in 16 bit")
    if precision == "fp32" and value != 4:
        raise PlanError(f'gradient_bytes={value!r} with precision="fp32": gradients have 4 bytes there; try precision="amp_bf16"')
    return float(value)


@accept_synonyms
def energy(target: Run | Plan | Plans, *, steps: int | None = None, **inputs: Any) -> Energy:
    """Compute energy, money and carbon of a run, from measured power or its devices' design power, or of a plan, from the latter.

    `measured` of the result says which of the two was used. Embodied carbon, the loader's disks and the network are left out.

    Args:
        target: a Run, a Plan, or Plans (the best of them counts).
        steps: for a plan: number of steps; None = as planned.
        inputs: `price` (money per GPU and hour), `electricity` (money per kWh), `intensity` (gCO2e per kWh), `pue`; `watts` for a device
            that is not in the table. A plan's own inputs are the defaults.

    Raises:
        PlanError: something else was given.
        CostError: power was not measured and the device's design power is not known; or a number is out of bounds.
    """
    checked_energy_inputs(inputs)
    if isinstance(target, Run):
        if steps is not None:
            raise PlanError(f"steps={steps}: a run has the steps that it has; steps are of a plan")
        of_run: Energy = target.energy(**inputs)
        return of_run
    plan = target.best if isinstance(target, Plans) else target
    if not isinstance(plan, Plan):
        raise PlanError(f"energy({target!r:.60}): expected a Run, a Plan or Plans, not a {type(target).__name__}")
    if steps is not None:
        whole_number("steps", steps, least=1, also=f", or None for the {plan.steps:,} that were planned", error=PlanError)
    return plan.drawn(steps, **inputs)
