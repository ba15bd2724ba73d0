"""Collects what a batch plan needs: the task's optimizer and dataset, memory limit, noise and throughput, given or measured here."""

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

from workbench.batch.analysis.critical_batch import CriticalBatch
from workbench.batch.analysis.optimizer_description import OptimizerDescription
from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.scaled_lr import number
from workbench.batch.analysis.steps_to_target import StepsToTarget
from workbench.batch.analysis.throughput import Throughput
from workbench.batch.throughput_sweep import measure_throughput
from workbench.core import units
from workbench.core.checks import is_number, whole_number
from workbench.core.device import Device
from workbench.core.progress import Waiting
from workbench.runs.launch.environment import gpu_count
from workbench.runs.spec import IMPLEMENTATIONS, RunSpec, SpecError
from workbench.runs.task import Task, resolve

MAX_MICRO_BATCHES = 7
"""Micro-batches of a sweep at most."""
NOISE_SHARE = 0.45
"""Share of the time for a plan that the noise scale may take."""
MAX_INCREASE = 32
"""A sweep tries at most this many times the present micro-batch, where no device sets a limit."""
MAX_WARMUP = 0.1
"""Share of a run that its warm-up may take: the usual upper end; five epochs (the rule for large batches) are more than a short run has."""
STAYS = "the batch stays"
"""Part of notes where no noise is known."""


def micro_batches_to_try(now: int, largest: int) -> list[int]:
    """The present micro-batch with its doubles and halves up to the largest: the widest range that MAX_MICRO_BATCHES of them cover.

    >>> micro_batches_to_try(32, 300)
    [8, 16, 32, 64, 128, 256, 300]
    """
    top = min(now, largest)
    doubles = [top << power for power in range(1, 32) if top << power < largest]
    upward = [*doubles, *([largest] if largest > top else [])][: MAX_MICRO_BATCHES - 2]
    halves = [top >> power for power in range(1, 32) if top >> power >= 1]
    return sorted({*halves[: max(1, MAX_MICRO_BATCHES - 1 - len(upward))], top, *upward})


def local_ranks(spec: RunSpec, world_size: int) -> int:
    """Ranks to measure with: `world_size` where this machine has the cores or GPUs, else as many as the spec has."""
    here = 0 if spec.device == "cpu" else gpu_count()
    return world_size if world_size <= (here or os.cpu_count() or 1) else spec.nproc_per_node


def checked_number(name: str, value: Any, default: int) -> int:
    """A whole number of at least 1; `default` where it is None."""
    return default if value is None else whole_number(name, value, least=1, error=SpecError)


def check_batch(batch: Any, ranks: int, dataset: int | None) -> None:
    """Refuse a global batch that the ranks or the dataset cannot make."""
    if batch is None:
        return
    checked_number("global_batch", batch, 1)
    if batch % ranks:
        near = [size for size in (batch // ranks * ranks, (batch // ranks + 1) * ranks) if size]
        raise SpecError(
            f"global_batch={batch} cannot be divided over {ranks} ranks without a remainder: "
            f"try {' or '.join(map(str, near))}, or other ranks"
        )
    if dataset is not None and batch > dataset:
        raise SpecError(
            f"global_batch={batch} is above the dataset, which has {dataset} samples, and no step takes a sample twice: "
            f"at most global_batch={dataset // ranks * ranks} on {units.several(ranks, 'rank')}, or a task whose dataset() returns more"
        )


def largest_micro_batch(spec: RunSpec, device: str | Device | None, largest: Any, ranks: int) -> tuple[int | None, str]:
    """The largest micro-batch that fits, and why."""
    if largest is not None:
        return checked_number("largest", largest, 1), f"at most {largest}, as given"
    if device is None:
        return None, ""
    from workbench.memory.max_micro_batch import WholeDataset, max_micro_batch

    fits = max_micro_batch(
        spec.replace(accumulation=1), device, world_size=ranks * spec.tensor_parallel * spec.pipeline_parallel, budget_s=None
    )
    if not fits.micro_batch:
        raise SpecError(f"nothing fits: {fits.word}")
    if isinstance(fits, WholeDataset):
        return fits.micro_batch, f"at most {fits.micro_batch}: more would fit {fits.device} (predicted), but the dataset has no more"
    return fits.micro_batch, f"at most {fits.micro_batch} fit {fits.device} (predicted)"


def memory_only(spec: RunSpec, device: str | Device | None) -> str:
    """A note where throughput is measured on a CPU, and the plan asks about another device's memory."""
    if device is None or (spec.device != "cpu" and gpu_count()):
        return ""
    asked = Device.known(device) if isinstance(device, str) else device
    if asked is None:
        return ""
    return (
        f"only memory is that of {asked.name}: samples per second were measured on this machine's CPU, and another micro_batch may be best "
        "there. Measure there, give throughput=, or see what wb.estimate_time says"
    )


def law_of(steps: Any) -> CriticalBatch | None:
    """The law of steps against batch of a StepsToTarget; a law, and None, are returned as they are."""
    if isinstance(steps, StepsToTarget):
        return steps.fit()
    if steps is None or isinstance(steps, CriticalBatch):
        return steps
    raise SpecError(f"steps={steps!r:.60}: what wb.steps_to_target gave is allowed, or its fit, which has a critical batch")


def noise_of(
    spec: RunSpec, given: Any, steps: Any, runs_dir: str | os.PathLike[str] | None, line: Waiting
) -> tuple[float | None, str, str, tuple[float, float] | None]:
    """The noise scale or critical batch in samples, its name with its value, a note if it is uncertain, and its interval if known."""
    law = law_of(steps)
    if law is not None:
        return law.b_crit, f"critical batch of {number(round(law.b_crit))} samples, from steps to a target", law.advice, None
    if given is False:
        return None, "", f"no noise scale, so the gain of a larger batch is not known: {STAYS}", None
    if given is None:
        from workbench.batch.api import noise_scale

        line.say("the noise scale of the gradients")
        given = noise_scale(spec, budget_s=None if math.isinf(line.left) else max(1.0, NOISE_SHARE * line.left), runs_dir=runs_dir)
        if given.interrupted:
            line.spend()
    value = getattr(given, "b_simple", given)
    if not is_number(value, above=0, finite=False):
        raise SpecError(f"noise_scale={given!r:.60}: samples above 0 are allowed, what wb.noise_scale gave, None to measure it, or False")
    if math.isinf(value):
        doubt = f"the true gradient is lost in the noise so far: more steps are needed (wb.noise_scale says how many); {STAYS}"
        return None, "", doubt, None
    low, high = getattr(given, "low", math.nan), getattr(given, "high", math.nan)
    top = number(round(high)) if math.isfinite(high) else "?, too few steps for an upper end"
    between = f" ({number(round(low))} to {top})" if math.isfinite(low) else ""
    doubt = "" if getattr(given, "enough", True) else "the noise scale is not certain yet: wb.noise_scale says how many more steps it needs"
    name = f"noise scale of {number(round(value, 1) if value < 100 else round(value))} samples{between}"
    return float(value), name, doubt, (low, high) if math.isfinite(low) else None


def limit_warmup(plan: BatchPlan, before: BatchPlan, samples: int | None) -> BatchPlan:
    """The plan with a warm-up of at most MAX_WARMUP of a run, or the share that it had before if that is more."""
    if not samples:
        return plan
    steps = max(1, samples // plan.global_batch)
    had = math.ceil(steps * before.warmup_steps * before.global_batch / samples - 1e-9)  # the same samples
    most = max(int(MAX_WARMUP * steps), had)
    if plan.warmup_steps <= most:
        return plan
    why = (
        f"cut to {units.percent(MAX_WARMUP)} of the run, {_length(samples, plan.global_batch)}; "
        f"without the cut: {plan.reasons['warmup_steps']}"
    )
    scaled = plan.scaled
    if scaled is not None:
        notes = tuple(f"warm-up: {why}" if note.startswith("warm-up") else note for note in scaled.notes)
        scaled = dataclasses.replace(scaled, warmup_steps=most, notes=notes)
    return dataclasses.replace(plan, warmup_steps=most, reasons={**plan.reasons, "warmup_steps": why}, scaled=scaled)


def _length(samples: int, batch: int) -> str:
    """How long a run is, in words."""
    if samples < batch:
        return f"whose {samples:,} samples are less than one step of {batch:,}"
    return f"which has {units.several(samples // batch, 'step')} ({samples:,} samples)"


def throughput_for(
    spec: RunSpec,
    given: Any,
    ranks: int,
    limit: int | None,
    dataset: int | None,
    batch: int | None,
    noise: float | None,
    runs_dir: str | os.PathLike[str] | None,
    line: Waiting,
) -> Throughput:
    """The throughput that was given, or that of a short sweep over micro-batches that fit."""
    if given is not None:
        return Throughput.of(given, micro_batch=spec.micro_batch, world_size=spec.data_ranks)
    here = local_ranks(spec, ranks * spec.tensor_parallel * spec.pipeline_parallel)
    tops = [limit or MAX_INCREASE * spec.micro_batch, batch // ranks if batch else math.inf]
    if dataset is not None:
        tops.append(dataset // (2 * here))  # the run with accumulation takes two
    top = int(min(tops))
    places = micro_batches_to_try(min(spec.micro_batch, top), max(1, top))
    worth = noise if batch is None else None  # of batches of one size, samples are worth the same
    return measure_throughput(spec.replace(nproc_per_node=here), places, noise=worth, line=line, runs_dir=runs_dir)


def extrapolation_note(curve: Throughput, ranks: int) -> str:
    """A note where the number of ranks is not the measured one; else empty."""
    if ranks == curve.world_size:
        return ""
    return (
        f"throughput was {curve.kind} with {units.several(curve.world_size, 'rank')}, and {ranks} are taken to be as fast, "
        "each (the naive line, without waiting for each other)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """A task's optimizer, learning rate and dataset size."""

    optimizer: str
    """With its options, without its learning rate."""
    lr: float
    """Peak learning rate."""
    dataset_size: int | None
    """Samples of an epoch; None = a stream."""

    @classmethod
    def of(cls, spec: RunSpec) -> "TaskFacts":
        """Build the task's dataset and, where the optimizer is a function, its model and optimizer.

        Raises:
            TaskError: the task does not exist, or its functions return something wrong.
            SpecError: an optimizer for which no rule is known, or micro_batch is "auto".
        """
        from workbench.train.choose_micro_batch import max_samples

        task = resolve(spec.task)
        optimizer = _optimizer(spec, task)
        size, stream = max_samples(task.dataset(), RunSpec(task=spec.task))
        return cls(
            optimizer=optimizer.text,
            lr=float(spec.lr if spec.lr is not None else optimizer.default_lr),
            dataset_size=None if stream else size,
        )

    def plan(self, spec: RunSpec) -> BatchPlan:
        """The plan of a spec."""
        _ = spec.global_batch  # refuses "auto"
        return BatchPlan.of(spec, lr=self.lr, optimizer=self.optimizer)


def _optimizer(spec: RunSpec, task: Task) -> OptimizerDescription:
    chosen = spec.optimizer if spec.optimizer not in (None, *IMPLEMENTATIONS) else task.optimizer
    if isinstance(chosen, str):
        return OptimizerDescription.of(chosen)
    from workbench.train.optimizers import build_optimizer, described
    from workbench.train.trainer import build_model

    settings = described(build_optimizer(build_model(task), task.optimizer, lr=spec.lr))  # a function of the parameters
    try:
        return OptimizerDescription.of(settings)
    except ValueError as error:
        raise SpecError(
            f'task={spec.task!r}: {error}; or plan with the optimizer that it resembles: spec.replace(optimizer="adamw", lr=…)'
        ) from error
