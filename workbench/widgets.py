"""Collects all panels for notebooks, `wb.widgets.*`; each is in the `panel` folder of its package.

A panel is a thin VBox over values that are read or computed elsewhere: in each folder a model or follower computes, `html` makes HTML of
it, and the panel's own file holds the widgets. Every panel also has a static form, which a notebook shows before anything is run.

* `RunPanel`: a run, live. A Run shows itself by it: `run_panel(run)` is the one panel of that run.
* `runs`: the runs of a folder, to filter, to sort, to open and to compare.
* `LogView`: append-only text of many ranks, with a tab per rank.
* `ThroughputDoctor`: what holds a step back, what each knob would change, and the proof.
* `WhyNotLinear`: why N ranks give less than N times one, part by part, with more ranks, other links and mended parts predicted.
* `MemoryExplorer`: what a step's memory is made of, what each knob would change, and whether it fits.
* `ScalingExplorer`: what up to 10,000 GPUs would bring, with its interval and the linear extrapolation, and what limits.
* `BatchPlanner`: the learning rate for another batch, whether its rule holds there, and the steps and time to a target.
* `DataExplorer`: what an audit of data has found (groups with their pictures, classes, the order of an epoch), samples and shards.
* `TraceExplorer`: the threads and streams of a trace, to zoom into, to search, and to find operators in.
* `perfetto`: a trace in Perfetto's own viewer, without a network (extra `trace`).
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
