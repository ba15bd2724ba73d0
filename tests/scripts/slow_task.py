"""Tasks to diagnose: one that waits for its data, and ones that cannot be diagnosed."""

import time
from typing import Any

import torch
from torch import Tensor

import workbench as wb


class Slow(torch.utils.data.Dataset[Tensor]):
    """Each sample takes a while to come, as from a far storage."""

    def __init__(self, count: int = 256, seconds: float = 2e-3) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.full((64,), float(index))


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))


def mean(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def slow_loader(**changes: Any) -> wb.Task:
    """Waits for its data most of the time."""
    return wb.Task(**{"model": network, "dataset": Slow, "loss": mean, "optimizer": "sgd(lr=1e-9)", **changes})


def one_batch() -> wb.Task:
    """An epoch is one batch of four."""
    return slow_loader(dataset=lambda: Slow(4))


def empty() -> wb.Task:
    """There is nothing to train on."""
    return slow_loader(dataset=lambda: Slow(0))


def boom() -> wb.Task:
    """Fails in its third step."""
    calls = 0

    def loss(model: Any, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("boom")
        return mean(model, batch)

    return slow_loader(loss=loss)


def fails_to_build() -> wb.Task:
    """Is no task at all."""
    raise RuntimeError("no such data")
