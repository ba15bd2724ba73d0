"""Trace: some steps of this process under torch's profiler, and the file they leave, read."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from workbench import units
from workbench.run import Run
from workbench.spec import RunSpec, ScriptSpec
from workbench.task import Task
from workbench.traces import Trace

STEPS = 5
"""Steps that are traced where nobody says."""


def trace(
    step: Callable[[Any], Any],
    loader: Iterable[Any] | None = None,
    *,
    steps: int = STEPS,
    into: str | os.PathLike[str] = "traces",
    model: Any = None,
    optimizer: Any = None,
    shapes: bool = True,
    stacks: bool = False,
    memory: bool = False,
    flops: bool = False,
) -> Trace:
    """Take some steps under torch's profiler, and read what it wrote down.

    The steps come after the prefetch queue was emptied, which would hide a slow loader, and as many are taken without the profiler, before
    and after: `slowdown` says what it cost. Model, optimizer, random generators and loader are left as they were.

    Args:
        step: `step(batch)` does one whole optimizer step.
        loader: its batches, from a DataLoader or any other iterable.
        steps: how many are traced.
        into: the directory the file goes to; `tensorboard --logdir` finds it there, with the plugin torch-tb-profiler.
        model: the module, or several; None = found by looking at the step.
        optimizer: the optimizer, or several; None = found as well.
        shapes: record the shapes of operators' inputs.
        stacks: record Python's frames: dear, but they name what the host does between operators.
        memory: record every request for memory.
        flops: let the profiler count FLOPs of operators.

    Raises:
        ValueError: what was given cannot be traced; the message says why.
        TraceError: the profiler wrote nothing that can be read.
    """
    _check(step, loader, steps)
    assert loader is not None
    from workbench.measure.tracing import Options, capture

    options = Options(shapes=shapes, stacks=stacks, memory=memory, flops=flops)
    captured = capture(step, loader, steps=steps, into=Path(into), options=options, model=model, optimizer=optimizer)
    found = Trace.load(captured.path)
    notes = list(captured.notes)
    slowdown = captured.slowdown
    if not math.isnan(slowdown) and slowdown > 0.5:
        notes.append(f"the profiler slows these steps down by {units.percent(slowdown)}: small operators look dearer than they are")
    return dataclasses.replace(found, slowdown=None if math.isnan(slowdown) else slowdown, notes=(*found.notes, *notes))


def _check(step: Any, loader: Any, steps: Any) -> None:
    shown = getattr(step, "__name__", type(step).__name__)
    if isinstance(step, str | os.PathLike):
        raise ValueError(f"trace({str(step)!r}): a step function is traced; a file that a profiler wrote is read by wb.Trace.load(path)")
    if isinstance(step, RunSpec | ScriptSpec | Task | Run):
        raise ValueError(f"trace({shown}): allowed is a step function of this process with its loader, trace(step, loader)")
    if hasattr(step, "state_dict") and hasattr(step, "parameters"):
        raise ValueError(f"trace({shown}, …): a function is wanted that does one whole optimizer step; a module goes into model=")
    if not callable(step):
        turned = callable(loader) and (hasattr(step, "__iter__") or hasattr(step, "__getitem__"))
        raise ValueError(
            "trace(loader, step): it is the other way round, trace(step, loader)" if turned else f"trace({shown}): no step function"
        )
    if loader is None:
        raise ValueError(f"trace({shown}): a step needs the loader of its batches: trace(step, loader)")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise ValueError(f"steps={steps!r}: a whole number of at least 2 is allowed; with 5 one sees how much they vary")
