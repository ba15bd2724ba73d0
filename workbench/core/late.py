"""Late calls: the few things that a lower module uses of a higher one, named here and imported when they are used.

A result draws itself although its picture is in a higher package; a Run answers with nouns of the subjects above it.
"""

import importlib
from collections.abc import Callable
from typing import Any

HOMES = {
    "Energy.by_time": "workbench.cluster.analysis.energy:by_time",
    "Energy.measured": "workbench.cluster.analysis.energy:measured",
    "MemoryBreakdown": "workbench.memory.analysis.breakdown:MemoryBreakdown",
    "NoiseScale.of_run": "workbench.batch.analysis.noise_scale:combined",
    "TraceSet": "workbench.traces.analysis.trace_set:TraceSet",
    "prove": "workbench.diagnosis.api:prove",
}
"""What is called late, beside pictures and panels, and where it is: `module:name`."""


def load(name: str) -> Any:
    """One of HOMES."""
    module, _, attribute = HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def picture(name: str) -> Callable[..., Any]:
    """`workbench.plot.<name>`."""
    found: Callable[..., Any] = getattr(importlib.import_module("workbench.plot"), name)
    return found


def panel(name: str) -> Callable[..., Any]:
    """`workbench.widgets.<name>`.

    Raises:
        ImportError: ipywidgets is not installed (a machine without the `notebooks` extra).
    """
    found: Callable[..., Any] = getattr(importlib.import_module("workbench.widgets"), name)
    return found
