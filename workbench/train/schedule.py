"""The learning rate over the steps: a linear warm-up, then constant or a cosine down to zero."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from workbench.runs.spec import RunSpec


def lr_factor(step: int, *, steps: int, warmup_steps: int, schedule: str) -> float:
    """Learning rate of a step as a fraction of its peak.

    The warm-up gives (step + 1) / warmup_steps, so that the first step moves. The cosine gives (1 + cos(pi * t)) / 2, where t goes from 0
    at the first step after the warm-up to 1 at `steps`: just behind the last step, which so is not wasted.

    Args:
        step: from 0.
        steps: of the whole run.
        warmup_steps: steps until the peak is reached.
        schedule: "constant" or "cosine", after the warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return (1 + math.cos(math.pi * min(1.0, done))) / 2


def build_scheduler(optimizer: Optimizer, spec: RunSpec) -> LambdaLR:
    """The scheduler of a run; call its `step()` after each optimizer step."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, steps=spec.steps, warmup_steps=spec.warmup_steps, schedule=spec.schedule))
