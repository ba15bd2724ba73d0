"""The commands that find out what is wrong: `diagnose`, `doctor`, `health`, `replay`, `prove-resume`, `what-changed`, `bisect` and
`why-not-linear`.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.core.brief import Briefed, fitted, short
from workbench.core.interrupts import terminated_as_interrupted
from workbench.core.progress import begins
from workbench.data.analysis.loader_report import LoaderReport
from workbench.diagnosis.analysis.bisection import Bisection
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.proof import how_to_prove
from workbench.diagnosis.analysis.what_changed import WhatChanged
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear
from workbench.diagnosis.api import diagnose
from workbench.diagnosis.correctness import replay
from workbench.diagnosis.regression import bisect, what_changed
from workbench.diagnosis.why_not_linear import why_not_linear
from workbench.runs import task
from workbench.runs.budgets import RunCheck
from workbench.runs.commands import refuse_knobs
from workbench.runs.failure import RunError
from workbench.runs.health import health as of_run
from workbench.runs.launch import machine_report
from workbench.runs.launch.launch import check_script
from workbench.runs.launch.prove_resume import prove_resume
from workbench.runs.spec import RunSpec, ScriptSpec, check_names, parse_knob

_OF: Mapping[str, str] = {"step": "time", "samples_per_sec": "time", "peak_memory": "memory", "loss": "loss"}
"""Name of a budget → what two runs are compared for where it is exceeded; the share of a phase is one of time."""


def doctor(given: argparse.Namespace, knobs: Mapping[str, Any]) -> int:
    """Show what this machine, and a loader, have of what a run needs, what will cause trouble, and how to fix it; returns the exit status.

    It is 1 where the loader breaks or gives wrong data.
    """
    if knobs and not given.target:
        raise ValueError(
            f"--set {next(iter(knobs))}=… turns a knob of a task's loader: workbench doctor my_task.py:build --set num_workers=2"
        )
    loaders: list[LoaderReport] = []
    if given.target:
        from workbench.data.loader_doctor import doctor as examine_loader
        from workbench.train.loader import named_loader

        task.check(given.target)
        begins(f"looking at the loader of {given.target}, some seconds …")
        loaders = [examine_loader(named_loader(given.target, knobs))]
    begins("looking at this machine, a few seconds …")
    report = machine_report.examine()
    if given.html:
        Path(given.html).write_text(report.to_page(*loaders), encoding="utf-8")
    if given.json:
        print(json.dumps(report.to_json() | ({"loader": loaders[0].to_json()} if loaders else {}), indent=1))
    elif not given.html:
        print(report, *(f"\n{loader}" for loader in loaders), sep="\n")
    return 0 if all(loader.ok for loader in loaders) else 1


def why(given: argparse.Namespace) -> int:
    """Find what made a run worse than another; returns the exit status: 0 where a reason is named, or there is nothing to explain.

    What could not be put back or was not recorded, beside the machine, is no reason that is named: 1.
    """
    with terminated_as_interrupted():
        result = what_changed(given.run_a, given.run_b, of=given.of, budget_s=given.budget, rerun=not given.recorded)
    _show(result, given)
    return 0 if result.kind in ("owner", "nothing", "not run") else 1


def first_bad(given: argparse.Namespace, knobs: Mapping[str, Any]) -> int:
    """Find the commit that made a training worse; returns the exit status: 0 where it is found."""
    steps = knobs.get("steps")
    rest = {name: value for name, value in knobs.items() if name != "steps"}
    spec = RunSpec(task=given.target).replace(**rest)
    with terminated_as_interrupted():
        result = bisect(spec, good=given.good, bad=given.bad, of=given.of, steps=steps, budget_s=given.budget)
    _show(result, given)
    return 0 if result.kind == "commit" else 1


def not_linear(given: argparse.Namespace, knobs: Mapping[str, Any]) -> int:
    """Say why N ranks give less than N times one, and prove the best remedy if asked to; returns the exit status."""
    ranks = 2 if given.nproc_per_node is None else given.nproc_per_node
    if given.target.endswith(".py"):
        refuse_knobs("why-not-linear", given.target, knobs)
        target: Any = given.target
    else:
        target = RunSpec(task=given.target).replace(**{"nproc_per_node": ranks, **knobs})
    with terminated_as_interrupted():
        answer = why_not_linear(target, args=given.args, nproc_per_node=ranks if isinstance(target, str) else None, budget_s=given.budget)
        provable = given.prove and any(remedy.provable for remedy in answer.remedies)
        if given.json:
            print_brief(answer, given.budget if provable else None)
            return 0
        print(answer, flush=True)
        if provable:
            print(f"\n{answer.prove(budget_s=given.budget)}")
        elif given.prove:
            untried = "None of these can be tried from here: make the change in your code, and ask again."
            print(f"\n{untried if answer.remedies else 'There is nothing to prove.'}")
    return 0


def diagnosed(given: argparse.Namespace, knobs: Mapping[str, Any]) -> int:
    """Diagnose a task, a script or a run, and prove the best remedy, or the one that was named, if asked to; returns the exit status."""
    knobs = {**knobs} | ({} if given.nproc_per_node is None else {"nproc_per_node": given.nproc_per_node})
    target: Any = given.target
    if given.remedy is not None:
        check_names(RunSpec, dict(map(parse_knob, given.remedy.replace(",", " ").split())))
    proves = given.prove or given.remedy is not None
    if target.endswith(".py"):
        refuse_knobs("diagnose", target, knobs, allowed=("threads", "nproc_per_node"))
        check_script(target)
        knobs |= {"prove_budget_s": given.budget} if proves else {}
    elif not (Path(target) / "run.json").is_file():
        if Path(target).is_dir() and target not in task.SAMPLES:
            raise ValueError(f"{target} is a directory without a run.json, so not that of a run: such as runs/* has")
        target = RunSpec(task=given.target).replace(**knobs)
        task.check(given.target)
    elif knobs:
        raise ValueError(f"{target} is a run that was made: it has no knobs to turn any more ({', '.join(knobs)})")
    if not isinstance(target, str):  # of a script, `diagnose` says more
        begins(f"experiments with {given.target}, at most {units.seconds(given.budget)} …")
    of_launch = knobs if isinstance(target, str) else {}  # of a script; other targets in a text have none
    diagnosis = diagnose(target, args=given.args, **of_launch, budget_s=given.budget)
    unclear = diagnosis.verdict == "inconclusive"
    provable = given.remedy is not None or (not unclear and any(remedy.provable for remedy in diagnosis.remedies))
    if given.json:
        print_brief(diagnosis, given.budget if proves and provable else None, given.remedy)
        return 0
    print(diagnosis.for_terminal(proving=proves and provable), flush=True)
    if proves and provable:
        remedy = diagnosis.remedy(given.remedy)
        if diagnosis.choice and given.remedy is None:
            print(f"\n{diagnosis.choice}", flush=True)
        print(f"\n{diagnosis.prove(remedy, budget_s=given.budget)}")
    elif given.prove and isinstance(diagnosis.spec, ScriptSpec) and not str(target).endswith(".py"):
        print(f"\nNothing of this can be proved: {how_to_prove(diagnosis.spec.script)}")
    elif given.prove and isinstance(diagnosis.spec, ScriptSpec) and diagnosis.remedies and not unclear:
        print(f"\n{diagnosis.prove(budget_s=given.budget).choice}")  # where to make the change
    elif given.prove:
        untried = "None of these can be tried from here: make the change in your code, and diagnose it again."
        untried = "Nothing is proved, since the verdict is inconclusive." if unclear else untried
        nothing = "There is nothing to prove: no remedy was found."
        print(f"\n{untried if diagnosis.remedies else nothing}")
    return 0


def print_brief(answer: Diagnosis | WhyNotLinear, proving_s: float | None, which: str | None = None) -> None:
    """Print a brief, after a proof in at most so many seconds; None = without one. If the proof fails, `proof_failed` says why.

    `which` is the change to prove, with its value; None = the best.
    """
    failed: dict[str, str] = {}
    try:
        if proving_s is not None:
            answer.prove(which, budget_s=proving_s)
    except (ValueError, OSError, RunError, KeyboardInterrupt) as error:
        failed["proof_failed"] = short(str(error) or "interrupted")
        raise
    finally:
        print(json.dumps(fitted(answer.brief() | failed, "unknown", "predicted"), ensure_ascii=False), flush=True)


def health(given: argparse.Namespace) -> int:
    """Say what went wrong with the numbers of a run; returns the exit status: 1 where there is a fault, or was nothing to look at."""
    found = of_run(given.path)
    print(json.dumps(found.brief(), ensure_ascii=False) if given.json else found, flush=True)
    return 0 if found.ok and found.looked else 1


def replayed(given: argparse.Namespace) -> int:
    """Repeat a step of a run, and say what made it go wrong; returns the exit status.

    Raises:
        ValueError: a run that cannot be read or repeated, or has no such step.
    """
    with terminated_as_interrupted():
        _show(replay(given.path, given.step, budget_s=given.budget), given)
    return 0


def resumed(given: argparse.Namespace, knobs: Mapping[str, Any]) -> int:
    """Kill a training and resume it; returns the exit status: 0 where it ends like the undisturbed one.

    Raises:
        ValueError: no such task, script or knob, or an argument that a script needs is missing.
    """
    options = {"kills": given.kills, "during_save": given.during_save, "timeout": given.timeout}
    with terminated_as_interrupted():
        proof = prove_resume(given.target, args=given.args, result=given.result, **options, **knobs)
    _show(proof, given)
    return 0 if getattr(proof, "exact", False) else 1


def reason_of(checked: RunCheck, budget_s: float) -> WhatChanged | None:
    """What made a run exceed its budgets, beside the run that it was held against; None = there is none, or it kept them all."""
    exceeded = next((budget.name for budget in checked.budgets if budget.state == "exceeded"), None)
    if exceeded is None or checked.against is None:
        return None
    return what_changed(checked.against, checked.run, of=_OF.get(exceeded, "time"), budget_s=budget_s)  # type: ignore[arg-type]


def _show(result: WhatChanged | Bisection | Briefed, given: argparse.Namespace) -> None:
    print(json.dumps(result.brief(), ensure_ascii=False) if given.json else result, flush=True)
