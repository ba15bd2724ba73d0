"""Planning: from memory, throughput and noise to a batch, a learning rate and a warm-up, each with its reason."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from workbench.batch.analysis.choose_plan import SLACK, Candidate, best, candidates
from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.throughput import Throughput
from workbench.batch.facts import STAYS, Subject, check_batch, largest_of, naive, noise_of, throughput_of, whole, within
from workbench.batch.proposal import ProposedPlan, rebuilt
from workbench.core import units
from workbench.core.device import Device
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.target import check_spec


def batch_plan(
    spec: RunSpec,
    *,
    world_size: int | None = None,
    device: str | Device | None = None,
    largest: int | None = None,
    global_batch: int | None = None,
    noise_scale: Any = None,
    steps: Any = None,
    throughput: Any = None,
    rule: str = "auto",
    prove: bool = False,
    runs_dir: str | os.PathLike[str] | None = None,
) -> ProposedPlan:
    """Recommend micro_batch × accumulation × world_size, a learning rate and a warm-up, each number with its reason.

    A loss is reached soonest where samples per second, each counted by its worth 1/(1 + B/B_noise), are most (McCandlish and others 2018;
    Pollux calls it goodput). So: the largest micro-batch that fits comes from the memory estimate, samples per second from a short sweep
    over micro-batches, the noise scale from a run; whatever is given is not measured.

    Args:
        spec: the plan before: its batch, its ranks and its learning rate, which should be a tuned one.
        world_size: ranks that will work on different samples; None = as many as the spec has.
        device: whose memory sets the largest micro-batch: a name, such as "A100-80GB", or a Device; None = memory is not looked at.
        largest: the largest micro-batch, if it is known; goes before `device`.
        global_batch: samples per step that it has to be; None = what is best.
        noise_scale: in samples, or what `wb.noise_scale` gave; None = it is measured here; False = it is not, and the batch stays.
        steps: a StepsToTarget or its fit, whose critical batch goes before the noise scale.
        throughput: a Throughput; micro-batch → samples per second of all ranks of the spec; runs of a sweep; None = it is measured here.
        rule: for the learning rate; see `wb.scale_lr`.
        prove: train by both plans at once; see `ProposedPlan.prove`, which does so later.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        ValueError: nothing fits, the batch cannot be divided so or is above the dataset, or a number that is none.
        RunError: a measurement failed in its launch; its run directory stays.
    """
    check_spec("batch_plan", spec, because="whose task can be run")
    ranks = whole("world_size", world_size, spec.data_ranks)
    subject = Subject.of(spec)
    old = subject.plan(spec)
    check_batch(global_batch, ranks, subject.dataset_size)
    limit, why_limit = largest_of(spec, device, largest, ranks)
    noise, source, doubt = noise_of(spec, noise_scale, steps, runs_dir)
    if noise is None and global_batch is None:
        global_batch = _kept(old, ranks)
        if global_batch != old.global_batch:
            doubt = doubt.replace(STAYS, f"{STAYS} as near to {old.global_batch:,} as {ranks} ranks divide it, {global_batch:,}")
    curve = throughput_of(spec, throughput, ranks, limit, subject.dataset_size, global_batch, runs_dir)
    found = candidates(curve, world_size=ranks, noise=noise, largest=limit, most=subject.dataset_size, batch=global_batch)
    if not found:
        raise SpecError(
            f"no batch of {ranks} ranks is left: throughput is known at micro-batches {', '.join(map(str, curve.micro_batches))}, at most "
            f"{limit or 'any'} fit, and the dataset has {subject.dataset_size} samples; try fewer ranks or smaller micro-batches"
        )
    chosen = _stay(old, found, noise) or best(found)
    critical: dict[str, Any] = {"critical_batch" if source.startswith("critical") else "noise_scale": noise}
    scaled = old.scaled_to(
        global_batch=chosen.global_batch,
        world_size=ranks,
        micro_batch=chosen.micro_batch,
        rule=rule,
        dataset_size=subject.dataset_size,
        **critical,
    )
    wanted, scaled = scaled.warmup_steps, within(scaled, old, spec.steps * old.global_batch)
    reasons = _reasons(old, chosen, found, source, why_limit, curve, fixed=global_batch is not None)
    plan = rebuilt(
        dataclasses.replace(
            scaled,
            reasons={**scaled.reasons, **reasons},
            notes=tuple(filter(None, [doubt, naive(curve, ranks), _too_short(spec, old, scaled, wanted), *scaled.notes])),
        ),
        spec=spec,
        before=old,
        throughput=curve,
        noise=noise,
        candidates=tuple(found),
    )
    return dataclasses.replace(plan, proof=plan.prove(runs_dir=runs_dir)) if prove else plan


def _kept(old: BatchPlan, ranks: int) -> int:
    """The batch as it is, or the nearest that the ranks divide."""
    return max(1, round(old.global_batch / ranks)) * ranks


def _too_short(spec: RunSpec, old: BatchPlan, new: BatchPlan, wanted: int) -> str:
    """What to say of a warm-up that was cut, or that takes too much of the run as it was given."""
    steps = max(1, spec.steps * old.global_batch // new.global_batch)
    share = f"longer than the {steps:,}" if wanted > steps else f"{units.percent(wanted / steps)} of the {steps:,}"
    said = f"a warm-up of {wanted:,} steps would be {share} that make up the spec's samples"
    if wanted > new.warmup_steps:
        return f"{said}: it is cut to {new.warmup_steps:,}; if the loss is unstable at the start, train longer, or take a smaller batch"
    return f"{said}, as long as before: train longer, or shorten it" if 2 * wanted > steps else ""


def _stay(old: BatchPlan, found: list[Candidate], noise: float | None) -> Candidate | None:
    """The plan as it is, if it is among the candidates and none is faster by more than SLACK."""
    now = next(
        (
            one
            for one in found
            if (one.micro_batch, one.accumulation, one.world_size) == (old.micro_batch, old.accumulation, old.world_size)
        ),
        None,
    )
    if now is None:
        return None
    speeds = {id(one): one.samples_per_sec if noise is None else one.useful for one in found}
    return now if speeds[id(now)] >= (1 - SLACK) * max(speeds.values()) else None


def _reasons(
    old: BatchPlan, chosen: Candidate, found: list[Candidate], source: str, limit: str, curve: Throughput, *, fixed: bool
) -> Mapping[str, str]:
    rate = f"{units.rate(chosen.samples_per_sec)} in all ({curve.kind})"
    if fixed or math.isnan(chosen.worth):
        why = f"{rate}, the fastest way to make this batch"
    else:
        top = max(found, key=lambda one: one.useful)
        why = f"{rate}; with a {source}, a sample in a batch of {chosen.global_batch:,} "
        why += f"is worth {units.percent(chosen.worth)} of one in a tiny batch"
        if top.global_batch > chosen.global_batch:
            why += f"; a batch of {top.global_batch:,} gains {units.percent(top.useful / chosen.useful - 1)}, too little to ask for"
    accumulation = "all of them at once"
    if chosen.accumulation > 1:
        accumulation = (
            f"{units.seconds(curve.per_step)} of a step are spent once" if curve.per_step and not fixed else "to make up the batch"
        )
    ranks = "as before" if chosen.world_size == old.world_size else "as asked for"
    return {"micro_batch": "; ".join(filter(None, [why, limit])), "accumulation": accumulation, "world_size": ranks}
