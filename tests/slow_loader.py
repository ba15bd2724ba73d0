"""A diagnosis made by hand, for pictures and panels: a step of 50 ms, most of which waits for a loader that decodes in turn with it."""

from typing import Any

from tests.made import World
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.runs.spec import RunSpec

SPEC = RunSpec(task="clipart-resnet", micro_batch=32)
WORLD = World(work=0.016, host=0.0, optimizer=0.004, cpu=0.030, collate=0.002, bf16=0.75, cores=4.0, noise=0.0)


def evidence(**changes: Any) -> Evidence:
    return WORLD.evidence(**changes)


def diagnosis(spec: RunSpec | None = SPEC, **changes: Any) -> Diagnosis:
    return Diagnosis.of(evidence(**changes), spec=spec)
