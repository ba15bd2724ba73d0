"""A task with many weights and few samples: what it holds at most is held in the optimizer step."""

import torch
from torch import nn

import workbench as wb


def build() -> wb.Task:
    return wb.Task(
        model=lambda: nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)),
        dataset=lambda: [torch.ones(256)] * 64,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer="adamw",
    )
