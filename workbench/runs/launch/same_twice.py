"""same_twice: trains a spec twice, and names the first step, rank and part in which the two trainings differ."""

import os
from dataclasses import dataclass
from typing import Any

from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.runs.launch.launch import check, check_timeout
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.launch.prove_resume import HINTS, PARTS, STEPS, Difference, first_difference, several, start
from workbench.runs.run import Run
from workbench.runs.spec import AUTO, SHARDED, RunSpec, SpecError
from workbench.runs.target import read_spec


def trained(run: Run, timeout: float | None) -> Run:
    """The run, when it has ended well."""
    try:
        return run.wait(timeout, check=True)
    except TimeoutError:
        run.stop()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatProof(JsonDataclass, display.Shown):
    """Whether two trainings of one spec are the same, bit for bit."""

    steps: int
    """Steps of each training."""
    ranks: int
    """Ranks of each."""
    difference: Difference | None
    """Where they differ first; None = nowhere."""
    first: str
    """Run directory of the first training."""
    second: str
    """Run directory of the second."""

    @property
    def same(self) -> bool:
        """Are all steps, and what the trainings end with, the same bit for bit?"""
        return self.difference is None

    @property
    def verdict(self) -> str:
        """The answer in words, with what to do."""
        what = f"two trainings of {several(self.steps, 'step')} on {several(self.ranks, 'rank')}"
        if (first := self.difference) is None:
            return f"The same: {what} are equal bit for bit, in samples, random numbers, losses, gradients and weights."
        at = f"at the end, on rank {first.rank}" if first.step > self.steps else f"in step {first.step}, on rank {first.rank}"
        return f"Not the same: {what} differ first {at}: {PARTS[first.part]} ({HINTS[first.part]})."

    @property
    def table(self) -> display.Table:
        """What was compared, in the order in which a step uses it, and the verdict."""
        parts, first = list(PARTS), self.difference
        place = parts.index(first.part) if first else len(parts)
        rows = [[PARTS[part], "equal" if number < place else "differs first" if number == place else "not compared"]
                for number, part in enumerate(parts)]  # fmt: skip
        step = "all steps" if first is None else f"step {first.step}, rank {first.rank}"
        return display.Table(columns=("part", step), rows=rows, title="Trained twice", note=self.verdict)

    def __repr__(self) -> str:
        return f"RepeatProof(same={self.same}, steps={self.steps}, ranks={self.ranks})"


def same_twice(
    target: RunSpec | str, *, timeout: float | None = 600.0, runs_dir: str | os.PathLike[str] | None = None, **knobs: Any
) -> RepeatProof:
    """Train a spec twice and compare a digest of all that each step depends on and computes, on each rank.

    Args:
        target: a RunSpec or the name of a task; at most 60 steps are trained, unless `steps=` is among the knobs.
        timeout: seconds that each training may take; None = any.
        runs_dir: where the two run directories go; None = `runs` in the current folder.
        **knobs: fields of the RunSpec to change, such as deterministic=True.

    Raises:
        ValueError: it is neither.
        SpecError: no such knob, or the ranks share the model.
        LaunchError: it cannot be launched here.
        RunError: a training failed.
        TimeoutError: it took too long; it was stopped.
    """
    check_timeout(timeout)
    spec = read_spec("same_twice", target, because="which is trained twice")
    spec = spec.replace(**{"steps": min(spec.steps, STEPS), **knobs})
    if spec.micro_batch == AUTO:
        raise LaunchError('micro_batch="auto": each training could choose another; give same_twice(…, micro_batch=…) a number')
    if spec.parallel in SHARDED or spec.tensor_parallel > 1:
        raise SpecError(f'same_twice() with parallel="{spec.parallel}": no rank holds the whole model; try parallel="ddp"')
    check(spec)
    runs = [trained(start(spec, runs_dir, name), timeout) for name in ("first", "second")]
    first, second = (run.path for run in runs)
    difference = first_difference(first, second, spec.world_size)
    return RepeatProof(steps=spec.steps, ranks=spec.world_size, difference=difference, first=str(first), second=str(second))
