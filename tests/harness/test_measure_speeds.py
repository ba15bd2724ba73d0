"""Measuring a machine's speeds: only what is missing, never an error, and exact with a fake clock; once for real."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.emulated_device import DeviceTensor, EmulatedDevice, PinnedTensor
from workbench.core.machine_speeds import MAX_SPREAD, MachineSpeeds, Speed
from workbench.harness import measure_speeds
from workbench.harness.measure_speeds import BLOCKS, COPIES, GLOO, GPU, HOST, machine_speeds, per_call, rate

Measures = Mapping[tuple[str, ...], Callable[[], Mapping[str, Speed]]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))


def counted(calls: list[str], spread: float = 0.0) -> Measures:
    def measure(names: tuple[str, ...]) -> Callable[[], Mapping[str, Speed]]:
        def act() -> Mapping[str, Speed]:
            calls.append(names[0])
            return {name: Speed(median=1e-6, spread=spread) for name in names}

        return act

    return {group: measure(group) for group in (HOST, GLOO)}


class Clock:
    """A clock that moves by what is called."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_seconds_of_a_call_are_exact_under_a_fake_clock() -> None:
    clock = Clock()
    speed = per_call(lambda count: clock.work(2e-6 * count), clock)
    assert speed.median == pytest.approx(2e-6)
    assert speed.spread == pytest.approx(0, abs=1e-9)
    assert speed.blocks == BLOCKS


def test_a_queue_is_emptied_before_each_block_and_that_is_not_timed() -> None:
    """1,000 calls fit into the queue and take 1 µs each; the next ones wait for a device that takes 5 µs for each."""
    clock, queued = Clock(), 0

    def call(count: int) -> None:
        nonlocal queued
        for _ in range(count):
            queued += 1
            clock.work(1e-6 if queued <= 1100 else 5e-6)

    def empty() -> None:
        nonlocal queued
        clock.work(5e-6 * queued)
        queued = 0

    assert per_call(call, clock, before=empty).median == pytest.approx(1e-6)


def test_a_rate_leaves_out_the_first_copy() -> None:
    clock, calls = Clock(), list[float]()

    def copy() -> None:
        calls.append(1)
        clock.work(1.0 if len(calls) == 1 else 0.25)

    assert rate(1000, copy, clock) == Speed(median=4000.0, spread=0.0, blocks=COPIES)


def test_what_is_on_file_is_not_measured_again() -> None:
    calls: list[str] = []
    first = machine_speeds(HOST, measures=counted(calls))
    assert calls == [HOST[0]]
    assert set(first.speeds) == set(HOST)
    assert machine_speeds(HOST, measures=counted(calls)) == first
    assert calls == [HOST[0]]
    more = machine_speeds(HOST + GLOO, measures=counted(calls))
    assert calls == [HOST[0], GLOO[0]]
    assert set(more.speeds) == set(HOST + GLOO)
    machine_speeds(HOST, fresh=True, measures=counted(calls))
    assert calls == [HOST[0], GLOO[0], HOST[0]]


def test_noisy_figures_are_measured_again() -> None:
    calls: list[str] = []
    machine_speeds(HOST, measures=counted(calls, spread=2 * MAX_SPREAD))
    machine_speeds(HOST, measures=counted(calls))
    assert len(calls) == 2
    assert MachineSpeeds.load().missing(HOST) == []


def test_a_machine_that_lacks_something_is_measured_without() -> None:
    def broken() -> Mapping[str, Speed]:
        raise RuntimeError("no loopback\nat all")

    speeds = machine_speeds(HOST + GLOO, measures={**counted([]), GLOO: broken})
    assert set(speeds.speeds) == set(HOST)
    assert speeds.notes == ("gloo, gloo_rate could not be measured: RuntimeError: no loopback",)
    assert MachineSpeeds.load().speeds == speeds.speeds


def test_a_slow_machine_measures_no_more_than_its_time() -> None:
    clock, calls = Clock(), list[str]()
    measures = counted(calls)

    def slow() -> Mapping[str, Speed]:
        clock.work(3.0)
        return measures[HOST]()

    speeds = machine_speeds(HOST + GLOO, measures={**measures, HOST: slow}, budget_s=1.0, clock=clock)
    assert calls == [HOST[0]]
    assert speeds.missing(GLOO) == list(GLOO)


def test_a_file_that_cannot_be_written_costs_nothing_but_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "file"))
    speeds = machine_speeds(HOST, measures=counted([]))
    assert set(speeds.speeds) == set(HOST)
    assert "cannot be written" in speeds.notes[-1]


@contextlib.contextmanager
def hooked(get: Callable[[], object], put: Callable[[object], object], value: object) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@pytest.mark.parametrize(
    ("slower", "said"),
    [
        (lambda: hooked(sys.gettrace, sys.settrace, lambda *_: None), "a debugger"),  # type: ignore[arg-type]
        (lambda: hooked(sys.getprofile, sys.setprofile, lambda *_: None), "a profiler of Python"),  # type: ignore[arg-type]
        (lambda: torch.autograd.profiler.profile(use_device=None), "torch's profiler"),
        (torch.autograd.detect_anomaly, "anomaly detection"),
        (lambda: FlopCounterMode(display=False), "a dispatch mode"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_nothing_is_measured_for_good_while_something_slows_each_call_down(
    slower: Callable[[], contextlib.AbstractContextManager[object]], said: str
) -> None:
    calls: list[str] = []
    with slower():
        speeds = machine_speeds(HOST, fresh=True, measures=counted(calls))
    assert calls == []
    assert f"since {said}" in speeds.notes[-1]
    assert not MachineSpeeds.load().speeds


def test_a_default_device_changes_nothing() -> None:
    seen: list[str] = []

    def measure() -> Mapping[str, Speed]:
        seen.append(torch.ones(1).device.type)
        return {}

    with torch.device("meta"):
        machine_speeds(HOST, measures={HOST: measure})
    assert seen == ["cpu"]


def test_a_second_rank_that_fails_is_said() -> None:
    def fail() -> None:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"), measure_speeds._beside(fail):
        pass


@pytest.mark.alone  # it compares times
def test_speeds_of_an_emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planted is measured: copies from both kinds of memory, and launches while the device is slower than the host."""
    device = EmulatedDevice(pageable=5e8, pinned=2e9).install(monkeypatch)

    def add(values: torch.Tensor, _: float) -> torch.Tensor:
        device.compute(2e-5)
        return values

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        device.copy(source.nbytes, pinned=isinstance(source, PinnedTensor))
        return target

    monkeypatch.setattr(DeviceTensor, "add_", add)
    monkeypatch.setattr(DeviceTensor, "copy_", copy)
    speeds = machine_speeds(GPU)
    assert speeds.notes == ()
    assert set(speeds.speeds) == set(GPU)
    medians = {name: speed.median for name, speed in speeds.speeds.items()}
    assert medians["pageable"] == pytest.approx(5e8, rel=0.3)
    assert medians["pinned"] == pytest.approx(2e9, rel=0.3)
    assert medians["event"] < medians["launch"] < 1e-3
    assert medians["sync"] < 1e-3
    assert machine_speeds(GPU, measures={}) == speeds, "from the file"


def test_this_machine_for_real() -> None:
    """Orders of magnitude that hold on every machine, however busy."""
    speeds = machine_speeds(HOST + GLOO)
    assert set(speeds.speeds) == set(HOST + GLOO), speeds.notes
    assert speeds.notes == ()
    medians = {name: speed.median for name, speed in speeds.speeds.items()}
    assert medians["timer"] < medians["call"] < 1e-3
    assert medians["timer"] < medians["dispatch"] < 1e-3
    assert medians["gloo_rate"] < 10 * medians["copy"]
    assert medians["gloo"] > medians["dispatch"]
    assert "to …" in str(speeds)
