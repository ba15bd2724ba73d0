"""`workbench lab | doctor | launch | report`: the terminal's way in; each is a call of the public API."""

import argparse
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import workbench
from workbench import display, units
from workbench.run import Run


def doctor() -> display.Table:
    """What this machine has of what a run needs."""

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    packages = ("training-workbench", "torch", "jupyterlab", "ipykernel", "ipywidgets", "anywidget")
    rows = [
        ["Python", sys.version.split()[0]],
        *([name, version(name)] for name in packages),
        ["CPU cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())],
        ["NVIDIA GPUs", str(gpus)],
        ["shared memory for loaders", units.bytes_(shm.f_bavail * shm.f_frsize) if shm else "–"],
    ]
    return display.Table(columns=("what", "here"), rows=rows, title="workbench doctor")


def report(run: Run) -> str:
    """A run in words and tables: how it ended, where the time went on each rank."""
    return "\n\n".join([str(run), *map(str, run.timelines)])


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="workbench", description="See where a training step goes, predict what a change gains, prove it.")
    parser.add_argument("--version", action="version", version=workbench.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lab", help="open JupyterLab", add_help=False)
    commands.add_parser("doctor", help="what this machine has")
    run = commands.add_parser("launch", help="run a script or a sample task under torchrun and show where its time goes")
    run.add_argument("target", help='a script ("train.py"), a task ("my_task.py:build") or a sample ("clipart-resnet")')
    run.add_argument("--nproc-per-node", type=int, default=1)
    run.add_argument("--steps", type=int, default=60, help="optimizer steps (tasks only)")
    run.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    show = commands.add_parser("report", help="show a run directory")
    show.add_argument("path")
    given, rest = parser.parse_known_args(argv)
    if given.command == "lab":
        return subprocess.call([sys.executable, "-m", "jupyterlab", *rest])
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    try:
        if given.command == "doctor":
            print(doctor())
            return 0
        if given.command == "report":
            print(report(Run.load(given.path)))
            return 0
        if given.target.endswith(".py"):
            found = workbench.launch(given.target, args=given.args, nproc_per_node=given.nproc_per_node, watch=True)
        else:
            found = workbench.launch(workbench.RunSpec(task=given.target, nproc_per_node=given.nproc_per_node, steps=given.steps))
    except (ValueError, OSError) as error:
        print(f"workbench: {error}", file=sys.stderr)
        return 2
    found.wait()
    print(report(found))
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
