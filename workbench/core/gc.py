"""Switches Python's cyclic garbage collector off inside a `with` block, or runs it first (0.2 s once torch is loaded)."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

EVERYTHING = 2
"""Python's oldest generation: its collection looks at all objects."""
RECENT = 1
"""The generation of what was made since its own or an older one's last collection, and while the collector was off."""


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Inside, the collector is off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def collected_before(generation: int = EVERYTHING) -> Iterator[None]:
    """Run the collector, and keep it off inside, so that tensors are freed in the order of the program.

    Args:
        generation: the oldest that is collected: `RECENT` is enough, and fast, after each of many estimates.
    """
    gc.collect(generation)
    with without_gc():
        yield


def live_objects() -> list[Any]:
    """All objects that the collector knows, those included that a program has frozen (`gc.freeze`).

    They are unfrozen for that, and stay so: frozen again, what lies in cycles at this moment would never be freed.
    """
    gc.unfreeze()
    return gc.get_objects()
