"""Measure memory: what a training step really holds, of a step and its loader in this process, or of a spec in a launch of its own."""

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from workbench.launcher import experimenting
from workbench.run import Run
from workbench.spec import RunSpec, ScriptSpec
from workbench.task import Task

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
    if isinstance(target, Task | ScriptSpec):
        raise ValueError(f"measure_memory({_shown(target)}): {_WANTED}")
    if isinstance(target, RunSpec | Run | str | os.PathLike):
        given = {"a loader": loader, "model=": model, "optimizer=": optimizer}
        if extra := ", ".join(name for name, value in given.items() if value is not None):
            raise ValueError(
                f"measure_memory({_shown(target)}, …) was given {extra}, which only goes with a step: measure_memory(step, loader)"
            )
    if isinstance(target, RunSpec):
        return experimenting.weigh(target, steps=_checked(steps), runs_dir=runs_dir).memory_breakdown()
    if isinstance(target, str | os.PathLike):
        target = Run.load(target)
    if isinstance(target, Run):
        if steps is not None:
            raise ValueError(
                f"measure_memory({target!r}, steps={steps!r}): a run has taken its steps; measure_memory(spec, steps=…) takes new ones"
            )
        return target.memory_breakdown()
    _check_step("measure_memory", target, loader)
    from workbench.measure.memory import measure

    return measure(target, loader, model=model, optimizer=optimizer, steps=_checked(steps))  # type: ignore[arg-type]


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
    _check_step("find_leaks", step, loader)
    from workbench.measure.leaks import find

    return find(step, loader, model=model, optimizer=optimizer, steps=steps)


_WANTED = (
    'a task is measured by its spec, measure_memory(wb.RunSpec(task="my_task.py:build")); of a script only the peak of each rank is known: '
    'wb.launch("train.py", watch=True).wait().memory'
)


def _checked(steps: Any) -> int:
    steps = STEPS if steps is None else steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: a whole number of at least 1 is allowed; with 2 or more the optimizer's states are seen")
    return steps


def _check_step(what: str, step: Any, loader: Any) -> None:
    if hasattr(step, "state_dict") and hasattr(step, "parameters"):
        raise ValueError(f"{what}({_shown(step)}, …): a function is wanted that does one whole optimizer step; a module goes into model=")
    if not callable(step):
        if callable(loader) and (hasattr(step, "__iter__") or hasattr(step, "__getitem__")):
            raise ValueError(f"{what}(loader, step): it is the other way round, {what}(step, loader)")
        raise ValueError(
            f"{what}({_shown(step)}, …): allowed are a step function with its loader"
            + (", a RunSpec, a Run or the path of a run directory" if what == "measure_memory" else "")
        )
    if loader is None:
        raise ValueError(f"{what}({_shown(step)}): a step needs the loader of its batches: {what}(step, loader)")


def _shown(target: object) -> str:
    return getattr(target, "__name__", type(target).__name__)
