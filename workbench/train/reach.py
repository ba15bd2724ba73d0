"""`python -m workbench.train.reach RUN_DIR`: many trainings, each until a target is reached, at several batches and learning rates.

torchrun starts one process per rank. What to do stands in run.json under "experiment". Each rank does trials of its own and by itself,
with gradient accumulation for the batches: how many ranks there are changes how long it takes, not what comes out. They meet in
`trials.jsonl` only.
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench import failure, rundir
from workbench.batch.described import Described
from workbench.batch.reaching_plan import Agenda, Job, Order
from workbench.batch.reaching_trial import Target
from workbench.batch.rules import scale_lr
from workbench.measure.holding import held
from workbench.spec import RunSpec, SpecError
from workbench.task import Task, TaskError, resolve
from workbench.train.optimizers import build_optimizer, described, parse_optimizer
from workbench.train.reach_journal import Journal
from workbench.train.reach_trial import Lab
from workbench.train.trainer import build_model

WAIT = 0.05
"""Seconds between two looks for a trial to do, where the next ones depend on those that other ranks are at."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Do trials until none is left; whatever goes wrong is recorded."""
    parser = argparse.ArgumentParser(prog="python -m workbench.train.reach", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help='directory with a run.json that has an "experiment"')
    run_dir = parser.parse_args(arguments).run_dir
    try:
        info = rundir.read_json(run_dir / rundir.RUN_JSON)
        spec, order = RunSpec.from_json(info["spec"]), Order.from_json(info["experiment"]["order"])
        explore(spec, order, resolve(spec.task), run_dir)
    except BaseException as error:
        failure.record(error, run_dir=run_dir, held=held)
        raise


def explore(spec: RunSpec, order: Order, task: Task, run_dir: Path) -> None:
    """Take trials from the journal and write down what came of them, until there is none left.

    Args:
        spec: what all trials have in common.
        order: what is wanted.
        task: what is trained.
        run_dir: of the launch; the journal lies there.

    Raises:
        SpecError: a batch above the dataset, a target that the untrained model has reached, or one that the task does not measure.
        TaskError: the untrained model's loss is not a number.
    """
    began = time.monotonic()
    lab = Lab(spec, task, probe=order.probe, target=order.target.name)
    for batch in order.batches:
        lab.check(batch)
    order = dataclasses.replace(order, target=aimed(lab, order.target))
    recipes = {optimizer: recipe(spec, task, optimizer) for optimizer in order.optimizers}
    plans = {
        (optimizer, rule, batch): scaled(order, spec, recipes[optimizer], rule, batch)
        for optimizer in order.optimizers
        for rule in {*order.rules, "none"}
        for batch in {*order.batches, order.base_batch}
    }
    agenda = Agenda(order, {key: plan["lr"] for key, plan in plans.items()})
    journal = Journal(run_dir)
    rows = [{"optimizer": o, "rule": r, "batch": b, **plan} for (o, r, b), plan in plans.items()]
    journal.begin(order, rows, spec, {optimizer: optimizer or named(recipes[optimizer]) for optimizer in order.optimizers})
    while order.budget_s is None or time.monotonic() - began < order.budget_s:
        job, over = journal.take(agenda)
        if over:
            break
        if job is None:
            time.sleep(WAIT)
            continue
        own = {} if job.rule not in order.rules else plans[job.optimizer, job.rule, job.batch]
        warmup = plans[job.optimizer, "none", job.batch]["warmup_steps"]
        trial = lab.run(job, {"warmup_steps": warmup, **own}, order.target, _limit_of(agenda, journal, job), order.max_steps)
        journal.add(trial, agenda)


def _limit_of(agenda: Agenda, journal: Journal, job: Job) -> Callable[[], int]:
    return lambda: agenda.limit(job, journal.read())


def recipe(spec: RunSpec, task: Task, optimizer: str) -> dict[str, Any]:
    """An optimizer's options, with the learning rate that the spec, or its own text, gives it.

    Args:
        spec: whose optimizer and learning rate stand where `optimizer` is empty.
        task: whose optimizer stands where the spec has none.
        optimizer: as a spec writes it, or empty. A learning rate in it goes before the spec's.
    """
    lr = spec.lr
    if optimizer and "lr" in parse_optimizer(optimizer)[1]:
        lr = None
    made = build_optimizer(build_model(task), task.optimizer, override=optimizer or spec.optimizer, lr=lr)
    return described(made)


def named(made: Mapping[str, Any]) -> str:
    """An optimizer as a spec writes it, without its learning rate; of a class that has no name here its own."""
    try:
        return Described.of(made).text
    except ValueError:
        return str(made["name"])


def scaled(order: Order, spec: RunSpec, base: Mapping[str, Any], rule: str, batch: int) -> dict[str, Any]:
    """The learning rate of a batch by a rule, with what else the rule changes.

    The warm-up is the spec's own, as many samples long at each batch. Rules that advise some epochs of it mean trainings of many more
    epochs than a target may take; it would be the warm-up whose steps were counted.

    Args:
        order: the base batch, and what is known of the noise.
        spec: its warm-up.
        base: the optimizer at the base batch.
        rule: its name.
        batch: in samples.
    """
    try:
        found = scale_lr(
            base["lr"],
            batch=order.base_batch,
            to_batch=batch,
            optimizer=dict(base),
            rule=rule,
            noise_scale=order.noise_scale,
            critical_batch=order.critical_batch,
            warmup_steps=spec.warmup_steps,
        )
    except ValueError:
        if rule != "none":  # that needs to know nothing of an optimizer
            raise
        warmup = round(spec.warmup_steps * order.base_batch / batch)
        return {"lr": base["lr"], "betas": None, "eps": None, "warmup_steps": warmup, "valid": "unknown", "why": "it is left as it is"}
    same = rule == "none"
    return {
        "lr": float(f"{found.lr:.6g}"),
        "betas": None if same or found.betas is None else list(found.betas),
        "eps": None if same else found.eps,
        "warmup_steps": found.warmup_steps,
        "valid": found.valid,
        "why": found.why,
    }


def aimed(lab: Lab, target: Target) -> Target:
    """The target, with the direction in which it lies from the untrained model.

    Raises:
        SpecError: it is reached already.
        TaskError: what the untrained model gives is not a number.
    """
    start = lab.untrained()
    if not math.isfinite(start):
        raise TaskError(
            f"the {target.name} of the untrained model is {start}: nothing can be learnt from it. Look for infinities in the data, a "
            f'logarithm or a division in the loss, or try precision="fp32" (it is {lab.spec.precision!r})'
        )
    found = dataclasses.replace(target, rises=target.name != "loss" and start < target.value, start=start)
    if found.met(start):
        raise SpecError(
            f"target {target}: the untrained model has {start:.4g}, and so reaches it without a step; "
            f"try a {'larger' if found.rises else 'smaller'} one"
        )
    return found


if __name__ == "__main__":
    main()
