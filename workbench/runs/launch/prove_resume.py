"""prove_resume: does a training that is killed and resumed end bit for bit as one that was not? same_twice: is it repeatable at all?"""

import contextlib
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import run_directory, units
from workbench.core.brief import Briefed
from workbench.core.checks import whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.progress import Waiting, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.core.units import several
from workbench.runs.entrypoints import spec_entrypoint
from workbench.runs.launch import prove_layout_resume as layouts
from workbench.runs.launch.experiments import wait_for
from workbench.runs.launch.launch import check, check_timeout, label, launch, script_spec
from workbench.runs.launch.new_run import LaunchError, NewRun
from workbench.runs.launch.prove_layout_resume import LayoutResumeProof
from workbench.runs.launch.prove_script_resume import ScriptResumeProof, check_given, check_named, prove_script_resume
from workbench.runs.launch.resume import take_checkpoints
from workbench.runs.rows import PARTS, Difference, digest_rows, first_difference, unrecorded
from workbench.runs.run import Run
from workbench.runs.spec import AUTO, RunSpec
from workbench.runs.target import read_spec

STEPS = 60
"""Steps that are trained at most, unless `steps=` is given: what a checkpoint leaves out shows in the first step after it."""
HINTS = {
    "weights": "the step before computed the same gradients and another result: an optimizer with a state beside its state_dict, or "
    "arithmetic that is not repeatable",
    "buffers": "a buffer that is changed outside of the step, or not persistent (register_buffer(…, persistent=False))",
    "optimizer": "the optimizer's load_state_dict does not restore what its state_dict has",
    "schedule": "the schedule counts steps that the checkpoint does not know",
    "scaler": "the gradient scaler was not restored",
    "ema": "the averaged weights were not restored",
    "compression": "what PowerSGD left out of each rank's gradients, its matrices or its random numbers were not restored",
    "samples": "the sampler does not go on where it was: a dataset whose length has changed, or one that orders its samples by itself",
    "batch": "the samples are the same, their content is not: augmentation with a generator of its own that the workbench cannot seed "
    "(such as np.random.default_rng()), a count that the dataset keeps, the time, hash() of a string or the order of a set of strings, or "
    "files that have changed",
    "random": "something draws random numbers outside of the steps, or in another order",
    "loss": "all that goes into the forward is the same: arithmetic that is not repeatable (try deterministic=True), "
    "a state that the model keeps outside of its state_dict, or, in model or loss, the time, hash() of a string or the order of a set of "
    "strings (labels from list(set(…)))",
    "own gradients": "the loss is the same: the backward is not repeatable, try deterministic=True",
    "gradients": "the loss is the same: the ranks' gradients are added in another order (with three ranks or more that shows), or the "
    "backward is not repeatable: try deterministic=True",
}


LOADED = (
    "it is the first step after the resume, and what was loaded is not what was saved: a module that changes weights while it loads them "
    "(_load_from_state_dict, a hook of load_state_dict)"
)
"""What makes the weights differ there."""


def hint(first: Difference, resumed_from: int | None = None) -> str:
    """What usually makes this part of a step differ first. It may be in the first step after a resume from so many steps."""
    if first.part == "weights" and resumed_from is not None and first.step == resumed_from + 1:
        return LOADED
    if first.part == "weights" and first.step == 1:
        return "the initial weights are not repeatable: a task that seeds its model itself, or draws it from a generator of its own"
    return HINTS[first.part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(JsonDataclass):
    """A kill of the training, and how it went on."""

    step: int
    """The step in which a rank was killed, from 1."""
    rank: int
    """The rank that was killed, by SIGKILL."""
    resumed_from: int
    """Steps of the checkpoint from which it went on."""
    restart_s: float
    """Seconds from the call that resumed it to the first step that was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeProof(Briefed, display.Shown):
    """Whether a training that is killed and resumed ends bit for bit like one that is not."""

    steps: int
    """Steps of each training."""
    ranks: int
    """Ranks of each."""
    kills: tuple[Kill, ...]
    """The kills, in order."""
    difference: Difference | None
    """Where the two trainings differ first; None = nowhere."""
    undisturbed: str
    """Run directory of the training that was not killed."""
    interrupted: str
    """Run directory of the one that was."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; None = not recorded."""

    @property
    def exact(self) -> bool:
        """Whether all steps after each resume, and the end of the training, are bit for bit those of the undisturbed training."""
        return self.difference is None

    @property
    def verdict(self) -> str:
        """The answer in words, with what to do."""
        killed = f"killed {several(len(self.kills), 'time')} in {several(self.steps, 'step')} on {several(self.ranks, 'rank')}"
        if self.difference is None:
            return (
                f"Exact: {killed}, the training ends bit for bit as the undisturbed one. Samples, random numbers, losses and gradients of "
                "each step, weights, optimizer and schedule are the same."
            )
        first = self.difference
        at = f"{'at the end' if first.step > self.steps else f'in step {first.step}'}, on rank {first.rank}"
        what = f"{PARTS[first.part]} ({hint(first, self.kills[first.kills - 1].resumed_from if first.kills else None)})"
        if not first.kills:
            return (
                "Not repeatable: two trainings with the same seed differ before the first kill, so no checkpoint can make them equal. "
                f"The first difference is {at}: {what}."
            )
        kill = self.kills[first.kills - 1]
        return (
            f"Not exact: {killed}, the training differs from the undisturbed one first {at}, after it went on from step "
            f"{kill.resumed_from}: {what}."
        )

    @property
    def table(self) -> display.Table:
        """A row per kill, and the verdict."""
        rows = [
            [f"step {kill.step}", f"{kill.rank}", f"step {kill.resumed_from}", units.seconds(kill.restart_s), self._after(number)]
            for number, kill in enumerate(self.kills, 1)
        ]
        title = "Killed and resumed" + f"; a checkpoint every {self.checkpoint_every} steps" * bool(self.checkpoint_every)
        columns = ("killed in", "rank killed", "resumed from", "time to the first step", "steps after it")
        return display.Table(columns=columns, rows=rows, title=title, note=self.verdict)

    def _after(self, number: int) -> str:
        first = self.difference
        if first is None or first.kills > number:
            return "equal"
        return "differs" if first.kills == number else "not compared"

    def __repr__(self) -> str:
        return f"ResumeProof(exact={self.exact}, steps={self.steps}, ranks={self.ranks}, kills={len(self.kills)})"


@accept_synonyms
def prove_resume(
    target: RunSpec | str | os.PathLike[str],
    *,
    args: Sequence[str] = (),
    result: str | None = None,
    kills: int = 2,
    during_save: bool = False,
    seed: int = 0,
    timeout: float | None = 600.0,
    runs_dir: str | os.PathLike[str] | None = None,
    resumed: Mapping[str, Any] | None = None,
    **knobs: Any,
) -> ResumeProof | ScriptResumeProof | LayoutResumeProof:
    """Train twice, kill one of the two trainings at random steps and resume it from its checkpoints, and compare both bit for bit.

    Both write a digest of each step on each rank: samples, batch, random numbers, weights, buffers, optimizer, schedule, gradient scaler,
    loss and gradients, and under DDP also the gradients of each rank's own samples before the reduction. If the two differ, the result
    names the first step, rank and item that does.

    A script writes its own checkpoints. It is killed after random steps, once it has written into its folder (or while it writes there),
    and launched again. The files that it has written at its end are compared. A script that starts from the first step again is not exact.

    With `resumed=` it is killed once and continues in another layout. States and samples must then be the same, and losses and final
    weights the same up to rounding; the result says what could not be compared.

    Args:
        target: a RunSpec, the name of a task, or the path of a script. A spec trains for at most 60 steps, unless `steps=` is among the
            knobs, and writes a checkpoint after each sixth of them, unless its own `checkpoint_every` leaves room for the kills.
        args: arguments of a script. "{out}" in them stands for the folder where it reads and writes its checkpoints.
        result: for a script: the file in that folder to compare, such as "last.pt"; it should hold weights, optimizer and all other states.
        kills: how often a random rank is killed by SIGKILL, each time in another step; with `resumed=` once.
        during_save: for a script: kill it while it writes a file into its folder, to test whether it survives a truncated checkpoint. Where
            a rank is seen saving, files that child processes write at the same time are not cut.
        seed: seed for the choice of steps and ranks.
        timeout: seconds that each of the trainings may take; None = any.
        runs_dir: where the two run directories go; None = `runs` in the current folder.
        resumed: for a spec: knobs of the layout in which it continues, such as {"nproc_per_node": 1, "micro_batch": 8}, with as many
            samples in a step; None = the same layout.
        **knobs: fields of the RunSpec to change, as in `spec.replace`; for a script, arguments of `launch` such as nproc_per_node.

    Raises:
        ValueError: not a spec or a script, an argument that a script needs is missing, or too few steps for so many kills.
        SpecError: no such knob, or checkpoints cannot be written with these knobs.
        LaunchError: it cannot be launched here.
        RunError: a training failed by itself.
        TimeoutError: it took too long; it was stopped.
    """
    check_timeout(timeout)
    whole_number("kills", kills, least=1, error=ValueError)
    if isinstance(target, str | os.PathLike) and os.fspath(target).endswith(".py"):
        if resumed is not None:
            raise ValueError(f"prove_resume('{target}', resumed=…): a script's layout is in its own arguments; only a RunSpec takes it")
        result = check_given(target, args, result)
        args = [os.fspath(arg) if isinstance(arg, os.PathLike) else str(arg) for arg in args]
        check_named(script_spec(target, {}).script, args, result)
        given: dict[str, Any] = {"args": args, "result": result, "kills": kills, "seed": seed, "timeout": timeout} | knobs
        folder = NewRun(runs_dir, f"{Path(target).stem}-resume").path
        with _waiting(kills, timeout, "script") as line:
            return prove_script_resume(target, folder=folder, during_save=during_save, say=line.say, **given)
    if args or result or during_save:
        name = "args" if args else "result" if result else "during_save"
        raise ValueError(f"prove_resume(…, {name}=…) with a RunSpec: only a script takes it")
    spec = _prepared(read_spec("prove_resume", target, because="whose training is killed and resumed"), knobs, kills)
    if resumed is not None:
        return _prove_elsewhere(spec, resumed, seed, timeout, runs_dir, knobs)
    assert spec.checkpoint_every is not None
    choices = range(spec.checkpoint_every + 1, spec.steps + 1)
    if len(choices) < kills:
        raise ValueError(
            f"kills={kills} with steps={spec.steps} and checkpoint_every={spec.checkpoint_every}: a kill needs a checkpoint before it, so "
            f"that {max(0, len(choices))} steps are left; try steps={spec.checkpoint_every + 10 * kills}"
        )
    check(spec)
    chosen = random.Random(seed)
    planned = [(step, chosen.randrange(spec.world_size)) for step in sorted(chosen.sample(choices, kills))]
    with _waiting(kills, timeout, "training") as line:
        return _prove(spec, planned, timeout, runs_dir, line)


@contextlib.contextmanager
def _waiting(kills: int, timeout: float | None, what: str) -> Iterator[Waiting]:
    limit = "" if timeout is None else f" (at most {units.seconds(timeout)} for each launch)"
    begin = f"an undisturbed {what}, then one that is killed {several(kills, 'time')}{limit}"
    with say_what_was_interrupted("prove_resume"), Waiting("prove_resume", None, begin=begin) as line:
        yield line


def _ended(run: Run, now: str, timeout: float | None, line: Waiting) -> Run:
    """The run, when it has ended; `now` says meanwhile what it is for."""
    limit = math.inf if timeout is None else time.monotonic() + timeout

    def tick() -> None:
        line.say("{}, {} of {} steps".format(now, *run.progress))
        if time.monotonic() > limit:
            raise TimeoutError(f"{run!r} still ran after {units.seconds(timeout)}, and was stopped")

    return wait_for(run, tick=tick, check=False)


def _prove(
    spec: RunSpec, planned: Sequence[tuple[int, int]], timeout: float | None, runs_dir: str | os.PathLike[str] | None, line: Waiting
) -> ResumeProof:
    now, kills = "the undisturbed training", len(planned)

    def _wait(run: Run) -> Run:
        return _ended(run, now, timeout, line)

    def _trained(run: Run) -> Run:
        """The run, when it has ended well; else RunError."""
        return _wait(run).wait(check=True)

    undisturbed = _trained(start(spec, runs_dir, "undisturbed")).path
    run = start(spec, runs_dir, "interrupted", planned[0])
    done = []
    for number, (step, rank) in enumerate(planned, 1):
        now = f"rank {rank} is killed in step {step} (kill {number} of {kills})"
        _wait(run)
        if run.state != "failed":
            _trained(run)
            raise LaunchError(f"{run!r} ended before step {step}, in which it was to be killed: its task ends a training by itself")
        _plan(run.path, planned[number] if number < kills else None)
        begun, now = time.time(), f"resumed after kill {number} of {kills}"
        run = _wait(launch(resume=run, timeout=timeout))
        rows = {step: row for (step, of), row in digest_rows(run.path, number + 1).items() if not of}
        if not rows:
            _trained(run)
        first = min(rows)
        done.append(Kill(step=step, rank=rank, resumed_from=first - 1, restart_s=max(0.0, rows[first]["time"] - begun)))
    _trained(run)
    return ResumeProof(
        steps=spec.steps,
        ranks=spec.world_size,
        kills=tuple(done),
        difference=first_difference(undisturbed, run.path, spec.world_size),
        undisturbed=str(undisturbed),
        interrupted=str(run.path),
        checkpoint_every=spec.checkpoint_every,
    )


def _prove_elsewhere(
    spec: RunSpec,
    layout: Mapping[str, Any],
    seed: int,
    timeout: float | None,
    runs_dir: str | os.PathLike[str] | None,
    knobs: Mapping[str, Any],
) -> LayoutResumeProof:
    if not knobs.get("checkpoint_every") and spec.steps % (spec.checkpoint_every or 1):  # so that there is one at the end
        spec = spec.replace(checkpoint_every=next(n for n in range(math.ceil(spec.steps / 6), spec.steps + 1) if spec.steps % n == 0))
    other, every = layouts.resumed_spec(spec, layout, knobs.get("checkpoint_every")), spec.checkpoint_every
    assert every is not None
    for each in (spec, other):
        check(each)
    chosen = random.Random(seed)
    kill = chosen.randrange(every + 1, spec.steps + 1), chosen.randrange(spec.world_size)
    with _waiting(1, timeout, "training") as line:

        def wait(run: Run, now: str) -> Run:
            return _ended(run, now, timeout, line)

        undisturbed = wait(start(spec, runs_dir, "undisturbed"), "the undisturbed training").wait(check=True)
        killed = wait(start(spec, runs_dir, "interrupted", kill), f"rank {kill[1]} is killed in step {kill[0]}")
        if killed.state != "failed":
            killed.wait(check=True)
            raise LaunchError(f"{killed!r} ended before step {kill[0]}, in which it was to be killed: its task ends a training by itself")
        begun = time.time()
        run = wait(start(other, runs_dir, "resumed", source=killed), "resumed in the other layout").wait(check=True)
    mine, its = digest_rows(undisturbed.path, "last"), digest_rows(run.path, "last")
    went_on, tolerance = min(step for step, _ in its), layouts.ROUNDING[spec.precision]
    again = first_difference(undisturbed.path, killed.path, spec.world_size)
    part, step, losses = layouts.first_difference((spec, mine), (other, its), tolerance)
    compared, left_out = layouts.comparable((spec, mine), (other, its))
    weights = layouts.distance(undisturbed.path, run.path)
    if again:
        part, step = "repeatable", again.step
    elif not part and not weights <= tolerance:
        part, step = "final weights", spec.steps
    return LayoutResumeProof(
        steps=spec.steps,
        ranks=(spec.world_size, other.world_size),
        compared=compared,
        not_compared=left_out,
        layout={name: value for name, (_, value) in spec.changes(other).items()},
        killed_in=kill[0],
        resumed_from=went_on - 1,
        restart_s=max(0.0, its[went_on, 0]["time"] - begun),
        part=part,
        step=step,
        losses=losses,
        weights=weights,
        tolerance=tolerance,
        undisturbed=str(undisturbed.path),
        resumed=str(run.path),
    )


def _prepared(spec: RunSpec, knobs: Mapping[str, Any], kills: int = 1) -> RunSpec:
    spec = spec.replace(**{"steps": min(spec.steps, STEPS), **knobs})
    every = spec.checkpoint_every
    if not knobs.get("checkpoint_every") and (every or 0) + kills > spec.steps:
        every = None
    if spec.micro_batch == AUTO:
        raise LaunchError('micro_batch="auto": each of the trainings could choose another; give prove_resume(…, micro_batch=…) a number')
    return spec if every else spec.replace(checkpoint_every=max(1, math.ceil(spec.steps / 6)))


def start(
    spec: RunSpec, runs_dir: str | os.PathLike[str] | None, name: str, kill: tuple[int, int] | None = None, *, source: Run | None = None
) -> Run:
    """Start a training whose ranks write fingerprints, from the checkpoints of another run if one is given."""
    new = NewRun(runs_dir, f"{label(spec)}-{name}")
    (new.path / run_directory.FINGERPRINTS).mkdir()
    _plan(new.path, kill)
    if source:
        take_checkpoints(source, new)
    return new.start(spec, spec_entrypoint(spec, new.path))


def _plan(path: Path, kill: tuple[int, int] | None) -> None:
    plan = path / run_directory.FINGERPRINTS / run_directory.KILL
    if kill is None:
        plan.unlink(missing_ok=True)
    else:
        run_directory.write_json(plan, {"step": kill[0], "rank": kill[1]})


def trained(run: Run, timeout: float | None) -> Run:
    """The run, when it has ended well."""
    try:
        return run.wait(timeout, check=True)
    except TimeoutError:
        run.stop()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatProof(Briefed, display.Shown):
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
    not_recorded: tuple[str, ...] = ()
    """Keys of `PARTS` that a rank of either did not record in some step, and that could not be compared."""
    absent: tuple[str, ...] = ()
    """Keys of `PARTS` that such a training does not have, such as averaged weights without `ema`."""

    @property
    def same(self) -> bool:
        """Whether all that was recorded of all steps, and of the ends of the trainings, is the same bit for bit."""
        return self.difference is None

    @property
    def verdict(self) -> str:
        """The answer in words, with what to do."""
        what = f"two trainings of {several(self.steps, 'step')} on {several(self.ranks, 'rank')}"
        if (first := self.difference) is None:
            equal = [name for part, name in PARTS.items() if part not in (*self.not_recorded, *self.absent)]
            left_out = (
                f". Not recorded, so not compared: {', '.join(PARTS[part] for part in self.not_recorded)}" if self.not_recorded else ""
            )
            return f"The same: {what} are equal bit for bit, in {', '.join(equal[:-1])} and {equal[-1]}{left_out}."
        at = f"{'at the end' if first.step > self.steps else f'in step {first.step}'}, on rank {first.rank}"
        return f"Not the same: {what} differ first {at}: {PARTS[first.part]} ({hint(first)})."

    @property
    def table(self) -> display.Table:
        """What was compared, in the order in which a step uses it, and the verdict."""
        parts, first = list(PARTS), self.difference
        place = parts.index(first.part) if first else len(parts)
        known = dict.fromkeys(self.not_recorded, "not recorded") | dict.fromkeys(self.absent, "there are none")
        rows = [
            [PARTS[part], "differs first" if number == place else known.get(part, "equal" if number < place else "not compared")]
            for number, part in enumerate(parts)
        ]
        step = "all steps" if first is None else f"step {first.step}, rank {first.rank}"
        return display.Table(columns=("part", step), rows=rows, title="Trained twice", note=self.verdict)

    def __repr__(self) -> str:
        return f"RepeatProof(same={self.same}, steps={self.steps}, ranks={self.ranks})"


@accept_synonyms
def same_twice(
    target: RunSpec | str, *, timeout: float | None = 600.0, runs_dir: str | os.PathLike[str] | None = None, **knobs: Any
) -> RepeatProof:
    """Train a spec twice and compare digests of everything that each step depends on and computes, on each rank.

    Args:
        target: a RunSpec or the name of a task; at most 60 steps are trained, unless `steps=` is among the knobs.
        timeout: seconds that each training may take; None = any.
        runs_dir: where the two run directories go; None = `runs` in the current folder.
        **knobs: fields of the RunSpec to change, such as deterministic=True.

    Raises:
        ValueError: neither a RunSpec nor the name of a task.
        SpecError: no such knob.
        LaunchError: it cannot be launched here.
        RunError: a training failed.
        TimeoutError: it took too long; it was stopped.
    """
    check_timeout(timeout)
    spec = read_spec("same_twice", target, because="which is trained twice")
    spec = spec.replace(**{"steps": min(spec.steps, STEPS), **knobs})
    if spec.micro_batch == AUTO:
        raise LaunchError('micro_batch="auto": each training could choose another; give same_twice(…, micro_batch=…) a number')
    check(spec)
    first, second = (trained(start(spec, runs_dir, name), timeout).path for name in ("first", "second"))
    has = {"ema": spec.ema, "compression": spec.gradient_compression.startswith("powersgd"), "own gradients": spec.data_ranks > 1}
    return RepeatProof(
        steps=spec.steps,
        ranks=spec.world_size,
        difference=first_difference(first, second, spec.world_size),
        first=str(first),
        second=str(second),
        not_recorded=tuple(part for part in unrecorded((first, second), spec.steps, spec.world_size) if has.get(part, True)),
        absent=tuple(part for part, used in has.items() if not used),
    )
