"""A task whose step is mostly communication: it sleeps shortly to compute and long to talk, if there is anybody to talk to; and which kills
its ranks where the micro-batch is large.
"""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import workbench as wb

COMPUTING, TALKING = 0.01, 0.06
"""Seconds."""
DEADLY = 16
"""Samples at once."""


def talk() -> None:
    """A reduction of the task's own, over a slow network."""
    if dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1))


def build() -> wb.Task:
    """The task; the network becomes slow when it is built."""
    really = dist.all_reduce

    def slowly(*tensors: Any, **options: Any) -> Any:
        time.sleep(TALKING)
        return really(*tensors, **options)

    dist.all_reduce = slowly

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(COMPUTING)
        talk()
        return model(batch).mean()

    return wb.Task(model=lambda: torch.nn.Linear(4, 1), dataset=lambda: [torch.ones(4)] * 64, loss=loss, optimizer="sgd(lr=0.1)")
