"""Collects all pictures of results, `wb.plot.*`; each is in the `plot` module of its package.

A picture is one Axes-level function, `(result, ax=None) -> Axes`: it draws into the Axes it is given, or into a new figure that a notebook
shows by itself. It changes no global state. Its ground is matplotlib's `figure.facecolor`, light or dark, and text reads on it; axis labels
carry the unit and never a measured number. What is measured is solid; what is predicted is hatched, dashed or hollow
(`core/display/axes.py`). Phases and parts of a step have the same colour everywhere (`core/display/colors.py`).

* `step_time`: where a step goes, a stacked bar per rank.
* `compare`: the steps of several runs on the same axes, with what the change brought.
* `metrics`: the loss against the step, and the learning rate if it varies.
* `diagnosis`: what a step is made of, and what each remedy would make of it.
* `proof`: one remedy, predicted beside measured.
* `ladder`: the throughput after one proved remedy on top of another.
* `what_changed`: what each difference between two runs brings; `bisection`: what the commits of a range bring.
* `scaled_lr`: a learning rate over the batch, by each rule, and where the one that was used leads.
* `schedule`: the learning rate over the steps, from the real scheduler; old and new plan in one picture.
* `lr_range`: losses over the learning rate for several seeds, what each rule suggests, and the race that decided.
* `memory_ladder`: the memory after one change on top of another, until it fits a device.
* `loader_curve`: loader and step over the number of workers.
* `memory`: what the peak of a step consists of, what else takes memory, and what a device has.
* `memory_timeline`: the same over the steps, with the peak and its moment.
* `steps_to_target`: steps to a target over the batch, by rule, with the law they follow; `critical_batch`: that law alone.
* `time_to_target`: time to a target over the batch, by the number of processes.
* `batch_lengths`: the memory of each step by the longest batch in it, and what a device has.
* `noise_scale`: the gradient noise scale as its estimate narrows, and how it moves over the training.
* `breakdown`: each step of a trace in parts that add up to it.
* `flame`: the calls of a thread of a trace, each below its caller and as wide as its share of the step.
* `ranks`: the mean step of each rank of a run, from their traces, and who holds the others up.
* `critical`: what holds a traced step back: how long each resource works, and how long alone; `critical_path`: what its length consists of.
* `kernels`: the kernels of a device, with occupancy and tensor cores; `copies`: bytes per second; `sequences`: what follows what, and gaps.
* `modules`: the modules of a trace, forward and backward.
* `roofline`: how fast the operators of a trace are over their intensity, under what the device can do.
* `idle`: what the host does while the device, or the thread that trains, has nothing to do.
* `launches`: how many launches wait for the device.
* `memory_curve`: allocated bytes over the time of a trace, and who holds the peak.
* `timeline`: the threads and streams of a trace, and what each was at when.
* `unprepared`: what preparing the data beforehand would gain, over the costs of training and of loading.
* `plan`: what the steps of planned layouts are made of; `plan_memory`: their memory; `plan_front`: GPUs against time.
* `estimated_time`: what a step on a device that is not here is made of, by kind of operator.
* `plan_proof`: the loss over the samples under two plans of a batch, and where the new one was predicted to catch up.
* `scaling`: throughput over the number of processes, its prediction beyond them, and the naive line.
* `scaling_efficiency`: the same as a share of perfect scaling.
* `why_not_linear`: a waterfall from N × one rank, part by part, down to what N ranks give.
* `scaling_law`: loss against compute, a line for each size of the model, and the best that compute can buy.
* `duplicates`: equal and nearly equal pictures of a dataset, with their splits and labels.
* `samples`: some samples of a dataset; `formats`: what reading one costs in each format.
* `traffic`: what a rank sends in a step, by module; `links`: measured collectives over their size; `twin`: the buckets of DDP's twin.
"""

from workbench.batch.plot import lr_range, noise_scale, plan_proof, scaled_lr, schedule
from workbench.batch.plot_steps import batch_lengths, critical_batch, steps_to_target, time_to_target
from workbench.cluster.plot import estimated_time, links, plan, plan_front, plan_memory, traffic, twin
from workbench.data.plot import duplicates
from workbench.data.plot_formats import formats, samples
from workbench.diagnosis.plot import diagnosis, ladder, loader_curve, proof, unprepared
from workbench.diagnosis.plot_gap import why_not_linear
from workbench.diagnosis.plot_regression import bisection, what_changed
from workbench.memory.plot import memory, memory_ladder, memory_timeline
from workbench.runs.plot import compare, metrics, step_time
from workbench.scaling.plot import scaling, scaling_efficiency, scaling_law
from workbench.traces.plot.curves import copies, launches, memory_curve
from workbench.traces.plot.flame import flame
from workbench.traces.plot.operators import kernels, modules, sequences
from workbench.traces.plot.roofline import roofline
from workbench.traces.plot.step import critical, critical_path, idle
from workbench.traces.plot.timeline import breakdown, ranks, timeline

__all__ = ["step_time", "compare", "metrics"]
__all__ += ["traffic", "links", "twin", "plan", "plan_front", "plan_memory", "estimated_time"]
__all__ += ["diagnosis", "proof", "ladder", "loader_curve", "unprepared", "why_not_linear", "what_changed", "bisection"]
__all__ += ["memory", "memory_ladder", "memory_timeline"]
__all__ += ["lr_range", "scaled_lr", "schedule", "noise_scale", "plan_proof", "batch_lengths"]
__all__ += ["steps_to_target", "critical_batch", "time_to_target"]
__all__ += ["breakdown", "ranks", "timeline", "flame", "memory_curve", "launches", "idle", "roofline", "modules"]
__all__ += ["critical", "critical_path", "kernels", "copies", "sequences"]
__all__ += ["scaling", "scaling_efficiency", "scaling_law"]
__all__ += ["duplicates", "samples", "formats"]
