"""Estimates a LightningModule as Lightning's Trainer trains it: by its training_step and its configure_optimizers."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.memory.estimate.building import BuildError, build
from workbench.memory.estimate.errors import EstimateError
from workbench.runs.task import Task

PACKAGES = ("lightning", "pytorch_lightning")


def is_lightning(target: Any) -> bool:
    """Is it a LightningModule with a training_step of its own, its class, or a function that builds one (which is called)?"""
    if not any(name in sys.modules for name in PACKAGES):
        return False
    if isinstance(target, nn.Module):
        target = type(getattr(target, "_orig_mod", target))
    elif not inspect.isclass(target):
        try:
            return is_lightning(build(target))
        except BuildError:
            return False
    lightnings = [kind for kind in target.__mro__ if kind.__module__.partition(".")[0] in PACKAGES]
    is_module = any(kind.__name__ == "LightningModule" for kind in lightnings)
    return is_module and any("training_step" in vars(kind) for kind in target.__mro__ if kind not in lightnings)


def lightning_task(make: Callable[[], Any], name: str) -> Task:
    """The Task of a LightningModule: its training_step is the loss, and configure_optimizers makes the optimizer.

    Args:
        make: builds the module; called for each dry run.
        name: of the task.
    """
    made: list[Any] = []

    def model() -> Any:
        made[:] = [calls_training_step(make())]
        return made[0]

    return Task(model=model, dataset=list, loss=StepLoss(), optimizer=configured(lambda: made[0]), name=name)


def calls_training_step(module: nn.Module) -> nn.Module:
    """Make a call of a LightningModule its training_step, in place, so that DDP's and FSDP's hooks on forward see it, as in Lightning.

    Within training_step, a call of the module is its own forward. Nothing is logged, since there is no Trainer.
    """
    kind: Any = type(module)

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if vars(self).get("_in_training_step"):
            return kind.forward(self, *args, **named)
        self._in_training_step = True
        try:
            places = [1 for each in inspect.signature(self.training_step).parameters.values() if each.default is each.empty]
            return self.training_step(*args, 0) if len(places) > 1 else self.training_step(*args)
        finally:
            self._in_training_step = False

    def log(self: Any, *args: Any, **options: Any) -> None:
        """Nothing."""

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "log": log, "log_dict": log, "__module__": kind.__module__})
    return module


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


def configured(module: Callable[[], Any]) -> Callable[[Iterable[Tensor]], Optimizer]:
    """A Task's optimizer: the one that configure_optimizers of a LightningModule makes.

    Args:
        module: returns the module that is trained.
    """

    def configure_optimizers(parameters: Iterable[Tensor]) -> Optimizer:
        trained, weights = module(), list(parameters)
        name = type(trained).__name__
        try:
            made = trained.configure_optimizers()
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
