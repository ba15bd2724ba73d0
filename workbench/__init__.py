"""The workbench: see where a training step goes, predict what a change would gain, prove it.

The nouns, and how one becomes the next:

* A `Task` says what is trained: zero-argument builders of a model and a dataset, a loss, an optimizer.
* A `RunSpec` turns every knob of it. A what-if is a changed spec: `spec.replace(num_workers=2)`.
* `launch` starts a spec, or any training script, under torchrun and returns a `Run` at once: live in a notebook, a directory on disk.
* A Run holds a `Timeline` per rank: where each step's time went, phase by phase, summing to the step.
* `watch` and `StepTimer` get a Timeline from a loop of your own, in this process.
* `sweep` runs many specs; `compare` sets runs side by side.
* `diagnose` finds out by experiment what holds a step back: a `Diagnosis`, with remedies and what each is predicted to gain.
* `diagnosis.prove()` runs a remedy and sets prediction and measurement side by side: a `Proof`. `climb` goes on until nothing is left.
* A `MemoryBreakdown` says what fills a step's memory at the fullest moment, measured or predicted, and whether it fits a device.

    import workbench as wb
    run = wb.launch("train.py", nproc_per_node=2, watch=True).wait()
    run.timelines[0]
    diagnosis = wb.diagnose(step, loader)
    diagnosis.prove()

Names are loaded when they are used: importing the workbench loads neither torch nor pandas, matplotlib or ipywidgets.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench import plot as plot
    from workbench import widgets as widgets
    from workbench.calibrating import calibrate
    from workbench.comparison import Comparison, compare
    from workbench.device import Device
    from workbench.diagnosing import climb, diagnose
    from workbench.diagnosis import Diagnosis, Evidence, Proof
    from workbench.estimating import estimate_memory
    from workbench.failure import Failure, RunError
    from workbench.fitting import compare_memory, max_micro_batch, memory_ladder, would_fit
    from workbench.launcher import launch, sweep
    from workbench.measure import StepTimer, watch
    from workbench.measuring import find_leaks, measure_memory
    from workbench.memory import MemoryBreakdown
    from workbench.run import Run
    from workbench.spec import RunSpec
    from workbench.task import Task
    from workbench.timeline import Timeline

__version__ = "0.1.0"

_HOMES = {
    "Comparison": "comparison",
    "Device": "device",
    "Diagnosis": "diagnosis",
    "Evidence": "diagnosis",
    "Failure": "failure",
    "MemoryBreakdown": "memory",
    "Proof": "diagnosis",
    "Run": "run",
    "RunError": "failure",
    "RunSpec": "spec",
    "StepTimer": "measure",
    "Task": "task",
    "Timeline": "timeline",
    "calibrate": "calibrating",
    "climb": "diagnosing",
    "compare": "comparison",
    "compare_memory": "fitting",
    "diagnose": "diagnosing",
    "estimate_memory": "estimating",
    "find_leaks": "measuring",
    "launch": "launcher",
    "max_micro_batch": "fitting",
    "measure_memory": "measuring",
    "memory_ladder": "fitting",
    "plot": "",
    "sweep": "launcher",
    "watch": "measure",
    "widgets": "",
    "would_fit": "fitting",
}
"""Public name → the room it lives in; an empty one is a room itself."""

__all__ = [
    "Comparison",
    "Device",
    "Diagnosis",
    "Evidence",
    "Failure",
    "MemoryBreakdown",
    "Proof",
    "Run",
    "RunError",
    "RunSpec",
    "StepTimer",
    "Task",
    "Timeline",
    "calibrate",
    "climb",
    "compare",
    "compare_memory",
    "diagnose",
    "estimate_memory",
    "find_leaks",
    "launch",
    "max_micro_batch",
    "measure_memory",
    "memory_ladder",
    "plot",
    "sweep",
    "watch",
    "widgets",
    "would_fit",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}: it offers {', '.join(_HOMES)}")
    home = _HOMES[name]
    if not home:
        return importlib.import_module(f"workbench.{name}")
    value = getattr(importlib.import_module(f"workbench.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
