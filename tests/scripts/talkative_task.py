"""A task whose step is half communication: it sleeps for as long to compute as it sleeps to talk, if there is anybody to talk to."""

import time
from typing import Any

import torch
import torch.distributed as dist

import workbench as wb

SECONDS = 0.03


def talk() -> None:
    """A reduction of the task's own, over a slow network."""
    if dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1))


def build() -> wb.Task:
    """The task; the network becomes slow when it is built."""
    really = dist.all_reduce

    def slowly(*tensors: Any, **options: Any) -> Any:
        time.sleep(SECONDS)
        return really(*tensors, **options)

    dist.all_reduce = slowly

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        talk()
        return model(batch).mean()

    return wb.Task(model=lambda: torch.nn.Linear(4, 1), dataset=lambda: [torch.ones(4)] * 64, loss=loss, optimizer="sgd(lr=0.1)")
