"""Collects all panels for notebooks, `wb.widgets.*`; each is in the `panel` folder of its package.

A panel is a thin VBox over values that are read or computed elsewhere: in each folder a model or follower computes, `html` makes HTML of
it, and the panel's own file holds the widgets. Every panel also has a static form, which a notebook shows before anything is run.
"""

from workbench.batch.panel.planner import BatchPlanner
from workbench.core.synonyms import explain_calls
from workbench.data.panel.explorer import DataExplorer
from workbench.diagnosis.panel.doctor import ThroughputDoctor
from workbench.diagnosis.panel.linear import WhyNotLinear
from workbench.memory.panel.explorer import MemoryExplorer
from workbench.runs.panel.panel import LogView, RunPanel, run_panel
from workbench.runs.panel.run_list import runs
from workbench.scaling.panel.explorer import ScalingExplorer
from workbench.traces.panel.explorer import TraceExplorer
from workbench.traces.panel.perfetto import perfetto

__all__ = [
    "RunPanel",
    "run_panel",
    "runs",
    "LogView",
    "ThroughputDoctor",
    "MemoryExplorer",
    "BatchPlanner",
    "ScalingExplorer",
    "TraceExplorer",
    "perfetto",
    "DataExplorer",
    "WhyNotLinear",
]

for _panel in (
    RunPanel,
    LogView,
    ThroughputDoctor,
    MemoryExplorer,
    BatchPlanner,
    ScalingExplorer,
    TraceExplorer,
    DataExplorer,
    WhyNotLinear,
):
    explain_calls(_panel, "wb.widgets")
