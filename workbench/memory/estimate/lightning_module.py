"""Estimates a LightningModule as Lightning's Trainer trains it: by its training_step and its configure_optimizers."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.memory.estimate.errors import EstimateError
from workbench.memory.estimate.examples import DefaultLoss
from workbench.runs.task import Task

PACKAGES = ("lightning", "pytorch_lightning")


def is_lightning(model: nn.Module) -> bool:
    """Is it a LightningModule with a training_step of its own?"""
    kinds = type(model).__mro__
    lightnings = [kind for kind in kinds if kind.__module__.partition(".")[0] in PACKAGES]
    is_module = any(kind.__name__ == "LightningModule" for kind in lightnings)
    return is_module and any("training_step" in vars(kind) for kind in kinds if kind not in lightnings)


def trained(task: Task, model: nn.Module) -> Task:
    """The task as the model that it built is trained; a call of a LightningModule becomes its training_step, in place.

    Where no loss was given, training_step is the loss, and configure_optimizers makes the optimizer, unless one was given.

    Args:
        task: the task whose memory is estimated.
        model: of this task, in a dry run, which puts back its class and attributes.
    """
    if not (isinstance(task.loss, DefaultLoss) and is_lightning(model)):
        return task
    calls_training_step(model)
    if not isinstance(task.optimizer, str):
        return dataclasses.replace(task, loss=StepLoss())
    optimizer = configured(model)
    task.loss.optimizer = optimizer.__name__
    return dataclasses.replace(task, loss=StepLoss(), optimizer=optimizer)


def calls_training_step(module: nn.Module) -> None:
    """Make a call of a LightningModule its training_step, in place, so that DDP's and FSDP's hooks on forward see it, as in Lightning.

    Within training_step, a call of the module is its own forward. Nothing is logged, since there is no Trainer.
    """
    kind: Any = type(module)

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if vars(self).get("_in_training_step"):
            return kind.forward(self, *args, **named)
        self._in_training_step = True
        try:
            return self.training_step(*args, 0) if _takes_index(self.training_step) else self.training_step(*args)
        finally:
            self._in_training_step = False

    def log(self: Any, *args: Any, **options: Any) -> None:
        """Nothing."""

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "log": log, "log_dict": log, "__module__": kind.__module__})


def _takes_index(step: Callable[..., Any]) -> bool:
    """Does Lightning give a training_step the index of the batch, too? It does where a second place takes it.

    Source: lightning/pytorch/utilities/signature_utils.py `is_param_in_hook_signature`.
    """
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    places = [kind for kind in kinds if kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds


class StepLoss:
    """The loss of a module whose call is its training_step.

    Attributes:
        how: what it is, in words.
    """

    how = "that of training_step(batch, 0)"

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        module: Any = getattr(model, "module", model)
        if not getattr(module, "automatic_optimization", True):
            raise EstimateError(
                f"{type(module).__name__} has automatic_optimization = False: its training_step calls its optimizers itself. Give "
                'loss=lambda model, batch: … and optimizer="adamw"'
            )
        result = model(batch)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise EstimateError(
                f"training_step of {type(module).__name__} returned a {type(result).__name__}: expected the loss, a tensor with one "
                'number, or {"loss": …}; or give loss=lambda model, batch: …'
            )
        return loss.mean()


def configured(module: Any) -> Callable[[Iterable[Tensor]], Optimizer]:
    """A Task's optimizer: the one that configure_optimizers of a LightningModule makes.

    Args:
        module: the LightningModule that is trained.
    """

    def configure_optimizers(parameters: Iterable[Tensor]) -> Optimizer:
        weights, name = list(parameters), type(module).__name__
        try:
            made = module.configure_optimizers()
        except Exception as error:
            raise EstimateError(
                f'configure_optimizers of {name} raised {type(error).__name__}: {str(error)[:200]}. Give optimizer="adamw", or yours'
            ) from error
        found = list(_optimizers_in(made))
        if len(found) != 1:
            raise EstimateError(f'configure_optimizers of {name} made {len(found)} optimizers: give one, optimizer="adamw" or yours')
        known = {id(weight) for weight in weights}
        if all(id(weight) in known for group in found[0].param_groups for weight in group["params"]):
            return found[0]
        takes = inspect.signature(type(found[0])).parameters  # of a stage of a pipeline: its own weights
        return type(found[0])(weights, **{key: value for key, value in found[0].defaults.items() if key in takes})

    return configure_optimizers


def _optimizers_in(made: Any) -> Iterable[Optimizer]:
    """Those in what configure_optimizers returned: one, several, dicts with schedulers, or a list of each."""
    if isinstance(made, Optimizer):
        yield made
    elif isinstance(made, Mapping):
        yield from _optimizers_in(made.get("optimizer"))
    elif isinstance(made, list | tuple):
        for each in made:
            yield from _optimizers_in(each)
