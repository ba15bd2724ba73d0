"""Measures the gradient noise scale while a model trains, from the gradients that training computes anyway.

`NoiseWatch` watches a user's loop, `measure` a step with its loader in this process, and `NoiseLog` writes what the trainer's ranks see.

    with NoiseWatch(model, optimizer, micro_batch=32) as watch:
        ...                                  # train as ever: DDP, FSDP2 or one process that accumulates
    print(watch.result())                    # with several ranks, on all of them

A hook of autograd on each weight sees a group's gradient before it is accumulated or reduced; the mean gradient is in `.grad` after the
backward, before it is clipped. DDP's communication hooks (fp16_compress, PowerSGD) are not touched; under FSDP2 the hooks are on the
gathered tensors. Nothing waits for the device before a result is read.

Each backward that computes gradients counts as a micro-batch. Losses should be divided by their number, so that `.grad` is a mean; else
`squares` and `trace` are too large by its square, and `b_simple` is right nevertheless. The same holds for a GradScaler without `scaler=`.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from workbench.batch.analysis.noise_scale import NoiseScale
from workbench.batch.analysis.noise_scale_estimator import NoiseScaleError
from workbench.batch.measure.gradient_norms import GroupNorms, Row, SamplingInterval, read_norms
from workbench.core import run_directory
from workbench.core.progress import INTERRUPTED
from workbench.harness.discover import describe
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.observe import check_arguments, discover_training
from workbench.harness.restore import SavedState
from workbench.timeline.loops import samples_in
from workbench.train.loop import REPORT_INTERVAL_S
from workbench.train.optimizers import described
from workbench.train.sharded_tensors import is_dtensor
from workbench.train.trainer import Trainer

IN_PARTS = (
    "gradients come more often than the model is called: those of a weight that two reentrant checkpoints share come in parts (try "
    "checkpoint(…, use_reentrant=False)), and of two losses in two backwards (add them, and call backward once)"
)

MIN_STEPS = 4
"""Steps of which something can be said."""


class NoiseWatch:
    """Measures the gradient noise scale of a loop while it trains; the module's docstring has an example.

    Attributes:
        rows: the steps so far, with their norms on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        micro_batch: int,
        accumulation: int | None = None,
        every: int = 1,
        scaler: Any = None,
        dataset_size: int | None = None,
    ) -> None:
        """Prepare to watch; measuring begins with the `with` block.

        Args:
            model: in its DDP, sharded by FSDP2, or plain.
            optimizer: each of its steps ends a step; None = the loop calls `step()` when a step's gradients are complete.
            micro_batch: samples in one backward, of one rank.
            accumulation: backwards of a step; None = as many as most steps have.
            every: measure every how many-th step, without hooks in between; the same on all ranks.
            scaler: the GradScaler, if there is one.
            dataset_size: samples that are drawn without repetition; None = they are drawn independently, or are many.
        """
        if every < 1:
            raise NoiseScaleError(f"every={every!r}: a whole number of steps of at least 1 is allowed")
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._micro_batch, self._accumulation, self._dataset_size = micro_batch, accumulation, dataset_size
        self._every, self._taken = every, 0
        self._world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() and reduces(model) else 1
        self._norms: GroupNorms | None = None
        self._stack = contextlib.ExitStack()
        self.rows: list[Row] = []

    def __enter__(self) -> Self:
        self._norms = GroupNorms(self._model, self._world_size)
        self._stack.callback(self._norms.close)
        if self._optimizer is not None:
            self._stack.callback(self._optimizer.register_step_pre_hook(lambda *_: self.step()).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; the rows stay."""
        self._stack.close()

    def step(self) -> None:
        """Record the norms of a step, whose gradients are complete."""
        assert self._norms is not None, "before the with block"
        if self._norms.looking:
            scale = None
            if self._scaler is not None and self._scaler.is_enabled():
                scale = self._scaler.scale(torch.ones((), device=next(self._model.parameters()).device))
            row = self._norms.step(scale)
            if row is not None:
                self.rows.append(row)
        self._taken += 1
        self._norms.look(self._taken % self._every == 0)

    @property
    def backwards(self) -> int:
        """Backwards of a step: as given, or as most steps have."""
        counts = Counter(row.count for row in self.rows)
        return self._accumulation or (counts.most_common(1)[0][0] if counts else 1)

    def result(
        self, *, micro_batch: int | None = None, optimizer: Mapping[str, Any] | None = None, notes: Sequence[str] = ()
    ) -> NoiseScale:
        """The noise scale so far. With several ranks, all of them have to call this, and get the same.

        Args:
            micro_batch: samples in one backward; None = as given at the beginning.
            optimizer: settings to keep in the result.
            notes: further remarks, which the result keeps.

        Raises:
            NoiseScaleError: one group per step, fewer than two steps, or no finite gradients.
        """
        usual, world_size = self.backwards, self._world_size
        if not usual:
            raise NoiseScaleError(IN_PARTS)
        if usual * world_size < 2 and self.rows:
            raise NoiseScaleError(
                "each step has one group of samples only (one rank, one backward), and noise shows in the difference between groups: take "
                "the batch in two halves, whose losses are divided by 2 and go backward one after the other before the optimizer's step; "
                "or train on several ranks"
            )
        norms = read_norms(self.rows)
        others = sum(count != usual for *_, count in norms)
        if world_size > 1 and norms:
            values = [(small, big) if count == usual else (math.nan, math.nan) for small, big, count in norms]
            sums = torch.tensor(values, dtype=torch.float64, device=next(self._model.parameters()).device)
            dist.all_reduce(sums)
            pairs = [(small / world_size, big) for small, big in sums.tolist()]
        else:
            pairs = [(small, big) for small, big, count in norms if count == usual]
        return NoiseScale.of(
            pairs,
            micro_batch=micro_batch or self._micro_batch,
            groups=usual * world_size,
            dataset_size=self._dataset_size,
            every=self._every,
            optimizer=optimizer,
            notes=[*notes, *([f"{others} steps had another number of backwards than {usual}, and do not count"] if others else [])],
        )


def reduces(model: nn.Module) -> bool:
    """Do ranks reduce the gradients of this model?"""
    return isinstance(model, DistributedDataParallel) or any(is_dtensor(weight) for weight in model.parameters())


def measure(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    steps: int,
    micro_batch: int | None = None,
    go_on: Callable[[int], bool] = lambda done: True,
) -> NoiseScale:
    """Measure the noise scale over some steps, and restore everything. With several ranks, all of them have to call this.

    Args:
        step: `step(batch)` does one whole optimizer step.
        loader: gives the batches; a DataLoader or any iterable.
        model: that is trained; None = the one that the step's closure, `self` or globals hold.
        optimizer: what updates the model; None = it is found as well.
        steps: number of steps to take.
        micro_batch: samples in one backward; None = those of a batch, divided by its backwards.
        go_on: called with the number of steps done, before each; false = end with these. With several ranks, who must take equally many
            steps, its answer does not count.

    Raises:
        DiagnoseError: step cannot be called so.
        ValueError: the loader is empty, or the model or the samples in a backward are unclear.
        NoiseScaleError: one group per step, fewer than two steps, or no finite gradients.
    """
    check_arguments(step, 1.0)
    notes: list[str] = []
    training = discover_training(step, model, optimizer, loader, notes)
    model = _trained_model(training.models)
    sizes: Counter[int | None] = Counter()
    with contextlib.ExitStack() as undo:
        undo.callback(SavedState(training).restore)
        feed = undo.enter_context(Feed(loader))
        watch = undo.enter_context(NoiseWatch(model, None, micro_batch=micro_batch or 1))
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        late = steps
        for number in range(steps):
            if not go_on(number):
                late = min(late, number)
                if alone:
                    notes.append(f"the budget was spent after {number} of {steps} steps: a larger budget_s= makes the interval narrower")
                    break
            try:
                batch = feed.next()
                sizes[samples_in(batch, feed.batch_size)] += 1
                step(batch)
                watch.step()
                if alone and number == MIN_STEPS - 1 and watch.backwards < 2:
                    break  # the result says that nothing can be seen so
            except Exhausted:
                if not number:
                    raise ValueError("the loader could be read only once, and it has ended: give one that still has batches") from None
                notes.append(f"the loader ended after {number} of {steps} steps")
                break
            except KeyboardInterrupt:
                if not alone or number < MIN_STEPS:
                    raise
                notes.append(f"{INTERRUPTED} after {number} of {steps} steps: this is the result so far")
                break
        if not alone and (late := _least_over_ranks(late, model)) < steps:
            notes.append(
                f"the budget was spent after {late} steps, and more were taken, since all ranks have to take equally many: try fewer steps="
            )
        steps_seen = _least_over_ranks(len(watch.rows), model)
        del watch.rows[steps_seen:]
        return watch.result(micro_batch=micro_batch or _samples(sizes, watch.backwards), notes=notes)


def _trained_model(models: Sequence[nn.Module]) -> nn.Module:
    """The only model that is trained, with its wrappers."""
    trained = [model for model in models if any(weight.requires_grad for weight in model.parameters())]
    inner = {id(part) for model in trained for part in model.modules() if part is not model}
    outer = [model for model in trained if id(model) not in inner]
    if len(outer) != 1:
        names = ", ".join(map(describe, outer)) or "none"
        raise ValueError(f"one model that is trained is allowed, and the step uses {names}: try noise_scale(step, loader, model=…)")
    return outer[0]


def _samples(sizes: "Counter[int | None]", backwards: int) -> int:
    size, _ = sizes.most_common(1)[0]
    if size is None or size % backwards:
        why = "are not known" if size is None else f"are {size}, which {backwards} backwards do not share equally"
        raise NoiseScaleError(f"the samples of a batch {why}: give those of one backward, noise_scale(step, loader, micro_batch=…)")
    return size // backwards


def _least_over_ranks(count: int, model: nn.Module) -> int:
    if not (dist.is_available() and dist.is_initialized() and reduces(model)):
        return count
    least = torch.tensor([count], device=next(model.parameters()).device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


class NoiseLog:
    """Writes the gradient norms of a run's rank to `noise<r>.jsonl`, which `run.noise_scale` reads: a head, then a line per step."""

    def __init__(self, trainer: Trainer, run_dir: Path) -> None:
        """Attach to a trainer.

        Raises:
            NoiseScaleError: its gradients cannot be watched.
        """
        readers = trainer.layout.readers
        self._trainer, self._accumulation = trainer, trainer.spec.accumulation
        self._interval = SamplingInterval(None if trainer.spec.noise_scale is True else int(trainer.spec.noise_scale))
        self._norms = GroupNorms(trainer.model, readers.world_size, self._accumulation)
        self._writer = run_directory.LineWriter(run_dir / run_directory.noise_file(readers.rank))
        self._rows: list[tuple[int, Row]] = []
        self._flushed = time.perf_counter()
        head = {
            "rank": readers.rank,
            "world_size": readers.world_size,
            "micro_batch": trainer.spec.micro_batch,
            "accumulation": self._accumulation,
            "every": self._interval.every,
            "dataset_size": _size(trainer.loader.dataset),
            "optimizer": described(trainer.optimizer),
        }
        self._writer.write([head])

    def step(self, step: int) -> None:
        """Record a step, whose gradients are complete and not used yet.

        Args:
            step: from 1.

        Raises:
            DiskFullError: the disk is full; the lines before are whole.
        """
        if self._norms.looking:
            row = self._norms.step(self._trainer.precision.loss_scale())
            if row is not None:
                self._rows.append((step, row))
            if time.perf_counter() - self._flushed > REPORT_INTERVAL_S:
                self.flush()
        self._norms.look(self._interval.step())

    def flush(self) -> None:
        """Write the new rows. A step whose micro-batches were split has no norms."""
        norms = read_norms(row for _, row in self._rows)
        self._writer.write(
            {"step": step, "small": small, "big": big} if count == self._accumulation else {"step": step, "small": None, "big": None}
            for (step, _), (small, big, count) in zip(self._rows, norms, strict=True)
        )
        self._rows.clear()
        self._flushed = time.perf_counter()

    def close(self) -> None:
        """Write the rest, detach, and close the file."""
        self._norms.close()
        try:
            self.flush()
        finally:
            self._writer.close()


def _size(dataset: Any) -> int | None:
    """Samples of an epoch; None = a stream, which has no length."""
    return len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset) else None
