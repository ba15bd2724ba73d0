"""`sanity`, `diverge` and `replay`: whether a training is sound, where two that should agree differ, and what spoilt a step of a run."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from workbench.core import run_directory
from workbench.core.checks import check_budget, whole_number
from workbench.core.progress import INTERRUPTED, Waiting, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.diagnosis.analysis.divergence import Divergence
from workbench.diagnosis.analysis.sanity import CHECKS, Check, SanityReport
from workbench.diagnosis.analysis.step_replay import StepReplay, first_bad_step
from workbench.diagnosis.api import BUDGET
from workbench.runs.launch.experiments import run_recording
from workbench.runs.launch.resume import refuse_code_of_others, refuse_links
from workbench.runs.restarts import present_spec
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, spec_from_json
from workbench.runs.target import Measured, Step, shown
from workbench.runs.task import Task, resolve, seen_from_here
from workbench.runs.training_knobs import parse_local_sgd

_TARGET = Measured(name="sanity", verb="checked", script="a script by the step and the loader in it, sanity(step, loader)")
_COMPARED = Measured(name="diverge", verb="compared", script="a script by the models in it, diverge(model, other, batch=…)")


def _spec_of(run: Run, target: Measured) -> RunSpec:
    """The spec of a run, with its files as seen from here; raises where it is a script's, or its code is somebody else's."""
    if not isinstance(run.spec, RunSpec):
        raise ValueError(f"{target.name}({run!r}): it is the run of a script; {target.script}")
    refuse_code_of_others(run)
    spec: RunSpec = seen_from_here(run.spec, run_directory.read_json(run.path / run_directory.RUN_JSON).get("cwd"))
    return spec


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

    Everything runs in this process, on one device, in fp32. With a step, its model, optimizer, loader and random generators are restored.

    Args:
        target: a Task, a RunSpec, the name of a task, or a step function that returns its loss. For a step, some checks are not judged.
        loader: with a step: its batches.
        model: with a step: the module, or several; None = found by looking at the step.
        optimizer: with a step: the optimizer, or several; None = found as well.
        frozen: patterns of parameters that are not trained on purpose, such as "backbone.*", or "model[1].*" of several models. A note says
            which of them fits none.
        budget_s: seconds to spend at most. Checks that do not start by then, or by Ctrl-C, are not judged.

    Raises:
        ValueError: something else was given, or it cannot be built.
    """
    check_budget(budget_s, limited=True)
    frozen = (frozen,) if isinstance(frozen, str) else tuple(frozen)
    if isinstance(target, Task):
        _TARGET.refuse(target, {"loader": loader, "model": model, "optimizer": optimizer}, "a step", "step, loader")
        given: Any = RunSpec(task=target.name or "task")
    else:
        given = _TARGET.read(target, loader, model=model, optimizer=optimizer)
    if isinstance(given, Run):
        given = _spec_of(given, _TARGET)
    from workbench.diagnosis.measure import checked_training
    from workbench.diagnosis.measure.sanity import check as make_checks

    checks: list[Check] = []
    notes: tuple[str, ...] = ()
    with Waiting("sanity", budget_s, begin=f"{len(CHECKS)} checks") as line:
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
    made = {check.name: check for check in checks}
    sorted_checks = tuple(made.get(name) or Check(name=name, passed=None, figure="not reached") for name in CHECKS)
    name = shown(target) if isinstance(given, Step) else given.task
    return SanityReport(target=name, checks=sorted_checks, seconds=line.seconds, notes=notes)


@accept_synonyms
def diverge(
    a: Task | RunSpec | Run | str | os.PathLike[str] | Any,
    b: Task | RunSpec | Run | str | os.PathLike[str] | Any,
    *,
    batch: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    steps: int = 2,
    seed: int = 0,
    budget_s: float = BUDGET,
    runs_dir: str | os.PathLike[str] | None = None,
) -> Divergence:
    """Find where two trainings that should agree differ first, and say whether the difference is rounding or a bug.

    Both take the same steps in this process. The results of all operators are compared, or, if the two run different operators, those of
    all modules, then gradients and updates of each parameter. For an update that differs in this process, the optimizer's operator is
    named, and `notes` lists the options that differ, such as eps. Then both run in fp64: a difference that is as large there is not
    rounding.

    * `diverge(spec, spec.replace(channels_last=True))`: two specs that differ in a knob.
    * `diverge(spec, spec.replace(parallel="fsdp", nproc_per_node=2, micro_batch=4))`: one process against ranks that share the model. A
      spec of several ranks is launched, the parts that its ranks compute are joined, and modules, gradients and updates are compared. With
      `pipeline_parallel=2`, give both the same `accumulation`, since micro-batches are compared one by one.
    * `diverge(run_a, run_b)`: two runs, or their directories. The first steps of their specs are repeated.
    * `diverge(model, torch.compile(model), batch=x)`: two modules, which are called with the batch and restored afterwards. If the batch is
      a tuple or a dictionary, it is unpacked into the arguments.
    * `diverge((model, x), (other, y))`: each with a batch of its own.

    Args:
        a: a RunSpec, a Task, the name of a task, a Run or its directory, a module, or a module with its batch.
        b: the same kind as `a`. The code of a run's task is executed in this process.
        batch: with modules: the input of both.
        loss: with modules: `loss(model, batch)`; None = a weighted mean of the squared outputs.
        optimizer: with modules: a function of the parameters that returns an optimizer; None = no optimizer, and a single step.
        steps: the largest number of optimizer steps to compare.
        seed: with modules: the seed of the random numbers.
        budget_s: approximate seconds to spend: no training starts later. If steps take long, fewer are compared. If no time is left for
            fp64, or Ctrl-C comes during it, the size of the first difference decides, and a note says so.
        runs_dir: where the run directories of specs of several ranks go; None = `runs` in the current folder.

    Raises:
        ValueError: something else was given, such as the run of a script, or two specs whose steps have different samples.
        LaunchError: a run's directory belongs to another user, or contains the code.
        RunError: a spec of several ranks failed.
        TimeoutError: the budget ended while a spec of several ranks was being recorded, before anything was known.
    """
    check_budget(budget_s, limited=True)
    whole_number("steps", steps, least=1, error=ValueError)
    given: list[Any] = [_COMPARED.run_at(each) if isinstance(each, str | os.PathLike) else each for each in (a, b)]
    runs = [each.path if isinstance(each, Run) else None for each in given]
    given = [_spec_of(each, _COMPARED) if isinstance(each, Run) else each for each in given]
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
                raise ValueError(
                    f"diverge({shown(each)}, …): allowed are a RunSpec, a Task, the name of a task, a Run, or a torch.nn.Module"
                )
            if its is None:
                raise ValueError(f"diverge({shown(each)}, …): a module needs a batch: diverge(a, b, batch=…), or ((a, x), (b, y))")
    sizes = [each.global_batch for each in given if isinstance(each, RunSpec)]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"diverge: a step of the one has {sizes[0]} samples, of the other {sizes[1]} (micro_batch × accumulation × ranks that read "
            "different samples), so they compute different things: change micro_batch in one of them"
        )
    from workbench.diagnosis.measure import divergence as measure
    from workbench.diagnosis.measure.divergence_ranks import unpacked

    if any(specs):
        trainings = [(RunSpec(task=each.name or "task"), each) if isinstance(each, Task) else (each, resolve(each.task)) for each in given]

        launched: dict[int, Any] = {}
        alike = len({spec.accumulation for spec, _ in trainings}) == 1  # else what a module gives of a micro-batch has no counterpart

        def run(which: int, double: bool, steps: int, enough: Callable[[], bool]) -> Any:
            entries = recorded(which, double, steps, enough)
            return entries if alike else [entry for entry in entries if entry.kind not in ("operator", "module")]

        def recorded(which: int, double: bool, steps: int, enough: Callable[[], bool]) -> Any:
            spec, task = trainings[which]
            if spec.world_size == 1 and spec.parallel == "ddp":
                in_time(double)
                return measure.of_spec(spec, task, steps, double, enough)
            if which not in launched:
                path = run_recording(spec, steps=steps, runs_dir=runs_dir, tick=tick).path
                launched[which] = run_directory.read_json(path / run_directory.DIVERGENCE)
            if double and launched[which]["error"]:
                raise ValueError(launched[which]["error"])
            return unpacked(launched[which]["double" if double else "plain"])

        first, second = (spec.to_json() for spec, _ in trainings)
        changed = [f"{name}={value!r}" for name, value in second.items() if name in first and value != first[name]]
        names = ["a task" if isinstance(each, Task) else each.task for each in given]
        if changed and all(isinstance(each, RunSpec) for each in given):
            names[1] = ", ".join(changed)
    else:
        made = [measure.Pair(model, its, loss, optimizer) for model, its in pairs]

        def run(which: int, double: bool, steps: int, enough: Callable[[], bool]) -> Any:
            in_time(double)
            return measure.of_pair(made[which], seed, steps, double, enough)

        names = [type(model).__name__ for model, _ in pairs]
    begin = f"{steps} steps of each, as they are and in fp64"
    with say_what_was_interrupted("diverge"), Waiting("diverge", budget_s, begin=begin) as line:

        def tick() -> None:
            line.tick()
            if line.left < 0:
                text = f"diverge: the budget of {budget_s:g} s ended while the ranks were recorded, and nothing is known"
                raise TimeoutError(f"{text}; try budget_s={5 * budget_s:g}")

        def in_time(double: bool) -> None:
            if double and line.left <= 0:
                raise measure.OutOfTime

        found = measure.compare((names[0], names[1]), run, line.say, steps=steps, left=lambda: line.left)
        if any(runs):
            from workbench.train.provenance import code_note

            noted = (code_note(path, task, spec.schedule) for path, (spec, task) in zip(runs, trainings, strict=True) if path)
            found = dataclasses.replace(found, notes=(*dict.fromkeys(filter(None, noted)), *found.notes))
        if found.verdict != "bug" or not any(specs):
            return found
        return found.judged(trainings[0][0], trainings[1][0], measure.batch_norms(trainings[0][1]))


@accept_synonyms
def replay(run: Run | str | os.PathLike[str], step: int | None = None, *, budget_s: float = BUDGET) -> StepReplay:
    """Repeat one step of a run, with changes, and say whether data, learning rate or numerics made it go wrong.

    The run is repeated in this process from the nearest checkpoint before the step, or from its first step, with the samples of all ranks
    and the same random numbers. Ranks that shared the model (`parallel`, `tensor_parallel`, `pipeline_parallel`) become one whole model.
    For a pipeline, dropout draws other random numbers than it did in the run. Then the step is taken unchanged, in a higher precision, with
    a tenth of the learning rate or less, with the batch of a later step, and without each of its samples in turn. If the weights were
    already bad, the steps before it are examined, or the first step whose loss stands out.

    Args:
        run: a run of a RunSpec, or its directory. The code of its task is executed in this process.
        step: counted from 1; None = the first step whose loss is not finite, or is far above the losses before it; if there is none, the
            step in which the task raised an error.
        budget_s: seconds to spend at most.

    Raises:
        ValueError: it is the run of a script, has no such step, or the step cannot be reached in time.
        LaunchError: the directory belongs to another user or contains the code, which would be executed as you; or it has symbolic links.
    """
    check_budget(budget_s, limited=True)
    run = run if isinstance(run, Run) else Run.load(run)
    spec = run.spec
    if not isinstance(spec, RunSpec):
        raise ValueError(f"replay({run!r}): only the run of a task can be repeated, and this is one of a script")
    losses = {int(row["step"]): _number(row["loss"]) for row in run.metric_rows if "loss" in row and "lr" in row}
    if step is None:
        step = first_bad_step(losses)
        last = max(losses, default=0)
        if step is None and last < spec.steps and run.error and run.error.kind == "exception":
            step = last + 1
        if step is None:
            own = " of rank 0's samples" * (spec.data_ranks > 1)
            raise ValueError(f"replay({run!r}): no loss{own} stands out among its {len(losses)} steps: name one, replay(run, step)")
    whole_number("step", step, least=1, error=ValueError)
    if step > spec.steps or (losses and step > max(losses) + 1):
        raise ValueError(f"replay({run!r}, step={step}): it has taken {max(losses, default=0)} steps, counted from 1")
    if spec.local_sgd != "none" and step > (start := parse_local_sgd(spec.local_sgd)["start"]):
        raise ValueError(
            f'replay({run!r}, step={step}): local_sgd="{spec.local_sgd}": after step {start} each rank has parameters of its own, and one '
            f"process cannot repeat them{f': steps up to {start} can be repeated' * bool(start)}"
        )
    from workbench.diagnosis.measure import step_replay as measure

    refuse_code_of_others(run)
    refuse_links(run)
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    if run.restarts and step > (run.restarts[-1].goes_on_from or 0):
        spec = cast(RunSpec, spec_from_json(present_spec(info)))  # with the ranks that were left
    folder = info.get("cwd")
    with say_what_was_interrupted("replay"), Waiting("replay", budget_s, begin=f"step {step} once more") as line:
        return measure.replay(run.path, seen_from_here(spec, folder), step, losses, line.say, lambda: line.left)


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
