"""Compares LARS and LAMB with SGD and AdamW, all equally tuned: steps to a validation accuracy, at small and large batches.

    python benchmarks/large_batch.py [--seeds 2] [--ranks 1]

The task "fashion-mlp" (8,000 small pictures of clothes; a perceptron) until 83 % of the 2,000 validation pictures are put in the right
class. Each optimizer's learning rate is searched for at each batch, with the same effort; momentum, betas and decay stay as they are. Steps
are counted, nothing is timed.
"""

import argparse
import datetime
import platform
import tempfile

import torch

from workbench.batch.steps_to_target import steps_to_target
from workbench.runs.spec import RunSpec

OPTIMIZERS = (
    "sgd(lr=0.05, momentum=0.9, nesterov=True)",
    "adamw(lr=0.002)",
    "lars(lr=10.0)",
    "lars(lr=0.5, trust_coefficient=0.02)",
    "lamb(lr=0.01)",
)
BATCHES = (64, 512, 4096)
TARGET = 0.83


def main() -> None:
    """Print one table of steps, and one of the learning rates that were found."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--ranks", type=int, default=1)
    given = options.parse_args()
    spec = RunSpec(task="fashion-mlp", micro_batch=max(BATCHES), device="cpu", nproc_per_node=given.ranks)
    with tempfile.TemporaryDirectory() as folder:
        found = steps_to_target(
            spec,
            BATCHES,
            retune=True,
            optimizers=OPTIMIZERS,
            target={"accuracy": TARGET},
            base_batch=BATCHES[0],
            seeds=given.seeds,
            max_steps=1500,
            budget_s=None,
            runs_dir=folder,
            quiet=True,
        )
    print(f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__};")
    print(f"{len(found.trials)} trainings, {given.seeds} seeds each at the end; the best learning rate in brackets\n")
    print(f"| steps to {found.target} | " + " | ".join(f"batch {batch:,}" for batch in found.batches) + " |")
    print("|---" * (1 + len(found.batches)) + "|")
    for optimizer in found.optimizers:
        marks = {mark.batch: mark for mark in found.marks(optimizer)}
        cells = [f"{marks[batch].text} ({marks[batch].lr:.3g})" if batch in marks else "–" for batch in found.batches]
        print(f"| {optimizer} | " + " | ".join(cells) + " |")
    for note in found.notes:
        print(note)


if __name__ == "__main__":
    main()
