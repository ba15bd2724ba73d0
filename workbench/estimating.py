"""Estimate: the memory of training steps before anything runs, on a machine without a GPU.

The program that is estimated is the very Trainer of real runs, driven on fake tensors (`workbench.estimate`), so every knob means the same.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from workbench.device import Device
from workbench.memory.breakdown import MemoryBreakdown
from workbench.memory.log import MemoryLog
from workbench.memory.outside import is_known
from workbench.spec import SHARDED, RunSpec
from workbench.task import Task

if TYPE_CHECKING:
    from workbench.estimate.dry import DryRun
    from workbench.estimate.plan import Plan
    from workbench.train.trainer import Trainer

Watch = Callable[[], AbstractContextManager[Any]]
NO_LOADER: Any = SimpleNamespace(pin_memory=False)
"""Stands in the place of a Trainer's loader: its batches are made here."""


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

    The step runs on tensors that have a shape but no values, with the memory behaviour of a GPU: a second or so, whatever the sizes.
    Eager mode only. Of values, what follows from the batch's own whole numbers is known (lengths, masks, labels that are left out; of
    tensors up to 4 million elements); where the program asks for another, it is told 1, and a note says so.

    Args:
        target: a RunSpec, a Task, a function that builds a model, or a model (which is not touched; one in
            evaluation mode is estimated in training mode).
        batch: tensors in a tuple, a list or a dict, for a model or a function; for a RunSpec or Task None takes samples of its dataset.
            Shapes are enough: tensors on the meta device, or of zeros, will do where lengths or masks decide nothing.
        loss: with a model or function: `loss(model, batch)` → a tensor with one number; None: see `estimate.examples.DefaultLoss`.
        optimizer: a name with options, such as "sgd(momentum=0.9)", or a function of the parameters; None = that of the spec or task,
            "adamw" for a model.
        device: "cuda" (any GPU), "cpu", a name such as "H200", or a Device.
        steps: optimizer steps; the second has the optimizer's states from its start.
        world_size: ranks; None = the spec's nproc_per_node.
        rank: whose memory; None = that of the rank with the most.
        sequence: length of the batch's sequences, instead of the sample's own.
        image: side of the batch's images in pixels, instead of the sample's own.
        **knobs: of a RunSpec, such as precision="amp_bf16", micro_batch=64, accumulation=4, checkpointing="full", parallel="fsdp".

    Raises:
        ValueError: something else was given; an unknown device, knob or value; or the program cannot run without values. The message says
            where, what is allowed and what to try.
    """
    from workbench.estimate.plan import plan_of

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
    """What the fullest moment of a plan's steps is made of.

    Args:
        plan: what was recorded.
        log: of `record`.
        rank: of `record`.
    """
    return MemoryBreakdown.from_log(log, kind="predicted", title=plan.title, device=plan.device, rank=rank, world_size=plan.world_size)


def record(plan: "Plan", *, watch: Watch | None = None) -> tuple[MemoryLog, int]:
    """The storages of a plan's steps, and the rank whose they are: the plan's, or the one with the most.

    Args:
        plan: what to run on fake tensors.
        watch: makes something that is entered around the steps, such as a TorchDispatchMode; of several attempts the last counts.

    Raises:
        ValueError: it cannot run without values; the message says where and what to try.
    """
    from workbench.collector import RECENT, collected_before
    from workbench.estimate.building import BuildError
    from workbench.estimate.dry import kept_state
    from workbench.measure.interrupts import waiting

    rank = plan.rank or 0
    with waiting(), collected_before(RECENT), kept_state():
        try:
            log, fullest = _attempt(plan, rank, on_meta=True, watch=watch)
            on_meta = True
        except BuildError:
            log, fullest = _attempt(plan, rank, on_meta=False, watch=watch)
            on_meta = False
        if plan.rank is None and fullest:
            rank = fullest
            log, _ = _attempt(plan, rank, on_meta=on_meta, watch=watch)
    return log, rank


def _attempt(plan: "Plan", rank: int, *, on_meta: bool, watch: Watch | None) -> tuple[MemoryLog, int]:
    from workbench.estimate.building import build
    from workbench.estimate.dry import dry_run
    from workbench.estimate.refusals import refused
    from workbench.estimate.semantics_overrides import replaced
    from workbench.estimate.world import fake_world
    from workbench.train import checkpointing
    from workbench.train.layout import Layout
    from workbench.train.offload import Pretence, pretended
    from workbench.train.ranks import Ranks
    from workbench.train.trainer import Trainer, build_model

    spec = plan.spec.replace(gc=False, device="cpu", backend="auto")
    dealt = plan.gpu is not None and (spec.parallel in SHARDED or spec.tensor_parallel > 1)
    with fake_world(plan.world_size, rank, bucket_seen=lambda bucket: recorder.track(bucket, "bucket")) as here:
        ranks = Ranks(rank=here.rank, world_size=here.world_size, device=here.device, store=here.store)
        layout = Layout.of(spec, ranks)
        model = build(lambda: build_model(plan.task), on_meta=on_meta)
        with dry_run(plan.gpu) as run:
            recorder = run.recorder
            run.model(model)
            if not dealt:
                recorder.attach(model)
            with refused(recorder, model, plan.example), pretended(Pretence(born=recorder.leave_out, working=recorder.pause)):
                with run.host(model) if dealt else contextlib.nullcontext():
                    trainer = Trainer(spec, plan.task, ranks, module=model, loader=NO_LOADER, layout=layout, alone=plan.own_loop)
                recorder.attach(trainer.module)
                trainer.phase = recorder.phase
                with (
                    recorder.hooks(),
                    replaced(checkpointing, "recomputing", recorder.whose.inside),
                    watch() if watch else contextlib.nullcontext(),
                ):
                    _drive(trainer, run, plan)
            recorder.recognise_unsharded(trainer.module)
            recorder.close()
            fullest = _fullest(trainer.optimizer)
    recorder.log.notes += _notes(plan)
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
    """The rank that has most of an optimizer's states; whole parameters are dealt out by ZeroRedundancyOptimizer."""
    deal = getattr(optimizer, "_partition_parameters", None)
    if deal is None:
        return 0
    parts = [sum(weight.numel() for group in part for weight in group["params"]) for part in deal()]
    return parts.index(max(parts))


def _notes(plan: "Plan") -> list[str]:
    notes = []
    if how := getattr(plan.task.loss, "how", ""):
        notes.append(f"no loss was given: taken is {how}")
    if plan.device == "cuda":
        notes.append('device="cuda" is any GPU: what lies outside of the allocator is a range; a name, such as "H200", narrows it')
    elif plan.device != "cpu" and not is_known(plan.device):
        notes.append(
            f"no {plan.device} has been calibrated: what lies outside of the allocator is the range of any GPU (workbench calibrate)"
        )
    return notes
