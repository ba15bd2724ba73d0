"""Optimizer steps of a model, a batch and a loss, to measure what `estimate_memory(model, batch)` predicts."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.core import units
from workbench.core.checks import shown
from workbench.harness.batches import map_tensors, tensors_of
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.estimate.examples import DefaultLoss
from workbench.memory.estimate.lightning_module import trained
from workbench.memory.estimate.plan import checked
from workbench.runs.task import Task
from workbench.train.optimizers import build_optimizer


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a loader, or one batch again and again, on a device."""

    given: Any
    """A loader, a list of batches, or a batch."""
    repeats: bool
    """Is it a batch?"""
    device: torch.device | None
    """Where its tensors go; None = they stay where they are."""

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.repeat(self.given) if self.repeats else self.given:
            yield map_tensors(lambda tensor: tensor.to(self.device), batch) if self.device else batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSteps:
    """Optimizer steps of a copy of a model, as `estimate_memory(model, batch)` predicts them on one rank."""

    name: str
    """What was given as the model, in a word."""
    model: nn.Module
    """The copy that is trained."""
    loader: Iterable[Any]
    """Its batches, on its device."""
    loss: Callable[[Any, Any], Any]
    """`loss(model, batch)`."""
    optimizer: Optimizer
    """Updates the copy."""

    @classmethod
    def of(cls, target: Any, batch: Any, *, loss: Any = None, optimizer: Any = None, device: str | None = None) -> "ModelSteps | None":
        """The steps of a model; None = there is no batch, nor anything else that only goes with a model.

        Args:
            target: a module, which is copied, or a function that builds one.
            batch: tensors in a tuple, a list or a dict; or a loader or a list of such batches.
            loss: `loss(model, batch)`; None = see DefaultLoss.
            optimizer: a name with options or a function of the parameters; None = "adamw".
            device: "cpu" or "cuda"; None = where the model is.

        Raises:
            ValueError: no batch, a device that this machine does not have, or a loss that is a criterion.
        """
        loads = hasattr(batch, "batch_sampler")
        if not loads and not tensors_of(batch):
            if loss is None and device is None:
                return None
            raise ValueError(f"measure_memory({shown(target)}, …): a model needs a batch of tensors: measure_memory(model, batch, loss=…)")
        here = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        if device is not None and device not in here:
            raise ValueError(
                f"device={device!r}: a measurement runs on this machine, so {' or '.join(map(repr, here))} is allowed; "
                f"estimate_memory(model, batch, device={device!r}) predicts"
            )
        model = (copy.deepcopy(target) if isinstance(target, nn.Module) else target()).train()
        if device:
            model = model.to(device)
        several = isinstance(batch, list) and not any(isinstance(part, torch.Tensor) for part in batch)
        task = Task(model=lambda: model, dataset=list, loss=checked(loss) if loss else DefaultLoss(), optimizer=optimizer or "adamw")
        task = trained(task, model)
        return cls(
            name=shown(target),
            model=model,
            loader=Batches(batch, not (loads or several), next((weight.device for weight in model.parameters()), None)),
            loss=task.loss,
            optimizer=build_optimizer(model, task.optimizer),
        )

    def step(self, batch: Any) -> None:
        """One whole optimizer step."""
        self.loss(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def titled(self, measured: MemoryBreakdown, steps: int) -> MemoryBreakdown:
        """A breakdown with the model's name, and a note on a loss that was not given."""
        how = getattr(self.loss, "how", "")
        notes = (f"no loss was given, so the loss is {how}",) if how else ()
        return dataclasses.replace(measured, title=f"{self.name}, {units.several(steps, 'step')}", notes=(*measured.notes, *notes))
