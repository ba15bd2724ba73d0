"""Evaluates a model during its training, shared among the ranks, without a trace in the training; all figures follow from summed counts.

The average of the ranks' averages is wrong as soon as the ranks have different numbers of samples. So each rank sums what it evaluates and
counts it, and rank 0 adds the sums up. Each sample is evaluated once: where all ranks have to call the model equally often, because its
layers communicate, a rank without a batch repeats one and forgets what it gives.
"""

import contextlib
import heapq
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from workbench.core import run_directory
from workbench.harness.device_clock import synchronize
from workbench.runs.spec import SHARDED
from workbench.runs.task import Task, TaskError
from workbench.runs.training_knobs import parse_evaluate
from workbench.timeline.step_timer import StepTimer
from workbench.train.loader import to_device, worker_init
from workbench.train.preemption import start_workers
from workbench.train.provenance import classes_of
from workbench.train.random_numbers import random_state, restore_random_state
from workbench.train.step_weights import weight_of
from workbench.train.trainer import Trainer, evaluate, loss_of

BINS = 15
"""Bins of confidence in the expected calibration error. Source: Guo et al. 2017, arXiv:1706.04599."""
WORST = 10
"""Examples with the largest loss that an evaluation keeps."""
MAX_CLASSES = 1000
"""With more classes, such as the words of a language model, there are no figures per class."""
PIECE = 2**22
"""Logits that are looked at together."""

Sums = dict[str, Any]
"""What a rank has summed: numbers, lists of them, and tables by name, which add up."""


class Evaluations:
    """The evaluations of a training: when they are due, and what each gives."""

    def __init__(self, trainer: Trainer, run_dir: Path, timer: StepTimer) -> None:
        """Evaluate nothing yet.

        Raises:
            TaskError: evaluate="epoch", and the training data are a stream.
        """
        self._trainer, self._timer, spec = trainer, timer, trainer.spec
        self._when, every = parse_evaluate(spec.evaluate)
        if self._when == "epoch":
            if isinstance(trainer.loader.dataset, IterableDataset):
                raise TaskError('evaluate="epoch" with a stream, whose epochs have no length: try evaluate="every(steps=500)"')
            every = len(trainer.loader) // spec.accumulation
        self._every = spec.checkpoint_every or 0 if self._when == "checkpoint" else every
        self._path = run_dir / run_directory.EVALUATIONS
        self._data: Any = None

    @property
    def repeated(self) -> bool:
        """Are there any before the last step?"""
        return bool(self._every)

    def due(self, step: int) -> bool:
        """Is it time for one after a step that is not the last?"""
        return bool(self._every) and not step % self._every and step < self._trainer.spec.steps

    def run(self, step: int) -> dict[str, float]:
        """Evaluate after so many steps; returns the figures on rank 0, nothing on the others. All ranks call it.

        Raises:
            TaskError: the task's functions do not return what they should.
        """
        trainer = self._trainer
        synchronize(trainer.ranks.device)
        with self._timer.validation(step), _undisturbed(trainer):
            began = time.perf_counter()
            alone = {} if trainer.task.validation else trainer.figures()  # rank 0 evaluates by itself
            sums: Sums = self._shared() if trainer.task.validation else {"figures": {name: [value, 1.0] for name, value in alone.items()}}
            synchronize(trainer.ranks.device)
            sums["seconds"] = [time.perf_counter() - began]
            parts = trainer.layout.readers.collect(f"evaluation {step}", json.dumps(sums).encode())
        if trainer.ranks.rank or not parts:
            return {}
        each = [json.loads(part) for part in parts]
        seconds = [part.pop("seconds")[0] for part in each]
        figures = summary(each, classes_of(self._data))
        row = {"step": step, "steps": trainer.spec.steps, "seconds": seconds, **figures}
        writer = run_directory.LineWriter(self._path)
        writer.write([row])
        writer.close()
        renamed = run_directory.METRIC_KEYS if self._when != "end" else ()
        return {f"validation_{name}" if name in renamed else name: value for name, value in row["figures"].items()}

    def _shared(self) -> Sums:
        """The sums of this rank's part of the validation data."""
        trainer, task, spec = self._trainer, self._trainer.task, self._trainer.spec
        if self._data is None:
            self._data = validation_data(task)
        ranks, size = trainer.layout.readers, spec.micro_batch
        indices = list(range(len(self._data)))
        if spec.evaluate_batches:  # the same samples in each evaluation of each run, and not the first: they may be sorted
            indices = torch.randperm(len(indices), generator=torch.Generator().manual_seed(0)).tolist()[: spec.evaluate_batches * size]
        batches = [indices[first : first + size] for first in range(0, len(indices), size)]
        mine = batches[ranks.rank :: ranks.world_size]
        together = spec.parallel in SHARDED or spec.tensor_parallel > 1 or spec.expert_parallel > 1
        idle = together and len(mine) < -(-len(batches) // ranks.world_size)
        loader: DataLoader[Any] = DataLoader(
            self._data,
            batch_sampler=[*mine, *([batches[0]] if idle else [])],
            collate_fn=task.collate,
            num_workers=min(spec.num_workers, len(mine)),
            worker_init_fn=worker_init(spec),
            generator=torch.Generator(),
        )
        sums: Sums = {"samples": 0}
        model = trainer.inference_module
        with trainer.average_in_place(), _buffers_of_first(trainer):
            for number, batch in enumerate(start_workers(loader)):
                indices = mine[number] if number < len(mine) else batches[0]
                given = _of_batch(task, model, trainer.placed(batch), indices)
                if number < len(mine):
                    sums = added(sums, given)
        return sums


def evaluate_alone(task: Task, module: nn.Module, data: Any, size: int, device: torch.device) -> dict[str, float]:
    """The figures of a whole model, which this process evaluates by itself. Random numbers and modes are as before afterwards.

    Raises:
        TaskError: the task's functions do not return what they should.
    """
    sums: Sums = {}
    with evaluating(module, device):
        if data is None:
            return evaluate(task, module)
        for number, batch in enumerate(DataLoader(data, size, collate_fn=task.collate, generator=torch.Generator())):
            indices = list(range(number * size, min((number + 1) * size, len(data))))
            sums = added(sums, _of_batch(task, module, to_device(batch, device), indices))
    return dict(summary([sums])["figures"])


def _of_batch(task: Task, module: nn.Module, batch: Any, indices: list[int]) -> Sums:
    if task.weight and not task.evaluate:
        loss, weight = float(loss_of(task, module, batch)), float(weight_of(task, batch))
        return {"samples": len(indices), "figures": {"validation_loss": [loss * weight if weight else 0.0, weight]}}
    given = task.evaluate(module, batch) if task.evaluate else {"validation_loss": loss_of(task, module, batch)}
    return {"samples": len(indices), **sums_of(given, indices)}


def validation_data(task: Task) -> Any:
    """The task's validation data.

    Raises:
        TaskError: they have no length.
    """
    assert task.validation
    data = task.validation()
    if not hasattr(data, "__len__") or not len(data):
        raise TaskError(f"the task's validation() returned a {type(data).__name__}; expected a dataset with a length above 0")
    return data


def sums_of(given: Any, indices: list[int]) -> Sums:
    """What an evaluation of a batch adds to the sums.

    Args:
        given: figures by name, each the mean over the batch or a tensor with a number per sample; with "logits" and "targets" those of a
            classification: logits (samples, …, classes), or (samples, classes, …) as torch's losses take them where only that fits, and
            targets (samples, …), of which those below 0 are left out.
        indices: of the samples in the dataset.

    Raises:
        TaskError: it is something else.
    """
    if not isinstance(given, Mapping):
        raise TaskError(
            f"the task's evaluate(model, batch) returned a {type(given).__name__}; expected figures by name, such as "
            '{"logits": logits, "targets": targets} or {"error": error_per_sample}'
        )
    figures, sums = {}, {}
    for name, value in given.items():
        if name in ("logits", "targets"):
            continue
        try:
            values = torch.as_tensor(value).detach().double().flatten()
        except (TypeError, ValueError, RuntimeError):
            raise TaskError(f"the task's evaluate(model, batch) returned {name}={value!r:.80}; expected numbers") from None
        weight = len(indices) if values.numel() == 1 else values.numel()
        figures[str(name)] = [float(values.mean()) * weight if weight else 0.0, float(weight)]
    if figures:
        sums["figures"] = figures
    if "logits" in given or "targets" in given:
        sums["classification"] = _classified(given.get("logits"), given.get("targets"), indices)
    return sums


def _classified(logits: Any, targets: Any, indices: list[int]) -> Sums:
    tensors = isinstance(logits, Tensor) and isinstance(targets, Tensor) and logits.dim() > 1
    if tensors and logits.shape[:-1] != targets.shape == logits.shape[:1] + logits.shape[2:]:
        logits = logits.movedim(1, -1)
    fits = tensors and logits.shape[:-1] == targets.shape
    if not fits or targets.is_floating_point() or logits.shape[0] != len(indices):
        shapes = ", ".join(f"{type(each).__name__}{tuple(getattr(each, 'shape', ()))}" for each in (logits, targets))
        raise TaskError(
            f"the task's evaluate(model, batch) returned logits and targets {shapes} of {len(indices)} samples; expected "
            "logits (samples, …, classes) and whole numbers as targets (samples, …). For one yes or no per output, give figures with a "
            'number per sample, {"accuracy": ((logits > 0) == (targets > 0.5)).float()}'
        )
    classes, each = logits.shape[-1], targets.numel() // len(indices)
    if (largest := int(targets.max()) if targets.numel() else 0) >= classes:
        two = "; for two classes give two logits, torch.cat([-x, x], -1) / 2 for such an output x" if classes == 1 else ""
        raise TaskError(
            f"the task's evaluate(model, batch) returned logits {tuple(logits.shape)}, whose last dimension is the classes, and "
            f"targets up to {largest}; expected targets below the size of the last dimension of the logits, or below 0 if they are to be "
            f"left out{two}"
        )
    loss, confidence, predicted, targets = _per_target(logits.detach(), targets)
    places = (targets >= 0).nonzero()[:, 0]
    loss, confidence, predicted, targets = (column[places] for column in (loss, confidence, predicted, targets))
    right = (predicted == targets).double()
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    binned = [torch.bincount(bins, weights, BINS) for weights in (torch.ones_like(right), confidence, right)]
    sums: Sums = {"count": float(len(targets)), "loss": float(loss.sum()), "right": float(right.sum())}
    sums["bins"] = [column.tolist() for column in binned]
    if classes <= MAX_CLASSES:
        by_class = (
            torch.bincount(targets, None, classes),
            torch.bincount(targets, right, classes),
            torch.bincount(predicted, None, classes),
        )
        sums["classes"] = [column.double().tolist() for column in by_class]
    top = loss.topk(min(WORST, len(loss))).indices
    columns = (loss[top], places[top] // each, targets[top], predicted[top], confidence[top])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    sums["worst"] = [[value, indices[sample], *rest] for value, sample, *rest in rows]
    return sums


def _per_target(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, confidence, predicted class and class of each target, on the CPU, where counting is deterministic.

    It looks at a piece of the logits at a time: those of a language model fill a large part of a GPU, and a copy of them all may not fit.
    """
    classes = logits.shape[-1]
    samples = max(1, PIECE // max(1, logits[0].numel()))
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for some, its in zip(torch.split(logits, samples), torch.split(targets, samples), strict=True):
        rows = max(1, PIECE // max(1, classes))
        for part, wanted in zip(torch.split(some.reshape(-1, classes), rows), torch.split(its.reshape(-1), rows), strict=True):
            largest, predicted = (part if part.dtype == torch.double else part.float()).max(1)
            part = part - largest[:, None]  # in the type of `largest`
            chosen = part.gather(1, wanted.clamp(min=0)[:, None].long())[:, 0]
            total = part.exp_().sum(1)
            columns.append((total.log() - chosen, 1 / total, predicted))
    loss, confidence, found = (torch.cat(column).cpu() for column in zip(*columns, strict=True))
    return loss.double(), confidence.double(), found, targets.reshape(-1).cpu().long()


def added(a: Any, b: Any) -> Any:
    """The sum of two tables of sums, entry by entry; of lists of the worst, the worst of both."""
    if isinstance(a, Mapping):
        return {
            name: (heapq.nlargest(WORST, [*a[name], *b[name]]) if name == "worst" else added(a[name], b[name]))
            if name in a and name in b
            else a.get(name, b.get(name))
            for name in {**a, **b}
        }
    return [added(x, y) for x, y in zip(a, b, strict=True)] if isinstance(a, list) else a + b


def summary(parts: list[Sums], names: list[str] | None = None) -> dict[str, Any]:
    """Figures, figures per class, calibration and worst examples of what the ranks have summed."""
    sums: Sums = {}
    for part in parts:
        sums = added(sums, part)
    figures = {name: total / weight if weight else float("nan") for name, (total, weight) in sums.get("figures", {}).items()}
    result: dict[str, Any] = {"samples": sums.get("samples"), "figures": figures}
    if not (counts := sums.get("classification")):
        return result
    whole = counts["count"] or float("nan")
    gaps = sum(abs(confidence - right) for _, confidence, right in zip(*counts["bins"], strict=True))
    figures |= {"accuracy": counts["right"] / whole, "validation_loss": counts["loss"] / whole, "ece": gaps / whole}
    result["calibration"] = [
        {"count": int(count), "confidence": confidence / count, "accuracy": right / count}
        for count, confidence, right in zip(*counts["bins"], strict=True)
        if count
    ]
    if "classes" in counts:
        if not names or len(names) != len(counts["classes"][0]):
            names = [str(number) for number in range(len(counts["classes"][0]))]
        result["classes"] = {
            name: {"count": int(count), "recall": right / count if count else None, "precision": right / of if of else None}
            for name, count, right, of in zip(names, *counts["classes"], strict=True)
        }
    keys = ("loss", "index", "target", "predicted", "confidence")
    result["worst"] = [dict(zip(keys, row, strict=True)) for row in counts["worst"]]
    return result


@contextlib.contextmanager
def evaluating(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode without gradients inside; random numbers and modes are as before afterwards."""
    random, modes = random_state(device), [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
        restore_random_state(random, device)


@contextlib.contextmanager
def _undisturbed(trainer: Trainer) -> Iterator[None]:
    """The same for the model of a training, which is not compiled meanwhile; sharded weights are sharded afterwards."""
    eager = trainer.spec.compile != "none"  # its batches may have other shapes
    with evaluating(trainer.module, trainer.ranks.device):
        try:
            with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
                yield
        finally:
            fsdp = sys.modules.get("torch.distributed.fsdp")
            for part in trainer.module.modules():
                if fsdp and isinstance(part, fsdp.FSDPModule):
                    part.reshard()


@contextlib.contextmanager
def _buffers_of_first(trainer: Trainer) -> Iterator[None]:
    """All ranks evaluate with the buffers of the first, as DDP trains with them; each has its own back afterwards."""
    buffers = [buffer for buffer in trainer.module.buffers() if type(buffer) is Tensor]
    kept = [buffer.clone() for buffer in buffers] if trainer.layout.readers.world_size > 1 else []
    group = trainer.layout.data
    for buffer, _ in zip(buffers, kept, strict=False):
        dist.broadcast(buffer, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    try:
        yield
    finally:
        for buffer, before in zip(buffers, kept, strict=False):
            buffer.copy_(before)
