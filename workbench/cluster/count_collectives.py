"""`collectives`: counts the collectives of a training step of your own module, in a dry run of one rank among many."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from workbench.cluster.analysis.collective_call import CollectiveCall
from workbench.cluster.analysis.traffic import Traffic
from workbench.core.synonyms import accept_synonyms
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task
from workbench.runs.training_knobs import COMPRESSIONS, averaging_at_once, parse_call, parse_local_sgd

if TYPE_CHECKING:
    from workbench.cluster.estimate.collectives import CollectiveRecorder
    from workbench.memory.estimate.plan import Plan
    from workbench.train.ranks import Layout
    from workbench.train.trainer import Trainer


_NO_LOADER: Any = SimpleNamespace(pin_memory=False)
"""Substitute for a Trainer's loader: batches are made here."""


@accept_synonyms
def collectives(
    target: "RunSpec | Task | Callable[[], Any] | Any",
    batch: Any = None,
    *,
    world_size: int | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: str | Callable[[Any], Any] | None = None,
    sequence: int | None = None,
    image: int | None = None,
    **knobs: Any,
) -> Traffic:
    """List every collective of one rank's optimizer step, with its bytes, its module and its ranks; no hardware is needed.

    For a pipeline, the list includes the messages between stages ("send", "recv"), on the rank whose stages send most.

    The Trainer of real runs runs with torch's own DDP, FSDP2, ZeroRedundancyOptimizer and DTensor, on fake tensors and a fake process
    group. So counts and bytes are those of a real step (of the second and later steps, since DDP's first step has other buckets). It takes
    seconds, whatever the number of ranks.

    Args:
        target: a RunSpec, a Task, a function that builds a model, or a model (which is not changed).
        batch: for a model or a function: tensors in a tuple, a list or a dict. For a RunSpec or Task: None = samples of its dataset.
        world_size: ranks, 1 to 8192; None = the spec's nproc_per_node.
        loss: with a model or function: `loss(model, batch)` → a tensor with one number.
        optimizer: a name with options, or a function of the parameters; None = the spec's or task's own, "adamw" for a model.
        sequence: length of the batch's sequences, instead of the sample's own.
        image: side of the batch's images in pixels, instead of the sample's own.
        **knobs: fields of a RunSpec, such as parallel="fsdp", precision="amp_bf16", tensor_parallel=8, accumulation=4, bucket_cap_mb=100.

    Raises:
        ValueError: something else was given; an unknown knob or value; or the program cannot run without values. The message says where,
            what is allowed and what to try.
    """
    from workbench.memory.estimate.plan import plan_of

    plan = plan_of(
        target,
        batch,
        loss=loss,
        optimizer=optimizer,
        device="cpu",
        steps=1,
        world_size=world_size,
        sequence=sequence,
        image=image,
        asked="collectives",
        **knobs,
    )
    return collectives_of_plan(plan)


def collectives_of_plan(plan: "Plan") -> Traffic:
    """The collectives of a dry run's plan.

    Raises:
        ValueError: the program cannot run without values.
    """
    from workbench.core.gc import RECENT, collected_before
    from workbench.core.interrupts import defer_interrupts
    from workbench.memory.estimate.building import BuildError
    from workbench.memory.estimate.dry_run import kept_state

    with defer_interrupts(), collected_before(RECENT), kept_state():
        stages = plan.spec.pipeline_parallel
        ranks = range(0, plan.world_size, plan.world_size // stages)  # the first of each stage
        try:
            counted = [_count(plan, rank, on_meta=True) for rank in ranks]
        except BuildError:
            counted = [_count(plan, rank, on_meta=False) for rank in ranks]
    most = max(counted, key=Traffic.sent)
    if stages == 1:
        return most
    said = f"rank {ranks[counted.index(most)]} is shown: of the {stages} ranks of a pipeline it sends most"
    return replace(most, notes=(said, *most.notes))


def _count(plan: "Plan", rank: int, *, on_meta: bool) -> Traffic:
    from workbench.cluster.estimate.collectives import gradient_order
    from workbench.memory.estimate.building import build
    from workbench.memory.estimate.cuda.overrides import replaced
    from workbench.memory.estimate.dry_run import dry_run
    from workbench.memory.estimate.errors import estimate_errors
    from workbench.memory.estimate.fake_process_group import fake_process_group
    from workbench.memory.estimate.lightning_module import trained
    from workbench.train import activation_checkpointing
    from workbench.train.blocks import find_blocks
    from workbench.train.offload import DryRunHooks, offloading_dry_run
    from workbench.train.ranks import Layout, Ranks
    from workbench.train.trainer import Trainer, build_model

    spec = plan.spec.replace(gc=False, tf32=None, device="cpu", backend="auto", find_unused_parameters=False, compile="none")
    later = {"local_sgd": averaging_at_once(spec), "schedule": "constant", "static_graph": False, "gradient_compression": "none"}
    spec = spec.replace(**later)  # its first step is unlike later ones, whose buckets are computed
    on_bucket: list[Callable[[Any], None]] = []  # set when the recorder exists; called with DDP's buckets
    with fake_process_group(plan.world_size, rank, bucket_seen=lambda bucket: on_bucket[-1](bucket) if on_bucket else None) as here:
        ranks = Ranks(rank=here.rank, world_size=here.world_size, device=here.device, store=here.store)
        layout = Layout.of(spec, ranks)
        model = build(lambda: build_model(plan.task), on_meta=on_meta)
        whole = sum(weight.numel() for weight in model.parameters())
        blocks = len(find_blocks(model))
        with dry_run(None) as run, run.recorder.pause():
            recorder = run.recorder
            run.model(model)
            plan = replace(plan, task=trained(plan.task, model))
            recorder.attach(model)
            passed = run.between_stages(model, plan.task, spec, plan.example) if spec.pipeline_parallel > 1 else None
            with (
                estimate_errors(recorder, model, plan.example),
                offloading_dry_run(DryRunHooks(on_host=recorder.leave_out, host_computes=recorder.pause)),
            ):
                trainer = Trainer(
                    spec, plan.task, ranks, module=model, loader=_NO_LOADER, layout=layout, alone=plan.own_loop, passed=passed
                )
                recorder.attach(trainer.module)
                with recorder.hooks(), replaced(activation_checkpointing, "recomputing", recorder.tracker.inside):
                    collector = _collector(trainer, layout, recorder)
                    if trainer.pipeline:
                        trainer.pipeline.announce = collector.announce
                    on_bucket.append(lambda bucket: collector.bucket(bucket, layout.data))
                    with collector, gradient_order(trainer.module) as order:
                        unused = _run_step(trainer, run, plan, collector)
                    on_bucket.clear()
            calls = _calls_of_later_steps(trainer, collector, order, layout, plan.spec)
    return Traffic(
        calls=tuple(calls),
        world_size=plan.world_size,
        parameters=whole,
        title=plan.title,
        parallel=spec.parallel,
        blocks=blocks,
        unused=unused,
        looks_for_unused=plan.spec.find_unused_parameters or (plan.spec.static_graph and bool(unused)),
        notes=(*recorder.log.notes, *_notes(plan.spec)),
    )


def _collector(trainer: "Trainer", layout: "Layout", recorder: Any) -> "CollectiveRecorder":
    from workbench.cluster.estimate.collectives import CollectiveRecorder

    names = {id(part): name for name, part in trainer.module.named_modules()}
    axes: list[tuple[str, Any]] = [("tensor", layout.tensor.get_group())] if layout.tensor is not None else []
    if layout.pipeline is not None:
        axes += [("pipeline", layout.pipeline)]
    if layout.experts is not None:
        axes += [("copy", layout.experts.get_group(0)), ("expert", layout.experts.get_group(1))]
    if layout.replicas is not None:
        dims = layout.replicas.mesh_dim_names or ("shard",)
        axes += [("replica" if name == "replica" else "shard", layout.replicas.get_group(axis)) for axis, name in enumerate(dims)]

    def module_at_work() -> str:
        tracker = recorder.tracker
        return str(tracker.backward()[0] if collector.phase == "backward" else tracker.forward)

    collector = CollectiveRecorder(module_at_work, lambda part: names.get(id(part), ""), axes)
    return collector


def _run_step(trainer: "Trainer", run: Any, plan: "Plan", collector: "CollectiveRecorder") -> tuple[str, ...]:
    """Take one optimizer step; returns the names of parameters that got no gradient."""

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        collector.phase = name
        with run.recorder.phase(name):
            yield

    trainer.phase = phase
    for micro in range(plan.spec.accumulation):
        collector.micro = micro
        trainer.micro_step(run.batch(plan.example), last=micro == plan.spec.accumulation - 1)
    unused = tuple(name for name, weight in trainer.module.named_parameters() if weight.requires_grad and weight.grad is None)
    trainer.update()
    return unused


def _calls_of_later_steps(
    trainer: "Trainer", collector: "CollectiveRecorder", order: Sequence[Any], layout: "Layout", spec: RunSpec
) -> list[CollectiveCall]:
    """The collectives of a later step; those during which nothing is computed are marked as waited for."""
    from workbench.cluster.estimate.collectives import with_rebuilt_buckets

    names = {id(weight): name for name, part in trainer.module.named_modules() for weight in part.parameters(recurse=False)}
    like, options = collector.reduced(0, layout.data), parse_local_sgd(spec.local_sgd)
    if period := options["period"]:
        like = collector.reduced(0, layout.neighbours)
        averages = [
            replace(call, size=round(call.size / period), every=period) if call.phase == "optimizer" else call for call in collector.calls
        ]
        collector.calls[:] = averages
    buckets: dict[str, Any] = {"like": like, "find_unused": spec.find_unused_parameters, "static_graph": spec.static_graph}
    buckets["compression"] = spec.gradient_compression
    models = trainer.pipeline.called if trainer.pipeline else [trainer.model]
    calls = with_rebuilt_buckets(collector.calls, collector.buckets, models, order, names, **buckets)
    if period and options["local_ranks"] == 1:
        calls = [call for call in calls if call.phase != "backward" or call.kind != "all_reduce"]
    return mark_waited(calls)


def _notes(spec: RunSpec) -> list[str]:
    if spec.gradient_compression != "none":
        _, how = parse_call("gradient_compression", spec.gradient_compression, COMPRESSIONS, "fp16")
        after = f"a step after the first {how['start']:,}; " if "start" in how else ""
        return [f'gradient_compression="{spec.gradient_compression}": {after}bytes are those sent; the time to compress is not predicted']
    options = parse_local_sgd(spec.local_sgd)
    if not (period := options["period"]):
        return []
    first = f"a step after the first {options['start']:,}; " if options["start"] else ""
    often = f"averaged once in {period} steps, and each step is counted with 1/{period} of their bytes and seconds"
    return [f'local_sgd="{spec.local_sgd}": {first}parameters are {often}']


def mark_waited(calls: Sequence[CollectiveCall]) -> list[CollectiveCall]:
    """Mark the collectives that the rank has to wait for.

    FSDP2 gathers one block ahead and reduces asynchronously, so that it waits for the first gather of a forward and for the last reductions
    of a backward; DDP waits for a forward's broadcast of buffers, and the ranks of a pipeline for the loss that its last stage tells them.
    Experts wait for the tokens that are exchanged, and their gradients are reduced over their copies after the backward.
    """
    waited: set[int] = set()
    first: set[int] = set()
    last: dict[tuple[int, str], int] = {}
    for index, call in enumerate(calls):
        told = call.kind == "broadcast" and (call.phase == "forward" or call.axis == "pipeline")
        if call.kind == "all_to_all" or call.axis == "copy" or told:
            waited.add(index)
        if call.phase == "forward" and call.kind == "all_gather" and call.axis == "shard" and call.micro not in first:
            first.add(call.micro)
            waited.add(index)
        if call.phase == "backward" and call.axis in ("shard", "replica") and call.kind in ("reduce_scatter", "all_reduce"):
            last[call.micro, call.kind] = index
    waited |= set(last.values())
    return [replace(call, waited=True) if index in waited else call for index, call in enumerate(calls)]
