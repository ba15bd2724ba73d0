"""A user's own task in three sizes, one that dies, and one that does not build."""

from functools import partial

import torch

import workbench as wb


class Net(torch.nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))


def data() -> list[torch.Tensor]:
    return list(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch)[:, 0] - batch.sin().sum(1)).square().mean()


def fail(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("this one never trains")


def small() -> wb.Task:
    return wb.Task(model=partial(Net, 2), dataset=data, loss=loss, optimizer="adamw(lr=0.01)")


def medium() -> wb.Task:
    return wb.Task(model=partial(Net, 8), dataset=data, loss=loss, optimizer="adamw(lr=0.01)")


def large() -> wb.Task:
    return wb.Task(model=partial(Net, 32), dataset=data, loss=loss, optimizer="adamw(lr=0.01)")


def failing() -> wb.Task:
    return wb.Task(model=partial(Net, 64), dataset=data, loss=fail)


def broken() -> wb.Task:
    raise OSError("no such checkpoint")
