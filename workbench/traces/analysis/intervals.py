"""Exact arithmetic on intervals of time: arrays of n × 2 whole nanoseconds, each row from its start up to, not including, its end.

A *cover* is what `union` returns: rows in order that neither touch nor overlap, none empty. Functions that need covers say so.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Spans: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = NDArray[np.int64]

NONE: Spans = np.empty((0, 2), dtype=np.int64)
"""No time at all."""


def union(*parts: Spans) -> Spans:
    """The cover of any number of interval sets; rows without length vanish.

    >>> union(np.array([[4, 6], [0, 2]]), np.array([[2, 3], [9, 9]])).tolist()
    [[0, 3], [4, 6]]
    """
    spans = np.concatenate([NONE, *parts])
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return NONE
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], reach[last]], axis=1)


def intersection(a: Spans, b: Spans) -> Spans:
    """The time in both covers.

    >>> intersection(np.array([[0, 5]]), np.array([[1, 2], [4, 9]])).tolist()
    [[1, 2], [4, 5]]
    """
    return _swept(a, b, 3)


def subtract(a: Spans, b: Spans) -> Spans:
    """The time of the first cover that is not in the second.

    >>> subtract(np.array([[0, 5]]), np.array([[1, 2], [4, 9]])).tolist()
    [[0, 1], [2, 4]]
    """
    return _swept(a, b, 1)


def _swept(a: Spans, b: Spans, target: int) -> Spans:
    """Where the sum of 1 (inside a) and 2 (inside b) is the target."""
    times = np.concatenate([a[:, 0], a[:, 1], b[:, 0], b[:, 1]])
    change = np.repeat(np.array([1, -1, 2, -2]), [len(a), len(a), len(b), len(b)])
    order = np.argsort(times, kind="stable")
    times, state = times[order], np.cumsum(change[order])
    chosen = np.flatnonzero(state[:-1] == target)
    return union(np.stack([times[chosen], times[chosen + 1]], axis=1))


def length(cover: Spans) -> int:
    """Nanoseconds in a cover."""
    return int((cover[:, 1] - cover[:, 0]).sum())


def mean_seconds(spans: Spans) -> float:
    """Mean length of some spans, such as steps; 0 without any."""
    return float((spans[:, 1] - spans[:, 0]).sum()) / 1e9 / max(1, len(spans))


def covered(cover: Spans, windows: Spans) -> Numbers:
    """Nanoseconds of a cover inside each window, by prefix sums and binary search.

    >>> covered(np.array([[0, 3], [4, 6]]), np.array([[2, 5], [6, 9]])).tolist()
    [2, 0]
    """
    if not len(cover):
        return np.zeros(len(windows), dtype=np.int64)
    sums = np.concatenate([[0], np.cumsum(cover[:, 1] - cover[:, 0])])

    def until(times: Numbers) -> Numbers:
        at = np.searchsorted(cover[:, 0], times, side="right")
        beyond = np.maximum(cover[np.maximum(at, 1) - 1, 1] - times, 0)
        nanoseconds: Numbers = sums[at] - np.where(at > 0, beyond, 0)
        return nanoseconds

    nanoseconds: Numbers = until(windows[:, 1]) - until(windows[:, 0])
    return nanoseconds


def inside(times: Numbers, cover: Spans) -> NDArray[np.bool_]:
    """Which times lie in a cover."""
    if not len(cover):
        return np.zeros(len(times), dtype=np.bool_)
    at = np.searchsorted(cover[:, 0], times, side="right") - 1
    result: NDArray[np.bool_] = (at >= 0) & (times < cover[np.maximum(at, 0), 1])
    return result
