"""Fitting: what changes of a spec do to its memory, the largest micro-batch that fits a device, and the cheapest changes that make it fit.

Every answer is a fake run of the changed program, or exact between fake runs (`memory.family`).
"""

from workbench.fitting.advising import would_fit as would_fit
from workbench.fitting.climbing import memory_ladder as memory_ladder
from workbench.fitting.climbing import timed_estimate as timed_estimate
from workbench.fitting.comparing import compare_memory as compare_memory
from workbench.fitting.largest import batch_family as batch_family
from workbench.fitting.largest import max_micro_batch as max_micro_batch
from workbench.fitting.places import MARGIN as MARGIN
