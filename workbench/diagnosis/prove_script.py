"""Proves a change of a script that can be made from outside, by launches with and without it that take turns; the file stays as it is."""

import json
import os
from pathlib import Path

from workbench.core import run_directory, units
from workbench.core.checks import check_budget
from workbench.core.progress import INTERRUPTED, BudgetError, Waiting, say_what_was_interrupted
from workbench.diagnosis.analysis.gap_evidence import GapEvidence
from workbench.diagnosis.analysis.proof import Proof
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.diagnosis.rerun import Arm, Code, Measured, Reruns, steps_of
from workbench.harness.results import VariantTimes
from workbench.runs.launch.launch import check
from workbench.runs.rows import RunRows
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec
from workbench.timeline.script_arguments import OF_DDP, OF_LOADER

OF_LAUNCH = ("threads", "nproc_per_node")
OUTSIDE = (*OF_LAUNCH, *OF_LOADER, *OF_DDP)
"""What can be set without an edit of a script."""
EDITED = {
    "accumulation": ("step", "the optimizer's step"),
    "gradient": ("ddp", "DistributedDataParallel, which takes a hook: model.register_comm_hook"),
    "micro_batch": ("loop", "the loop over the loader that has the batch_size"),
    "micro-batches": ("loop", "the loop over the loader that has the batch_size"),
}
"""How the name of a change begins → the place in a script where it is made, by its name in `GapEvidence.places`, and in words."""


def prove_script(
    spec: ScriptSpec,
    remedy: Remedy,
    evidence: GapEvidence,
    *,
    step: float,
    budget_s: float,
    runs_dir: str | os.PathLike[str] | None = None,
) -> Proof:
    """Launch a script with a remedy and as it is, by turns, each for some seconds of steps, as often as the budget allows.

    Args:
        spec: the script.
        remedy: its `change` has some of OUTSIDE.
        evidence: of the script: its lines, and whether the samples of a batch are known.
        step: seconds of one of its steps.
        budget_s: seconds for all launches. They make at least one pair, of which the interval is that of usual noise.
        runs_dir: where run directories go; None = they are deleted.

    Raises:
        ValueError: it needs an edit of the script, does not reach what the script makes, or a launch did not run, or took too long.
    """
    check_budget(budget_s, limited=True)
    if not remedy.change or not set(remedy.change) <= set(OUTSIDE):
        raise ValueError(
            f"{remedy.name} cannot be set from outside {Path(spec.script).name}: {remedy.what}{_line(remedy, evidence)} Then ask again. "
            f"From outside can be set: {', '.join(OUTSIDE)}."
        )
    changed = spec.replace(**{name: value for name, value in remedy.change.items() if name in OF_LAUNCH})
    check(changed)
    arguments = {name: value for name, value in remedy.change.items() if name not in OF_LAUNCH}
    measured = Measured(of="time", steps=steps_of(step), per="sample" if evidence.samples else "step")
    code, variable = Code(folder=Path.cwd(), source=Path.cwd()), run_directory.ENV_ARGUMENTS
    arms = {
        "as it is": Arm(spec, code, {variable: None}, None),
        remedy.name: Arm(changed, code, {variable: json.dumps(arguments) if arguments else None}, None),
    }
    pairs, notes, longest = list[tuple[float, float]](), list[str](), 0.0
    begin = "launches without and with it, by turns"
    with (
        say_what_was_interrupted("prove"),
        Waiting(f"prove {remedy.name}", budget_s, begin=begin) as line,
        Reruns(measured, kind="prove", runs_dir=runs_dir, tick=line.tick, left=lambda: line.left) as reruns,
    ):
        while not pairs or line.left > 1.2 * longest:
            began, seconds = line.left, dict[str, float]()
            try:
                for name in list(arms)[:: 1 if len(pairs) % 2 == 0 else -1]:  # a drift of the machine is in favour of neither
                    line.say(name, f"{units.several(len(pairs), 'pair')} so far")
                    seconds[name], run = reruns.measure(arms[name], name)
                    if name == remedy.name:
                        _check_applied(run, remedy)
            except BudgetError:
                if not pairs:
                    raise ValueError(
                        f"the budget of {units.seconds(budget_s)} ended before the script ran twice: give prove a larger budget_s"
                    ) from None
                break
            except KeyboardInterrupt:
                if not pairs:
                    raise
                notes.append(f"{INTERRUPTED}: this is the result so far")
                break
            pairs.append((seconds["as it is"], seconds[remedy.name]))
            longest = max(longest, began - line.left)
    samples = 1.0 if evidence.samples else changed.world_size / spec.world_size
    arm = VariantTimes(name="changed", baseline="full", pairs=tuple(pairs), samples=samples)
    base = sum(before for before, _ in pairs) / len(pairs)
    rate = (1.0 if evidence.samples else spec.world_size) / base
    notes.append(f"{units.several(len(pairs), 'pair')} of launches of the script, by turns")
    return Proof(remedy=remedy, measured=arm.speedup_at_few_pairs, baseline=rate, notes=tuple(notes))


def _line(remedy: Remedy, evidence: GapEvidence) -> str:
    """Where in the script to make the change; "" = not known."""
    place, what = next((place for name, place in EDITED.items() if remedy.name.startswith(name)), ("", ""))
    line = evidence.places.get(place)
    return f" It is made at {line} ({what})." if line else ""


def _check_applied(run: Run, remedy: Remedy) -> None:
    """Refuse a comparison in which the script has not got what was to be tried.

    Raises:
        ValueError: it makes no such object, its loaders have no workers, or it sets its threads itself.
    """
    row = next((row for row in RunRows(run.path).other_rows.get(0, ()) if isinstance(row.get("replaced"), list)), None)
    if row is None:
        return
    kinds = {"DataLoader": OF_LOADER, "DistributedDataParallel": OF_DDP}
    for kind, names in kinds.items():
        if missing := [name for name in remedy.change if name in names and name not in row["replaced"]]:
            said = " and ".join(missing)
            why = f"the script makes no {kind}, which takes {said}"
            if set(missing) <= set(row.get("without_workers", ())):
                why = f"the script's loaders have no workers, which {said} would be for; try num_workers=1 as well"
            raise ValueError(f"{remedy.name} changes nothing here: {why}")
    if (wanted := remedy.change.get("threads", row["threads"])) != row["threads"]:
        raise ValueError(f"threads={wanted} changes nothing here: the script sets its {row['threads']} threads itself")
