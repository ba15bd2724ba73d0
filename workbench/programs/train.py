"""Trains the specs of one or several run directories: `python -m workbench.programs.train RUN_DIR [RUN_DIR…]`, once per rank.

Several specs train one after the other in the same processes: start-up is paid once, and all meet equal conditions.
"""

import argparse
import contextlib
import dataclasses
import gc
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from workbench.batch.measure.noise_watch import NoiseLog
from workbench.core import run_directory
from workbench.memory.measure.at_oom import held
from workbench.runs import entrypoints, failure, rank_watchdog
from workbench.runs.launch import environment
from workbench.runs.restarts import present_spec
from workbench.runs.root_cause import first_failure
from workbench.runs.spec import AUTO, RunSpec, SpecError, spec_from_json
from workbench.runs.task import resolve
from workbench.runs.training_knobs import UNEVALUATED
from workbench.train.loop import train
from workbench.train.ranks import Ranks

WARMUP_STEPS = 3
"""Steps of the throw-away run before the first: kernels are chosen, caches filled, clocks raised."""
WARMUP_BATCH = 2
"""Its micro-batch where that of the first run is yet to be chosen."""


def main(arguments: Sequence[str] | None = None) -> str:
    """Train; an error is recorded before anything is torn down, so that the rank at fault can be distinguished from its victims.

    Returns:
        The name of the signal that ended the training before its last step, with a checkpoint; "" = none did.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {entrypoints.TRAIN}", description=__doc__)
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="directory with a run.json")
    run_dirs, preempted = parser.parse_args(arguments).run_dirs, ""
    rank_watchdog.start()
    failure.reserve_memory()
    try:
        specs = [read_spec(run_dir) for run_dir in run_dirs]
        if len(specs) == 1:
            task = resolve(specs[0].task)  # before the group: a wrong name needs no peers to be found
            ranks = Ranks.join(specs[0])
            _record_git(run_dirs, ranks)
            train(specs[0], task, ranks, run_dirs[0], held=held, noise_log=NoiseLog, preemptible=True)
            preempted = ranks.preempted
            ranks.agree(True)  # nobody leaves while rank 0 evaluates
        else:
            ranks = Ranks.join(specs[0])
            _record_git(run_dirs, ranks)
            train_all(specs, run_dirs, ranks)
    except BaseException as error:
        failure.record(error, run_dir=failure.of_the_launch() or run_dirs[0], held=held)
        raise
    Ranks.leave()
    return preempted


def _record_git(run_dirs: Sequence[Path], ranks: Ranks) -> None:
    """Write the state of this folder in git beside each run, from a thread: a large repository is not worth a wait."""

    def write() -> None:
        state = environment.git_state(Path.cwd())
        with contextlib.suppress(OSError):
            for run_dir in run_dirs if state else ():
                run_directory.write_json(run_dir / run_directory.GIT, state)

    if ranks.rank == 0:
        threading.Thread(target=write, name="workbench-git", daemon=True).start()


def read_spec(run_dir: Path) -> RunSpec:
    """The spec of a run directory.

    Raises:
        DamagedRunError: it has no run.json that can be read.
        SpecError: it is the spec of a script, or holds what this workbench does not know.
    """
    spec = spec_from_json(present_spec(run_directory.read_json(run_dir / run_directory.RUN_JSON)))
    if not isinstance(spec, RunSpec):
        raise SpecError(f"{run_dir} holds the spec of a script: python -m {entrypoints.SCRIPT} runs those")
    return spec


def train_all(specs: Sequence[RunSpec], run_dirs: Sequence[Path], ranks: Ranks) -> None:
    """Train each spec into its run directory and write the outcome there. One that fails does not keep the next from being trained.

    Raises:
        SpecError: the specs do not fit into one launch.
        DiskFullError: the disk is full; that ends the launch.
        LaunchOverError: after a failed configuration the GPUs cannot be used any more by these processes.
        Exception: the error of a configuration that failed on some ranks only, while the others wait in a reduction.
    """
    for name in ("device", "backend", "nproc_per_node", "nnodes"):
        values = {getattr(spec, name) for spec in specs}
        if len(values) > 1:
            raise SpecError(f"{name}={', '.join(map(repr, sorted(values)))} in one launch: specs of one launch must agree on it")
    with tempfile.TemporaryDirectory() as nowhere:
        warm = specs[0].replace(steps=min(WARMUP_STEPS, specs[0].steps), profile=None, **UNEVALUATED)
        warm = warm.replace(micro_batch=WARMUP_BATCH) if warm.micro_batch == AUTO else warm
        on_gpus = ranks.device.type == "cuda"
        began = time.monotonic()
        warmed = attempt(warm, Path(nowhere), ranks, errors=run_dirs[0] if on_gpus else None)
    for index, (spec, run_dir) in enumerate(zip(specs, run_dirs, strict=True)):
        tried = on_gpus and index == 0 and not warmed  # on GPUs a failure is not repeated: it may leave them waiting
        began = began if tried else time.monotonic()
        ok = not tried and attempt(spec, run_dir, ranks)
        if ranks.rank == 0:
            write_outcome(run_dir, ok, time.monotonic() - began)
        if not ok and on_gpus and (why := out_of_use(ranks)):
            left = ", ".join(path.name for path in run_dirs[index + 1 :])
            rest = f"these did not run in this launch, and need a new one: {left}" if left else "it was the last one of this launch"
            raise LaunchOverError(f"configuration {run_dir.name} has failed, and {why}; {rest}")


class LaunchOverError(RuntimeError):
    """A configuration failed in a way that leaves no GPU for the next ones in the same processes."""


def out_of_use(ranks: Ranks) -> str:
    """Why the GPUs cannot be used after a configuration failed; empty if they can, and then this rank's GPU is idle and empty."""
    if ranks.world_size > 1:
        return "other GPUs may wait for ever in a reduction that it did not join"
    try:
        torch.cuda.synchronize(ranks.device)
        torch.cuda.empty_cache()
    except RuntimeError as error:  # such as a failed assertion in a kernel: CUDA refuses everything that follows
        return f"left the GPU unusable for this process ({str(error).splitlines()[0]})"
    return ""


def attempt(spec: RunSpec, run_dir: Path, ranks: Ranks, errors: Path | None = None) -> bool:
    """Train one spec; record its error, if any; leave no memory behind. Has it gone well on all ranks?"""
    reset_peak(ranks.device)
    group = dist.new_group()  # its own: what a failed configuration has left unfinished disturbs no other
    error: Exception | None = None
    try:
        train(spec, resolve(spec.task), ranks, run_dir, group, held=held, noise_log=NoiseLog)
    except run_directory.DiskFullError:
        raise
    except Exception as raised:
        error = raised
        failure.record(error, run_dir=errors or run_dir, rank=ranks.rank, held=held)
    try:
        ok = ranks.agree(error is None)
    except RuntimeError:
        raise error or RuntimeError("another rank has failed") from None
    if ok:
        dist.destroy_process_group(group)
    if error is not None:
        traceback.clear_frames(error.__traceback__)  # they hold the model
    gc.collect()
    if ok and ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return ok


def reset_peak(device: torch.device) -> None:
    """Reset the peak of memory: on the GPU, or (on Linux) of this process's main memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the "high water mark" of the resident set


def write_outcome(run_dir: Path, ok: bool, seconds: float) -> None:
    """Add the outcome to a run's run.json, with the error of the rank that failed first."""
    outcome: dict[str, object] = {"state": "finished" if ok else "failed", "seconds": seconds}
    error = first_failure(run_dir, outcome)
    if error:
        outcome["error"] = dataclasses.asdict(error)
    path = run_dir / run_directory.RUN_JSON
    run_directory.write_json(path, {**run_directory.read_json(path), "outcome": outcome})


if __name__ == "__main__":
    main()
