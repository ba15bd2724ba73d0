"""batch_plan: recommends a batch, learning rate and warm-up from memory, throughput and gradient noise, each number with its reason.

It returns a `ProposedPlan`, a BatchPlan with its predicted gain; `prove_plan` trains by it and by the plan before, and compares.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.proof import Gain, LossCurve, PlanProof
from workbench.batch.analysis.scaled_lr import number
from workbench.batch.analysis.throughput import (
    SLACK,
    BatchCandidate,
    Throughput,
    best_candidate,
    candidates,
    relative_sample_worth,
    steady_step,
)
from workbench.batch.facts import (
    STAYS,
    TaskFacts,
    check_batch,
    checked_number,
    extrapolation_note,
    largest_micro_batch,
    limit_warmup,
    memory_only,
    noise_of,
    throughput_for,
)
from workbench.batch.throughput_sweep import START
from workbench.core import codec, units
from workbench.core.checks import check_budget, whole_number
from workbench.core.device import Device
from workbench.core.display import table as display
from workbench.core.progress import Waiting
from workbench.core.synonyms import accept_synonyms
from workbench.core.system_load import LoadMeter
from workbench.runs.failure import RunError
from workbench.runs.launch.sweep import run_all
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.target import read_spec
from workbench.runs.training_knobs import UNEVALUATED

PROOF_STEPS = 200
"""Optimizer steps of the old plan in a proof."""
POINTS = 25
"""Windows in which the losses of a run are averaged: the same number of samples in each, so that both curves are equally smooth."""
EXTRA_SAMPLES, MAX_EXTRA_SAMPLES = 1.5, 10.0
"""The new plan runs this many times as long as predicted, but at most the second many times the old plan's samples."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProposedPlan(BatchPlan):
    """What `batch_plan` recommends. It is a BatchPlan: `spec.replace(**proposed.changes())` is the changed spec."""

    spec: RunSpec
    """The spec that it was made for."""
    before: BatchPlan
    """The plan of this spec."""
    throughput: Throughput | None = None
    """Samples per second against the micro-batch; None = not known."""
    noise: float | None = None
    """The noise scale or critical batch that was used, in samples; None = not known."""
    time_range: tuple[float, float] | None = None
    """Of the predicted time over that of the plan before, at both ends of the noise scale's interval; None = it was given without one."""
    candidates: tuple[BatchCandidate, ...] = ()
    """The plans that it was chosen from."""
    proof: PlanProof | None = None
    """The proof, with `batch_plan(…, prove=True)`."""

    @property
    def predicted(self) -> Gain:
        """The predicted gain over the plan before."""
        speeds = [self._rate(plan) for plan in (self.before, self)]
        worths = [relative_sample_worth(plan.global_batch, self.noise) for plan in (self.before, self)]
        return Gain(throughput=speeds[1] / speeds[0], samples=worths[0] / worths[1])

    def prove(
        self,
        *,
        steps: int | None = None,
        seeds: Sequence[int] = (0, 1),
        budget_s: float | None = 60.0,
        runs_dir: str | os.PathLike[str] | None = None,
    ) -> PlanProof:
        """Train by this plan and by the one before, interleaved; see `prove_plan`.

        Args:
            steps: optimizer steps of the plan before; None = as many as fit the budget by the predicted throughput, from 25 to 200.
            seeds: each plan runs once with each.
            budget_s: seconds, about, after which no further training begins; None = no limit. The seeds with which both plans were
                trained by then, or by Ctrl-C, are compared, one at least.
            runs_dir: where run directories go; None = `runs` in the current folder.

        Raises:
            ValueError: no steps, no seeds, or the plan is the one before.
            RunError: a run failed.
            TimeoutError: the budget ended, or Ctrl-C came, after one plan was trained; KeyboardInterrupt: it came before.
        """
        check_budget(budget_s)
        if self.changes() == self.before.changes():
            raise ValueError("there is nothing to prove: the plan is the one that the spec has")
        steps = self._fitting(budget_s, max(1, len(seeds))) if steps is None else steps
        about: dict[str, Any] = {"against": self.before, "predicted": self.predicted, "budget_s": budget_s, "runs_dir": runs_dir}
        return prove_plan(self.spec, self, steps=steps, seeds=seeds, **about)

    def _rate(self, plan: BatchPlan) -> float:
        """Samples per second by a plan; nan = not known."""
        if self.throughput is None:
            return math.nan
        return self.throughput.samples_per_sec(micro_batch=plan.micro_batch, accumulation=plan.accumulation, world_size=plan.world_size)

    def _fitting(self, budget_s: float | None, seeds: int) -> int:
        """Steps of the plan before, of a proof that fits a budget."""
        if budget_s is None:
            return PROOF_STEPS
        rates = [self._rate(plan) for plan in (self.before, self)]
        seconds = self.before.global_batch * (1 / rates[0] + _stretch(self.predicted) / rates[1]) * seeds  # of each step
        return PROOF_STEPS if math.isnan(seconds) else int(min(PROOF_STEPS, max(POINTS, (budget_s - START) / seconds)))

    @property
    def word(self) -> str:
        """Whether the plan is worth it, by its predicted gain, in a line."""
        if self.changes() == self.before.changes():
            return "Nothing to change: no other plan is predicted to be faster by more than throughput varies"
        gain = self.predicted
        if math.isnan(gain.throughput):
            return "Not known whether it is worth it: there is no throughput"
        speed = f"{units.times(gain.throughput)} the samples per second of the present plan"
        if math.isnan(gain.samples):
            return f"{speed}, predicted; how much samples are worth in a batch of {self.global_batch:,} is not known without a noise scale"
        low, high = self.time_range or (gain.time, gain.time)
        verdict = "Worth it" if high < 1 else "Not worth it" if low >= 1 else "Not clear whether it is worth it"
        ends = [*dict.fromkeys(map(units.times, self.time_range or ()))]
        between = f" ({' … '.join(ends)}, by the interval of the noise scale)" if len(ends) > 1 else ""
        to_loss = f"{units.times(gain.samples)} the samples to the same loss, {units.times(gain.time)} the time"
        return f"{verdict}, by prediction: {speed}, {to_loss}{between}"

    def __str__(self) -> str:
        return f"{self.word}\n\n{self.table}"

    def _repr_html_(self) -> str:
        return f"<p>{display.escape(self.word)}</p>{self.table._repr_html_()}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, without the candidates."""
        return {item.name: codec.to_json(getattr(self, item.name)) for item in dataclasses.fields(self) if item.name != "candidates"}

    def __repr__(self) -> str:
        return BatchPlan.__repr__(self).replace("BatchPlan", "ProposedPlan", 1)


@accept_synonyms
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
    budget_s: float | None = 60.0,
    runs_dir: str | os.PathLike[str] | None = None,
) -> ProposedPlan:
    """Recommend micro_batch × accumulation × world_size, a learning rate and a warm-up, each number with its reason.

    A loss is reached soonest at the batch B that maximises samples per second × 1/(1 + B/B_noise), the worth of a sample (McCandlish et al.
    2018; goodput in Pollux). The largest micro-batch that fits comes from the memory estimate, samples per second from a short sweep over
    micro-batches, the noise scale from a run. What is given as an argument is not measured.

    Args:
        spec: the present plan: its batch, its ranks and its learning rate, which should be tuned.
        world_size: number of ranks that work on different samples; None = the spec's own.
        device: the device whose memory limits the micro-batch: a name, such as "A100-80GB", a Device, or "cpu", this machine's memory in
            equal shares for the ranks; None = memory is not considered.
        largest: the largest micro-batch, if it is known; takes precedence over `device`.
        global_batch: required samples per step; None = the best.
        noise_scale: in samples, or what `wb.noise_scale` gave; None = measured here; False = not measured, and the batch stays.
        steps: a StepsToTarget or its fit, whose critical batch takes precedence over the noise scale.
        throughput: a Throughput, a mapping from micro-batch to samples per second of all the spec's ranks, or the runs of a sweep; None =
            measured here.
        rule: for the learning rate; see `wb.scale_lr`.
        prove: also train with both plans; `ProposedPlan.prove` does so later.
        budget_s: approximate seconds for the measurements; None = no limit. When they are over, or at Ctrl-C, the plan uses what is known
            so far, and its notes say what is less certain. A proof takes as long again.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        ValueError: nothing fits, the batch cannot be divided among ranks and micro-batches or is larger than the dataset, or a number is
            out of range.
        RunError: a launched measurement failed; its run directory stays.
    """
    spec = read_spec("batch_plan", spec, because="whose task can be run")
    ranks = checked_number("world_size", world_size, spec.data_ranks)
    check_budget(budget_s, error=SpecError)
    measured = Waiting("batch_plan", budget_s, begin=_announcement(noise_scale, steps, throughput))
    measured.tick()
    task = TaskFacts.of(spec)
    old = task.plan(spec)
    check_batch(global_batch, ranks, task.dataset_size)
    limit, why_limit = largest_micro_batch(spec, device, largest, ranks)
    meter = LoadMeter()
    with measured as line:
        noise, noise_name, doubt, interval = noise_of(spec, noise_scale, steps, runs_dir, line)
    if noise is None and global_batch is None:
        global_batch = max(1, round(old.global_batch / ranks)) * ranks
        if global_batch != old.global_batch:
            doubt = doubt.replace(STAYS, f"{STAYS} as near to {old.global_batch:,} as {ranks} ranks divide it, {global_batch:,}")
    with measured as line:
        curve = throughput_for(spec, throughput, ranks, limit, task.dataset_size, global_batch, noise, runs_dir, line)
    busy = meter.crowding() if throughput is None else ""
    meter.close()
    allowed = candidates(curve, world_size=ranks, noise=noise, largest=limit, most=task.dataset_size, batch=global_batch)
    if not allowed:
        raise SpecError(
            f"no batch of {ranks} ranks is left: throughput is known at micro-batches {', '.join(map(str, curve.micro_batches))}, at most "
            f"{limit or 'any'} fit, and the dataset has {task.dataset_size} samples; try fewer ranks or smaller micro-batches"
        )
    chosen = _present_if_best(old, allowed, noise) or best_candidate(allowed)
    critical: dict[str, Any] = {"critical_batch" if noise_name.startswith("critical") else "noise_scale": noise}
    scaled = old.scaled_to(
        global_batch=chosen.global_batch,
        world_size=ranks,
        micro_batch=chosen.micro_batch,
        rule=rule,
        dataset_size=task.dataset_size,
        **critical,
    )
    full_warmup, scaled = scaled.warmup_steps, limit_warmup(scaled, old, spec.steps * old.global_batch)
    reasons = _reasons(old, chosen, allowed, noise_name, why_limit, curve, fixed=global_batch is not None)
    notes = [
        "" if why_limit else "memory is not considered: give device=, such as device='H100'",
        memory_only(spec, device) if throughput is None else "",
        doubt,
        f"the machine was busy: {busy}. The samples per second, and the plan, may be others when it is quiet" if busy else "",
        *(curve.notes if throughput is None else ()),
        extrapolation_note(curve, ranks),
        "" if world_size or ranks == 1 else _tuned_for(old),
        _warmup_note(spec, old, scaled, full_warmup),
        *scaled.notes,
    ]
    scaled = dataclasses.replace(scaled, reasons={**scaled.reasons, **reasons}, notes=tuple(filter(None, notes)))
    plan = ProposedPlan(
        **{item.name: getattr(scaled, item.name) for item in dataclasses.fields(scaled)},
        spec=spec,
        before=old,
        throughput=curve,
        noise=noise,
        candidates=tuple(allowed),
    )
    if interval:
        samples = [relative_sample_worth(old.global_batch, end) / relative_sample_worth(plan.global_batch, end) for end in interval]
        times = sorted(Gain(throughput=plan.predicted.throughput, samples=each).time for each in samples)
        plan = dataclasses.replace(plan, time_range=(times[0], times[1]))
    return dataclasses.replace(plan, proof=plan.prove(budget_s=budget_s, runs_dir=runs_dir)) if prove else plan


def _tuned_for(old: BatchPlan) -> str:
    """What a learning rate without world_size= is taken for."""
    return (
        f"the spec's learning rate of {number(old.lr)} is taken as tuned for global batch {old.global_batch:,} on {old.world_size} ranks; "
        f"if it was tuned on fewer, give world_size={old.world_size} with the spec of those"
    )


def _announcement(noise_scale: Any, steps: Any, throughput: Any) -> str:
    """What will be measured."""
    parts = ["the noise scale"] if noise_scale is None and steps is None else []
    parts += ["throughput at several micro-batches"] if throughput is None else []
    return f"measuring {' and '.join(parts)}" if parts else "planning"


def _warmup_note(spec: RunSpec, old: BatchPlan, new: BatchPlan, full: int) -> str:
    """A note on a warm-up that was cut, or that takes much of the run; else empty."""
    steps = max(1, spec.steps * old.global_batch // new.global_batch)
    share = f"longer than the {steps:,}" if full > steps else f"{units.percent(full / steps)} of the {steps:,}"
    note = f"a warm-up of {full:,} steps would be {share} that make up the spec's samples"
    if full > new.warmup_steps:
        return f"{note}: it is cut to {new.warmup_steps:,}; if the loss is unstable at the start, train longer, or take a smaller batch"
    return f"{note}, as long as before: train longer, or shorten it" if 2 * full > steps else ""


def _present_if_best(old: BatchPlan, candidates: list[BatchCandidate], noise: float | None) -> BatchCandidate | None:
    """The present plan, if it is a candidate and none is faster by more than SLACK."""
    present = (old.micro_batch, old.accumulation, old.world_size)
    speeds = {
        (plan.micro_batch, plan.accumulation, plan.world_size): plan.samples_per_sec if noise is None else plan.useful
        for plan in candidates
    }
    if speeds.get(present, -math.inf) < (1 - SLACK) * max(speeds.values()):
        return None
    return next(plan for plan in candidates if (plan.micro_batch, plan.accumulation, plan.world_size) == present)


def _reasons(
    old: BatchPlan, chosen: BatchCandidate, candidates: list[BatchCandidate], noise_name: str, limit: str, curve: Throughput, *, fixed: bool
) -> Mapping[str, str]:
    known = ", ".join(f"{micro:,}" for micro in curve.micro_batches)
    itself = (chosen.micro_batch, chosen.accumulation, chosen.world_size) in {(micro, 1, curve.world_size) for micro in curve.micro_batches}
    rate = f"{units.rate(chosen.samples_per_sec)} in all ({curve.kind if itself else f'predicted from micro_batch {known}, {curve.kind}'})"
    if fixed or math.isnan(chosen.worth):
        why = f"{rate}, " + (
            f"the fastest way to make this batch with micro_batch up to {curve.micro_batches[-1]:,} ({curve.kind}: {known})"
            if len(curve.micro_batches) > 1
            else f"the largest divisor of a rank's samples up to {known}: no micro_batch but {known} was {curve.kind}"
        )
    else:
        top = max(candidates, key=lambda plan: plan.useful)
        why = f"{rate}; with a {noise_name}, a sample in a batch of {chosen.global_batch:,} "
        why += f"is worth {units.percent(chosen.worth)} of one in a tiny batch"
        if top.global_batch > chosen.global_batch:
            why += f"; a batch of {top.global_batch:,} gains {units.percent(top.useful / chosen.useful - 1)}, too little to recommend it"
    accumulation = "one micro-batch is enough"
    if chosen.accumulation > 1:
        accumulation = (
            f"{units.seconds(curve.per_step)} of a step are spent once" if curve.per_step and not fixed else "to make up the batch"
        )
    ranks = "as before" if chosen.world_size == old.world_size else "as requested"
    return {"micro_batch": "; ".join(filter(None, [why, limit])), "accumulation": accumulation, "world_size": ranks}


def prove_plan(
    spec: RunSpec,
    plan: BatchPlan,
    *,
    against: BatchPlan | None = None,
    predicted: Gain | None = None,
    steps: int = PROOF_STEPS,
    seeds: Sequence[int] = (0, 1),
    budget_s: float | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
) -> PlanProof:
    """Train by both plans, interleaved (A B B A), and compare: loss after the same samples, samples per second, time to the same loss.

    Learning rates stay constant after the warm-up: a schedule would end at different places. The warm-ups are those of the plans; in a
    proof that is shorter than the spec's run they are shortened as much.

    Args:
        spec: what is trained; its batch and learning rate come from the plans.
        plan: the new plan, which is to be proved.
        against: the old one; None = the plan that the spec has.
        predicted: the predicted gain; None = unknown, and the new plan runs as long as the old one.
        steps: optimizer steps of the old plan; the new one takes as many samples, or more where they are predicted to be worth less.
        seeds: of model and data; each plan runs once with each.
        budget_s: as in `ProposedPlan.prove`.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        ValueError: no steps, no seeds, or equal ones.
        RunError: a run failed; the run directories stay.
        TimeoutError, KeyboardInterrupt: as in `ProposedPlan.prove`.
    """
    whole_number("steps", steps, least=POINTS, also=": the loss needs some steps to fall")
    if not seeds:
        raise ValueError("seeds=(): at least one seed is needed, such as seeds=(0, 1)")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={tuple(seeds)}: with an equal seed a plan trains the same again: try different ones, such as seeds=(0, 1)")
    against = TaskFacts.of(spec).plan(spec) if against is None else against
    predicted = predicted or Gain()
    samples = steps * against.global_batch
    lengths = {"old": steps, "new": math.ceil(_stretch(predicted) * samples / plan.global_batch)}
    plans = {"old": against, "new": plan}
    specs = {name: _spec(spec, plans[name], lengths[name], min(1.0, steps / spec.steps)) for name in plans}
    order = [(name, seed) for index, seed in enumerate(seeds) for name in (("old", "new") if index % 2 == 0 else ("new", "old"))]
    named = [(f"{name} plan, seed {seed}", specs[name].replace(seed=seed)) for name, seed in order]
    runs = run_all(named, "prove", budget_s=budget_s, runs_dir=runs_dir)
    for run in runs:
        if run.error:
            raise RunError(run.error)
    done = {place: run for run in runs for place, (_, spec) in enumerate(named) if run.spec == spec}
    pairs = [place for place in range(len(order)) if {place, place ^ 1} <= done.keys()]  # both plans, with the same seed
    cut = f"{len(runs)} of {len(order)} trainings were done in time" if len(runs) < len(order) else ""
    if not pairs:
        raise TimeoutError(f"{cut}, and both plans are needed: try fewer steps, or a larger budget_s than {budget_s}")
    window = samples / max(1, min(POINTS, samples // max(plan.global_batch, against.global_batch)))
    curves = [_loss_curve(done[place], *order[place], window) for place in pairs]
    notes = [cut, *(_cut_warmup(name, plans[name], specs[name], steps / spec.steps) for name in plans)]
    return PlanProof(
        old=against, new=plan, predicted=predicted, samples=samples, courses=tuple(curves), notes=tuple(note for note in notes if note)
    )


def _stretch(predicted: Gain) -> float:
    """How many times the old plan's samples the new one takes."""
    return min(MAX_EXTRA_SAMPLES, EXTRA_SAMPLES * max(1.0, predicted.samples)) if math.isfinite(predicted.samples) else 1.0


def _spec(spec: RunSpec, plan: BatchPlan, steps: int, share: float) -> RunSpec:
    changes: dict[str, Any] = {**plan.changes(), "steps": steps, "schedule": "constant", **UNEVALUATED}
    return spec.replace(**{**changes, "warmup_steps": math.ceil(share * plan.warmup_steps - 1e-9)})


def _cut_warmup(name: str, plan: BatchPlan, spec: RunSpec, share: float) -> str:
    note = ""
    if spec.warmup_steps != plan.warmup_steps:
        note = (
            f"the {name} plan's warm-up of {plan.warmup_steps} steps was cut to {spec.warmup_steps}, since this proof has "
            f"{units.percent(share)} of the samples of the spec's run"
        )
    if spec.warmup_steps < spec.steps:
        return note
    return "; ".join(filter(None, [note, f"the {name} plan's warm-up does not end within the {spec.steps} steps of this proof"]))


def _loss_curve(run: Run, plan: str, seed: int, window: float) -> LossCurve:
    rate = run.spec.global_batch / steady_step(run) if isinstance(run.spec, RunSpec) else math.nan
    return LossCurve.of(run.metric_rows, window, plan=plan, seed=seed, samples_per_sec=rate)
