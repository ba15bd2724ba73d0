"""Overrides torch's kernels in the dispatcher, and attributes of modules and classes, inside a `with` block."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

aten = torch.ops.aten

_ALLOWED = {"allow_override": True} if "allow_override" in inspect.signature(torch.library.Library.impl).parameters else {}
"""Argument that lets older torch override a Python kernel again."""

MISSING = object()
"""Marks an attribute that did not exist, so that it is deleted again."""


def operator(name: str) -> OpOverload:
    """The operator of a name as the dispatcher writes it: "softmax.int", "linear"."""
    packet, _, overload = name.partition(".")
    overload_: OpOverload = getattr(getattr(aten, packet), overload or "default")
    return overload_


def composed(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run an operator as torch composes it in C++ (`OpOverload.decompose` would prefer the Python ways made for tracing)."""
    return operator(name)._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def exists(name: str) -> bool:
    """Whether this torch has the operator."""
    return bool(torch._C._dispatch_has_kernel(f"aten::{name}"))


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a real one: not fake, not meta, nor made of several (DTensor)."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta" and not is_traceable_wrapper_subclass(tensor)


class Overrides:
    """Kernels for CPU tensors, in place of torch's own; `close` removes them all.

    They are keyed "AutogradCPU", which is reached by every call outside of inference mode, with gradients or without, from Python and
    from C++, in backward and in recomputation, whether a function was imported by name or not.
    """

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def composite(self, name: str, kernel: Callable[..., Any]) -> None:
        """Replace an operator that torch composes of others (CompositeImplicitAutograd): the kernel composes it again.

        Args:
            name: such as "dropout" or "lstm.input".
            kernel: called with the operator's arguments; differentiable as what it calls is.
        """
        for key in ("AutogradCPU", "CPU"):
            self._register(name, kernel, key)

    def around(self, name: str, kernel: Callable[..., Any]) -> None:
        """Wrap an operator that has a derivative of its own.

        Args:
            name: such as "convolution".
            kernel: called with a function that is torch's own kernel (with its derivative), then the operator's arguments.
        """
        op = operator(name)
        below, other = DispatchKeySet(DispatchKey.AutogradCPU), DispatchKeySet(DispatchKey.AutogradOther)

        def with_original(keys: Any, *args: Any, **kwargs: Any) -> Any:
            def original(*args: Any, **kwargs: Any) -> Any:
                return op.redispatch((keys - below) | other, *args, **kwargs)

            return kernel(original, *args, **kwargs)

        self._register(name, with_original, "AutogradCPU", with_keyset=True)

    def below(self, name: str, kernel: Callable[..., Any]) -> None:
        """Give an operator that has no CPU kernel one, for tensors with values."""
        self._register(name, kernel, "CPU")

    def autocast(self, name: str, kernel: Callable[..., Any] | None) -> None:
        """Replace what autocast on the CPU does to an operator; None = nothing."""
        self._register(name, torch.library.fallthrough_kernel if kernel is None else kernel, "AutocastCPU")

    def _register(self, name: str, kernel: Any, key: str, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Overriding a previously registered kernel": meant
            self._library.impl(name, kernel, key, **options, **_ALLOWED)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Restore torch's own kernels."""
        self._library._destroy()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class, and put the old one back at the end, also after an exception."""
    before = vars(owner).get(name, MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def temporary(*shape: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Memory that a CUDA kernel takes while it runs: hold the result until then.

    Args:
        *shape: of the tensor.
        like: on whose device it is; of a DTensor nothing is taken here, its local part comes by itself.
        dtype: that of `like`, if None.
    """
    if is_traceable_wrapper_subclass(like):
        return None
    with torch.no_grad():
        return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def kept_by_graph(result: torch.Tensor, *tensors: torch.Tensor | None) -> None:
    """Let the node of the autograd graph that made `result` hold some more tensors, as a CUDA kernel's derivative would."""
    if result.grad_fn is not None:
        metadata: Any = result.grad_fn.metadata
        metadata.setdefault("workbench", []).extend(tensors)
