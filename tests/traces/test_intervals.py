"""Arithmetic of intervals, against counting every nanosecond."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.traces.analysis.intervals import NONE, Spans, covered, inside, intersection, length, subtract, union

MOST = 60
SPAN = st.tuples(st.integers(0, MOST), st.integers(0, MOST)).map(sorted)
SPANS = st.lists(SPAN, max_size=12).map(lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 2))
EPOCH = 1_700_000_000_000_000_000


def ticks(spans: Spans) -> set[int]:
    return {t for start, end in spans.tolist() for t in range(start, end)}


def check(cover: Spans, wanted: set[int]) -> None:
    """It is that time, in order, without neighbours that touch."""
    assert ticks(cover) == wanted
    assert length(cover) == len(wanted)
    assert (cover[:, 1] > cover[:, 0]).all()
    assert (cover[1:, 0] > cover[:-1, 1]).all()


@given(st.lists(SPANS, max_size=3))
def test_union(parts: list[Spans]) -> None:
    check(union(*parts), set().union(*map(ticks, parts)))


@given(SPANS, SPANS)
def test_intersection_and_subtraction(a: Spans, b: Spans) -> None:
    one, other = union(a), union(b)
    check(intersection(one, other), ticks(a) & ticks(b))
    check(subtract(one, other), ticks(a) - ticks(b))


@given(SPANS, st.lists(SPAN, max_size=6))
def test_what_windows_cover(a: Spans, windows: list[list[int]]) -> None:
    found = covered(union(a), np.array(windows, dtype=np.int64).reshape(-1, 2))
    assert found.tolist() == [len(ticks(a) & set(range(*window))) for window in windows]


@given(SPANS, st.lists(st.integers(-1, MOST + 1), max_size=9))
def test_which_times_are_inside(a: Spans, times: list[int]) -> None:
    assert inside(np.array(times, dtype=np.int64), union(a)).tolist() == [t in ticks(a) for t in times]


@settings(max_examples=30)
@given(SPANS, SPANS)
def test_exact_however_late(a: Spans, b: Spans) -> None:
    """Nanoseconds since 1970 do not fit a double: integers are exact."""
    assert length(union(a + EPOCH, b + EPOCH)) == len(ticks(a) | ticks(b))
    assert length(intersection(union(a + EPOCH), union(b + EPOCH))) == len(ticks(a) & ticks(b))


def test_nothing() -> None:
    assert union().tolist() == union(NONE).tolist() == []
    assert intersection(NONE, NONE).tolist() == subtract(NONE, NONE).tolist() == []
    assert covered(NONE, np.array([[0, 5]])).tolist() == [0]
