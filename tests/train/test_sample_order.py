"""An order of samples that begins within an epoch gives what the whole one gives from there on, augmentation of workers included."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from workbench.train.sample_order import SampleOrder, SeededBatches, SeededIndex


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
        order = SampleOrder(range(samples), ranks, rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        order.set_epoch(epoch)
        whole = list(order)
        order.start = start
        assert list(order) == whole[start:]
        assert list(order) == whole  # only one epoch begins later


def batches(dataset: Dataset[Any], start: int, workers: int, persistent: bool = False) -> list[torch.Tensor]:
    order = SampleOrder(dataset, 2, 1, seed=3, drop_last=True)
    order.batch, order.start = 4, start * 4
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


def test_the_generators_of_the_training_process_are_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2) + 5
    torch.manual_seed(0)
    np.random.seed(0)
    noise = float(np.random.rand())
    np.random.seed(0)
    assert torch.allclose(SeededBatches(Augmented())[SeededIndex.of(5, 99)], expected + noise)


def test_the_dataset_inside_is_reached_and_travels() -> None:
    dataset = pickle.loads(pickle.dumps(SeededBatches(Augmented())))
    assert dataset.name == "augmented"
    assert len(dataset) == 50
    assert not hasattr(dataset, "__getitems__")
    assert hasattr(SeededBatches(AtOnce()), "__getitems__")
    index = pickle.loads(pickle.dumps(SeededIndex.of(7, 12)))
    assert (index, index.seed) == (7, 12)


def test_what_was_given_is_kept() -> None:
    order = SampleOrder(range(8), 2, 0, shuffle=False)  # type: ignore[arg-type]
    order.given = {}
    order.start = 1
    assert list(order) == [2, 4, 6]
    assert order.given == {(0, 1): 2, (0, 2): 4, (0, 3): 6}
