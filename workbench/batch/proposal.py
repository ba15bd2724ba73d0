"""ProposedPlan: a BatchPlan with the reason for each of its numbers, what it was chosen from, and what it is predicted to bring."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from workbench.batch.analysis.choose_plan import Candidate, worth
from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.proof import Gain, PlanProof
from workbench.batch.analysis.throughput import Throughput
from workbench.batch.prove_plan import STEPS, prove_plan
from workbench.core import codec, units
from workbench.core.display import table as display
from workbench.runs.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProposedPlan(BatchPlan):
    """What `batch_plan` recommends. It is a BatchPlan: `spec.replace(**proposed.changes())` is the changed spec."""

    spec: RunSpec
    """The one it was made for."""
    before: BatchPlan
    """The plan that this spec has."""
    throughput: Throughput | None = None
    """Samples per second against the micro-batch; None = not known."""
    noise: float | None = None
    """The noise scale or critical batch that was used, in samples; None = not known."""
    candidates: tuple[Candidate, ...] = ()
    """What it was chosen from."""
    proof: PlanProof | None = None
    """What came of it, where it was asked for at once."""

    @property
    def predicted(self) -> Gain:
        """What it is predicted to bring over the plan before."""
        return gain(self.before, self, self.throughput, self.noise)

    @property
    def candidate_table(self) -> display.Table:
        """The best micro-batches and accumulations, the fastest to a loss first."""
        ordered = sorted(self.candidates, key=lambda one: -(one.samples_per_sec if math.isnan(one.worth) else one.useful))
        rows = [
            [
                f"{one.micro_batch} × {one.accumulation} × {one.world_size} = {one.global_batch:,}",
                units.rate(one.samples_per_sec),
                units.percent(one.worth),
                units.rate(one.useful, "useful samples"),
            ]
            for one in ordered[:_SHOWN]
        ]
        return display.Table(
            columns=("batch", "throughput", "worth of a sample", "useful"),
            rows=rows,
            title="What it was chosen from",
            note="worth: what a sample brings, of what it brings in a tiny batch, 1 / (1 + batch / noise scale)",
        )

    def prove(self, *, steps: int = STEPS, seeds: Sequence[int] = (0, 1), runs_dir: str | os.PathLike[str] | None = None) -> PlanProof:
        """Train by this plan and by the one before, in turns; see `prove_plan`.

        Args:
            steps: optimizer steps of the plan before.
            seeds: each plan runs once with each.
            runs_dir: where run directories go; None = `runs` in the current folder.

        Raises:
            ValueError: no steps, no seeds, or the plan is the one before.
            RunError: a run failed.
        """
        if self.changes() == self.before.changes():
            raise ValueError("there is nothing to prove: the plan is the one that the spec has")
        return prove_plan(self.spec, self, against=self.before, predicted=self.predicted, steps=steps, seeds=seeds, runs_dir=runs_dir)

    @property
    def table(self) -> display.Table:
        """One row per number with its reason; below, what the plan is predicted to bring."""
        found: display.Table = BatchPlan.table.fget(self)  # type: ignore[attr-defined]  # a slotted dataclass has no bare super()
        return replace(found, note="\n".join(filter(None, [self.word, found.note])))

    @property
    def word(self) -> str:
        """What it is predicted to bring, in a line."""
        if self.changes() == self.before.changes():
            return "nothing to change: no other plan is predicted to be faster by more than throughput varies"
        found = self.predicted
        if math.isnan(found.throughput):
            return "what it brings is not known without a throughput"
        speed = f"{units.times(found.throughput)} the samples per second"
        if math.isnan(found.samples):
            return f"predicted: {speed}; what samples are worth in a batch of {self.global_batch:,} is not known without a noise scale"
        return f"predicted: {speed}, {units.times(found.samples)} the samples to the same loss, {units.times(found.time)} the time"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; what it was chosen from is left out."""
        return {item.name: codec.to_json(getattr(self, item.name)) for item in fields(self) if item.name != "candidates"}

    def __repr__(self) -> str:
        return BatchPlan.__repr__(self).replace("BatchPlan", "ProposedPlan", 1)


_SHOWN = 8  # candidates in the table


def gain(old: BatchPlan, new: BatchPlan, throughput: Throughput | None, noise: float | None) -> Gain:
    """What one plan is predicted to bring over another.

    Args:
        old: before.
        new: after.
        throughput: against the micro-batch; None = not known.
        noise: the noise scale or critical batch, in samples; None = not known.
    """
    speed = math.nan
    if throughput is not None:
        speed = _rate(throughput, new) / _rate(throughput, old)
    return Gain(throughput=speed, samples=worth(old.global_batch, noise) / worth(new.global_batch, noise))


def _rate(throughput: Throughput, plan: BatchPlan) -> float:
    return throughput.samples_per_sec(micro_batch=plan.micro_batch, accumulation=plan.accumulation, world_size=plan.world_size)


def rebuilt(plan: BatchPlan, **more: Any) -> ProposedPlan:
    """A BatchPlan with what a proposal has beside."""
    return ProposedPlan(**{name: getattr(plan, name) for name in BatchPlan.__dataclass_fields__}, **more)
