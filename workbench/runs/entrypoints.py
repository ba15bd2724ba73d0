"""Names the programs that start in a process of their own, and gives the entrypoint that torchrun runs in each rank.

A program and the code that starts it share no import, only arguments, the run directory or JSON on a pipe. Only this file has the
programs' names. Each module has a function `main`.
"""

import dataclasses
import json
import sys
from pathlib import Path

from workbench.core import run_directory
from workbench.runs.spec import RunSpec, Spec

START = "workbench.programs.start"
"""Loads torch, then calls `main` of another program; torchrun, each rank and each worker begin with it."""
TORCHRUN = "workbench.programs.torchrun"
"""torchrun with a rendezvous that listens on one address and unpickles nothing; it starts the ranks."""
TRAIN = "workbench.programs.train"
"""Trains the specs of one or several run directories."""
SCRIPT = "workbench.programs.script"
"""Runs a script of the user's as it is."""
ALONE = "workbench.programs.alone"
"""Trains a spec that was not launched, in a pod of Kubernetes."""
NODE = "workbench.runs.launch.nodes"
"""Begins a job of Slurm, and runs each machine's part of it."""
WATCHDOG = "workbench.programs.watchdog"
"""Finds out who holds up a run; its guard starts it when a rank makes no progress."""
RESTART = "workbench.programs.restart"
"""Decides how a run goes on that lost a rank; its guard starts it after a failure."""
ON_HANG = ("report", "stop")
"""What is done about a run that hangs."""

EXPERIMENT = "workbench.programs.experiment"
"""Diagnoses a step, or times two specs against each other."""
MEMORY = "workbench.programs.memory"
"""Records what a step holds in memory."""
COMMUNICATION = "workbench.programs.communication"
"""Times collectives, or steps with and without their reduction of gradients."""
DIVERGENCE = "workbench.programs.divergence"
"""Records steps on several ranks, to compare them with others."""
LR_RANGE = "workbench.programs.lr_range"
"""Looks for a learning rate."""
STEPS_TO_TARGET = "workbench.programs.steps_to_target"
"""Trains with several batches and learning rates until a target is reached."""

CHOOSE_MICRO_BATCH = "workbench.programs.choose_micro_batch"
"""Chooses the micro-batch of a run that left it open."""
MACHINE = "workbench.programs.machine"
"""Finds out what a machine can do."""
COUNTING = "workbench.programs.counting"
"""Counts parameters and samples of tasks."""
ESTIMATE_WORKER = "workbench.programs.estimate_worker"
"""Estimates memory for the memory explorer."""
WORKERS = (CHOOSE_MICRO_BATCH, COUNTING, ESTIMATE_WORKER)
"""Programs that work for another process, even for a rank, and are no ranks themselves."""


def entrypoint(program: str, *run_dirs: Path) -> list[str]:
    """What torchrun runs in each rank: one of these programs with its run directories."""
    return ["-m", START, program, *map(str, run_dirs)]


def watchdog(run_dir: Path, on_hang: str) -> list[str]:
    """What a guard starts when a rank makes no progress."""
    return [sys.executable, "-m", WATCHDOG, str(run_dir), on_hang]


def restart(run_dir: Path, machine: int | None = None) -> list[str]:
    """What a guard starts after a failure, where restarts are allowed; of several machines on each, with its number."""
    return [sys.executable, "-m", RESTART, str(run_dir), *([] if machine is None else [str(machine)])]


def spec_entrypoint(spec: Spec, *run_dirs: Path) -> list[str]:
    """What torchrun runs in each rank for a spec: the trainer, or the user's script.

    {out} in a script's arguments becomes the folder `out` of its run directory, which is made.
    """
    if isinstance(spec, RunSpec):
        return entrypoint(TRAIN, *run_dirs)
    profile = ["--profile", json.dumps(dataclasses.asdict(spec.profile))] if spec.profile else []
    # after "--": otherwise a script's own --n or --log counts as an abbreviation of torchrun's options
    out, args = run_dirs[0] / "out", spec.args
    if any(run_directory.OUT in arg for arg in args):
        out.mkdir(exist_ok=True)
        args = tuple(arg.replace(run_directory.OUT, str(out)) for arg in args)
    return ["-m", "--", SCRIPT, *["--watch"] * spec.watch, *profile, spec.script, *args]
