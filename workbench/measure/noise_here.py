"""The gradient noise scale of a step and its loader in this process; everything is left as it was."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from workbench.batch.noise_scale import NoiseScale
from workbench.batch.noise_steps import NoiseScaleError
from workbench.measure.feed import Exhausted, Feed
from workbench.measure.found import describe
from workbench.measure.gradient_noise import NoiseWatch, reduces
from workbench.measure.keep import Keep
from workbench.measure.loop import samples_in
from workbench.measure.subject import check, look_around


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
    check(step, 1.0)
    notes: list[str] = []
    found = look_around(step, model, optimizer, loader, notes)
    subject = _one(found.models)
    sizes: Counter[int | None] = Counter()
    with contextlib.ExitStack() as undo:
        undo.callback(Keep(found).restore)
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
