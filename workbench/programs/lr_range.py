"""`python -m workbench.programs.lr_range RUN_DIR`: looks for a learning rate of a spec; rank 0 leaves what it found in `lr_range.json`.

torchrun starts one per rank. What is wanted stands in run.json under "experiment". All sweeps and the race happen in this one launch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.batch.analysis.lr_found import LrFound
from workbench.batch.measure.lr_range import find
from workbench.core import run_directory
from workbench.programs.experiment import Assignment, carry_out
from workbench.runs.spec import AUTO, RunSpec
from workbench.runs.task import Task
from workbench.train.choose_micro_batch import choose
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer

INTERVAL = 0.3
"""Seconds between two lines of the report."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what run.json says."""
    carry_out(find_out, name="workbench.programs.lr_range", about=__doc__, arguments=arguments)


def find_out(mine: Assignment) -> dict[str, Any]:
    """The learning rate; all ranks find the same, rank 0 writes it."""
    found = search(mine.spec, mine.task, mine.ranks, mine.order, mine.run_dir)
    return {run_directory.LR_RANGE: found.to_json()} if mine.ranks.rank == 0 else {}


def search(spec: RunSpec, task: Task, ranks: Ranks, order: Mapping[str, Any], run_dir: Path) -> LrFound:
    """Sweeps and race with the very Trainer of a run.

    Args:
        spec: every knob; its learning rate, warm-up and schedule do not matter.
        task: what is trained.
        ranks: this process among the others.
        order: options of `find`.
        run_dir: for the report of how far it is.
    """
    if spec.micro_batch == AUTO:
        spec = spec.replace(micro_batch=choose(spec, ranks))
    trainer = Trainer(spec, task, ranks)

    def step(batches: Any) -> Any:
        return trainer.step(batches if spec.accumulation > 1 else (batches,))

    return find(
        step,
        trainer.loader,
        model=trainer.model,
        optimizer=trainer.optimizer,
        accumulation=spec.accumulation,
        progress=reporting(run_dir) if ranks.rank == 0 else None,
        **{name: order[name] for name in ("low", "high", "sweeps", "iterations", "race_steps")},
    )


def reporting(run_dir: Path, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int, float, float], None]:
    """Gives a function that writes a line of `metrics.jsonl` now and then.

    Args:
        run_dir: where.
        clock: seconds.
    """
    writer = run_directory.LineWriter(run_dir / run_directory.METRICS)
    began = written = clock()

    def report(taken: int, planned: int, lr: float, loss: float) -> None:
        nonlocal written
        if clock() - written >= INTERVAL:
            written = clock()
            writer.write([{"step": taken, "steps": planned, "lr": lr, "loss": loss, "seconds": written - began}])

    return report


if __name__ == "__main__":
    main()
