"""Searches the learning rate of a spec; rank 0 writes it to `lr_range.json`.

torchrun starts `python -m workbench.programs.lr_range RUN_DIR` once per rank. run.json has the options under "experiment". All sweeps and
the race happen in this one launch.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from workbench.batch.measure.lr_range import find
from workbench.core import run_directory
from workbench.programs.experiment import Assignment, run_program
from workbench.runs.entrypoints import LR_RANGE
from workbench.runs.spec import AUTO
from workbench.train.choose_micro_batch import choose
from workbench.train.trainer import Trainer

INTERVAL = 0.3
"""Seconds between two lines of the report."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what run.json says."""
    run_program(find_learning_rate, LR_RANGE, __doc__, arguments)


def find_learning_rate(assignment: Assignment) -> dict[str, Any]:
    """Sweep and race with the very Trainer of a run; all ranks find the same rate, rank 0 writes it."""
    spec, ranks, order = assignment.spec, assignment.ranks, assignment.order
    if spec.micro_batch == AUTO:
        spec = spec.replace(micro_batch=choose(spec, ranks))
    trainer = Trainer(spec, assignment.task, ranks)

    def step(batches: Any) -> Any:
        return trainer.step(batches if spec.accumulation > 1 else (batches,))

    lr_found = find(
        step,
        trainer.loader,
        model=trainer.model,
        optimizer=trainer.optimizer,
        accumulation=spec.accumulation,
        budget_s=_left(assignment),
        progress=metrics_reporter(assignment.run_dir) if ranks.rank == 0 else None,
        known=partial(tell, assignment.run_dir) if ranks.rank == 0 else str,
        stop=(assignment.run_dir / run_directory.FINISH).exists if ranks.rank == 0 else None,
        **{name: order[name] for name in ("low", "high", "sweeps", "iterations", "race_steps")},
    )
    return {run_directory.LR_RANGE: lr_found.to_json()} if ranks.rank == 0 else {}


def tell(run_dir: Path, known: str) -> None:
    """Write what is known into the run directory: from then on, Ctrl-C where the run is awaited lets it end with that."""
    with contextlib.suppress(OSError):
        run_directory.write_json(run_dir / run_directory.PROGRESS, {"now": "searching", "known": known})


def _left(assignment: Assignment) -> float | None:
    """Seconds that are left of the budget after the start; half of it at least. None = no limit."""
    budget: float | None = assignment.order.get("measuring_s")
    return None if budget is None else max(0.5 * budget, budget - (time.time() - float(assignment.info["created"])))


def metrics_reporter(run_dir: Path, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int, float, float], None]:
    """A function that writes a line of the run's `metrics.jsonl` every INTERVAL seconds of a clock."""
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
