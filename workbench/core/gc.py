"""Collector: Python's cyclic garbage collector, resting for a while. A full run goes over all that lives: 0.2 s once torch is loaded."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

EVERYTHING = 2
"""Python's oldest generation: a run for it goes over all objects."""
RECENT = 1
"""What was made since the last run for this generation or an older one, and all that was made while the collector rested."""


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Inside, the collector rests."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def collected_before(generation: int = EVERYTHING) -> Iterator[None]:
    """Run the collector, and let it rest inside, so that storages die in the order of the program.

    Args:
        generation: the oldest that it looks at: `RECENT` where only what the last one of many has left matters.
    """
    gc.collect(generation)
    with without_gc():
        yield


def live_objects() -> list[Any]:
    """All objects that the collector knows of, and those that a program has frozen (`gc.freeze`): they are thawed for that.

    They stay so. Frozen once more, what lies in cycles at this moment would never be freed.
    """
    gc.unfreeze()
    return gc.get_objects()
