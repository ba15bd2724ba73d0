"""find_lr and noise_scale: for a step with its loader in this process, for a RunSpec in a launch, or from a run that has them."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from workbench.batch.analysis.lr_race import STEPS
from workbench.batch.analysis.lr_range import ITERATIONS, SWEEPS, LrFound, check_options
from workbench.core import run_directory
from workbench.core.checks import check_budget, whole_number
from workbench.core.progress import INTERRUPTED, Waiting, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.runs.launch import experiments
from workbench.runs.launch.experiments import error_of, wait_for
from workbench.runs.launch.launch import launch
from workbench.runs.run import Run
from workbench.runs.spec import AUTO, RunSpec, SpecError
from workbench.runs.target import Measured, read_spec
from workbench.runs.training_knobs import UNEVALUATED

if TYPE_CHECKING:
    from workbench.batch.analysis.noise_scale import NoiseScale


NOISE_STEPS = 200
"""Default of optimizer steps for a noise scale."""
MIN_NOISE_STEPS, NOISE_LOOK = 60, 1.0
"""Steps before it may end because they are enough, and seconds between two looks at the estimate."""

_LR_TARGET = Measured(name="find_lr", verb="tried", script="in a script: wb.find_lr(step, loader)", returns="and returns the loss")
_NOISE_TARGET = Measured(
    name="noise_scale",
    verb="measured",
    script="in a script: with workbench.batch.measure.noise_watch.NoiseWatch(model, optimizer, micro_batch=32) as watch: …, then "
    "watch.result()",
)
_OWN_MODEL = "of a model of your own: workbench.batch.measure.per_sample.exact_noise_scale(model, loss, batches)"


@accept_synonyms
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
    race_steps: int = STEPS,
    budget_s: float | None = 60.0,
    runs_dir: str | os.PathLike[str] | None = None,
) -> LrFound:
    """Find a learning rate by a range test with several seeds, and verify it in a short race.

    In a sweep, the learning rate grows from far too small to far too large, and six published rules suggest a rate from the losses. The
    rules differ from each other, and from seed to seed. So the suggestions, and rates beside the best of them, then train for `race_steps`
    steps each over equal batches, and the loss decides.

    * `find_lr(step, loader)` runs in this process. `step(batch)` does one whole optimizer step and returns the loss. Model, optimizer,
      random generators and loader are restored, also after an error. Under DDP all ranks call it and get the same answer.
    * `find_lr(spec)` launches the spec's ranks. With its result `found`, `spec.replace(**found.changes())` is the spec with the learning
      rate.
    * `find_lr(run)` reads the result of such a launch.

    The result is for this batch size, this optimizer and these weights. `scale_lr` transfers it to another batch size.

    Args:
        target: a step function, a RunSpec, the name of a task, a run, or the path of a run directory.
        loader: with a step: its batches, from a DataLoader or any other iterable.
        model: with a step: the module, or several; None = those that the step uses.
        optimizer: with a step: the optimizer, or several; None = likewise. Groups keep the ratios of their learning rates.
        low: learning rate at which the sweeps start; None = five decades below the rate at which the loss explodes.
        high: learning rate at which they end; None = a little above the rate at which the loss explodes.
        sweeps: number of sweeps, each with its own seed.
        iterations: steps of each sweep.
        race_steps: steps of a candidate in a round of the race; 0 = no race, so the suggestion is not verified.
        budget_s: approximate seconds, the start of a launch included; None = no limit. If steps take long, sweeps and rounds become fewer
            and shorter, and notes say so. After Ctrl-C the result is what is known so far, if at least one sweep has ended.
        runs_dir: with a spec: where its run directory goes; None = `runs` in the current folder.

    Returns:
        An LrFound. If the losses do not show a learning rate, its `lr` is None, and `why` says why.

    Raises:
        ValueError: something else was given; the step returns no loss or takes no optimizer step; the loss is NaN from the first step on.
        RunError: the launch failed; its run directory stays.
    """
    options = {"low": low, "high": high, "sweeps": sweeps, "iterations": iterations, "race_steps": race_steps}
    check_budget(budget_s)
    given = _LR_TARGET.read(target, loader, model=model, optimizer=optimizer)
    if isinstance(given, RunSpec):
        check_options(**options)
        with say_what_was_interrupted("find_lr"):
            return read_lr_result(experiments.run_lr_range(given, options={**options, "measuring_s": budget_s}, runs_dir=runs_dir))
    if isinstance(given, Run):
        return read_lr_result(given)
    from workbench.batch.measure.lr_range import find

    with Waiting("find_lr", budget_s, begin=f"{sweeps} sweeps of {iterations} steps, then a race of learning rates") as line:

        def progress(taken: int, planned: int, lr: float, loss: float) -> None:
            line.say(f"step {taken} of about {planned}")

        return find(given.step, given.loader, model=model, optimizer=optimizer, budget_s=budget_s, progress=progress, **options)  # type: ignore[arg-type]


def read_lr_result(run: Run) -> LrFound:
    """The result of `find_lr(spec)` in a run directory.

    Raises:
        ValueError: the run was not made by it.
    """
    path = run.path / run_directory.LR_RANGE
    if not path.exists():
        raise ValueError(f"{run!r} has no search for a learning rate: find_lr(spec) makes one, in a launch of its own")
    return LrFound.from_json(run_directory.read_json(path))


@accept_synonyms
def noise_scale(
    target: RunSpec | Run | str | os.PathLike[str] | Callable[[Any], Any],
    loader: Iterable[Any] | None = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    steps: int | None = None,
    micro_batch: int | None = None,
    exact: bool = False,
    samples: int | None = None,
    budget_s: float | None = 60.0,
    runs_dir: str | os.PathLike[str] | None = None,
) -> "NoiseScale":
    """Measure the gradient noise scale B = tr Σ / |G|²: roughly the batch size, in samples, above which more samples per step gain less.

    * `noise_scale(spec)` launches the spec for `steps` steps (DDP, FSDP2, accumulation). With one rank and no accumulation, each
      micro-batch is split in two.
    * `noise_scale(run)` reads what a run with `noise_scale=True` has measured so far, also while it runs or after it failed. So does
      `run.noise_scale`. With `noise_scale=10` every tenth step is measured, at a tenth of the cost.
    * `noise_scale(step, loader)` takes steps in this process and restores everything. `step(batch)` does one whole optimizer step with two
      or more backward passes (accumulation), or runs on one of several ranks, all of which call this.
    * `noise_scale(spec, exact=True)` computes the gradient of each sample in this process, with the initial weights of a run: exact, but
      slow, and meant for small models.
    * A loop of your own, while it trains: `with workbench.batch.measure.noise_watch.NoiseWatch(model, optimizer, micro_batch=32) as watch`.

    Args:
        target: a RunSpec, the name of a task, a run, the path of a run directory, or a step function.
        loader: with a step: its batches, from a DataLoader or any other iterable.
        model: with a step: the module that is trained; None = the module that the step uses.
        optimizer: with a step: the optimizer; None = likewise.
        steps: number of steps; None = 200. The result says whether they were enough, and how many more are needed.
        micro_batch: with a step: samples of one backward pass; None = those of a batch, divided by the number of backward passes.
        exact: use the gradients of single samples.
        samples: with `exact`: how many samples; None = the whole dataset.
        budget_s: approximate seconds for the steps, the start of a launch included; None = no limit. When they are over, or at Ctrl-C, what
            was measured is returned, with a note. Without `steps`, it ends as soon as the estimate is good enough.
        runs_dir: with a spec: where its run directory goes; None = `runs` in the current folder.

    Returns:
        A NoiseScale: the estimate, its interval, whether the steps were enough, and how it changed over the training.

    Raises:
        ValueError: something else was given, or what was given cannot be measured; the message says why.
        RunError: the launch failed before two steps were done; its run directory stays.
    """
    if exact:
        target = read_spec("noise_scale", target, because="for exact=True", instead=_OWN_MODEL)
    given = _NOISE_TARGET.read(
        target, loader, model=model, optimizer=optimizer, step_only={"micro_batch": micro_batch}, steps=None if exact else steps
    )
    if isinstance(given, RunSpec) and exact:
        return _exact(given, samples=samples, steps=steps)
    if samples is not None:
        raise ValueError(f"noise_scale(…, samples={samples!r}): it needs exact=True, which computes the gradients of that many samples")
    if isinstance(given, Run):
        measured: NoiseScale = given.noise_scale
        return measured
    check_budget(budget_s)
    count = whole_number("steps", NOISE_STEPS if steps is None else steps, least=2, also="; some 100 give an estimate worth having")
    if isinstance(given, RunSpec):
        return _launched(given, count, runs_dir, budget_s, early=steps is None)
    from workbench.batch.measure.noise_watch import MIN_STEPS, measure

    with Waiting("noise_scale", budget_s, begin=f"{count} steps") as line:

        def go_on(done: int) -> bool:
            line.say(f"step {done} of {count}")
            return done < MIN_STEPS or line.left > 0

        return measure(given.step, given.loader, model=model, optimizer=optimizer, steps=count, micro_batch=micro_batch, go_on=go_on)


def _launched(spec: RunSpec, steps: int, runs_dir: str | os.PathLike[str] | None, budget_s: float | None, *, early: bool) -> "NoiseScale":
    changed, notes = _with_groups(spec.replace(steps=steps, profile=None, **UNEVALUATED))
    run = launch(changed, runs_dir=runs_dir, name="noise-scale")
    stopped = ""
    with Waiting("noise_scale", budget_s, begin=f"{steps} steps at most") as line:
        watch = _NoiseWatcher(run, line, steps, early)
        try:
            wait_for(run, tick=watch.tick, check=False)
        except KeyboardInterrupt:
            if watch.steps < 2:
                raise
            stopped = f"{INTERRUPTED} after {watch.steps} of {steps} steps: this is the result so far"
    stopped = stopped or watch.stopped
    error = None if stopped else error_of(run)
    notes += [stopped] if stopped else []
    try:
        measured: NoiseScale = run.noise_scale
    except ValueError:
        if error is None:
            raise
        raise error from None
    if error is not None:
        notes.append(f"the run ended early ({error.failure.message.splitlines()[0]:.100}): this is the result so far")
    return dataclasses.replace(measured, notes=(*notes, *measured.notes))


class _NoiseWatcher:
    """Looks at a run that measures its noise scale, and stops it when the estimate is good enough or the time is up."""

    def __init__(self, run: Run, line: Waiting, steps: int, early: bool) -> None:
        self._run, self._line, self._planned, self._early = run, line, steps, early
        self._next = 0.0
        self.steps = 0
        """That were measured."""
        self.stopped = ""
        """Why it was stopped."""

    def tick(self) -> None:
        """To be called again and again."""
        self._line.tick()
        if self.stopped or self._line.seconds < self._next:
            return
        self._next = self._line.seconds + NOISE_LOOK
        try:
            now: NoiseScale = self._run.noise_scale
        except ValueError:  # too few steps yet
            return
        self.steps, taken = now.steps, max(now.steps, self._run.progress[0])  # the first steps are left out while the scale still changes
        self._line.say(f"step {taken} of {self._planned}" + f", the last {self.steps} count" * (taken > self.steps), now.summary)
        if self._early and now.steps >= MIN_NOISE_STEPS and now.enough:
            self.stopped = f"{now.steps} steps were enough"
        elif self._line.left <= 0:
            self.stopped = f"the budget was spent after {taken} of {self._planned} steps: a larger budget_s= makes the interval narrower"
        if self.stopped:
            self._run.stop()


def _with_groups(spec: RunSpec) -> tuple[RunSpec, list[str]]:
    """A spec with two or more groups in a step, and notes on what was changed."""
    if spec.accumulation * spec.data_ranks >= 2:
        return spec.replace(noise_scale=1), []
    if spec.micro_batch == AUTO:
        return spec.replace(accumulation=2, noise_scale=1), [
            "measured with two micro-batches per step, so that there are groups to compare"
        ]
    if spec.micro_batch < 2:
        raise SpecError(
            "micro_batch=1, accumulation=1 and one rank: one sample per step cannot be compared with others; try micro_batch=32"
        )
    half = spec.micro_batch // 2
    changed = spec.replace(micro_batch=half, accumulation=2, noise_scale=1)
    return changed, [f"measured with 2 × {half} samples per step instead of {spec.micro_batch}, so that there are groups to compare"]


def _exact(spec: RunSpec, *, samples: int | None, steps: int | None) -> "NoiseScale":
    if steps is not None:
        raise ValueError(f"noise_scale(spec, exact=True, steps={steps!r}): no step is taken; set the number of samples by samples=…")
    from workbench.batch.measure.per_sample import exact_noise_of

    return exact_noise_of(spec, samples=samples)
