"""Imports late, at the call, what a lower package uses of a higher one.

A result draws itself (`result.plot()`) although its picture is in a higher layer, and a Run returns types of higher packages
(`run.memory_breakdown`, `run.energy`, `report.pipeline_idle`, `report.mfu`). This file lists all such uses.
"""

import importlib
from collections.abc import Callable
from typing import Any

HOMES = {
    "AlarmTraces": "workbench.traces.measure.profiled_run:AlarmTraces",
    "Energy.by_time": "workbench.cluster.analysis.energy:by_time",
    "Energy.measured": "workbench.cluster.analysis.energy:measured",
    "MemoryBreakdown": "workbench.memory.analysis.breakdown:MemoryBreakdown",
    "NoiseScale.of_run": "workbench.batch.analysis.noise_scale:noise_scale_of_ranks",
    "TraceSet": "workbench.traces.analysis.trace_set:TraceSet",
    "begin_with_dcp": "workbench.train.dcp:begin_with",
    "differences": "workbench.train.saved_entries:differences",
    "change_in_time": "workbench.diagnosis.rerun:change_in_time",
    "entries_of": "workbench.train.saved_entries:entries_of",
    "KNOBS": "workbench.runs.spec:KNOBS",
    "flops_per_sample": "workbench.cluster.read_model:flops_per_sample",
    "last_weights": "workbench.train.export_weights:last_weights",
    "pipeline_idle": "workbench.cluster.analysis.pipeline_idle:pipeline_idle",
    "prove": "workbench.diagnosis.api:prove",
    "prove_script": "workbench.diagnosis.prove_script:prove_script",
    "prove_spec": "workbench.diagnosis.api:prove_spec",
    "refuse_code_of_others": "workbench.runs.launch.resume:refuse_code_of_others",
}
"""Name → `module:attribute`. Pictures and panels are found in `workbench.plot` and `workbench.widgets`."""


def load(name: str) -> Any:
    """The object that HOMES has under a name."""
    module, _, attribute = HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def picture(name: str) -> Callable[..., Any]:
    """`workbench.plot.<name>`."""
    function: Callable[..., Any] = getattr(importlib.import_module("workbench.plot"), name)
    return function


def panel(name: str) -> Callable[..., Any]:
    """`workbench.widgets.<name>`.

    Raises:
        ImportError: ipywidgets is not installed (a machine without the `notebooks` extra).
    """
    function: Callable[..., Any] = getattr(importlib.import_module("workbench.widgets"), name)
    return function
