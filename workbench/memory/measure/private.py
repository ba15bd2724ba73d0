"""What the Recorder needs of torch that torch does not promise; `workbench.memory.estimate.compat` tests it on the torch that is there."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode


def fake_mode() -> Any:
    """The FakeTensorMode that is active; None without one."""
    return active_fake_mode()


def next_node() -> int | None:
    """Number of the autograd node that this thread will make next; None where torch does not say."""
    ask = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return None if ask is None else int(ask())


def running_node() -> Any:
    """The autograd node whose backward is running; None outside of a backward."""
    ask = getattr(torch._C, "_current_autograd_node", None)
    return None if ask is None else ask()


@contextlib.contextmanager
def resizes(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `seen` is called after each `storage.resize_()`: FSDP2 frees and takes its gathered parameters so, and no operator runs."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        seen(storage)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextlib.contextmanager
def propagations(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, `around` is entered while a DTensor works out how a result is sharded: it does so on fake tensors of the *global* shape."""
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator.propagate_op_sharding_non_cached

    def apart(*args: Any, **kwargs: Any) -> Any:
        with around():
            return propagate(*args, **kwargs)

    ShardingPropagator.propagate_op_sharding_non_cached = apart  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator.propagate_op_sharding_non_cached = propagate  # type: ignore[method-assign]


def unsharded(model: nn.Module) -> Iterator[Tensor]:
    """The tensors into which FSDP2 gathers the parameters of a model."""
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state: Any = getattr(module, "_get_fsdp_state")()  # noqa: B009 (mypy takes an unknown attribute of a module for a tensor)
        group = state._fsdp_param_group
        for parameter in group.fsdp_params if group else ():
            yield from getattr(parameter, "all_gather_outputs", ())
