"""The table of optimizers that a spec can name: family, options with defaults, and what panels offer. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["sgd", "adam", "other"]
"""What the scaling rules distinguish: "sgd" steps in proportion to the gradient, "adam" divides it by its own size (Malladi's square root
rule is for these), "other" are adaptive too, but no rule was derived for them."""

_SHARED = ("lr", "weight_decay")
_OF_TORCH = ("foreach", "maximize", "capturable", "differentiable", "fused")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptimizer:
    """One row of the table.

    >>> OPTIMIZERS["adamw"].defaults["betas"]
    (0.9, 0.999)
    """

    name: str
    """In a spec: "adamw"."""
    class_name: str
    """Of the class, in torch.optim or, where it is ours, in `workbench.train.large_batch_optimizers`."""
    family: Family
    """For the rules that scale learning rates."""
    defaults: Mapping[str, Any]
    """Options that the rules look at, the learning rate among them, with their defaults."""
    other_options: tuple[str, ...] = ()
    """Its further options, without those that all have."""
    of_torch: bool = True
    """Is the class torch's own?"""
    shared_options: tuple[str, ...] = _OF_TORCH
    """Its options that most of torch's have; those of a class that is ours are left out."""
    decoupled: bool = False
    """Is its weight decay no part of the gradient, so that weights shrink by lr × weight_decay a step?"""
    offered: tuple[str, ...] = ()
    """How panels offer it; empty = they do not."""

    @property
    def options(self) -> tuple[str, ...]:
        """Names of all its options."""
        own = tuple(name for name in self.defaults if name not in _SHARED)
        return (*own, *self.other_options, *_SHARED, *(self.shared_options if self.of_torch else ()))


_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "lr": 0.001}
_TABLE = (
    NamedOptimizer(
        name="sgd",
        class_name="SGD",
        family="sgd",
        defaults={"momentum": 0.0, "weight_decay": 0.0, "lr": 0.001},
        other_options=("dampening", "nesterov"),
        offered=("sgd", "sgd(momentum=0.9)"),
    ),
    NamedOptimizer(
        name="adam",
        class_name="Adam",
        family="adam",
        defaults=_ADAM,
        other_options=("amsgrad", "decoupled_weight_decay"),
        offered=("adam",),
    ),
    NamedOptimizer(
        name="adamw",
        class_name="AdamW",
        family="adam",
        defaults={**_ADAM, "weight_decay": 0.01},
        other_options=("amsgrad",),
        decoupled=True,
        offered=("adamw",),
    ),
    NamedOptimizer(
        name="adagrad",
        class_name="Adagrad",
        family="other",
        defaults={"eps": 1e-10, "weight_decay": 0.0, "lr": 0.01},
        other_options=("lr_decay", "initial_accumulator_value"),
        offered=("adagrad",),
    ),
    NamedOptimizer(
        name="rmsprop",
        class_name="RMSprop",
        family="adam",
        defaults={"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.01},
        other_options=("centered",),
        offered=("rmsprop",),
    ),
    NamedOptimizer(
        name="lars",
        class_name="LARS",
        family="sgd",
        defaults={"momentum": 0.9, "weight_decay": 0.0, "lr": 1.0},
        other_options=("trust_coefficient", "exclude_1d"),
        of_torch=False,
        offered=("lars",),
    ),
    NamedOptimizer(
        name="lamb",
        class_name="LAMB",
        family="other",
        defaults={**_ADAM, "eps": 1e-6, "weight_decay": 0.01},
        other_options=("exclude_1d",),
        of_torch=False,
        offered=("lamb",),
    ),
    NamedOptimizer(
        name="muon",
        class_name="MuonWithAdamW",
        family="other",
        defaults={**_ADAM, "momentum": 0.95, "weight_decay": 0.1},
        other_options=("nesterov", "ns_steps"),
        of_torch=False,
        decoupled=True,
    ),
    NamedOptimizer(
        name="adafactor",
        class_name="Adafactor",
        family="other",
        defaults={"weight_decay": 0.0, "lr": 0.01},
        other_options=("beta2_decay", "eps", "d"),
        shared_options=("foreach", "maximize"),
        decoupled=True,
    ),
    NamedOptimizer(
        name="nadam",
        class_name="NAdam",
        family="adam",
        defaults={**_ADAM, "lr": 0.002},
        other_options=("momentum_decay", "decoupled_weight_decay"),
    ),
    NamedOptimizer(name="radam", class_name="RAdam", family="adam", defaults=_ADAM, other_options=("decoupled_weight_decay",)),
)
"""The commonest first; a test compares options and defaults with the real classes."""
OPTIMIZERS: Mapping[str, NamedOptimizer] = {row.name: row for row in sorted(_TABLE, key=lambda row: row.name)}
"""By name. Others can be given by a Task as a function of the parameters."""
OFFERED: tuple[str, ...] = tuple(text for row in _TABLE for text in row.offered)
"""Optimizers that panels offer."""
