"""NoiseWatch: the gradient noise scale of a loop of one's own, from gradients that it computes anyway.

    with NoiseWatch(model, optimizer, micro_batch=32) as watch:
        ...                                  # train as ever: DDP, FSDP2 or one process that accumulates
    print(watch.result())                    # with several ranks, on all of them

Each group's gradient is seen by a hook of autograd on the tensors that the model computes with, before it is accumulated or reduced; the
mean gradient is what lies in `.grad` when the backward is over, before it is clipped. No hook of the reduction is needed, so whatever hook
of its own DDP has (fp16_compress, PowerSGD) goes on as before; under FSDP2 the tensors are those that it gathers. Nothing waits for the
device: norms stay where they are until they are asked for.

Each backward in which gradients come counts as a micro-batch. Losses should be divided by their number, so that `.grad` is a mean; else
`squares` and `trace` are too large by its square, and `b_simple` is right nevertheless. A GradScaler goes into `scaler=`, for the same.

The gradient noise scale of a step and its loader in this process; everything is left as it was.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from workbench.batch.analysis.noise_estimate import NoiseScaleError
from workbench.batch.analysis.noise_scale import NoiseScale
from workbench.batch.measure.gradient_norms import GroupNorms, Row, read
from workbench.harness.discover import describe
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.observe import check_arguments, discover_training
from workbench.harness.restore import SavedState
from workbench.timeline.loops import samples_in

IN_PARTS = (
    "gradients come more often than the model is called: those of a weight that two reentrant checkpoints share come in parts (try "
    "checkpoint(…, use_reentrant=False)), and of two losses in two backwards (add them, and call backward once)"
)


class NoiseWatch:
    """Measures the gradient noise scale of a loop, while it trains; see the module's first lines.

    Attributes:
        rows: steps so far, with their norms on the device.
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
        """Prepare; the `with` block watches.

        Args:
            model: in its DDP, sharded by FSDP2, or plain.
            optimizer: each of its steps ends a step; None = `step()` is called instead, when a step's gradients are all there.
            micro_batch: samples in one backward, of one rank.
            accumulation: backwards of a step; None = as many as most steps have.
            every: look at each so many-th step only, which costs less, for in between nothing is attached; the same on all ranks.
            scaler: the GradScaler, if there is one.
            dataset_size: samples that are dealt out without repetition; None = they are drawn independently, or are many.
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
        """Stop watching; what was seen stays."""
        self._stack.close()

    def step(self) -> None:
        """The gradients of a step are all there."""
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
        """Of a step: as was said, or of most."""
        counts = Counter(row.count for row in self.rows)
        return self._accumulation or (counts.most_common(1)[0][0] if counts else 1)

    def result(
        self, *, micro_batch: int | None = None, optimizer: Mapping[str, Any] | None = None, notes: Sequence[str] = ()
    ) -> NoiseScale:
        """The noise scale so far. With several ranks all of them have to ask, and all get the same.

        Args:
            micro_batch: samples in one backward; None = as was said at the beginning.
            optimizer: settings to be kept with it.
            notes: what a reader should know.

        Raises:
            NoiseScaleError: one group per step only, fewer than two steps, or gradients that are no numbers.
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
        found = read(self.rows)
        strange = sum(count != usual for *_, count in found)
        if world_size > 1 and found:
            values = [(small, big) if count == usual else (math.nan, math.nan) for small, big, count in found]
            sums = torch.tensor(values, dtype=torch.float64, device=next(self._model.parameters()).device)
            dist.all_reduce(sums)
            pairs = [(small / world_size, big) for small, big in sums.tolist()]
        else:
            pairs = [(small, big) for small, big, count in found if count == usual]
        return NoiseScale.of(
            pairs,
            micro_batch=micro_batch or self._micro_batch,
            groups=usual * world_size,
            dataset_size=self._dataset_size,
            every=self._every,
            optimizer=optimizer,
            notes=[*notes, *([f"{strange} steps had another number of backwards than {usual}, and do not count"] if strange else [])],
        )


def reduces(model: nn.Module) -> bool:
    """Do ranks share the gradients of this model?"""
    return isinstance(model, DistributedDataParallel) or any(isinstance(weight, DTensor) for weight in model.parameters())


def measure(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    steps: int,
    micro_batch: int | None = None,
) -> NoiseScale:
    """Take steps, and say how noisy their gradients are. With several ranks all of them have to come here.

    Args:
        step: `step(batch)` does one whole optimizer step.
        loader: gives the batches; a DataLoader or any iterable.
        model: that is trained; None = the one that the step's closure, `self` or globals hold.
        optimizer: likewise.
        steps: how many are taken.
        micro_batch: samples in one backward; None = those of a batch, divided by its backwards.

    Raises:
        DiagnoseError: step cannot be called so.
        ValueError: the loader is empty, or it cannot be told which model is meant, or how many samples are in a backward.
        NoiseScaleError: one group per step only, fewer than two steps, or gradients that are no numbers.
    """
    check_arguments(step, 1.0)
    notes: list[str] = []
    found = discover_training(step, model, optimizer, loader, notes)
    subject = _one(found.models)
    sizes: Counter[int | None] = Counter()
    with contextlib.ExitStack() as undo:
        undo.callback(SavedState(found).restore)
        feed = undo.enter_context(Feed(loader))
        watch = undo.enter_context(NoiseWatch(subject, None, micro_batch=micro_batch or 1))
        for number in range(steps):
            try:
                batch = feed.next()
            except Exhausted:
                if not number:
                    raise ValueError("the loader could be read only once, and it has ended: give one that still has batches") from None
                notes.append(f"the loader ended after {number} of {steps} steps")
                break
            sizes[samples_in(batch)] += 1
            step(batch)
            watch.step()
        steps_seen = _together(len(watch.rows), subject)
        del watch.rows[steps_seen:]
        return watch.result(micro_batch=micro_batch or _samples(sizes, watch.backwards), notes=notes)


def _one(models: Sequence[nn.Module]) -> nn.Module:
    """The model that is trained, with what wraps it."""
    trained = [one for one in models if any(weight.requires_grad for weight in one.parameters())]
    inner = {id(part) for one in trained for part in one.modules() if part is not one}
    outer = [one for one in trained if id(one) not in inner]
    if len(outer) != 1:
        found = ", ".join(map(describe, outer)) or "none"
        raise ValueError(
            f"one model that is trained is wanted, and behind the step there are {found}: try noise_scale(step, loader, model=…)"
        )
    return outer[0]


def _samples(sizes: "Counter[int | None]", backwards: int) -> int:
    """Of one backward."""
    size, _ = sizes.most_common(1)[0]
    if size is None or size % backwards:
        said = "cannot be told" if size is None else f"are {size}, which {backwards} backwards do not share equally"
        raise NoiseScaleError(f"the samples of a batch {said}: say how many are in one backward, noise_scale(step, loader, micro_batch=…)")
    return size // backwards


def _together(count: int, model: nn.Module) -> int:
    """Steps that all ranks have taken."""
    if not (dist.is_available() and dist.is_initialized() and reduces(model)):
        return count
    least = torch.tensor([count], device=next(model.parameters()).device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
