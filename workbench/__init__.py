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
    from workbench.batch.plan import BatchPlan as BatchPlan
    from workbench.batch.rules import scale_lr as scale_lr
    from workbench.batching.laws import scaling_law as scaling_law
    from workbench.batching.lr import find_lr as find_lr
    from workbench.batching.noise import noise_scale as noise_scale
    from workbench.batching.planning import batch_plan as batch_plan
    from workbench.batching.reaching import steps_to_target as steps_to_target
    from workbench.calibrating import calibrate as calibrate
    from workbench.communicating.counting import collectives as collectives
    from workbench.communicating.emulating import ddp_twin as ddp_twin
    from workbench.communicating.timing import measure_collectives as measure_collectives
    from workbench.comparison import Comparison as Comparison
    from workbench.comparison import compare as compare
    from workbench.cost.cluster import Cluster as Cluster
    from workbench.device import Device as Device
    from workbench.diagnosing import climb as climb
    from workbench.diagnosing import diagnose as diagnose
    from workbench.diagnosis.diagnosis import Diagnosis as Diagnosis
    from workbench.diagnosis.evidence import Evidence as Evidence
    from workbench.diagnosis.proof import Proof as Proof
    from workbench.estimating import estimate_memory as estimate_memory
    from workbench.failure import Failure as Failure
    from workbench.failure import RunError as RunError
    from workbench.fitting.advising import would_fit as would_fit
    from workbench.fitting.climbing import memory_ladder as memory_ladder
    from workbench.fitting.comparing import compare_memory as compare_memory
    from workbench.fitting.largest import max_micro_batch as max_micro_batch
    from workbench.growing.curves import scaling_curve as scaling_curve
    from workbench.launcher.launching import launch as launch
    from workbench.launcher.manifests import kubernetes as kubernetes
    from workbench.launcher.slurm import Slurm as Slurm
    from workbench.launcher.sweeping import sweep as sweep
    from workbench.laws.law import ScalingLaw as ScalingLaw
    from workbench.measure.timer import StepTimer as StepTimer
    from workbench.measure.watched import watch as watch
    from workbench.measuring import find_leaks as find_leaks
    from workbench.measuring import measure_memory as measure_memory
    from workbench.memory.breakdown import MemoryBreakdown as MemoryBreakdown
    from workbench.planning.drawing import energy as energy
    from workbench.planning.making import plan as plan
    from workbench.run import Run as Run
    from workbench.scaling.curve import ScalingCurve as ScalingCurve
    from workbench.spec import RunSpec as RunSpec
    from workbench.task import Task as Task
    from workbench.timeline import Timeline as Timeline
    from workbench.traces.ranks import TraceSet as TraceSet
    from workbench.traces.trace import Trace as Trace
    from workbench.tracing import trace as trace

__version__ = "0.1.0"

_NAMES = {
    "workbench.batch.plan": "BatchPlan",
    "workbench.batch.rules": "scale_lr",
    "workbench.batching.laws": "scaling_law",
    "workbench.batching.lr": "find_lr",
    "workbench.batching.noise": "noise_scale",
    "workbench.batching.planning": "batch_plan",
    "workbench.batching.reaching": "steps_to_target",
    "workbench.calibrating": "calibrate",
    "workbench.communicating.counting": "collectives",
    "workbench.communicating.emulating": "ddp_twin",
    "workbench.communicating.timing": "measure_collectives",
    "workbench.comparison": "Comparison compare",
    "workbench.cost.cluster": "Cluster",
    "workbench.device": "Device",
    "workbench.diagnosing": "climb diagnose",
    "workbench.diagnosis.diagnosis": "Diagnosis",
    "workbench.diagnosis.evidence": "Evidence",
    "workbench.diagnosis.proof": "Proof",
    "workbench.estimating": "estimate_memory",
    "workbench.failure": "Failure RunError",
    "workbench.fitting.advising": "would_fit",
    "workbench.fitting.climbing": "memory_ladder",
    "workbench.fitting.comparing": "compare_memory",
    "workbench.fitting.largest": "max_micro_batch",
    "workbench.growing.curves": "scaling_curve",
    "workbench.launcher.launching": "launch",
    "workbench.launcher.manifests": "kubernetes",
    "workbench.launcher.slurm": "Slurm",
    "workbench.launcher.sweeping": "sweep",
    "workbench.laws.law": "ScalingLaw",
    "workbench.measure.timer": "StepTimer",
    "workbench.measure.watched": "watch",
    "workbench.measuring": "find_leaks measure_memory",
    "workbench.memory.breakdown": "MemoryBreakdown",
    "workbench.planning.drawing": "energy",
    "workbench.planning.making": "plan",
    "workbench.run": "Run",
    "workbench.scaling.curve": "ScalingCurve",
    "workbench.spec": "RunSpec",
    "workbench.task": "Task",
    "workbench.timeline": "Timeline",
    "workbench.traces.ranks": "TraceSet",
    "workbench.traces.trace": "Trace",
    "workbench.tracing": "trace",
    "workbench.plot": "plot",
    "workbench.widgets": "widgets",
}
"""Module → the public names that it has; the last two are modules themselves. The block above says the same to type checkers."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}: it offers {', '.join(__all__)}")
    home = importlib.import_module(_HOMES[name])
    value = globals()[name] = home if home.__name__ == f"workbench.{name}" else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
