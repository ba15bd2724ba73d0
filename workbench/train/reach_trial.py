"""One training until its target: the laboratory that all trials of a process share, and the loop of a trial."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import default_collate

from workbench.batch.reaching_plan import Job
from workbench.batch.reaching_trial import Outcome, Target, Trial
from workbench.spec import RunSpec, SpecError
from workbench.task import Task, TaskError
from workbench.train.layout import Layout
from workbench.train.loader import to_device
from workbench.train.ranks import Ranks, choose_device
from workbench.train.trainer import Trainer, build_model, evaluate, loss_of, seed_all
from workbench.units import count

SPACING = 1.03
"""Steps of a look at the model over those of the last one: the same relative resolution for 50 steps and for 5,000, since what one look
adds to the chance of an early crossing must not depend on the batch."""
BLOWN_UP = 20.0
"""A loss this many times that of the untrained model will not come back."""
AGAIN = 1.0
"""Seconds between two looks at what the other ranks have found."""


class Lab:
    """What trials share: the device, the dataset, and the samples on which the loss is measured."""

    def __init__(self, spec: RunSpec, task: Task, *, probe: int, target: str) -> None:
        """
        Args:
            spec: what all trials have in common; its micro_batch is the largest.
            task: what is trained.
            probe: samples on which the loss is measured, drawn once, the same for all.
            target: "loss", or a figure of the task's evaluation.

        Raises:
            TaskError: its dataset has no length.
        """
        self.spec, self._name = spec, target
        local_rank, local_world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.device = choose_device(spec, local_rank, local_world)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.dataset = task.dataset()
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise TaskError(
                f"the task's dataset() returned a {type(self.dataset).__name__} without length: steps to a target are compared on batches "
                "that are drawn from a fixed set; a dataset with __len__ and __getitem__ is wanted"
            )
        self.task = dataclasses.replace(task, dataset=lambda: self.dataset)
        self._probe = self._drawn(probe) if target == "loss" else []

    def check(self, batch: int) -> None:
        """See that a batch can be drawn.

        Raises:
            SpecError: it is above the dataset.
        """
        if batch > len(self.dataset):
            raise SpecError(
                f"batch {count(batch)} is above the dataset, which has {count(len(self.dataset))} samples: an optimizer step takes a batch "
                f"of different samples; try batches up to {count(len(self.dataset))}"
            )

    def untrained(self) -> float:
        """What the untrained model gives.

        Raises:
            SpecError: the task does not measure that.
        """
        seed_all(self.spec.seed)
        module = build_model(self.task).to(self.device)
        if self._name != "loss":
            if self.task.evaluate is None:
                raise SpecError(f'target {self._name!r}: the task has no evaluate=; only a "loss" can be a target (target_loss=…)')
            figures = evaluate(self.task, module)
            if self._name not in figures:
                raise SpecError(f"target {self._name!r}: the task's evaluate measures {', '.join(figures)}; or there is target_loss=…")
        return self.value(module)

    def run(self, job: Job, plan: Mapping[str, Any], target: Target, limit: Callable[[], int], cap: int) -> Trial:
        """Train until the target is reached, or there is no hope.

        Args:
            job: batch, learning rate and seed.
            plan: what else a rule changes: betas, eps, warmup_steps.
            target: with its direction.
            limit: gives the steps after which it is hopeless; asked again from time to time.
            cap: steps of any trial at most.
        """
        began = asked = time.monotonic()
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
            if time.monotonic() > asked + AGAIN:
                most, asked = limit(), time.monotonic()
        else:
            outcome = "capped" if step >= cap else "stopped"
        batches.close()
        seconds = time.monotonic() - began
        given = dataclasses.asdict(job)
        return Trial(**given, steps=steps, after=step, outcome=outcome, best=best if math.isfinite(best) else None, seconds=seconds)

    @torch.no_grad()
    def value(self, module: nn.Module) -> float:
        """What the target is about: the mean loss on the probe, in evaluation mode and fp32, or the task's figure."""
        if self._name != "loss":
            found = evaluate(self.task, module).get(self._name, math.nan)
        else:
            module.eval()
            parts = [(loss_of(self.task, module, batch), samples) for batch, samples in self._probe]
            found = float(sum(loss * samples for loss, samples in parts)) / sum(samples for _, samples in parts)
        module.train()
        return found

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
        found = []
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            fetch = getattr(self.dataset, "__getitems__", None)  # as torch's loader does
            batch = fetch(part) if fetch else [self.dataset[i] for i in part]
            found.append((to_device(collate(batch), self.device), len(part)))
        return found
