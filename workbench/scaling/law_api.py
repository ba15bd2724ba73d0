"""`scaling_law`: many small runs of several sizes of a model, in one launch, and the law of their losses."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from workbench.core.checks import is_whole, whole_number
from workbench.runs import task
from workbench.runs.launch.sweep import sweep
from workbench.runs.programs import COUNTING
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.target import check_spec
from workbench.runs.task import TaskError
from workbench.scaling.analysis.law.doubt import narrow
from workbench.scaling.analysis.law.law import ScalingLaw
from workbench.scaling.analysis.law.points import Points, PointsError

SIZED = "workbench.train.sized:gpt_"
"""The sample task in any width: this, and the width."""
SIZED_FROM = "text-gpt"
"""The sample task that has sizes."""
WINDOW = 64
"""Tokens that one of its samples counts."""


def scaling_law(
    spec: RunSpec,
    *,
    samples: Sequence[int],
    sizes: Sequence[int] | None = None,
    tasks: Sequence[str] | None = None,
    seeds: int = 1,
    tokens_per_sample: float | None = None,
    loss: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **options: Any,
) -> ScalingLaw:
    """Train every size on every amount of data, in as few launches as possible, and fit L(N, D) = E + A/N^α + B/D^β.

    Each run is trained to the end of its own learning-rate schedule: a loss on the way of a longer run would be too high. What cannot give
    a law is refused before anything is trained. Runs that fail are left out, with a note; their directories stay.

    Args:
        spec: what all runs have in common; its task and steps are replaced. schedule="cosine" with some warmup_steps is advised.
        samples: amounts of data, in samples; three or more, over a factor of 4 at least. Data that are seen twice count as new.
        sizes: widths of the sample task "text-gpt", multiples of 8; three or more, whose parameters span a factor of 4 at least.
        tasks: or names of tasks of your own, one for each size: ["my_task.py:small", "my_task.py:medium", …].
        seeds: runs of each, with seeds from that of the spec on.
        tokens_per_sample: what one sample counts; None = 64 for "text-gpt", 1 for tasks of your own: a law of samples.
        loss: name of the evaluation's figure that is the loss; None = the one that ends in "loss", else the smoothed training loss.
        runs_dir: where run directories go; None = `runs` in the current folder.
        quiet: do not print a line per finished run.
        **options: of `ScalingLaw.fit`.

    Raises:
        SpecError: no sizes, or a knob that is not allowed. Nothing was started.
        PointsError: too few sizes or amounts of data, or too close to each other (nothing was started), or too few runs have finished.
        TaskError: a task that cannot be built. Nothing was started.
    """
    check_spec("scaling_law", spec, error=SpecError)
    sizes, samples = None if sizes is None else _plain(sizes), _plain(samples)
    seeds = _plain([seeds])[0]
    names = _tasks(spec, sizes, tasks)
    steps = _steps(spec, samples)
    whole_number("seeds", seeds, least=1, error=SpecError)
    per = tokens_per_sample if tokens_per_sample is not None else float(WINDOW) if sizes is not None else 1.0
    counts = count(names)
    parameters = {name: float(found["parameters"] or 0) for name, found in counts.items()}
    planned = Points.of(
        [(parameters[name], number * spec.global_batch * per, 1.0) for name in names for number in steps for _ in range(seeds)]
    ).check()
    _wide(planned, "tasks" if sizes is None else "sizes", [one * spec.global_batch for one in steps])
    spec = spec.replace(evaluate=True) if sizes is not None else spec
    varied: dict[str, Any] = {"task": names, "steps": steps}
    if seeds > 1:
        varied["seed"] = range(spec.seed, spec.seed + seeds)
    runs = sweep(spec, runs_dir=runs_dir, quiet=quiet, **varied)
    notes = _notes(spec, steps, [found["samples"] for found in counts.values()], per)
    return ScalingLaw.from_runs(runs, parameters=parameters, tokens_per_sample=per, loss=loss, notes=notes, **options)


def count(tasks: Sequence[str]) -> dict[str, dict[str, int | None]]:
    """Parameters and samples of tasks, by their names; in a process of its own, which loads torch.

    Raises:
        TaskError: one of them cannot be built.
    """
    for name in tasks:
        task.check(name)
    command = [sys.executable, "-m", COUNTING, *tasks]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = " ".join(done.stderr.splitlines()[-1:]) or f"it ended with {done.returncode}"
        raise TaskError(f"the tasks {', '.join(tasks)} could not be built: {last}") from None
    if "error" in found:
        raise TaskError(found["error"])
    return found


def _tasks(spec: RunSpec, sizes: Sequence[int] | None, tasks: Sequence[str] | None) -> list[str]:
    if (sizes is None) == (tasks is None):
        given = "neither" if sizes is None else "both"
        raise SpecError(f'{given} of sizes= and tasks= given: one is wanted, sizes=[16, 32, 64] or tasks=["my_task.py:small", …]')
    if tasks is not None:
        if isinstance(tasks, str) or len(set(tasks)) < len(tasks):
            raise SpecError(f"tasks={tasks!r}: a list of different names is wanted, one for each size of the model")
        return list(tasks)
    assert sizes is not None
    if spec.task != SIZED_FROM and not spec.task.startswith(SIZED):
        raise SpecError(
            f'sizes= are those of "{SIZED_FROM}", and the task is {spec.task!r}: name a task for each size, tasks=["…:small", …]'
        )
    for width in sizes:
        if not is_whole(width, least=8) or width % 8:
            raise SpecError(f"sizes={list(sizes)!r}: widths that are multiples of 8 are wanted, such as [16, 32, 64]")
    if len(set(sizes)) < len(sizes):
        raise SpecError(f"sizes={list(sizes)!r} has one twice: for several runs of each there is seeds=2")
    return [f"{SIZED}{width}" for width in sizes]


def _steps(spec: RunSpec, samples: Sequence[int]) -> list[int]:
    """Optimizer steps for each amount of data."""
    batch = spec.global_batch
    whole = not isinstance(samples, str | int) and all(isinstance(one, int) and not isinstance(one, bool) for one in samples)
    if not whole or not samples or min(samples) < batch:
        example = [batch * steps for steps in (50, 100, 200)]
        raise SpecError(f"samples={samples!r}: a list of whole numbers of at least one batch ({batch}) is wanted, such as {example}")
    steps = [one // batch for one in samples]
    if len(set(steps)) < len(steps):
        raise SpecError(f"samples={list(samples)!r} are {steps} steps of {batch}: two are the same")
    return steps


def _plain(values: Any) -> Any:
    """Whole numbers of numpy as those of Python; everything else as it was, to be judged as it was given."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        return values
    return [int(one) if isinstance(one, Integral) and not isinstance(one, bool) else one for one in values]


def _wide(planned: Points, sized: str, samples: Sequence[int]) -> None:
    """Refuse runs that are too few or too close to each other to give a law.

    Raises:
        PointsError: fewer than three sizes or amounts of data, or less than a factor of 4 between the ends.
    """
    if (found := narrow(planned)) is None:
        return
    what, given, wanted = found
    most, fewest = max(samples), min(samples)
    remedy = f"samples={[fewest, 2 * fewest, max(4 * fewest, most)]}"
    if what == "parameters":
        remedy = "sizes=[8, 16, 32]" if sized == "sizes" else "tasks=[…] of smaller and larger models"
    raise PointsError(f"the {what} of these runs are {given}: {wanted}; nothing was started; try {remedy}")


def _notes(spec: RunSpec, steps: Sequence[int], sizes: Sequence[int | None], per: float) -> list[str]:
    """What to keep in mind about runs like these."""
    notes = [] if per != 1 else ["data are counted in samples, so FLOPs are per parameter and sample"]
    if spec.schedule == "constant":
        notes.append('constant learning rate: with schedule="cosine" every run would end lower, long ones more so')
    if spec.warmup_steps > min(steps) / 2:
        notes.append(f"the warm-up of {spec.warmup_steps} steps fills more than half of the shortest run ({min(steps)} steps)")
    most = max(steps) * spec.global_batch
    if (fewest := min((one for one in sizes if one is not None), default=most)) < most:
        notes.append(
            f"the longest runs see their {fewest:,} samples {most / fewest:.1f} times: data seen again teach less than the law thinks"
        )
    return notes
