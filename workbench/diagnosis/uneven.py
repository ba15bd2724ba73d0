"""Uneven batches: what slow samples cost when workers deliver in order and only so many batches may lie ready."""

import random
from collections.abc import Sequence
from functools import lru_cache

COUNT = 400
"""Batches that are played through: the mean over them is within a few percent of that over many."""
SLOWEST = 0.05
"""The samples whose share of the time is known: see `Loading.slow_share`."""


def paced(making: Sequence[float], workers: int, queue: int, training: float) -> float:
    """Seconds per batch of a loop whose workers deliver in order.

    Batch j is made by worker j mod n as soon as that one is free and batch j − queue has been taken; it is taken in its turn, when training
    on the one before is done.

    >>> paced([2.0] * 100, workers=2, queue=4, training=0.5)
    1.0
    >>> paced([2.0] * 100, workers=4, queue=8, training=1.5)
    1.5

    Args:
        making: seconds to make each batch; the first half, in which queues fill up, is not counted.
        workers: n.
        queue: batches that are on their way or ready, at most.
        training: seconds that training takes for a batch.
    """
    made, taken = [0.0] * len(making), [0.0] * len(making)
    for j, seconds in enumerate(making):
        free = made[j - workers] if j >= workers else 0.0
        asked = taken[j - queue] if j >= queue else 0.0
        made[j] = max(free, asked) + seconds
        taken[j] = max(made[j], taken[j - 1] + training if j else 0.0)
    half = len(making) // 2
    return (taken[-1] - taken[half - 1]) / (len(making) - half)


@lru_cache(maxsize=64)
def uneven(share: float, batch_size: int) -> tuple[float, ...]:
    """Relative times to make batches, mean 1 in the second half: the slowest twentieth of the samples takes `share` of the time more.

    The same each time: no chance in a result.
    """
    chance = random.Random(0)
    slow = [sum(chance.random() < SLOWEST for _ in range(batch_size)) for _ in range(COUNT)]
    mean = sum(slow[COUNT // 2 :]) / (COUNT - COUNT // 2)  # of those that count
    return tuple((1 - share) + share * count / mean if mean else 1.0 for count in slow)
