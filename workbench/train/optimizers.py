"""Optimizers by name with options: `"sgd(momentum=0.9)"` → the torch optimizer. Options are Python literals and never executed."""

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.spec import IMPLEMENTATIONS, SpecError
from workbench.task import TaskError

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
"""Optimizers that have a name here; others can be given by a Task as a function of the parameters."""


def parse_optimizer(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of an optimizer.

    >>> parse_optimizer("sgd(lr=0.1, momentum=0.9)")
    ('sgd', {'lr': 0.1, 'momentum': 0.9})
    >>> parse_optimizer("adamw")
    ('adamw', {})

    Raises:
        SpecError: not of this form, an unknown name or an unknown option.
    """
    form = 'a name is wanted, with options if you like: "sgd(lr=0.1, momentum=0.9)"'
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
        if not isinstance(call.func, ast.Name):
            raise ValueError
        name = call.func.id.lower()
    except (SyntaxError, ValueError):
        raise SpecError(f"optimizer={text!r}: {form}") from None
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        hint = f'did you mean "{near[0]}"? ' if near else ""
        raise SpecError(f"optimizer={text!r}: no optimizer {name!r}; {hint}Allowed are {', '.join(OPTIMIZERS)}; a Task may give a function")
    allowed = [option for option in inspect.signature(OPTIMIZERS[name]).parameters if option != "params"]
    options = {}
    for keyword in call.keywords:
        if keyword.arg not in allowed:
            raise SpecError(f"optimizer={text!r}: {name} has no option {keyword.arg!r}; it has {', '.join(allowed)}")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise SpecError(f"optimizer={text!r}: {keyword.arg}={ast.unparse(keyword.value)} is not a plain value; {form}") from None
    if call.args:
        raise SpecError(f"optimizer={text!r}: give each option its name; {form}")
    return name, options


def build_optimizer(
    model: nn.Module, own: Callable[[Iterable[nn.Parameter]], Optimizer] | str, *, override: str | None = None, lr: float | None = None
) -> Optimizer:
    """The optimizer of a run.

    Args:
        model: whose parameters it updates.
        own: the task's optimizer.
        override: the spec's, which goes before the task's own; "fused" or "foreach": the task's own in that implementation.
        lr: peak learning rate, which goes before any other; None = the optimizer's own.

    Raises:
        SpecError: a name or option that does not exist, or a value that the optimizer refuses.
        TaskError: the task's function did not return an optimizer.
    """
    implementation = override if override in IMPLEMENTATIONS else None
    chosen = own if implementation else override or own
    if isinstance(chosen, str):
        name, options = parse_optimizer(chosen)
        if implementation:
            options = {option: value for option, value in options.items() if option not in IMPLEMENTATIONS} | {implementation: True}
        try:
            return OPTIMIZERS[name](model.parameters(), **options | ({} if lr is None else {"lr": lr}))
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError(f"optimizer={override or chosen!r}: {name} refuses it: {error}") from error
    optimizer = chosen(model.parameters())
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"the task's optimizer function returned a {type(optimizer).__name__}; a torch.optim.Optimizer is wanted: "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    for group in optimizer.param_groups:
        if lr is not None:
            group["lr"] = lr
        if implementation:
            if implementation not in group:
                raise SpecError(f"optimizer={implementation!r}: the task's {type(optimizer).__name__} has no such implementation")
            group.update({name: name == implementation for name in IMPLEMENTATIONS if name in group})
    return optimizer
