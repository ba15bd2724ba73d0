"""Proves a change of a script that can be made from outside, by launches with and without it that take turns; the file stays as it is."""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.core import run_directory, units
from workbench.core.checks import check_budget
from workbench.core.progress import INTERRUPTED, BudgetError, Waiting, say_what_was_interrupted
from workbench.core.system_load import LoadMeter
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.gap_evidence import GapEvidence
from workbench.diagnosis.analysis.proof import Proof
from workbench.diagnosis.analysis.remedy import OF_LAUNCH, OUTSIDE, Remedy
from workbench.diagnosis.analysis.script_remedies import LaunchedScript
from workbench.diagnosis.rerun import Arm, Code, Measured, RerunError, Reruns, steps_of
from workbench.harness.results import VariantTimes
from workbench.runs.launch.launch import check
from workbench.runs.rows import RunRows
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec
from workbench.timeline.script_arguments import IMPLEMENTATIONS, OF_DDP, OF_LOADER, OF_OPTIMIZER

GOES_ON = '. If the script goes on from checkpoints of an earlier launch, give their folder as {out}: args=["--ckpt", "{out}"]'
"""What may be the matter where a launch took no steps, and an earlier one did."""
LAUNCHES = 5.0
"""Launches that a budget is to suffice for: two pairs, of which a range is made, and a quarter more, since a change may make it slower."""
LEAST_STEPS = 8
"""Steps of a launch at the least, 3 of them to warm up. Chosen: with fewer, single steps decide. It decides which budgets are refused."""
EDITED = {
    "accumulation": ("step", "the optimizer's step"),
    "gradient": ("ddp", "DistributedDataParallel, which takes a hook: model.register_comm_hook"),
    "micro_batch": ("loop", "the loop over the loader that has the batch_size"),
    "micro-batches": ("loop", "the loop over the loader that has the batch_size"),
    "no waiting": ("dataset", "where the samples are made"),
    "copies": ("loop", "the loop that copies the batches"),
    "a cheaper optimizer": ("step", "the optimizer's step"),
    "less work": ("loop", "the loop whose time lies outside all phases"),
}
"""How the name of a change begins → the place in a script where it is made, by its name in `Evidence.places`, and in words."""


def prove_script(
    spec: ScriptSpec,
    remedy: Remedy,
    evidence: GapEvidence | Evidence,
    *,
    step: float,
    budget_s: float,
    runs_dir: str | os.PathLike[str] | None = None,
    launched: LaunchedScript | None = None,
) -> Proof:
    """Launch a script with a remedy and as it is, by turns, each for some seconds of steps, as often as the budget allows.

    Args:
        spec: the script with its arguments, as it was diagnosed.
        remedy: its `change` has some of OUTSIDE.
        evidence: of the script: its lines, and whether the samples of a batch are known.
        step: seconds of one of its steps.
        budget_s: seconds for all launches. Two pairs at least must fit.
        runs_dir: where run directories go; None = they are deleted.
        launched: where to launch it, and how long its start takes; None = in the current folder, and that is not known.

    Raises:
        ValueError: the remedy needs an edit of the script, or changes nothing that the script makes; two pairs of launches do not fit into
            the budget; a launch failed, or took too long.
    """
    check_budget(budget_s, limited=True)
    if not remedy.change or not set(remedy.change) <= set(OUTSIDE):
        raise ValueError(
            f"{remedy.name} cannot be set from outside {Path(spec.script).name}: {remedy.what}{_line(remedy, evidence)} Then ask again. "
            f"From outside can be set: {', '.join(OUTSIDE)}."
        )
    if remedy.change.get("optimizer", IMPLEMENTATIONS[0]) not in IMPLEMENTATIONS:
        raise ValueError(f"optimizer={remedy.change['optimizer']!r}: of a script's optimizer, {' or '.join(IMPLEMENTATIONS)} can be set")
    changed = spec.replace(**{name: value for name, value in remedy.change.items() if name in OF_LAUNCH})
    check(changed)
    arguments = {name: value for name, value in remedy.change.items() if name not in OF_LAUNCH}
    if changed == spec and not arguments:
        raise ValueError(f"{Path(spec.script).name} was launched with {units.knobs(remedy.change)}: there is nothing to change")
    start_s = launched.start_s if launched else None
    steps = steps_that_fit(steps_of(step), step, start_s, budget_s)
    measured = Measured(of="time", steps=steps, seconds=steps * step, per="sample" if evidence.samples else "step")
    folder, variable = launched.folder if launched else Path.cwd(), run_directory.ENV_ARGUMENTS
    code, each = Code(folder=folder, source=folder), _seconds_each(spec, steps, step, start_s, budget_s)
    arms = {
        "as it is": Arm(spec, code, {variable: None}, None),
        remedy.name: Arm(changed, code, {variable: json.dumps(arguments) if arguments else None}, None),
    }
    pairs, notes, longest = list[tuple[float, float]](), list[str](), 0.0
    begin = f"alternating launches of {Path(spec.script).name} as it is and with {units.knobs(remedy.change)}{each}"
    with (
        say_what_was_interrupted("prove"),
        contextlib.closing(LoadMeter(root=os.getpid())) as meter,
        Waiting(f"prove {remedy.name}", budget_s, begin=begin) as line,
        Reruns(measured, kind="prove", runs_dir=runs_dir, tick=line.tick, left=lambda: line.left) as reruns,
    ):
        while not pairs or line.left > 1.2 * longest:
            began, seconds = line.left, dict[str, float]()
            try:
                for name in list(arms)[:: 1 if len(pairs) % 2 == 0 else -1]:  # a drift of the machine is in favour of neither
                    line.say(f"{name}{each}", f"{units.several(len(pairs), 'pair')} so far")
                    seconds[name], run = reruns.measure(arms[name], name)
                    if not pairs and len(seconds) == 1:  # what starting it takes is known now
                        some = steps_that_fit(steps, step, max(0.0, began - line.left - steps * step), LAUNCHES / 3 * line.left)
                        reruns.measured = replace(measured, steps=some, seconds=some * step)
                    if name == remedy.name:
                        _check_applied(run, remedy)
            except BudgetError:
                if not pairs:
                    enough = 5 * max(reruns.seconds, default=budget_s)
                    raise ValueError(f"the budget of {units.seconds(budget_s)} ended before the script ran twice: {give(enough)}") from None
                break
            except RerunError as error:
                used = "" if run_directory.OUT in " ".join(spec.args) else GOES_ON
                raise ValueError(f"{name}: {error}{used * bool(seconds or pairs)}") from None
            except KeyboardInterrupt:
                if not pairs:
                    raise
                notes.append(f"{INTERRUPTED}: this is the result so far")
                break
            pairs.append((seconds["as it is"], seconds[remedy.name]))
            longest = max(longest, began - line.left)
        doubt = meter.doubt()
    samples = 1.0 if evidence.samples else changed.world_size / spec.world_size
    arm = VariantTimes(name="changed", baseline="full", pairs=tuple(pairs), samples=samples)
    base = sum(before for before, _ in pairs) / len(pairs)
    rate = (1.0 if evidence.samples else spec.world_size) / base
    notes += [f"{units.several(len(pairs), 'pair')} of alternating launches of the script", *([doubt] if doubt else [])]
    return Proof(remedy=remedy, measured=arm.speedup, baseline=rate, notes=tuple(notes))


def give(budget_s: float) -> str:
    """To give a proof so many seconds, in words for a notebook and for a terminal."""
    return f"give prove budget_s={budget_s:.0f}, --budget {budget_s:.0f} in a terminal"


def steps_that_fit(steps: int, step: float, start_s: float | None, budget_s: float) -> int:
    """Steps of each launch, of so many seconds each: so few that LAUNCHES fit into the budget, but no fewer than LEAST_STEPS.

    >>> steps_that_fit(13, 1.0, 5.0, 300.0), steps_that_fit(13, 1.0, 5.0, 75.0), steps_that_fit(13, 1.0, 5.0, 30.0)
    (13, 10, 8)
    """
    if start_s is None or LAUNCHES * (start_s + steps * step) <= budget_s:
        return steps
    return min(steps, max(LEAST_STEPS, int((budget_s / LAUNCHES - start_s) / step)))


def why_no_proof_fits(script: str, step: float, start_s: float | None, budget_s: float) -> str:
    """Why two pairs of launches of a script do not fit into the budget of a proof, and which budget suffices; "" = they fit.

    Args:
        script: path of the script's file.
        step: seconds of one of its steps.
        start_s: seconds from its launch to its first step; None = not known.
        budget_s: seconds for the proof.
    """
    steps = steps_that_fit(steps_of(step), step, start_s, budget_s)
    each = (start_s or 0.0) + steps * step
    if (each if start_s is None else LAUNCHES * each) <= budget_s:
        return ""
    return (
        f"a launch of {Path(script).name} takes about {units.seconds(each)}, for its start and {steps} steps of {units.seconds(step)}, and "
        f"a range needs four: {give(1.1 * LAUNCHES * each)}"
    )


def _seconds_each(spec: ScriptSpec, steps: int, step: float, start_s: float | None, budget_s: float) -> str:
    """What each launch takes, and how many pairs that makes, in words; "" = not known. ValueError: two pairs do not fit into the budget."""
    if short := why_no_proof_fits(spec.script, step, start_s, budget_s):
        raise ValueError(f"{short}. Nothing was launched")
    each = (start_s or 0.0) + steps * step
    return "" if start_s is None else f", about {units.seconds(each)} for each launch, {int(budget_s / 2 / each)} pairs or so in all"


def _line(remedy: Remedy, evidence: GapEvidence | Evidence) -> str:
    """Where in the script to make the change; "" = not known."""
    place, what = next((place for name, place in EDITED.items() if remedy.name.startswith(name)), ("", ""))
    line = evidence.places.get(place)
    return f" It is made at {line} ({what})." if line else ""


def _check_applied(run: Run, remedy: Remedy) -> None:
    """Refuse a comparison in which the script has not got what was to be tried."""
    row: dict[str, Any] = {name: value for row in RunRows(run.path).other_rows.get(0, ()) for name, value in row.items()}
    if not isinstance(row.get("replaced"), list):
        return
    kinds = {"DataLoader": OF_LOADER, "DistributedDataParallel": OF_DDP, "optimizer of torch": OF_OPTIMIZER}
    for kind, names in kinds.items():
        if missing := [name for name in remedy.change if name in names and name not in row["replaced"]]:
            said = " and ".join(missing)
            why = f"the script makes no {kind}, which takes {said}"
            if kind == "optimizer of torch" and (named := row.get("optimizer")):
                why = f"the script's optimizer, {named}, did not take it: it has none, or its groups or its step() are your own"
            if set(missing) <= set(row.get("without_workers", ())):
                why = f"the script's loaders have no workers, which {said} would be for; try num_workers=1 as well"
            raise ValueError(f"{remedy.name} changes nothing here: {why}")
    has = loader if isinstance(loader := row.get("loader"), Mapping) else {}
    idle = [name for name in remedy.change if name in row.get("without_workers", ())]
    if idle and not has.get("num_workers", 1):  # another loader of the script may have workers
        said = " and ".join(idle)
        raise ValueError(f"{remedy.name} changes nothing here: the loader of its training has no workers, which {said} would be for")
    if other := [name for name in OF_LOADER if name in has and has[name] != remedy.change.get(name, has[name])]:
        raise ValueError(
            f"{remedy.name} changes nothing here: the script sets {other[0]}={has[other[0]]} after it has made the loader of its training"
        )
    if (wanted := remedy.change.get("threads", row["threads"])) != row["threads"]:
        raise ValueError(f"threads={wanted} changes nothing here: the script sets its {row['threads']} threads itself")
