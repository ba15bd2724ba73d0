"""`sanity`: checks a model, its loss and its data for the usual faults before a large run, in at most a minute."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from workbench.core.progress import INTERRUPTED, Waiting
from workbench.core.synonyms import accept_synonyms
from workbench.diagnosis.analysis.sanity import CHECKS, Check, SanityReport
from workbench.diagnosis.api import BUDGET, check_budget
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec
from workbench.runs.target import Measured, Step, shown
from workbench.runs.task import Task, resolve

_TARGET = Measured(name="sanity", verb="checked", script="a script by the step and the loader in it, sanity(step, loader)")


@accept_synonyms
def sanity(
    target: Task | RunSpec | str | os.PathLike[str] | Callable[[Any], Any],
    loader: Iterable[Any] | None = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    frozen: Sequence[str] = (),
    budget_s: float = BUDGET,
) -> SanityReport:
    """Check a training for the usual faults before a large run: gradients, chance level, leaks, modes, labels.

    Everything runs in this process, on one device, in fp32; a step's model, optimizer, loader and random generators are restored.

    Args:
        target: a Task, a RunSpec, the name of a task, or a step function that returns its loss. Of a step alone less can be judged.
        loader: with a step: its batches.
        model: with a step: the module, or several; None = found by looking at the step.
        optimizer: with a step: the optimizer, or several; None = found as well.
        frozen: patterns of parameters that are not trained on purpose, such as "backbone.*".
        budget_s: seconds to spend at most. What is not reached by then, or by Ctrl-C, is not judged.

    Raises:
        ValueError: something else was given, or it cannot be built.
    """
    check_budget(budget_s)
    frozen = (frozen,) if isinstance(frozen, str) else tuple(frozen)
    if isinstance(target, Task):
        _TARGET.refuse(target, {"loader": loader, "model": model, "optimizer": optimizer}, "a step", "step, loader")
        given: Any = RunSpec(task=target.name or "task")
    else:
        given = _TARGET.read(target, loader, model=model, optimizer=optimizer)
    if isinstance(given, Run):
        if isinstance(given.spec, ScriptSpec):
            raise ValueError(f"sanity({given!r}): it is the run of a script; {_TARGET.script}")
        given = given.spec
    from workbench.diagnosis.measure import checked_training
    from workbench.diagnosis.measure.sanity import check as make_checks

    checks: list[Check] = []
    notes: tuple[str, ...] = ()
    with Waiting("sanity", budget_s) as line:
        try:
            with contextlib.ExitStack() as stack:
                if isinstance(given, Step):
                    training = stack.enter_context(checked_training.of_step(given, frozen))
                else:
                    training = checked_training.of_task(target if isinstance(target, Task) else resolve(given.task), given, frozen)
                notes = tuple(training.notes)
                for check in make_checks(training, line, CHECKS):
                    checks.append(check)
                    failed = [each.name for each in checks if each.passed is False]
                    line.say(check.name, f"failed: {', '.join(failed)}" if failed else f"{len(checks)} checks done")
        except KeyboardInterrupt:
            notes += (INTERRUPTED,)
    missing = [Check(name=name, passed=None, figure="not reached") for name in CHECKS if name not in {check.name for check in checks}]
    name = shown(target) if isinstance(given, Step) else given.task
    return SanityReport(target=name, checks=(*checks, *missing), seconds=line.seconds, notes=notes)
