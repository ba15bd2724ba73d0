"""The learning rate over the steps of a real torch scheduler, taken from a copy: scheduler and optimizer stay as they are.

The learning rate over the steps of a RunSpec, from the very scheduler that its runs have.
"""

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
from workbench.train.schedule import build_scheduler

_LENGTHS = ("total_steps", "T_max", "total_iters")
"""Attributes in which torch's schedulers keep how many steps they are made for."""


def scheduled(
    scheduler: Any,
    steps: int | None = None,
    *,
    lr: float = 1.0,
    batch: int | None = None,
    label: str | None = None,
    group: int = 0,
) -> Schedule:
    """The learning rate of the next steps, from a scheduler as it stands.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> scheduled(torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), 5).lrs
    (0.1, 0.1, 0.05, 0.05, 0.025)

    Args:
        scheduler: any of torch's that goes by steps, or one's own with an `optimizer` and a `step()`; or a function that makes one for an
            optimizer: `lambda optimizer: CosineAnnealingLR(optimizer, 100)`.
        steps: how many; None = as many as it says it is made for.
        lr: base learning rate of the optimizer that such a function is given.
        batch: samples per optimizer step; None = not known.
        label: what it is called; None = the scheduler's class.
        group: of parameters, whose learning rate it is.

    Raises:
        ValueError: no scheduler, one that goes by the loss, a group that is not there, or `steps` is needed and not given.
    """
    twin = _twin(scheduler) if hasattr(scheduler, "optimizer") else _made(scheduler, lr)
    if isinstance(twin, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau goes by the loss, so its learning rate is not known beforehand; "
            "the run that used it has it: wb.plot.metrics(run)"
        )
    if not callable(getattr(twin, "step", None)) or not hasattr(twin, "optimizer"):
        raise ValueError(f"{scheduler!r:.80}: {_WANTED}")
    groups = twin.optimizer.param_groups
    if not -len(groups) <= group < len(groups):
        raise ValueError(f"group={group}: the optimizer has {len(groups)} groups of parameters, 0 to {len(groups) - 1}")
    first = max(0, *(int(getattr(part, "last_epoch", None) or 0) for part in _parts(twin)))
    count = _length(twin, first) if steps is None else steps
    whole_number("steps", count, least=1)
    lrs, end = _walk(twin, count, group)
    return Schedule(steps=tuple(range(first, first + len(lrs))), lrs=lrs, label=label or type(twin).__name__, batch=batch, end=end)


_WANTED = "a torch scheduler is wanted, or a function that makes one: lambda optimizer: CosineAnnealingLR(optimizer, 100)"


def _made(factory: Callable[[Optimizer], Any], lr: float) -> Any:
    if not callable(factory):
        raise ValueError(f"{factory!r:.80}: {_WANTED}")
    return factory(torch.optim.AdamW([_parameter()], lr=lr))


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def _twin(scheduler: Any) -> Any:
    """A copy on an optimizer with the same options and one parameter of its own: weights and states are not copied."""
    optimizer = scheduler.optimizer
    stand_in = copy.copy(optimizer)
    stand_in.param_groups = [
        {"params": [_parameter()], **copy.deepcopy({name: value for name, value in group.items() if name != "params"})}
        for group in optimizer.param_groups
    ]
    weights = {id(weight): _parameter() for group in optimizer.param_groups for weight in group["params"]}
    try:
        return copy.deepcopy(scheduler, {id(optimizer): stand_in, **weights})
    except Exception as error:
        raise ValueError(
            f"the {type(scheduler).__name__} cannot be copied ({error}), and it is not to be changed: "
            "give a function that makes one instead: lambda optimizer: …"
        ) from error


def _walk(twin: Any, count: int, group: int) -> tuple[tuple[float, ...], str]:
    """The learning rates of so many steps, and why there are fewer."""
    lrs = [float(twin.optimizer.param_groups[group]["lr"])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer does not step
        for _ in range(count - 1):
            try:
                twin.step()
            except ValueError as error:  # OneCycleLR, behind its last step
                return tuple(lrs), f"it ends after {len(lrs)} steps: {error}"
            except (AttributeError, NotImplementedError, TypeError) as error:  # a ChainedScheduler behind a milestone of a SequentialLR
                parts = dict.fromkeys(type(part).__name__ for part in _parts(twin))
                raise ValueError(
                    f"the scheduler ({', '.join(parts)}) cannot take step {len(lrs)} by itself, here or in training: "
                    f"{type(error).__name__}: {error}; a step() without arguments is wanted, and some of torch's schedulers, "
                    "ChainedScheduler above all, do not go inside of others: put them together in another order"
                ) from error
            lrs.append(float(twin.optimizer.param_groups[group]["lr"]))
    return tuple(lrs), ""


def _parts(scheduler: Any) -> list[Any]:
    """Itself and those that it is made of, however deep."""
    return [scheduler, *(inner for part in getattr(scheduler, "_schedulers", None) or () for inner in _parts(part))]


def _length(twin: Any, first: int) -> int:
    parts = _parts(twin)
    known = [int(value) for part in parts for name in _LENGTHS if isinstance(value := getattr(part, name, None), int)]
    milestones = [int(value) for part in parts for value in getattr(part, "milestones", None) or getattr(part, "_milestones", None) or ()]
    if milestones:
        known.append(max(milestones) + (known[-1] if known else max(milestones)))
    if not known or max(known) <= first:
        raise ValueError(f"the {type(twin).__name__} does not say how many steps it is made for: give steps=…")
    return max(known) - first


def schedule_of(spec: RunSpec, *, lr: float | None = None, name: str | None = None) -> Schedule:
    """The learning rate of each step of a run.

    Args:
        spec: whose `steps`, `warmup_steps` and `schedule` count.
        lr: its peak, where the spec leaves it to the task's optimizer; None = as the spec has it, else 1: the part of the peak.
        name: what it is called; None = the task's name.
    """
    peak = lr if lr is not None else spec.lr if spec.lr is not None else 1.0
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    batch = spec.global_batch if isinstance(spec.micro_batch, int) else None
    return scheduled(build_scheduler(optimizer, spec), spec.steps, batch=batch, label=name or label(spec.task))
