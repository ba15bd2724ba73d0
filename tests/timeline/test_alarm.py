"""Alarms: the phase that explains a change, reported once, with what else changed on the machine; the thread of a watched loop."""

import json
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.emulated_device import EmulatedDevice
from workbench.core.run_directory import ENV_ALARM
from workbench.core.vocabulary import PHASES
from workbench.timeline import hooks, rank_log
from workbench.timeline.alarm import (
    AT_A_LOOK,
    EVERY,
    HOLD,
    INTERVAL,
    LONGEST,
    SAME,
    Alarm,
    Circumstances,
    OtherRanks,
    PartsOfBackward,
    StepAlarm,
    allowed,
    device_clock,
    seconds_to_wait,
)
from workbench.timeline.analysis.alarm_events import NOT_FINITE, AlarmEvent, digest
from workbench.timeline.analysis.change_points import BLOCK
from workbench.timeline.hooks import KEPT, Losses
from workbench.timeline.marks import HostRecorder
from workbench.timeline.steps import Row
from workbench.timeline.watch import Watch
from workbench.traces.analysis.trace import Trace
from workbench.traces.measure.profiled_run import MOST_ALARMS, AlarmTraces

USUAL = {"data_wait": 2e-3, "h2d": 1e-4, "forward": 0.02, "backward": 0.04, "optimizer": 5e-3, "other": 1e-3}


def rows(count: int, chance: np.random.Generator, samples: int | None = 32, **factors: float) -> list[Row]:
    """Steps with some noise, and phases that take so many times as long."""
    some = []
    for _ in range(count):
        phases = [int(1e9 * USUAL[p] * factors.get(p, 1.0) * np.exp(chance.normal(0, 0.03))) for p in PHASES]
        some.append((*phases, samples))
    return some  # type: ignore[return-value]


def play(*parts: list[Row], rank: int = 0, memory: Any = None) -> list[AlarmEvent]:
    follower = StepAlarm(rank, memory=memory)
    return [event for part in parts for row in part for event in follower.see([row])]


@pytest.mark.parametrize(("phase", "factor"), [("backward", 1.31), ("forward", 1.5), ("data_wait", 6.0), ("optimizer", 2.0)])
def test_the_phase_that_explains_a_slower_step_is_told_once(phase: str, factor: float) -> None:
    chance = np.random.default_rng(0)
    events = play(rows(1200, chance), rows(800, chance, **{phase: factor}), rank=3)
    assert [(t.phase, t.rank, t.slower) for t in events] == [(phase, 3, True)]
    assert abs(events[0].step - 1200) <= 24
    assert events[0].share == pytest.approx(USUAL[phase] * (factor - 1) / sum(USUAL.values()), rel=0.2)
    words = events[0].words(ranks=4)
    assert words.startswith("since step 1,")
    assert " on rank 3 " in words
    assert ("with the reduction of gradients" in words) == (phase == "backward")


@pytest.mark.parametrize("seed", range(3))
def test_a_longer_step_is_told_by_the_phase_whose_level_explains_it_and_not_by_one_of_two_that_trade_places(seed: int) -> None:
    chance = np.random.default_rng(seed)
    first, second = play(
        rows(1000, chance), rows(48, chance, forward=0.7), rows(400, chance, forward=1.5)
    )  # its level is not known by then
    assert (first.phase, first.slower, second.phase, second.slower) == ("forward", False, "forward", True)

    def trading(count: int, factor: float) -> list[Row]:
        moved = [int(8e6 * math.sin(place / 40)) for place in range(count)]
        some = zip(rows(count, chance, forward=factor), moved, strict=True)
        return [(wait, copy, forward + by, backward - by, *rest) for (wait, copy, forward, backward, *rest), by in some]  # type: ignore[misc]

    assert [event.phase for event in play(trading(1000, 1.0), trading(400, 1.5))] == ["step"]


@pytest.mark.parametrize("seed", [11, 37, 40])
def test_what_becomes_slow_by_and_by_is_told_with_the_level_that_it_has_by_then(seed: int) -> None:
    chance = np.random.default_rng(seed)
    chance.integers(8)
    (event,) = play(rows(1000, chance), rows(16, chance, data_wait=1.4), rows(300, chance, data_wait=5.0))
    assert event.after / event.before == pytest.approx(5, rel=0.2), "the median of its first blocks is less"


def test_what_becomes_slow_again_within_two_hundred_steps_is_told_again() -> None:
    chance = np.random.default_rng(4)
    usual, slow = partial(rows, 90, chance), partial(rows, 90, chance, data_wait=8.0)
    events = play(rows(1000, chance), slow(), usual(), slow(), usual(), slow(), rows(300, chance))
    assert [(t.phase, t.slower) for t in events] == [("data_wait", True), ("data_wait", False)] * 3


def test_a_far_larger_change_is_told_soon_after_another() -> None:
    chance = np.random.default_rng(3)
    first, far_more = play(rows(600, chance), rows(150, chance, forward=1.4), rows(500, chance, forward=6.0))
    assert first.slower
    assert far_more.slower
    assert far_more.share > 3 * first.share
    assert far_more.step - first.step < SAME * BLOCK


def test_recovery_is_told_too_and_a_tiny_phase_is_not() -> None:
    chance = np.random.default_rng(1)
    events = play(rows(1000, chance), rows(500, chance, forward=1.6), rows(1000, chance))
    assert [t.slower for t in events] == [True, False]
    assert play(rows(1000, chance), rows(600, chance, h2d=3.0)) == []


def test_smaller_batches_are_fewer_samples_and_no_slower_phase() -> None:
    chance = np.random.default_rng(2)
    events = play(rows(1000, chance), rows(800, chance, samples=16))
    assert [(t.phase, t.slower) for t in events] == [("throughput", True)]
    assert "50 % fewer samples per second" in events[0].words()


@pytest.mark.parametrize("look", [BLOCK, 100, 650])
def test_a_phase_that_is_sure_a_block_after_its_step_is_still_told(look: int) -> None:
    chance, follower = np.random.default_rng(0), StepAlarm()
    some = [*rows(350, chance), *rows(300, chance, forward=3.8)]
    for place in range(350, 354):
        some[place] = some[340]
    events = [event for first in range(0, 650, look) for event in follower.see(some[first : first + look], waits=look > BLOCK)]
    events += follower.see([], waits=False, last=True)
    assert [t.phase for t in events] == ["forward"]


def test_after_a_restart_steps_count_from_the_first_of_all() -> None:
    chance = np.random.default_rng(5)
    follower = StepAlarm(done=41_203)
    events = follower.see([*rows(1200, chance), *rows(400, chance, forward=1.5)])
    assert [t.phase for t in events] == ["forward"]
    assert abs(events[0].step - 41_203 - 1200) <= 24
    assert events[0].words().startswith("since step 42,")


def test_what_waits_for_other_phases_is_told_at_the_end() -> None:
    chance = np.random.default_rng(8)
    before, after = rows(1200, chance), rows(400, chance, forward=1.5)
    follower = StepAlarm()
    follower.see(before)
    due = next(place for place in range(0, 400, BLOCK) if follower.see(after[place : place + BLOCK], waits=False))
    follower = StepAlarm()
    assert follower.see([*before, *after[: due - BLOCK]], waits=False) == []
    (event,) = follower.see([], waits=False, last=True)
    assert event.phase == "forward"


def test_memory_that_jumps_is_told() -> None:
    chance, held = np.random.default_rng(3), iter([1e9] * 150 + [1.4e9] * 150)
    events = play(rows(2000, chance), memory=lambda: next(held))
    assert [(t.phase, round(t.after / t.before, 1)) for t in events] == [("memory", 1.4)]
    assert re.fullmatch(r"more memory since step [\d,]+ or earlier: 1.30 GiB, 954 MiB before", events[0].words())


def test_memory_that_is_read_once_a_look_did_not_jump_before_the_look_that_saw_it_lower() -> None:
    """It was told hundreds of steps too early: all steps of a look had what was held at its end."""
    chance, held = np.random.default_rng(3), [3e8]
    follower, events = StepAlarm(memory=lambda: held[0]), list[AlarmEvent]()
    for look in range(5):
        held[0] = 3e8 if look < 2 else 5.4e8  # at step 2,500 or so, in the third look
        events += follower.see(rows(1000, chance))
    (alarm,) = events
    assert 2000 < alarm.step <= 3000
    assert alarm.words().startswith(f"more memory since step {alarm.step:,} or earlier: ")


def test_steps_are_counted_from_one_as_everywhere_else() -> None:
    chance = np.random.default_rng(3)
    events = play(rows(800, chance), rows(400, chance, forward=2.0))
    assert [t.step for t in events] == [801]
    follower = StepAlarm(losses=lambda count, every: [1.0] * 11 + [math.inf] * (count - 11))
    (lost,) = follower.see(rows(40, chance), last=True)
    assert (lost.step, lost.words()) == (12, "since step 12 the loss is NaN or infinite (1 before)")


def test_memory_of_a_device_is_followed_beside_the_hosts() -> None:
    chance, held = np.random.default_rng(3), iter([8e9] * 150 + [1e10] * 150)
    follower = StepAlarm(memory=lambda: 1e9, device_memory=lambda: next(held))
    some = rows(2000, chance)
    events = [event for first in range(0, 2000, BLOCK) for event in follower.see(some[first : first + BLOCK])]
    assert [(t.phase, round(t.after / t.before, 2)) for t in events] == [("device memory", 1.25)]
    assert re.fullmatch(r"more device memory since step [\d,]+ or earlier: 9.31 GiB, 7.45 GiB before", events[0].words())


def test_an_alarm_on_a_device_follows_its_memory_and_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an emulated device; the reading of the clock is made, as NVML would give it."""
    device = EmulatedDevice()
    device.install(monkeypatch)
    clock, chance = [1980], np.random.default_rng(6)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda index: clock[0] if index == 0 else None)
    monkeypatch.setattr("workbench.timeline.alarm.INTERVAL", 1e3)
    waiting: list[Row] = []
    follower = Alarm(lambda: [waiting.pop(0) for _ in range(len(waiting))], lambda *_: None, device=0)
    for look in range(60):
        device.memory.allocated, clock[0] = (8, 1980) if look < 40 else (10, 1410)
        waiting += rows(4 * BLOCK, chance, backward=1.0 if look < 40 else 1.5)
        follower.look()
    follower.close()
    events = {event.phase: event for event in follower.events}
    assert events["backward"].circumstances == ("the clock of the GPU fell from 2.0 to 1.4 GHz",)
    assert (events["device memory"].before, events["device memory"].after) == (8, 10)


def test_a_longer_backward_is_told_by_the_part_that_ddp_says_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the reduction takes 31 ms instead of 5, and where computing does."""
    monkeypatch.setattr("workbench.timeline.alarm.INTERVAL", 1e3)
    for name, words in (
        ("comm", "the reduction of gradients, with the wait for other ranks, takes"),
        ("compute", "computing the gradients takes"),
    ):
        noted = {"backward_comm_time": 6_000_000, "backward_compute_comm_overlap_time": 1_000_000, "backward_compute_time": 35_000_000}
        parts = PartsOfBackward(lambda noted=noted: SimpleNamespace(_get_ddp_logging_data=lambda: noted))  # type: ignore[misc]
        waiting, chance = list[Row](), np.random.default_rng(6)
        follower = Alarm(lambda waiting=waiting: [waiting.pop(0) for _ in list(waiting)], lambda *_: None, rank=3, ranks=4)  # type: ignore[misc]
        follower._parts = parts
        for look in range(60):
            noted[f"backward_{name}_time"] += 26_000_000 * (look == 40)
            waiting += rows(4 * BLOCK, chance, backward=1.0 if look < 40 else 1.6)
            follower.look()
        follower.close()
        (event,) = [event for event in follower.events if event.phase != "memory"]
        assert f" {words} " in event.words(4)
        assert " on rank 3 " in event.words(4)
        assert event.after - event.before == pytest.approx(0.026)
    assert PartsOfBackward(lambda: None).part(replace(event, phase="backward")).phase == "backward"


def test_without_nvml_a_gpu_has_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "clock_rate", fails)
    assert device_clock(0) is device_clock(None) is None


def falling(count: int, chance: np.random.Generator, *, rise: float = 1.0, at: int = 0) -> list[float]:
    """Losses of batches on the way from 10 down to 3, of which those from one step on are higher."""
    steps = np.arange(count)
    return list((3 + 7 / np.sqrt(1 + steps / 100)) * np.exp(chance.normal(0, 0.04, count)) * np.where(steps >= at, rise, 1.0))


def follow(losses: list[float]) -> list[AlarmEvent]:
    chance, waiting = np.random.default_rng(9), iter(losses)
    follower = StepAlarm(2, losses=lambda steps, _: [next(waiting) for _ in range(steps)])
    return follower.see(rows(len(losses), chance))


def test_a_loss_that_rises_for_good_is_told_and_one_that_falls_is_not() -> None:
    chance = np.random.default_rng(6)
    assert follow(falling(4000, chance)) == []
    events = follow(falling(4000, chance, rise=1.2, at=2500))
    assert [(t.phase, t.rank, t.slower) for t in events] == [("loss", 2, True)]
    assert abs(events[0].step - 2500) <= 24
    assert events[0].after / events[0].before == pytest.approx(1.2, rel=0.05)
    assert re.fullmatch(r"since step 2,\d{3} the loss is \d+ % higher on rank 2 \(.* → .*\)", events[0].words(ranks=4))
    assert digest(events, ranks=4) == "1 change in all"


def test_of_short_steps_one_loss_in_some_is_read_and_a_lasting_rise_is_told() -> None:
    chance, asked = np.random.default_rng(9), []
    values = falling(16_000, chance, rise=1.2, at=12_000)

    def losses(steps: int, every: int) -> list[float]:
        asked.append(every)
        return [values.pop(0) for _ in range(steps)]

    follower = StepAlarm(2, losses=losses, done=1000)
    short = [(*(phase // 50 for phase in row[:-1]), row[-1]) for row in rows(16_000, chance)]
    events = [event for first in range(0, 16_000, 80) for event in follower.see(short[first : first + 80])]  # type: ignore[arg-type]
    assert [(t.phase, t.rank) for t in events] == [("loss", 2)]
    assert abs(events[0].step - 13_000) <= 3 * BLOCK * EVERY
    assert asked == [0, *[EVERY] * 199], "judged once, after SETTLED steps"


@pytest.mark.parametrize("each", [1, 3])
def test_losses_that_are_not_read_keep_the_others_with_their_steps(each: int) -> None:
    losses, asked = Losses(), [0]

    class Loss(torch.Tensor):
        def item(self) -> float:
            asked[0] += 1
            return super().item()

    Loss.__name__ = "Tensor"

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            for _ in range(each):
                losses.add(torch.tensor(float(step)).as_subclass(Loss))
                losses.add([torch.ones(())])  # no loss

    steps(0, 200)
    assert losses.take(200, EVERY) == [*map(float, range(200))]
    before = asked[0]
    steps(200, 1200)
    taken = losses.take(1000, EVERY)
    known = [(step, loss) for step, loss in enumerate(taken, 200) if not math.isnan(loss)]
    assert all(step == loss for step, loss in known)
    assert len(known) == pytest.approx(1000 / EVERY, abs=2)
    assert asked[0] - before == pytest.approx(1000 * (2 * each - 1) / EVERY, abs=2 * each)


def test_a_backward_of_several_numbers_beside_that_of_the_loss_leaves_losses_with_their_steps() -> None:
    losses = Losses()
    for step in range(2000):
        if step == 200:
            assert losses.take(200, EVERY) == [*map(float, range(200))]
        losses.add(torch.tensor(float(step)))
        losses.add(torch.ones(3))
    known = [(step, loss) for step, loss in enumerate(losses.take(1800, EVERY), 200) if not math.isnan(loss)]
    assert len(known) > 1800 / EVERY / 2 - 2
    assert all(step == loss for step, loss in known)


def test_losses_that_have_no_ratio_or_no_number_are_not_followed() -> None:
    chance = np.random.default_rng(7)
    around_0 = [*chance.normal(0, 1, 1000).tolist(), *chance.normal(50, 1, 1000).tolist()]
    assert follow(around_0) == []
    late = [*[float("nan")] * 700, *falling(1500, chance)]
    assert follow(late) == []


def test_a_loss_that_is_not_finite_is_told_once_with_its_step() -> None:
    chance = np.random.default_rng(7)
    values = falling(1000, chance)
    values[100] = math.inf  # a single one, as a GradScaler skips it
    values[260:] = [math.inf, math.nan, math.nan] * 246 + [math.inf, math.nan]
    events = follow(values)
    assert [(t.phase, t.step, t.rank) for t in events] == [("not finite", 261, 2)]
    assert events[0].before == values[259]
    assert events[0].words(ranks=4) == f"since step 261 the loss is NaN or infinite on rank 2 ({values[259]:.4g} before)"
    assert AlarmEvent.of_row(events[0].to_row()) == events[0]
    below_0 = [-1.0] * 500 + [math.inf] * 100
    assert [(t.phase, t.step) for t in follow(below_0)] == [("not finite", 501)]
    assert follow([1.0] * 599 + [math.inf]) == []


@pytest.mark.parametrize("device", [False, True])
def test_a_loss_that_is_not_finite_differs_from_one_that_is_not_read(device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and on an emulated device, which writes its losses into the ring."""

    class OnDevice(torch.Tensor):
        is_cpu = False

    if device:
        monkeypatch.setattr(hooks, "_unscaled", lambda loss: loss.detach().as_subclass(OnDevice))
    losses = Losses()

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            loss = torch.tensor(math.nan if step >= 260 else 1.0 + step, requires_grad=True)
            losses.add(loss * 1 if device else loss)

    steps(0, 200)
    assert losses.take(200, EVERY) == [1.0 + step for step in range(200)]
    steps(200, 480)
    taken = losses.take(280, EVERY)
    known = [(step, loss) for step, loss in enumerate(taken, 200) if not math.isnan(loss)]
    assert len(known) == pytest.approx(280 / EVERY, abs=2)
    assert known == [(step, math.inf if step >= 260 else 1.0 + step) for step, _ in known]
    assert 260 <= min(step for step, loss in known if math.isinf(loss)) < 260 + EVERY


@pytest.mark.parametrize("weight", [0.0, torch.zeros(())])
def test_a_loss_with_a_weight_of_0_is_not_taken_for_one_that_is_not_finite(weight: float | torch.Tensor) -> None:
    losses, value = Losses(), torch.tensor(3.0, requires_grad=True)
    for step in range(100):
        losses.add(value * (weight if step % 2 else 1.0))
    assert losses.take(100) == pytest.approx([3.0, math.nan] * 50, nan_ok=True)


def test_losses_wait_for_their_steps_whatever_they_are_scaled_by_and_however_many_a_step_has() -> None:
    losses, weight = Losses(), torch.ones((), requires_grad=True)
    for step in range(50):
        for part in range(2):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + step // 10))
            losses.add(scaler.scale(weight * (step + part)))
        losses.add([weight])  # several tensors, or one with several numbers, are no loss
        losses.add(torch.ones(3))
    assert losses.take(50) == pytest.approx([step + 0.5 for step in range(50)])

    losses = Losses()
    for step in range(3 * KEPT):
        losses.add(torch.tensor(float(step)))
        losses.add(torch.tensor(math.inf if step == 5 else step + 1.0))
        if step % 100 == 99:
            taken = losses.take(100)
            expected = [math.inf if place == 5 else place + 0.5 for place in range(step - 99, step + 1)]
            assert taken == pytest.approx(expected, nan_ok=True)
    losses = Losses()
    losses.add(torch.ones(()))
    assert losses.take(2) == pytest.approx([1.0, math.nan], nan_ok=True)  # the second has none yet


def test_a_scaler_that_begins_late_is_seen_soon_and_losses_without_one_are_seldom_asked() -> None:
    losses, weight, parts = Losses(), torch.ones((), requires_grad=True), 3
    for step in range(600):
        for part in range(parts):
            loss = weight / (1 / (step + 1))
            losses.add(loss * 1000 if step >= 200 and part == 1 else loss)
    taken = losses.take(600)
    assert taken[:200] == pytest.approx(range(1, 201))
    late = [step for step, mean in enumerate(taken) if mean != pytest.approx(step + 1)]
    assert late
    assert late == [*range(200, 200 + len(late))]
    assert len(late) <= hooks.SOMETIMES

    asked, unscaled = [0], Losses()

    class Loss:
        is_cpu = True

        @property
        def grad_fn(self) -> None:
            asked[0] += 1

        def item(self) -> float:
            return 1.0

    Loss.__name__ = "Tensor"
    for _ in range(5_000):
        unscaled.add(Loss())
    assert unscaled.take(5_000) == [1.0] * 5_000
    assert asked[0] < 5_000 / hooks.SOMETIMES + hooks.FIRST + 2


def test_losses_that_were_passed_over_leave_the_others_with_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 2 * KEPT + 100
    losses, loss = Losses(), torch.zeros(())
    for step in range(steps):
        losses.add(loss.fill_(step))
        losses.add(loss)
    taken = losses.take(steps)
    assert len(taken) == steps
    assert taken[-KEPT // 8 :] == [*map(float, range(steps - KEPT // 8, steps))]
    assert all(math.isnan(mean) or mean == step for step, mean in enumerate(taken))
    losses.add(loss.fill_(7.0))
    losses.add(loss)
    assert losses.take(1) == [7.0]
    monkeypatch.setattr(hooks, "FORGOTTEN", 5)
    for _ in range(6 * hooks.SOMETIMES):
        losses.add(loss)
    taken = losses.take(3 * hooks.SOMETIMES)
    assert taken[:3] == [7.0, 7.0, 7.0]
    assert all(value == 7.0 or math.isnan(value) for value in taken[3 : hooks.SOMETIMES])
    assert all(map(math.isnan, taken[hooks.SOMETIMES :]))  # nobody seems to look any more


def test_the_losses_of_a_device_are_copied_into_pinned_memory_also_after_some_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made, full = [], torch.full

    def noted(*args: Any, pin_memory: bool) -> torch.Tensor:
        made.append(pin_memory)
        return full(*args)

    monkeypatch.setattr(torch, "full", noted)
    losses = Losses()
    losses.add(torch.ones(()))
    assert losses.take(1) == [1.0]
    for pinned in (True, False, True):
        losses._ring(pinned=pinned)
    losses.add(torch.ones(()))
    assert losses.take(1) == [1.0]
    assert made == [False, True]


def test_nothing_waits_for_a_device_whose_loss_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an emulated device: its loss is copied without a wait, and never asked for its value."""
    asked = []

    class OnDevice(torch.Tensor):
        is_cpu = False

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append((function.__name__, kwargs or {}))
            return super().__torch_function__(function, types, args, kwargs or {})

    monkeypatch.setattr(hooks, "_unscaled", lambda loss: loss.detach().as_subclass(OnDevice))
    losses = Losses()
    losses.add(torch.ones((), requires_grad=True) * 3.0)  # as a scaled one is, which is looked at closely
    assert losses.take(1) == [3.0]
    assert ("copy_", {"non_blocking": True}) in asked
    assert not {name for name, _ in asked} & {"item", "tolist", "cpu", "numpy", "__float__", "synchronize"}


def test_what_cannot_be_copied_ends_the_losses_and_not_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    losses = Losses()
    losses.add(torch.ones((), device="meta"))
    losses.add(torch.ones(()))
    assert math.isnan(losses.take(1)[0])
    assert "losses are not followed any more: NotImplementedError" in capsys.readouterr().err


def test_a_digest_follows_what_becomes_slow_again_and_again() -> None:
    def slow(rank: int, step: int, before: float = 1.0, after: float = 2.0) -> AlarmEvent:
        return AlarmEvent(rank=rank, step=step, phase="forward", before=before, after=after, share=0.2)

    events = [slow(3, 1000), slow(3, 1100, 2.0, 1.0), slow(3, 41_200), slow(1, 500)]
    assert digest(events, ranks=4) == "rank 3: the forward became slower 2 times, at steps 1,000, 41,200; 4 changes in all"
    waits = [replace(alarm, waits_for=1) for alarm in events[:3]]
    listed = "the forward since step 1,000, the forward since step 1,100, the forward since step 41,200, …"
    assert digest([*waits, events[3]], ranks=4) == f"4 changes in all: {listed}, 3 of them of rank 1, for which this one waits"
    assert digest([slow(0, 80)]) == "1 change in all"
    assert digest([]) == ""


@pytest.mark.parametrize(
    ("after", "said"),
    [(2.5, "150 % longer"), (9.9, "890 % longer"), (215.9, "216× as long"), (0.4, "60 % less"), (0.001, "more than 99 % less")],
)
def test_a_change_by_many_times_is_not_said_in_percent(after: float, said: str) -> None:
    event = AlarmEvent(rank=0, step=8, phase="forward", before=1e-3, after=1e-3 * after, share=0.2)
    assert event.words().startswith(f"since step 8 the forward takes {said} (")


def test_what_else_changed_is_said(tmp_path: Path) -> None:
    for cpu in (0, 1):
        (tmp_path / f"cpu{cpu}/cpufreq").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/cpufreq/scaling_cur_freq").write_text("2400000")
    around = Circumstances(experiments=False, cpufreq=str(tmp_path))
    assert around.changed() == ()
    for cpu in (0, 1):
        (tmp_path / f"cpu{cpu}/cpufreq/scaling_cur_freq").write_text("1700000")
    assert around.changed() == ("the clock of the cores fell from 2.4 to 1.7 GHz",)
    tried = Circumstances(experiments=True, cpufreq=str(tmp_path / "none"))
    tried._probe = tuple(seconds / 4 for seconds in tried._computed())  # type: ignore[assignment]  # as if the machine had been faster
    assert "the machine is slower" in tried.changed()[0]


def test_an_alarm_follows_what_a_recording_finishes_and_survives_its_own_faults(capsys: pytest.CaptureFixture[str]) -> None:
    chance = np.random.default_rng(4)
    waiting = [rows(1200, chance), rows(400, chance, forward=1.5), []]
    events: list[str] = []
    follower = Alarm(lambda: waiting.pop(0) if waiting else [], lambda _, words: events.append(words), rank=1, ranks=2)
    for _ in range(3):
        follower.look()
    assert len(events) == 1
    assert "the forward takes" in events[0]
    assert follower.close() == "1 change in all"

    def fails() -> list[Row]:
        raise RuntimeError("no rows")

    broken = Alarm(fails, print)
    end = time.monotonic() + 30
    while not broken._stop.is_set() and time.monotonic() < end:
        time.sleep(0.05)
    assert "no more alarms: RuntimeError('no rows')" in capsys.readouterr().err


def test_a_rank_that_waits_for_another_leaves_it_to_that_one_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.timeline.alarm.INTERVAL", 1e3)
    waiting: dict[int, list[Row]] = {0: [], 1: []}
    words: dict[int, list[str]] = {0: [], 1: []}
    files = [OtherRanks(tmp_path / "alarms", rank) for rank in (0, 1)]

    def follower(rank: int) -> Alarm:
        def report(event: AlarmEvent, text: str) -> None:
            if event.phase != "memory":
                files[rank].put(event)
                words[rank].append(text)

        take = lambda: [waiting[rank].pop(0) for _ in list(waiting[rank])]  # noqa: E731
        return Alarm(take, report, rank=rank, ranks=2, others=files[rank])

    chance, ranks = np.random.default_rng(2), [follower(0), follower(1)]

    def look(rank: int, count: int, **factors: float) -> None:
        waiting[rank] += rows(count, chance, **factors)
        ranks[rank].look()

    for rank in (0, 1):
        look(rank, 1000)
    look(0, 400, backward=1.5)
    assert words == {0: [], 1: []}, "it waits for an alarm of another rank"
    look(1, 400, data_wait=11.0)
    look(0, 0)
    assert [re.sub(r"[\d.]+× .*", "", text) for text in words[1]] == [f"since step {ranks[1].events[-1].step:,} the wait for data takes "]
    assert words[0] == [""]
    (event,) = [event for event in ranks[0].events if event.phase != "memory"]
    assert (event.phase, event.waits_for) == ("backward", 1)
    assert "; it waits for rank 1" in event.words(2)
    look(1, 400)
    look(0, 400)
    assert [len(words[0]), len(words[1]), words[0][1]] == [2, 2, ""], "that it became faster again, too"
    look(0, 500, backward=1.6)
    assert len(words[0]) == 2
    ranks[0]._looked -= HOLD
    ranks[0]._held = [(event, since - HOLD) for event, since in ranks[0]._held]
    look(0, 0)
    assert "the backward, with the reduction of gradients, takes" in words[0][2], "no other rank has a reason"
    look(0, 500)
    for rank in ranks:
        rank.close()
    assert " less on rank 0" in words[0][3], "at the end nobody is waited for"


def test_a_look_waits_for_many_steps_within_limits_and_not_while_a_change_is_pending() -> None:
    assert seconds_to_wait(3000, 3.0, pending=False) == INTERVAL  # steps of 1 ms
    assert seconds_to_wait(500, 3.0, pending=False) == pytest.approx(AT_A_LOOK * 3.0 / 500)  # of 6 ms
    assert seconds_to_wait(3, 3.0, pending=False) == seconds_to_wait(0, 9.0, pending=False) == LONGEST
    assert seconds_to_wait(500, 3.0, pending=True) == INTERVAL


def test_a_change_that_waits_for_others_is_looked_at_soon() -> None:
    chance = np.random.default_rng(4)
    waiting = [rows(1200, chance), *[rows(BLOCK, chance, forward=1.5) for _ in range(30)]]
    follower = Alarm(lambda: waiting.pop(0), lambda *_: None)
    waits = []
    while waiting and not follower.events:
        follower._looked -= 10 * BLOCK  # as if steps took 10 s
        follower.look()
        waits.append(follower._wait)
    assert follower.events
    assert waits[0] == waits[-1] == LONGEST
    assert INTERVAL in waits
    follower._stop.set()


def test_a_watched_loop_raises_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Real hooks, thread and file; the clock is the loop's own."""
    monkeypatch.setenv("WORKBENCH_RUN_DIR", str(tmp_path))
    now = [0]
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorder = partial(HostRecorder, lambda: now[0])
    loop = Watch([torch.zeros(2, 4)] * 800, model=model, optimizer=optimizer, alarm=True, recorder=recorder)
    loop._recording.go_on(5_000)  # as after a restart
    for number, batch in enumerate(loop):
        now[0] += (60_000_000 if number < 400 else 84_000_000) + 300_000 * (number % 7)  # before the forward: "other"
        loss = model(batch).sum() * 0 + (3.0 if number < 600 else 4.0) + 0.01 * (number % 5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loop.close()
    written = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    alarms = [row["alarm"] for row in written if "alarm" in row]
    assert [event["phase"] for event in alarms if event["phase"] != "memory"] == ["other", "loss"]
    assert abs(next(event["step"] for event in alarms if event["phase"] == "loss") - 5_600) <= 16
    assert abs(next(event["step"] for event in alarms if event["phase"] == "other") - 5_400) <= 16
    assert [event.to_row() for event in loop.alarms] == alarms, "they are there after close(), too"
    assert any("what lies between the phases takes" in row.get("note", "") for row in written)
    assert "since step" in capsys.readouterr().err


def test_what_an_alarm_holds_back_is_told_when_the_loop_ends_and_the_summary_at_exit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plain script that ends right after its loop, without a run directory."""
    monkeypatch.delenv("WORKBENCH_RUN_DIR", raising=False)
    monkeypatch.setattr(rank_log, "_LOGS", {})
    now = [0]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.01)
    loop = Watch([torch.zeros(2, 4)] * 800, optimizer=optimizer, alarm=True, recorder=partial(HostRecorder, lambda: now[0]))
    alarm = None
    for number, _ in enumerate(loop):
        if alarm is None:
            alarm = loop._recording._alarm
            assert alarm is not None
            alarm._wait = 1e3  # its thread sleeps
        now[0] += (60_000_000 if number < 700 else 84_000_000) + 300_000 * (number % 7)
        optimizer.step()
        alarm._looked = -1e3
    assert [event.phase for event in loop.alarms if event.phase != "memory"] == ["other"]
    first = capsys.readouterr().err
    assert "since step" in first
    assert "change" not in first
    rank_log._at_exit()
    assert "workbench: alarms: 1 change" in capsys.readouterr().err
    rank_log._at_exit()
    assert capsys.readouterr().err == ""
    for _ in loop:  # a later pass has an alarm of its own
        optimizer.step()
    assert [event.phase for event in loop.alarms if event.phase != "memory"] == ["other"]
    loop.close()


def ends(work: Callable[[], object]) -> bool:
    """Does it end within 10 s? In a thread of its own, since what waits for a lock for ever cannot be stopped."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_an_interrupt_while_the_end_of_a_loop_is_looked_at_leaves_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.timeline.alarm.INTERVAL", 1e3)
    interrupts = [KeyboardInterrupt]

    def take() -> list[Row]:
        if interrupts:
            raise interrupts.pop()
        return []

    alarm = Alarm(take, print)
    alarm._looked = -1e6
    with pytest.raises(KeyboardInterrupt):
        alarm.pause()
    assert ends(alarm.close)


@pytest.mark.parametrize("holder", ["recording", "log"])
def test_a_loop_that_is_collected_while_its_thread_holds_a_lock_is_looked_at_later(
    holder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.timeline.alarm.INTERVAL", 1e3)  # its thread sleeps
    monkeypatch.setattr(rank_log, "_LOGS", {})
    monkeypatch.delenv("WORKBENCH_RUN_DIR", raising=False)
    if holder == "log":
        monkeypatch.setenv("WORKBENCH_RUN_DIR", str(tmp_path))
    now = [0]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.01)
    loop = Watch([torch.zeros(2, 4)] * 801, optimizer=optimizer, alarm=True, recorder=partial(HostRecorder, lambda: now[0]))
    recording = loop._recording

    def leave() -> None:
        batches = iter(loop)
        for number in range(800):
            next(batches)
            now[0] += (60_000_000 if number < 700 else 84_000_000) + 300_000 * (number % 7)
            optimizer.step()
        recording.settle()
        assert recording._alarm
        recording._alarm._looked = -1e6
        with recording._log._lock if recording._log else recording._lock:
            batches.close()  # type: ignore[attr-defined]  # a generator, as the garbage collection closes it

    assert ends(leave)
    assert loop.alarms == ()
    assert recording._alarm
    recording._alarm.look()
    assert [event.phase for event in loop.alarms if event.phase != "memory"] == ["other"]
    loop.close()


def test_a_loss_that_is_not_finite_in_the_last_step_of_a_pass_waits_for_the_next_and_is_told_at_the_end() -> None:
    read = iter([[2.0] * 40 + [math.inf], []])
    followed = StepAlarm(losses=lambda *_: next(read))
    assert followed.see(rows(41, np.random.default_rng(4)), pause=True) == []
    assert [event.phase for event in followed.see([], last=True)] == [NOT_FINITE]


def test_only_what_became_slower_is_traced_and_only_files_that_exist_are_named() -> None:
    asked: list[int] = []

    class Traces:
        def ask(self, step: int) -> str:
            asked.append(step)
            return f"alarms/step{step}"

        def written(self, name: str) -> bool:
            return name == f"alarms/step{asked[0]}"

    chance = np.random.default_rng(6)
    waiting = [rows(1200, chance), rows(500, chance, forward=1.5), rows(900, chance), rows(500, chance, forward=1.5), rows(900, chance)]
    events: list[tuple[AlarmEvent, str]] = []
    follower = Alarm(lambda: waiting.pop(0) if waiting else [], lambda *given: events.append(given), traces=Traces())
    for _ in range(5):
        follower.look()
    assert [bool(alarm.trace) for alarm, _ in events] == [alarm.slower for alarm, _ in events]
    assert asked == [alarm.step for alarm, _ in events if alarm.slower]
    assert len(asked) == 2
    assert all(f"traced: {alarm.trace}" in words for alarm, words in events if alarm.slower)
    assert all("traced" not in words for alarm, words in events if not alarm.slower)
    assert follower.close().endswith(f"traced: alarms/step{asked[0]}")


def test_a_watched_loop_traces_a_few_steps_at_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real steps under the real profiler, with two batches each; the clock is the loop's own, and the alarm looks when it is told to."""
    monkeypatch.setenv("WORKBENCH_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("workbench.timeline.alarm.INTERVAL", 1e3)
    now = [0]
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorder = partial(HostRecorder, lambda: now[0])
    loop = Watch([torch.zeros(2, 4)] * 1400, model=model, optimizer=optimizer, alarm="trace", recorder=recorder)
    for number, batch in enumerate(loop):
        now[0] += (1_000_000 if number < 800 else 1_600_000) + 5_000 * (number % 7)
        model(batch).sum().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        if number == 1200:
            loop._recording.settle()
            assert loop._recording._alarm is not None
            loop._recording._alarm.look()
    loop.close()
    slower = [alarm for alarm in loop.alarms if alarm.phase != "memory"]
    assert [alarm.slower for alarm in slower] == [True]
    (path,) = (tmp_path / "alarms").glob("*.pt.trace.json.gz")
    assert slower[0].trace == f"alarms/{path.name}"
    assert path.name.startswith(f"rank0_step{slower[0].step}_")
    trace = Trace.load(path)
    assert len(trace.steps) == 3
    assert trace.per_step()["aten::addmm"][1] == 2  # two batches a step
    assert path.stat().st_size < 2**20
    left_out = loop.timeline.profiled
    assert left_out == tuple(range(left_out[0], left_out[0] + 6))
    assert left_out[0] == pytest.approx(604, abs=2)
    assert any(f"traced: {slower[0].trace}" in note for note in loop.timeline.notes)


def test_traces_at_alarms_are_few_and_need_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = AlarmTraces(tmp_path / "alarms", lambda: 0, lambda first, last: None)
    names = []
    for step in range(6):
        names.append(traces.ask(step))
        assert traces.ask(step) == "", "one is under way"
        traces.close()
    assert [bool(name) for name in names] == [True] * MOST_ALARMS + [False] * (6 - MOST_ALARMS)
    assert not (tmp_path / "alarms").exists()
    assert not traces.written(names[0])
    monkeypatch.delenv("WORKBENCH_RUN_DIR", raising=False)
    loop = Watch([torch.zeros(2, 4)] * 2, alarm="trace")
    list(loop)
    assert any("without a run directory nothing is traced" in note for note in loop.timeline.notes)
    loop.close()


def test_alarms_are_asked_for_by_argument_or_by_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [allowed(True), allowed(False), allowed("experiments"), allowed("trace")] == ["always", "", "experiments", "trace"]
    monkeypatch.setenv(ENV_ALARM, "experiments")
    assert allowed(False) == "experiments"
    monkeypatch.setenv(ENV_ALARM, "anything")
    assert allowed(False) == ""
    with pytest.raises(ValueError, match="alarm='loud'"):
        allowed("loud")


SLOWER = """
import time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.zeros(1400, 4), batch_size=2)
for number, batch in enumerate(loader):
    loss = model(batch).sum()
    time.sleep(0.005 if number < 500 else 0.06)  # far more than a busy machine makes
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_launched_script_reports_what_changed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOWER)
    run = wb.launch(tmp_path / "train.py", watch="experiments", runs_dir=tmp_path / "runs").wait(check=True)
    # a busy machine makes changes of its own, before the planted one or near it, and may blur which part is slower: all are searched
    written = [json.loads(line) for line in (run.path / "rank0.jsonl").read_text().splitlines()]
    events = [row["alarm"] for row in written if "alarm" in row]
    planted = [
        one for one in events if abs(one["step"] - 500) <= 64 and one["phase"] in ("forward", "step") and one["after"] > one["before"]
    ]
    assert planted, events
    assert any("a small computation" in text or "of a core" in text for one in planted for text in one["circumstances"])
    faults = [fault.message for fault in wb.health(run).faults if fault.kind == "change"]  # those of a part in one
    sentences = [rf"\b{one['step']:,}\b.* (the forward|a step) takes [\d.]+(×| %)" for one in planted]
    assert any(re.search(rf"\b{one['step']:,}\b", message) for one in planted for message in faults), faults
    assert any(re.search(sentence, note) for sentence in sentences for note in run.notes)


ONE_RANK_SLOWER = """
import time, torch, torch.distributed as dist
import workbench as wb
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def batches():
    for number in range(900):
        time.sleep(0.05 if number >= 400 and dist.get_rank() == 1 else 0.005)  # far more than a busy machine makes
        yield torch.zeros(2, 4)
for batch in wb.watch(batches(), model=model, optimizer=optimizer):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_where_one_rank_becomes_slower_the_other_does_not_say_that_it_did(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ONE_RANK_SLOWER)
    run = wb.launch(tmp_path / "train.py", nproc_per_node=2, watch="always", runs_dir=tmp_path / "runs").wait(check=True)
    near = [fault for fault in wb.health(run).faults if fault.kind == "change" and abs(fault.step - 400) <= 24]
    assert [(fault.rank, "the wait for data takes" in fault.message) for fault in near] == [(1, True)], near
    rows = [json.loads(line) for line in (run.path / "rank0.jsonl").read_text().splitlines()]
    events = [row["alarm"] for row in rows if "alarm" in row and abs(row["alarm"]["step"] - 400) <= 24]
    assert [(alarm["phase"] in ("backward", "reduction", "step"), alarm["waits_for"]) for alarm in events] == [(True, 1)]
