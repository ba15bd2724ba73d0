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


def test_a_rank_that_is_not_wanted_rests(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "rank", 1)
    with enter_training(spec_of(), toy_tasks.numbers(), alone, 0) as contestant:
        assert isinstance(contestant, IdleTraining)
        contestant.drain()
        contestant.step()
