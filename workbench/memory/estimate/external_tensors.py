"""Replaces real tensors that a program reaches in a dry run through closures or globals, such as the weights of a criterion.

CapturedTensors has a fake tensor for each, so that nothing is written to it; at the end it has the gradient that it had before.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._composable_state import _module_state_mapping
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from workbench.memory.estimate.errors import EstimateError

_KINDS = {"parameter": "parameter", "buffer": "buffer", "other": "other tensor"}
_AS_THEY_ARE = ("lift_fresh", "lift_fresh_copy", "lift", "_local_scalar_dense", "equal")
"""Operators that make a constant of the program, or read a value."""

Track = Callable[[Tensor, str], None]


class CapturedTensors:
    """The real tensors that a dry run finds, and their fake substitutes.

    Attributes:
        leaves: those that get a gradient.
    """

    def __init__(self, blank: Callable[[Tensor], Tensor], track: Track, is_dry: Callable[[], bool]) -> None:
        """Nothing was found yet.

        Args:
            blank: makes a fake of one dimension that is as large as the storage of a tensor, of bytes.
            track: records a stand-in, as of the category that is given.
            is_dry: are tensors fake here? For numbers that it needs, torch makes real ones for a moment.
        """
        self._blank, self._track, self._is_dry = blank, track, is_dry
        self._own: dict[int, tuple[str, weakref.ref[Any]]] = {}
        self._modules: list[tuple[nn.Module, type, dict[str, Any], list[tuple[dict[str, Any], dict[str, Any]]]]] = []
        self._sharded: set[int] = set()  # ids of those of which torch had a state of FSDP2 before
        self._blanks: dict[int, Tensor] = {}  # address of a storage → its substitute
        self._ends: list[Any] = []
        self._categories: dict[int, str] = {}  # address of a storage → what it is
        self._gradients: set[int] = set()  # addresses of the storages of gradients that were there before
        self._made_inside: set[int] = set()  # addresses of real storages that were made in here, which stay as they are
        self._before: dict[int, tuple[Tensor, Tensor | None, bool]] = {}  # id → a tensor, its gradient, whether it required one
        self._optimizers: dict[int, tuple[Optimizer, dict[Any, Any]]] = {}
        self._written: dict[Any, frozenset[int | str]] = {}

    @property
    def leaves(self) -> Iterator[Tensor]:
        return (tensor for tensor, _, requires_grad in list(self._before.values()) if requires_grad and tensor.is_leaf)

    @property
    def notes(self) -> tuple[str, ...]:
        met = [category for category in self._categories.values() if category in _KINDS]
        if not met:
            return ()
        counts = {word: met.count(category) for category, word in _KINDS.items() if category in met}
        kinds = ", ".join(f"{count} {word}{'s' if count > 1 else ''}" for word, count in counts.items())
        many = len(met) > 1
        return (
            f"{len(met)} tensor{'s that are' if many else ' that is'} not the model's {'were' if many else 'was'} reached by the loss: "
            f"{kinds}; {'they are counted, their' if many else 'it is counted, its'} gradients too, but no optimizer state",
        )

    def owned(self, model: nn.Module) -> None:
        """Learn what the model that was given has, to put it back: a program must not reach its parameters but through its argument."""
        for module in model.modules():
            own = dict(vars(module))
            tables = [(table, dict(table)) for table in own.values() if type(table) in (dict, OrderedDict)]
            self._modules.append((module, type(module), own, tables))
            if module in _module_state_mapping:
                self._sharded.add(id(module))
        for name, parameter in model.named_parameters():
            self._own[id(parameter)] = name, weakref.ref(parameter)

    def instead(self, name: str, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an operator, with substitutes for real tensors.

        Raises:
            EstimateError: one of them is a parameter of the model itself.
        """
        if not (_any_real(args) or (kwargs and _any_real(kwargs.values()))) or not self._is_dry():
            return args, kwargs
        written = frozenset[int | str]() if name in _AS_THEY_ARE else self._writes(func)
        keep = name in _AS_THEY_ARE

        def swap(value: Any, write: bool) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(swap(item, write) for item in value) if _any_real(value) else value
            return self._swapped(value, write, keep) if _is_real(value) else value

        swapped = tuple(swap(value, position in written) for position, value in enumerate(args))
        return swapped, {key: swap(value, key in written) for key, value in kwargs.items()}

    def made(self, out: Any, args: Any) -> None:
        """Register the results of an operator: real tensors made in here are torch's own."""
        if type(out) is Tensor and out.layout == torch.strided:
            address = out.untyped_storage()._cdata
            if address not in [arg.untyped_storage()._cdata for arg in args if type(arg) is Tensor and arg.layout == torch.strided]:
                self._made_inside.add(address)

    def stepping(self, optimizer: Optimizer, _args: Any = (), _kwargs: Any = None) -> None:
        """An optimizer is about to step: if it is one of real tensors, remember them and its states."""
        reals = [parameter for group in optimizer.param_groups for parameter in group["params"] if _is_real(parameter)]
        if reals and id(optimizer) not in self._optimizers and self._is_dry():
            self._optimizers[id(optimizer)] = optimizer, {key: dict(state) for key, state in optimizer.state.items()}
            for parameter in reals:
                self._remember(parameter)

    def put_back(self) -> None:
        """Give every tensor that was found the gradient that it had, every optimizer its states and the model its tensors.

        Call it where tensors are real. The model may be one that was there before, or have parts of one.
        """
        for module, kind, attributes, tables in self._modules:
            if type(module) is not kind:
                module.__class__ = kind  # FSDP2 gave it another
            if id(module) not in self._sharded:
                _module_state_mapping.pop(module, None)  # with one, FSDP2 refuses the module
            for name in vars(module).keys() - attributes:
                del vars(module)[name]
            vars(module).update(attributes)
            for table, items in tables:
                table.clear()
                table.update(items)
        self._modules.clear()
        self._sharded.clear()
        for end in self._ends:
            end.detach()
        for tensor, grad, requires_grad in self._before.values():
            if tensor.requires_grad and not requires_grad:
                tensor.detach_()  # a result was written into it, which made it one
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad
        for optimizer, states in self._optimizers.values():
            optimizer.state.clear()
            optimizer.state.update(states)
        self._before.clear()
        self._optimizers.clear()
        self._blanks.clear()

    def _writes(self, func: Any) -> frozenset[int | str]:
        """Positions and names of the arguments that an operator writes to."""
        written = self._written.get(func)
        if written is None:
            arguments = func._schema.arguments
            places = [place for place, argument in enumerate(arguments) if argument.alias_info is not None and argument.alias_info.is_write]
            written = self._written[func] = frozenset([*places, *(arguments[place].name for place in places)])
        return written

    def _swapped(self, tensor: Any, write: bool, keep: bool) -> Any:
        if tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._made_inside:
            return tensor
        blank = self._blanks.get(address)
        if blank is None:
            if keep or not (write or tensor.dim() or tensor.requires_grad):
                return tensor  # a value that is read, or a number
            self._refuse_own(tensor)
            self._remember(tensor)
            blank = self._blanks[address] = self._blank(tensor)
            self._categories[address] = "gradient" if address in self._gradients else _category(tensor)
            self._track(blank, self._categories[address])
            end = weakref.finalize(storage, self._forget, address)
            end.atexit = False
            self._ends.append(end)
        elif id(tensor) not in self._before:
            self._refuse_own(tensor)
            if write or tensor.requires_grad:
                self._remember(tensor)
        if tensor.requires_grad and torch.is_grad_enabled() and tensor.device.type != "cpu":
            raise EstimateError(
                f"the loss trains a tensor of its own on {tensor.device} ({' × '.join(map(str, tensor.shape))}): a dry run can do so with "
                "tensors on the CPU only. Make it in the function that builds the model, or give it on the CPU"
            )
        size = tensor.element_size()
        typed = blank[: blank.numel() // size * size].view(tensor.dtype)
        return typed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _remember(self, tensor: Tensor) -> None:
        if id(tensor) in self._before:
            return
        grad = tensor.grad if tensor.is_leaf else None
        self._before[id(tensor)] = tensor, grad, tensor.requires_grad
        if grad is not None and grad.layout == torch.strided:
            self._gradients.add(grad.untyped_storage()._cdata)

    def _forget(self, address: int) -> None:
        self._blanks.pop(address, None)

    def _refuse_own(self, tensor: Tensor) -> None:
        name, parameter = self._own.get(id(tensor), ("", None))
        if parameter is not None and parameter() is tensor:
            raise EstimateError(
                "the loss, or a function that the model keeps, uses the model from outside instead of its argument (its parameter "
                f"{name!r} is met with values): write loss=lambda model, batch: …, with that model in it; or give a function that "
                "builds the model"
            )


def _is_real(value: Any) -> bool:
    """Does a tensor have values? One that wraps others (a DTensor) does if they do."""
    if type(value) is FakeTensor or not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return False
    return not is_traceable_wrapper_subclass(value)


def _any_real(values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor or kind is int or kind is float:
            continue
        if kind is list or kind is tuple:
            if _any_real(value):
                return True
        elif isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            return True
    return False


def _category(tensor: Tensor) -> str:
    if isinstance(tensor, nn.Parameter):
        return "parameter"
    return "buffer" if isinstance(tensor, nn.Buffer) else "other"
