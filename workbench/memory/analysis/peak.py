"""Reading: from a log to the numbers of its fullest moment, as a CPU holds them or as CUDA's allocator counts them."""

from typing import Any

import numpy as np

from workbench.core.vocabulary import GROUPS, MEMORY_PHASES
from workbench.memory.analysis.allocator import CachingAllocator
from workbench.memory.analysis.holders import Holder, holders_at, scratch_of, telling, unsplit_of
from workbench.memory.analysis.log import MemoryLog
from workbench.memory.analysis.over_time import MemoryTimeline
from workbench.memory.analysis.replay import Numbers, Replay

CUDA_GRANULARITY = 512
"""Bytes that CUDA's caching allocator rounds each request up to a multiple of (c10/core/AllocatorConfig.h, kMinBlockSize)."""
ONE_STEP = "one step only: states that the optimizer makes in it may lack at its peak; the second step tells"


def read(
    log: MemoryLog, *, granularity: int, simulated: bool, reserved: int | None, scratch: int, retries: int, notes: tuple[str, ...]
) -> dict[str, Any]:
    """The fields of a MemoryBreakdown that a log decides.

    Args:
        log: what a recorder wrote.
        granularity: bytes that each storage is rounded up to a multiple of.
        simulated: CUDA's allocator is simulated: it says what is reserved, and counts what it does not split off a block.
        reserved: measured, where it is known.
        scratch: bytes of the measured peak above the log's.
        retries: measured.
        notes: beside those of the log.
    """
    replay = Replay(log, granularity)
    counted: Numbers = replay.total
    if simulated:
        allocator = CachingAllocator().run(replay.events)
        reserved, retries = reserved or allocator.peak_reserved, retries or allocator.retries
        if granularity == CUDA_GRANULARITY:
            counted = np.array(allocator.history, np.int64)
    position = int(counted.argmax())
    mark = replay.phase_of(position)
    groups = {group: int(replay.held[position, column]) for column, group in enumerate(GROUPS)}
    unsplit = int(counted[position] - replay.total[position])
    groups["temporaries"] += scratch
    groups["other"] += unsplit
    more = [made(held, mark.phase) for made, held in ((scratch_of, scratch), (unsplit_of, unsplit)) if held]
    holders = tuple(sorted((*holders_at(replay, position), *more), key=lambda h: -h.bytes))
    steps, phases = replay.peaks("step", counted), replay.peaks("phase", counted)
    steps[mark.step] += scratch
    phases[mark.phase] += scratch
    later = [held for step, held in steps.items() if step > min(steps)]
    return {
        **groups,
        "reserved": reserved,
        "retries": retries,
        "peak_moment": _moment(replay.moment(position), holders),
        "first_step": steps[min(steps)],
        "steady": max(later, default=steps[min(steps)]),
        "largest": {group: max(groups[group], int(replay.held[:, column].max())) for column, group in enumerate(GROUPS)},
        "phases": {phase: phases[phase] for phase in MEMORY_PHASES if phase in phases},
        "holders": holders,
        "timeline": MemoryTimeline.from_replay(replay, position),
        "notes": tuple(dict.fromkeys((*log.notes, *notes, *(() if later else (ONE_STEP,))))),
    }


def _moment(when: str, holders: tuple[Holder, ...]) -> str:
    """The moment and what is telling about it."""
    largest = telling(holders, when)
    return f"{when}: {largest.words}" if largest else when
