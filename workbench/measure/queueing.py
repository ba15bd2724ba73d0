"""The prefetch queue of a loader with workers: emptied before what it would hide, full before what it would disturb."""

import time

from workbench.measure.feed import Feed
from workbench.measure.noise import cpu_of

QUIET = 0.02
"""Seconds between two looks; with less work of the workers than WORK of it, they are taken to wait for room in their queue."""
WORK = 0.05
PATIENCE = 2.0
"""Seconds that a queue is given to fill, at most."""


def drain(feed: Feed) -> None:
    """Take what lies ready: a full queue hides a slow loader for a while."""
    taken = 0
    while taken < feed.queue:
        depth = feed.depth()
        if depth == 0:
            return
        start = time.perf_counter()
        feed.next()
        taken += feed.accumulation
        if depth is None and time.perf_counter() - start > QUIET:
            return


def settle(feed: Feed, seconds: float) -> None:
    """Wait until the queue is full, so that the workers rest: they would take cores from what does not need them.

    Args:
        feed: whose workers.
        seconds: that the loader takes for a step's batches, about.
    """
    if not (pids := feed.worker_pids):
        return
    limit = time.perf_counter() + min(PATIENCE, 1.5 * feed.queue * seconds / feed.accumulation + 2 * QUIET)
    cpu = sum(map(cpu_of, pids))
    while feed.depth() != feed.queue and time.perf_counter() < limit:
        time.sleep(QUIET)
        before, cpu = cpu, sum(map(cpu_of, pids))
        if cpu - before < WORK * QUIET and feed.depth() != 0:  # the last batches of a pass leave the queue half empty
            return
