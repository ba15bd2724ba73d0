"""Tasks that the parts launch: activations that fill any GPU, dropout, and one that writes down by the wall clock when its steps begin."""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from workbench.runs.task import Task, resolve

STAMPS = "GPU_CHECK_STAMPS"
"""Environment variable: the file of `stamped`."""
LENGTH, WIDTH, LAYERS = 2048, 256, 8


class Few(Dataset[Tensor]):
    """Samples of a few numbers."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((16,), index / len(self))


class Hungry(nn.Module):
    """Makes a long sequence of each sample: some 50 MiB of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.layers = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(self.first(x)[:, None, :] + self.position)
        return out


def hungry() -> Task:
    """Takes much memory for each sample."""
    return Task(model=Hungry, dataset=Few, loss=lambda model, batch: model(batch).square().mean(), name="hungry")


def dropping() -> Task:
    """The sample task text-gpt with dropout before its last layers, which draws random numbers on the device."""
    task = resolve("text-gpt")

    def loss(model: Any, batch: Any) -> Any:
        return task.loss(lambda tokens: nn.functional.dropout(model(tokens), 0.1), batch)

    return dataclasses.replace(task, loss=loss, name="dropping")


def stamped() -> Task:
    """The sample task text-gpt, whose loss notes the time of each call."""
    task, times = resolve("text-gpt"), list[float]()
    path = Path(os.environ[STAMPS]) if STAMPS in os.environ else None

    def loss(model: Any, batch: Any) -> Any:
        times.append(time.perf_counter())
        if path and len(times) % 50 == 0:
            path.write_text("\n".join(map(str, times)))
        return task.loss(model, batch)

    return dataclasses.replace(task, loss=loss, name="stamped")
