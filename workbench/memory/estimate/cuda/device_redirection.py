"""Redirects "cuda" to (fake) CPU tensors, and makes optimizers and gradient clipping take the implementations that they take on CUDA."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import Parameter
from torch.optim import optimizer, swa_utils
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.core import interrupts
from workbench.memory.estimate.cuda.overrides import Overrides, composed, replaced
from workbench.memory.estimate.fake_tensors import asked_device

CPU = torch.device("cpu")


def _here(device: Any, home: torch.device = CPU) -> Any:
    """The device that replaces the named one."""
    return home if isinstance(device, torch.device) and device.type == "cuda" else device


class CudaMeans(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Factories (`torch.zeros(…, device="cuda")`, `torch.arange`, `x.new_empty`, `with torch.device("cuda")`) make tensors at home."""

    def __init__(self, home: torch.device = CPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._home = home

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        if kwargs and "device" in kwargs:
            kwargs = {**kwargs, "device": _here(kwargs["device"], self._home)}
        return func(*args, **(kwargs or {}))


def _moving(name: str) -> Callable[..., Tensor]:
    """`Tensor.to`: to "cuda" is where the tensor already is, so nothing is copied."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = composed(name, *map(_here, args), **{key: _here(value) for key, value in kwargs.items()})
        return result

    return kernel


def install(overrides: Overrides) -> None:
    """Override torch's moves between devices: `Tensor.to`, `.cuda()`, `Module.to`, `.pin_memory()`."""
    overrides.composite("to.dtype_layout", _moving("to.dtype_layout"))
    overrides.composite("to.device", _moving("to.device"))
    overrides.composite("pin_memory", lambda tensor, device=None: tensor.view_as(tensor))


def _module_to(to: Callable[..., nn.Module], home: torch.device) -> Callable[..., nn.Module]:
    """`Module.to`, which leaves a module alone that is to go to "cuda" only: torch cannot swap the parameters of a fake one."""

    def moved(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None and memory_format is None and device is not None and device.type == "cuda":
            return self
        return to(self, *(_named(value, home) for value in args), **{key: _named(value, home) for key, value in kwargs.items()})

    return moved


def _named(device: Any, home: torch.device) -> Any:
    """The device that replaces the given one, which may be a string."""
    return _here(torch.device(device), home) if isinstance(device, str) else _here(device, home)


def cuda_means_cpu(capability: tuple[int, int]) -> AbstractContextManager[None]:
    """`cuda_means` for fake tensors, which are on the CPU."""
    return cuda_means(CPU, capability)


@contextlib.contextmanager
def cuda_means(home: torch.device, capability: tuple[int, int] = (8, 0)) -> Iterator[None]:
    """Make usual functions of `torch.cuda` return a value or do nothing. `torch.cuda.is_available()` stays False, as `tensor.is_cuda` does.

    Args:
        home: where tensors are made that should be on "cuda".
        capability: compute capability of the GPU that there seems to be.
    """
    import torch._dynamo  # modes import it at first use, and it writes down torch's functions: it must find torch's own

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    answers: dict[str, Any] = {
        "_lazy_init": nothing,
        "set_device": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "reset_peak_memory_stats": nothing,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
    }
    with contextlib.ExitStack() as stack:
        for name, value in answers.items():
            stack.enter_context(replaced(torch.cuda, name, value))
        stack.enter_context(replaced(nn.Module, "to", _module_to(nn.Module.to, home)))
        stack.enter_context(replaced(nn.Module, "cuda", lambda self, device=None: self))
        stack.enter_context(CudaMeans(home))
        yield


class CallsMeanHome(TorchFunctionMode):
    """`torch.tensor(…, device="cuda")`, `tensor.to("cuda")` and `tensor.cuda()` make tensors on the CPU, without `Overrides`."""

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self._home = home

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        interrupts.deliver_interrupt()
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0].to(self._home)
        if func is Tensor.to:
            args = [args[0], *(self._named(value) for value in args[1:])]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._named(kwargs["device"])}
        return func(*args, **kwargs)

    def _named(self, device: Any) -> Any:
        return self._home if isinstance(device, int) and not isinstance(device, bool) else _named(device, self._home)


@contextlib.contextmanager
def foreach_by_default() -> Iterator[None]:
    """Make optimizers and gradient clipping use foreach by default on fake CPU tensors, as on CUDA.

    Source: torch/optim/optimizer.py `_default_to_fused_or_foreach`, torch/utils/_foreach_utils.py `_has_foreach_support`.
    """
    devices = _foreach_utils._get_foreach_kernels_supported_devices()
    with contextlib.ExitStack() as stack:
        for owner in (_foreach_utils, optimizer, swa_utils):
            if hasattr(owner, "_get_foreach_kernels_supported_devices"):
                stack.enter_context(replaced(owner, "_get_foreach_kernels_supported_devices", lambda: [*devices, "cpu"]))
        known: list[list[Any]] = [_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types]
        for types in known:
            for added in (FakeTensor, Parameter):
                if added not in types:  # the lists themselves change: torch.distributed adds to them when it is imported
                    types.append(added)
                    stack.callback(types.remove, added)
        yield
