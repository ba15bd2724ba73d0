"""Find a learning rate: of a step and its loader in this process, or of a spec in a launch of its own."""

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from workbench import rundir, units
from workbench.launcher import experimenting
from workbench.progress import ProgressLine
from workbench.run import Run
from workbench.spec import RunSpec
from workbench.target import Measured

if TYPE_CHECKING:
    from workbench.batch.lr_range_found import LrFound

SWEEPS, ITERATIONS, RACE_STEPS = 5, 100, 80
"""Seeds, steps of a sweep, steps of a candidate in a round of the race, where nobody says: some 1,800 steps in all."""


def find_lr(
    target: RunSpec | Run | str | os.PathLike[str] | Callable[[Any], Any],
    loader: Iterable[Any] | None = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    low: float | None = None,
    high: float | None = None,
    sweeps: int = SWEEPS,
    iterations: int = ITERATIONS,
    race_steps: int = RACE_STEPS,
    runs_dir: str | os.PathLike[str] | None = None,
) -> "LrFound":
    """Find a learning rate by a range test with several seeds, and verify it in a short race.

    Sweeps let the learning rate grow from far too small to far too large and see what the loss does; six published rules read a suggestion
    out of each. They differ, and each differs from seed to seed, so learning rates around them then train for `race_steps` each over equal
    batches, and the loss decides.

    * `find_lr(step, loader)` does it in this process; `step(batch)` does one whole optimizer step and returns the loss. Model, optimizer,
      random generators and loader are left as they were, also after an error. Under DDP all ranks call it and get the same answer.
    * `find_lr(spec)` does it in a launch of its own, with as many ranks as the spec has; `spec.replace(**found.changes())` then trains with
      what was found.
    * `find_lr(run)` reads what such a launch has left.

    It is the learning rate for this batch, this optimizer and these weights; `scale_lr` takes it to another batch.

    Args:
        target: a step function, a RunSpec, a run, or the path of a run directory.
        loader: with a step: its batches, from a DataLoader or any other iterable.
        model: with a step: the module, or several; None = found by looking at the step.
        optimizer: with a step: the optimizer, or several; None = found as well. Groups keep the ratios of their learning rates.
        low: learning rate at which the sweeps begin; None = five decades below where the loss explodes, which is found out first.
        high: where they end; None = a little above that.
        sweeps: seeds.
        iterations: steps of a sweep.
        race_steps: of a candidate in a round of the race; 0 = no race, the suggestion is not verified.
        runs_dir: with a spec: where its run directory goes; None = `runs` in the current folder.

    Returns:
        What was found; its `lr` is None where the loss does not say, and `why` tells.

    Raises:
        ValueError: something else was given; the step returns no loss or takes no optimizer step; the loss is NaN from the first step on.
        RunError: the launch failed; its run directory stays.
    """
    options = {"low": low, "high": high, "sweeps": sweeps, "iterations": iterations, "race_steps": race_steps}
    given = _TARGET.read(target, loader, model=model, optimizer=optimizer)
    if isinstance(given, RunSpec):
        from workbench.batch.lr_range import check_options

        check_options(**options)
        return read(experimenting.range_test(given, options=options, runs_dir=runs_dir))
    if isinstance(given, Run):
        return read(given)
    from workbench.measure.lr_range import find

    far = [0, 1]  # steps taken, steps in all
    began = time.monotonic()
    line = ProgressLine(lambda: f"find_lr: {far[0]} of about {far[1]} steps · {units.seconds(_left(far, time.monotonic() - began))} left")

    def progress(taken: int, planned: int, lr: float, loss: float) -> None:
        far[:] = taken, planned
        line.show()

    try:
        return find(given.step, given.loader, model=model, optimizer=optimizer, progress=progress, **options)  # type: ignore[arg-type]
    finally:
        line.close(f"find_lr: {far[0]} steps in {units.seconds(time.monotonic() - began)}")


_TARGET = Measured(
    name="find_lr", verb="tried", script="a script by its step and its loader, in the script", returns="and returns the loss"
)


def _left(far: list[int], seconds: float) -> float:
    """Seconds until the end, at the pace so far."""
    return seconds * (far[1] - far[0]) / max(1, far[0])


def read(run: Run) -> "LrFound":
    """What `find_lr(spec)` has left in a run directory.

    Raises:
        ValueError: the run was not made by it.
    """
    from workbench.batch.lr_range_found import LrFound

    path = run.path / rundir.LR_RANGE
    if not path.exists():
        raise ValueError(f"{run!r} has no search for a learning rate: find_lr(spec) makes one, in a launch of its own")
    return LrFound.from_json(rundir.read_json(path))
