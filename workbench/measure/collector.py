"""Collector: Python's cyclic garbage collector, resting for a while. A full run goes over all that lives: 0.2 s once torch is loaded."""

import contextlib
import gc
from collections.abc import Iterator

EVERYTHING = 2
"""Python's oldest generation: a run for it goes over all objects."""
RECENT = 1
"""What was made since the collector ran last, or while it rested; what is older is left alone."""


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
    """Inside, the collector rests, so that storages die in the order of the program; it has run before.

    Args:
        generation: up to which it has: `RECENT` where only what the last one of many has left matters.
    """
    gc.collect(generation)
    with without_gc():
        yield


@contextlib.contextmanager
def thawed() -> Iterator[None]:
    """Inside, the collector knows of what was frozen (`gc.freeze`), too, and so do `gc.get_objects` and `gc.get_referrers`.

    Afterwards all that lives is frozen, if something was before.
    """
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
