"""Building: a model with fakes for tensors, from a function that makes it or from a model that is there, which stays as it is."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.measure.batches import map_tensors
from workbench.task import TaskError

LARGE = 4096
"""Elements from which on a constructor's random numbers are not drawn."""
_FILLS = (
    "normal_",
    "uniform_",
    "fill_",
    "zero_",
    "erfinv_",
    "mul_",
    "add_",
    "clamp_",
    "trunc_normal_",
    "bernoulli_",
    "exponential_",
    "copy_",
)
"""Operators that give a new weight its values."""


class BuildError(ValueError):
    """A model that cannot be built or copied; the message says why and what to try."""


class _Unfilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves large new weights without values: memory that is never written is never taken."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _FILLS and isinstance(args[0], Tensor) and args[0].numel() >= LARGE and args[0].is_floating_point():
            return args[0]
        return func(*args, **(kwargs or {}))


def build(make: Callable[[], Any], *, on_meta: bool = True) -> Any:
    """What a function makes, without values where that is possible.

    Args:
        make: builds a model.
        on_meta: on torch's meta device, where tensors are shapes only. False: on the CPU, with large weights left unfilled, for
            constructors that read numbers from tensors.

    Raises:
        BuildError: it cannot be made on the meta device.
    """
    if not on_meta:
        with _Unfilled():  # type: ignore[no-untyped-call]
            return make()
    try:
        with torch.device("meta"):
            return make()
    except (BuildError, TaskError):
        raise
    except Exception as error:
        raise BuildError(f"the model cannot be built without values: {type(error).__name__}: {error}") from error


def copied(model: nn.Module) -> nn.Module:
    """The structure of a model; its tensors are shared, not copied, and the model itself is not touched.

    Raises:
        BuildError: it cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _tensors_in(model)}
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise BuildError(
            f"the model, a {type(model).__name__}, cannot be copied ({type(error).__name__}: {str(error)[:200]}): "
            f"give a function that builds it, such as lambda: {type(model).__name__}(…)"
        ) from error
    for module in twin.modules():  # hooks belong to the original
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                module.__dict__[name] = type(value)()
    return twin


def materialise(model: nn.Module, fake: Callable[[Tensor], Tensor]) -> nn.Module:
    """Put fakes in the place of all tensors of a model, in place; one for each, so that tied weights stay tied.

    Args:
        model: on whatever device.
        fake: makes a fake of a tensor.
    """
    memo: dict[int, tuple[Tensor, Tensor]] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            made = fake(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = tensor, made
        return memo[id(tensor)][1]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = once(tensor)  # type: ignore[assignment]
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules") and _holds_tensors(value):
                module.__dict__[name] = map_tensors(once, value)
    return model


def fake_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and type on the CPU; within `fake_tensors` it is a fake."""
    if tensor.layout != torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, list | tuple):
        return any(_holds_tensors(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_tensors(item) for item in value.values())
    return False


def _tensors_in(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from _tensors_of(vars(module))


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        if value.grad is not None:
            yield value.grad
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors_of(vars(value) if hasattr(value, "__dict__") else {})
