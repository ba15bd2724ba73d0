"""launch: checks a RunSpec or script, and starts it under torchrun."""

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from workbench.core import run_directory
from workbench.core.checks import choice, near_script, real_number, unknown_names
from workbench.core.synonyms import accept_synonyms
from workbench.runs import combinations, restarts, task
from workbench.runs.entrypoints import ON_HANG, spec_entrypoint
from workbench.runs.export import DCP_INDEX
from workbench.runs.launch import environment
from workbench.runs.launch.new_run import LaunchError, NewRun
from workbench.runs.launch.rendezvous import TIMEOUT, Rendezvous, free_endpoint
from workbench.runs.launch.resume import (
    OF_ANOTHER_RUN,
    begin_with_dcp,
    changes_for_another,
    go_on,
    resumable,
    take_checkpoints,
    was_moved,
    with_names_of,
)
from workbench.runs.launch.slurm import Slurm
from workbench.runs.run import Run
from workbench.runs.spec import KNOBS, RunSpec, ScriptSpec, Spec, check_profile
from workbench.runs.target import check_launchable, named_task
from workbench.runs.training_knobs import is_own_schedule


@accept_synonyms
def launch(
    target: RunSpec | str | os.PathLike[str] | None = None,
    *,
    resume: Run | str | os.PathLike[str] | None = None,
    args: Sequence[str] = (),
    nproc_per_node: int | None = None,
    watch: bool | str = False,
    timeout: float | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    nnodes: int | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_timeout: float = TIMEOUT,
    on: Slurm | None = None,
    on_hang: Literal["report", "stop"] = "report",
    max_restarts: int = 0,
    min_ranks: int | None = None,
    **knobs: Any,
) -> Run:
    """Start a RunSpec, or any unedited training script, under torchrun, and return at once.

    The run ends with this process: no process stays behind when a kernel is restarted or killed. A Slurm job continues without it.

    On several machines, this one is the first, and `run.join_command` says what to type on each of the others. They must see the run
    directory and have the same Python and files.

    Args:
        target: a RunSpec, the name of a task, or the path of a script; left out with `resume`.
        resume: a run of this machine (or its directory) with checkpoints (`checkpoint_every=`) that was killed, stopped or failed. It
            continues from the last sound checkpoint, in its directory, from the folder where it was launched and with its spec; only
            `timeout` can be given with it. Order of samples, random numbers, weights and schedule continue where they were; `prove_resume`
            tests whether the run is then the same bit for bit. Earlier output of its processes is in `attempts/`. With a `target` that
            differs from its spec in `steps` (a run that has finished can take more), or in how ranks share the work (`parallel`,
            `nnodes`, `micro_batch`, …), a new run starts from its last checkpoint, with the same weights and optimizer states; `runs_dir`,
            `name`, `rdzv_endpoint` and `rdzv_timeout` are then allowed too. So it does with an equal `target` if the directory was
            moved. Or a torch.distributed.checkpoint directory: a new run of the RunSpec starts at step 0 with its weights, and with its
            optimizer states if it has any; options, schedule and samples are the spec's.
        args: the script's arguments. "{out}" in them stands for the folder `out` of the run directory, such as for checkpoints; no other
            launch uses it.
        nproc_per_node: ranks on this machine; None = the spec's own, 1 for a script.
        watch: True = find the script's loaders, modules and optimizers as it runs, and write a Timeline per rank (a RunSpec always has
            one). "always", for scripts and specs: each rank also reports when a phase, throughput, memory or loss becomes worse permanently
            (in `wb.health(run)` and the run's notes). "experiments": it may then also time a small computation. "trace": it then also
            traces a few steps, into the run's folder `alarms`.
        timeout: seconds after which the run is stopped; None = never.
        runs_dir: where run directories go; None = `runs` in the current folder.
        name: a name for people, which ends the run directory's name; None = the name of the task or script.
        nnodes: machines; None = the spec's own, 1 for a script, or those of `on`.
        rdzv_endpoint: with nnodes of 2 or more: host:port at which the others reach this machine; None = its host name with a free port.
        rdzv_timeout: seconds within which all machines must join.
        on: a Slurm object: the run becomes a Slurm job, followed through the run directory; None = it starts on this machine at once.
        on_hang: what happens when no rank makes progress and the rank that holds up the others is known (`run.hang`): "report" reports it
            and lets the run continue, "stop" also ends the run, after at least 30 s without progress.
        max_restarts: how often a RunSpec with checkpoints restarts by itself from the last checkpoint, after a rank was killed, crashed or
            raised an error, or a hang was stopped. It does not restart if the same error recurs before a further step. `run.restarts` lists
            the restarts.
        min_ranks: a restart may use the remaining ranks, but no fewer than this; more accumulation keeps the samples of a step the same. On
            several machines, it uses all ranks of the remaining machines. None = always all ranks.
        **knobs: fields of the RunSpec to change, as in `spec.replace`; for a script `threads`, and with `watch` also `profile`.

    Raises:
        LaunchError: no such script, more ranks than GPUs, arguments that do not go together, no place to write, no Slurm here, or Slurm
            refuses the job (in its own words). Nothing was written.
        SpecError: no such knob, or a value it does not take; fewer steps than `profile` needs.
        TaskError: the task's file or function does not exist.
    """
    check_timeout(timeout)
    check_timeout(rdzv_timeout, "rdzv_timeout")
    begin: Path | None = None
    if isinstance(resume, str | os.PathLike) and (Path(resume).expanduser() / DCP_INDEX).is_file():
        begin, resume = Path(resume).expanduser(), None
    if resume is not None:
        named = with_names_of(resume, target)
        changes = changes_for_another(resume, named)
        other = named if changes is not None else None
        given: dict[str, Any] = {"args": list(args), "nproc_per_node": nproc_per_node, "watch": watch}
        given |= {"nnodes": nnodes, "on": on, "on_hang": on_hang, "max_restarts": max_restarts, "min_ranks": min_ranks}
        if not other:
            given |= {"runs_dir": runs_dir, "name": name, "rdzv_endpoint": rdzv_endpoint, "rdzv_timeout": rdzv_timeout}
        _refuse_changes(given, knobs)
        ended = resumable(resume, named, anew=other is not None)
        if other:
            if other.local_sgd != "none" and changes and changes != {"steps"}:
                raise LaunchError(
                    f'local_sgd="{other.local_sgd}": each rank of {ended.run!r} has parameters of its own, so the run goes on with as many '
                    "ranks in the same layout: launch(resume=run), without a spec"
                )
            other = other.replace(**task.code_names(target if was_moved(ended.run) else ended.spec))
            check(other, alone=False)
            _warn_of(other)
            meeting = _meeting(other, rdzv_endpoint, rdzv_timeout)
            new = NewRun(runs_dir, name or label(other))
            take_checkpoints(ended.run, new)
            alarm = environment.asked_of_launch({}, ended.info).get(run_directory.ENV_ALARM, "")
            return new.start(other, spec_entrypoint(other, new.path), timeout, rendezvous=meeting, alarm=alarm)
        check(ended.spec)
        return go_on(ended, timeout)
    for word in ("task", "spec", "script"):
        target = knobs.pop(word, None) if target is None else target
    check_launchable(target, error=LaunchError)
    alarm = _alarm(watch, on)
    target = named_task(target) or target
    if isinstance(target, RunSpec):
        if args or watch is True:
            odd = f"args={list(args)!r}" if args else "watch=True"
            raise LaunchError(f"{odd} with a RunSpec: only a script takes it. Turn the spec's knobs instead: launch(spec, micro_batch=64)")
        ranks = {"nproc_per_node": nproc_per_node, "nnodes": nnodes}
        spec: Spec = target.replace(**knobs | {knob: value for knob, value in ranks.items() if value is not None})
    else:
        assert target is not None
        ranks = {"nproc_per_node": 1 if nproc_per_node is None else nproc_per_node, "nnodes": 1 if nnodes is None else nnodes}
        spec = script_spec(target, knobs, args=args, watch=bool(watch), **ranks)
    check_profile(spec)
    choice("on_hang", on_hang, ON_HANG, error=LaunchError)
    if on is not None and max_restarts:
        raise LaunchError(f"max_restarts={max_restarts} with on={on!r}: Slurm starts a job again by itself, with Slurm(requeue=True)")
    restarts.check(spec, max_restarts, min_ranks, LaunchError)
    if on is not None:
        if rdzv_endpoint is not None:
            raise LaunchError(f"rdzv_endpoint={rdzv_endpoint!r} with on={on!r}: the job chooses one on its first machine; leave it out")
        spec = on.sized(spec, nnodes)
        check(spec, here=False)
        _warn_of(spec)
        new = _made(runs_dir, name, spec, begin)
        batch = {"system": "slurm", "rdzv_timeout": rdzv_timeout} | on.kept
        return new.start(spec, spec_entrypoint(spec, new.path), timeout, submit=on.submit, batch=batch, on_hang=on_hang)
    check(spec, alone=False)
    _warn_of(spec)
    meeting = _meeting(spec, rdzv_endpoint, rdzv_timeout)
    new = _made(runs_dir, name, spec, begin)
    elastic = {"max_restarts": max_restarts, "min_ranks": min_ranks} if max_restarts else None
    program = spec_entrypoint(spec, new.path)
    return new.start(spec, program, timeout, rendezvous=meeting, on_hang=on_hang, elastic=elastic, alarm=alarm)


def _warn_of(spec: Spec) -> None:
    """Warn of knobs that have no effect as they are."""
    if not isinstance(spec, RunSpec):
        return
    example, steps = f"try checkpoint_every={combinations.some_steps(spec)}", f"with steps={spec.steps}"
    never = f"the warm-up takes all of them; try warmup_steps={spec.steps // 10}"
    keeps = spec.keep_checkpoints != KNOBS["keep_checkpoints"].default and not spec.checkpoint_every
    for knob, doubtful, why in (
        ("checkpoint_every", (spec.checkpoint_every or 0) > spec.steps, f"{steps}: no checkpoint is due; {example}"),
        ("warmup_steps", spec.warmup_steps >= spec.steps, f"{steps}: {never}"),
        ("keep_checkpoints", keeps, f"with checkpoint_every=None: no checkpoints are written; {example}"),
    ):
        if doubtful:
            warnings.warn(f"{knob}={getattr(spec, knob)} {why}", stacklevel=4)


def _made(runs_dir: str | os.PathLike[str] | None, name: str | None, spec: Spec, begin: Path | None) -> NewRun:
    """The directory of a new run, which may begin with a directory of torch.distributed.checkpoint."""
    new = NewRun(runs_dir, name or label(spec))
    if begin:
        begin_with_dcp(begin, new, spec)
    return new


def _meeting(spec: Spec, endpoint: str | None, timeout: float) -> Rendezvous | None:
    """Where the machines of a spec meet; None = it has one, for which an endpoint raises a LaunchError."""
    if endpoint is not None and spec.nnodes == 1:
        raise LaunchError(f"rdzv_endpoint={endpoint!r} with one machine, which has no other to meet; add nnodes=2 or more")
    return Rendezvous(nnodes=spec.nnodes, endpoint=endpoint or free_endpoint(), timeout=timeout) if spec.nnodes > 1 else None


def _alarm(watch: bool | str, on: Slurm | None) -> str:
    """What alarms the ranks may raise; "" = none."""
    if isinstance(watch, bool):
        return ""
    choice("watch", watch, run_directory.ALARMS, also=", True, False", error=LaunchError)
    if on is not None:
        raise LaunchError(f"watch={watch!r} with on={on!r}: export {run_directory.ENV_ALARM}={watch} in the job instead")
    return watch


def _refuse_changes(given: dict[str, Any], knobs: dict[str, Any]) -> None:
    """Raise for what does not go with `resume`: any knob, and any argument that is not at its default."""
    usual = {"args": [], "watch": False, "rdzv_timeout": TIMEOUT, "on_hang": "report", "max_restarts": 0}
    for name, value in ({name: value for name, value in given.items() if value != usual.get(name)} | knobs).items():
        way = f": wb.launch(run.spec.replace({name}={value!r}), resume=run) begins with its checkpoint" if name in OF_ANOTHER_RUN else ""
        raise LaunchError(
            f"{name}={value!r} with resume=…: a run goes on as it was launched, with its own spec; launch a new run for another{way}"
        )


def check_script(script: str | os.PathLike[str]) -> Path:
    """The path of a script that is there to be run.

    Raises:
        LaunchError: it is not there, or is not a Python file.
    """
    path = Path(script).expanduser().absolute()
    if path.suffix != ".py" or not path.is_file():
        foreign = "\\" in str(script) and os.sep == "/"
        hint = "a path of this machine has / where yours has \\" if foreign else near_script(path)
        what = "is not a Python script (*.py)" if path.exists() else "does not exist"
        raise LaunchError(f"{path} {what}: {hint}")
    return path


def script_spec(script: str | os.PathLike[str], knobs: dict[str, Any], **fields: Any) -> ScriptSpec:
    """The spec of a script that is there to be run.

    Raises:
        LaunchError: it is not there, is not a Python file, or a knob of a RunSpec was given.
        SpecError: a value that is not allowed.
    """
    path = check_script(script)
    strange = {knob: value for knob, value in knobs.items() if knob not in ("threads", "profile")}
    if strange:
        known = ("args", "nproc_per_node", "nnodes", "watch", "threads", "profile", "timeout", "runs_dir", "name", "on_hang")
        meant = dict.fromkeys(KNOBS["nproc_per_node"].elsewhere, "nproc_per_node")
        told = unknown_names("a script has no knob", strange, known, meant=meant)
        own = [word for knob, value in strange.items() if knob not in meant for word in (f"--{knob.replace('_', '-')}", str(value))]
        raise LaunchError(told + (f". Its own options go into args: args={json.dumps(own)}" if own else ""))
    return ScriptSpec(script=str(path), **fields, **knobs)


def check(spec: Spec, *, alone: bool = True, here: bool = True) -> None:
    """Check that a spec can run; on this machine, if it runs here, and on no other, if it runs alone.

    Raises:
        TaskError: its task is not there.
        LaunchError: it wants more GPUs than there are, or what only GPUs do, or other machines where this one works alone.
    """
    if alone and here and spec.nnodes > 1:
        raise LaunchError(
            f"nnodes={spec.nnodes}: several machines are for wb.launch, and this works on one: try spec.replace(nnodes=1), with "
            f"nproc_per_node={spec.world_size} where this machine has the GPUs or cores"
        )
    if isinstance(spec, ScriptSpec):  # what a script does with its ranks is its own affair
        return
    task.check(spec.task)
    if is_own_schedule(spec.schedule):
        task.check_schedule(spec.schedule)
    combinations.check(spec)  # a run's own spec was read without
    combinations.check_task(spec)
    combinations.check_samples(spec)
    gpus = environment.gpu_count() if here else None
    outnumbered = gpus is not None and spec.nproc_per_node > gpus and spec.backend != "gloo"
    if (spec.device == "cpu" or (spec.device == "auto" and (gpus == 0 or outnumbered))) and (why := combinations.on_cpu(spec)):
        few = f" (nproc_per_node={spec.nproc_per_node}, and there are {gpus} GPUs: it runs on the CPU)" if gpus and outnumbered else ""
        raise LaunchError(why + few)
    if spec.gradient_compression == "bf16" and spec.backend == "gloo":
        raise LaunchError(combinations.BF16)
    if not here:
        return
    if spec.device != "cpu":
        _check_gpus(spec, gpus)


def _check_gpus(spec: RunSpec, gpus: int | None) -> None:
    """Raise if the spec needs GPUs that this machine lacks; warn if the run will compute on the CPU for want of GPUs."""
    ranks, trouble = spec.nproc_per_node, environment.gpu_trouble(gpus)
    must = next((f'{knob}="{value}"' for knob, value in (("device", "cuda"), ("backend", "nccl")) if getattr(spec, knob) == value), None)
    if must and gpus == 0:
        raise LaunchError(
            f"{must}, and no NVIDIA GPU is visible here (/dev/nvidia0, CUDA_VISIBLE_DEVICES): try "
            + ('device="cpu"' if spec.device == "cuda" else 'backend="auto"')
        )
    if must and trouble and environment.torch_cuda() is None:
        raise LaunchError(f'{must}, and {trouble}. To use the CPU: device="cpu"')
    if trouble:
        warnings.warn(f"the run computes on the CPU, although {gpus} NVIDIA GPU{'s' * (gpus != 1)} can be seen: {trouble}", stacklevel=3)
    elif gpus and ranks > gpus and must and spec.backend != "gloo":
        raise LaunchError(
            f"nproc_per_node={ranks} with {must}: at most {gpus} here, one rank per visible GPU. "
            f'Try nproc_per_node={gpus}, or device="auto", which takes the CPUs where ranks outnumber GPUs'
        )
    elif gpus and ranks > gpus and spec.backend != "gloo":
        warnings.warn(
            f"the run computes on the CPU: nproc_per_node={ranks} is more than the visible GPUs ({gpus}), each of which takes one rank. "
            f'To use the GPUs: nproc_per_node={gpus}; to use the CPU without this warning: device="cpu"',
            stacklevel=3,
        )


def check_timeout(timeout: float | None, what: str = "timeout") -> None:
    """Raise unless a time limit is a positive number.

    Raises:
        LaunchError: it is not a positive number.
    """
    if timeout is not None:
        also = ", or None for no limit" if what == "timeout" else ""
        real_number(what, timeout, above=0, what="seconds", also=also, error=LaunchError, finite=False)


def label(spec: Spec) -> str:
    """A run's name, where none is given."""
    return task.label(spec.task) if isinstance(spec, RunSpec) else Path(spec.script).stem
