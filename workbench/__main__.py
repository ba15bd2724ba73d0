"""The command line, made of calls of the public API; `workbench --help` lists the commands."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import workbench
from workbench.core import units
from workbench.core.machine_speeds import MachineSpeeds
from workbench.diagnosis.api import BUDGET
from workbench.runs.failure import RunError
from workbench.runs.launch import environment, machine_report
from workbench.runs.launch.nodes import join
from workbench.runs.rank_ends import extremes
from workbench.runs.run import Run
from workbench.runs.spec import parse_knob
from workbench.runs.task import SAMPLES


def doctor(given: argparse.Namespace) -> int:
    """Show what this machine has of what a run needs, what will cause trouble, and how to fix it; returns the exit status.

    Raises:
        OSError: the file cannot be written.
    """
    if sys.stderr.isatty():
        print("workbench: looking at this machine, a few seconds …", file=sys.stderr)
    report = machine_report.examine()
    if given.html:
        Path(given.html).write_text(report.to_page(), encoding="utf-8")
    if given.json:
        print(json.dumps(report.to_json(), indent=1))
    elif not given.html:
        print(report)
    return 0


def report(run: Run) -> str:
    """A run as text: how it ended, and where the time went on each rank; of very many ranks on the first and those at the extremes."""
    timelines = run.timelines
    return "\n\n".join([str(run), *(str(timelines[place]) for place in extremes(run.rank_means))])


def _launch(given: argparse.Namespace, script_args: list[str]) -> dict[str, Any]:
    """The arguments of `launch` for what was typed.

    Raises:
        ValueError: an option that this kind of target does not take.
    """
    ranks = given.nproc_per_node
    if given.target.endswith(".py"):
        if given.steps is not None:
            raise ValueError(f"--steps {given.steps} with a script: its own arguments come after --")
        return {"target": given.target, "args": script_args, "nproc_per_node": ranks, "watch": True}
    if script_args:
        raise ValueError(f"{given.target!r} is a task, and takes no arguments of its own: {' '.join(script_args)}")
    return {"target": workbench.RunSpec(task=given.target, nproc_per_node=ranks, steps=60 if given.steps is None else given.steps)}


def diagnose(given: argparse.Namespace) -> int:
    """Diagnose a task or a run, and prove the best remedy if asked to; returns the exit status.

    Raises:
        ValueError: no such task, run, knob or value.
    """
    knobs = knobs_of(given.set or [])
    if given.nproc_per_node is not None:
        knobs["nproc_per_node"] = given.nproc_per_node
    target: Any = given.target
    if target.endswith(".py"):
        if knobs:
            raise ValueError(
                f"{target} is a script, which runs on one process here and has its own knobs ({', '.join(knobs)} are given): "
                f"workbench launch {target} --nproc-per-node 2, then workbench diagnose runs/…"
            )
    elif not (Path(target) / "run.json").is_file():
        if Path(target).is_dir() and target not in SAMPLES:
            raise ValueError(f"{target} is a directory without a run.json, so not that of a run: such as runs/* has")
        target = workbench.RunSpec(task=given.target).replace(**knobs)
    elif knobs:
        raise ValueError(f"{target} is a run that was made: it has no knobs to turn any more ({', '.join(knobs)})")
    if sys.stderr.isatty():
        print(f"workbench: experiments with {given.target}, at most {units.seconds(given.budget)} …", file=sys.stderr)
    try:
        diagnosis = workbench.diagnose(target, budget_s=given.budget)
        provable = any(remedy.provable for remedy in diagnosis.remedies)
        if given.json:
            if given.prove and provable:
                diagnosis.prove(budget_s=given.budget)
            print(json.dumps(diagnosis.brief(), ensure_ascii=False))
            return 0
        print(diagnosis, flush=True)
        if given.prove and provable:
            print(f"\n{diagnosis.prove(budget_s=given.budget)}")
        elif given.prove:
            print("\nThere is nothing to prove.")
    except RunError as error:
        print("\n".join(filter(None, [error.failure.traceback, f"workbench: {error}", *getattr(error, "__notes__", [])])), file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # what was launched is stopped
        print("workbench: interrupted", file=sys.stderr)
        return 130
    return 0


def estimate(given: argparse.Namespace) -> int:
    """Say what a task needs on a device, and what would make it fit if asked to; returns the exit status: 0 if it fits.

    Raises:
        ValueError: no such task, device, knob or value; or it cannot be estimated.
    """
    target = workbench.RunSpec(task=given.target).replace(**knobs_of(given.set or []))
    if given.device in ("cpu", "cuda") and (given.ladder or given.max_batch):
        raise ValueError(f"--device {given.device} has no capacity of its own: name one, such as --device H200")
    shapes = {name: value for name in ("sequence", "image") if (value := getattr(given, name)) is not None}
    breakdown = workbench.estimate_memory(target, device=given.device, **shapes)
    print(breakdown)
    if given.device in ("cpu", "cuda"):
        return 0
    print(f"\n{breakdown.fits(given.device)}")
    if given.ladder:
        print(f"\n{workbench.memory_ladder(target, given.device, **shapes)}")
    if given.max_batch:
        print(f"\n{workbench.max_micro_batch(target, given.device, **shapes)}")
    return 0 if breakdown.fits(given.device) else 1


def calibrate(given: argparse.Namespace) -> int:
    """Measure this machine's speeds, and the memory outside of PyTorch's allocator on its GPU, if it has one; returns the exit status.

    Raises:
        ValueError: not such a number of models, or torch or a GPU that is here cannot be used.
    """

    def tell(what: str) -> None:
        if sys.stderr.isatty():
            print(f"workbench: {what}", file=sys.stderr)

    tell("measuring the speed of this machine, a few seconds …")
    facts = machine_report.probe_torch("fresh", "links")
    if "error" in facts:
        raise ValueError(facts["error"])
    print(MachineSpeeds.from_json(facts["speeds"]), flush=True)
    if environment.gpu_count() == 0:
        print("memory outside of the allocator: it can only be measured on an NVIDIA GPU, and none is visible here")
        return 0
    print()
    try:
        calibration = workbench.calibrate(given.models, tell=tell)
    except RunError as error:
        print("\n".join(filter(None, [error.failure.traceback, f"workbench: {error}"])), file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # what was launched is stopped
        print("workbench: interrupted", file=sys.stderr)
        return 130
    print(calibration)
    return 0 if calibration.path else 1


def knobs_of(words: list[str]) -> dict[str, Any]:
    """The knobs in words of the form KNOB=VALUE.

    Raises:
        ValueError: a word without "=".
    """
    for word in words:
        if "=" not in word:
            raise ValueError(f"--set {word}: expected a knob and its value, such as --set micro_batch=16 precision=amp_bf16")
    return dict(map(parse_knob, words))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="workbench", description="See where a training step goes, predict what a change gains, prove it.")
    parser.add_argument("--version", action="version", version=workbench.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lab", help="open JupyterLab", add_help=False)
    look = commands.add_parser("doctor", help="what this machine has, what will cause trouble, and how to fix it")
    look.add_argument("--json", action="store_true", help="print it as JSON")
    look.add_argument("--html", metavar="FILE", help="write it as a self-contained HTML page")
    start = commands.add_parser("launch", help="run a script or a sample task under torchrun and show where its time goes")
    start.add_argument("target", help='a script ("train.py"), a task ("my_task.py:build") or a sample ("clipart-resnet")')
    start.add_argument("--nproc-per-node", type=int, default=1)
    start.add_argument("--steps", type=int, help="optimizer steps of a task (60)")
    why = commands.add_parser("diagnose", help="find out by experiment what holds a task back, and what would help")
    why.add_argument(
        "target", help='a script ("train.py"), a task ("my_task.py:build"), a sample ("clipart-resnet") or the directory of a run'
    )
    why.add_argument("--nproc-per-node", type=int)
    why.add_argument("--budget", type=float, default=BUDGET, metavar="S", help=f"seconds to spend at most ({BUDGET:g})")
    why.add_argument("--set", nargs="+", action="extend", metavar="KNOB=VALUE", help="knobs to turn: micro_batch=16 num_workers=2")
    why.add_argument("--prove", action="store_true", help="run the best remedy as well, predicted against measured")
    why.add_argument("--json", action="store_true", help="print the brief for a program: at most 2 kB of JSON")
    fit = commands.add_parser("estimate", help="say what a task needs in memory, on a device that need not be here")
    fit.add_argument("target", help='a task ("my_task.py:build") or a sample ("clipart-resnet")')
    fit.add_argument("--device", default="cuda", help='a name, such as "H200"; "cpu"; or "cuda" (any GPU)')
    fit.add_argument("--set", nargs="+", action="extend", metavar="KNOB=VALUE", help="knobs to turn: micro_batch=16 precision=amp_bf16")
    fit.add_argument("--sequence", type=int, help="length of the sequences, instead of the task's own")
    fit.add_argument("--image", type=int, help="side of the images in pixels, instead of the task's own")
    fit.add_argument("--ladder", action="store_true", help="find the cheapest changes that make it fit")
    fit.add_argument("--max-batch", action="store_true", help="find the largest micro-batch that fits")
    learn = commands.add_parser(
        "calibrate",
        help="measure this machine's speeds for verdicts, and on a GPU the memory outside of the allocator",
    )
    learn.add_argument("--models", type=int, default=4, metavar="N", help="how many models to run on a GPU, half a minute each (4)")
    start.add_argument("--nnodes", type=int, default=1, help="machines: this one, and as many that join it")
    start.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="of this machine, as the others reach it (its name, and a free port)")
    enter = commands.add_parser("join", help="join a run of several machines that another one has launched")
    enter.add_argument("run_dir", help="its run directory, on a file system that both see")
    listed = commands.add_parser("runs", help="list the runs of a folder: state, progress, figures, what differs")
    listed.add_argument("runs_dir", nargs="?", help="where run directories are (runs)")
    listed.add_argument("--filter", default="", metavar="TEXT", help="only runs whose directory, name, state or knobs contain each word")
    listed.add_argument("--sort", metavar="COLUMN", help="created, run, state, steps, loss, throughput or 'differs in' (oldest first)")
    show = commands.add_parser("report", help="show a run directory")
    show.add_argument("path")
    show.add_argument("--would-fit", action="store_true", help="if memory ran out: predict which changes would have fitted")
    gate = commands.add_parser("check", help="hold a run against budgets: exit status 0 if all are kept, 1 if not")
    gate.add_argument("run_dir", help="the directory of the run")
    gate.add_argument("--budgets", required=True, metavar="FILE", help='TOML with limits: step = "120 ms", peak_memory = "+5 %%", …')
    gate.add_argument("--against", metavar="RUN_DIR", help="the run that relative limits refer to")
    gate.add_argument("--json", action="store_true", help="print JSON")
    words = sys.argv[1:] if argv is None else argv
    words, script_args = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    given, rest = parser.parse_known_args(words)
    if given.command == "lab":
        return subprocess.call([sys.executable, "-m", "jupyterlab", *rest])
    if rest:
        hint = "what is meant for the script comes after --: workbench launch train.py -- --epochs 1"
        if given.command == "estimate":
            hint = f"knobs are turned with --set: workbench estimate {given.target} --set micro_batch=16 precision=amp_bf16"
        parser.error(f"unknown arguments: {' '.join(rest)} ({hint})")
    try:
        if given.command == "doctor":
            return doctor(given)
        if given.command == "runs":
            listed_runs = workbench.list_runs(given.runs_dir).filter(given.filter)
            print(listed_runs.sort(given.sort) if given.sort else listed_runs)
            return 0
        if given.command == "report":
            shown = Run.load(given.path)
            print(report(shown), flush=True)
            if given.would_fit:
                print(f"\n{workbench.would_fit(shown)}")
            return 0
        if given.command == "check":
            checked = workbench.check_run(given.run_dir, given.budgets, against=given.against)
            print(json.dumps(checked.to_json()) if given.json else checked)
            return 0 if checked.ok else 1
        if given.command == "join":
            return join(given.run_dir)
        if given.command == "diagnose":
            return diagnose(given)
        if given.command == "estimate":
            return estimate(given)
        if given.command == "calibrate":
            return calibrate(given)
        run = workbench.launch(**_launch(given, script_args), nnodes=given.nnodes, rdzv_endpoint=given.rdzv_endpoint)
        if run.join_command:
            print(f"on each further machine: {run.join_command}", flush=True)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"workbench: {error}", file=sys.stderr)
        return 2
    try:
        run.wait()
    except KeyboardInterrupt:  # the wait has stopped the run
        print(f"workbench: {run}", file=sys.stderr)
        return 130
    print(report(run))
    return 0 if run.ok else 1


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `workbench report … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 0
    sys.exit(status)
