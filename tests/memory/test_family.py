"""Logs at two or three values of a number give every other value exactly; a program that depends on the number is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory_logs import Writer, training
from workbench.core.vocabulary import GROUPS
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.caching_allocator import CachingAllocator, OutOfMemory
from workbench.memory.analysis.family import Family
from workbench.memory.analysis.log import MemoryLog
from workbench.memory.analysis.replay import Replay

MIB = 2**20


def lines(**options: Any) -> Family:
    return Family({x: training(x, **options) for x in (3, 7)})


def attention(sequence: int) -> MemoryLog:
    """Scores grow with the square of the sequence."""
    w = Writer()
    w.alloc(4096, category="parameter")
    for step in range(2):
        w.mark("forward", step, step)
        kept = [w.alloc(sequence * 64, "aten.mm.default", "attention"), w.alloc(4 * sequence**2 + 10 * sequence + 6, "aten.bmm.default")]
        w.mark("backward")
        grad = w.alloc(2 * sequence**2, "aten._softmax_backward_data.default")
        w.free(*kept, grad)
        w.mark("end")
    return w.log


@settings(max_examples=60, deadline=None)
@given(x=st.integers(1, 5000), low=st.integers(1, 9), step=st.integers(1, 9), micros=st.integers(1, 2), checkpointed=st.booleans())
def test_any_batch_is_as_a_fresh_run(x: int, low: int, step: int, micros: int, checkpointed: bool) -> None:
    options: dict[str, Any] = {"micros": micros, "checkpointed": checkpointed}
    family, fresh = Family({v: training(v, **options) for v in (low, low + step)}), training(x, **options)
    for granularity in (1, 512):
        replay = Replay(fresh, granularity)
        assert family.peak(x, granularity) == replay.total[replay.peak]
        assert family.held(x, granularity) == dict(zip(GROUPS, replay.held[replay.peak].tolist(), strict=True))
        assert family.moment(x, granularity) == replay.moment(replay.peak)
    assert family.reserved(x) == CachingAllocator().run(fresh.events).peak_reserved


@settings(max_examples=60, deadline=None)
@given(x=st.integers(1, 100_000), nodes=st.sets(st.integers(1, 4096), min_size=3, max_size=3))
def test_any_sequence_is_as_a_fresh_run(x: int, nodes: set[int]) -> None:
    family, fresh = Family({v: attention(v) for v in nodes}, degree=2), Replay(attention(x))
    assert family.peak(x) == fresh.total.max()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_breakdown_is_that_of_a_fresh_run(device: str) -> None:
    fields: dict[str, Any] = {"kind": "predicted", "title": "batch 50", "device": device}
    assert lines().breakdown(50, title="batch 50", device=device) == MemoryBreakdown.from_log(training(50), **fields)
    fresh, made = training(50), lines().log(50)
    assert [record.size for record in made.records] == [record.size for record in fresh.records]


def test_a_third_run_checks() -> None:
    Family({x: training(x) for x in (2, 5, 9)})
    with pytest.raises(ValueError, match=r"a storage of aten\.bmm\.default .* bytes at 5, where \[2, 9\] make it .* try degree=2"):
        Family({x: attention(x) for x in (2, 5, 9)})
    Family({x: attention(x) for x in (2, 4, 5, 9)}, degree=2)


def test_a_family_of_two_programs_says_where_they_part() -> None:
    with pytest.raises(
        ValueError, match=r"the runs at 3 and 7 part at event \d+: 3 .*, 7 .*\. They are not one family: the program depends on"
    ):
        Family({3: training(3), 7: training(7, checkpointed=True)})
    longer = training(7)
    longer.events.append(longer.events[0])
    with pytest.raises(
        ValueError, match=r"part at event .*: only 7 goes on, and makes a storage of aten\.empty\.memory_format in layers\.0"
    ):
        Family({3: training(3), 7: longer})


def test_another_operator_is_another_program() -> None:
    other = training(7)
    other.records[-1].op = "aten.sum.default"
    with pytest.raises(ValueError, match=r"aten\._foreach_sqrt\.default .* 7 makes a storage of aten\.sum\.default"):
        Family({3: training(3), 7: other})


def test_the_order_of_frees_does_not_matter() -> None:
    def cache(x: int, order: tuple[int, ...]) -> MemoryLog:
        w = Writer()
        copies = [w.alloc(x * n) for n in (1, 2, 3)]
        w.free(*(copies[i] for i in order))
        return w.log

    assert Family({1: cache(1, (0, 1, 2)), 2: cache(2, (2, 0, 1))}).peak(10) == 60


@pytest.mark.parametrize(
    ("logs", "degree", "words"),
    [
        ({3: 3}, 1, r"1 logs at \[3\]: degree=1 needs runs with at least 2 different values"),
        ({3: 3, 4: 4}, 2, "degree=2 needs runs with at least 3"),
        ({3: 3, 4: 4}, 3, "degree=3: 1 .each storage is a line. or 2"),
    ],
)
def test_too_little_for_the_degree(logs: dict[int, int], degree: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Family({x: training(x) for x in logs}, degree)


def test_a_size_below_one() -> None:
    with pytest.raises(ValueError, match="0: a size from 1 on"):
        lines().peak(0)


@settings(max_examples=30, deadline=None)
@given(limit=st.integers(0, 200 * MIB))
def test_the_largest_that_fits(limit: int) -> None:
    family = lines()
    found = family.largest(limit)
    assert found == 0 or family.peak(found, 512) <= limit
    assert family.peak(found + 1, 512) > limit


def test_the_largest_by_another_measure() -> None:
    family = lines()
    found = family.largest(100 * MIB, of=family.reserved)
    assert family.reserved(found) <= 100 * MIB < family.reserved(found + 1)
    assert found < family.largest(100 * MIB)


def test_what_does_not_grow_has_no_largest() -> None:
    with pytest.raises(ValueError, match="memory does not grow with this number"):
        lines().largest(MIB, of=lambda x: 5)


def test_a_limit_that_is_passed() -> None:
    with pytest.raises(OutOfMemory, match="asked for"):
        lines().reserved(4096, limit=30 * MIB)


def test_it_shows_itself() -> None:
    assert repr(lines()) == f"Family({len(training(3).events)} events at [3, 7], degree 1)"
