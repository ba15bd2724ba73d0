"""steps_to_target: measures how many optimizer steps a target takes at several batches, by many trainings in one launch."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from workbench.batch.analysis.scaled_lr import RULES
from workbench.batch.analysis.steps_to_target import StepsToTarget
from workbench.batch.analysis.trials import ExperimentPlan, Target
from workbench.core import units
from workbench.core.checks import check_budget, is_number, is_whole, real_number, whole_number
from workbench.core.progress import say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.runs.entrypoints import STEPS_TO_TARGET, entrypoint
from workbench.runs.launch.experiments import wait_for
from workbench.runs.launch.launch import check, label
from workbench.runs.launch.new_run import NewRun
from workbench.runs.run import Run
from workbench.runs.spec import AUTO, RunSpec
from workbench.runs.target import named_task, read_spec
from workbench.runs.training_knobs import depends_on_steps

RETUNE = (0.5, 1.0, 2.0)
"""Factors of the centre with `retune=True`."""
PROBE = 1024
"""Training samples that the loss is measured on."""
MAX_STEPS = 10_000
"""Optimizer steps of a trial at most."""
_CELLS = 20  # of the progress bar


@accept_synonyms
def steps_to_target(
    spec: RunSpec | Run | str | os.PathLike[str],
    batches: Sequence[int] | None = None,
    rules: str | Sequence[str] = (),
    *,
    target_loss: float | None = None,
    target: Mapping[str, float] | None = None,
    retune: bool | Sequence[float] = False,
    optimizers: Sequence[str] | None = None,
    seeds: int = 2,
    base_batch: int | None = None,
    patience: float | None = 3.0,
    max_steps: int = MAX_STEPS,
    noise_scale: float | None = None,
    critical_batch: float | None = None,
    probe: int = PROBE,
    budget_s: float | None = 60.0,
    runs_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> StepsToTarget:
    """Measure how many optimizer steps it takes to reach a target at several batch sizes, by training until it is reached.

    A batch consists of micro-batches of at most `spec.micro_batch` samples, with gradient accumulation, so that batch normalisation sees
    what it would see with more processes. Each of `spec.nproc_per_node` ranks runs trials of its own, so more ranks only save time. The
    figure is measured whenever the number of steps has grown by 3 %, and the step at which it reaches the target is interpolated. A warm-up
    has the same length in samples at each batch size.

    A trial is stopped after `patience` times as many steps as the best trial of the same optimizer implies: at this batch size, at a
    smaller one (which needs at least as many steps), or at a larger one (which needs at least as many samples). It then counts as "more
    than that".

    `steps_to_target(run)`, with a run or its path, reads the trials of such a launch, also while it runs or after an interrupt.

    Args:
        spec: what is trained; its learning rate (or its optimizer's) belongs to `base_batch`. Its `steps` and `evaluate` are not used.
        batches: global batch sizes, in samples.
        rules: rules by which each batch gets its learning rate: "linear", "sqrt", "adam", "damped", "none" or "auto". With neither rules
            nor `retune`, learning rates are searched for.
        target_loss: loss on `probe` training samples, in evaluation mode.
        target: instead of a loss, a figure of the task's evaluation, such as {"accuracy": 0.8}. Whether it must rise or fall follows from
            its value for the untrained model.
        retune: search for the learning rate of each batch: True, or the factors around the centre that are tried first.
        optimizers: several optimizers to compare, each with its own learning rate: ["sgd(lr=0.1)", "lars(lr=1.0)"].
        seeds: trainings of each configuration. A search uses the first seed, and all seeds at its end.
        base_batch: the batch size to which the learning rate belongs; None = `spec.global_batch`.
        patience: see above; None = no trial is stopped before `max_steps`.
        max_steps: the largest number of steps of one trial.
        noise_scale: the gradient noise scale in samples, for the rules that use it.
        critical_batch: the critical batch in samples, likewise.
        probe: number of training samples on which `target_loss` is measured, the same in all trials.
        budget_s: approximate seconds for the trials; None = no limit. The trial that runs at the end is left out, or, if none has ended,
            counted as "more than that". The result, also after Ctrl-C, has the finished trials, and says how many are missing.
        runs_dir: where the run directory goes; None = `runs` in the current folder.
        quiet: show no progress.

    Raises:
        ValueError: an argument is wrong; the message says what is allowed, and what to try.
        RunError: the launch failed, for example because a batch is larger than the dataset. Finished trials are kept in its run directory.
    """
    script = isinstance(spec, str | os.PathLike) and str(spec).endswith(".py")
    if named_task(spec) is None and not script and isinstance(spec, Run | str | os.PathLike):
        if batches is not None:
            path = spec.path if isinstance(spec, Run) else spec
            raise ValueError(f"steps_to_target({os.fspath(path)!r}, batches=…): a run has tried its batches; a RunSpec tries new ones")
        return StepsToTarget.of(spec)
    spec = read_spec("steps_to_target", spec, instead="a run of steps_to_target is read by its path")
    _check(spec)
    searched = retune is True or (retune is False and not rules)
    order = ExperimentPlan(
        target=_target(target_loss, target),
        batches=_batches(batches),
        rules=_rules(rules),
        optimizers=tuple(optimizers) if optimizers else ("",),
        retune=RETUNE if searched else _factors(retune or ()),
        seeds=whole_number("seeds", seeds, least=1),
        base_batch=spec.global_batch if base_batch is None else whole_number("base_batch", base_batch, least=1),
        patience=_patience(patience),
        max_steps=whole_number("max_steps", max_steps, least=1),
        probe=whole_number("probe", probe, least=1),
        budget_s=budget_s,
        noise_scale=noise_scale,
        critical_batch=critical_batch,
    )
    check_budget(budget_s)
    check(spec)
    if not quiet and sys.stderr.isatty():
        print(f"steps_to_target: {_announcement(order)}", file=sys.stderr)
    new = NewRun(runs_dir, f"{label(spec)} steps to target")
    run = new.start(spec, entrypoint(STEPS_TO_TARGET, new.path), experiment={"kind": "reach", "order": order.to_json()})
    try:
        with say_what_was_interrupted("steps_to_target"):
            return StepsToTarget.of(wait_for(run, show=None if quiet else partial(_progress, order=order)))
    except KeyboardInterrupt:
        with contextlib.suppress(ValueError):  # none has begun
            known = StepsToTarget.of(run)
            if known.trials:
                return known
        raise
    except BaseException as error:
        _say_where(error, run)
        raise


def _announcement(order: ExperimentPlan) -> str:
    """What will be tried."""
    several = [f"{len(order.batches)} batches", *([f"{len(order.optimizers)} optimizers"] if len(order.optimizers) > 1 else [])]
    rates = [*order.rules, *(["a search of the learning rate"] if order.retune else [])]
    limit = "" if order.budget_s is None else f", at most {units.seconds(order.budget_s)} (budget_s)"
    return f"trainings of {', '.join(several)} by {', '.join(rates)}, {order.seeds} seeds{limit}; the first ones show how long all take"


def _say_where(error: BaseException, run: Run) -> None:
    """Add the run directory with the finished trials to an error, if there are any."""
    try:
        trials = StepsToTarget.of(run).trials
    except ValueError:  # none has begun
        return
    if trials:
        error.add_note(f'The results so far are kept: wb.steps_to_target("{run.path}")')


def _progress(run: Run, order: ExperimentPlan) -> str:
    """The progress of an experiment, in a line; before the first trial, what will be tried."""
    try:
        result = StepsToTarget.of(run)
    except ValueError:
        return f"{run.name}: {_announcement(order)}; starting · {units.seconds(run.seconds)}"
    done, total = len(result.trials), max(result.planned, len(result.trials), 1)
    left = units.seconds(result.seconds / done * (total - done)) if done else units.MISSING
    last = result.trials[-1] if done else None
    what = "" if last is None else f" · batch {units.count(last.batch)} {last.rule} lr {last.lr:.3g}: {last.outcome} after {last.after:,}"
    return f"{run.name} {'█' * (_CELLS * done // total):░<{_CELLS}} {done}/~{total} trials{what} · about {left} left"


def _check(spec: RunSpec) -> None:
    if spec.micro_batch == AUTO:
        raise ValueError(
            'micro_batch="auto": steps to a target need a number, the largest micro-batch; wb.max_micro_batch(spec, device) has one'
        )
    if not spec.whole_models:
        names = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
        knob = next((f"{name}={n}" for name in names if (n := getattr(spec, name)) > 1), "")
        knob = knob or f"parallel={spec.parallel!r}"
        raise ValueError(
            f"{knob}: each trial is trained by one rank, with gradient accumulation, so that ranks can do different trials; "
            'try parallel="ddp" with checkpointing="full", if memory is short'
        )
    if spec.local_sgd != "none":
        raise ValueError(
            f'local_sgd="{spec.local_sgd}": each trial is trained by one rank, which has nothing to average; leave it out, and compare the '
            "losses of both runs"
        )
    if depends_on_steps(spec.schedule):
        raise ValueError(
            f'schedule={spec.schedule!r}: it depends on the number of steps, which is measured here; try schedule="constant", '
            "with warmup_steps if needed"
        )
    if spec.ema:
        raise ValueError(f"ema={spec.ema}: steps are counted to a loss of the model itself, not of averaged parameters; leave ema out")


def _target(loss: float | None, figures: Mapping[str, float] | None) -> Target:
    if (loss is None) == (figures is None):
        both = "both target_loss and target were given" if loss is not None else "no target was given"
        raise ValueError(f'{both}: one is allowed, target_loss=0.5 (on training samples) or target={{"accuracy": 0.8}} (of the evaluation)')
    if figures is None:
        figures = {"loss": loss}  # type: ignore[dict-item]
    elif not isinstance(figures, Mapping) or len(figures) != 1 or "loss" in figures:
        raise ValueError(
            f'target={figures!r}: one figure of the task\'s evaluation is allowed, {{"accuracy": 0.8}}; a loss is a target_loss='
        )
    ((name, value),) = figures.items()
    return Target(name=name, value=float(real_number(f"target {name}", value)), rises=None if name != "loss" else False)


def _batches(given: Any) -> tuple[int, ...]:
    good = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    if not good or not all(is_whole(batch, least=1) for batch in given):
        raise ValueError(f"batches={given!r}: global batches in samples are allowed, four or more for a law: [16, 64, 256, 1024]")
    return tuple(sorted(set(given)))


def _rules(given: str | Sequence[str]) -> tuple[str, ...]:
    rules = (given,) if isinstance(given, str) else tuple(given)
    if unknown := [rule for rule in rules if rule not in RULES]:
        hint = "; for a search set retune=True" if unknown[0] == "tuned" else ""
        raise ValueError(f"rules={given!r}: no rule {unknown[0]!r}; allowed are {', '.join(map(repr, RULES))}{hint}")
    return tuple(dict.fromkeys(rules))


def _factors(given: Any) -> tuple[float, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(is_number(factor, above=0) for factor in given):
        raise ValueError(f"retune={given!r}: True, or factors above 0 are allowed, such as [0.5, 1, 2]")
    return tuple(dict.fromkeys(map(float, given)))


def _patience(given: float | None) -> float | None:
    if given is None:
        return None
    return float(real_number("patience", given, above=1, also=" (3 = give up after three times the best), or None for never"))
