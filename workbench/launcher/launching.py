"""`launch`: what was asked for is checked, then started."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench import task
from workbench.launcher import environment
from workbench.launcher.start import LaunchError, NewRun
from workbench.run import Run
from workbench.spec import RunSpec, ScriptSpec, Spec


def launch(
    target: RunSpec | str | os.PathLike[str],
    *,
    args: Sequence[str] = (),
    nproc_per_node: int | None = None,
    watch: bool = False,
    timeout: float | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    **knobs: Any,
) -> Run:
    """Start a RunSpec, or any training script as it is, under torchrun, and return at once.

    The run ends with this process: nothing stays behind when a kernel is restarted or killed.

    Args:
        target: a RunSpec, or the path of a script.
        args: the script's arguments.
        nproc_per_node: ranks on this machine; None = the spec's own, 1 for a script.
        watch: find the script's loaders, modules and optimizers as it runs and write a Timeline per rank (a RunSpec always has one).
        timeout: seconds after which the run is stopped; None = never.
        runs_dir: where run directories go; None = `runs` in the current folder.
        name: for people, and the end of the run directory's name; None = after the task or script.
        **knobs: fields of the RunSpec to change, as `spec.replace` does; for a script `threads`.

    Raises:
        LaunchError: no such script, more ranks than GPUs, arguments that do not go together, no place to write. Nothing was written.
        SpecError: no such knob, or a value it does not take.
        TaskError: the task's file or function is not there.
    """
    if isinstance(target, RunSpec):
        if args or watch:
            given = f"args={list(args)!r}" if args else "watch=True"
            raise LaunchError(
                f"{given} with a RunSpec: only a script takes it. Turn the spec's knobs instead: launch(spec, micro_batch=64)"
            )
        spec: Spec = target.replace(**knobs | ({} if nproc_per_node is None else {"nproc_per_node": nproc_per_node}))
    else:
        spec = script_spec(target, knobs, args=args, watch=watch, nproc_per_node=1 if nproc_per_node is None else nproc_per_node)
    check(spec)
    check_timeout(timeout)
    new = NewRun(runs_dir, name or label(spec))
    return new.start(spec, program(spec, new.path), timeout)


def script_spec(script: str | os.PathLike[str], knobs: dict[str, Any], **fields: Any) -> ScriptSpec:
    """The spec of a script that is there to be run.

    Raises:
        LaunchError: it is not there, is not a Python file, or a knob of a RunSpec was given.
        SpecError: a value that is not allowed.
    """
    path = Path(script).expanduser().absolute()
    if path.suffix != ".py" or not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        there = f"in that folder there are {', '.join(near[:8])}" if near else "that folder has no .py file"
        what = "is not a Python script (*.py)" if path.exists() else "does not exist"
        hint = " A task is launched by its spec: launch(RunSpec(task=…))." if str(script) in task.SAMPLES or ":" in str(script) else ""
        raise LaunchError(f"{path} {what}; {there}.{hint}")
    strange = [knob for knob in knobs if knob != "threads"]
    if strange:
        raise LaunchError(
            f"{strange[0]}={knobs[strange[0]]!r} with a script: a script takes the knobs nproc_per_node and threads. "
            f'Its own options go into args: args=["--{strange[0].replace("_", "-")}", "{knobs[strange[0]]}"]'
        )
    return ScriptSpec(script=str(path), **fields, **knobs)


def check(spec: Spec) -> None:
    """See that a spec can run on this machine.

    Raises:
        TaskError: its task is not there.
        LaunchError: it wants more GPUs than there are.
    """
    if isinstance(spec, ScriptSpec):  # what a script does with its ranks is its own affair
        return
    task.check(spec.task)
    gpus = 0 if spec.device == "cpu" else environment.gpu_count()
    if spec.device == "cuda" and gpus == 0:
        raise LaunchError('device="cuda", and no NVIDIA GPU is visible here (/dev/nvidia0, CUDA_VISIBLE_DEVICES): try device="cpu"')
    if gpus and spec.nproc_per_node > gpus and spec.device == "cuda" and spec.backend != "gloo":
        raise LaunchError(
            f'nproc_per_node={spec.nproc_per_node} on device="cuda": at most {gpus} here, one rank per visible GPU. '
            f'Try nproc_per_node={gpus}, or device="auto", which takes the CPUs where ranks outnumber GPUs'
        )


def check_timeout(timeout: float | None) -> None:
    """Refuse a time limit that is none.

    Raises:
        LaunchError: it is not a positive number.
    """
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0):
        raise LaunchError(f"timeout={timeout!r}: seconds above 0 are allowed, or None for no limit")


def label(spec: Spec) -> str:
    """A run's name, where none is given."""
    return task.label(spec.task) if isinstance(spec, RunSpec) else Path(spec.script).stem


def program(spec: Spec, *run_dirs: Path) -> list[str]:
    """What torchrun starts in every rank."""
    if isinstance(spec, RunSpec):
        return ["-m", "workbench.train", *map(str, run_dirs)]
    # behind "--": else a script's own --n or --log counts as an abbreviation of torchrun's options
    return ["-m", "--", "workbench.train.script", *["--watch"] * spec.watch, spec.script, *spec.args]
