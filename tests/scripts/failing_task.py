"""A task whose loss fails on rank 1 in the way that FAIL_HOW says."""

import os
from typing import Any

import torch
from failing import fail

import workbench as wb


def build() -> wb.Task:
    seen = 0

    def loss(model: Any, batch: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 4 and os.environ["RANK"] == "1":
            fail(os.environ["FAIL_HOW"])
        return model(batch).mean()

    return wb.Task(
        model=lambda: torch.nn.Linear(4, 1),
        dataset=lambda: [torch.ones(4)] * 64,
        loss=loss,
        optimizer="sgd(lr=0.1)",
    )
