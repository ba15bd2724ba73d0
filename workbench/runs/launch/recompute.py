"""recompute: did a machine compute the steps of a run right? They are repeated on as many ranks, and compared bit for bit."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.core import run_directory, units
from workbench.core.brief import Briefed
from workbench.core.checks import whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.progress import Waiting
from workbench.core.synonyms import accept_synonyms
from workbench.core.units import several
from workbench.runs.compare import differences
from workbench.runs.entrypoints import spec_entrypoint
from workbench.runs.failure import RunError
from workbench.runs.launch.experiments import error_of, wait_for
from workbench.runs.launch.launch import check, check_timeout, label
from workbench.runs.launch.new_run import LaunchError, NewRun, Surroundings
from workbench.runs.launch.resume import refuse_code_of_others, refuse_links, take_checkpoints
from workbench.runs.restarts import checkpoints_of, step_of
from workbench.runs.rows import PARTS, digest_files, digest_rows
from workbench.runs.run import ACTIVE, Run
from workbench.runs.spec import AUTO, RunSpec
from workbench.runs.task import with_files_at
from workbench.runs.training_knobs import UNEVALUATED

VERDICTS: Mapping[str, str] = {
    "right": "the run and its repetition are the same, bit for bit",
    "wrong": "all repetitions agree bit for bit, and the run differs from them: this was computed wrongly in the run",
    "wrong now": "the run and a repetition agree bit for bit, and another repetition differs from both: this machine computes wrongly now",
    "inputs": "two repetitions agree, and the run had other inputs: the samples, their content or the random numbers have changed, or the "
    "checkpoint does not restore what they depend on; no machine is to blame for that",
    "elsewhere": "two repetitions agree, and the run differs from both, but it ran under other conditions, which may be the reason",
    "not restored": "two repetitions agree, and the run differs from both, but the checkpoint may not restore everything that a step "
    "depends on; no machine is blamed",
    "not repeatable": "two repetitions differ from each other, and the run differs from both, or one of them had other inputs: nothing can "
    "be said of a machine; try deterministic=True",
}
"""Verdict → what it means."""
INPUTS = ("samples", "batch", "random")
"""Parts of a step that no arithmetic makes."""
CONDITIONS = ("variables", "environment", "versions", "git", "code", "data")
"""Sections of what a run recorded in which a repetition has to agree with it before a machine is blamed."""
_NOT_CONDITIONS = ("boot", "branch")
_WHERE = {
    "weights": "the weights before the step: the update of the step before it, or memory",
    "buffers": "the buffers before the step: the step before it, or memory",
    "optimizer": "the optimizer's state before the step: the update of the step before it, or memory",
    "loss": "the loss: the forward, or memory",
    "own gradients": "the gradients of its own samples: the backward",
}
Record = Mapping[tuple[int, int], Mapping[str, str]]
"""(step, rank) → part of PARTS → what was recorded of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(JsonDataclass):
    """Where a computation differs first from two that agree."""

    step: int
    """The step, from 1; one more than the last where only what the training ends with differs."""
    part: str
    """A key of `PARTS`."""
    ranks: tuple[int, ...]
    """The ranks that differ in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation(Briefed, display.Shown):
    """Repeated steps of a run, and whether the run computed them correctly."""

    run: str
    """Its directory."""
    since: int
    """Steps of the checkpoint from which they were repeated; 0 = from the start."""
    until: int
    """The last step that was repeated."""
    ranks: int
    """Ranks of the run."""
    digests: bool
    """Has the run a digest of all parts of each step (`step_digests=True`)? If not, losses alone are compared."""
    alone: bool
    """Does each rank compute with a whole model of its own, and exchange nothing before its gradients are complete?"""
    verdict: str
    """A key of `VERDICTS`."""
    own_gradients: bool
    """Do the digests have each rank's gradients before they are reduced?"""
    fault: Fault | None
    """Where the run, or with "wrong now" a repetition, differs first; None = nowhere."""
    conditions: tuple[str, ...]
    """What was different when the run ran."""
    third: int | None
    """Steps of the checkpoint from which a third repetition began, to see whether checkpoints restore everything; 0 = from the start,
    None = there was none."""
    like_third: bool
    """Are the run and that third repetition the same, bit for bit, in the steps that both have?"""
    repetitions: tuple[str, ...]
    """Run directories of the repetitions."""

    @property
    def right(self) -> bool | None:
        """Whether everything was computed correctly; None = it cannot be told."""
        return {"right": True, "wrong": False, "wrong now": False}.get(self.verdict)

    @property
    def blamed(self) -> tuple[int, ...]:
        """The rank that computed wrongly, if the record shows it: an exchange between ranks can spread the error."""
        if self.fault is None or self.right is not False:
            return ()
        if self.ranks == 1:
            return self.fault.ranks
        told = self.digests and self.alone and self.fault.part != "gradients" and len(self.fault.ranks) == 1
        return self.fault.ranks if told else ()

    @property
    def explanation(self) -> str:
        """The verdict in words, with step, rank and item, and what to do."""
        compared = "all parts of each step" if self.digests else "the losses"
        text = f"Steps {self.since + 1} to {self.until} on {several(self.ranks, 'rank')}, {compared}: {VERDICTS[self.verdict]}"
        if (fault := self.fault) is None:
            return text + ". Earlier steps were not repeated; since= says from which, 0 from the start" * bool(self.since) + "."
        at = "at the end" if fault.step > self.until else f"in step {fault.step}"
        listed = f"rank{'s' * (len(fault.ranks) > 1)} {', '.join(map(str, fault.ranks))}"
        if not self.digests:
            text += f". It shows first {at}, in the loss of {listed}: something was wrong in that step, or in one before"
            text += "; with step_digests=True the rank would usually be known" * (self.ranks > 1 and self.alone)
        elif fault.part != "gradients":
            text += f". It differs first {at}, on {listed}, in {_WHERE.get(fault.part, PARTS[fault.part])}"
            if self.right is False and not self.blamed:
                text += "; ranks exchange what they compute there, so which of them was wrong is not known"
        elif self.own_gradients:
            text += f". It differs first {at}, in the reduced gradients of {listed}, though each rank's own are the same: "
            text += "the reduction, or a link between the ranks"
        else:
            text += f". It differs first {at}, in the gradients that {listed} holds: the backward of some rank, or the reduction"
        if self.conditions:
            text += f". Other conditions: {'; '.join(self.conditions)}"
        if self.verdict == "not restored":
            text += f". {self._unrestored}"
        if self.verdict == "wrong" and not self.digests:
            text += ". It was not recorded what its batches held: that the data are still the same is taken for granted"
        if self.verdict in ("wrong", "wrong now"):
            text += ". Test that machine's memory and processors, or train on another"
        return text + "."

    @property
    def _unrestored(self) -> str:
        """What a third repetition says of checkpoints, and what to do."""
        if self.third is None:
            return (
                "Whether it does could not be found out: there is no other checkpoint to repeat from, or that repetition failed or took "
                "longer than timeout= allows. wb.prove_resume names what checkpoints leave out"
            )
        third = f"A repetition from {f'step {self.third}' if self.third else 'the start'}"
        if self.like_third:
            return f"{third} agrees with the run: its checkpoints leave something out, and wb.prove_resume names it"
        if self.third > self.since:
            return f"{third} differs from all of them: checkpoints leave something out, and wb.prove_resume names it"
        return (
            f"{third} differs from all of them: either checkpoints leave something out, which wb.prove_resume names, or a step from "
            f"{self.third + 1} to {self.since} went wrong as well, which recompute(…, since={self.third}) shows"
        )

    @property
    def table(self) -> display.Table:
        """What was compared with what, and the verdict."""
        fault, rows = self.fault, []
        for number, path in enumerate(self.repetitions, 1):
            place = f", from step {self.third}" if number == 3 and self.third is not None else ""
            rows.append([f"repetition {number}{place}", Path(path).name])
        first = f"step {fault.step}, {fault.part}, ranks {', '.join(map(str, fault.ranks))}" if fault else "nowhere"
        rows.append(["first difference", first])
        return display.Table(columns=("", Path(self.run).name), rows=rows, title="Repeated on the same ranks", note=self.explanation)

    def __repr__(self) -> str:
        return f"Recomputation(verdict={self.verdict!r}, fault={self.fault!r})"


@accept_synonyms
def recompute(
    run: Run | str | os.PathLike[str],
    *,
    since: int | None = None,
    until: int | None = None,
    timeout: float | None = 600.0,
    runs_dir: str | os.PathLike[str] | None = None,
) -> Recomputation:
    """Find out whether steps of a run were computed correctly: repeat them from a checkpoint on as many ranks, and compare bit for bit.

    If the run and its repetition differ, a second repetition shows which of the three is different. If it is the run, a third repetition
    from an earlier checkpoint, or from the start, shows whether checkpoints restore everything. A machine is blamed only if the repetitions
    agree bit for bit, under the same conditions (versions, devices, torch's settings, code, data) and with the same inputs. If the training
    is not repeatable, or does not resume exactly, the result says so instead.

    With `step_digests=True`, a run writes a digest of all items of each step on each rank. The wrong item is then named, and the rank too,
    unless ranks exchange their results before the error shows. Without it, the losses of rank 0 are compared, and those of each rank in the
    last 16 steps. They show that something was wrong, and since which step at the latest, but not on which of several ranks.

    Args:
        run: a finished run of a RunSpec, or its directory. The code of its task is executed on this machine.
        since: the step of the checkpoint from which to repeat; 0 = from the start; None = the last checkpoint that has steps after it, or
            the start.
        until: the last step to repeat; None = the last of the run.
        timeout: seconds that each repetition may take; None = no limit. If the third repetition takes longer, the result does without it.
        runs_dir: where the repetitions go; None = `runs` in the current folder.

    Raises:
        ValueError: it is a run of a script, still runs, has no such checkpoint or step, or has recorded no step.
        LaunchError: it cannot be repeated here, its code belongs to another user, or its directory has symbolic links.
        RunError: a repetition failed.
        TimeoutError: a repetition took too long; it was stopped.
    """
    check_timeout(timeout)
    run = run if isinstance(run, Run) else Run.load(run)
    spec = _repeatable(run)
    digests = bool(digest_files(run.path))
    recorded = record(run.path, spec.world_size, digests)
    ranks = range(spec.world_size if digests else 1)
    begin, end, places = _span(run, since, until, recorded, ranks)
    check(spec)
    repetitions: list[Run] = []
    with Waiting("recompute", None, begin=f"steps {begin + 1} to {end} of {run.path.name}, on as many ranks") as line:

        def again(number: int, begin: int) -> Record:
            repeated = wait_for(
                started := _start(run, spec, begin, end, timeout, runs_dir),
                tick=lambda: line.say(f"repetition {number}: step {started.progress[0]} of {end}"),
                check=False,
            )
            if repeated.state == "timeout":
                raise TimeoutError(f"{repeated!r} took longer than {units.seconds(timeout)}, and was stopped")
            if error := error_of(repeated):
                raise error
            parts = record(repeated.path, spec.world_size, digests)
            if begin and min(record(repeated.path, spec.world_size, True))[0] != begin + 1:
                raise LaunchError(f"{repeated!r} did not go on from step {begin}: that checkpoint of {run!r} cannot be read")
            if gap := unrecorded(parts, begin, end, ranks):
                raise LaunchError(
                    f"{repeated!r} has recorded nothing of step {gap[0]} on rank {gap[1]}, so it cannot be compared with {run!r}"
                )
            repetitions.append(repeated)
            return within(parts, begin, end)

        own, one = within(recorded, begin, end), again(1, begin)
        conditions = [
            f"{name}: {before} in the run, {now} here"
            for section, name, (before, now) in differences([run, repetitions[0]])
            if section in CONDITIONS
            and name not in _NOT_CONDITIONS
            and not (section == "git" and None in (before, now))
            and not (begin and name == "first samples")  # those of the step with which it begins
        ]
        verdict, fault, third, like_third = "right", None, None, False
        if first_fault(own, one):
            verdict, fault = judge(own, one, again(2, begin), conditions)
        if verdict == "wrong" and fault and (restart := restart_before(run.path, fault.step)) != begin:
            verdict, place = "not restored", third_place(begin, places, restart)
            with contextlib.suppress(TimeoutError, LaunchError, RunError):  # what was found so far is to be told
                if place is not None:
                    elsewhere = again(3, place)
                    third, like_third = place, first_fault(own, elsewhere) is None
                    verdict = "wrong" if first_fault(one, elsewhere) is None else "not restored"
    exchanged = any(row.get("exchanges") for each in repetitions for row in digest_rows(each.path).values())
    return Recomputation(
        run=str(run.path),
        since=begin,
        until=end,
        ranks=spec.world_size,
        digests=digests,
        verdict=verdict,
        fault=fault,
        alone=spec.whole_models and spec.local_sgd == "none" and not exchanged,
        third=third,
        like_third=like_third,
        own_gradients=any("own gradients" in parts for parts in own.values()),
        repetitions=tuple(str(each.path) for each in repetitions),
        conditions=tuple(conditions) if verdict == "elsewhere" else (),
    )


def _repeatable(run: Run) -> RunSpec:
    """The spec of a run whose steps can be repeated here, without what its steps do not depend on."""
    spec, info = run.spec, run_directory.read_json(run.path / run_directory.RUN_JSON)
    if not isinstance(spec, RunSpec):
        raise ValueError(f"recompute({run!r}): only the run of a task can be repeated, and this is one of a script")
    if run.state in ACTIVE:
        raise ValueError(f"recompute({run!r}): it still runs, and its machine is busy with it: run.stop() first, and resume it afterwards")
    if info.get("experiment") or info["launch_dir"] != ".":
        raise ValueError(f"recompute({run!r}): only a training that was launched by itself can be repeated")
    if spec.nnodes > 1 or spec.micro_batch == AUTO or info.get("layout"):
        why = (
            'micro_batch="auto"' if spec.micro_batch == AUTO else f"nnodes={spec.nnodes}" if spec.nnodes > 1 else "it lost ranks on its way"
        )
        raise ValueError(
            f"recompute({run!r}): {why}: its steps cannot be taken again on as many ranks of this machine with the same batches"
        )
    refuse_code_of_others(run)
    refuse_links(run)
    folder = _folder(run)
    if not folder.is_dir():
        raise ValueError(f"recompute({run!r}): it was launched in {folder}, which is gone: its task was found from there. Put it back")
    at: RunSpec = with_files_at(spec, lambda file: str(folder / file))
    return at.replace(profile=None, **UNEVALUATED)


def _folder(run: Run) -> Path:
    return Path(run_directory.read_json(run.path / run_directory.RUN_JSON).get("cwd") or Path.cwd()).absolute()


def _span(run: Run, since: int | None, until: int | None, recorded: Record, ranks: Sequence[int]) -> tuple[int, int, list[int]]:
    """The step after which a repetition begins, its last one, and all steps after which one can begin."""
    taken = sorted({step for (step, _), parts in recorded.items() if "loss" in parts})
    steps = [step for step in taken if not unrecorded(recorded, step - 1, step, ranks)]
    if not steps:
        raise ValueError(f"recompute({run!r}): it has recorded no step{' on all of its ranks' * bool(taken)}")
    kept = [step for step in map(step_of, checkpoints_of(run.path)) if step < steps[-1]]
    begin = (kept[-1] if kept else 0) if since is None else since
    end = steps[-1] if until is None else until
    whole_number("since", begin, least=0, error=ValueError)
    whole_number("until", end, least=begin + 1, most=steps[-1], error=ValueError)
    if begin and begin not in kept:
        raise ValueError(
            f"recompute({run!r}, since={begin}): it has no such checkpoint; kept are {', '.join(map(str, kept)) or 'none'}, and 0"
        )
    if begin + 1 < taken[0]:
        raise ValueError(
            f"recompute({run!r}): the first step that it has recorded is {taken[0]}, as of a run that went on from another one: give "
            "since= a checkpoint of its own" + (f" ({', '.join(map(str, kept))})" if kept else "")
        )
    if gap := unrecorded(recorded, begin, end, ranks):
        raise ValueError(f"recompute({run!r}): nothing is recorded of step {gap[0]} on rank {gap[1]}: give since= and until= without it")
    return begin, end, [place for place in (0, *kept) if place + 1 >= taken[0]]


def _start(run: Run, spec: RunSpec, begin: int, end: int, timeout: float | None, runs_dir: str | os.PathLike[str] | None) -> Run:
    """Start a repetition, which ends after a step and writes digests."""
    new = NewRun(runs_dir, f"{label(spec)}-again", Surroundings(folder=_folder(run)))
    prepare(new, run, begin, end)
    return new.start(spec, spec_entrypoint(spec, new.path), timeout)


def prepare(new: NewRun, run: Run, begin: int, end: int) -> None:
    """Have a new run begin with a checkpoint of another, end after a step, and write digests."""
    prints = new.path / run_directory.FINGERPRINTS
    prints.mkdir()
    run_directory.write_json(prints / run_directory.KILL, {"last": end})
    if begin:
        take_checkpoints(run, new, begin)


def restart_before(path: Path, step: int) -> int:
    """Steps of the checkpoint with which the processes began that took a step of a run; 0 = they began at the start."""
    rows = run_directory.LineTail(path / run_directory.RESUMES).read(salvage=True)
    return next((int(row["step"]) for row in reversed(rows) if "checkpoint" in row and row["step"] < step), 0)


def third_place(begin: int, places: Sequence[int], restart: int) -> int | None:
    """After how many steps a third repetition begins that is to show whether checkpoints restore everything; None = it cannot be shown.

    Args:
        begin: steps after which the other two began.
        places: steps after which a repetition can begin.
        restart: steps after which the run's own processes began.
    """
    if earlier := [place for place in places if place < begin]:
        return max(earlier)
    return restart if restart > begin and restart in places else None


def judge(recorded: Record, first: Record, second: Record, conditions: Sequence[str]) -> tuple[str, Fault | None]:
    """Which of three computations of the same steps is the odd one: a key of `VERDICTS`, and where it differs first."""
    fault = first_fault(recorded, first)
    if not (apart := first_fault(first, second)):
        if fault and fault.part in INPUTS:
            return "inputs", fault
        return ("elsewhere" if conditions else "wrong"), fault
    if first_fault(recorded, second) is None and apart.part not in INPUTS:
        return "wrong now", apart
    return "not repeatable", fault


def first_fault(one: Record, other: Record) -> Fault | None:
    """Where two records differ first, by step and by the order of PARTS, in what both have; None = nowhere."""
    order = list(PARTS)
    found: dict[tuple[int, int], list[int]] = {}
    for (step, rank), parts in one.items():
        beside = other.get((step, rank), {})
        for place, part in enumerate(order):
            if part in parts and part in beside and parts[part] != beside[part]:
                found.setdefault((step, place), []).append(rank)
    if not found:
        return None
    step, place = min(found)
    return Fault(step=step, part=order[place], ranks=tuple(sorted(found[step, place])))


def unrecorded(recorded: Record, begin: int, end: int, ranks: Sequence[int]) -> tuple[int, int] | None:
    """The first step after `begin` up to `end`, and its rank, of which no loss is recorded; None = there are all."""
    wanted = ((step, rank) for step in range(begin + 1, end + 1) for rank in ranks)
    return next((key for key in wanted if "loss" not in recorded.get(key, {})), None)


def within(recorded: Record, begin: int, end: int) -> Record:
    """What is recorded of the steps after `begin` up to `end`, and, where digests have it, of the states right after them."""
    states = ("weights", "buffers", "optimizer", "schedule", "scaler", "ema", "compression")
    kept = {}
    for (step, rank), parts in recorded.items():
        if begin < step <= end:
            kept[step, rank] = parts
        elif step == end + 1 and (after := {part: value for part, value in parts.items() if part in states}):
            kept[step, rank] = after
    return kept


def record(path: Path, ranks: int, digests: bool) -> Record:
    """What a run directory has of each step and rank: digests of all parts, or losses.

    Losses are of rank 0, from its metrics, and of each rank's last steps, from its ring. Where a run went on from a checkpoint, a step
    counts as it was taken last.
    """
    if digests:
        return {key: dict(row["parts"]) for key, row in digest_rows(path).items()}
    rows: dict[tuple[int, int], dict[str, str]] = {}
    for row in run_directory.LineTail(path / run_directory.METRICS).read(salvage=True):
        if "loss" in row and "lr" in row:
            rows[int(row["step"]), 0] = {"loss": repr(float(row["loss"]))}
    for rank in range(ranks):
        with contextlib.suppress(run_directory.DamagedRunError, LookupError, TypeError, ValueError):  # the ring helps where it is whole
            for row in run_directory.read_json(path / run_directory.ring_file(rank))["steps"]:
                if "loss" in row:
                    rows[int(row["step"]), rank] = {"loss": repr(float(row["loss"]))}
    return rows
