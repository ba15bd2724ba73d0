"""The command line, made of calls of the public API; `workbench --help` lists the commands."""

try:
    import argparse
    import importlib.util
    import json
    import os
    import re
    import shlex
    import subprocess
    import sys
    import textwrap
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Any, NoReturn

    import workbench
    from workbench.batch import lengths as batch_lengths
    from workbench.cluster import commands as cluster_commands
    from workbench.core import codec
    from workbench.core.checks import did_you_mean
    from workbench.core.interrupts import Terminated, terminated_as_interrupted
    from workbench.core.machine_speeds import MachineSpeeds
    from workbench.core.progress import begins, has_no_reader
    from workbench.core.run_directory import ALARMS
    from workbench.diagnosis import commands, regression
    from workbench.diagnosis.analysis.what_changed import QUANTITIES
    from workbench.diagnosis.api import BUDGET
    from workbench.runs.commands import COMMANDS, knob_help, lab_options, launch_arguments
    from workbench.runs.entrypoints import ON_HANG
    from workbench.runs.export import EXPORTED
    from workbench.runs.failure import RunError
    from workbench.runs.launch import environment, machine_report
    from workbench.runs.launch.nodes import join
    from workbench.runs.page import run_facts, run_text
    from workbench.runs.profile import STEPS
    from workbench.runs.rows import busy_note, threads_note
    from workbench.runs.run import Run
    from workbench.runs.spec import parse_knob
    from workbench.runs.task import check as check_task
except KeyboardInterrupt:  # in the first second, while all this is loaded
    raise SystemExit(130) from None


def launch(given: argparse.Namespace, script_args: list[str]) -> int:
    """Launch a script or a task, wait for its end and show it; returns the exit status."""
    run = workbench.launch(**launch_arguments(given, knobs_of(given.set or []), script_args))
    if run.join_command:
        print(f"on each further machine: {run.join_command}", file=sys.stderr if given.json else sys.stdout, flush=True)
    if not sys.stderr.isatty():  # there a progress line says so
        begins(f"running {given.target} in {run.path}" if given.target else f"{given.resume} goes on in {run.path}")
    if note := threads_note(run.path):
        print(f"note: {note}", file=sys.stderr, flush=True)
    with terminated_as_interrupted():
        run.wait()
    text = run_text(run)
    if sys.stderr.isatty() and sys.stdout.isatty():  # there the progress line has ended with how the run ended
        text = text.removeprefix(str(run)).lstrip("\n")
    show(run_facts(run) if given.json else text, given)
    rank = (run.error.rank or 0) if run.error else 0
    printed = [path for path in run.log_files().get(rank, []) if path.name == "stdout.log"]
    if printed and not given.json and not (run.error and run.error.stderr):
        of_rank = f" (rank {rank}; the others beside it)" if run.spec.world_size > 1 else ""
        print(f"\nwhat it printed: {printed[-1]}{of_rank}")
    if not given.json and (busy := busy_note(run.path)):
        print(f"\nnote: {busy}")
    if run.traces and not given.json:
        print(f"\nwhat its steps are made of: workbench trace {run.path}")
    return 0 if run.ok else 1


def show(result: object, given: argparse.Namespace) -> None:
    """Print a result, as JSON if that was asked for."""
    print(json.dumps(codec.to_json(result), ensure_ascii=False) if given.json else result, flush=True)


def runs(given: argparse.Namespace) -> int:
    """List the runs of a folder; returns the exit status."""
    if given.runs_dir and not Path(given.runs_dir).is_dir():
        raise ValueError(f"{given.runs_dir} is not a folder; runs are in the folder runs where they were launched: workbench runs FOLDER")
    if not given.runs_dir and not Path("runs").exists():
        print("[]" if given.json else "no runs here yet; start one with: workbench launch train.py")
        return 0
    listed = workbench.list_runs(given.runs_dir, experiments=given.all).filter(given.filter)
    listed = listed.sort(given.sort) if given.sort else listed
    show(list(listed) if given.json else listed, given)
    return 0


def show_run(given: argparse.Namespace) -> int:
    """Show a run directory; returns the exit status."""
    run = Run.load(given.path)
    report = workbench.report(run, flops_per_sample="count" if given.mfu else None)
    if given.html:
        report.save(given.html)
        if not given.json:
            print(f"the report is in {given.html}")
    if given.json or not given.html:
        facts = run_facts(run) | ({"mfu": report.mfu[0], "mfu_reason": report.mfu[1]} if given.mfu else {})
        show(facts if given.json else report, given)
    if given.would_fit:
        print(f"\n{workbench.would_fit(run)}")
    return 0


def export(given: argparse.Namespace) -> int:
    """Write a run for another tool; returns the exit status."""
    if given.to in EXPORTED:
        print(workbench.export_weights(given.path, given.folder, format=given.to))
        return 0
    print(workbench.export(Run.load(given.path), given.to, given.folder, flops_per_sample="count" if given.mfu else None))
    return 0


def check(given: argparse.Namespace) -> int:
    """Hold a run against budgets; returns the exit status: 0 if all are kept."""
    checked = workbench.check_run(given.run_dir, given.budgets, against=given.against)
    why = commands.reason_of(checked, given.budget) if given.why else None
    show({**codec.to_json(checked), "why": why and why.brief()} if why and given.json else checked, given)
    if why and not given.json:
        print(f"\n{why}")
    return 0 if checked.ok else 1


def compare(given: argparse.Namespace) -> int:
    """Set runs side by side; returns the exit status."""
    compared = workbench.compare(*map(Run.load, given.runs))
    show(compared.facts() if given.json else compared, given)
    if given.differences and not given.json:
        print(f"\n{compared.differences}")
    return 0


def trace(given: argparse.Namespace) -> int:
    """Show what the steps of a trace are made of; returns the exit status."""
    is_run = (Path(given.path) / "run.json").is_file()
    read = workbench.trace(Run.load(given.path)) if is_run else workbench.Trace.load(given.path)
    parts = read.breakdown()
    if given.json:
        show({"breakdown": parts, "verdict": read.explain().verdict}, given)
        return 0
    print(f"{read}\n\n{parts}\n\n{read.explain()}", flush=True)
    if given.operators and isinstance(read, workbench.Trace):
        print(f"\n{read.ops()}")
    return 0


def sanity(given: argparse.Namespace) -> int:
    """Check a task for the usual faults; returns the exit status: 0 if there is none."""
    spec = workbench.RunSpec(task=given.target).replace(**knobs_of(given.set or []))
    check_task(given.target)
    report = workbench.sanity(spec, budget_s=given.budget)
    if given.json:
        print(json.dumps(report.brief(), ensure_ascii=False))
    else:
        print(report)
    return 0 if report.ok else 1


def calibrate(given: argparse.Namespace) -> int:
    """Measure this machine's speeds, and the memory outside of PyTorch's allocator on its GPU, if it has one; returns the exit status."""

    begins("measuring the speed of this machine, a few seconds …")
    facts = machine_report.probe_torch("fresh", "links")
    if "error" in facts:
        raise ValueError(facts["error"])
    speeds, calibration = MachineSpeeds.from_json(facts["speeds"]), None
    if not given.json:
        print(speeds, flush=True)
    if environment.gpu_count():
        calibration = workbench.calibrate(given.models, budget_s=given.budget, tell=begins)
    if given.json:
        show({"speeds": speeds, "memory": calibration}, given)
    elif calibration:
        print(f"\n{calibration}")
    else:
        print("memory outside of the allocator: it can only be measured on an NVIDIA GPU, and none is visible here")
    return 0 if calibration is None or calibration.path else 1


def knobs_of(words: list[str]) -> dict[str, Any]:
    """The knobs in words of the form KNOB=VALUE."""
    for word in words:
        if "=" not in word:
            raise ValueError(f"--set {word}: expected a knob and its value, such as --set micro_batch=16 precision=amp_bf16")
    return dict(map(parse_knob, words))


class _Parser(argparse.ArgumentParser):
    """A parser that asks "did you mean" where a command is misspelt, and tells what is wrong alone, without the usage before."""

    def format_help(self) -> str:
        head, example, words = super().format_help().rpartition("example: ")
        return f"{head}{knob_help()}\n\n{example}{words}" if self.prog.endswith(" launch") else head + example + words

    def error(self, message: str) -> NoReturn:
        match = re.search(r"invalid choice: '([^']*)' \(choose from '?lab", message)
        if match:
            message = f"no command {match[1]!r}: {did_you_mean(match[1], COMMANDS)}the commands are {', '.join(COMMANDS)}"
        message = re.sub("invalid int value: (.*)", r"\1 is not a whole number", message).replace("invalid float value:", "not a number:")
        example = COMMANDS.get(self.prog.rpartition(" ")[2], ("", "", ""))[2]
        words = [f"{self.prog}: error: {message}", example and f"Example: {example}", f"All options: {self.prog} --help\n"]
        self.exit(2, "\n".join(filter(None, words)))


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the command line, and those of its commands."""
    parser = _Parser(
        prog="workbench", description="See where a training step spends its time, predict what a change would gain, and prove it."
    )
    parser.add_argument("--version", action="version", version=workbench.__version__)
    commands = parser.add_subparsers(dest="command")
    made: dict[str, argparse.ArgumentParser] = {}
    for name, (about, more, example) in COMMANDS.items():
        made[name] = commands.add_parser(
            name,
            help=about,
            add_help=name != "lab",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            description=textwrap.fill(f"{about[0].upper()}{about[1:]}. {more}", 100),
            epilog=f"example: {example}" if example else None,
        )

    def option(names: str, *flags: str, **options: Any) -> None:
        for name in names.split():
            made[name].add_argument(*flags, **options)

    loader = 'also check this loader: a task ("my_task.py:build"), a sample, or a function that returns a DataLoader'
    option("doctor", "target", nargs="?", help=loader)
    option("doctor", "--html", metavar="FILE", help="write the report as a self-contained HTML page")
    what = 'a script ("train.py"), a task ("my_task.py:build") or a sample ("clipart-resnet")'
    option("launch", "target", nargs="?", help=what)
    option("why-not-linear prove-resume", "target", help=what)
    option("diagnose", "target", help=f"{what}, or the directory of a run")
    for name in ("diagnose", "why-not-linear", "prove-resume"):
        made[name].set_defaults(args=[])
    task = 'a task ("my_task.py:build") or a sample ("clipart-resnet")'
    option("estimate estimate-time batch-lengths sanity", "target", help=task)
    option("plan", "target", help=f"{task}; or a Hugging Face config.json, which is also planned with tensor and pipeline parallelism")
    begins_with = "continue this run, with --set also on other ranks; or start a task from this torch.distributed.checkpoint directory"
    option("launch", "--resume", metavar="FOLDER", help=begins_with)
    option("launch", "--nproc-per-node", type=int, metavar="N", help="ranks on this machine, such as one for each GPU (1)")
    option("diagnose", "--nproc-per-node", type=int, metavar="N", help="ranks on this machine (1)")
    option("why-not-linear", "--nproc-per-node", type=int, metavar="N", help="ranks on this machine (2)")
    option("launch", "--steps", type=int, metavar="N", help="optimizer steps of a task (60)")
    option("batch-lengths", "--steps", type=int, metavar="N", help="optimizer steps (those of an epoch)")
    profile = f"trace this many steps with torch's profiler ({STEPS})"
    option("launch", "--profile", type=int, nargs="?", const=STEPS, metavar="STEPS", help=profile)
    option("launch", "--nnodes", type=int, metavar="N", help="number of machines: this one and those that join it")
    option(
        "launch",
        "--max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="largest number of restarts of a task with checkpoints after failures (0)",
    )
    option("launch", "--min-ranks", metavar="N", type=int, help="restart with the remaining ranks if there are at least N (all)")
    option(
        "launch",
        "--watch",
        choices=ALARMS,
        help="warn when steps become slower; then also time a small computation (experiments), or trace a few steps (trace)",
    )
    option("launch", "--on-hang", choices=ON_HANG, default="report", help="what to do when the run hangs (report)")
    option(
        "launch", "--rdzv-endpoint", metavar="HOST:PORT", help="address at which the others reach this machine (its name and a free port)"
    )
    for names, more in (("sanity replay", ""), ("diagnose why-not-linear", "; with --prove, as many again for the proof")):
        most = f"seconds to spend at most ({BUDGET:g}){more}"
        option(names, "--budget", "--budget-s", type=float, default=BUDGET, metavar="S", help=most)
    knob: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "KNOB=VALUE"}
    by = "knobs of the task to change, such as micro_batch=16 num_workers=2; workbench launch --help explains all of them"
    option("doctor estimate estimate-time batch-lengths plan sanity bisect", "--set", **knob, help=by)
    option("launch diagnose why-not-linear prove-resume", "--set", **knob, help=f"{by}. A script's own options come after --")
    option(
        "diagnose why-not-linear batch-lengths",
        "--prove",
        action="store_true",
        help="also run the best change, and compare its predicted gain with the measured one",
    )
    option("diagnose", "--remedy", metavar="KNOB=VALUE", help="prove this change instead of the best one, such as num_workers=2")
    option("estimate", "--device", default="cuda", help='a name, such as "H200"; "cpu"; or "cuda", any GPU (cuda)')
    option("estimate-time", "--device", required=True, help='a name, such as "H100"; "cpu" with --measured')
    option("batch-lengths", "--device", required=True, help='a name, such as "H100", or "cpu" for this machine')
    option("batch-lengths", "--capacity", type=int, metavar="BYTES", help="bytes that one rank may use, instead of the device's")
    option("estimate-time", "--cluster", metavar="NAME", help='nodes and links for several ranks, such as "DGX-H100"')
    option("estimate-time", "--measured", metavar="STEP", help="a step measured on that device: its seconds, or the directory of the run")
    option("estimate estimate-time plan", "--sequence", type=int, help="length of the sequences, instead of the task's own")
    option("estimate estimate-time", "--image", type=int, help="height and width of the images in pixels, instead of the task's own")
    option("estimate", "--ladder", action="store_true", help="find the cheapest changes that make the step fit")
    option("estimate", "--max-batch", action="store_true", help="find the largest micro-batch that fits")
    option("plan", "--cluster", required=True, metavar="NAME", help='a cluster from the catalogue, such as "DGX-H100"')
    option("plan", "--gpus", type=int, metavar="N", help="number of GPUs (any)")
    option("plan", "--global-batch", type=int, metavar="N", help="samples per step over all GPUs (the task's)")
    option("plan", "--top", type=int, default=8, metavar="N", help="largest number of plans to list (8)")
    option("plan", "--trainer", metavar="NAME", help='the program that trains, if it is not the workbench: "megatron" or "nanotron"')
    option(
        "plan",
        "--poll-interval",
        type=float,
        metavar="S",
        help="seconds that the trainer's pipeline stages sleep between two polls for a message",
    )
    option("plan", "--checked-collectives", action="store_true", help="the trainer runs with TORCH_DISTRIBUTED_DEBUG=DETAIL")
    option("trace", "path", help="a file of torch's profiler, a folder of such files, or the directory of a run")
    option("trace", "--operators", action="store_true", help="also list the operators, the slowest first")
    option("calibrate", "--models", type=int, default=4, metavar="N", help="number of models to run on a GPU, half a minute each (4)")
    option("join", "run_dir", help="the run directory, on a file system that both machines share")
    option("runs", "runs_dir", nargs="?", help="where run directories are (runs)")
    option("runs", "--filter", default="", metavar="TEXT", help="only runs whose directory, name, state or knobs contain each word")
    option("runs", "--sort", metavar="COLUMN", help="created, run, state, steps, loss, throughput or 'differs in' (oldest first)")
    option("runs", "--all", action="store_true", help="also list the workbench's own experiments")
    option("report export health replay", "path", help="the directory of the run")
    option("report", "--html", metavar="FILE", help="write the report as a self-contained HTML page")
    option("report export", "--mfu", action="store_true", help="add the MFU: import the run's task, and count its FLOPs in a dry run")
    option(
        "export", "to", choices=("tensorboard", "mlflow", "wandb", *EXPORTED), help="the program to write for, or the format of the weights"
    )
    option("replay", "--step", type=int, metavar="N", help="the step, from 1 (the first whose loss is not finite or far above the others)")
    option("prove-resume", "--result", metavar="FILE", help="of a script: the file in the folder {out} that is compared, such as last.pt")
    option("prove-resume", "--kills", type=int, default=2, metavar="N", help="how often a random rank is killed (2)")
    option("prove-resume", "--during-save", action="store_true", help="kill a script while it writes a file into its folder")
    option("prove-resume", "--timeout", type=float, default=600, metavar="S", help="seconds that each of the trainings may take (600)")
    option("export", "folder", help="the folder to write into; new records of the run are added")
    option("report", "--would-fit", action="store_true", help="if the run ran out of memory: predict which changes would have made it fit")
    option("compare", "runs", nargs="+", metavar="RUN_DIR", help="directories of runs, the baseline first; repeated launches in any order")
    option("compare", "--differences", action="store_true", help="list the differences in spec, environment, git, code, data and outcome")
    option("check", "run_dir", help="the directory of the run")
    limits = 'TOML with limits: step = "120 ms", peak_memory = "+5 %%", …'
    option("check", "--budgets", required=True, metavar="FILE", help=limits)
    option("check", "--against", metavar="RUN_DIR", help="the run to which relative limits refer")
    option("check", "--why", action="store_true", help="if a limit is not met: find the reason by short trainings of the other run")
    option("what-changed", "run_a", help="the directory of the good run")
    option("what-changed", "run_b", help="the directory of the bad run")
    option("what-changed", "--recorded", action="store_true", help="only compare what was recorded; train nothing")
    option("bisect", "target", help='a task that exists in all commits, such as "train/task.py:build"')
    option("bisect", "--good", required=True, metavar="COMMIT", help="an older commit without the regression")
    option("bisect", "--bad", default="HEAD", metavar="COMMIT", help="a newer commit with the regression (HEAD)")
    option("what-changed bisect", "--of", choices=QUANTITIES, default="time", help="what to compare (time)")
    last = "seconds after which no further run starts (600)"
    option("calibrate", "--budget", "--budget-s", type=float, default=600, metavar="S", help=last)
    for names, seconds in (("what-changed check", regression.BUDGET), ("bisect", regression.BISECT_BUDGET)):
        spent = f"seconds that the trainings may take ({seconds:g})"
        option(names, "--budget", "--budget-s", type=float, default=seconds, metavar="S", help=spent)
    option("diagnose why-not-linear sanity plan", "--json", action="store_true", help="print a brief for programs: at most 2 kB of JSON")
    option(
        "what-changed bisect health replay prove-resume",
        "--json",
        action="store_true",
        help="print the answer for programs: at most 2 kB of JSON",
    )
    printed = "doctor calibrate launch estimate estimate-time batch-lengths trace runs report compare check"
    option(printed, "--json", action="store_true", help="print JSON")
    for name in ("launch", "diagnose", "why-not-linear", "prove-resume"):
        made[name].usage = f"{made[name].format_usage().removeprefix('usage: ').rstrip()} [-- OPTIONS OF THE SCRIPT …]"
    return parser, made


def _refuse(parser: argparse.ArgumentParser, given: argparse.Namespace, rest: list[str]) -> None:
    """End with a message about arguments that a command, with this parser, does not have."""
    options = [flag for action in parser._actions for flag in action.option_strings]
    strange = next((word.partition("=")[0] for word in rest if word.startswith("--")), "")
    places = [action.dest.replace("_", " ") for action in parser._actions if not action.option_strings]
    if len(places) == 1 and given.command != "launch" and not any(word.startswith("-") for word in rest):
        number = {1: "two", 2: "three"}.get(len(rest), str(len(rest) + 1))
        more = "; workbench compare takes several runs" if given.command in ("diagnose", "report") else ""
        parser.error(f"one {places[0]} is allowed, {number} were given: {' '.join(rest)} is too much{more}")
    scripts = given.command == "launch" or ("args" in given and given.target.endswith(".py"))
    if hint := did_you_mean(strange, options, cutoff=0.85 if scripts else 0.7).strip():  # --text is no --set, but an option of the script
        pass
    elif scripts:
        own = f"workbench {given.command} {given.target or 'train.py'} -- {shlex.join(rest)}"
        hint = f"what is meant for the script comes after --: {own}; processes: --nproc-per-node 2"
    elif "--set" in options:
        hint = f"knobs are turned with --set: workbench {given.command} {given.target} --set micro_batch=16 precision=amp_bf16"
    else:
        hint = f"{given.command} has {', '.join(flag for flag in options if flag.startswith('--'))}"
    parser.error(f"unknown arguments: {' '.join(rest)} ({hint})")


_RUN: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "doctor": lambda given: commands.doctor(given, knobs_of(given.set or [])),
    "runs": runs,
    "report": show_run,
    "export": export,
    "check": check,
    "health": commands.health,
    "replay": commands.replayed,
    "prove-resume": lambda given: commands.resumed(given, knobs_of(given.set or [])),
    "compare": compare,
    "trace": trace,
    "diagnose": lambda given: commands.diagnosed(given, knobs_of(given.set or [])),
    "sanity": sanity,
    "calibrate": calibrate,
    "join": lambda given: join(given.run_dir),
    "estimate": lambda given: cluster_commands.estimate(given, knobs_of(given.set or []), show),
    "plan": lambda given: cluster_commands.plan(given, knobs_of(given.set or []), show),
    "batch-lengths": lambda given: batch_lengths.command(given, knobs_of(given.set or []), show),
    "estimate-time": lambda given: cluster_commands.estimate_time(given, knobs_of(given.set or []), show),
    "what-changed": commands.why,
    "bisect": lambda given: commands.first_bad(given, knobs_of(given.set or [])),
    "why-not-linear": lambda given: commands.not_linear(given, knobs_of(given.set or [])),
}
"""Command → what runs it; `lab` and `launch` hand further arguments on."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 where a command raises ValueError, whose message is printed in a line."""
    parser, made = _parser()
    words = sys.argv[1:] if argv is None else argv
    words, script_args = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    known = {flag for command in made.values() for action in command._actions for flag in action.option_strings}
    dashed = [(word.partition("=")[0].replace("_", "-"), word) for word in words]  # torchrun takes both ways of writing
    words = [flag + word[len(flag) :] if word.startswith("--") and flag in known else word for flag, word in dashed]
    given, rest = parser.parse_known_args(words)
    if given.command is None:
        parser.print_help(sys.stderr)
        return 2
    if given.command == "lab":
        if importlib.util.find_spec("jupyterlab") is None:
            made["lab"].error("JupyterLab is not installed here: pip install 'training-workbench[notebooks]', or jupyterlab")
        return subprocess.call([sys.executable, "-m", "jupyterlab", *lab_options(rest)])
    if rest:
        _refuse(made[given.command], given, rest)
    if given.command == "launch" and not (given.target or given.resume):
        made["launch"].error("a script, a task or --resume is needed")
    try:
        if given.command != "launch" and script_args and not ("args" in given and given.target.endswith(".py")):
            raise ValueError(f"what comes after -- is for a script, and there is none here: {shlex.join(script_args)}")
        given.args = script_args
        status = launch(given, script_args) if given.command == "launch" else _RUN[given.command](given)
        sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        if has_no_reader(1):  # `workbench report … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0
        print(f"workbench: {error}", file=sys.stderr)  # another pipe
        return 2
    except RunError as error:
        whole = error.failure.stderr and error.failure.place  # what it printed has the traceback
        said = ["" if whole else error.failure.traceback, f"workbench: {error}", *getattr(error, "__notes__", [])]
        print("\n".join(filter(None, said)), file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"workbench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:  # what was launched is stopped
        print(f"workbench: {str(error) or 'interrupted'}", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130


if __name__ == "__main__":
    sys.exit(main())
