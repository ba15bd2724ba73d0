"""The caching allocator in arithmetic: segments by hand, properties for any program, out of memory and expandable segments."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory_logs import Writer, training
from workbench.memory.analysis.caching_allocator import CachingAllocator, OutOfMemory
from workbench.memory.analysis.replay import Replay

MIB = 2**20
KIB = 2**10


def filled(*sizes: int, **options: int | bool) -> CachingAllocator:
    allocator = CachingAllocator(**options)  # type: ignore[arg-type]
    for handle, size in enumerate(sizes):
        allocator.alloc(handle, size)
    return allocator


@pytest.mark.parametrize(
    ("size", "reserved", "allocated"),
    [
        (1, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 10 * MIB + 512),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest is not above 1 MiB: it is not split off, and counts as allocated
        (100 * MIB, 100 * MIB, 100 * MIB),
    ],
)
def test_one_request(size: int, reserved: int, allocated: int) -> None:
    found = filled(size)
    assert (found.reserved, found.allocated) == (reserved, allocated)
    assert found.fragmentation == reserved - allocated


def test_nothing_asked_for_takes_nothing() -> None:
    assert filled(0).reserved == 0
    CachingAllocator().release(7)


def test_small_requests_share_a_segment_and_large_ones_another() -> None:
    assert filled(*[512 * KIB] * 4).reserved == 2 * MIB
    assert filled(*[512 * KIB] * 5).reserved == 4 * MIB
    assert filled(*[5 * MIB] * 4).reserved == 20 * MIB
    assert filled(512, 5 * MIB).reserved == 22 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = filled(12 * MIB, 30 * MIB, 14 * MIB)
    for handle in range(3):
        allocator.release(handle)
    allocator.alloc(9, 13 * MIB)
    assert allocator.segments() == [[(12 * MIB, False)], [(30 * MIB, False)], [(14 * MIB, True)]]


def test_freed_neighbours_become_one_block() -> None:
    allocator = filled(5 * MIB, 5 * MIB, 5 * MIB)
    assert allocator.segments() == [[(5 * MIB, True), (5 * MIB, True), (5 * MIB, True), (5 * MIB, False)]]
    allocator.release(0)
    allocator.release(1)
    assert allocator.segments() == [[(10 * MIB, False), (5 * MIB, True), (5 * MIB, False)]]
    allocator.release(2)
    assert allocator.segments() == [[(20 * MIB, False)]]


def test_fragmentation_makes_a_request_fail_that_would_fit() -> None:
    allocator = filled(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB, limit=20 * MIB)
    allocator.release(0)
    allocator.release(2)
    with pytest.raises(
        OutOfMemory, match=r"10\.0 MiB asked for, 0 B left of 20\.0 MiB: 10\.0 MiB allocated, 10\.0 MiB reserved but free in pieces"
    ):
        allocator.alloc(9, 10 * MIB)
    assert allocator.retries == 1


def test_at_the_limit_free_segments_are_given_back_and_asked_again() -> None:
    allocator = filled(40 * MIB, 512, limit=60 * MIB)
    allocator.release(0)
    allocator.alloc(9, 50 * MIB)
    assert (allocator.retries, allocator.reserved, allocator.peak_reserved) == (1, 52 * MIB, 52 * MIB)


def test_a_program_that_runs_out_stops_there() -> None:
    w = Writer()
    w.mark("forward")
    for _ in range(4):
        w.alloc(20 * MIB)
    found = CachingAllocator(limit=50 * MIB).run(w.log.events)
    assert found.failed_at == 3
    assert found.failure is not None
    assert found.failure.asked == 20 * MIB
    assert found.peak_reserved == 40 * MIB


@pytest.mark.parametrize(
    ("options", "words"),
    [({"limit": 0}, "limit=0: bytes that may be reserved"), ({"large_segment": MIB}, "large_segment=1048576: bytes, at least 20971520")],
)
def test_options_that_make_no_sense(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CachingAllocator(**options)  # type: ignore[arg-type]


def test_larger_segments_for_middle_requests() -> None:
    assert filled(5 * MIB, large_segment=64 * MIB).reserved == 64 * MIB


# --- expandable segments


def test_an_expandable_segment_grows_by_pages() -> None:
    assert filled(512, expandable_segments=True).reserved == 2 * MIB
    assert filled(5 * MIB, expandable_segments=True).reserved == 20 * MIB
    assert filled(15 * MIB, 15 * MIB, 9 * MIB, expandable_segments=True).reserved == 40 * MIB
    assert filled(15 * MIB, 15 * MIB, 11 * MIB, expandable_segments=True).reserved == 60 * MIB


def test_an_expandable_segment_has_no_slivers() -> None:
    sizes = [11 * MIB + 512 * k for k in range(1, 60)]
    plain, growing = filled(*sizes), filled(*sizes, expandable_segments=True)
    assert growing.reserved - sum(sizes) < 20 * MIB + 512 * 60
    assert growing.reserved < plain.reserved
    assert len(growing.segments()) == 1


def test_at_the_limit_an_expandable_segment_gives_free_pages_back() -> None:
    allocator = filled(60 * MIB, 20 * MIB, limit=100 * MIB, expandable_segments=True)
    allocator.release(0)
    allocator.alloc(9, 70 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 100 * MIB)


# --- properties

SIZES = st.one_of(st.integers(0, 3 * KIB), st.integers(0, 3 * MIB), st.integers(0, 64 * MIB))
PROGRAMS = st.lists(st.tuples(st.booleans(), st.integers(0, 30), SIZES), max_size=120)
OPTIONS = st.fixed_dictionaries(
    {"expandable_segments": st.booleans()}, optional={"limit": st.integers(64 * MIB, 600 * MIB), "large_segment": st.just(32 * MIB)}
)


def check(allocator: CachingAllocator, held: dict[int, int]) -> None:
    segments = allocator.segments()
    blocks = [block for segment in segments for block in segment]
    assert sum(size for size, _ in blocks) == allocator.reserved
    assert sum(size for size, used in blocks if used) == allocator.allocated
    assert sum(used for _, used in blocks) == sum(size > 0 for size in held.values())
    assert allocator.reserved >= allocator.allocated >= sum(held.values())
    assert allocator.peak_reserved >= allocator.peak_allocated
    for segment in segments:
        assert all(one or two for (_, one), (_, two) in itertools.pairwise(segment)), "free neighbours were not merged"
    owned = sorted((block.segment, block.place, block.size) for block, _ in allocator._owner.values())
    for (s1, p1, n1), (s2, p2, _) in itertools.pairwise(owned):
        assert s1 < s2 or p1 + n1 <= p2, "blocks overlap"


@settings(max_examples=150, deadline=None)
@given(program=PROGRAMS, options=OPTIONS)
def test_whatever_a_program_does(program: list[tuple[bool, int, int]], options: dict[str, int]) -> None:
    allocator, held = CachingAllocator(**options), {}  # type: ignore[arg-type,var-annotated]
    for frees, handle, size in program:
        if frees:
            allocator.release(handle)
            held.pop(handle, None)
        elif handle not in held:
            try:
                allocator.alloc(handle, size)
            except OutOfMemory:
                assert "limit" in options
                continue
            held[handle] = size
        assert "limit" not in options or allocator.reserved <= options["limit"]
        check(allocator, held)
    assert "limit" in options or not allocator.retries
    for handle in held:
        allocator.release(handle)
    assert allocator.allocated == 0
    if not allocator.retries:
        assert all(len(segment) == 1 for segment in allocator.segments())
        assert sum(segment[0][0] for segment in allocator.segments()) == allocator.reserved


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 4096), expandable=st.booleans())
def test_a_training_step(batch: int, expandable: bool) -> None:
    log = training(batch)
    found = CachingAllocator(expandable_segments=expandable).run(log.events)
    rounded = Replay(log, 512).total
    assert found.peak_allocated >= rounded.max()
    assert all(held >= total for held, total in zip(found.history, rounded.tolist(), strict=True))
    if expandable:
        assert found.history == rounded.tolist()
    assert found.peak_reserved >= found.peak_allocated
    assert not found.retries
