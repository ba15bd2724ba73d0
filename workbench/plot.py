"""Collects all pictures of results, `wb.plot.*`; each is in the `plot` module of its package.

A picture is one Axes-level function, `(result, ax=None) -> Axes`: it draws into the Axes it is given, or into a new figure that a notebook
shows by itself, and that `.figure.savefig("picture.png")` of the Axes saves. It changes no global state. Its background is matplotlib's
`figure.facecolor`, light or dark, and text is legible on both; axis labels carry the unit and never a measured number. What is measured
is solid; what is predicted is hatched, dashed or hollow (`core/display/axes.py`). Phases and parts of a step have the same colour
everywhere (`core/display/colors.py`).

The first line of each says what it draws; the gallery of the documentation shows them all.
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
