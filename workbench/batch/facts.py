"""Facts of a plan: what memory, throughput and noise have to say, given or found out here.

Subject: what a plan has to know of a task: its optimizer with the learning rate, and how many samples it has.
"""

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

from workbench.batch.analysis.critical_batch import CriticalBatch
from workbench.batch.analysis.optimizer import Described
from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.scaled_lr import number
from workbench.batch.analysis.steps_to_target import StepsToTarget
from workbench.batch.analysis.throughput import Throughput
from workbench.batch.measured_throughput import measured, places, ranks_here
from workbench.core import units
from workbench.core.checks import is_number, whole_number
from workbench.core.device import Device
from workbench.runs.spec import IMPLEMENTATIONS, RunSpec, SpecError
from workbench.runs.task import Task, resolve

NOISE_STEPS = 200
"""Optimizer steps in which the noise scale is measured, where it is to be."""
UPWARD = 32
"""Times the present micro-batch that are looked at, at most, where no device sets a limit."""
WARMUP = 0.1
"""Share of a run that its warm-up may take: the usual upper end; five epochs (the rule for large batches) are more than a short run has."""
STAYS = "the batch stays"
"""What becomes of it where no noise is known."""


def whole(name: str, value: Any, usual: int) -> int:
    """A number that has to be whole; `usual` where it is None."""
    return usual if value is None else whole_number(name, value, least=1, error=SpecError)


def check_batch(batch: Any, ranks: int, dataset: int | None) -> None:
    """Refuse a global batch that the ranks or the dataset cannot make."""
    if batch is None:
        return
    whole("global_batch", batch, 1)
    if batch % ranks:
        near = [one for one in (batch // ranks * ranks, (batch // ranks + 1) * ranks) if one]
        raise SpecError(
            f"global_batch={batch} cannot be divided over {ranks} ranks without a remainder: "
            f"try {' or '.join(map(str, near))}, or other ranks"
        )
    if dataset is not None and batch > dataset:
        raise SpecError(
            f"global_batch={batch} is above the dataset, which has {dataset} samples: at most {dataset // ranks * ranks} on {ranks} ranks"
        )


def largest_of(spec: RunSpec, device: str | Device | None, largest: Any, ranks: int) -> tuple[int | None, str]:
    """The largest micro-batch that fits, and who says so."""
    if largest is not None:
        return whole("largest", largest, 1), f"at most {largest}, as given"
    if device is None:
        return None, ""
    from workbench.memory.max_micro_batch import WholeDataset, max_micro_batch

    found = max_micro_batch(spec.replace(accumulation=1), device, world_size=ranks * spec.tensor_parallel)
    if not found.micro_batch:
        raise SpecError(f"nothing fits: {found.word}")
    if isinstance(found, WholeDataset):
        return found.micro_batch, f"at most {found.micro_batch}: more would fit {found.device} (predicted), but the dataset has no more"
    return found.micro_batch, f"at most {found.micro_batch} fit {found.device} (predicted)"


def law_of(steps: Any) -> CriticalBatch | None:
    """The law of steps against batch, of a StepsToTarget or as it is; None of None."""
    if isinstance(steps, StepsToTarget):
        return steps.fit()
    if steps is None or isinstance(steps, CriticalBatch):
        return steps
    raise SpecError(f"steps={steps!r:.60}: what wb.steps_to_target gave is wanted, or its fit, which has a critical batch")


def noise_of(spec: RunSpec, given: Any, steps: Any, runs_dir: str | os.PathLike[str] | None) -> tuple[float | None, str, str]:
    """Samples of the noise scale or critical batch, what it is, and what is doubtful about it."""
    law = law_of(steps)
    if law is not None:
        return law.b_crit, f"critical batch of {number(round(law.b_crit))} samples, from steps to a target", law.advice
    if given is False:
        return None, "", f"no noise scale, so nothing says what a larger batch would be worth: {STAYS}"
    if given is None:
        from workbench.batch.api import noise_scale

        given = noise_scale(spec, steps=NOISE_STEPS, runs_dir=runs_dir)
    value = getattr(given, "b_simple", given)
    if not is_number(value, above=0, finite=False):
        raise SpecError(f"noise_scale={given!r:.60}: samples above 0 are allowed, what wb.noise_scale gave, None to measure it, or False")
    if math.isinf(value):
        return (
            None,
            "",
            f"the true gradient is lost in the noise so far: more steps are needed (wb.noise_scale says how many); {STAYS}",
        )
    low, high = getattr(given, "low", math.nan), getattr(given, "high", math.nan)
    between = f" ({number(round(low))} to {number(round(high))})" if math.isfinite(low) and math.isfinite(high) else ""
    doubt = "" if getattr(given, "enough", True) else "the noise scale is not certain yet: wb.noise_scale says how many steps more it takes"
    return float(value), f"noise scale of {number(round(value, 1) if value < 100 else round(value))} samples{between}", doubt


def within(plan: BatchPlan, before: BatchPlan, samples: int | None) -> BatchPlan:
    """The plan with a warm-up of at most WARMUP of a run, or of the share that it had before where that is more.

    Args:
        plan: scaled from the one before.
        before: as the spec has it.
        samples: of the run; None = it is not known how many.
    """
    if not samples:
        return plan
    steps = max(1, samples // plan.global_batch)
    had = math.ceil(steps * before.warmup_steps * before.global_batch / samples - 1e-9)  # of the same samples
    most = max(int(WARMUP * steps), had)
    if plan.warmup_steps <= most:
        return plan
    why = (
        f"{units.percent(WARMUP)} of the {steps:,} step{'s' * (steps != 1)} that make up the run's {samples:,} samples, at most "
        f"({plan.reasons['warmup_steps']}: too long for this run)"
    )
    scaled = plan.scaled
    if scaled is not None:
        notes = tuple(f"warm-up: {why}" if note.startswith("warm-up") else note for note in scaled.notes)
        scaled = dataclasses.replace(scaled, warmup_steps=most, notes=notes)
    return dataclasses.replace(plan, warmup_steps=most, reasons={**plan.reasons, "warmup_steps": why}, scaled=scaled)


def throughput_of(
    spec: RunSpec,
    given: Any,
    ranks: int,
    limit: int | None,
    dataset: int | None,
    batch: int | None,
    runs_dir: str | os.PathLike[str] | None,
) -> Throughput:
    """The curve that was given, or a short sweep over micro-batches up to what fits."""
    if given is not None:
        return Throughput.of(given, micro_batch=spec.micro_batch, world_size=spec.data_ranks)
    here = ranks_here(spec, ranks * spec.tensor_parallel)
    tops = [limit or UPWARD * spec.micro_batch, batch // ranks if batch else math.inf]
    if dataset is not None:
        tops.append(dataset // (2 * here))  # the middle one accumulates twice
    top = int(min(tops))
    return measured(spec.replace(nproc_per_node=here), places(min(spec.micro_batch, top), max(1, top)), runs_dir=runs_dir)


def naive(curve: Throughput, ranks: int) -> str:
    """What to say where the ranks are not those that were measured."""
    if ranks == curve.world_size:
        return ""
    return (
        f"throughput was {curve.kind} with {curve.world_size} rank{'s' * (curve.world_size != 1)}, and {ranks} are taken to be as fast, "
        "each (the naive line: what ranks wait for each other is not in it)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A task, as far as a plan cares."""

    optimizer: str
    """With its options, the learning rate left out."""
    lr: float
    """Peak learning rate."""
    dataset_size: int | None
    """Samples of an epoch; None = a stream, which does not say."""

    @classmethod
    def of(cls, spec: RunSpec) -> "Subject":
        """Build the task's dataset and, where only that tells, its model and optimizer; and look at them.

        Raises:
            TaskError: the task is not there, or its functions do not return what they should.
            SpecError: an optimizer for which no rule is known, or micro_batch is "auto".
        """
        from workbench.train.choose_micro_batch import most_samples

        task = resolve(spec.task)
        found = _optimizer(spec, task)
        size, stream = most_samples(task.dataset(), RunSpec(task=spec.task))
        return cls(
            optimizer=found.text, lr=float(spec.lr if spec.lr is not None else found.default_lr), dataset_size=None if stream else size
        )

    def plan(self, spec: RunSpec) -> BatchPlan:
        """The plan that a spec has."""
        _ = spec.global_batch  # refuses "auto"
        return BatchPlan.of(spec, lr=self.lr, optimizer=self.optimizer)


def _optimizer(spec: RunSpec, task: Task) -> Described:
    chosen = spec.optimizer if spec.optimizer not in (None, *IMPLEMENTATIONS) else task.optimizer
    if isinstance(chosen, str):
        return Described.of(chosen)
    from workbench.train.optimizers import build_optimizer, described
    from workbench.train.trainer import build_model

    seen = described(build_optimizer(build_model(task), task.optimizer, lr=spec.lr))  # a function, which may look at the parameters
    try:
        return Described.of(seen)
    except ValueError as error:
        raise SpecError(
            f'task={spec.task!r}: {error}; or plan with the optimizer that it resembles: spec.replace(optimizer="adamw", lr=…)'
        ) from error
