"""wb.trace: traces some steps of this process, or of a run that it launches, with torch's profiler, and reads the files."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from workbench.core import run_directory
from workbench.core.checks import check_budget, whole_number
from workbench.core.progress import INTERRUPTED, Waiting, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.runs.launch.experiments import wait_for
from workbench.runs.launch.launch import label, launch
from workbench.runs.profile import ALL, STEPS, Profile
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.target import Measured
from workbench.runs.training_knobs import UNEVALUATED
from workbench.traces.analysis.captured import Captured, notes_in
from workbench.traces.analysis.reading import TraceError
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet

Ranks = Literal["all"] | int | Iterable[int]
_Step = Callable[[Any], Any]
_Where = str | os.PathLike[str] | None
_Given = RunSpec | Run | str | os.PathLike[str]
BUDGET = 60.0
"""Default of `budget_s`."""


class _More(TypedDict, total=False):
    steps: int
    shapes: bool
    stacks: bool
    memory: bool
    flops: bool
    budget_s: float | None


@overload
def trace(
    step: _Step, loader: Iterable[Any] | None = None, *, into: _Where = None, model: Any = None, optimizer: Any = None, **kw: Unpack[_More]
) -> Trace: ...
@overload
def trace(step: _Given, *, ranks: Ranks | None = None, wait: int | None = None, runs_dir: _Where = None, **kw: Unpack[_More]) -> Any: ...
@accept_synonyms
def trace(
    step: Callable[[Any], Any] | RunSpec | Run | str | os.PathLike[str],
    loader: Iterable[Any] | None = None,
    *,
    steps: int = STEPS,
    ranks: Ranks | None = None,
    wait: int | None = None,
    into: str | os.PathLike[str] | None = None,
    model: Any = None,
    optimizer: Any = None,
    shapes: bool = True,
    stacks: bool = False,
    memory: bool = False,
    flops: bool = False,
    budget_s: float | None = BUDGET,
    runs_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """Trace some steps with torch's profiler, and read the trace.

    * `trace(step, loader)` traces in this process. It first drains the prefetch queue, since a full queue hides a slow loader. As many
      steps run without the profiler, before and after. Model, optimizer, random generators and loader are restored.
    * `trace(spec)` launches the spec for long enough to get past warm-up and prefetch queue, and traces the chosen ranks.
    * `trace(run)` reads the traces of a run with `profile=`.

    `slowdown` of a trace says how much the profiler slowed the steps down, compared with other steps of the same run.

    Args:
        step: `step(batch)` does one whole optimizer step; or a RunSpec, a Run, or the path of a run directory.
        loader: with a step: its batches, from a DataLoader or any other iterable.
        steps: number of steps to trace.
        ranks: with a spec: the ranks to trace: a number, a list or "all"; None = the first.
        wait: with a spec: steps before the profiler starts; None = past warm-up and prefetch queue.
        into: with a step: the directory for the file, in which `tensorboard --logdir` with the plugin torch-tb-profiler finds it; None =
            `traces` in the current folder. A run has its own folder `traces`.
        model: with a step: the module, or several; None = those that the step uses.
        optimizer: with a step: the optimizer, or several; None = likewise.
        shapes: record the shapes of operators' inputs.
        stacks: record Python's call stacks: expensive, but they name what the host does between operators.
        memory: record each memory allocation.
        flops: let the profiler count FLOPs of operators.
        budget_s: approximate seconds, without the start of a launch; None = no limit. If `steps` would take longer, fewer are traced, but
            at least two, and a note says so; likewise at Ctrl-C, if at least one step has ended.
        runs_dir: with a spec: where its run directory goes; None = `runs` in the current folder.

    Returns:
        A Trace, or for several ranks a TraceSet, whose notes say which ranks have no trace.

    Raises:
        ValueError: what was given cannot be traced; the message says why.
        RunError: the run that was launched failed; its run directory stays.
        KeyboardInterrupt: Ctrl-C came before anything was traced.
        TraceError: the profiler wrote nothing that can be read, or the run has no traces.
    """
    check_budget(budget_s)
    options = {"shapes": shapes, "stacks": stacks, "memory": memory, "flops": flops}
    given = _TARGET.read(
        step,
        loader,
        model=model,
        optimizer=optimizer,
        step_only={"into": into},
        spec_only={"ranks": ranks, "wait": wait, "runs_dir": runs_dir},
    )
    if isinstance(given, Run):
        return of_run(given)
    if isinstance(given, RunSpec):
        profile = {"steps": steps, "ranks": 0 if ranks is None else ranks, "wait": wait, **options}
        with say_what_was_interrupted("trace"):
            run, note = _launched(given, profile, runs_dir, budget_s)
            found = of_run(run)
            return dataclasses.replace(found, notes=(*found.notes, note)) if note else found
    whole_number("steps", steps, least=2, also="; with 5 one sees how much they vary")
    Profile(steps=steps, shapes=shapes, stacks=stacks, memory=memory, flops=flops)  # refuses what is neither True nor False
    from workbench.traces.measure.capture import Options, capture

    folder = Path("traces" if into is None else into)
    about: dict[str, Any] = {"steps": steps, "into": folder, "options": Options(**options), "model": model, "optimizer": optimizer}
    with say_what_was_interrupted("trace"), Waiting("trace", budget_s, begin=f"{steps} steps are to be traced") as line:
        captured = capture(given.step, given.loader, line=line, **about)
        line.say("reading the trace")
        return Trace.load(captured.path)


def of_run(run: Run) -> Trace | TraceSet:
    """The traces of a run: a Trace of one rank, a TraceSet of several.

    Raises:
        TraceError: it has none, or they cannot be read.
    """
    paths = list(run.traces.values())
    profile = getattr(run.spec, "profile", None)
    if not paths:
        why = "it was launched without a profile: launch it with profile=5" if profile is None else _why_none(run)
        raise TraceError(f"{run!r} has no traces: {why}")
    several = profile is not None and (run.spec.world_size if profile.ranks == ALL else len(profile.ranks)) > 1
    if len(paths) == 1 and not several:
        return Trace.load(paths[0])
    traces = TraceSet.load(paths)
    return dataclasses.replace(traces, notes=(*traces.notes, *notes_in(run.path / run_directory.TRACES)))


def _why_none(run: Run) -> str:
    if run.state == "running":
        return f"it has done {run.progress[0]} steps, and they are written when all of the traced ones are over; wait for run.wait()"
    if notes := notes_in(run.path / run_directory.TRACES):
        return "; ".join(notes)
    least = run.spec.profile.least(run.spec.queue if isinstance(run.spec, RunSpec) else 0)
    return (
        f"it was {run.state} after {run.progress[0]} steps, before the traced ones were over; that takes {least} at least, fewer with a "
        'shorter one, such as profile={"steps": 3, "wait": 2}'
    )


def _launched(spec: RunSpec, profile: dict[str, Any], runs_dir: str | os.PathLike[str] | None, budget_s: float | None) -> tuple[Run, str]:
    """Train until the traced steps have been compared with others. The run, and a note if that was not reached."""
    try:
        parsed = Profile.of(profile)
    except ValueError as error:
        raise SpecError(f"trace({spec.task!r}, …): {error}") from None
    assert parsed is not None
    steps = parsed.good(spec.queue)
    changed = spec.replace(profile=parsed, steps=steps, warmup_steps=min(spec.warmup_steps, steps - 1), noise_scale=False, **UNEVALUATED)
    run = launch(changed, runs_dir=runs_dir, name=f"{label(spec)} trace")
    wanted = spec.world_size if parsed.ranks == ALL else len(parsed.ranks)
    line, ended = Waiting("trace", budget_s), INTERRUPTED

    def tick() -> None:
        nonlocal ended
        if not run.progress[0]:
            line.begin_again()
        elif line.left <= 0:
            (run.path / run_directory.FINISH).touch()  # its profilers look for it
            if sum(Captured.beside(path).exists() for path in run.traces.values()) == wanted:
                ended = "the budget ended"
                raise KeyboardInterrupt

    try:
        return wait_for(run, show=Run.progress_words, tick=tick), ""
    except KeyboardInterrupt:
        if not run.traces:
            raise
        return run, f"{ended} after {run.progress[0]} of {steps} steps"


_TARGET = Measured(
    name="trace",
    verb="traced",
    script='a script by its run, trace(wb.launch("train.py", watch=True, profile=5).wait())',
    file="a file that a profiler wrote is read by wb.Trace.load(path)",
)
