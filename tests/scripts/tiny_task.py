"""The smallest tasks: one that trains in no time, and one that kills its rank where the micro-batch is large."""

import os
import signal
from typing import Any

import torch

import workbench as wb


def build() -> wb.Task:
    return wb.Task(
        model=lambda: torch.nn.Linear(4, 1),
        dataset=lambda: [torch.ones(4)] * 64,
        loss=lambda model, batch: model(batch).mean(),
        optimizer="sgd(lr=0.1)",
    )


def deadly() -> wb.Task:
    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 16:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch).mean()

    return wb.Task(model=lambda: torch.nn.Linear(4, 1), dataset=lambda: [torch.ones(4)] * 64, loss=loss, optimizer="sgd(lr=0.1)")
