"""`PipelineIdle`: what part of a step each stage of a pipeline waits for its neighbours, measured, and predicted by its bubble."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.cluster.analysis.iteration import bubble
from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.runs.spec import RunSpec
from workbench.runs.training_knobs import parse_pipeline

NAMES = {"zero_bubble": "zb-v"}
"""Name of a schedule here → that in `iteration.BUBBLES`, where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes(JsonDataclass):
    """A rank of the pipeline, with one stage or several; the mean of those ranks that have the same."""

    computes: float
    """Seconds of a step in forward and backward; the reduction of gradients across pipelines is in the latter."""
    waits: float
    """Seconds of a step outside of all phases: waits for neighbours, messages, and the loop's own work, which is small."""

    @property
    def idle(self) -> float:
        """The part that it waits, 0..1; loading, copies and the optimizer left out."""
        return self.waits / (self.computes + self.waits) if self.waits else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineIdle(display.Shown, JsonDataclass):
    """How much the ranks of a pipeline idle. Get one from `wb.report(run).pipeline_idle`.

    >>> stages = (StageTimes(computes=0.4, waits=0.1), StageTimes(computes=0.2, waits=0.3))
    >>> found = PipelineIdle(schedule="1f1b", micro_batches=4, stages=stages, bubble=0.25)
    >>> found.predicted, found.idle, [round(found.of_stage(rank), 2) for rank in (0, 1)]
    (0.2, 0.4, [0.2, 0.6])
    """

    schedule: str
    """As `RunSpec.pipeline_schedule`."""
    micro_batches: int
    """Of a step and pipeline."""
    stages: tuple[StageTimes, ...]
    """By rank of the pipeline."""
    bubble: float
    """Predicted idle time over computing, where stages take equally long; see `iteration.bubble`."""

    @property
    def idle(self) -> float:
        """Measured: the part of the ranks' time that they wait, 0..1."""
        waits, computes = sum(stage.waits for stage in self.stages), sum(stage.computes for stage in self.stages)
        return waits / (waits + computes) if waits else 0.0

    @property
    def predicted(self) -> float:
        """Predicted part, 0..1, if stages took equally long and messages no time."""
        return self.bubble / (1 + self.bubble)

    def of_stage(self, rank: int) -> float:
        """Predicted part that a rank of the pipeline waits, 0..1, where the slowest sets the pace: 1 − (its work / the most) / (1 + r).

        The work is that measured; messages take no time.
        """
        most = max(stage.computes for stage in self.stages)
        return 1 - self.stages[rank].computes / most / (1 + self.bubble) if most else 0.0

    @property
    def table(self) -> display.Table:
        """A row for each rank of the pipeline."""
        rows = [
            [rank, units.seconds(stage.computes), units.seconds(stage.waits), units.percent(stage.idle), units.percent(self.of_stage(rank))]
            for rank, stage in enumerate(self.stages)
        ]
        note = (
            f"{units.percent(self.idle)} idle; predicted {units.percent(self.predicted)} with equal stages (r / (1 + r), r = "
            f"{self.bubble:.3g} of {self.micro_batches} micro-batches), and for each the last column with its measured work. "
            "Measured: what is neither forward nor backward, loading, copies nor the optimizer"
        )
        columns = ("rank of the pipeline", "computes", "waits", "idle, measured", "predicted")
        return display.Table(columns=columns, rows=rows, title=f"Pipeline, {self.schedule}", note=note)

    def to_frame(self) -> Any:
        """A DataFrame with one row per rank of the pipeline."""
        return display.frame(
            [stage.to_json() | {"idle": stage.idle, "predicted": self.of_stage(rank)} for rank, stage in enumerate(self.stages)]
        )


def pipeline_idle(spec: RunSpec, means: Sequence[Any]) -> PipelineIdle | None:
    """From the mean times of ranks.

    Returns:
        None where there is no pipeline, or a stage without a measured step.
    """
    stages = getattr(spec, "pipeline_parallel", 1)
    share = spec.world_size // stages  # the ranks of a stage are neighbours
    of_stage = [[each for each in means if each.rank // share == stage and each.count] for stage in range(stages)]
    if stages == 1 or not all(of_stage):
        return None
    times = [
        StageTimes(
            computes=statistics.fmean(each.mean("forward") + each.mean("backward") for each in some),
            waits=statistics.fmean(each.mean("other") for each in some),
        )
        for some in of_stage
    ]
    return PipelineIdle(schedule=spec.pipeline_schedule, micro_batches=spec.accumulation, stages=tuple(times), bubble=bubble_of(spec))


def bubble_of(spec: RunSpec) -> float:
    """Idle time of a spec's pipeline over the computing of its slowest stage, as `iteration.bubble` predicts it."""
    name, chunks = parse_pipeline(spec.pipeline_schedule)
    return bubble(spec.pipeline_parallel, spec.accumulation, NAMES.get(name, name), chunks if name == "interleaved" else 1)
