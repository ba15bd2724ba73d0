"""Pictures of results: the only home of matplotlib.

Each picture is one Axes-level function, `(result, ax=None) -> Axes`: it draws into the Axes it is given, or into a new figure that a
notebook shows by itself. No global state is changed; text is mid-grey on a transparent ground, so a picture reads in dark and light
themes; axis labels carry the unit and never a measured number. One colour per phase and per part of a step everywhere: `colors`.
What is predicted is paler than what was measured, or hollow.

* `step_time`: where a step goes, a stacked bar per rank.
* `compare`: the steps of several runs on the same axes, with what the change brought.
* `metrics`: the loss against the step, and the learning rate if it varies.
* `diagnosis`: what a step is made of, and what each remedy would make of it.
* `proof`: one remedy, predicted beside measured.
* `ladder`: the throughput after one proved remedy on top of another.
* `memory_ladder`: the memory after one change on top of another, until it fits a device.
* `loader_curve`: loader and step over the number of workers.
* `memory`: what the fullest moment of a step is made of, what lies beside it, and what a device has.
* `memory_timeline`: the same over the steps, with the peak and its moment.
* `unprepared`: what preparing the data beforehand would gain, over the costs of training and of loading.
"""

from workbench.plot.bars import compare, step_time
from workbench.plot.curves import metrics
from workbench.plot.diagnosis import diagnosis
from workbench.plot.ladder import ladder, proof
from workbench.plot.loader_curve import loader_curve
from workbench.plot.memory import memory
from workbench.plot.memory_ladder import memory_ladder
from workbench.plot.memory_timeline import memory_timeline
from workbench.plot.unprepared import unprepared

__all__ = [
    "step_time",
    "compare",
    "metrics",
    "diagnosis",
    "proof",
    "ladder",
    "loader_curve",
    "memory",
    "memory_ladder",
    "memory_timeline",
    "unprepared",
]
