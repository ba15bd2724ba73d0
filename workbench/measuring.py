"""Measure memory: what a training step really holds, of a step and its loader in this process, or of a spec in a launch of its own."""

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from workbench.checks import whole_number
from workbench.launcher import experimenting
from workbench.run import Run
from workbench.spec import RunSpec
from workbench.target import Measured, check_step

if TYPE_CHECKING:
    from workbench.measure.leaks import Leaks
    from workbench.memory.breakdown import MemoryBreakdown

STEPS = 3
"""Steps that are measured where nobody says: the optimizer's states are born in the first; the second and the third should agree."""


def measure_memory(
    target: RunSpec | Run | str | os.PathLike[str] | Callable[[Any], Any],
    loader: Iterable[Any] | None = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    steps: int | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
) -> "MemoryBreakdown":
    """Find out what a training step holds in memory, by running it.

    * `measure_memory(step, loader)` takes some steps in this process; `step(batch)` does one whole optimizer step. Model, optimizer, random
      generators and loader are left as they were. Counted is what the step reaches, not what else lives in the process.
    * `measure_memory(spec)` takes them in a launch of its own, with as many ranks as the spec has, and gives the fullest rank's.
    * `measure_memory(run)` reads what such a launch has left; `run.memory_breakdown(rank)` has every rank's.

    Args:
        target: a step function, a RunSpec, a run, or the path of a run directory.
        loader: with a step: its batches, from a DataLoader or any other iterable.
        model: with a step: the module, or several; None = found by looking at the step.
        optimizer: with a step: the optimizer, or several; None = found as well.
        steps: how many are taken; None = 3.
        runs_dir: with a spec: where its run directory goes; None = `runs` in the current folder.

    Returns:
        A breakdown whose total is what the allocator counted: on a CPU torch's profiler, on a GPU the allocator's own counters.

    Raises:
        ValueError: something else was given, or what was given cannot be measured; the message says why.
        RunError: the launch failed; its run directory stays.
    """
    given = _TARGET.read(target, loader, model=model, optimizer=optimizer, steps=steps)
    if isinstance(given, Run):
        return given.memory_breakdown()
    count = _checked(steps)
    if isinstance(given, RunSpec):
        return experimenting.weigh(given, steps=count, runs_dir=runs_dir).memory_breakdown()
    from workbench.measure.memory import measure

    return measure(given.step, given.loader, model=model, optimizer=optimizer, steps=count)


def find_leaks(step: Callable[[Any], Any], loader: Iterable[Any], *, model: Any = None, optimizer: Any = None, steps: int = 8) -> "Leaks":
    """Find memory that grows from step to step, and who holds it: operator, module, and the Python variable that keeps it alive.

    It takes some steps in this process and leaves everything as it was, what has leaked meanwhile included.

    Args:
        step: `step(batch)` does one whole optimizer step.
        loader: its batches, from a DataLoader or any other iterable.
        model: the module, or several; None = found by looking at the step.
        optimizer: the optimizer, or several; None = found as well.
        steps: how many are taken, at least 5: what is born in one step and still lives two steps later is suspected.

    Raises:
        ValueError: what was given cannot be measured; the message says why.
    """
    check_step("find_leaks", step, loader)
    from workbench.measure.leaks import find

    return find(step, loader, model=model, optimizer=optimizer, steps=steps)


_TARGET = Measured(
    name="measure_memory",
    verb="measured",
    script='of a script only the peak of each rank is known: wb.launch("train.py", watch=True).wait().memory',
)


def _checked(steps: Any) -> int:
    also = "; with 2 or more the optimizer's states are seen"
    return whole_number("steps", STEPS if steps is None else steps, least=1, also=also)
