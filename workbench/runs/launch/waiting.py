"""Waits for the end of a run that was launched for its result, and raises if it did not finish well."""

import time
from collections.abc import Callable

from workbench.core import units
from workbench.core.progress import ProgressLine
from workbench.runs.failure import Failure, RunError
from workbench.runs.run import Run

_TICK = 0.05


def wait_for(run: Run, *, show: Callable[[Run], str] | None = None, tick: Callable[[], object] = int, check: bool = True) -> Run:
    """Wait for the end of a run. Whatever interrupts that, such as Ctrl-C or an error of `tick`, stops the run.

    Args:
        run: as launched.
        show: how far it is, for a line in a terminal; None = nothing is shown.
        tick: called again and again meanwhile.
        check: raise if it did not finish well.

    Raises:
        RunError: it did not finish well; its run directory stays.
    """
    line = ProgressLine(lambda: show(run) if show else "")
    try:
        while run.state == "running":
            if show:
                line.show()
            tick()
            time.sleep(_TICK)
    except BaseException:
        run.stop()
        raise
    finally:
        line.close(run)
    if check and (error := error_of(run)):
        raise error
    return run


def error_of(run: Run) -> RunError | None:
    """Why a run that has ended did not finish well, and where its directory is; None = it did."""
    if run.ok:
        return None
    error = RunError(run.error or Failure.of_launcher(f"it was {run.state}"))
    error.add_note(f"Its run directory: {run.path}")
    return error


def time_left(words: str) -> Callable[[Run], str]:
    """How far a run is and how long it will go on, in words, by the last row of its metrics (step, steps, seconds).

    Args:
        words: with places for both, such as "{done} of {steps} rounds".
    """

    def left(run: Run) -> str:
        rows = run.metric_rows
        if not rows:
            return f"{run.path.name}: starting"
        done, steps, seconds = (rows[-1][name] for name in ("step", "steps", "seconds"))
        return f"{run.path.name}: {words.format(done=done, steps=steps)} · {units.seconds(seconds * max(0, steps - done) / done)} left"

    return left
