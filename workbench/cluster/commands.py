"""The commands `estimate`, `estimate-time` and `plan` of the command line: what a task needs on machines that need not be here."""

import argparse
import contextlib
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cluster.analysis.cluster import CLUSTERS
from workbench.cluster.analysis.plan.ranges import PlanError
from workbench.core import codec
from workbench.core.brief import fitted, number, short, three
from workbench.core.checks import choice
from workbench.core.progress import begins
from workbench.memory.analysis.fit import device_name
from workbench.runs import task
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

if TYPE_CHECKING:
    from workbench.cluster.analysis.plan.plans import Plans

FIRST = 5
"""Plans in a brief, at most."""
Show = Callable[[Any, argparse.Namespace], None]


def _begin(target: str) -> None:
    """Say that the dry runs of a task begin; TaskError where no file or function has its name."""
    task.check(target)
    begins(f"dry run of {target}: some seconds, or minutes for a large model …")


def estimate(given: argparse.Namespace, knobs: Mapping[str, Any], show: Show) -> int:
    """Say what a task needs on a device, and what would make it fit if asked to; returns the exit status: 0 if it fits."""
    target = RunSpec(task=given.target).replace(**knobs)
    device_name(given.device)
    if given.json and (given.ladder or given.max_batch):
        raise ValueError("--json has the estimate alone: leave out --ladder and --max-batch")
    if given.device == "cuda" and (given.ladder or given.max_batch):
        raise ValueError("--device cuda is any GPU, whose memory is not known: name one, such as --device H200")
    shapes = {name: value for name in ("sequence", "image") if (value := getattr(given, name)) is not None}
    _begin(given.target)
    from workbench.memory.api import estimate_memory
    from workbench.memory.ladder import memory_ladder
    from workbench.memory.max_micro_batch import max_micro_batch

    breakdown = estimate_memory(target, device=given.device, **shapes)
    if given.json:
        fits = None if given.device in ("cpu", "cuda") else breakdown.fits(given.device)
        memory = codec.to_json(breakdown)
        memory.pop("timeline", None)  # a hundred kB
        memory |= {"allocated": breakdown.allocated, "device_used": breakdown.device_used, "holders": memory["holders"][:3]}
        show({"memory": memory, "fits": None if fits is None else bool(fits), "spare": None if fits is None else fits.spare}, given)
        return 0 if fits is None or fits else 1
    print(breakdown)
    named = given.device not in ("cpu", "cuda")
    ladder = memory_ladder(target, given.device, **shapes) if given.ladder else None
    enough = bool(breakdown.fits(given.device)) if named else ladder is None or (ladder.fits and not ladder.rungs)
    if ladder and enough:
        print(f"\n{ladder.word[:1].upper()}{ladder.word[1:]}.")  # a table would have the row of the step as it is
    elif named:
        print(f"\n{breakdown.fits(given.device)}")
    if ladder and not enough:
        print(f"\n{ladder.table_without(breakdown.notes)}")
    elif not enough:
        print("What would make it fit: the same command with --ladder, or --max-batch for the largest micro-batch.")
    if given.max_batch:
        most = max_micro_batch(target, given.device, **shapes)
        print(f"\n{most.word}" + f"\n{most.reason}" * bool(most.reason))  # its notes stand above
    return 0 if enough else 1


def plan(given: argparse.Namespace, knobs: Mapping[str, Any], show: Show) -> int:
    """Find layouts of a task on a cluster that fit and are fast; returns the exit status."""
    sizes_only = given.target.endswith(".json")
    model = given.target if sizes_only else RunSpec(task=given.target).replace(**knobs)
    choice("--cluster", given.cluster, [cluster.name for cluster in CLUSTERS])
    if not sizes_only:
        _begin(given.target)
    from workbench.cluster import plan as planning

    options = {"gpus": given.gpus, "global_batch": given.global_batch, "sequence": given.sequence, "top": given.top}
    options |= {"trainer": given.trainer, "poll_interval": given.poll_interval, "checked_collectives": given.checked_collectives or None}
    plans = planning.plan(model, given.cluster, **options, **(knobs if sizes_only else {}))
    show(_brief(plans, None if sizes_only else given.target, knobs) if given.json else plans, given)
    return 0


def _brief(plans: "Plans", task: str | None, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The first plans and what to do next, at most BRIEF_BYTES as text; without a task only the sizes of a model are known."""
    rows = [
        {
            **{name: getattr(plan, name) for name in ("gpus", "layout", "micro_batch", "accumulation", "checkpointing", "bound")},
            "step_s": three(plan.seconds),
            "samples_per_sec": number(plan.samples_per_sec.mid),
            "mfu": number(plan.mfu.mid),
            "memory_bytes": three(plan.needed),
            "fits": "in doubt" if plan.tight else "yes",
        }
        for plan in plans[:FIRST]
    ]
    command = None
    with contextlib.suppress(PlanError):  # no trainer of ours has the best one
        if task:
            bare = RunSpec(task=task)
            turned = bare.changes(bare.replace(**{**knobs, **plans.best.changes()}))
            command = shlex.join(["workbench", "launch", task, "--set", *(f"{name}={new}" for name, (_, new) in turned.items())])
    notes = [short(note, 160) for note in plans.notes]
    value = {
        "claim": f"{plans.best.layout}, {plans.best.batch}, is the best of {len(plans)} plans; predicted",
        "plans": rows,
        "considered": plans.considered,
        "ruled_out": {reason: count for reason, count in plans.ruled_out.items() if count},
        "notes": notes,
        "next": {"do": short(f"Launch the first plan: {plans.best.why}.") if command else None, "command": command},
    }
    return fitted(value, "notes", "plans", last="plans")


def estimate_time(given: argparse.Namespace, knobs: Mapping[str, Any], show: Show) -> int:
    """Predict the time of a task's step on a device that need not be here; returns the exit status."""
    spec = RunSpec(task=given.target).replace(**knobs)
    measured: Any = given.measured
    if measured is not None and (Path(measured) / "run.json").is_file():
        measured = Run.load(measured)
    elif measured is not None:
        try:
            measured = float(measured)
        except ValueError:
            raise ValueError(f"--measured {measured}: expected seconds of a step, or the directory of a run") from None
    shapes = {name: value for name in ("sequence", "image") if (value := getattr(given, name)) is not None}
    from workbench.cluster import estimate_time as elsewhere

    elsewhere.refuse(spec, given.device, given.cluster, known=measured is not None)
    _begin(given.target)
    step = elsewhere.estimate_time(spec, device=given.device, cluster=given.cluster, measured=measured, **shapes)
    notes = [*filter(None, [step.alignment]), *step.notes]
    figures = {"seconds": step.seconds, "parts": step.parts, "samples_per_sec": step.samples_per_sec, "mfu": step.mfu, "notes": notes}
    show(codec.to_json({"title": step.title, "device": step.device.name, **figures}) if given.json else step, given)
    return 0
