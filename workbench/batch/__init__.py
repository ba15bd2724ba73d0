"""What a batch's size has to do with its learning rate: rules with their limits, in plain arithmetic; nothing here trains.

The nouns, and how one becomes the next:

* `Described` is an optimizer in plain values: its name, what it is akin to, and the options that the rules change.
* `scale_lr` takes a learning rate from one batch to another by a rule: a `ScaledLr`, with what became of betas, warm-up and weight decay,
  why this rule, and whether its assumptions hold there.
* A `BatchPlan` is micro_batch × accumulation × world_size with a learning rate, each number with its reason; `scaled_to` another batch or
  other ranks it is another one, and `changes()` are the knobs of a RunSpec.
"""

from workbench.batch.described import Described
from workbench.batch.plan import BatchPlan
from workbench.batch.rules import scale_lr
from workbench.batch.scaled import RULES, ScaledLr

__all__ = ["BatchPlan", "Described", "scale_lr", "RULES", "ScaledLr"]
