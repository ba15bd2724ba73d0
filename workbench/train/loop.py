"""The training loop: a Trainer's optimizer steps, timed, counted and reported, on every rank."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from workbench.core import run_directory, units
from workbench.core.energy_counters import record_energy
from workbench.runs import failure
from workbench.runs.out_of_memory import Held
from workbench.runs.spec import AUTO, RunSpec, check_profile
from workbench.runs.task import Task, TaskError
from workbench.timeline.step_timer import StepTimer
from workbench.traces.measure.profiled_run import Profiled
from workbench.train.checkpoints import Checkpoints
from workbench.train.choose_micro_batch import choose
from workbench.train.metrics import Metrics
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer


class GradientLog(Protocol):
    """Writes what it sees of each step's gradients."""

    def step(self, step: int) -> None:
        """The gradients of a step (from 1) are there, and not used yet."""

    def close(self) -> None:
        """Write the rest."""


def train(
    spec: RunSpec,
    task: Task,
    ranks: Ranks,
    run_dir: Path,
    group: dist.ProcessGroup | None = None,
    *,
    held: Callable[[BaseException], Held],
    noise_log: Callable[[Trainer, Path], GradientLog],
) -> nn.Module:
    """Train, and write the steps and the report into a run directory.

    Args:
        spec: every knob. A micro_batch that is "auto" is chosen first, and the figures of the last step have it as `micro_batch`; a run
            that goes on from a checkpoint keeps it.
        task: what is trained.
        ranks: this process among the others.
        run_dir: for `rank<r>.jsonl`, `noise<r>.jsonl` where it is asked for and, from rank 0, `metrics.jsonl`.
        group: the process group that reduces the gradients; None = that of all.
        held: tells what this rank holds; asked if memory has run out.
        noise_log: writes the norms of gradients, where the spec wants them.

    Returns:
        The trained module, without its DDP wrapper; this rank's part of it where the spec shares or splits it.

    Raises:
        TaskError: the task's functions do not return what they should.
        SpecError: a knob does not fit this machine or this task, or a micro_batch could not be chosen.
        DiskFullError: the steps or the report could not be written.
        DamagedRunError: it is to go on, and none of its checkpoints can be read.
    """
    if spec.evaluate and task.evaluate is None:
        raise TaskError(f"evaluate=True, and the task {spec.task!r} has no evaluation: try wb.Task(…, evaluate=…), or evaluate=False")
    check_profile(spec)
    checkpoints = Checkpoints(run_dir, ranks, spec.checkpoint_every) if spec.checkpoint_every else None
    found = checkpoints.found() if checkpoints else None
    chosen: dict[str, float] = {}
    if spec.micro_batch == AUTO:  # a run that goes on keeps what it had: its place in the data is counted in that
        size = found and found[1].get("micro_batch")
        if not size:  # there is none to go on from, or an earlier version has written it
            path, found = found and found[0], None
            if path:
                torch.cuda.empty_cache()  # it lay on the device, where nothing is to be when a size is chosen
            size = choose(spec, ranks)
            found = (path, checkpoints.read(path)) if checkpoints and path else None
        spec = spec.replace(micro_batch=size)
        chosen = {"micro_batch": spec.micro_batch}
    trainer = Trainer(spec, task, ranks, group, halving=bool(chosen))
    weights = sum(weight.numel() for weight in trainer.module.parameters())
    print(f"rank {ranks.rank} of {ranks.world_size} on {ranks.device}: {units.count(weights)} parameters, batches of {spec.micro_batch}")
    samples_per_step = spec.micro_batch * spec.accumulation * trainer.layout.readers.world_size
    done = checkpoints.resume(trainer, found) if checkpoints else 0  # before the files are opened: it cuts them
    del found  # as large as the model and its optimizer
    trainer.phase = timer = StepTimer(run_dir / run_directory.rank_file(ranks.rank), device=ranks.device.type)
    if checkpoints:
        timer.go_on(done)
    metrics = Metrics(run_dir, steps=spec.steps) if ranks.rank == 0 else None
    noise = noise_log(trainer, run_dir) if spec.noise_scale else None
    profiled = None
    if spec.profile:
        about = {"rank": ranks.rank, "queue": spec.queue, "steps": spec.steps}
        profiled = Profiled(spec.profile, run_dir / run_directory.TRACES, timer.leave_out, **about)
    step, waiting, loss_of_step = done, spec.accumulation, torch.zeros((), device=ranks.device)
    with (
        contextlib.closing(metrics) if metrics else contextlib.nullcontext(),
        contextlib.closing(noise) if noise else contextlib.nullcontext(),
        contextlib.closing(profiled) if profiled else contextlib.nullcontext(),
    ):
        with (
            record_energy(run_dir, rank=ranks.rank, gpus=spec.nproc_per_node if ranks.device.type == "cuda" else 0),
            contextlib.closing(timer),
            recorded(run_dir, ranks.rank, held),
            contextlib.closing(trainer.batches(done)) as batches,
        ):
            if profiled:
                profiled.step(done)
            for batch in () if done >= spec.steps else timer.batches(profiled.batches(batches) if profiled else batches):
                waiting -= 1
                loss_of_step = loss_of_step + trainer.micro_step(batch, last=not waiting)
                if waiting:
                    continue
                step, lr = step + 1, trainer.lr
                if noise:
                    noise.step(step)
                trainer.update()
                if metrics:
                    metrics.step(step, loss=loss_of_step, lr=lr, samples=step * samples_per_step)
                if timer.failed:
                    raise timer.failed
                if profiled:
                    profiled.step(step)
                if checkpoints and checkpoints.due(step):
                    if metrics:  # else rows between the last ones on disk and this step would be missing when the run goes on
                        metrics.flush()
                    checkpoints.write(step, trainer)
                if step == spec.steps:
                    break
                waiting, loss_of_step = spec.accumulation, torch.zeros_like(loss_of_step)
        if timer.failed:  # at its last flush
            raise timer.failed
        if metrics:
            metrics.flush()
        figures = chosen | (trainer.figures() if spec.evaluate else {})
        if metrics and figures:
            metrics.figures(figures)
    skipped = trainer.precision.skipped
    if skipped and ranks.rank == 0:
        print(f"{skipped} of {step} optimizer steps were left out: fp16 gradients overflowed (a few at the start are normal)")
    return trainer.module


@contextlib.contextmanager
def recorded(run_dir: Path, rank: int, held: Callable[[BaseException], Held]) -> Iterator[None]:
    """Leave an error on record before anything is closed: closing waits for the device, and would cover a CUDA error by its own."""
    try:
        yield
    except Exception as error:
        failure.record(error, run_dir=run_dir, rank=rank, held=held)
        raise
