"""Panels for notebooks: the only home of ipywidgets.

A panel is a thin VBox over values that are read or computed elsewhere. For a run: `follow` reads a run directory into a `Snapshot`; `faces`
makes HTML of a snapshot; `panel` holds the widgets and puts the HTML into them, four times a second while a run lives. For a diagnosis:
`whatif` asks its model, `doctor_faces` makes HTML, `knobs` and `doctor` hold the widgets. For memory: another process makes fake runs
(`estimators`), `explorer_faces` and `explorer_pictures` make HTML, `explorer_knobs` and `explorer` hold the widgets. For a batch:
`planner_model` plans, `planner_faces` makes HTML, `planner` holds the widgets. For a trace: `trace_model` knows it, `trace_faces` makes
HTML, `trace_view` draws in the page, `trace_explorer` holds the widgets. Every panel also has a static face, which a notebook shows before
anything is run.

* `RunPanel`: a run, live. A Run shows itself by it: `run_panel(run)` is the one panel of that run.
* `LogView`: append-only text of many ranks, with a tab per rank.
* `ThroughputDoctor`: what holds a step back, what each knob would change, and the proof.
* `MemoryExplorer`: what a step's memory is made of, what each knob would change, and whether it fits.
* `ScalingExplorer`: what up to 10,000 GPUs would bring, with its band and the naive line, and what limits.
* `BatchPlanner`: the learning rate for another batch, whether its rule holds there, and the steps and time to a target.
* `TraceExplorer`: the threads and streams of a trace, to zoom into, to search, and to find operators in.
* `perfetto`: a trace in Perfetto's own pages, without a network (extra `trace`).
"""

from workbench.batch.panel.planner import BatchPlanner
from workbench.diagnosis.panel.doctor import ThroughputDoctor
from workbench.memory.panel.explorer import MemoryExplorer
from workbench.runs.panel.panel import LogView, RunPanel, run_panel
from workbench.scaling.panel.explorer import ScalingExplorer
from workbench.traces.panel.explorer import TraceExplorer
from workbench.traces.panel.perfetto import perfetto

__all__ = [
    "RunPanel",
    "run_panel",
    "LogView",
    "ThroughputDoctor",
    "MemoryExplorer",
    "BatchPlanner",
    "ScalingExplorer",
    "TraceExplorer",
    "perfetto",
]
