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
* `trace` captures some steps with torch's profiler, `Trace.load` reads such a file: a `Trace`, which answers in seconds where its steps go.
  Those of several ranks are a `TraceSet`, which says who waits for whom.
* A `MemoryBreakdown` says what fills a step's memory at the fullest moment, measured or predicted, and whether it fits a device.
* A `BatchPlan` is micro_batch × accumulation × world_size with its learning rate. `scale_lr` takes a rate to another batch and says how far
  that holds; `find_lr` finds one by sweeps and a race; `noise_scale` says from which batch on samples pay less; `steps_to_target` tries;
  `batch_plan` recommends a plan by memory, throughput and noise, and proves it against the present one.
* A `ScalingLaw` says how the loss falls with parameters and data, from many small runs that `scaling_law` makes.
* A `ScalingCurve` is throughput against the number of processes, which `scaling_curve` measures; fitted, it says what more would bring,
  always beside the naive line. A
  `Cluster` has the GPUs and links that predictions beyond this machine are made for; `plan` finds the layouts of a model on it that fit.
* `collectives` counts what ranks send each other in a step of your module, without any: `Traffic`. `measure_collectives` times such between
  real ranks, `ddp_twin` runs DDP's own reducer over a network that is only reckoned.

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
    from workbench.batch import BatchPlan, scale_lr
    from workbench.batching import batch_plan, find_lr, noise_scale, scaling_law, steps_to_target
    from workbench.calibrating import calibrate
    from workbench.communicating import collectives, ddp_twin, measure_collectives
    from workbench.comparison import Comparison, compare
    from workbench.cost import Cluster
    from workbench.device import Device
    from workbench.diagnosing import climb, diagnose
    from workbench.diagnosis import Diagnosis, Evidence, Proof
    from workbench.estimating import estimate_memory
    from workbench.failure import Failure, RunError
    from workbench.fitting import compare_memory, max_micro_batch, memory_ladder, would_fit
    from workbench.growing import scaling_curve
    from workbench.launcher import Slurm, kubernetes, launch, sweep
    from workbench.laws import ScalingLaw
    from workbench.measure import StepTimer, watch
    from workbench.measuring import find_leaks, measure_memory
    from workbench.memory import MemoryBreakdown
    from workbench.planning import energy, plan
    from workbench.run import Run
    from workbench.scaling import ScalingCurve
    from workbench.spec import RunSpec
    from workbench.task import Task
    from workbench.timeline import Timeline
    from workbench.traces import Trace, TraceSet
    from workbench.tracing import trace

__version__ = "0.1.0"

_HOMES = {
    "BatchPlan": "batch",
    "Cluster": "cost",
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
    "ScalingCurve": "scaling",
    "ScalingLaw": "laws",
    "Slurm": "launcher",
    "StepTimer": "measure",
    "Task": "task",
    "Timeline": "timeline",
    "Trace": "traces",
    "TraceSet": "traces",
    "batch_plan": "batching",
    "calibrate": "calibrating",
    "climb": "diagnosing",
    "collectives": "communicating",
    "compare": "comparison",
    "compare_memory": "fitting",
    "ddp_twin": "communicating",
    "diagnose": "diagnosing",
    "energy": "planning",
    "estimate_memory": "estimating",
    "find_leaks": "measuring",
    "find_lr": "batching",
    "kubernetes": "launcher",
    "launch": "launcher",
    "max_micro_batch": "fitting",
    "measure_collectives": "communicating",
    "measure_memory": "measuring",
    "memory_ladder": "fitting",
    "noise_scale": "batching",
    "plan": "planning",
    "plot": "",
    "scale_lr": "batch",
    "scaling_curve": "growing",
    "scaling_law": "batching",
    "steps_to_target": "batching",
    "sweep": "launcher",
    "trace": "tracing",
    "watch": "measure",
    "widgets": "",
    "would_fit": "fitting",
}
"""Public name → the room it lives in; an empty one is a room itself."""

__all__ = [
    "BatchPlan",
    "Cluster",
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
    "ScalingCurve",
    "ScalingLaw",
    "Slurm",
    "StepTimer",
    "Task",
    "Timeline",
    "Trace",
    "TraceSet",
    "batch_plan",
    "calibrate",
    "climb",
    "collectives",
    "compare",
    "compare_memory",
    "ddp_twin",
    "diagnose",
    "energy",
    "estimate_memory",
    "find_leaks",
    "find_lr",
    "kubernetes",
    "launch",
    "max_micro_batch",
    "measure_collectives",
    "measure_memory",
    "memory_ladder",
    "noise_scale",
    "plan",
    "plot",
    "scale_lr",
    "scaling_curve",
    "scaling_law",
    "steps_to_target",
    "sweep",
    "trace",
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
