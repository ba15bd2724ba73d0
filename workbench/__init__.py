"""The workbench for PyTorch training: shows where a training step's time and memory go, predicts what a change would gain, and proves it.

The types of results, and how each leads to the next:

* A `Task` says what is trained: zero-argument builders of a model and a dataset, a loss, an optimizer.
* A `RunSpec` has every knob as a field. A what-if is a changed spec: `spec.replace(num_workers=2)`.
* `launch` starts a spec, or any training script, under torchrun and returns a `Run` at once: live in a notebook, a directory on disk.
* `prove_resume` kills a training and resumes it: a `ResumeProof` says whether it ends bit for bit like one that was never killed.
* `export_weights` writes weights in the Hugging Face hub's or torch.distributed.checkpoint's format; `import_weights` reads both.
* `same_twice` trains a spec twice: a `RepeatProof` names the first step and item in which the two trainings differ.
* `recompute` repeats steps of a run on as many ranks: a `Recomputation` names the rank that computed a step wrongly.
* `health` names what went wrong in a run: a hang, NaN, loss spikes, a loss that does not fall, slow ranks.
* A Run holds a `Timeline` per rank: where each step's time went, phase by phase, summing to the step.
* `watch` and `StepTimer` get a Timeline from a loop of your own, in this process.
* `sweep` runs many specs; `compare` compares runs; `check_run` checks a run against budgets; `list_runs` lists the runs in a folder;
  `report` makes a page about a run; `export` writes a run for TensorBoard, MLflow or Weights & Biases.
* `sanity` checks model, loss and data for the usual faults before a large run: a `SanityReport`.
* `diverge` finds the first operator at which two trainings that should agree differ, and tells a bug from rounding: a `Divergence`.
* `replay` repeats a step of a run that went wrong, and says whether data, learning rate or numerics are to blame: a `StepReplay`.
* `what_changed` finds what made a run slower, larger or worse than another: a `WhatChanged`; `bisect` finds the commit: a `Bisection`.
* `diagnose` finds out by experiment what limits a step: a `Diagnosis`, with remedies and the predicted gain of each.
* `diagnosis.prove()` runs a remedy and shows prediction and measurement side by side: a `Proof`. `climb` repeats this until no remedy
  is left.
* `trace` captures some steps with torch's profiler, and `Trace.load` reads such a file: a `Trace` shows where the time of its steps goes.
  The traces of several ranks are a `TraceSet`, which shows which rank waits for which.
* A `MemoryBreakdown` says what fills a step's memory at its peak, measured or predicted, and whether the step fits a device.
* A `BatchPlan` is micro_batch × accumulation × world_size with its learning rate. `batch_plan` recommends one from memory, throughput and
  noise, and proves it against the present one. `noise_scale` measures above which batch size more samples gain less, and `steps_to_target`
  tests it; `find_lr` finds a learning rate by sweeps and a race, and `scale_lr` transfers it to another batch size.
* `batch_lengths` predicts from the lengths of the samples which step will run out of memory, and what padding costs: a `BatchLengths`.
* A `ScalingLaw` says how the loss falls with parameters and data; `scaling_law` fits it to many small runs.
* A `ScalingCurve` is throughput against the number of processes, which `scaling_curve` measures; a fit predicts it for more processes,
  always beside the linear extrapolation.
* `why_not_linear` finds out by experiment why N ranks are slower than N times one: a `WhyNotLinear`, whose parts add up to the gap.
* A `Cluster` describes the GPUs and links of predictions beyond this machine; `plan` finds the layouts of a model that fit it. For a
  `Transformer`, its sizes are enough.
* `estimate_time` predicts the seconds of a step on a device that this machine lacks: a `StepTime`, by kind of operator.
* `collectives` counts in a dry run what the ranks of your module would send to each other in a step: `Traffic`. `measure_collectives`
  times collectives between real ranks; `ddp_twin` runs DDP's own reducer over a simulated network.
* `wb.data` reads samples from any storage format through one interface; its `ResumableSampler` resumes anywhere in an epoch.

    import workbench as wb
    run = wb.launch("train.py", nproc_per_node=2, watch=True).wait()
    run.timelines[0]
    diagnosis = wb.diagnose(step, loader)
    diagnosis.prove()

Names are loaded when they are used: importing the workbench loads neither torch nor pandas, matplotlib or ipywidgets.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench import data as data, plot as plot, widgets as widgets
    from workbench.batch.analysis.lr_scaling_rules import scale_lr as scale_lr
    from workbench.batch.analysis.plan import BatchPlan as BatchPlan
    from workbench.batch.api import find_lr as find_lr, noise_scale as noise_scale
    from workbench.batch.batch_plan import batch_plan as batch_plan
    from workbench.batch.lengths import batch_lengths as batch_lengths
    from workbench.batch.steps_to_target import steps_to_target as steps_to_target
    from workbench.cluster.analysis.cluster import Cluster as Cluster
    from workbench.cluster.analysis.transformer import Transformer as Transformer
    from workbench.cluster.api import ddp_twin as ddp_twin, measure_collectives as measure_collectives
    from workbench.cluster.count_collectives import collectives as collectives
    from workbench.cluster.estimate_time import estimate_time as estimate_time
    from workbench.cluster.plan import energy as energy, plan as plan
    from workbench.core.device import Device as Device
    from workbench.diagnosis.analysis.diagnosis import Diagnosis as Diagnosis
    from workbench.diagnosis.analysis.evidence import Evidence as Evidence
    from workbench.diagnosis.analysis.proof import Proof as Proof
    from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear as WhyNotLinear
    from workbench.diagnosis.api import climb as climb, diagnose as diagnose
    from workbench.diagnosis.correctness import diverge as diverge, replay as replay, sanity as sanity
    from workbench.diagnosis.regression import bisect as bisect, what_changed as what_changed
    from workbench.diagnosis.why_not_linear import why_not_linear as why_not_linear
    from workbench.memory.analysis.breakdown import MemoryBreakdown as MemoryBreakdown
    from workbench.memory.api import compare_memory as compare_memory, estimate_memory as estimate_memory, find_leaks as find_leaks
    from workbench.memory.api import measure_memory as measure_memory
    from workbench.memory.calibrate import calibrate as calibrate
    from workbench.memory.ladder import memory_ladder as memory_ladder
    from workbench.memory.max_micro_batch import max_micro_batch as max_micro_batch
    from workbench.memory.would_fit import would_fit as would_fit
    from workbench.runs.budgets import RunCheck as RunCheck, check_run as check_run
    from workbench.runs.compare import Comparison as Comparison, compare as compare
    from workbench.runs.export import export as export
    from workbench.runs.failure import Failure as Failure, RunError as RunError
    from workbench.runs.health import health as health
    from workbench.runs.launch.kubernetes import kubernetes as kubernetes
    from workbench.runs.launch.launch import launch as launch
    from workbench.runs.launch.prove_layout_resume import LayoutResumeProof as LayoutResumeProof
    from workbench.runs.launch.prove_resume import RepeatProof as RepeatProof, ResumeProof as ResumeProof, prove_resume as prove_resume
    from workbench.runs.launch.prove_resume import same_twice as same_twice
    from workbench.runs.launch.prove_script_resume import ScriptResumeProof as ScriptResumeProof
    from workbench.runs.launch.recompute import Recomputation as Recomputation, recompute as recompute
    from workbench.runs.launch.slurm import Slurm as Slurm
    from workbench.runs.launch.sweep import sweep as sweep
    from workbench.runs.listing import list_runs as list_runs
    from workbench.runs.page import report as report
    from workbench.runs.run import Run as Run
    from workbench.runs.spec import RunSpec as RunSpec
    from workbench.runs.task import Task as Task
    from workbench.scaling.analysis.curve.curve import ScalingCurve as ScalingCurve
    from workbench.scaling.analysis.law.law import ScalingLaw as ScalingLaw
    from workbench.scaling.api import scaling_curve as scaling_curve, scaling_law as scaling_law
    from workbench.timeline.step_timer import StepTimer as StepTimer
    from workbench.timeline.timeline import Timeline as Timeline
    from workbench.timeline.watch import watch as watch
    from workbench.timeline.watch_script import watching as watching
    from workbench.traces.analysis.trace import Trace as Trace
    from workbench.traces.analysis.trace_set import TraceSet as TraceSet
    from workbench.traces.api import trace as trace
    from workbench.train.export_weights import export_weights as export_weights, import_weights as import_weights


__version__ = "0.1.0"

_NAMES = {
    "workbench.batch.analysis.lr_scaling_rules": "scale_lr",
    "workbench.batch.analysis.plan": "BatchPlan",
    "workbench.batch.api": "find_lr noise_scale",
    "workbench.batch.batch_plan": "batch_plan",
    "workbench.batch.lengths": "batch_lengths",
    "workbench.batch.steps_to_target": "steps_to_target",
    "workbench.cluster.analysis.cluster": "Cluster",
    "workbench.cluster.analysis.transformer": "Transformer",
    "workbench.cluster.api": "ddp_twin measure_collectives",
    "workbench.cluster.count_collectives": "collectives",
    "workbench.cluster.estimate_time": "estimate_time",
    "workbench.cluster.plan": "energy plan",
    "workbench.core.device": "Device",
    "workbench.diagnosis.analysis.diagnosis": "Diagnosis",
    "workbench.diagnosis.analysis.evidence": "Evidence",
    "workbench.diagnosis.analysis.proof": "Proof",
    "workbench.diagnosis.analysis.why_not_linear": "WhyNotLinear",
    "workbench.diagnosis.api": "climb diagnose",
    "workbench.diagnosis.correctness": "diverge replay sanity",
    "workbench.diagnosis.regression": "bisect what_changed",
    "workbench.diagnosis.why_not_linear": "why_not_linear",
    "workbench.memory.analysis.breakdown": "MemoryBreakdown",
    "workbench.memory.api": "compare_memory estimate_memory find_leaks measure_memory",
    "workbench.memory.calibrate": "calibrate",
    "workbench.memory.ladder": "memory_ladder",
    "workbench.memory.max_micro_batch": "max_micro_batch",
    "workbench.memory.would_fit": "would_fit",
    "workbench.runs.budgets": "RunCheck check_run",
    "workbench.runs.compare": "Comparison compare",
    "workbench.runs.export": "export",
    "workbench.runs.failure": "Failure RunError",
    "workbench.runs.health": "health",
    "workbench.runs.launch.kubernetes": "kubernetes",
    "workbench.runs.launch.launch": "launch",
    "workbench.runs.launch.prove_layout_resume": "LayoutResumeProof",
    "workbench.runs.launch.prove_resume": "RepeatProof ResumeProof prove_resume same_twice",
    "workbench.runs.launch.prove_script_resume": "ScriptResumeProof",
    "workbench.runs.launch.recompute": "Recomputation recompute",
    "workbench.runs.launch.slurm": "Slurm",
    "workbench.runs.launch.sweep": "sweep",
    "workbench.runs.listing": "list_runs",
    "workbench.runs.page": "report",
    "workbench.runs.run": "Run",
    "workbench.runs.spec": "RunSpec",
    "workbench.runs.task": "Task",
    "workbench.scaling.analysis.curve.curve": "ScalingCurve",
    "workbench.scaling.analysis.law.law": "ScalingLaw",
    "workbench.scaling.api": "scaling_curve scaling_law",
    "workbench.timeline.step_timer": "StepTimer",
    "workbench.timeline.timeline": "Timeline",
    "workbench.timeline.watch": "watch",
    "workbench.timeline.watch_script": "watching",
    "workbench.traces.analysis.trace": "Trace",
    "workbench.traces.analysis.trace_set": "TraceSet",
    "workbench.traces.api": "trace",
    "workbench.train.export_weights": "export_weights import_weights",
    "workbench.data": "data",
    "workbench.plot": "plot",
    "workbench.widgets": "widgets",
}
"""Module → the public names that it has: what the imports above say to type checkers; the last three are modules themselves."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


if "ipykernel" in sys.modules:
    importlib.import_module("workbench.core.progress")  # notes when cells begin, so that lines of long calls can be removed at their end


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from workbench.core.checks import did_you_mean

        near = did_you_mean(name, __all__).strip()
        raise AttributeError(f"module 'workbench' has no attribute {name!r}: {near or 'it offers ' + ', '.join(__all__)}")
    home = importlib.import_module(_HOMES[name])
    value = globals()[name] = home if home.__name__ == f"workbench.{name}" else getattr(home, name)
    if isinstance(value, type):
        from workbench.core.synonyms import explain_calls

        explain_calls(value)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
