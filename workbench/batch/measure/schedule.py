"""Reads the learning rate of each step from a copy of a torch scheduler, or from the scheduler that a RunSpec's runs use."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from workbench.batch.analysis.schedule import Schedule
from workbench.core.checks import whole_number
from workbench.runs.spec import RunSpec
from workbench.runs.task import label
from workbench.runs.training_knobs import is_own_schedule
from workbench.train.optimizers import build_scheduler

LENGTHS = ("total_steps", "T_max", "total_iters")
"""Attributes of torch's schedulers for the number of steps they are made for."""
_ALLOWED = "a torch scheduler is allowed, or a function that makes one: lambda optimizer: CosineAnnealingLR(optimizer, 100)"


def scheduled(
    scheduler: Any, steps: int | None = None, *, lr: float = 1.0, batch: int | None = None, label: str | None = None, group: int = 0
) -> Schedule:
    """The learning rate of the next steps of a scheduler, which does not change.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> scheduled(torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), 5).lrs
    (0.1, 0.1, 0.05, 0.05, 0.025)

    Args:
        scheduler: one of torch's that goes by steps, any with an `optimizer` and a `step()`, or a function that makes one for an
            optimizer: `lambda optimizer: CosineAnnealingLR(optimizer, 100)`.
        steps: how many; None = the number that it is made for.
        lr: base learning rate of the optimizer for such a function.
        batch: samples per optimizer step; None = not known.
        label: name; None = the scheduler's class.
        group: parameter group whose learning rate is read.

    Raises:
        ValueError: not a scheduler, one that goes by the loss, no such group, or `steps` is needed and not given.
    """
    copied = _copy(scheduler) if hasattr(scheduler, "optimizer") else _made(scheduler, lr)
    if isinstance(copied, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau goes by the loss, so its learning rate is not known beforehand; "
            "the run that used it has it: wb.plot.metrics(run)"
        )
    if not callable(getattr(copied, "step", None)) or not hasattr(copied, "optimizer"):
        raise ValueError(f"{scheduler!r:.80}: {_ALLOWED}")
    groups = copied.optimizer.param_groups
    if not -len(groups) <= group < len(groups):
        raise ValueError(f"group={group}: the optimizer has {len(groups)} groups of parameters, 0 to {len(groups) - 1}")
    first = max(0, *(int(getattr(part, "last_epoch", None) or 0) for part in _parts(copied)))
    count = _length(copied, first) if steps is None else steps
    whole_number("steps", count, least=1)
    lrs, end = _walk(copied, count, group)
    return Schedule(steps=tuple(range(first, first + len(lrs))), lrs=lrs, label=label or type(copied).__name__, batch=batch, end=end)


def _made(factory: Callable[[Optimizer], Any], lr: float) -> Any:
    if not callable(factory):
        raise ValueError(f"{factory!r:.80}: {_ALLOWED}")
    return factory(torch.optim.AdamW([_parameter()], lr=lr))


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def _copy(scheduler: Any) -> Any:
    """A copy of a scheduler on an optimizer with the same options and one parameter per group: weights and states are not copied."""
    optimizer = scheduler.optimizer
    substitute = copy.copy(optimizer)
    substitute.param_groups = [
        {"params": [_parameter()], **copy.deepcopy({name: value for name, value in group.items() if name != "params"})}
        for group in optimizer.param_groups
    ]
    weights = {id(weight): _parameter() for group in optimizer.param_groups for weight in group["params"]}
    try:
        return copy.deepcopy(scheduler, {id(optimizer): substitute, **weights})
    except Exception as error:
        raise ValueError(
            f"the {type(scheduler).__name__} cannot be copied ({error}): give a function that makes one instead: lambda optimizer: …"
        ) from error


def _walk(copied: Any, count: int, group: int) -> tuple[tuple[float, ...], str]:
    """The learning rates of `count` steps, and why there are fewer."""
    lrs = [float(copied.optimizer.param_groups[group]["lr"])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the optimizer, which does not step
        for _ in range(count - 1):
            try:
                copied.step()
            except ValueError as error:  # OneCycleLR after its last step
                return tuple(lrs), f"it ends after {len(lrs)} steps: {error}"
            except (AttributeError, NotImplementedError, TypeError) as error:  # a ChainedScheduler in a SequentialLR
                parts = dict.fromkeys(type(part).__name__ for part in _parts(copied))
                raise ValueError(
                    f"the scheduler ({', '.join(parts)}) cannot take step {len(lrs)} by itself, here or in training: "
                    f"{type(error).__name__}: {error}; step() has to work without arguments, and some of torch's schedulers, "
                    "ChainedScheduler above all, cannot be nested in others: combine them in another order"
                ) from error
            lrs.append(float(copied.optimizer.param_groups[group]["lr"]))
    return tuple(lrs), ""


def _parts(scheduler: Any) -> list[Any]:
    """A scheduler and all that it consists of."""
    return [scheduler, *(inner for part in getattr(scheduler, "_schedulers", None) or () for inner in _parts(part))]


def _length(copied: Any, first: int) -> int:
    parts = _parts(copied)
    known = [int(value) for part in parts for name in LENGTHS if isinstance(value := getattr(part, name, None), int)]
    milestones = [int(value) for part in parts for value in getattr(part, "milestones", None) or getattr(part, "_milestones", None) or ()]
    if milestones:
        known.append(max(milestones) + (known[-1] if known else max(milestones)))
    if not known or max(known) <= first:
        raise ValueError(f"the {type(copied).__name__} does not say how many steps it is made for: give steps=…")
    return max(known) - first


def schedule_of(spec: RunSpec, *, lr: float | None = None, name: str | None = None) -> Schedule:
    """The learning rate of each step of a run.

    Args:
        spec: its `steps`, `warmup_steps` and `schedule` are used.
        lr: peak, where the spec leaves it to the task's optimizer; None = the spec's, or else 1: rates are relative to the peak.
        name: None = the task's name.

    Raises:
        ValueError: its schedule is a function of the user's own.
    """
    if is_own_schedule(spec.schedule):
        raise ValueError(
            f"schedule={spec.schedule!r:.80} is a function of your own, and drawing a spec, which may be somebody else's, imports nothing. "
            "Give a scheduler: lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, my_schedule), with steps="
        )
    peak = lr if lr is not None else spec.lr if spec.lr is not None else 1.0
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    batch = spec.global_batch if isinstance(spec.micro_batch, int) else None
    return scheduled(build_scheduler(optimizer, spec), spec.steps, batch=batch, label=name or label(spec.task))
