"""`noise_scale`: how large a batch must be before its gradient is more signal than noise, measured while it trains."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from workbench.checks import whole_number
from workbench.launcher import launch
from workbench.launcher.waiting import error_of, wait_for
from workbench.run import Run
from workbench.spec import AUTO, RunSpec, SpecError
from workbench.target import Measured, check_spec

if TYPE_CHECKING:
    from workbench.batch.noise_scale import NoiseScale

STEPS = 200
"""Optimizer steps that are taken where nobody says."""


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
    runs_dir: str | os.PathLike[str] | None = None,
) -> "NoiseScale":
    """Measure the gradient noise scale B = tr Σ / |G|²: about the batch, in samples, from which more samples per step stop paying.

    * `noise_scale(spec)` trains in a launch of its own for `steps` steps, as the spec does (DDP, FSDP2, accumulation). A spec with one rank
      and without accumulation takes its micro-batches in two halves.
    * `noise_scale(run)` reads what a run with `noise_scale=True` has seen so far, also while it runs and after it failed; so does
      `run.noise_scale`. With `noise_scale=10` each tenth step is looked at, which costs a tenth.
    * `noise_scale(step, loader)` takes steps in this process and leaves everything as it was; `step(batch)` does one whole optimizer step
      of two or more backwards (accumulation), or on one of several ranks, all of which come here.
    * `noise_scale(spec, exact=True)` computes the gradient of each sample, in this process, with the weights that a run begins with: slow,
      and for small models, but it leaves nothing to chance.
    * A loop of your own, while it trains: `with workbench.measure.gradient_noise.NoiseWatch(model, optimizer, micro_batch=32) as watch`.

    Args:
        target: a RunSpec, a run, the path of a run directory, or a step function.
        loader: with a step: its batches, from a DataLoader or any other iterable.
        model: with a step: the module that is trained; None = found by looking at the step.
        optimizer: with a step: the optimizer; None = found as well.
        steps: how many are taken; None = 200. The result says whether they were enough, and how many more it takes.
        micro_batch: with a step: samples in one backward; None = those of a batch, divided by its backwards.
        exact: by the gradients of single samples.
        samples: with `exact`: of how many samples; None = all of the dataset.
        runs_dir: with a spec: where its run directory goes; None = `runs` in the current folder.

    Returns:
        A NoiseScale: the estimate, its interval, whether it is enough, and how it moved over the training.

    Raises:
        ValueError: something else was given, or what was given cannot be measured; the message says why.
        RunError: the launch failed before two steps were done; its run directory stays.
    """
    if exact:
        check_spec("noise_scale", target, because="for exact=True", instead=_OWN_MODEL)
    given = _TARGET.read(
        target, loader, model=model, optimizer=optimizer, step_only={"micro_batch": micro_batch}, steps=None if exact else steps
    )
    if isinstance(given, RunSpec) and exact:
        return _exact(given, samples=samples, steps=steps)
    if samples is not None:
        raise ValueError(f"noise_scale(…, samples={samples!r}): it goes with exact=True, which computes the gradients of so many samples")
    if isinstance(given, Run):
        return given.noise_scale
    count = _checked(steps)
    if isinstance(given, RunSpec):
        return _launched(given, count, runs_dir)
    from workbench.measure.noise_here import measure

    return measure(given.step, given.loader, model=model, optimizer=optimizer, steps=count, micro_batch=micro_batch)


def _launched(spec: RunSpec, steps: int, runs_dir: str | os.PathLike[str] | None) -> "NoiseScale":
    changed, notes = _grouped(spec.replace(steps=steps, evaluate=False, profile=None))
    run = launch(changed, runs_dir=runs_dir, name="noise-scale")
    error = error_of(wait_for(run, show=Run.progress_words, check=False))
    try:
        found = run.noise_scale
    except ValueError:
        if error is None:
            raise
        raise error from None
    if error is not None:
        notes.append(f"the run ended early ({error.failure.message.splitlines()[0]:.100}): this is what it had seen")
    return dataclasses.replace(found, notes=(*notes, *found.notes))


def _grouped(spec: RunSpec) -> tuple[RunSpec, list[str]]:
    """A spec that has two groups in a step, and what was changed for it."""
    if spec.accumulation * spec.data_ranks >= 2:
        return spec.replace(noise_scale=1), []
    if spec.micro_batch == AUTO:
        return spec.replace(accumulation=2, noise_scale=1), [
            "measured with two micro-batches per step, so that there are groups to compare"
        ]
    if spec.micro_batch < 2:
        raise SpecError(
            "micro_batch=1, accumulation=1 and one rank: one sample per step has nothing to be compared with; try micro_batch=32"
        )
    half = spec.micro_batch // 2
    changed = spec.replace(micro_batch=half, accumulation=2, noise_scale=1)
    return changed, [f"measured with 2 × {half} samples per step in the place of {spec.micro_batch}, so that there are groups to compare"]


def _exact(spec: RunSpec, *, samples: int | None, steps: int | None) -> "NoiseScale":
    if steps is not None:
        raise ValueError(f"noise_scale(spec, exact=True, steps={steps!r}): no step is taken; samples=… says of how many samples")
    from workbench.train.exact_noise import exact_noise_of

    return exact_noise_of(spec, samples=samples)


_TARGET = Measured(
    name="noise_scale",
    verb="measured",
    script="in a script: with workbench.measure.gradient_noise.NoiseWatch(model, optimizer, micro_batch=32) as watch: …, then "
    "watch.result()",
)
_OWN_MODEL = "of a model of your own: workbench.measure.per_sample.exact_noise_scale(model, loss, batches)"


def _checked(steps: Any) -> int:
    return whole_number("steps", STEPS if steps is None else steps, least=2, also="; some 100 give an estimate worth having")
