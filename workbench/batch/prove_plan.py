"""Proving: a plan is run against the one it is to replace, in turns and with the same seeds, for the same number of samples."""

import math
import os
from collections.abc import Sequence
from typing import Any

from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.proof import Course, Gain, PlanProof
from workbench.batch.analysis.throughput import steady
from workbench.batch.facts import Subject
from workbench.core import units
from workbench.core.checks import whole_number
from workbench.runs.failure import RunError
from workbench.runs.launch.sweep import run_all
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

STEPS = 200
"""Optimizer steps of the old plan, where nobody says."""
POINTS = 25
"""Windows in which the losses of a run are averaged: the same number of samples in each, so that both curves are equally smooth."""
FURTHER = 1.5
"""How much longer the new plan runs than it is predicted to need; at most MOST times the old plan's samples."""
MOST = 10.0


def prove_plan(
    spec: RunSpec,
    plan: BatchPlan,
    *,
    against: BatchPlan | None = None,
    predicted: Gain | None = None,
    steps: int = STEPS,
    seeds: Sequence[int] = (0, 1),
    runs_dir: str | os.PathLike[str] | None = None,
) -> PlanProof:
    """Train by both plans, in turns (A B B A), and compare: loss after the same samples, samples per second, time to the same loss.

    Learning rates stay constant after the warm-up: a schedule would end at different places. The warm-ups are those of the plans; in a
    proof that is shorter than the spec's run they are shortened as much.

    Args:
        spec: what is trained; its batch and learning rate come from the plans.
        plan: the new one.
        against: the old one; None = the plan that the spec has.
        predicted: what is expected; None = nothing, and the new plan runs as long as the old one.
        steps: optimizer steps of the old plan; the new one takes as many samples, and more where they are predicted to be worth less.
        seeds: of model and data; each plan runs once with each.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        ValueError: no steps, or no seeds.
        RunError: a run failed; the run directories stay.
    """
    whole_number("steps", steps, least=POINTS, also=": the loss needs some steps to fall")
    if not seeds:
        raise ValueError("seeds=(): at least one seed is wanted, such as seeds=(0, 1)")
    against = Subject.of(spec).plan(spec) if against is None else against
    predicted = predicted or Gain()
    samples = steps * against.global_batch
    stretch = min(MOST, FURTHER * max(1.0, predicted.samples)) if math.isfinite(predicted.samples) else 1.0
    lengths = {"old": steps, "new": math.ceil(stretch * samples / plan.global_batch)}
    specs = {name: _spec(spec, one, lengths[name], min(1.0, steps / spec.steps)) for name, one in (("old", against), ("new", plan))}
    order = [(name, seed) for turn, seed in enumerate(seeds) for name in (("old", "new") if turn % 2 == 0 else ("new", "old"))]
    runs = run_all([(f"{name} plan, seed {seed}", specs[name].replace(seed=seed)) for name, seed in order], runs_dir=runs_dir)
    for run in runs:
        if run.error:
            raise RunError(run.error)
    window = samples / max(1, min(POINTS, samples // max(plan.global_batch, against.global_batch)))
    courses = [_course(run, name, seed, window) for run, (name, seed) in zip(runs, order, strict=True)]
    notes = [_shortened(name, one, specs[name], steps / spec.steps) for name, one in (("old", against), ("new", plan))]
    return PlanProof(
        old=against, new=plan, predicted=predicted, samples=samples, courses=tuple(courses), notes=tuple(note for note in notes if note)
    )


def _spec(spec: RunSpec, plan: BatchPlan, steps: int, share: float) -> RunSpec:
    changes: dict[str, Any] = {**plan.changes(), "steps": steps, "schedule": "constant", "evaluate": False}
    return spec.replace(**{**changes, "warmup_steps": math.ceil(share * plan.warmup_steps - 1e-9)})


def _shortened(name: str, plan: BatchPlan, spec: RunSpec, share: float) -> str:
    said = ""
    if spec.warmup_steps != plan.warmup_steps:
        said = (
            f"the {name} plan's warm-up of {plan.warmup_steps} steps was cut to {spec.warmup_steps}, since this proof has "
            f"{units.percent(share)} of the samples of the spec's run"
        )
    if spec.warmup_steps < spec.steps:
        return said
    return "; ".join(filter(None, [said, f"the {name} plan's warm-up does not end within the {spec.steps} steps of this proof"]))


def _course(run: Run, plan: str, seed: int, window: float) -> Course:
    rate = run.spec.global_batch / steady(run) if isinstance(run.spec, RunSpec) else math.nan
    return Course.of(run.metric_rows, window, plan=plan, seed=seed, samples_per_sec=rate)
