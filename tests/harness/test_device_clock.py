"""Steps on a device that works behind the host's back are timed by the device: on an emulated GPU, against the time from sync to sync."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.emulated_device import EmulatedDevice
from tests.emulated_ranks import Moment
from workbench.harness import device_clock
from workbench.harness.ab_test import run_ab_test
from workbench.harness.blocks import BlockTimer
from workbench.harness.device_clock import DeviceClock, HostClock
from workbench.harness.feed import Feed
from workbench.harness.peers import Peers

pytestmark = pytest.mark.alone  # they compare times


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    return EmulatedDevice().install(monkeypatch)


class Loop:
    """A loop whose host takes `host` seconds a step, and its device `compute`."""

    def __init__(self, device: EmulatedDevice, *, host: float = 0.0005, compute: float = 0.005, item: int = 0, extra: float = 0.0) -> None:
        self.device, self.host, self.compute, self.item, self.extra, self.calls = device, host, compute, item, extra, 0

    def __call__(self, _: object) -> None:
        self.calls += 1
        time.sleep(self.host)
        self.device.compute(self.compute, kernels=50)
        if self.item and self.calls % self.item == 0:
            self.device.item()
            time.sleep(self.extra)


def test_the_host_clock_and_the_device_clock_are_chosen_by_the_device(device: EmulatedDevice) -> None:
    assert isinstance(device_clock.step_clock(torch.device("cpu"), time.perf_counter), HostClock)
    assert isinstance(device_clock.step_clock(device_clock.current_device(), time.perf_counter), DeviceClock)


def test_marks_of_the_host_clock_are_exact() -> None:
    ticks = iter([0.0, 1.0, 3.0])
    clock = HostClock(lambda: next(ticks))
    clock.mark()
    clock.mark()
    assert clock.read() == ([1.0, 2.0], 3.0)


def test_what_was_queued_before_does_not_count_and_nothing_waits(device: EmulatedDevice) -> None:
    device.compute(0.1)
    began = time.perf_counter()
    clock = DeviceClock(torch.device("cuda"))
    for _ in range(3):
        device.compute(0.02)
        clock.mark()
    assert time.perf_counter() - began < 0.05
    steps, whole = clock.read()
    assert steps == pytest.approx([0.02] * 3, rel=0.2)
    assert whole == pytest.approx(sum(steps))


def test_work_on_a_side_stream_that_nobody_waits_for_is_spread_evenly(device: EmulatedDevice) -> None:
    side = device.new_stream()
    clock = DeviceClock(torch.device("cuda"))
    for _ in range(4):
        device.compute(0.02, stream=side)
        clock.mark()
    steps, whole = clock.read()
    assert steps == []
    assert whole >= 0.08


@pytest.fixture
def late(device: EmulatedDevice) -> EmulatedDevice:
    """A device on a busy machine: who slept until the device was done gets a core 50 ms later."""
    usual = device.wait_until

    def wait_until(moment: Moment) -> None:
        done = device.is_past(moment)
        usual(moment)
        time.sleep(0.0 if done else 0.05)

    device.wait_until = wait_until  # type: ignore[method-assign]
    return device


def test_a_host_that_wakes_late_takes_no_time_of_the_device(late: EmulatedDevice) -> None:
    """Its delay is no work on another stream: the steps are told apart, and last what they last."""
    clock = DeviceClock(torch.device("cuda"))
    for _ in range(4):
        late.compute(0.02)
        clock.mark()
    steps, whole = clock.read()
    assert steps == pytest.approx([0.02] * 4, rel=0.2)
    assert whole == pytest.approx(0.08, rel=0.2)


def test_blocks_of_a_host_that_wakes_late(late: EmulatedDevice) -> None:
    side = late.new_stream()
    with BlockTimer(Loop(late, compute=0.01), Peers(), torch.device("cuda")) as bench:
        (laps,) = bench.run("full", range(10), 10).laps
        assert laps.mean() == pytest.approx(0.01, rel=0.1)
        bench.step = lambda _: late.compute(0.03, stream=side)
        (laps,) = bench.run("beside", range(10), 10).laps  # seen although the host is late
    assert len(set(laps.calls)) == 1
    assert laps.calls[0] > 0.02


@pytest.mark.parametrize("item", [0, 1, 5, 10])
def test_a_block_takes_what_the_device_takes(device: EmulatedDevice, item: int) -> None:
    """The host returns at once, but for one call in `item`, which waits for all that was queued: no call takes longer than another."""
    with BlockTimer(Loop(device, item=item), Peers(), torch.device("cuda")) as bench:
        began = time.perf_counter()
        (laps,) = bench.run("full", range(40), 40).laps
        wall = time.perf_counter() - began
    mean = laps.mean()
    assert mean is not None
    assert mean == pytest.approx(wall / 40, rel=0.1)
    assert sorted(laps.calls)[-3] < 2 * mean


def test_a_stall_is_the_call_that_stalls(device: EmulatedDevice) -> None:
    with BlockTimer(Loop(device, item=20, extra=0.05), Peers(), torch.device("cuda")) as bench:
        (laps,) = bench.run("full", range(40), 40).laps
    assert [i for i, call in enumerate(laps.calls) if call > 0.03] == [19, 39]


def test_a_host_that_waits_for_a_core_delays_a_device_only_if_its_queue_runs_empty(device: EmulatedDevice) -> None:
    """Waits of 4 ms hide behind a device that is steps ahead. One of 0.15 s does not, and counts as far as the step got longer by it."""

    class Waiting(Loop):
        waited = 0.0

        def __call__(self, batch: object) -> None:
            seconds = 0.15 if self.calls == 10 else 0.004
            time.sleep(seconds)
            self.waited += seconds
            super().__call__(batch)

    loop = Waiting(device, compute=0.01)
    with BlockTimer(loop, Peers(), torch.device("cuda")) as bench:
        bench._delay.read = lambda: loop.waited  # type: ignore[method-assign]
        (laps,) = bench.run("full", range(20), 20).laps
    late, others = laps.delays[10], [*laps.delays[:10], *laps.delays[11:]]
    assert laps.calls[10] > 0.05
    assert late == pytest.approx(laps.calls[10] - 0.01, rel=0.1)
    assert sorted(others)[-2] < 0.002


@pytest.mark.parametrize(("seconds", "exposed"), [(0.003, 0.0), (0.012, 0.0115)])
def test_a_wait_for_data_counts_as_far_as_the_device_waits_too(device: EmulatedDevice, seconds: float, exposed: float) -> None:
    def loader() -> Iterator[int]:
        for i in range(30):
            time.sleep(seconds)
            yield i

    with BlockTimer(Loop(device), Peers(), torch.device("cuda")) as bench:
        (laps,) = bench.run("full", loader(), 30).laps
    waits = sorted(laps.waits[5:])
    assert waits[len(waits) // 2] == pytest.approx(max(0.0, exposed - 0.005), abs=0.0015)


class Side:
    """One way to train: a loop over a loader with passes."""

    def __init__(self, loop: Callable[[object], None], steps: int, start: float) -> None:
        class Loader:
            def __len__(self) -> int:
                return steps

            def __iter__(self) -> Iterator[int]:
                time.sleep(start)
                return iter(range(steps))

        self.loop, self.feed = loop, Feed(Loader())

    def step(self) -> None:
        self.loop(self.feed.next())

    def drain(self) -> None:
        self.feed.drain()


def wall_time(side: Side, steps: int) -> float:
    for _ in range(steps):
        side.step()
    start = time.perf_counter()
    for _ in range(steps):
        side.step()
    side.loop.device.synchronize()  # type: ignore[attr-defined]
    return (time.perf_counter() - start) / steps


def test_a_b_test_of_short_passes_agrees_with_the_wall_time(device: EmulatedDevice) -> None:
    """The start of a pass is hidden behind the queue, or not, as in the loop itself; the queue that empties in it is charged to nobody."""
    sides = [Side(Loop(device, item=10), 24, start) for start in (0.04, 0.0)]
    truth = wall_time(sides[0], 120) / wall_time(sides[1], 120)
    arm = run_ab_test(*sides, budget_s=3, peers=Peers())
    assert arm.speedup.mid == pytest.approx(truth, rel=0.08)
