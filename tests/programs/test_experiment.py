"""The program that experiments run in: its contestants take turns in one process, and leave it as they found it."""

import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import toy_tasks
from workbench.programs.experiment import IdleTraining, Training, enter_training
from workbench.runs.spec import RunSpec
from workbench.train.device_turns import DeviceTurns, storages_of
from workbench.train.ranks import Ranks


def spec_of(**knobs: Any) -> RunSpec:
    return RunSpec(**{"task": "toy", "device": "cpu", "micro_batch": 8, **knobs})


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """A process group of this process alone; what contestants set of the process is put back."""
    threads = torch.get_num_threads()
    yield Ranks.join(spec_of())
    dist.destroy_process_group()
    torch.set_num_threads(threads)
    gc.enable()


def test_each_turn_has_the_knobs_of_its_contestant(alone: Ranks) -> None:
    task = toy_tasks.numbers()
    with enter_training(spec_of(), task, alone, 0) as one, enter_training(spec_of(threads=2, gc=False), task, alone, 1) as other:
        for contestant, threads, collects in ((one, 1, True), (other, 2, False), (one, 1, True)):
            contestant.drain()
            contestant.step()
            assert (torch.get_num_threads(), gc.isenabled()) == (threads, collects)


def test_contestants_with_workers_and_accumulation(alone: Ranks) -> None:
    """Steps of both run, over the end of an epoch too, and no worker stays behind."""
    before = {child.pid for child in multiprocessing.active_children()}
    task = toy_tasks.numbers()
    with (
        enter_training(spec_of(num_workers=1), task, alone, 0) as one,
        enter_training(spec_of(accumulation=2, micro_batch=4), task, alone, 1) as other,
    ):
        assert isinstance(one, Training)
        assert isinstance(other, Training)
        for contestant in (one, other, one, other):
            contestant.drain()
            for _ in range(6):
                contestant.step()
        assert one.feed.passes > 1
        assert other.feed.batches == 2 * 12
    assert {child.pid for child in multiprocessing.active_children()} == before


class FakeMemory:
    """A device with so much memory, on which each turn takes 1,000 bytes at its peak."""

    def __init__(self, room: int) -> None:
        self._room, self.released = room, 0

    def peak(self) -> int:
        return 1000

    def reset(self) -> None: ...

    def room(self) -> int:
        return self._room

    def release(self) -> None:
        self.released += 1


def on_device(training: Any) -> int:
    """Bytes that a training has on the device."""
    return sum(storage.nbytes() for storage in storages_of(training.trainer, torch.device("cpu")))


@pytest.mark.parametrize(("room", "together"), [(1200, False), (10_000, True)])
@pytest.mark.parametrize("knobs", [{"optimizer": "adamw(lr=0.1)"}, {"parallel": "zero1"}])
def test_only_one_is_on_a_device_on_which_both_do_not_fit(alone: Ranks, room: int, together: bool, knobs: dict[str, Any]) -> None:
    task, specs = toy_tasks.numbers(), [spec_of(**knobs), spec_of(micro_batch=4, **knobs)]

    def weights_after(turns: DeviceTurns | None, most: list[int]) -> list[torch.Tensor]:
        with enter_training(specs[0], task, alone, 0, turns) as one, enter_training(specs[1], task, alone, 1, turns) as other:
            assert isinstance(one, Training)
            assert isinstance(other, Training)
            for training in (one, other, one, other):
                training.drain()
                most.append(min(on_device(one), on_device(other)))
                for _ in range(3):
                    training.step()
            for training in (one, other):
                training.drain()
            one.drain()
            values = [weight.detach().clone() for weight in one.trainer.module.parameters()]
            other.drain()
            return [*values, *(weight.detach().clone() for weight in other.trainer.module.parameters())]

    memory, alternately, at_once = FakeMemory(room), list[int](), list[int]()
    turns = DeviceTurns(torch.device("cpu"), memory)
    found, expected = weights_after(turns, alternately), weights_after(None, at_once)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert min(at_once) > 0
    assert alternately[:2] == [0, 0]  # each begins with all of the memory, however much there is
    assert (min(alternately[2:]) > 0) == together
    assert (turns.note is None) == together
    if not together:
        assert alternately == [0, 0, 0, 0]
        assert turns.note is not None
        assert "do not fit on the device together" in turns.note
        assert "of 1.17 KiB" in turns.note
    assert memory.released >= 2


def test_on_the_cpu_nobody_moves(alone: Ranks) -> None:
    turns = DeviceTurns(torch.device("cpu"))
    with enter_training(spec_of(), toy_tasks.numbers(), alone, 0, turns) as one:
        assert on_device(one) > 0
        one.drain()
        one.step()
    assert turns.note is None


def test_a_rank_that_is_not_wanted_rests(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "rank", 1)
    with enter_training(spec_of(), toy_tasks.numbers(), alone, 0) as contestant:
        assert isinstance(contestant, IdleTraining)
        contestant.drain()
        contestant.step()
