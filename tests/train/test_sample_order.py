"""An order of samples that begins within an epoch gives what the whole one gives from there on, augmentation of workers included."""

import itertools
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore
from torch.utils.data import DataLoader, Dataset, IterableDataset

from workbench.data.resumable_sampler import SampleIndex
from workbench.harness.loaders import misses_epochs, shut_down
from workbench.train import loader as train_loader
from workbench.train.loader import ANEW, micro_batches
from workbench.train.ranks import Ranks
from workbench.train.sample_order import SampleOrder, SeededBatches, StepSamples, go_on, position_of


class Augmented(Dataset[torch.Tensor]):
    """Samples with noise from two generators."""

    name = "augmented"

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        assert type(index) is int
        return index + torch.rand(2) + float(np.random.rand())


class AtOnce(Augmented):
    """The same, a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


@settings(deadline=None)
@given(samples=st.integers(1, 60), ranks=st.integers(1, 4), epoch=st.integers(0, 3), start=st.integers(0, 60), seed=st.integers(0, 5))
def test_an_order_that_begins_later_gives_the_rest(samples: int, ranks: int, epoch: int, start: int, seed: int) -> None:
    for rank in range(ranks):
        order = SampleOrder(samples, rank=rank, world_size=ranks, seed=seed)
        order.set_epoch(epoch)
        whole = list(order)
        assert len(whole) == len(order) == samples // ranks
        order.consumed = min(start * ranks, samples)
        assert list(order) == whole[start:]
        order.set_epoch(epoch + 1)
        order.set_epoch(epoch)
        assert list(order) == whole  # only one epoch begins later


@given(samples=st.integers(1, 500), layouts=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=4))
def test_a_place_is_found_after_any_steps_on_any_ranks(samples: int, layouts: list[tuple[int, int]]) -> None:
    """Step by step, an epoch ends where no whole step is left; `after` computes the same at once."""
    order, step, epoch, consumed = SampleOrder(samples), 0, 0, 0
    for per_step, steps in layouts:
        if per_step > samples:
            continue
        order.origin = step, epoch, consumed
        for _ in range(steps):
            if samples - consumed < per_step:
                epoch, consumed = epoch + 1, 0
            consumed += per_step
            step += 1
        if samples - consumed < per_step:
            epoch, consumed = epoch + 1, 0
        assert order.after(step, per_step) == (epoch, consumed)


def trained_on(layouts: list[tuple[int, int, int]], samples: int) -> list[int]:
    """The samples of steps on changing layouts: (ranks, micro-batch, steps), each from the state of the one before."""
    state: dict[str, Any] = {}
    done, seen = 0, list[int]()
    for ranks, size, steps in layouts:
        streams, loaders = [], []
        for rank in range(ranks):
            order = SampleOrder(samples, rank=rank, world_size=ranks, seed=3)
            loader: DataLoader[Any] = DataLoader(range(samples), size, sampler=order, drop_last=True)  # type: ignore[arg-type]
            go_on(loader, state)
            loaders.append(loader)
            streams.append(
                micro_batches(loader, 2, Ranks(rank=rank, world_size=ranks, device=torch.device("cpu"), store=HashStore()), done)
            )
        known = StepSamples(loaders[0], 2)
        for step in range(done + 1, done + steps + 1):
            of_step = [[int(index) for _ in range(2) for index in next(stream)] for stream in streams]
            assert known.of(step) == of_step[0]
            seen += [index for of_rank in of_step for index in of_rank]
        done += steps
        state = {"step": done, "position": position_of(loaders[0], done, ranks * size * 2)}
    return seen


def test_a_training_goes_on_with_the_rest_of_the_epoch_on_other_ranks_and_batches() -> None:
    seen = trained_on([(4, 2, 3), (2, 3, 2), (3, 1, 4), (1, 1, 2)], samples=101)
    assert len(seen) == 48 + 24 + 24 + 4 == len(set(seen))
    assert set(trained_on([(4, 2, 3), (2, 3, 2), (1, 1, 14)], samples=101)[:100]) == set(seen)  # the same first 100 of the epoch
    more = trained_on([(4, 2, 6), (2, 3, 2)], samples=101)  # 96 of the epoch, then the next: 5 are not enough for a step of 12
    assert len(set(more[:96])) == 96
    assert len(set(more[96:])) == 24


class Turns(IterableDataset[int]):
    """A stream whose samples the ranks take in turns."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 400, self.ranks))


def test_a_stream_goes_on_after_as_many_samples_on_other_ranks_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_loader, "_check_parts_differ", lambda batch, ranks: None)  # which waits for other processes
    state: dict[str, Any] = {}
    done, seen = 0, list[int]()
    for ranks, size, steps in ((2, 8, 5), (1, 8, 3), (1, 4, 2), (4, 2, 1), (3, 8, 1)):
        for rank in range(ranks):
            loader: DataLoader[Any] = DataLoader(Turns(rank, ranks), size, drop_last=True)
            go_on(loader, state)
            here = Ranks(rank=rank, world_size=ranks, device=torch.device("cpu"), store=HashStore())
            given = itertools.islice(micro_batches(loader, 2, here, done), 2 * steps)
            seen += [int(index) for batch in given for index in batch]
        done += steps
        state = {"step": done, "position": position_of(loader, done, ranks * size * 2)}
    whole = 160 + 48 + 16 + 16
    assert sorted(seen[:whole]) == list(range(whole))
    assert sorted(seen[whole:]) == list(range(whole, whole + 48))


def batches(dataset: Dataset[Any], start: int, workers: int, persistent: bool = False) -> list[torch.Tensor]:
    order = SampleOrder(len(dataset), rank=1, world_size=2, seed=3)  # type: ignore[arg-type]
    order.batch, order.consumed = 4, start * 8
    loader = DataLoader(
        SeededBatches(dataset), 4, sampler=order, num_workers=workers, drop_last=True, persistent_workers=persistent,
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    given = list(loader)
    order.set_epoch(1)
    return [*given, *loader]


@pytest.mark.parametrize("dataset", [Augmented(), AtOnce()], ids=["a sample at a time", "a batch at once"])
def test_batches_of_workers_are_the_same_wherever_an_epoch_begins(dataset: Dataset[Any]) -> None:
    whole = batches(dataset, 0, workers=1)
    assert len(whole) == 12
    rest = batches(dataset, 4, workers=2, persistent=True)  # another number of workers does not matter, either
    assert len(rest) == 8
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], rest, strict=True))
    assert len({float(batch[0, 0]) % 1 for batch in whole}) == 12  # each batch has noise of its own


class ByEpoch(Dataset[tuple[int, int]]):
    """Samples that say which epoch their worker knows of, and which process it is."""

    def __init__(self, epoch: Any = 0) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.epoch, int):
            self.epoch = epoch
        elif isinstance(self.epoch, torch.Tensor):
            self.epoch.fill_(epoch)
        else:
            self.epoch.value = epoch

    def __getitem__(self, index: int) -> tuple[int, int]:
        return int(getattr(self.epoch, "value", self.epoch)), os.getpid()


class StreamByEpoch(ByEpoch, IterableDataset[tuple[int, int]]):
    def __iter__(self) -> Iterator[tuple[int, int]]:
        return map(self.__getitem__, range(8))


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(
    ("dataset", "workers", "anew"),
    [
        (ByEpoch(), 1, True),
        (StreamByEpoch(), 1, True),
        (ByEpoch(torch.zeros(1).share_memory_()), 1, False),
        (ByEpoch(multiprocessing.Value("i", 0)), 1, False),
        (ByEpoch(), 0, False),
    ],
    ids=["an attribute", "a stream", "a shared tensor", "a shared value", "no workers"],
)
def test_persistent_workers_see_set_epoch(alone: Ranks, dataset: Any, workers: int, anew: bool, seeded: bool) -> None:
    """Torch's persistent workers keep the dataset of the first epoch, so a curriculum by epoch did not happen."""
    loader: DataLoader[Any] = DataLoader(
        SeededBatches(dataset) if seeded and not isinstance(dataset, IterableDataset) else dataset,
        4,
        num_workers=workers,
        persistent_workers=bool(workers),
        multiprocessing_context="fork" if workers else None,
    )
    assert misses_epochs(loader) == isinstance(dataset.epoch, int)
    said: list[str] = []
    batches = micro_batches(loader, 1, alone, warn=said.append)
    given = [next(batches) for _ in range(6)]  # three epochs of two batches
    assert [int(epochs[0]) for epochs, _ in given] == [0, 0, 1, 1, 2, 2]
    processes = [int(worker[0]) for _, worker in given]
    assert len(set(processes)) == (3 if anew else 1)
    assert [note for note in said if "set_epoch" in note] == ([ANEW] if anew else [])
    batches.close()
    if workers:
        shut_down(loader._iterator)


def test_the_generators_of_the_training_process_are_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2) + 5
    torch.manual_seed(0)
    np.random.seed(0)
    noise = float(np.random.rand())
    np.random.seed(0)
    assert torch.allclose(SeededBatches(Augmented())[SampleIndex.of(5, 99)], expected + noise)


def test_the_dataset_inside_is_reached_and_travels() -> None:
    dataset = pickle.loads(pickle.dumps(SeededBatches(Augmented())))
    assert dataset.name == "augmented"
    assert len(dataset) == 50
    assert not hasattr(dataset, "__getitems__")
    assert hasattr(SeededBatches(AtOnce()), "__getitems__")
    index = pickle.loads(pickle.dumps(SampleIndex.of(7, 12)))
    assert (index, index.seed) == (7, 12)


def test_what_was_given_is_kept() -> None:
    order = SampleOrder(8, rank=0, world_size=2, shuffle=False)
    order.given = {}
    order.consumed = 2
    assert list(order) == [2, 4, 6]
    assert order.given == {(0, 1): 2, (0, 2): 4, (0, 3): 6}
