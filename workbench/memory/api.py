"""Public functions of memory: predict a training step's memory, measure it, compare changes of the step, find leaks.

A prediction drives the Trainer of real runs on fake tensors, so every knob means the same, and it needs no GPU. A measurement takes real
steps, in this process or in a launch of its own.
"""

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from workbench.core import units
from workbench.core.checks import check_budget, is_module, whole_number
from workbench.core.device import DEVICES, Device
from workbench.core.progress import Waiting, predicts, say_what_was_interrupted, tick
from workbench.core.synonyms import accept_synonyms
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.fit import MARGIN, device_of, usable_bytes
from workbench.memory.analysis.log import MemoryLog
from workbench.memory.analysis.non_pytorch import is_known
from workbench.memory.analysis.whatif import MemoryComparison, WhatIf
from workbench.runs.launch import experiments
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, SpecError, check_names
from workbench.runs.target import ARGUMENTS, Measured, check_step, device_or_batch, shown
from workbench.runs.task import Task
from workbench.runs.training_knobs import EARLIEST_POWERSGD, ONE_BUCKET, averaging_at_once, compressing_at_once

if TYPE_CHECKING:
    from workbench.memory.estimate.dry_run import DryRun
    from workbench.memory.estimate.plan import Plan
    from workbench.memory.measure.leaks import Leaks
    from workbench.train.trainer import Trainer


Watch = Callable[[], AbstractContextManager[Any]]
NO_LOADER: Any = SimpleNamespace(pin_memory=False)
"""Substitute for a Trainer's loader: batches are made here."""


@accept_synonyms
@device_or_batch
@predicts("dry runs of a step")
def estimate_memory(
    target: "RunSpec | Task | Callable[[], Any] | Any",
    batch: Any = None,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: str | Callable[[Any], Any] | None = None,
    device: str | Device = "cuda",
    steps: int = 2,
    world_size: int | None = None,
    rank: int | None = None,
    sequence: int | None = None,
    image: int | None = None,
    **knobs: Any,
) -> MemoryBreakdown:
    """Predict the memory of a training step, without running it and without a GPU.

    The step runs on fake tensors, which have a shape but no values, with the memory behaviour of a GPU. This takes a second or two for
    a small model, whatever its batch, and up to half a minute for one with 7 billion parameters. If the program reads a value that follows
    from integers of the batch (lengths, masks, ignored labels; tensors of up to 4 million elements), it gets that value; for any other
    value it gets 1, and a note says so.

    With `compile` and device="cpu", the step allocates and frees the buffers that TorchInductor plans for it. This takes some seconds more;
    no kernel is compiled. For a GPU the eager step is estimated, and a note says so.

    Args:
        target: a RunSpec, a Task, a function that builds a model, a Hugging Face configuration, or a model (which is not changed; it is
            estimated in training mode even if it is in evaluation mode). A LightningModule's training_step gives the loss, and its
            configure_optimizers the optimizer.
        batch: for a model or a function: tensors in a tuple, a list or a dict. For a RunSpec or Task: None = samples of its dataset. If the
            step does not depend on lengths or masks, shapes are enough: tensors of zeros, or on the meta device.
        loss: with a model or function: `loss(model, batch)` → a tensor with one number; None = see `estimate.examples.DefaultLoss`.
        optimizer: a name with options, such as "sgd(momentum=0.9)", or a function of the parameters; None = the spec's or task's own,
            "adamw" for a model.
        device: "cuda" (any GPU), "cpu", a name such as "H200", or a Device.
        steps: how many optimizer steps run; from the second on, the optimizer's states exist.
        world_size: ranks; None = the spec's nproc_per_node.
        rank: the rank whose memory is estimated; None = the rank with the most.
        sequence: length of the batch's sequences, instead of the sample's own.
        image: side of the batch's images in pixels, instead of the sample's own.
        **knobs: fields of a RunSpec, such as precision="amp_bf16", micro_batch=64, accumulation=4, checkpointing="full", parallel="fsdp".

    Raises:
        ValueError: something else was given; an unknown device, knob or value; or the program cannot run without values. The message says
            where, what is allowed and what to try.
    """
    from workbench.memory.estimate.plan import plan_of

    plan = plan_of(
        target,
        batch,
        loss=loss,
        optimizer=optimizer,
        device=device,
        steps=steps,
        world_size=world_size,
        rank=rank,
        sequence=sequence,
        image=image,
        **knobs,
    )
    return breakdown_of(plan, *record(plan))


def breakdown_of(plan: "Plan", log: MemoryLog, rank: int) -> MemoryBreakdown:
    """The breakdown of a plan's steps at their peak."""
    return MemoryBreakdown.from_log(log, kind="predicted", title=plan.title, device=plan.device, rank=rank, world_size=plan.world_size)


def record(plan: "Plan", *, watch: Watch | None = None) -> tuple[MemoryLog, int]:
    """The storages of a plan's steps, and their rank: the plan's, or the one with the most memory.

    Args:
        plan: what to run on fake tensors.
        watch: makes something that is entered around the steps, such as a TorchDispatchMode; of several attempts the last counts. It sees
            the operators of the eager step, which is not compiled then.

    Raises:
        ValueError: it cannot run without values; the message says where and what to try.
    """
    if plan.spec.compile == "none":
        return _recorded(plan, watch)
    from workbench.memory.estimate.building import COMPILED

    log, rank = _recorded_compiled(plan, watch)
    log.notes = [note for note in log.notes if note != COMPILED]
    return log, rank


def _recorded_compiled(plan: "Plan", watch: Watch | None) -> tuple[MemoryLog, int]:
    from workbench.memory.estimate.compiled import NOT_COMPILED, left_out

    knob, eager = plan.spec.compile, dataclasses.replace(plan, spec=plan.spec.replace(compile="none"))
    why = left_out(knob, plan.device) or "the operators of the eager step are counted" * bool(watch)
    if not why:
        try:
            return _recorded(plan, None)
        except SpecError:
            raise
        except Exception as error:  # whatever the compiler says; an error of the program itself comes again
            cause = error.__cause__ or error
            why = f"{type(cause).__name__}: {' '.join(str(cause).split()):.160}"
    log, rank = _recorded(eager, watch)
    log.notes.append(f'compile="{knob}" {NOT_COMPILED} ({why})')
    return log, rank


def _recorded(plan: "Plan", watch: Watch | None) -> tuple[MemoryLog, int]:
    from workbench.core.gc import RECENT, collected_before
    from workbench.core.interrupts import defer_interrupts
    from workbench.memory.estimate.building import BuildError
    from workbench.memory.estimate.dry_run import kept_state

    rank = plan.rank or 0
    with defer_interrupts(), collected_before(RECENT), kept_state():
        try:
            log, fullest = _attempt(plan, rank, on_meta=True, watch=watch)
            on_meta = True
        except BuildError:
            log, fullest = _attempt(plan, rank, on_meta=False, watch=watch)
            on_meta = False
        if plan.rank is not None:
            return log, rank
        if fullest:
            rank = fullest
            log, _ = _attempt(plan, rank, on_meta=on_meta, watch=watch)
        stage_ranks = plan.world_size // plan.spec.pipeline_parallel
        for first in range(stage_ranks, plan.world_size, stage_ranks):  # of each other stage
            other, (another, fullest) = first, _attempt(plan, first, on_meta=on_meta, watch=watch)
            if fullest:  # its parameters are others, and so is the rank that has most of their states
                other = first + fullest
                another, _ = _attempt(plan, other, on_meta=on_meta, watch=watch)
            if breakdown_of(plan, another, other).total > breakdown_of(plan, log, rank).total:
                log, rank = another, other
    return log, rank


def _attempt(plan: "Plan", rank: int, *, on_meta: bool, watch: Watch | None) -> tuple[MemoryLog, int]:
    from workbench.memory.estimate.building import build
    from workbench.memory.estimate.cuda.overrides import replaced
    from workbench.memory.estimate.dry_run import dry_run
    from workbench.memory.estimate.errors import estimate_errors
    from workbench.memory.estimate.fake_process_group import fake_process_group
    from workbench.memory.estimate.lightning_module import trained
    from workbench.train import activation_checkpointing
    from workbench.train.offload import DryRunHooks, offloading_dry_run
    from workbench.train.ranks import Layout, Ranks
    from workbench.train.trainer import Trainer, build_model

    spec = plan.spec.replace(gc=False, tf32=None, device="cpu", backend="auto", local_sgd=averaging_at_once(plan.spec))
    spec = spec.replace(
        schedule="constant", static_graph=False
    )  # no code is imported for a rate; DDP's first step would be unlike later ones
    if plan.gpu is None and spec.gradient_compression.startswith("powersgd"):
        spec = spec.replace(bucket_cap_mb=ONE_BUCKET)
    dealt = plan.gpu is not None and not spec.whole_models
    with fake_process_group(plan.world_size, rank, bucket_seen=lambda bucket: recorder.track(bucket, "bucket")) as here:
        ranks = Ranks(rank=here.rank, world_size=here.world_size, device=here.device, store=here.store)
        layout = Layout.of(spec, ranks)
        model = build(lambda: build_model(plan.task), on_meta=on_meta)
        with dry_run(plan.gpu, compiled=spec.compile != "none") as run:
            recorder = run.recorder
            run.model(model)
            plan = dataclasses.replace(plan, task=trained(plan.task, model))
            if not dealt:
                recorder.attach(model)
            passed = run.between_stages(model, plan.task, spec, plan.example) if spec.pipeline_parallel > 1 else None
            with (
                estimate_errors(recorder, model, plan.example),
                offloading_dry_run(DryRunHooks(on_host=recorder.leave_out, host_computes=recorder.pause)),
            ):
                with run.host(model) if dealt else contextlib.nullcontext():
                    trainer = Trainer(
                        spec, plan.task, ranks, module=model, loader=NO_LOADER, layout=layout, alone=plan.own_loop, passed=passed
                    )
                recorder.attach(trainer.module, trainer.averages)
                trainer.phase = recorder.phase
                with (
                    recorder.hooks(),
                    replaced(activation_checkpointing, "recomputing", recorder.tracker.inside),
                    watch() if watch else contextlib.nullcontext(),
                ):
                    _drive(trainer, run, plan)
            recorder.recognise_unsharded(trainer.module)
            recorder.close()
            fullest = _fullest(trainer.optimizer) * spec.tensor_parallel
    recorder.log.notes += _notes(plan)
    buckets = sum(each.size for each in recorder.log.records if each.category == "bucket" and each.freed_at is None)
    if plan.in_ddp and plan.world_size == 1 and buckets:
        recorder.log.notes.append(f"of the gradients, {units.bytes_(buckets)} are DDP's buckets: a loop without DDP has none")
    return recorder.log, fullest


def _drive(trainer: "Trainer", run: "DryRun", plan: "Plan") -> None:
    """The steps of `workbench.train.loop.train`. That loop holds its batch until the next one is there; on a GPU, the host's copy of it."""
    recorder, batch = run.recorder, None
    for step in range(plan.steps):
        recorder.step = step
        for left in reversed(range(plan.spec.accumulation)):
            recorder.mark("data")
            batch = run.batch(plan.example)
            given, batch = batch, batch if plan.device == "cpu" else None
            trainer.micro_step(given, last=not left)
            del given
        trainer.update()


def _fullest(optimizer: Any) -> int:
    """The data-parallel rank that has most of an optimizer's states: ZeroRedundancyOptimizer assigns whole parameters to ranks."""
    deal = getattr(optimizer, "_partition_parameters", None)
    if deal is None:
        return 0
    parts = [sum(weight.numel() for group in part for weight in group["params"]) for part in deal()]
    return parts.index(max(parts))


def _notes(plan: "Plan") -> list[str]:
    notes = []
    if how := getattr(plan.task.loss, "how", ""):
        notes.append(f"no loss was given, so the loss is {how}")
    if plan.device == "cuda":
        notes.append('device="cuda" is any GPU: memory outside of the allocator is a range; a name, such as "H200", narrows it')
    elif plan.device != "cpu" and not is_known(plan.device):
        notes.append(
            "memory outside PyTorch's allocator (context, libraries) was not measured for this GPU: taken as the range seen on "
            "others (workbench calibrate measures it)"
        )
    gpu = Device.known(plan.device)
    if gpu and gpu.gb and gpu.memory == gpu.gb * 1e9:
        notes.append(f"the {units.bytes_(gpu.memory)} of {gpu.name} are its datasheet's {gpu.memory / 1e9:g} GB; the card may report more")
    for short in ("A100", "V100"):
        if gpu and short in gpu.aliases and f"{gpu.gb:g}" not in plan.typed:
            others = [other.name for other in DEVICES if other.name.startswith(f"{short}-") and other.gb != gpu.gb]
            notes.append(f'"{short}" alone means {gpu.name}; of another size: {", ".join(others)}')
    if gpu and gpu.capability is None:
        notes.append(f"operators are assumed to keep as much on {gpu.name} as on CUDA: ROCm's may keep more or less")
    return notes


@accept_synonyms
@predicts("a dry run of a step with each change")
def compare_memory(
    target: Any,
    changes: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    *,
    device: str | Device = "cuda",
    margin: float = MARGIN,
    **options: Any,
) -> MemoryComparison:
    """Predict the memory of a step with each of several changes.

    Args:
        target: as `estimate_memory` takes it.
        changes: one mapping of knobs per row, `[{"precision": "amp_bf16"}, {"checkpointing": "full", "micro_batch": 64}]`; or knob →
            values, one row each, `{"optimizer": ["sgd", "adamw"], "sequence": [512, 1024]}`. Knobs are those of a RunSpec, and the
            arguments `sequence`, `image`, `world_size` and `optimizer` of `estimate_memory`.
        device: as in `estimate_memory`; with a name or a Device, each row says whether it fits.
        margin: share of the device's memory that stays free.
        options: arguments of `estimate_memory` for all rows.

    Raises:
        ValueError: no change, a knob that does not exist, or a baseline that cannot be estimated. For a change that cannot be estimated,
            the row says why.
    """
    items = changes.values() if isinstance(changes, Mapping) else changes if isinstance(changes, Iterable) else ()
    if hasattr(changes, "shape") or any(hasattr(item, "shape") for item in items):
        second = "second come the changes, and the batch by name: compare_memory(model, changes, batch=…)"
        raise ValueError(f"compare_memory({shown(target)}, {shown(changes)}): {second}")
    rows = _rows(changes)
    for row in rows:
        check_names(RunSpec, row, ARGUMENTS)
    estimates = [WhatIf(changes={}, breakdown=estimate_memory(target, device=device, **options))]
    for number, change in enumerate(rows, 1):
        tick(f"change {number} of {len(rows)}: {units.knobs(change)}")
        try:
            estimates.append(WhatIf(changes=change, breakdown=estimate_memory(target, **{"device": device, **options, **change})))
        except ValueError as error:
            estimates.append(WhatIf(changes=change, breakdown=None, complaint=str(error)))
    room = None if device in ("cuda", "cpu") else usable_bytes(device_of(device), margin)
    return MemoryComparison(
        rows=tuple(estimates), capacity=room, margin=margin, device=device.name if isinstance(device, Device) else device
    )


def _rows(changes: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]]) -> list[Mapping[str, Any]]:
    if isinstance(changes, Mapping):
        listed = {
            name: [values] if isinstance(values, str) or not isinstance(values, Sequence) else values for name, values in changes.items()
        }
        rows: list[Mapping[str, Any]] = [{name: value} for name, values in listed.items() for value in values]
    else:
        rows = list(changes) if isinstance(changes, Iterable) else []
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(
            f"compare_memory(changes={changes!r:.80}): give the changes to compare: [{{'precision': 'amp_bf16'}}, {{'micro_batch': 8}}] "
            "or {'micro_batch': [8, 16, 32]}"
        )
    return rows


BUDGET = 60.0
"""Default of `budget_s`: seconds that a measurement may take."""
STEPS = 3
"""Steps that are measured by default: the optimizer makes its states in the first; the second and the third should agree."""


@accept_synonyms
def measure_memory(
    target: RunSpec | Run | str | os.PathLike[str] | Callable[[Any], Any],
    loader: Iterable[Any] | None = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    device: str | None = None,
    steps: int | None = None,
    budget_s: float = BUDGET,
    runs_dir: str | os.PathLike[str] | None = None,
) -> "MemoryBreakdown":
    """Measure what a training step holds in memory, by running it.

    * `measure_memory(step, loader)` takes some steps in this process; `step(batch)` does one whole optimizer step. Model, optimizer, random
      generators and loader are restored. What the step uses is counted, and not the other tensors of the process.
    * `measure_memory(model, batch)` takes steps with a copy of the model, in fp32, with the loss and the optimizer that
      `estimate_memory(model, batch)` assumes, or with yours.
    * `measure_memory(spec)` launches the spec's ranks and returns the breakdown of the rank with the most memory.
    * `measure_memory(run)` reads the result of such a launch; `run.memory_breakdown(rank)` has the breakdown of each rank.

    Args:
        target: a step function, a model or a function that builds one, a RunSpec, a run, or the path of a run directory.
        loader: with a step: its batches, from a DataLoader or any other iterable. With a model: the same, or one batch, which is tensors in
            a tuple, a list or a dict.
        model: with a step: the module, or several; None = found by looking at the step.
        optimizer: with a step: the optimizer, or several; None = found as well. With a model: a name with options or a function of the
            parameters, as `estimate_memory` takes it; None = "adamw".
        loss: with a model: `loss(model, batch)` → a tensor with one number; None = see `estimate.examples.DefaultLoss`.
        device: with a model: "cpu" or "cuda"; None = where the model is.
        steps: how many steps are taken; None = 3. With `gradient_compression="powersgd"` it is 4, and PowerSGD starts in the third,
            whatever its `start`, so that what it keeps between two steps is measured.
        budget_s: seconds to spend at most, the start of a launch included; no step starts later, but at least one is taken. After the
            budget, and at Ctrl-C, the breakdown is of the finished steps, and a note says so; if there are none, the KeyboardInterrupt says
            so. On several ranks all steps are taken, since the ranks have to agree.
        runs_dir: with a spec: where its run directory goes; None = `runs` in the current folder.

    Returns:
        A breakdown whose total is what the allocator counted: on a CPU torch's profiler, on a GPU the allocator's own counters.

    Raises:
        ValueError: something else was given, or what was given cannot be measured; the message says why.
        RunError: the launch failed; its run directory stays.
    """
    check_budget(budget_s, limited=True)
    made = None
    if _builds_model(target):
        from workbench.memory.estimate.model_steps import ModelSteps

        if made := ModelSteps.of(target, loader, loss=loss, optimizer=optimizer, device=device):
            target, loader, model, optimizer = made.step, made.loader, made.model, made.optimizer
    elif extra := [name for name, value in (("loss", loss), ("device", device)) if value is not None]:
        raise ValueError(
            f"measure_memory({shown(target)}, …) was given {extra[0]}=, which only goes with a model: measure_memory(model, batch, "
            f"{extra[0]}=…); a step and a task have their own"
        )
    given = _TARGET.read(target, loader, model=model, optimizer=optimizer, steps=steps)
    if isinstance(given, Run):
        observed: MemoryBreakdown = given.memory_breakdown()
        return observed
    count = _checked(steps)
    if isinstance(given, RunSpec):
        early = compressing_at_once(given)
        if early.startswith("powersgd"):
            given, count = given.replace(gradient_compression=early), count if steps else EARLIEST_POWERSGD + 2
        with say_what_was_interrupted("measure_memory"):
            run = experiments.run_memory_measurement(given, steps=count, budget_s=budget_s, runs_dir=runs_dir)
            launched: MemoryBreakdown = run.memory_breakdown()
        return launched
    with say_what_was_interrupted("measure_memory"), Waiting("measure_memory", budget_s, begin=f"recording {count} steps") as line:
        from workbench.memory.measure.memory import measure

        measured = measure(given.step, given.loader, model=model, optimizer=optimizer, steps=count, line=line)
    return made.titled(measured, count) if made else measured


def _builds_model(target: Any) -> bool:
    """Is it a model, a class of models, or a function without arguments, which a step function is not?"""
    if is_module(target) or inspect.isclass(target):
        return True
    try:
        return inspect.isfunction(target) and not inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False


@accept_synonyms
def find_leaks(
    step: Callable[[Any], Any], loader: Iterable[Any], *, model: Any = None, optimizer: Any = None, steps: int = 8, budget_s: float = BUDGET
) -> "Leaks":
    """Find memory that grows from step to step: the operator and module that allocated it, and the Python variable that keeps it.

    It takes some steps in this process and restores everything; what leaked meanwhile is freed.

    Args:
        step: `step(batch)` does one whole optimizer step.
        loader: its batches, from a DataLoader or any other iterable.
        model: the module, or several; None = found by looking at the step.
        optimizer: the optimizer, or several; None = found as well.
        steps: how many steps are taken, at least 5. What is allocated in a step and still alive two steps later is suspected.
        budget_s: seconds to spend at most; no step starts later. After the budget, and at Ctrl-C, the finished steps are judged if there
            are at least five; otherwise a ValueError or the KeyboardInterrupt says so. On several ranks all steps are taken.

    Raises:
        ValueError: what was given cannot be measured; the message says why.
    """
    check_step("find_leaks", step, loader)
    check_budget(budget_s, limited=True)
    with say_what_was_interrupted("find_leaks"), Waiting("find_leaks", budget_s, begin=f"recording {steps} steps") as line:
        from workbench.memory.measure.leaks import find

        return find(step, loader, model=model, optimizer=optimizer, steps=steps, line=line)


_TARGET = Measured(
    name="measure_memory",
    verb="measured",
    script='of a script only the peak of each rank is known: wb.launch("train.py", watch=True).wait().memory',
)


def _checked(steps: Any) -> int:
    also = "; with 2 or more the optimizer's states are seen"
    return whole_number("steps", STEPS if steps is None else steps, least=1, also=also)
