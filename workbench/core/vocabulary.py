"""Names the phases of a training step, the parts of a diagnosed step and the parts of its memory.

Their colours are in `core/display/colors.py`. Each part of memory is a field of `MemoryBreakdown` (`memory/analysis/breakdown.py`); a
new part needs all three, which tests compare.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PHASES = ("data_wait", "h2d", "forward", "backward", "optimizer", "other")
"""What a step is made of, in the order they happen. `data_wait`: the loop is blocked in `next(loader)`. `h2d`: copies to the device.
`forward`: from the model's call to the call of backward, the loss included. `backward`: under DDP the reduction of the gradients is in it.
`other`: the rest, never dropped."""

PART_WORDS: Mapping[str, str] = {
    "data_wait": "waiting for data",
    "transfer": "copies to the device",
    "compute": "forward and backward",
    "host": "Python, launches, sleeping",
    "optimizer": "optimizer",
    "communication": "communication",
    "straggler": "waiting for the slowest rank",
    "stalls": "stalls, spread over all steps",
}
"""Part of a diagnosed step → its name in a sentence."""
PARTS = tuple(PART_WORDS)
"""What a diagnosed step's length is the sum of. `data_wait`: what the loader adds to the step. `transfer`: copies to the device
that nothing hides. `compute`: operators of forward and backward. `host`: Python, launches, sleeping: no operator runs. `optimizer`: its
step. `communication`: what the reduction of the gradients adds, its own stalls included. `straggler`: what the slowest rank adds.
`stalls`: pauses, spread over all steps."""

MEMORY_PHASES = ("init", "data", "forward", "backward", "between", "optimizer", "end")
"""Phases of a step in a memory log; "between": after a backward, before the next micro-step or the optimizer; "end": gradients are
cleared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """A part of memory, and the categories of the storages that are counted in it."""

    name: str
    """Public: a field of MemoryBreakdown."""
    categories: tuple[str, ...]
    """Categories of storages, as memory logs name them."""
    noun: str = ""
    """What its storages are called in a sentence; empty = they are named by the operator that made them."""
    of_module: bool = False
    """Does a sentence name their module as well?"""
    lasting: bool = False
    """Is it there all the time, so that it does not explain the peak in forward or backward?"""
    planned: str = ""
    """Its name in the memory of a Plan; empty = plans do not estimate it."""


MEMORY_PARTS = (
    MemoryPart(
        name="parameters",
        categories=("parameter", "unsharded_parameter"),
        noun="parameters",
        of_module=True,
        lasting=True,
        planned="weights",
    ),
    MemoryPart(name="gradients", categories=("gradient", "bucket"), noun="gradients", of_module=True, planned="gradients"),
    MemoryPart(name="optimizer_states", categories=("optimizer_state",), noun="optimizer states", lasting=True, planned="optimizer states"),
    MemoryPart(name="activations", categories=("activation", "recompute"), planned="activations"),
    MemoryPart(name="temporaries", categories=("temp_forward", "temp_backward", "temp_optimizer", "workspace")),
    MemoryPart(name="inputs", categories=("input",), noun="the batch"),
    MemoryPart(name="buffers", categories=("buffer",), noun="buffers", of_module=True, lasting=True),
    MemoryPart(name="other", categories=("other",)),
)
"""In the order in which they are stacked and listed."""
GROUPS = tuple(part.name for part in MEMORY_PARTS)
"""Names of the parts."""
CATEGORIES: Mapping[str, str] = {category: part.name for part in MEMORY_PARTS for category in part.categories}
"""Category of a storage → name of the part that it is counted in."""
PLANNED: Mapping[str, str] = {part.planned: part.name for part in MEMORY_PARTS if part.planned} | {"outside": "other"}
"""What holds memory in a Plan → the part that it is; "outside" is outside of the allocator."""
