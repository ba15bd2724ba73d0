"""Trainings of notebook 17: one that can be killed at any time, one whose noise no checkpoint has, one with a broken sample."""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import workbench as wb

SAMPLES, VALIDATED, BROKEN = 512, 45, 77
"""Samples of the training and of the validation, and the one that is broken."""


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points on both sides of a plane."""

    def __init__(self, count: int = SAMPLES, noise: Callable[[], np.ndarray] | None = None, broken: int | None = None) -> None:
        self.points = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
        self.labels = (self.points.sum(1) > 0).long()
        self.noise, self.broken = noise, broken

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = self.points[index]
        if self.noise:
            point = point + torch.from_numpy(self.noise()).float()
        return (point * float("inf") if index == self.broken else point), self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def task(dataset: Callable[[], Points]) -> wb.Task:
    return wb.Task(
        model=network,
        dataset=dataset,
        loss=loss,
        optimizer="adam(lr=0.01)",
        validation=lambda: Points(VALIDATED),
        evaluate=lambda model, batch: {"logits": model(batch[0]), "targets": batch[1]},
    )


def sound() -> wb.Task:
    """Noise from torch's own generator, which a checkpoint has."""
    return task(lambda: Points(noise=lambda: 0.1 * torch.randn(8).numpy()))


def forgetful() -> wb.Task:
    """Noise from a generator of its own, which begins anew in each process."""

    def dataset() -> Points:
        random = np.random.default_rng(0)
        return Points(noise=lambda: 0.1 * random.standard_normal(8))

    return task(dataset)


def poisoned() -> wb.Task:
    """One sample is infinite."""
    return task(lambda: Points(broken=BROKEN))


def slow() -> wb.Task:
    """The sound one, whose steps take 20 ms: it is there long enough to be stopped."""

    def slowly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.02)
        return loss(model, batch)

    made = sound()
    return wb.Task(model=made.model, dataset=made.dataset, loss=slowly, optimizer=made.optimizer)


def when(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: it did not in time.
    """
    limit = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > limit:
            raise TimeoutError(f"it did not happen within {seconds:g} s")
        time.sleep(0.1)
