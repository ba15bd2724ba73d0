"""`python -m workbench.train.lr_range RUN_DIR`: looks for a learning rate of a spec; rank 0 leaves what it found in `lr_range.json`.

torchrun starts one per rank. What is wanted stands in run.json under "experiment". All sweeps and the race happen in this one launch.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench import failure, rundir
from workbench.batch.lr_range_found import LrFound
from workbench.measure.blocks import StepFailed
from workbench.measure.holding import held
from workbench.measure.lr_range import find
from workbench.spec import AUTO, RunSpec
from workbench.task import Task, resolve
from workbench.train.choosing import choose
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer

INTERVAL = 0.3
"""Seconds between two lines of the report."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what run.json says; whatever goes wrong is recorded before anything is torn down."""
    parser = argparse.ArgumentParser(prog="python -m workbench.train.lr_range", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help='directory with a run.json that has an "experiment"')
    run_dir = parser.parse_args(arguments).run_dir
    try:
        info = rundir.read_json(run_dir / rundir.RUN_JSON)
        spec, order = RunSpec.from_json(info["spec"]), info["experiment"]
        task = resolve(spec.task)  # before the group: a wrong name needs no peers to be found
        ranks = Ranks.join(spec)
        found = search(spec, task, ranks, order, run_dir)
        if ranks.rank == 0:
            rundir.write_json(run_dir / rundir.LR_RANGE, found.to_json())
        ranks.agree(True)  # nobody leaves while rank 0 writes
    except BaseException as error:
        failure.record(error.error if isinstance(error, StepFailed) else error, run_dir=run_dir, held=held)
        raise
    Ranks.leave()


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
    writer = rundir.LineWriter(run_dir / rundir.METRICS)
    began = written = clock()

    def report(taken: int, planned: int, lr: float, loss: float) -> None:
        nonlocal written
        if clock() - written >= INTERVAL:
            written = clock()
            writer.write([{"step": taken, "steps": planned, "lr": lr, "loss": loss, "seconds": written - began}])

    return report


if __name__ == "__main__":
    main()
