"""Computes what the batch planner shows: the plan for the present knobs, and what training costs with it. Pure and fast."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.batch.analysis.critical_batch import CriticalBatch
from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.scaled_lr import VALIDITY_TEXT
from workbench.batch.analysis.throughput import Throughput, relative_sample_worth
from workbench.batch.facts import limit_warmup

IMPOSSIBLE = "impossible"
"""The validity of a batch that cannot be made, or of a rule that is not defined."""
LADDER = range(-5, 9)
"""Powers of two that the batch can be multiplied with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerInputs:
    """The planner's inputs, which never change."""

    plan: BatchPlan
    """The present plan."""
    noise: float | None = None
    """Noise scale, in samples."""
    fit: CriticalBatch | None = None
    """The law of steps against batch, a CriticalBatch."""
    throughput: Throughput | None = None
    """Samples per second against the micro-batch."""
    dataset: int | None = None
    """Samples of an epoch."""
    largest: int | None = None
    """The largest micro-batch that fits."""
    samples: int | None = None
    """Samples of the whole run; None = not known."""

    @property
    def critical(self) -> float | None:
        """The batch from which larger ones stop paying: the critical batch, or else the noise scale."""
        return self.noise if self.fit is None else self.fit.b_crit

    def scaled(self, batch: int, ranks: int, accumulation: int, rule: str) -> BatchPlan:
        """The plan for some knobs.

        Raises:
            ValueError: the batch is impossible with these knobs, or `scale_lr` raises.
        """
        micro, rest = divmod(batch, ranks * accumulation)
        if rest or not micro:
            raise ValueError(
                f"a batch of {batch:,} cannot be made by {ranks} process{'es' * (ranks != 1)} × {accumulation} micro-batch"
                f"{'es' * (accumulation != 1)}: that is {batch / (ranks * accumulation):.4g} samples each; change one of the three"
            )
        if self.largest is not None and micro > self.largest:
            more = math.ceil(micro / self.largest) * accumulation
            raise ValueError(
                f"{micro:,} samples at once do not fit, at most {self.largest:,} do: accumulate {more} or more, or more processes"
            )
        if self.dataset is not None and batch > self.dataset:
            raise ValueError(f"a batch of {batch:,} is above the dataset, which has {self.dataset:,} samples")
        plan = self.plan.scaled_to(
            global_batch=batch,
            world_size=ranks,
            micro_batch=micro,
            rule=rule,
            noise_scale=self.noise,
            critical_batch=self.fit,
            dataset_size=self.dataset,
        )
        return limit_warmup(plan, self.plan, self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """What training costs with a plan; nan = not known."""

    steps: float = math.nan
    """To the target."""
    samples: float = math.nan
    """To the target."""
    seconds: float = math.nan
    """To the target."""
    rate: float = math.nan
    """Samples per second."""
    worth: float = math.nan
    """Progress by a sample, as a share of that by a sample of a tiny batch."""

    @classmethod
    def of(cls, known: PlannerInputs, plan: BatchPlan) -> "TrainingCost":
        """Compute the cost of a plan: steps by the law, seconds by the throughput."""
        batch, rate, steps = plan.global_batch, math.nan, math.nan
        if known.throughput is not None:
            rate = known.throughput.samples_per_sec(
                micro_batch=plan.micro_batch, accumulation=plan.accumulation, world_size=plan.world_size
            )
        if known.fit is not None:
            steps = known.fit.steps(batch)
        return cls(
            steps=steps, samples=steps * batch, seconds=steps * batch / rate, rate=rate, worth=relative_sample_worth(batch, known.critical)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Everything that the planner shows."""

    known: PlannerInputs
    """Its inputs."""
    batch: int
    """Value of the knob: samples per optimizer step."""
    rule: str
    """Value of the knob."""
    plan: BatchPlan | None
    """The plan for the knobs; None = it is impossible."""
    light: str
    """The rule's validity, or IMPOSSIBLE."""
    why: str
    """Reason of the validity."""
    before: TrainingCost
    """With the present plan."""
    after: TrainingCost
    """With the new plan."""
    ladder: Sequence[tuple[int, str, float]] = ()
    """Batch, validity and learning rate of the rule over the whole range; nan where there is none."""

    @property
    def gain(self) -> tuple[float, float]:
        """Steps and seconds to a loss, divided by those of the present plan; nan where they are not known."""
        if self.plan is None:
            return math.nan, math.nan
        samples = self.before.worth / self.after.worth
        return samples * self.known.plan.global_batch / self.batch, samples * self.before.rate / self.after.rate


def batches(plan: BatchPlan, dataset: int | None = None) -> list[int]:
    """Values of the batch knob: the plan's own batch, its doubles and its halves.

    >>> batches(BatchPlan(micro_batch=24, lr=0.1))[:4]
    [3, 6, 12, 24]
    """
    own = plan.global_batch
    sizes = [own * 2**power if power >= 0 else own // 2**-power for power in LADDER if power >= 0 or own % 2**-power == 0]
    return [size for size in sizes if dataset is None or size <= max(own, dataset)]


def planned(known: PlannerInputs, *, batch: int, ranks: int, accumulation: int, rule: str) -> Planned:
    """Compute the plan for some knobs."""
    ladder = tuple(_step(known, size, rule) for size in batches(known.plan, known.dataset))
    before = TrainingCost.of(known, known.plan)
    try:
        plan = known.scaled(batch, ranks, accumulation, rule)
    except ValueError as error:
        return Planned(
            known=known,
            batch=batch,
            rule=rule,
            plan=None,
            light=IMPOSSIBLE,
            why=str(error),
            before=before,
            after=TrainingCost(),
            ladder=ladder,
        )
    assert plan.scaled is not None
    valid = plan.scaled.valid
    limit = next((note for note in plan.scaled.notes if note.startswith(VALIDITY_TEXT[valid])), "").removeprefix(
        f"{VALIDITY_TEXT[valid]}: "
    )
    return Planned(
        known=known,
        batch=batch,
        rule=rule,
        plan=plan,
        light=valid,
        why="; ".join(filter(None, [limit, plan.scaled.why])),
        before=before,
        after=TrainingCost.of(known, plan),
        ladder=ladder,
    )


def _step(known: PlannerInputs, batch: int, rule: str) -> tuple[int, str, float]:
    bare = PlannerInputs(plan=known.plan, noise=known.noise, fit=known.fit, dataset=known.dataset)
    try:
        plan = bare.scaled(batch, 1, 1, rule)
    except ValueError:
        return batch, IMPOSSIBLE, math.nan
    assert plan.scaled is not None
    return batch, plan.scaled.valid, plan.lr
