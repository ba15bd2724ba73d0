"""Trains with several batches and learning rates until a target is reached.

torchrun starts `python -m workbench.programs.steps_to_target RUN_DIR` once per rank. run.json says under "experiment" what to do. Each rank
runs trials of its own, with gradient accumulation for the batches: more ranks are faster, and give the same results. Ranks share only the
journal `trials.jsonl`, from which they take trials and to which they write results; others may read it meanwhile.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import default_collate

from workbench.batch.analysis.lr_scaling_rules import scale_lr
from workbench.batch.analysis.optimizer_description import OptimizerDescription
from workbench.batch.analysis.steps_to_target import TRIALS
from workbench.batch.analysis.trials import ExperimentPlan, Job, Outcome, Target, Trial, TrialScheduler
from workbench.core import run_directory
from workbench.core.checks import number_in_environment
from workbench.core.units import count
from workbench.memory.measure.at_oom import held
from workbench.runs import failure
from workbench.runs.entrypoints import STEPS_TO_TARGET
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.task import Task, TaskError, resolve
from workbench.runs.training_knobs import parse_optimizer
from workbench.train.loader import to_device
from workbench.train.optimizers import build_optimizer, described
from workbench.train.random_numbers import seed_all
from workbench.train.ranks import Layout, Ranks, choose_device
from workbench.train.trainer import Trainer, build_model, loss_of
from workbench.train.validation import evaluate_alone, evaluating, validation_data

SPACING = 1.03
"""Steps of a look at the model over those of the last one: the same relative resolution for 50 steps and for 5,000, since what one look
adds to the chance of an early crossing must not depend on the batch."""
BLOWN_UP = 20.0
"""A loss this many times that of the untrained model will not come back."""
AGAIN = 1.0
"""Seconds between two looks at what the other ranks have found."""


class TrialRunner:
    """Runs trials on this rank; they share the device, the dataset, and the samples on which the loss is measured."""

    def __init__(self, spec: RunSpec, task: Task, *, probe: int, target: str) -> None:
        """
        Raises:
            TaskError: its dataset has no length.
        """
        self.spec, self._name = spec, target
        local_rank, local_world = number_in_environment("LOCAL_RANK", 0), number_in_environment("LOCAL_WORLD_SIZE", 1, least=1)
        self.device = choose_device(spec, local_rank, local_world)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.dataset = task.dataset()
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise TaskError(
                f"the task's dataset() returned a {type(self.dataset).__name__} without length: steps to a target are compared on batches "
                "that are drawn from a fixed set; return one with __len__ and __getitem__"
            )
        self.task = dataclasses.replace(task, dataset=lambda: self.dataset)
        self._probe = self._drawn(probe) if target == "loss" else []
        self._validation = validation_data(task) if task.validation and target != "loss" else None

    def check(self, batch: int) -> None:
        """Check that a batch can be drawn.

        Raises:
            SpecError: it is larger than the dataset.
        """
        if batch > len(self.dataset):
            raise SpecError(
                f"batch {count(batch)} is above the dataset, which has {count(len(self.dataset))} samples: an optimizer step takes a batch "
                f"of different samples; try batches up to {count(len(self.dataset))}"
            )

    def untrained(self) -> float:
        """The target's figure of the untrained model.

        Raises:
            SpecError: the task does not measure it.
        """
        seed_all(self.spec.seed)
        module = build_model(self.task).to(self.device)
        if self._name != "loss":
            if self.task.evaluate is None and self._validation is None:
                raise SpecError(
                    f'target {self._name!r}: the task has neither evaluate= nor validation=; only a "loss" can be a target (target_loss=…)'
                )
            figures = self._figures(module)
            if self._name not in figures:
                raise SpecError(f"target {self._name!r}: the task's evaluate measures {', '.join(figures)}; or there is target_loss=…")
            return figures[self._name]
        return self.value(module)

    def run(self, job: Job, plan: Mapping[str, Any], target: Target, limit: Callable[[], int], cap: int) -> Trial:
        """Train until the target is reached, the loss diverges, or the limit of steps is reached.

        Args:
            job: batch, learning rate and seed.
            plan: what else a rule changes: betas, eps, warmup_steps.
            target: the figure to reach, and in which direction.
            limit: gives the steps after which to stop; called again every AGAIN seconds.
            cap: steps of any trial at most.
        """
        began = updated = time.monotonic()
        trainer = self._trainer(job, plan)
        batches = trainer.batches()
        last = (0, self.value(trainer.module))
        highest, best, most, ahead = BLOWN_UP * abs(last[1]), last[1], limit(), 1
        outcome: Outcome = "capped"
        steps: float | None = None
        step = 0
        while step < most:
            step += 1
            loss = trainer.step([next(batches) for _ in range(trainer.spec.accumulation)])
            if step < ahead and step < most:
                continue
            ahead = max(step + 1, math.ceil(step * SPACING))
            value = self.value(trainer.module)
            if not (math.isfinite(value) and math.isfinite(float(loss))) or (self._name == "loss" and value > highest):
                outcome = "diverged"
                break
            best = max(best, value) if target.rises else min(best, value)
            if target.met(value):
                outcome, steps = "reached", target.crossing(last, (step, value))
                break
            last = (step, value)
            if time.monotonic() > updated + AGAIN:
                most, updated = limit(), time.monotonic()
        else:
            outcome = "capped" if step >= cap else "stopped"
        batches.close()
        seconds = time.monotonic() - began
        given = dataclasses.asdict(job)
        return Trial(**given, steps=steps, after=step, outcome=outcome, best=best if math.isfinite(best) else None, seconds=seconds)

    def value(self, module: nn.Module) -> float:
        """The target's figure: the mean loss on the probe, in evaluation mode and fp32, or one of the task's evaluation."""
        if self._name != "loss":
            return self._figures(module).get(self._name, math.nan)
        with evaluating(module, self.device):
            parts = [(loss_of(self.task, module, batch), samples) for batch, samples in self._probe]
            return float(sum(loss * samples for loss, samples in parts)) / sum(samples for _, samples in parts)

    def _figures(self, module: nn.Module) -> dict[str, float]:
        return evaluate_alone(self.task, module, self._validation, 4 * self.spec.micro_batch, self.device)

    def _trainer(self, job: Job, plan: Mapping[str, Any]) -> Trainer:
        micro = next(size for size in range(min(self.spec.micro_batch, job.batch), 0, -1) if job.batch % size == 0)
        spec = self.spec.replace(
            micro_batch=micro,
            accumulation=job.batch // micro,
            nproc_per_node=1,
            parallel="ddp",  # which with one rank is nothing, as "zero1" is
            noise_scale=False,
            optimizer=job.optimizer or self.spec.optimizer,
            lr=job.lr,
            warmup_steps=plan["warmup_steps"],
            seed=self.spec.seed + job.seed,
        )
        ranks = Ranks(rank=0, world_size=1, device=self.device, store=HashStore())
        trainer = Trainer(spec, self.task, ranks, layout=Layout(readers=ranks, data=None), alone=True)
        for group in trainer.optimizer.param_groups:
            if plan.get("betas") and "betas" in group:
                group["betas"] = tuple(plan["betas"])
            elif plan.get("betas") and "alpha" in group:  # RMSProp's only one
                group["alpha"] = plan["betas"][0]
            if plan.get("eps") is not None and "eps" in group:
                group["eps"] = plan["eps"]
        return trainer

    def _drawn(self, samples: int) -> list[tuple[Any, int]]:
        """The probe: batches on the device, each with its number of samples."""
        chosen = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(0))[:samples].tolist()
        size = 4 * self.spec.micro_batch  # without gradients a model holds far less
        collate = self.task.collate or default_collate
        batches = []
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            fetch = getattr(self.dataset, "__getitems__", None)  # as torch's loader does
            batch = fetch(part) if fetch else [self.dataset[i] for i in part]
            batches.append((to_device(collate(batch), self.device), len(part)))
        return batches


LOCK = "trials.lock"


class Journal:
    """One rank's view of `trials.jsonl`: one row of kind "plan", and per trial a "claim" before it and a "trial" after it."""

    def __init__(self, run_dir: Path) -> None:
        self._lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._tail = run_directory.LineTail(run_dir / TRIALS)
        self._writer = run_directory.LineWriter(run_dir / TRIALS)
        self._done: list[Trial] = []
        self._claimed: set[Job] = set()
        self._planned = False

    def begin(self, order: ExperimentPlan, rates: Sequence[Mapping[str, Any]], spec: RunSpec, names: Mapping[str, str]) -> None:
        """Write down what is planned, unless another rank has."""
        with self._alone():
            if not self._planned:
                row = {"order": order.to_json(), "rates": list(rates), "spec": spec.to_json(), "names": dict(names)}
                self._writer.write([{"kind": "plan", **row, "created": time.time()}])

    def take(self, scheduler: TrialScheduler) -> tuple[Job | None, bool]:
        """Claim a trial to run (None = no trial is free now), and say whether all trials are done."""
        with self._alone():
            wanted = scheduler.runnable(self._done)
            job = next((job for job in wanted if job not in self._claimed), None)
            if job is not None:
                self._writer.write([{"kind": "claim", **dataclasses.asdict(job)}])
            return job, not wanted

    def add(self, trial: Trial, scheduler: TrialScheduler) -> None:
        """Write down the result of a trial, and how many there will be."""
        with self._alone():
            total = scheduler.total([*self._done, trial])
            self._writer.write([{"kind": "trial", **dataclasses.asdict(trial), "total": total, "at": time.time()}])

    def read(self) -> list[Trial]:
        for row in self._tail.read():
            kind = row.pop("kind")
            if kind == "trial":
                self._done.append(Trial.from_json(row))
            elif kind == "claim":
                self._claimed.add(Job(**row))
            else:
                self._planned = True
        return self._done

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which no other rank reads or writes."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self.read()
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


WAIT = 0.05
"""Seconds between two looks for a trial to do, where the next ones depend on those that other ranks are at."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run trials until none is left; an error is recorded."""
    parser = argparse.ArgumentParser(prog=f"python -m {STEPS_TO_TARGET}", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help='directory with a run.json that has an "experiment"')
    run_dir = parser.parse_args(arguments).run_dir
    try:
        info = run_directory.read_json(run_dir / run_directory.RUN_JSON)
        spec, order = RunSpec.from_json(info["spec"]), ExperimentPlan.from_json(info["experiment"]["order"])
        run_trials(spec, order, resolve(spec.task), run_dir)
    except BaseException as error:
        failure.record(error, run_dir=run_dir, held=held)
        raise


def run_trials(spec: RunSpec, order: ExperimentPlan, task: Task, run_dir: Path) -> None:
    """Take trials from the journal, run them and write down their results, until none is left.

    Raises:
        SpecError: a batch above the dataset, a target that the untrained model has reached, or one that the task does not measure.
        TaskError: the untrained model's loss is not a number.
    """
    runner = TrialRunner(spec, task, probe=order.probe, target=order.target.name)
    for batch in order.batches:
        runner.check(batch)
    order = dataclasses.replace(order, target=with_direction(runner, order.target))
    options = {optimizer: options_of(spec, task, optimizer) for optimizer in order.optimizers}
    plans = {
        (optimizer, rule, batch): scaled(order, spec, options[optimizer], rule, batch)
        for optimizer in order.optimizers
        for rule in {*order.rules, "none"}
        for batch in {*order.batches, order.base_batch}
    }
    scheduler = TrialScheduler(order, {key: plan["lr"] for key, plan in plans.items()})
    journal = Journal(run_dir)
    rows = [{"optimizer": o, "rule": r, "batch": b, **plan} for (o, r, b), plan in plans.items()]
    journal.begin(order, rows, spec, {optimizer: optimizer or named(options[optimizer]) for optimizer in order.optimizers})
    began = time.monotonic()  # from when the data are loaded, which may take long

    def over() -> bool:
        return order.budget_s is not None and time.monotonic() - began >= order.budget_s

    while not over():
        job, ended = journal.take(scheduler)
        if ended:
            break
        if job is None:
            time.sleep(WAIT)
            continue
        changes = {} if job.rule not in order.rules else plans[job.optimizer, job.rule, job.batch]
        warmup = plans[job.optimizer, "none", job.batch]["warmup_steps"]
        cut = list[bool]()
        limit = _limit_of(scheduler, journal, job, over, cut)
        trial = runner.run(job, {"warmup_steps": warmup, **changes}, order.target, limit, order.max_steps)
        if cut and trial.outcome == "stopped":
            if journal.read():
                break
            trial = dataclasses.replace(trial, outcome="cut")
        journal.add(trial, scheduler)


def _limit_of(scheduler: TrialScheduler, journal: Journal, job: Job, over: Callable[[], bool], cut: list[bool]) -> Callable[[], int]:
    """Steps after which a trial ends: 0, so at once, when the budget is spent, which `cut` then says."""

    def limit() -> int:
        if over():
            cut.append(True)
            return 0
        return scheduler.limit(job, journal.read())

    return limit


def options_of(spec: RunSpec, task: Task, optimizer: str) -> dict[str, Any]:
    """An optimizer's options, with the learning rate that the spec, or its own text, gives it.

    Args:
        spec: its optimizer and learning rate are used where `optimizer` is empty.
        task: its optimizer is used where the spec has none.
        optimizer: as a spec writes it, or empty. A learning rate in it has precedence over the spec's.
    """
    lr = spec.lr
    if optimizer and "lr" in parse_optimizer(optimizer)[1]:
        lr = None
    made = build_optimizer(build_model(task), task.optimizer, override=optimizer or spec.optimizer, lr=lr)
    return described(made)


def named(made: Mapping[str, Any]) -> str:
    """An optimizer as a spec writes it, without its learning rate; the class's own name where the table of optimizers has none."""
    try:
        return OptimizerDescription.of(made).text
    except ValueError:
        return str(made["name"])


def scaled(order: ExperimentPlan, spec: RunSpec, base: Mapping[str, Any], rule: str, batch: int) -> dict[str, Any]:
    """The learning rate of a batch by a rule, with what else the rule changes.

    The warm-up is the spec's own, as many samples long at each batch. Rules that advise some epochs of it mean trainings of many more
    epochs than a target may take; it would be the warm-up whose steps were counted.
    """
    try:
        by_rule = scale_lr(
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
        "lr": float(f"{by_rule.lr:.6g}"),
        "betas": None if same or by_rule.betas is None else list(by_rule.betas),
        "eps": None if same else by_rule.eps,
        "warmup_steps": by_rule.warmup_steps,
        "valid": by_rule.valid,
        "why": by_rule.why,
    }


def with_direction(runner: TrialRunner, target: Target) -> Target:
    """The target, with the direction from the untrained model towards it.

    Raises:
        SpecError: it is reached already.
        TaskError: what the untrained model gives is not a number.
    """
    start = runner.untrained()
    if not math.isfinite(start):
        raise TaskError(
            f"the {target.name} of the untrained model is {start}: nothing can be learnt from it. Look for infinities in the data, a "
            f'logarithm or a division in the loss, or try precision="fp32" (it is {runner.spec.precision!r})'
        )
    target = dataclasses.replace(target, rises=target.name != "loss" and start < target.value, start=start)
    if target.met(start):
        raise SpecError(
            f"target {target}: the untrained model has {start:.4g}, and so reaches it without a step; "
            f"try a {'larger' if target.rises else 'smaller'} one"
        )
    return target


if __name__ == "__main__":
    main()
