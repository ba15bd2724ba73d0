"""The training loop: a spec and a Task become optimizer steps, on every rank with DistributedDataParallel."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench import failure, rundir, units
from workbench.measure import StepTimer
from workbench.spec import RunSpec
from workbench.task import Task, TaskError
from workbench.train.loader import build_loader, micro_batches, to_device
from workbench.train.metrics import Metrics
from workbench.train.optimizers import build_optimizer
from workbench.train.precision import Precision
from workbench.train.ranks import Ranks
from workbench.train.schedule import build_scheduler


def train(spec: RunSpec, task: Task, ranks: Ranks, run_dir: Path, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Train, and write the steps and the report into a run directory.

    Args:
        spec: every knob.
        task: what is trained.
        ranks: this process among the others.
        run_dir: for `rank<r>.jsonl` and, from rank 0, `metrics.jsonl`.
        group: the process group that reduces the gradients; None = that of all.

    Returns:
        The trained module, without its DDP wrapper.

    Raises:
        TaskError: the task's functions do not return what they should.
        SpecError: a knob does not fit this machine or this task.
        DiskFullError: the steps or the report could not be written.
    """
    if spec.evaluate and task.evaluate is None:
        raise TaskError(f"evaluate=True, and the task {spec.task!r} has no evaluation: try wb.Task(…, evaluate=…), or evaluate=False")
    torch.set_num_threads(spec.threads)
    precision = Precision(spec.precision, ranks.device)
    seed_all(spec.seed)  # the same model on every rank
    module = build_model(task).to(ranks.device)
    optimizer = build_optimizer(module, task.optimizer, override=spec.optimizer, lr=spec.lr)
    scheduler = build_scheduler(optimizer, spec)
    own_seed = spec.seed * ranks.world_size + ranks.rank
    seed_all(own_seed)  # other augmentation and dropout on each
    loader = build_loader(task, spec, ranks, own_seed)
    on_gpu = ranks.device.type == "cuda"
    model = DistributedDataParallel(
        module,
        device_ids=[ranks.device.index] if on_gpu else None,
        bucket_cap_mb=spec.bucket_cap_mb,
        process_group=group,
        find_unused_parameters=spec.find_unused_parameters,
    )
    weights = sum(weight.numel() for weight in module.parameters())
    print(f"rank {ranks.rank} of {ranks.world_size} on {ranks.device}: {units.count(weights)} parameters, batches of {spec.micro_batch}")
    samples_per_step = spec.micro_batch * spec.accumulation * ranks.world_size
    timer = StepTimer(run_dir / rundir.rank_file(ranks.rank), device=ranks.device.type)
    metrics = Metrics(run_dir, steps=spec.steps) if ranks.rank == 0 else None
    step, waiting, loss_of_step = 0, spec.accumulation, torch.zeros((), device=ranks.device)
    with contextlib.closing(metrics) if metrics else contextlib.nullcontext():
        with (
            contextlib.closing(timer),
            recorded(run_dir, ranks.rank),
            contextlib.closing(micro_batches(loader, spec.accumulation, ranks)) as batches,
        ):
            for batch in timer.batches(batches):
                waiting -= 1
                with timer("h2d"):
                    batch = to_device(batch, ranks.device, non_blocking=loader.pin_memory)
                with contextlib.nullcontext() if waiting == 0 else model.no_sync():  # gradients are reduced once per step
                    with timer("forward"), precision.autocast():
                        loss = loss_of(task, model, batch) / spec.accumulation
                    with timer("backward"):
                        precision.backward(loss)
                loss_of_step = loss_of_step + loss.detach()
                if waiting:
                    continue
                step, lr = step + 1, float(scheduler.get_last_lr()[0])
                with timer("optimizer"):
                    if precision.step(optimizer, model, clip_grad_norm=spec.clip_grad_norm):
                        scheduler.step()
                if metrics:
                    metrics.step(step, loss=loss_of_step, lr=lr, samples=step * samples_per_step)
                if timer.failed:
                    raise timer.failed
                if step == spec.steps:
                    break
                waiting, loss_of_step = spec.accumulation, torch.zeros_like(loss_of_step)
        if timer.failed:  # at its last flush
            raise timer.failed
        if metrics:
            metrics.flush()
            if spec.evaluate:
                metrics.figures(evaluate(task, module))
    if precision.skipped and ranks.rank == 0:
        print(f"{precision.skipped} of {step} optimizer steps were left out: fp16 gradients overflowed (a few at the start are normal)")
    return module


@contextlib.contextmanager
def recorded(run_dir: Path, rank: int) -> Iterator[None]:
    """Leave an error on record before anything is closed: closing waits for the device, and would cover a CUDA error by its own."""
    try:
        yield
    except Exception as error:
        failure.record(error, run_dir=run_dir, rank=rank)
        raise


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def build_model(task: Task) -> nn.Module:
    """The task's model.

    Raises:
        TaskError: `model()` returned something else.
    """
    model = task.model()
    if not isinstance(model, nn.Module):
        hint = "; write model=Net, not model=lambda: Net" if isinstance(model, type) else ""
        raise TaskError(f"the task's model() returned a {type(model).__name__}; a torch.nn.Module is wanted{hint}")
    return model


def loss_of(task: Task, model: nn.Module, batch: Any) -> Tensor:
    """The task's loss of a batch.

    Raises:
        TaskError: it is not a tensor with one number.
    """
    loss = task.loss(model, batch)
    if not isinstance(loss, Tensor):
        hint = "; a Hugging Face model's output has it as .loss" if hasattr(loss, "loss") else ""
        raise TaskError(f"the task's loss(model, batch) returned a {type(loss).__name__}; a tensor with one number is wanted{hint}")
    if loss.numel() != 1:
        raise TaskError(
            f"the task's loss(model, batch) returned a tensor of shape {tuple(loss.shape)}; a tensor with one number is wanted, the mean "
            "over the batch: try loss.mean()"
        )
    return loss.reshape(())


def evaluate(task: Task, module: nn.Module) -> dict[str, float]:
    """The task's evaluation, on rank 0 alone: in evaluation mode, without gradients, in fp32.

    Raises:
        TaskError: it did not return numbers by name.
    """
    assert task.evaluate is not None
    module.eval()
    with torch.no_grad():
        figures = task.evaluate(module)
    try:
        return {str(name): float(value) for name, value in figures.items()}
    except (AttributeError, TypeError, ValueError):
        raise TaskError(f"the task's evaluate(model) returned {figures!r:.100}; numbers by name are wanted: {{'accuracy': 0.9}}") from None
