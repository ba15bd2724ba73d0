"""Blocks of steps by a fake clock: which steps count, what is left out, and which call failed."""

import math
import mmap
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.played_steps import Clock, laps
from workbench.core import system_load
from workbench.harness.blocks import Block, BlockTimer, StepFailed, StepTimes, Timings, common_length, no_step
from workbench.harness.peers import Peers
from workbench.runs.errors import LESS_MEMORY


def timings(*blocks: tuple[StepTimes, ...]) -> Timings:
    found = Timings()
    for i, ranks in enumerate(blocks):
        found.add(Block(arm="full", first=1 + 4 * i, laps=ranks))
    return found


def test_a_stalled_step_is_left_out_of_its_block_only() -> None:
    some = timings(*[(laps(0.01, 0.01, 0.01, 0.01, wait=0.002),)] * 4, (laps(0.01, 0.5, 0.01, 0.01, wait=0.002),))
    assert some.slowest("full") == pytest.approx([0.012] * 5)


def test_a_step_of_two_speeds_has_no_stalls() -> None:
    some = timings(*[(laps(0.01, 0.01, 0.01, 0.05),)] * 5)
    assert some.slowest("full") == pytest.approx([0.02] * 5)


def test_the_slowest_rank_counts_and_a_new_pass_does_not() -> None:
    some = timings(*[(laps(0.01, 0.01, fresh=(0,)), laps(0.03, 0.03))] * 3)
    assert some.slowest("full") == pytest.approx([0.03] * 3)
    assert timings((laps(9.0, 0.01, fresh=(0,)),)).slowest("full") == [0.01]


def test_ranks_whose_passes_differ_take_blocks_of_one_length() -> None:
    """Blocks that differed between ranks would leave one of them in a reduction."""
    assert common_length(12, Peers()) == 12
    assert common_length(12, SimpleNamespace(gather=lambda _: [12, 13])) == math.inf  # type: ignore[arg-type]
    assert common_length(12, SimpleNamespace(gather=lambda _: [12, math.inf])) == 12  # type: ignore[arg-type]
    assert common_length(0, Peers()) == math.inf  # a step takes more batches than a pass has


def test_calls_that_are_known_to_have_stalled_are_left_out() -> None:
    some = timings((laps(0.01, 0.018, 0.01, 0.01),))
    some.stalled = [frozenset({2})]
    assert some.slowest("full") == pytest.approx([0.01])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bench(clock: Clock) -> Iterator[BlockTimer]:
    with BlockTimer(lambda batch: None, Peers(), torch.device("cpu"), clock=clock) as one:
        yield one


def test_waits_and_calls_are_told_apart_and_a_source_may_end(bench: BlockTimer, clock: Clock) -> None:
    def source() -> Iterator[int]:
        for i in range(3):
            clock.now += 0.2
            yield i

    def step(batch: int) -> None:
        clock.now += 0.3

    (found,) = bench.run("full", source(), 10, step=step).laps
    assert list(found.waits) == pytest.approx([0.2] * 3)
    assert list(found.calls) == pytest.approx([0.3] * 3)
    assert bench.called == 3
    bench.run("loader", source(), 3, step=no_step)
    assert bench.called == 3


def test_which_call_failed(bench: BlockTimer) -> None:
    def step(batch: int) -> None:
        if batch == 2:
            raise KeyError("label")

    with pytest.raises(StepFailed, match=r"KeyError at its call number 3: 'label'") as caught:
        bench.run("full", [0, 1, 2], 3, step=step)
    assert isinstance(caught.value.error, KeyError)
    assert LESS_MEMORY not in str(caught.value)
    assert str(StepFailed(2, torch.OutOfMemoryError("CUDA out of memory."))).endswith(f"has been put back. {LESS_MEMORY}")


def test_pages_that_the_kernel_gives_are_counted_per_step(bench: BlockTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([(100, 1.0), (2100, 1.5)])
    monkeypatch.setattr(system_load, "page_faults", lambda: next(given))
    (laps,) = bench.run("cached", [0, 0, 0, 0], 4).laps
    assert (laps.faults, laps.kernel) == (500.0, 0.125)


@pytest.mark.skipif(sys.platform != "linux", reason="counted on Linux")
def test_a_thread_that_writes_to_new_memory_gets_pages() -> None:
    before, _ = system_load.page_faults()
    memory = mmap.mmap(-1, 2**24)
    memory.write(b"1" * 2**24)
    assert system_load.page_faults()[0] > before
