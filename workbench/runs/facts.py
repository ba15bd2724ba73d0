"""Tells a run as text, and as facts for a program: what `workbench launch` and `workbench report` print."""

from dataclasses import replace
from typing import Any

from workbench.core import late
from workbench.core.vocabulary import PHASES
from workbench.runs.health import health, new_faults
from workbench.runs.rank_ends import extremes
from workbench.runs.run import Run
from workbench.timeline.analysis.told import ONE_ALARM
from workbench.timeline.timeline import LEFT_OUT, WARNING, Timeline


def report(run: Run) -> str:
    """A run as text: how it ended, what went wrong, and where the time went on each rank; of very many on the first and the extremes."""
    timelines = run.timelines
    faults = "\n".join(f"fault: {fault}" for fault in new_faults(run))
    idle = pipeline_idle(run)
    ranks = [str(told_once(timelines[place])) for place in extremes(run.rank_means)] if any(each.steps for each in timelines) else []
    return "\n\n".join(filter(None, [str(run), faults, *ranks, "" if idle is None else str(idle)]))


def told_once(timeline: Timeline) -> Timeline:
    """The steps of a rank without the notes that stand above them, in those of its run: warnings, such as alarms, and rows left out."""
    kept = [note for note in timeline.notes if not note.startswith((WARNING, LEFT_OUT)) and note != ONE_ALARM]
    return replace(timeline, notes=tuple(kept))


def pipeline_idle(run: Run) -> Any:
    """What part of a step each stage of a pipeline waits for the others, measured and predicted: a PipelineIdle; None = no pipeline."""
    return late.load("pipeline_idle")(run.spec, run.rank_means) if getattr(run.spec, "pipeline_parallel", 1) > 1 else None


def run_facts(run: Run) -> dict[str, Any]:
    """The main facts about a run, for a program."""
    done, steps = run.progress
    return {
        "run": str(run.path),
        "name": run.name,
        "state": run.state,
        "steps_done": done,
        "steps": steps,
        "seconds": run.seconds,
        "samples_per_sec": run.samples_per_sec,
        "spec": run.spec,
        "notes": run.notes,
        "memory": run.memory,
        "faults": [str(fault) for fault in health(run).faults],
        "error": None if run.error is None else str(run.error),
        "ranks": [{"rank": mean.rank, "step": mean.mean(), **{phase: mean.mean(phase) for phase in PHASES}} for mean in run.rank_means],
    }
