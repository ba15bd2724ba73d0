"""`diverge`: finds the first operator or module whose results differ between two trainings that should agree."""

import os
from collections.abc import Callable
from typing import Any

from workbench.core.checks import whole_number
from workbench.core.progress import Waiting, say_what_was_interrupted
from workbench.diagnosis.analysis.divergence import Divergence
from workbench.runs.spec import RunSpec
from workbench.runs.target import named_task, shown
from workbench.runs.task import Task, resolve


def diverge(
    a: Task | RunSpec | str | os.PathLike[str] | Any,
    b: Task | RunSpec | str | os.PathLike[str] | Any,
    *,
    batch: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    steps: int = 2,
    seed: int = 0,
) -> Divergence:
    """Find where two trainings that should agree differ first, and say whether that is rounding or a bug.

    Both take the same steps in this process. Each operator's result is compared, or, where the two do not run the same operators, each
    module's, then gradients and updates by parameter. Then both run in fp64: a difference that is as large there is no rounding.

    * `diverge(spec, spec.replace(channels_last=True))`: two specs that differ in a knob, on one rank.
    * `diverge(model, torch.compile(model), batch=x)`: two modules, which are called with the batch and restored afterwards. A tuple or a
      dictionary as the batch is spread over the arguments.
    * `diverge((model, x), (other, y))`: each with a batch of its own.

    Args:
        a: a RunSpec, a Task, the name of a task, a module, or a module with its batch.
        b: the same kind.
        batch: with modules: their input.
        loss: with modules: `loss(model, batch)`; None = a weighted mean of the squares of the output.
        optimizer: with modules: takes the parameters and returns an optimizer; None = none, and a single step.
        steps: optimizer steps to compare at most.
        seed: with modules: of the random numbers.

    Raises:
        ValueError: something else was given, or a spec that needs several ranks.
    """
    whole_number("steps", steps, least=1, error=ValueError)
    given: list[Any] = [named_task(each) or each for each in (a, b)]
    specs = [isinstance(each, RunSpec | Task) for each in given]
    if any(specs) and (not all(specs) or batch is not None or loss or optimizer):
        raise ValueError(
            "diverge(a, b): give two specs or tasks, which have batch, loss and optimizer, or two modules with batch=; "
            f"given were {shown(given[0])} and {shown(given[1])}"
        )
    if not any(specs):
        pairs = [each if isinstance(each, tuple) and len(each) == 2 else (each, batch) for each in given]
        for each, (model, its) in zip(given, pairs, strict=True):
            if not hasattr(model, "named_modules"):
                raise ValueError(f"diverge({shown(each)}, …): allowed are a RunSpec, a Task, the name of a task, or a torch.nn.Module")
            if its is None:
                raise ValueError(f"diverge({shown(each)}, …): a module needs a batch: diverge(a, b, batch=…), or ((a, x), (b, y))")
    else:
        for each in given:
            if isinstance(each, RunSpec) and (each.world_size > 1 or each.parallel != "ddp" or each.tensor_parallel > 1):
                raise ValueError(
                    f"diverge compares what one process computes, and {each!r} has several ranks, or shards its model: try "
                    'spec.replace(nproc_per_node=1, parallel="ddp")'
                )
    from workbench.diagnosis.measure import divergence as measure

    if any(specs):
        trainings = [(RunSpec(task=each.name or "task"), each) if isinstance(each, Task) else (each, resolve(each.task)) for each in given]

        def run(which: int, double: bool) -> Any:
            spec, task = trainings[which]
            return measure.of_spec(spec, task, steps, double)

        first, second = (spec.to_json() for spec, _ in trainings)
        changed = [f"{name}={value!r}" for name, value in second.items() if name in first and value != first[name]]
        names = ["a task" if isinstance(each, Task) else each.task for each in given]
        if changed and all(isinstance(each, RunSpec) for each in given):
            names[1] = ", ".join(changed)
    else:
        made = [measure.Pair(model, its, loss, optimizer) for model, its in pairs]

        def run(which: int, double: bool) -> Any:
            return measure.of_pair(made[which], seed, steps, double)

        names = [type(model).__name__ for model, _ in pairs]
    with say_what_was_interrupted("diverge"), Waiting("diverge", None) as line:
        return measure.compare((names[0], names[1]), run, line.say)
