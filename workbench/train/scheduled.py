"""The learning rate over the steps of a RunSpec, from the very scheduler that its runs have."""

import torch
from torch import nn

from workbench.batch.schedule import Schedule
from workbench.measure.scheduled import scheduled
from workbench.spec import RunSpec
from workbench.task import label
from workbench.train.schedule import build_scheduler


def schedule_of(spec: RunSpec, *, lr: float | None = None, name: str | None = None) -> Schedule:
    """The learning rate of each step of a run.

    Args:
        spec: whose `steps`, `warmup_steps` and `schedule` count.
        lr: its peak, where the spec leaves it to the task's optimizer; None = as the spec has it, else 1: the part of the peak.
        name: what it is called; None = the task's name.
    """
    peak = lr if lr is not None else spec.lr if spec.lr is not None else 1.0
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    batch = spec.global_batch if isinstance(spec.micro_batch, int) else None
    return scheduled(build_scheduler(optimizer, spec), spec.steps, batch=batch, label=name or label(spec.task))
