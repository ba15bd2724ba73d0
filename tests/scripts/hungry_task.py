"""Tasks whose ranks run out of memory: one asks for more than there is, in the forward of a layer; one is killed."""

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn

import workbench as wb


class Greedy(nn.Module):
    """Asks for too much in its third call, on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(64, 64), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            torch.empty(2**50)
        out: Tensor = self.inner(x).relu()
        return out


def task(**changes: Any) -> wb.Task:
    """Learns nothing."""
    known: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)),
        "dataset": lambda: [torch.ones(64)] * 64,
        "loss": lambda model, batch: model(batch).mean(),
        "optimizer": "adamw",
    }
    return wb.Task(**known | changes)


def modest() -> wb.Task:
    return task()


def huge() -> wb.Task:
    return task(model=lambda: nn.Sequential(nn.Linear(64, 64), Greedy(), nn.Linear(64, 1)))


def killed() -> wb.Task:
    def loss(model: Any, batch: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return batch.mean()

    return task(loss=loss)
