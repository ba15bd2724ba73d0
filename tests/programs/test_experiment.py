"""The program that experiments run in: its contestants take turns in one process, and leave it as they found it."""

import gc
import multiprocessing
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import toy_tasks
from tests.forked import Forks
from workbench.programs import experiment
from workbench.programs.experiment import Assignment, IdleTraining, Training, enter_training, prove
from workbench.runs.spec import RunSpec
from workbench.train.device_turns import DeviceTurns, GpuMemory, storages_of
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


class FakeMemory(GpuMemory):
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


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows all memory that is made inside until nothing has it any longer: by operators of this thread, also those that DDP
    calls in C++, and what Python has of other threads' (PowerSGD's errors are made where its reduction ends: in gloo's thread, or here).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[StorageWeakRef] = []
        self._before = [weakref.ref(tensor) for tensor in tensors_of_python()]

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._made += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]
        return result

    def bytes_without(self, tensors: list[torch.Tensor]) -> int:
        """What lives, but for these tensors."""
        storages: list[Any] = [torch.UntypedStorage._new_with_weak_ptr(made.cdata) for made in self._made]
        before = {id(tensor()) for tensor in self._before}
        storages += [tensor.untyped_storage() for tensor in tensors_of_python() if id(tensor) not in before]
        living: dict[int, int] = {storage._cdata: storage.nbytes() for storage in storages if storage is not None}
        return sum(living.values()) - sum(living.get(tensor.untyped_storage()._cdata, 0) for tensor in tensors)


def tensors_of_python() -> list[torch.Tensor]:
    """All tensors with memory that Python has."""
    return [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 2))


@pytest.mark.parametrize(
    ("knobs", "stays"),
    [
        ({"optimizer": "adamw(lr=0.1)"}, 0),
        ({"optimizer": "adamw(lr=0.1)", "gradient_as_bucket_view": True, "ema": 0.9}, 0),
        ({"parallel": "zero1", "accumulation": 2, "micro_batch": 4}, 0),
        ({"find_unused_parameters": True, "gradient_compression": "fp16"}, 0),
        ({"static_graph": True}, 1),  # the buckets
        ({"gradient_compression": "powersgd(rank=1, start=2)"}, 2),  # the buckets, and what was not sent so far
        ({"local_sgd": "periodic(start=2, period=2)"}, 1),
    ],
)
def test_what_a_resting_training_leaves_on_the_device(alone: Ranks, knobs: dict[str, Any], stays: int) -> None:
    """In sizes of the weights, of all memory there is: before the first turn no more than afterwards."""
    weights = sum(weight.nbytes for weight in wide().parameters())
    turns, task = DeviceTurns(torch.device("cpu"), FakeMemory(0)), toy_tasks.numbers(model=wide)
    with (
        Made() as made,
        enter_training(spec_of(**knobs), task, alone, 0, turns) as one,
        enter_training(spec_of(**knobs), task, alone, 1, turns) as other,
    ):
        assert isinstance(one, Training)
        assert isinstance(other, Training)

        def left() -> float:
            return float(made.bytes_without([*turns._copies.values()]) / weights)

        def settles_at(most: float) -> bool:
            end = time.monotonic() + 20
            while left() > most and time.monotonic() < end:  # a thread of gloo may hold a tensor a little longer
                time.sleep(0.01)
            return left() <= most

        assert settles_at(2 * min(stays, 1) + 0.1)
        for training in (one, other, one, other):
            training.drain()
            for _ in range(3):
                training.step()
        turns.enter(None)
        assert settles_at(2 * stays + 0.1)
        assert left() >= 2 * stays
        one.drain()
        assert isinstance(one.trainer.model, DistributedDataParallel)
        assert left() > 1.9  # the test sees what it is about


RANKS_TAKE_TURNS = """
import torch
from tests import toy_tasks
from tests.programs.test_experiment import FakeMemory, spec_of
from workbench.harness.peers import Peers
from workbench.programs.experiment import IdleTraining, enter_training
from workbench.train.device_turns import DeviceTurns
from workbench.train.ranks import Ranks

torch.set_num_threads(1)
ranks = Ranks.join(spec_of(nproc_per_node=2))
specs, weights = [spec_of(nproc_per_node=2), spec_of(micro_batch=16)], []
for room in (0, 10**9 * ranks.rank, 10**9, None):  # in the second case rank 1 alone has room for both
    with Peers.join() as peers:
        memory = FakeMemory(room) if room is not None else None
        turns = DeviceTurns(torch.device("cpu"), memory, all_agree=lambda yes: peers.agree(yes, all))
        with enter_training(specs[0], toy_tasks.numbers(), ranks, 0, turns) as one:
            with enter_training(specs[1], toy_tasks.numbers(), ranks, 1, turns) as other:
                assert isinstance(other, IdleTraining) == (ranks.rank == 1)
                for training in (one, other, other, one, one, other, one):
                    training.drain()
                    for _ in range(3):
                        training.step()
                assert one.trainer.layout.data is None  # no process group of its own
                weights.append(torch.cat([weight.detach().flatten() for weight in one.trainer.module.parameters()]))
        assert (turns.note is None) == (len(weights) > 2), turns.note
assert all(torch.equal(values, weights[0]) for values in weights)
Ranks.leave()
"""


def test_ranks_agree_whether_trainings_move(forks: Forks, tmp_path: Path) -> None:
    """One trains on both ranks, the other on one: the DistributedDataParallel is made anew on both at once."""
    done = forks.ranks(2, tmp_path, "-c", RANKS_TAKE_TURNS, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


def test_memory_that_runs_out_in_a_proof_is_told_with_its_training(alone: Ranks, tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: toy_tasks.Pair) -> torch.Tensor:
        if len(batch[0]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return toy_tasks.squared_error(model, batch)

    specs = {"baseline": spec_of(), "changed": spec_of(micro_batch=16)}
    for names, side in ((("baseline", "changed"), "with"), (("changed", "baseline"), "without")):
        order = {"budget_s": 1.0, **{name: specs[given].to_json() for name, given in zip(("baseline", "changed"), names, strict=True)}}
        info = {"experiment": order, "created": time.time()}
        task = toy_tasks.numbers(loss=loss)
        with pytest.raises(torch.OutOfMemoryError, match=rf"2.00 GiB. \(in the training {side} the change\)$"):
            prove(Assignment(run_dir=tmp_path, info=info, spec=spec_of(), task=task, ranks=alone))
    for built, side in ((0, "without"), (1, "with")):
        models = [toy_tasks.numbers().model] * built

        def build(models: list[Any] = models) -> Any:
            if models:
                return models.pop()()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        assignment = Assignment(run_dir=tmp_path, info=info, spec=spec_of(), task=toy_tasks.numbers(model=build), ranks=alone)
        with pytest.raises(torch.OutOfMemoryError, match=rf"2.00 GiB. \(in the training {side} the change\)$"):
            prove(assignment)


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


@pytest.mark.parametrize(
    ("budget", "started", "left", "said"),
    [
        (60.0, 20.0, 40.0, ""),
        (60.0, 54.0, 15.0, "the start took 54.0 s of the budget of 1 min 00 s, and measuring had 15.0 s all the same"),
        (10.0, 3.0, 7.0, ""),
        (10.0, 12.0, 5.0, "the start took 12.0 s of the budget of 10.0 s, and measuring had 5.00 s all the same"),
    ],
)
def test_a_slow_start_leaves_15_seconds_or_half_of_a_small_budget_to_measure(
    budget: float, started: float, left: float, said: str, alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the budget was left, so a call with a budget of 60 s whose start took 54 s lasted 84 s, and nothing said why."""
    monkeypatch.setattr(time, "time", lambda: 1000.0 + started)
    info = {"created": 1000.0, "experiment": {"budget_s": budget}}
    given = Assignment(run_dir=tmp_path, info=info, spec=spec_of(), task=toy_tasks.numbers(), ranks=alone)
    seconds, notes = experiment._budget(given)
    assert seconds == pytest.approx(left)
    assert notes == ((said,) if said else ())
