"""Builds a run's optimizer (`"sgd(momentum=0.9)"` → torch's, sharded as ZeRO-1 or on the host) and its learning-rate schedule.

What the workbench knows of each optimizer (states, learning-rate rule) is a row of `core/optimizer_table.py`.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from workbench.core.optimizer_table import OPTIMIZERS as NAMED
from workbench.runs.spec import IMPLEMENTATIONS, RunSpec, SpecError
from workbench.runs.task import TaskError, resolve_schedule
from workbench.runs.training_knobs import is_own_schedule, lr_factor, parse_optimizer
from workbench.train.checkpoint_file import plain
from workbench.train.large_batch_optimizers import LAMB, LARS
from workbench.train.muon import MuonWithAdamW, hidden_matrices
from workbench.train.offload import HostOptimizer
from workbench.train.sharded_tensors import dtensor_spec, is_dtensor

_OURS: dict[str, type[Optimizer]] = {"LAMB": LAMB, "LARS": LARS, "MuonWithAdamW": MuonWithAdamW}
OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: getattr(torch.optim, row.class_name) if row.of_torch else _OURS[row.class_name] for name, row in NAMED.items()
}
"""Name → class of the optimizer; a Task can give others as a function of the parameters."""


def optimizer_class(optimizer: Optimizer) -> type[Optimizer]:
    """The class of an optimizer, also inside of ZeRO-1's and of one whose states are in host memory."""
    local = getattr(optimizer, "optim", optimizer)
    return type(local.inner if isinstance(local, HostOptimizer) else local)


def described(optimizer: Optimizer) -> dict[str, Any]:
    """The name and options of a built optimizer in plain values, from its first group.

    >>> weights = [nn.Parameter(torch.zeros(2))]
    >>> described(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    {'name': 'sgd', 'lr': 0.1, 'betas': None, 'eps': None, 'momentum': 0.9, 'weight_decay': 0}

    Returns:
        "name" (in OPTIMIZERS, else the name of the class), "lr", "betas", "eps", "momentum" and "weight_decay"; None for an option that
        it does not have. RMSProp's only beta, alpha, is in "betas".
    """
    kind = optimizer_class(optimizer)
    name = next((name for name, known in OPTIMIZERS.items() if known is kind), kind.__name__)
    group = optimizer.param_groups[0]
    values = {"name": name} | {option: _plain(group.get(option)) for option in ("lr", "betas", "eps", "momentum", "weight_decay")}
    if name == "rmsprop":
        values["betas"] = (_plain(group["alpha"]),)
    if isinstance(values["eps"], tuple | list):  # Adafactor's two, of other meanings
        values["eps"] = None
    return values


def _plain(value: Any) -> Any:
    """A number, also if it is in a tensor (learning rate or betas of a compiled step)."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, torch.Tensor) else value


def build_optimizer(
    model: nn.Module,
    own: Callable[[Iterable[nn.Parameter]], Optimizer] | str,
    *,
    override: str | None = None,
    lr: float | None = None,
    decayed: str = "all",
    hidden: Collection[str] | None = None,
) -> Optimizer:
    """The optimizer of a run.

    Args:
        override: the spec's, which goes before the task's own; "fused" or "foreach": the task's own in that implementation.
        lr: peak learning rate of the first group, to which others keep their ratio; None = the optimizer's own.
        decayed: parameters that weight decay shrinks, "all" or "matrices".
        hidden: names of the matrices for Muon, where `model` is a part of the model (`muon.hidden_names`); None = `model` is whole.

    Raises:
        SpecError: a name or option that does not exist, a value that the optimizer refuses, or there is no weight decay to be split.
        TaskError: the task's function did not return an optimizer.
    """
    optimizer = _built(model, own, override, lr, hidden)
    for options in (optimizer.defaults, *optimizer.param_groups):  # a resumed run, too, computes with Python's numbers
        options.update({name: plain(value) for name, value in options.items() if name != "params"})
    if decayed == "matrices":
        if not any(group.get("weight_decay") for group in optimizer.param_groups):
            raise SpecError(
                f'weight_decay_on="matrices": the {type(optimizer).__name__} has no weight decay here; leave weight_decay_on out, or try '
                'optimizer="adamw(weight_decay=0.1)"'
            )
        optimizer.param_groups[:] = [part for group in optimizer.param_groups for part in _by_decay(group)]
    return optimizer


def _by_decay(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group of parameters, split into those with two dimensions or more and the others, which get no weight decay."""
    matrices, others = ([weight for weight in group["params"] if (weight.dim() >= 2) is matrix] for matrix in (True, False))
    parts = [{**group, "params": matrices}, {**group, "params": others, "weight_decay": 0.0}]
    return [part for part in parts if part["params"]]


def _built(
    model: nn.Module,
    own: Callable[[Iterable[nn.Parameter]], Optimizer] | str,
    override: str | None,
    lr: float | None,
    hidden: Collection[str] | None,
) -> Optimizer:
    """The optimizer, with one group of parameters unless the task's own has more."""
    implementation = override if override in IMPLEMENTATIONS else None
    chosen = own if implementation else override or own
    if isinstance(chosen, str):
        name, options = parse_optimizer(chosen)
        if implementation:
            options = {option: value for option, value in options.items() if option not in IMPLEMENTATIONS} | {implementation: True}
        try:
            weights = hidden_matrices(model, hidden) if name == "muon" else model.parameters()
            return OPTIMIZERS[name](weights, **options | ({} if lr is None else {"lr": lr}))
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError(f"optimizer={override or chosen!r}: {name} refuses it: {error}") from error
    try:
        optimizer = chosen(model.parameters())
    except ValueError as error:
        if any(weight.requires_grad for weight in model.parameters()):
            raise
        raise TaskError(
            f"the task's optimizer function raised {error!r}: all parameters that it was given are frozen, as a stage of a pipeline "
            "can be. Pass the frozen ones to the optimizer, too, which leaves them as they are: optimizer=torch.optim.AdamW"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"the task's optimizer function returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer: "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise TaskError(
            f"the task's {type(optimizer).__name__} needs a closure, by which it computes the loss several times in a step; a training "
            'computes it once: try "adamw"'
        )
    if lr is not None:
        _set_peak(optimizer, lr)
    for group in optimizer.param_groups:
        if implementation:
            if implementation not in group:
                raise SpecError(f"optimizer={implementation!r}: the task's {type(optimizer).__name__} has no such implementation")
            group.update({name: name == implementation for name in IMPLEMENTATIONS if name in group})
    return optimizer


def _set_peak(optimizer: Optimizer, lr: float) -> None:
    """Give the first group of parameters a learning rate, and others in the ratio that they have to it, as `find_lr` does."""
    first, *others = (float(group["lr"]) for group in optimizer.param_groups)
    if not first and any(others):
        raise SpecError(
            f"lr={lr}: the first group of the task's {type(optimizer).__name__} has a learning rate of 0, and another has not, so their "
            "ratio is not known: leave lr out, or give the first group a rate above 0"
        )
    for group in optimizer.param_groups:
        group["lr"] = lr * (float(group["lr"]) / first if first else 1.0)


def place_optimizer(optimizer: Optimizer, *, share: bool, group: dist.ProcessGroup | None = None, on_host: bool = False) -> Optimizer:
    """An optimizer that has not stepped yet, rebuilt so that ranks shard its states (ZeRO-1), or in host memory, or both.

    ZeRO-1 assigns whole parameters to ranks: each steps for its own and broadcasts them. Schedules and clipping still see all parameters,
    and fused and foreach implementations work. Without both, groups are only split by mesh, as foreach and fused need it.

    Args:
        optimizer: of all parameters; its class has to take groups of parameters, and its options by name.
        share: each rank of `group` keeps the states of its part of the parameters.
        group: the ranks that share; None = all.
        on_host: states and master weights are in host memory, where it steps.

    Raises:
        TaskError: the optimizer's class cannot be rebuilt like this.
        SpecError: parameters are sharded, and torch has no fused implementation of this optimizer for them.
    """
    if not share and not on_host:
        _check_fused(optimizer)
        optimizer.param_groups[:] = [part for group in optimizer.param_groups for part in _by_mesh(group)]
        return optimizer
    kind, known = type(optimizer), inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    make: Any = partial(HostOptimizer, kind=kind) if on_host else kind
    try:
        if share:
            return _zero()(optimizer.param_groups, make, process_group=group, **options)  # type: ignore[no-any-return]
        return make(optimizer.param_groups, **options)  # type: ignore[no-any-return]
    except (TypeError, ValueError, RuntimeError) as error:
        how = 'parallel="zero1"' if share else 'offload="optimizer"'
        raise TaskError(
            f"{how}: the {kind.__name__} cannot be built on a part of the parameters: {error}; try another optimizer"
        ) from error


def _check_fused(optimizer: Optimizer) -> None:
    sharded = any(is_dtensor(weight) for group in optimizer.param_groups for weight in group["params"])
    split = any(dtensor_spec(weight) is not None for group in optimizer.param_groups for weight in group["params"])
    if split and isinstance(optimizer, torch.optim.Adafactor | MuonWithAdamW):
        name = "muon" if isinstance(optimizer, MuonWithAdamW) else "adafactor"
        needs = "whole matrices" if name == "muon" else "the means of whole rows and columns"
        raise SpecError(
            f"{name} on parameters that ranks share (FSDP2, tensor or expert parallelism): it needs {needs}, and sees "
            'parts of them; try parallel="ddp" without tensor_parallel and expert_parallel, or "adamw"'
        )
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if sharded and fused and not isinstance(optimizer, torch.optim.Adam):
        raise SpecError(
            f"a fused {type(optimizer).__name__} on parameters that ranks share (FSDP2): torch has that for Adam and AdamW only; "
            'try "foreach" instead'
        )


def _by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group of parameters, split by mesh: foreach and fused implementations take no mixture."""
    parts: dict[Any, list[nn.Parameter]] = {}
    for weight in group["params"]:
        parts.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
    return [{**group, "params": weights} for weights in parts.values()] if len(parts) > 1 else [group]


def _zero() -> Any:
    """ZeroRedundancyOptimizer; importing its package raises a deprecation warning about torch itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def build_scheduler(optimizer: Optimizer, spec: RunSpec) -> LambdaLR:
    """The scheduler of a run; call its `step()` after each optimizer step. A schedule of the user's own is imported.

    Raises:
        TaskError: it cannot be used; see `resolve_schedule`.
    """
    own = resolve_schedule(spec.schedule, spec.steps) if is_own_schedule(spec.schedule) else None
    shape: dict[str, Any] = {"steps": spec.steps, "warmup_steps": spec.warmup_steps, "schedule": spec.schedule, "own": own}
    return LambdaLR(optimizer, lambda step: lr_factor(step, **shape))


def resume_scheduler(scheduler: LambdaLR, state: Mapping[str, Any], *, anew: bool) -> None:
    """Let a scheduler go on from its state in a checkpoint; `anew`: at the learning rate that this schedule has there. Call it last."""
    groups = scheduler.optimizer.param_groups  # there may be more of them than there were
    for group in groups if anew else ():
        lr = group["initial_lr"] * scheduler.lr_lambdas[0](state["last_epoch"])
        group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], torch.Tensor) else lr
    scheduler.load_state_dict(
        {
            **state,
            "base_lrs": [group["initial_lr"] for group in groups],
            "_last_lr": [group["lr"] for group in groups],
            "lr_lambdas": [None] * len(groups),
        }
    )
