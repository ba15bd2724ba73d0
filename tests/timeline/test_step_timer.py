"""StepTimer: exact arithmetic with a fake clock, device events that complete late, and the rank's file."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import workbench as wb
from workbench.core import run_directory
from workbench.core.vocabulary import PHASES
from workbench.timeline import marks, rank_log
from workbench.timeline.loops import samples_in
from workbench.timeline.marks import DeviceRecorder, HostRecorder, new_recorder
from workbench.timeline.steps import StepBuilder, read_iteration
from workbench.timeline.timeline import Timeline

SECOND = 10**9


class Clock:
    """Nanoseconds that pass only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)

    def recorder(self) -> HostRecorder:
        return HostRecorder(lambda: self.now)

    def loader(self, *waits: float) -> Iterator[int]:
        for number, wait in enumerate(waits):
            self.sleep(wait)
            yield number


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock) -> wb.StepTimer:
    return wb.StepTimer(recorder=clock.recorder)


def phases(timeline: Timeline) -> list[dict[str, float]]:
    """The phases of each step that took any time."""
    return [{name: s for name, s in zip(PHASES, step.phases, strict=True) if s} for step in timeline.steps]


def spend(timer: wb.StepTimer, clock: Clock, **seconds: float) -> None:
    for phase, length in seconds.items():
        with timer(phase):
            clock.sleep(length)


# Where the time goes


def test_every_interval_belongs_to_one_phase(timer: wb.StepTimer, clock: Clock) -> None:
    for _ in timer.batches(clock.loader(1, 2)):
        clock.sleep(0.5)
        spend(timer, clock, h2d=3, forward=5, backward=7, optimizer=11)
        clock.sleep(0.25)
    expected = {"h2d": 3, "forward": 5, "backward": 7, "optimizer": 11, "other": 0.75}
    assert phases(timer.timeline) == [{"data_wait": 1, **expected}, {"data_wait": 2, **expected}]
    assert timer.timeline.clock == "host"


def test_nested_spans_are_exclusive(timer: wb.StepTimer, clock: Clock) -> None:
    for _ in timer.batches(clock.loader(1)):
        with timer("forward"):
            clock.sleep(1)
            with timer("h2d"):
                clock.sleep(2)
                with timer("forward"):  # the same span again, inside itself
                    clock.sleep(4)
                clock.sleep(8)
            clock.sleep(16)
    assert phases(timer.timeline) == [{"data_wait": 1, "forward": 21, "h2d": 10}]


def test_a_span_left_by_an_exception_is_closed(timer: wb.StepTimer, clock: Clock) -> None:
    for _ in timer.batches(clock.loader(1, 1)):
        with contextlib.suppress(RuntimeError), timer("forward"):
            clock.sleep(2)
            raise RuntimeError
        clock.sleep(3)
    assert phases(timer.timeline) == [{"data_wait": 1, "forward": 2, "other": 3}] * 2


def test_spans_inside_the_loader_wait_for_data_except_copies(timer: wb.StepTimer, clock: Clock) -> None:
    def loader() -> Iterator[int]:
        with timer("forward"):
            clock.sleep(1)
        with timer("h2d"):
            clock.sleep(2)
        yield 0

    for _ in timer.batches(loader()):
        clock.sleep(4)
    assert phases(timer.timeline) == [{"data_wait": 1, "h2d": 2, "other": 4}]


def test_spans_outside_a_loop_are_harmless(timer: wb.StepTimer, clock: Clock) -> None:
    spend(timer, clock, forward=1)
    for _ in timer.batches(clock.loader(1)):
        clock.sleep(1)
    spend(timer, clock, forward=1)
    assert phases(timer.timeline) == [{"data_wait": 1, "other": 1}]


def test_an_unknown_phase_is_refused(timer: wb.StepTimer) -> None:
    with pytest.raises(ValueError, match=r"timer\('foward'\): a step is made of data_wait, h2d, forward.*all else counts as other"):
        timer("foward")


# What a step is


def test_accumulation_makes_one_step_of_several_batches(timer: wb.StepTimer, clock: Clock) -> None:
    for number in timer.batches(clock.loader(1, 1, 1, 1, 1, 1, 1)):
        spend(timer, clock, forward=2, backward=3)
        if number % 3 == 2:
            spend(timer, clock, optimizer=4)
    assert phases(timer.timeline) == [{"data_wait": 3, "forward": 6, "backward": 9, "optimizer": 4}] * 2
    assert timer.timeline.notes == (
        "1 batches with no optimizer step after them are not steps (evaluation, or the rest of an accumulation)",
    )


def test_several_optimizer_spans_in_one_batch_are_one_step(timer: wb.StepTimer, clock: Clock) -> None:
    for _ in timer.batches(clock.loader(1, 1)):
        spend(timer, clock, forward=1, optimizer=1)
        spend(timer, clock, backward=1, optimizer=1)
    assert phases(timer.timeline) == [{"data_wait": 1, "forward": 1, "backward": 1, "optimizer": 2}] * 2


def test_without_optimizer_spans_every_batch_is_a_step(timer: wb.StepTimer, clock: Clock) -> None:
    for _ in timer.batches(clock.loader(*[1] * 200)):
        spend(timer, clock, forward=1)
    assert phases(timer.timeline) == [{"data_wait": 1, "forward": 1}] * 200


def test_steps_without_optimizer_are_seen_while_the_loop_runs(timer: wb.StepTimer, clock: Clock) -> None:
    for number in timer.batches(clock.loader(*[1] * 200)):
        if number == 150:
            assert len(timer.timeline.steps) == 150


def test_evaluation_with_the_training_timer_is_no_step(timer: wb.StepTimer, clock: Clock) -> None:
    for _ in range(2):
        for _ in timer.batches(clock.loader(1, 1)):
            spend(timer, clock, forward=1, optimizer=1)
        for _ in timer.batches(clock.loader(1, 1, 1)):
            spend(timer, clock, forward=5)
    assert phases(timer.timeline) == [{"data_wait": 1, "forward": 1, "optimizer": 1}] * 4
    assert "6 batches with no optimizer step" in timer.timeline.notes[0]


def test_worker_start_up_counts_and_time_between_epochs_does_not(timer: wb.StepTimer, clock: Clock) -> None:
    class Slow:
        def __iter__(self) -> Iterator[int]:
            clock.sleep(10)  # starting workers
            return clock.loader(1, 1)

    batches = timer.batches(Slow())
    for _ in range(2):
        for _ in batches:
            spend(timer, clock, optimizer=1)
        clock.sleep(1000)  # evaluation, checkpoint
    first, second = {"data_wait": 11, "optimizer": 1}, {"data_wait": 1, "optimizer": 1}
    assert phases(timer.timeline) == [first, second, first, second]


def test_break_keeps_the_step_whose_optimizer_is_done(timer: wb.StepTimer, clock: Clock) -> None:
    for number in timer.batches(clock.loader(1, 1, 1)):
        spend(timer, clock, optimizer=1)
        if number == 1:
            clock.sleep(2)
            break
    clock.sleep(100)
    assert phases(timer.timeline) == [{"data_wait": 1, "optimizer": 1}, {"data_wait": 1, "optimizer": 1, "other": 2}]


def test_break_at_the_top_of_the_loop_drops_the_batch_that_was_not_used(timer: wb.StepTimer, clock: Clock) -> None:
    for number in timer.batches(clock.loader(1, 1, 1)):
        if number == 2:
            break
        spend(timer, clock, optimizer=1)
    assert len(timer.timeline.steps) == 2
    assert timer.timeline.notes == ()


def test_an_exception_ends_the_loop_at_once(timer: wb.StepTimer, clock: Clock) -> None:
    def train() -> None:
        for number in timer.batches(clock.loader(1, 1, 1)):
            if number == 1:
                raise RuntimeError
            spend(timer, clock, optimizer=1)

    with pytest.raises(RuntimeError):
        train()
    clock.sleep(100)
    for _ in timer.batches(clock.loader(3)):
        spend(timer, clock, optimizer=1)
    assert phases(timer.timeline) == [{"data_wait": 1, "optimizer": 1}, {"data_wait": 3, "optimizer": 1}]


def test_an_exception_in_the_loader_reaches_the_loop(timer: wb.StepTimer, clock: Clock) -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise OSError("a file is gone")

    def train() -> None:
        for _ in timer.batches(broken()):
            spend(timer, clock, optimizer=1)

    with pytest.raises(OSError, match="a file is gone"):
        train()
    assert len(timer.timeline.steps) == 1


# Several loops


def test_validation_inside_training_is_other(timer: wb.StepTimer, clock: Clock) -> None:
    for _ in timer.batches(clock.loader(1, 1)):
        spend(timer, clock, forward=1, optimizer=1)
        for _ in timer.batches(clock.loader(2, 2)):
            spend(timer, clock, forward=3)
    assert phases(timer.timeline) == [{"data_wait": 1, "forward": 1, "optimizer": 1, "other": 10}] * 2


def test_two_loaders_side_by_side_wait_in_one_step(timer: wb.StepTimer, clock: Clock) -> None:
    for _ in zip(timer.batches(clock.loader(1, 1, 1, 1)), timer.batches(clock.loader(2, 2, 2, 2)), strict=False):
        spend(timer, clock, forward=3, optimizer=1)
    steps = phases(timer.timeline)
    assert [step.pop("data_wait") for step in steps] == [
        3,
        3,
        3,
        2,
    ]  # both waits, from one `next()` of the second loader to the following one
    assert steps == [{"forward": 3, "optimizer": 1}] * 4


def test_an_iterator_that_was_left_open_does_not_disturb_the_next_loop(timer: wb.StepTimer, clock: Clock) -> None:
    left = iter(timer.batches(clock.loader(1, 1)))
    next(left)
    for _ in timer.batches(clock.loader(1, 1)):
        spend(timer, clock, forward=2, optimizer=1)
    assert phases(timer.timeline) == [{"data_wait": 1, "forward": 2, "optimizer": 1}] * 2
    del left


def test_an_inner_iterator_that_was_left_open_is_passed_over(timer: wb.StepTimer, clock: Clock) -> None:
    left: list[Any] = []
    for number in timer.batches(clock.loader(1, 1, 1, 1)):
        if number == 0:
            left.append(iter(timer.batches(clock.loader(1, 1))))
            next(left[0])
        spend(timer, clock, forward=2, optimizer=1)
    assert phases(timer.timeline)[-1] == {"data_wait": 1, "forward": 2, "optimizer": 1}


# Loaders


def test_any_iterable_is_a_loader(timer: wb.StepTimer) -> None:
    assert len(timer.batches([1, 2, 3])) == 3
    assert list(timer.batches(iter([1, 2]))) == [1, 2]
    with pytest.raises(TypeError):
        len(timer.batches(iter([1, 2])))

    class Old:
        def __getitem__(self, index: int) -> int:
            return range(3)[index]

    assert list(timer.batches(Old())) == [0, 1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize("loader", [None, 3, lambda: None, "abc", b"abc"])
def test_what_is_no_loader_is_refused_before_the_loop(timer: wb.StepTimer, loader: Any) -> None:
    with pytest.raises(ValueError, match=r"timer\.batches was given .*: it takes a DataLoader or any other iterable of batches, e\.g\."):
        timer.batches(loader)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "mps", "cuda:1 ", ""])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r'StepTimer\(device=.*\): it takes "cpu", "cuda", "cuda:1" or None.*; try device="cuda"'):
        wb.StepTimer(device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", None])
def test_known_devices_are_taken(device: str | None) -> None:
    wb.StepTimer(device=device)


def test_measuring_twice_is_refused(timer: wb.StepTimer) -> None:
    with pytest.raises(ValueError, match="which is measured already: give it the loader itself"):
        timer.batches(timer.batches([1]))


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(4, 2), 4),
        ((torch.zeros(4, 2), torch.zeros(5)), 4),
        ({"name": ["a", "b"], "x": torch.zeros(3, 1)}, 3),
        ([["a.png", "b.png"], {"x": np.zeros((2, 8))}], 2),
        ({"inputs": {"ids": torch.zeros(3, 7)}}, 3),
        (((torch.zeros(4, 2), torch.zeros(4, 3)), torch.zeros(4)), 4),
        ((torch.zeros(3, 9, 9), torch.zeros(3, 8, 8)), 3),
        (((torch.zeros(3, 9, 9), torch.zeros(3, 8, 8)), (torch.tensor(1), torch.tensor(0))), None),  # tuple(zip(*samples))
        (((torch.zeros(3, 9, 9),), ({"boxes": torch.zeros(5, 4)},)), None),
        ([{"x": torch.zeros(3, 9)}, {"x": torch.zeros(3, 9)}], None),
        ({"images": [torch.zeros(3, 9, 9), torch.zeros(3, 8, 8)]}, None),
        ((torch.tensor(1.0), torch.zeros(6)), 6),
        (torch.tensor(1.0), None),
        ("text", None),
        ([], None),
        (7, None),
    ],
)
def test_samples_are_the_first_dimension_or_unknown(batch: Any, samples: int | None) -> None:
    assert samples_in(batch) == samples


class Ragged:
    """As a nested tensor, whose sizes differ."""

    @property
    def shape(self) -> Any:
        raise RuntimeError("no sizes")


BAG = (torch.zeros(900), torch.zeros(4), torch.zeros(4))  # token ids of four texts, where each begins, labels


@pytest.mark.parametrize(
    ("batch", "batch_size", "samples"),
    [
        (BAG, None, 4),
        (BAG, 4, 4),
        (BAG, 6, 4),  # the last batch
        (dict(zip("abc", BAG, strict=True)), None, 4),
        ((torch.zeros(90, 3), torch.zeros(2, 200), torch.zeros(4)), 4, 4),  # nodes, edges and labels of graphs
        ((torch.zeros(90, 3), torch.zeros(90), torch.zeros(2, 200)), 4, 4),
        ((torch.zeros(90, 3), torch.zeros(2, 200), torch.zeros(3)), 4, 3),
        ((torch.zeros(7, 4, 2), torch.zeros(4)), 4, 4),  # time first
        ((torch.zeros(1, 4096), torch.zeros(1, 4096)), 8, 1),  # packed
        ((torch.zeros(8, 2), torch.zeros(8)), 4, 8),  # two views of each image
        ((torch.zeros(64, 2), torch.zeros(10)), None, 64),
        ((torch.zeros(64, 2), torch.zeros(10), torch.zeros(10)), 64, 64),
        ((torch.zeros(4, 2), torch.zeros(30, 5), torch.zeros(30)), None, 4),  # images, boxes and their classes
        ((torch.zeros(64, 2), torch.zeros(1), torch.zeros(1)), None, 64),
        ((torch.zeros(64, 2), torch.zeros(64)), 1, 64),  # an item of the dataset is a batch
        (BAG, 1, 4),
        ((torch.zeros(4), Ragged()), 4, 4),
        ((Ragged(), torch.zeros(4)), 4, 4),
        (Ragged(), 4, None),
        ((torch.zeros(3), Ragged()), 4, 3),
    ],
)
def test_samples_are_told_from_their_parts_by_the_batch_size_and_by_what_most_tensors_say(
    batch: Any, batch_size: Any, samples: int
) -> None:
    assert samples_in(batch, batch_size) == samples


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(2, 9), st.randoms())
def test_the_order_of_tensors_does_not_matter_where_the_batch_size_is_known(sizes: list[int], batch_size: int, random: Any) -> None:
    count = samples_in([np.zeros(size) for size in sizes], batch_size)
    random.shuffle(sizes)
    assert count == samples_in([np.zeros(size) for size in sizes], batch_size)
    assert count in {*sizes, batch_size}
    assert count == batch_size or batch_size not in sizes


@pytest.mark.parametrize(
    "told", [{"batch_size": 4}, {"batch_sampler": BatchSampler(range(11), 4, drop_last=False)}], ids=["batch_size", "batch_sampler"]
)
@pytest.mark.parametrize("inner", [(), (2, 70)], ids=["texts", "graphs"])
def test_steps_count_the_samples_of_the_loader(timer: wb.StepTimer, told: Any, inner: tuple[int, ...]) -> None:
    def collate(samples: list[int]) -> tuple[torch.Tensor, ...]:
        return torch.zeros(50), torch.zeros(inner or len(samples)), torch.zeros(len(samples))

    for _ in timer.batches(DataLoader(range(11), collate_fn=collate, **told)):  # type: ignore[arg-type]
        with timer("optimizer"):
            pass
    assert [step.samples for step in timer.timeline.steps] == [4, 4, 3]


def test_samples_of_a_step_add_up_over_its_batches(timer: wb.StepTimer) -> None:
    for size in timer.batches([torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(3, 1), torch.zeros(4, 1)]):
        if len(size) != 4:
            with timer("optimizer"):
                pass
    assert [step.samples for step in timer.timeline.steps] == [11]


def test_it_works_without_torch() -> None:
    code = """
    import sys
    sys.modules["torch"] = None  # importing it fails
    import workbench as wb
    timer = wb.StepTimer()
    for batch in timer.batches([1, 2, 3]):
        with timer("forward"):
            pass
    assert len(timer.timeline.steps) == 3
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_faces(timer: wb.StepTimer) -> None:
    assert repr(timer) == "StepTimer()"
    assert repr(timer.batches([1])) == "StepTimer().batches(…)"
    assert "data_wait" in timer._repr_html_()


# Arithmetic, for any loop


action = st.deferred(lambda: st.integers(0, 10**7) | st.tuples(st.sampled_from(PHASES), st.lists(action, max_size=4)))


@given(st.lists(st.tuples(st.integers(0, 10**7), st.lists(action, max_size=5)), max_size=6), st.integers(0, 50))
def test_phases_are_exclusive_and_sum_to_the_step(batches: list[tuple[int, list[Any]]], harvest_every: int) -> None:
    clock, marks = Clock(), 0
    timer = wb.StepTimer(recorder=clock.recorder)
    expected: list[dict[str, int]] = []

    def play(actions: list[Any], inside: str, spent: dict[str, int]) -> None:
        nonlocal marks
        for one in actions:
            if isinstance(one, int):
                clock.now += one
                spent[inside] += one
            else:
                with timer(one[0]):
                    play(one[1], one[0], spent)
            marks += 1
            if harvest_every and marks % harvest_every == 0:
                timer._recording.harvest()  # as the writer thread does, at any moment

    def has_optimizer(actions: list[Any]) -> bool:
        return any(not isinstance(one, int) and (one[0] == "optimizer" or has_optimizer(one[1])) for one in actions)

    def loader() -> Iterator[list[Any]]:
        for wait, actions in batches:
            clock.now += wait
            yield actions

    open_spent: dict[str, int] | None = None
    by_optimizer = any(has_optimizer(actions) for _, actions in batches)
    for (wait, _), actions in zip(batches, timer.batches(loader()), strict=True):
        spent = open_spent or dict.fromkeys(PHASES, 0)
        spent["data_wait"] += wait
        play(actions, "other", spent)
        done = has_optimizer(actions) or not by_optimizer
        open_spent = None if done else spent
        if done:
            expected.append(spent)
    steps = timer.timeline.steps
    assert [step.phases for step in steps] == [tuple(spent[name] / 1e9 for name in PHASES) for spent in expected]
    assert all(s >= 0 for step in steps for s in step.phases)


def test_a_turn_of_thousands_of_marks() -> None:
    this = read_iteration(bytes([9] + [2, 6] * 4000 + [4, 6]))
    assert this.updated
    times = list(range(len(this.columns) + 1))
    assert this.rows(times, [4]) == [(1, 0, 4000, 0, 1, 4002, 4)]


# The device's clock


class Device:
    """A stream of events: the device reaches each one at a time of its own, when it is let run."""

    def __init__(self) -> None:
        self.busy_until = self.reached = 0.0  # ms
        self.made = self.waits = 0
        self.streams = set[str]()

    def work(self, ms: float) -> None:
        self.busy_until += ms

    def run(self, until: float) -> None:
        self.reached = until

    def event(self) -> "Event":
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self, stream: Any = None) -> None:
        self.device.streams.add(str(stream))
        self.at = self.device.busy_until

    def query(self) -> bool:
        return self.at <= self.device.reached

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.reached = max(self.device.reached, self.at)

    def elapsed_time(self, end_event: Any) -> float:
        assert self.query()
        assert end_event.query(), "this would have been an error: the event has not happened"
        return float(end_event.at - self.at)


def test_device_phases_are_read_later_and_nothing_waits_in_a_step() -> None:
    device = Device()
    timer = wb.StepTimer(recorder=lambda: DeviceRecorder(device.event))
    for number in timer.batches(range(40)):
        for phase, ms in {"h2d": 1, "forward": 4, "backward": 8, "optimizer": 2}.items():
            with timer(phase):
                device.work(ms)
        device.run(15.0 * (number - 1))  # the host is two steps ahead
        assert device.waits == 0
    assert device.made <= (2 + 2 * marks.READ_STEPS) * 10  # events are used again
    timeline = timer.timeline
    assert device.waits > 0
    assert timeline.clock == "device"
    assert phases(timeline) == [{"h2d": 0.001, "forward": 0.004, "backward": 0.008, "optimizer": 0.002}] * 40


def test_the_timeline_of_a_device_is_complete_while_the_loop_runs() -> None:
    device = Device()
    timer = wb.StepTimer(recorder=lambda: DeviceRecorder(device.event))
    for number in timer.batches(range(5)):
        with timer("optimizer"):
            device.work(1)
        assert len(timer.timeline.steps) == number


def test_a_copy_on_a_side_stream_that_is_hidden_costs_nothing() -> None:
    device = Device()
    recorder = DeviceRecorder(device.event)
    timer = wb.StepTimer(recorder=lambda: recorder)
    for _ in timer.batches(range(2)):
        with timer("forward"):
            device.work(10)
        ahead, device.busy_until = device.busy_until, device.busy_until - 6  # the side stream lies behind
        with timer("h2d"):
            device.work(2)
        device.busy_until = ahead
        with timer("optimizer"):
            device.work(1)
    assert phases(timer.timeline) == [{"forward": 0.01, "optimizer": 0.001}] * 2


def test_marks_during_a_graph_capture_are_left_out() -> None:
    device, capturing = Device(), False
    timer = wb.StepTimer(recorder=lambda: DeviceRecorder(device.event, lambda: capturing))
    for number in timer.batches(range(3)):
        capturing = number == 1
        with timer("forward"):
            device.work(4)
        capturing = False
        with timer("optimizer"):
            device.work(2)
    plain = {"forward": 0.004, "optimizer": 0.002}
    assert phases(timer.timeline) == [plain, {"other": 0.004, "optimizer": 0.002}, plain]


def test_events_go_to_the_stream_of_the_device_of_the_recorder() -> None:
    device = Device()
    timer = wb.StepTimer(recorder=lambda: DeviceRecorder(device.event, stream=lambda index: f"stream of {index}", device=3))  # type: ignore
    for _ in timer.batches(range(3)):
        with timer("forward"):
            device.work(1)
    assert device.streams == {"stream of 3"}


@pytest.mark.parametrize("side", [False, True])
def test_on_one_stream_the_last_event_of_a_step_answers_for_all(side: bool) -> None:
    """Asking the driver costs a microsecond. With a side stream, whose events may happen later than the last one, all are asked."""
    device, asked, stream = Device(), list[float](), "main"

    class Counted(Event):
        def query(self) -> bool:
            asked.append(self.at)
            return super().query()

        def elapsed_time(self, end_event: Any) -> float:
            return float(end_event.at - self.at)

    recorder = DeviceRecorder(lambda: Counted(device), stream=lambda _: stream)  # type: ignore[arg-type, return-value]
    timer = wb.StepTimer(recorder=lambda: recorder)
    for number in timer.batches(range(20)):
        for phase in ("h2d", "forward", "backward", "optimizer"):
            stream = "side" if side and phase == "h2d" else "main"
            with timer(phase):
                device.work(1)
        stream = "main"
        device.run(4.0 * number)
    assert len(timer.timeline.steps) == 20
    assert len(asked) > 150 if side else len(asked) <= 3 * 20


@pytest.mark.parametrize("lag", [0, 2, 30])
def test_steps_are_read_several_at_once(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked seldom, however far ahead the host is, and slow steps are read as they end."""
    device, now, asked = Device(), 0.0, 0

    class Asked(Event):
        def query(self) -> bool:
            nonlocal asked
            asked += 1
            return super().query()

        def elapsed_time(self, end_event: Any) -> float:
            return float(end_event.at - self.at)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    recorder, read = DeviceRecorder(lambda: Asked(device), kind=Asked), 0
    for step in range(1, 61):
        for code in (marks.NEXT, marks.BATCH, marks.OPTIMIZER, marks.END_PHASE):
            device.work(0.25)
            recorder.marks.extend((recorder.now(), code))
        device.run(float(step - lag))
        now += 0.001 if step <= 50 else 0.1
        recorder.read()
        read += len(recorder.take()[1]) // 4
        assert read >= step - lag - (marks.READ_STEPS if step <= 50 else 1)
        assert step > 50 or asked <= 2 + step / (2 if lag else 8)  # a question takes a microsecond
    recorder.settle()
    assert read + len(recorder.take()[1]) // 4 == 60


@pytest.mark.parametrize("lag", [0, 2, 30])
@pytest.mark.parametrize("length", [5, 20])
def test_steps_of_several_passes_are_written_in_order(lag: int, length: int) -> None:
    """Each pass has a recorder of its own; the device may still work on the last steps of one while the next one runs."""
    device, written, step = Device(), list[int](), 0
    timer = wb.StepTimer(recorder=lambda: DeviceRecorder(device.event))
    for _ in range(3):
        for _ in timer.batches(range(length)):
            step += 1
            with timer("optimizer"):
                device.work(float(step))
            device.run(float(sum(range(step - lag + 1))))
            written += [round(row[4] / 1e6) for row in timer._recording.harvest()]  # as the thread that writes the file does
            assert len(written) >= step - lag - marks.READ_STEPS
        written += [round(row[4] / 1e6) for row in timer._recording.harvest()]
        assert lag or written == [*range(1, step + 1)]  # nothing that the device has done waits for the next pass
    assert device.waits == 0
    timer.timeline  # noqa: B018  # settles
    assert written == [*range(1, len(written) + 1)]
    assert [round(s.phases[4] * 1e3) for s in timer.timeline.steps] == [*range(1, 3 * length + 1)]


def test_no_capture_is_looked_for_on_the_default_stream() -> None:
    """Asking takes half a microsecond, eight times in a step, and the driver refuses to capture there."""
    asked, stream = 0, SimpleNamespace(cuda_stream=0)

    def capturing() -> bool:
        nonlocal asked
        asked += 1
        return True

    recorder = DeviceRecorder(Device().event, capturing, stream=lambda _: stream)  # type: ignore[arg-type, return-value]
    assert recorder.now() is not None
    assert recorder.now() is not None
    assert asked == 0
    stream = SimpleNamespace(cuda_stream=1)
    assert recorder.now() is None
    assert recorder.now() is None
    assert asked == 2


def test_events_are_called_below_the_wrappers_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Below(Event):
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            super().__init__(device)

    class Wrapper(Below):
        def record(self, stream: Any = None) -> None:
            raise AssertionError("slow")

        def elapsed_time(self, end_event: Any) -> float:
            raise AssertionError("slow")

    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", Wrapper)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(marks, "_current_stream", lambda torch: lambda device: None)
    recorder = new_recorder("cuda:0")
    for _ in range(2):
        recorder.marks.extend((recorder.now(), marks.NEXT))
        device.work(3.0)
    recorder.settle()
    assert recorder.take()[0] == [0, 3_000_000]


def test_a_stream_is_made_once_and_the_current_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    made, now = list[str](), {3: 0, 4: 0}

    def stream(device: int) -> Any:
        made.append(f"stream {now[device]} of {device}")
        return made[-1]

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: now[device], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    current = marks._current_stream(torch)
    assert [current(3), current(None)] == ["stream 0 of 3"] * 2
    assert current(4) == "stream 0 of 4"
    now[3] = 7
    assert [current(3), current(3)] == ["stream 7 of 3"] * 2
    assert len(made) == 3
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")  # another torch
    assert marks._current_stream(torch) is stream


@pytest.mark.parametrize(("given", "index"), [("cuda:1", 1), (torch.device("cuda", 2), 2), ("cuda", 3), (None, 3)])
def test_a_recorder_without_a_device_is_for_the_current_one(given: Any, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    recorder = new_recorder(given)
    assert (recorder.clock, recorder.device) == ("device", index)
    assert new_recorder("cpu").clock == "host"


# The rank's file


def test_name_and_memory_are_those_of_the_device_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: f"GPU {device}")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=0: 1000 + device)
    training = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2 if threading.get_ident() == training else 0)
    device = Device()
    for number, make in enumerate((lambda: DeviceRecorder(device.event), HostRecorder)):
        path = tmp_path / f"rank{number}.jsonl"
        timer = wb.StepTimer(path, recorder=make)
        list(timer.batches(range(3)))
        for loop in timer._recording._loops:
            loop.recorder.settle()
        assert timer._recording._log is not None
        writer = threading.Thread(target=timer._recording._log.flush)
        writer.start()
        writer.join()
        timer.close()
        header, *steps = lines(path)
        assert header["device"] == ("cpu" if number else "GPU 2")
        assert steps[-1]["memory"] == 1002
    assert rank_log.peak_bytes() == 1003


def test_an_error_of_ours_ends_the_recording_and_not_the_training(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(StepBuilder, "feed", broken)
    timer, limit = wb.StepTimer(tmp_path / "rank0.jsonl", recorder=clock.recorder), time.monotonic() + 30
    for _ in timer.batches(iter(int, 1)):
        with timer("optimizer"):
            time.sleep(0.01)
        if timer.failed:
            break
        assert time.monotonic() < limit
    train(timer, clock, 2)
    timer.close()
    assert timer.timeline.steps == ()
    assert isinstance(timer.failed, KeyError)
    assert capsys.readouterr().err == "workbench: steps are no longer recorded: KeyError('ours')\n"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(timer: wb.StepTimer, clock: Clock, steps: int) -> None:
    for _ in timer.batches(clock.loader(*[1] * steps)):
        spend(timer, clock, forward=2, optimizer=1)


def test_the_file_is_what_the_timeline_reads(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = tmp_path / "rank1.jsonl"
    timer = wb.StepTimer(path, recorder=clock.recorder)
    train(timer, clock, 12)
    list(timer.batches(clock.loader(1)))
    timer.close()
    header, *steps, note = lines(path)
    assert header == {"rank": 1, "world_size": 2, "clock": "host", "pid": os.getpid(), "device": "cpu"}
    assert [step["step"] for step in steps] == list(range(12))
    assert "no optimizer step" in note["note"]
    assert steps[-1]["memory"] > 10**6
    read = Timeline.from_lines(lines(path))
    assert [step.phases for step in read.steps] == [step.phases for step in timer.timeline.steps]
    assert read.notes == timer.timeline.notes
    assert read.rank == timer.timeline.rank == 1


def test_variables_that_are_no_numbers_do_not_end_a_loop_that_is_watched(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some scripts set RANK=-1 for "not distributed"."""
    for name, value in {run_directory.ENV_RUN_DIR: str(tmp_path), "RANK": "-1", "LOCAL_RANK": "-1", "WORLD_SIZE": "0"}.items():
        monkeypatch.setenv(name, value)
    timer = wb.StepTimer(recorder=clock.recorder)
    train(timer, clock, 3)
    timer.close()
    header, *_ = lines(tmp_path / "rank0.jsonl")
    assert (header["rank"], header["world_size"]) == (0, 1)
    notes = timer.timeline.notes
    assert notes[0].startswith("the environment variable RANK is '-1': a whole number of at least 0 is allowed")
    assert notes[0].endswith("Try: unset RANK. Until then 0 counts")
    assert "WORLD_SIZE is '0'" in notes[1]
    with contextlib.closing(wb.watch([1, 2])) as watched:
        assert list(watched) == [1, 2]
    assert notes[0] in watched.timeline.notes


def test_it_writes_into_the_run_directory_of_the_launch(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    timer = wb.StepTimer(recorder=clock.recorder)
    train(timer, clock, 3)
    timer.close()
    assert len(lines(tmp_path / "rank0.jsonl")) == 4


def test_lines_appear_while_the_loop_runs(tmp_path: Path) -> None:
    timer, path, limit = wb.StepTimer(tmp_path / "rank0.jsonl"), tmp_path / "rank0.jsonl", time.monotonic() + 30
    for _ in timer.batches(iter(int, 1)):  # without end
        with timer("optimizer"):
            time.sleep(0.01)
        if len(lines(path)) > 3:
            break
        assert time.monotonic() < limit
    timer.close()


def test_timers_on_one_file_go_on_counting(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "rank0.jsonl"
    first, second = wb.StepTimer(path, recorder=clock.recorder), wb.StepTimer(path, recorder=clock.recorder)
    train(first, clock, 2)
    assert len(first.timeline.steps) == 2
    train(second, clock, 2)
    first.close()
    second.close()
    third = wb.StepTimer(path, recorder=clock.recorder)
    train(third, clock, 2)
    third.close()
    _, *steps = lines(path)
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4, 5]
    assert [step.index for step in third.timeline.steps] == [0, 1]


def test_a_full_disk_ends_the_file_and_not_the_training(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank0.jsonl"
    timer = wb.StepTimer(path, recorder=clock.recorder)
    train(timer, clock, 2)
    assert len(timer.timeline.steps) == 2
    assert timer.failed is None

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        train(timer, clock, 2)
        assert len(timer.timeline.steps) == 4
    assert isinstance(timer.failed, run_directory.DiskFullError)
    train(timer, clock, 2)
    assert len(timer.timeline.steps) == 6
    timer.close()
    assert isinstance(timer.failed, run_directory.DiskFullError)
    assert len(lines(path)) == 3
    said = capsys.readouterr().err
    assert said.count("workbench: steps are no longer recorded") == 1
    assert "make room" in said


def test_a_forked_child_writes_nothing(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "rank0.jsonl"
    timer = wb.StepTimer(path, recorder=clock.recorder)
    loop = iter(timer.batches(clock.loader(1, 1, 1)))
    next(loop)
    spend(timer, clock, optimizer=1)
    next(loop)
    child = os.fork()
    if child == 0:
        spend(timer, clock, optimizer=1)
        next(loop)
        timer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    del loop
    timer.close()
    assert len(lines(path)) == 2


def test_forked_loader_workers_do_not_disturb(tmp_path: Path) -> None:
    timer = wb.StepTimer(tmp_path / "rank0.jsonl")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(24, 2)), batch_size=4, num_workers=2)
    for _ in timer.batches(loader):
        with timer("optimizer"):
            pass
    timer.close()
    assert [row["samples"] for row in lines(tmp_path / "rank0.jsonl")[1:]] == [4] * 6


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import workbench as wb
timer = wb.StepTimer(Path(sys.argv[1]))
for number in timer.batches(range(1000)):
    with timer("optimizer"):
        time.sleep(0.01)
    if number == 99:
        {last}
"""


@pytest.mark.parametrize(
    ("last", "code", "least"),
    [("sys.exit(3)", 3, 100), ("raise RuntimeError('boom')", 1, 100), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, 40)],
)
def test_steps_survive_the_end_of_the_process(tmp_path: Path, last: str, code: int, least: int) -> None:
    path = tmp_path / "rank0.jsonl"
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(last=last), str(path)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert least <= len(lines(path)) - 1 <= 100


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        wb.StepTimer(tmp_path / "missing" / "rank0.jsonl")


def test_peak_memory_is_in_bytes() -> None:
    assert 10**7 < rank_log.peak_bytes() < 10**12


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [1, 8, 10, 12])
def test_samples_of_a_data_loader_are_foretold_right(count: int, drop_last: bool) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(count)), batch_size=4, drop_last=drop_last)
    timer = wb.StepTimer()
    sizes = [len(batch) for (batch,) in timer.batches(loader)]
    assert [step.samples for step in timer.timeline.steps] == sizes


def test_samples_that_a_collate_function_leaves_out_are_not_counted() -> None:
    loader = DataLoader(range(8), batch_size=4, collate_fn=lambda numbers: torch.tensor([one for one in numbers if one % 4 != 3]))
    timer = wb.StepTimer()
    assert [len(batch) for batch in timer.batches(loader)] == [step.samples for step in timer.timeline.steps] == [3, 3]
