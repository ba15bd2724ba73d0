"""The commands of the command line: what each does, and an example. `__main__.py` has their options and runs them."""

import argparse
import ast
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

from workbench.core.checks import did_you_mean, nearest
from workbench.core.run_directory import RUN_JSON
from workbench.runs.export import DCP_INDEX
from workbench.runs.run import Run
from workbench.runs.spec import KNOBS, RunSpec

COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "lab": ("open JupyterLab in the current folder", "", ""),
    "doctor": (
        "report what this machine has and what will cause trouble, with fixes; with a target, also check its data loader",
        "Looks at Python, torch, GPUs, links, memory, limits and disks. With a target, it also reads batches of its loader; the exit "
        "status is 1 if the loader fails or returns wrong data. Takes a few seconds, and changes nothing on the machine.",
        "workbench doctor my_task.py:build --set num_workers=2",
    ),
    "launch": (
        "run a script or a task under torchrun and show where its time goes",
        "Runs it to the end and prints where the time of its steps went. Writes a run directory into the folder runs. Ctrl-C stops it.",
        "workbench launch train.py --nproc-per-node 2 -- --epochs 1",
    ),
    "diagnose": (
        "find out by experiment what limits a task's step, and what would help",
        "Runs a task with parts of its step left out, and says which part limits it. A script is run and observed, and writes "
        "where it always writes, unless its options name the new folder {out}; a run is only read.",
        "workbench diagnose clipart-resnet --budget 30 --set num_workers=2",
    ),
    "why-not-linear": (
        "find out by experiment why N ranks are slower than N times one rank",
        "Times one rank alone, independent ranks at once, and all ranks together, and splits the gap into parts that add up. A task's "
        "experiments take turns in one launch; a script runs unedited, in one launch after another.",
        "workbench why-not-linear clipart-resnet --nproc-per-node 2 --budget 40",
    ),
    "sanity": (
        "check a task for the usual faults before a large run",
        "Tests model, loss, labels and data in this process: gradients, chance level, leaks, modes. The exit status is 1 if a check fails.",
        "workbench sanity fashion-mlp --budget 30",
    ),
    "estimate": (
        "predict how much memory a task needs, also on a device that this machine lacks",
        "Runs a step on fake tensors, which have no values, so no GPU is needed. The exit status is 1 if the step does not fit.",
        "workbench estimate clipart-resnet --device H200 --set micro_batch=64",
    ),
    "estimate-time": (
        "predict how long a step of a task takes, also on a device that this machine lacks",
        "Counts the operators of a step on fake tensors, which have no values, and computes their seconds from the device's datasheet or "
        "from a measured step.",
        "workbench estimate-time text-gpt --device H100 --set precision=amp_bf16",
    ),
    "batch-lengths": (
        "find from the lengths of a task's samples the step that will run out of memory",
        "Reads the samples' lengths in the order of the training, and predicts memory, padding, and what bucketing and packing would gain.",
        "workbench batch-lengths text-gpt --device H100 --steps 50",
    ),
    "plan": (
        "find the layouts of a task on a cluster that fit and are fast",
        "Counts the task's operators by dry runs on fake tensors, then computes step time and memory of all layouts. In Python, "
        "wb.plan(wb.Transformer(layers=…, …), …) needs only a model's sizes, and no dry run.",
        "workbench plan clipart-resnet --cluster DGX-H100 --gpus 8 --global-batch 1024",
    ),
    "trace": (
        "show where the time of a trace's steps goes",
        "Reads a file of torch's profiler, a folder with the files of all ranks, or the traces of a run (launch --profile).",
        "workbench trace trace.json.gz",
    ),
    "calibrate": (
        "measure this machine's speeds for verdicts, and on a GPU the memory outside the allocator",
        "Takes a few seconds on a CPU, and about half a minute for each model on a GPU. Later diagnoses and estimates use the result.",
        "workbench calibrate --models 2",
    ),
    "join": (
        "join a run on several machines that another machine launched",
        "The machine that launches the run prints this command.",
        "workbench join /shared/runs/2026-01-31T12-00-00-train",
    ),
    "runs": (
        "list the runs in a folder: state, progress, figures and differences",
        "Lists trainings; --all also lists the workbench's own experiments.",
        "workbench runs --filter failed --sort loss",
    ),
    "report": (
        "show a run directory",
        "Says how the run ended and where the time of each rank went.",
        "workbench report runs/2026-01-31T12-00-00-train",
    ),
    "health": (
        "say what went wrong with the numbers of a run: exit status 0 if nothing did, 1 if something did",
        "Looks for a loss that is NaN, jumps or does not fall, exploding gradients, slow ranks, a hang, and reported alarms. The run may "
        "still be in progress. The exit status is also 1 if there is nothing to look at yet.",
        "workbench health runs/2026-01-31T12-00-00-train",
    ),
    "replay": (
        "repeat a step of a run with changes, and say what made it go wrong",
        "Repeats the run from its nearest checkpoint in this process. Takes the step as it was, in a higher precision, at a lower learning "
        "rate, and without each of its samples. Executes the code of the run's task.",
        "workbench replay runs/2026-01-31T12-00-00-train --step 300",
    ),
    "prove-resume": (
        "kill a training at random steps, resume it, and compare it bit for bit with one that is not killed: exit status 0 if it is equal",
        "A script reads and writes its checkpoints in the folder that {out} in its arguments stands for; --result is the file in it "
        "that is compared.",
        "workbench prove-resume train.py --result last.pt -- --out {out}",
    ),
    "export": (
        "write a run for TensorBoard, MLflow or Weights & Biases, or its weights for other programs, offline",
        "Adds what is new since the last export, so it can be repeated while the run continues. 'safetensors' writes the last checkpoint's "
        "weights in the Hugging Face hub's format, 'dcp' weights and optimizer for torch.distributed.checkpoint.",
        "workbench export runs/2026-01-31T12-00-00-train tensorboard board",
    ),
    "compare": (
        "compare runs side by side; the first is the baseline",
        "Shows the knobs that differ, step time, throughput and speedup. Launches that differ in nothing that was recorded are taken "
        "together: give those before and after a change at once.",
        "workbench compare runs/before runs/after runs/before2 runs/after2",
    ),
    "what-changed": (
        "find out by short trainings why one run is slower, larger or worse than another",
        "Applies the differences to the good run one by one until the regression appears, or finds that the machine is the reason.",
        "workbench what-changed runs/yesterday runs/today",
    ),
    "bisect": (
        "find the commit that made a training slower, larger or worse",
        "Trains commits between a good and a bad one, each in a separate folder, as often as the noise requires.",
        "workbench bisect train/task.py:build --good v1.2",
    ),
    "check": (
        "check a run against budgets: exit status 0 if all are met, 1 if not",
        "For CI: limits on time, throughput, memory, waiting and loss, absolute or relative to another run. --why finds the reason.",
        "workbench check runs/after --budgets budgets.toml --against runs/before",
    ),
}
"""Command → what it does in a line, more about it, and an example."""


def knob_meanings() -> dict[str, str]:
    """The fields of RunSpec and what each means: the texts below them in its source."""
    return dict(_field_docs(ast.parse(inspect.getsource(RunSpec)).body[0]))


def _field_docs(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The strings below the fields of a class."""
    for field, below in pairwise(getattr(tree, "body", [])):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            yield field.target.id, " ".join(ast.literal_eval(below.value).split())


def knob_help() -> str:
    """What `workbench launch --help` says of the knobs of a task: the default and the meaning of each."""
    meanings = knob_meanings()
    rows = [f"{name} ({about.default!r}): {meanings[name]}" for name, about in list(KNOBS.items())[1:]]
    told = [textwrap.fill(row, 100, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False) for row in rows]
    return "\n".join(["knobs of a task, for --set (default):", *told])


def refuse_knobs(command: str, script: str, knobs: Mapping[str, Any], *, allowed: Sequence[str] = ()) -> None:
    """Say where a script's own options go, and which of them has a name like the knob's."""
    for name in sorted(knobs.keys() - set(allowed)):
        takes = f"for a script it takes {' and '.join(allowed)}" if allowed else "it is for tasks, such as my_task.py:build"
        source = Path(script).read_text(encoding="utf-8", errors="replace") if Path(script).is_file() else ""
        options = {each.replace("-", "_"): each for each in re.findall(r"""add_argument\([^)]*?["']--([\w-]+)""", source)}
        # The most words in common, those that say nothing left out; of several options the one with the nearest name.
        words = {*name.split("_")} - {"num", "max", "n"}
        alike = {each: (len({*each.split("_")} & words), SequenceMatcher(None, name, each).ratio()) for each in options}
        near = max(alike, key=alike.__getitem__, default=None)
        near = near if near and alike[near][0] else nearest(name, options)
        own = f"--{options[near]} {knobs[name]}" if near else "--your-option value"
        raise ValueError(
            f"--set {name}={knobs[name]} with a script: {did_you_mean(name, allowed)}{takes}. A script's own options come after --: "
            f"workbench {command} {script} -- {own}"
        )


def launch_arguments(given: argparse.Namespace, knobs: Mapping[str, Any], script_args: Sequence[str]) -> dict[str, Any]:
    """The arguments of `launch` for what was typed: target and options, knobs of `--set`, and what came after `--`."""
    knobs = {**knobs} if given.profile is None else {**knobs, "profile": given.profile}
    names = ("resume", "nproc_per_node", "nnodes", "rdzv_endpoint", "on_hang", "max_restarts", "min_ranks")
    common = {name: getattr(given, name) for name in names} | ({"watch": given.watch} if given.watch else {})
    if given.target and given.target.endswith(".py"):
        if given.steps is not None:
            raise ValueError(f"--steps {given.steps} with a script: its own arguments come after --; a task in it: {given.target}:build")
        refuse_knobs("launch", given.target, knobs, allowed=("threads", "profile"))
        return {"target": given.target, "args": script_args, "watch": True, **common, **knobs}
    if script_args:
        what = f"{given.target!r} is a task, and" if given.target else f"what {given.resume} goes on with"
        raise ValueError(f"{what} takes no arguments of its own: {' '.join(script_args)}")
    if given.resume and not (Path(given.resume).expanduser() / DCP_INDEX).is_file():
        if not (Path(given.resume).expanduser() / RUN_JSON).is_file():
            raise ValueError(
                f"--resume {given.resume}: it is neither the directory of a run, with a {RUN_JSON}, nor one of "
                f"torch.distributed.checkpoint, with a {DCP_INDEX}"
            )
        if given.target:
            raise ValueError(f"{given.target} with --resume: a run goes on with its own task; leave {given.target} out")
        changes = {name: getattr(given, name) for name in ("nproc_per_node", "nnodes", "steps") if getattr(given, name) is not None} | knobs
        spec = Run.load(given.resume).spec
        common |= {"nproc_per_node": None, "nnodes": None}
        return {"target": spec.replace(**changes) if changes and isinstance(spec, RunSpec) else None, **common}
    if not given.target:
        raise ValueError(
            f"{given.resume} is of torch.distributed.checkpoint, and does not say what to train: workbench launch TASK "
            f"--resume {given.resume} --set checkpoint_every=100"
        )
    steps = 60 if given.steps is None else given.steps
    return {"target": RunSpec(task=given.target, steps=steps).replace(**knobs), **common}


def lab_options(words: list[str]) -> list[str]:
    """What JupyterLab is given: as root also --allow-root, without which it refuses to start. A line says so, and two precede its help."""
    if {"-h", "--help", "--help-all"} & set(words):
        print(f"workbench lab opens JupyterLab in the current folder, {Path.cwd()}.")
        print("Its options are JupyterLab's own, and are passed on. JupyterLab's help:", flush=True)
    elif os.geteuid() == 0 and not any("allow-root" in word or "allow_root" in word for word in words):
        print(
            "workbench: you are root, so JupyterLab gets --allow-root: whoever has its address and token can do what root can",
            file=sys.stderr,
        )
        return [*words, "--allow-root"]
    return words
