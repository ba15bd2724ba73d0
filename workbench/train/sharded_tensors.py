"""Sharded tensors (torch's DTensor): this rank's part, the full tensor, parameters broadcast to all ranks, and gradient clipping."""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.runs.task import TaskError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Any) -> "TypeGuard[DTensor]":
    """Is it a DTensor? Before torch has loaded their module there is none, and a training that needs none does without: that takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered on each rank; any other tensor unchanged. A collective: all ranks that hold a part must call it."""
    if (spec := dtensor_spec(tensor)) is None:
        return tensor
    part = local_part(tensor.detach())
    if part.device.type != spec.mesh.device_type:  # offloaded to host memory, but gathered on the device
        part = part.to(spec.mesh.device_type)
    return from_local_part(part, spec).full_tensor()


def from_local_part(part: Tensor, spec: Any) -> "DTensor":
    """The sharded tensor whose part on this rank is `part`; `spec` is torch's DTensorSpec."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


def dtensor_spec(tensor: Tensor) -> Any:
    """How a tensor is sharded (torch's DTensorSpec); None = it is not."""
    return tensor._spec if is_dtensor(tensor) else getattr(tensor, "_dtensor_spec", None)


def local_region(spec: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a sharded tensor begins in the whole one, and its shape; `spec` is torch's DTensorSpec."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # underscored, and the same since torch 2.5

    shape, offset = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(offset), tuple(shape)


def broadcast_parameters(module: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Broadcast the parameters and buffers of the first rank to all, as DistributedDataParallel does.

    Args:
        module: full or sharded, changed in place. Tensors in host memory are copied to the device and back.
        group: the ranks; None = all.
        device: of this rank, where its process groups communicate.
    """
    ranks: Any = group or dist.group.WORLD
    source = dist.get_process_group_ranks(ranks)[0]
    for tensor in (*module.parameters(), *module.buffers()):
        part = local_part(tensor.detach())
        on_device = part.to(device)
        dist.broadcast(on_device, source, group=ranks)
        if on_device is not part:
            part.copy_(on_device)


@contextlib.contextmanager
def keeping_attributes(module: nn.Module) -> Iterator[None]:
    """Inside, parameters may be replaced by this rank's parts of them, which get the attributes that a task has set on its parameters.

    Raises:
        TaskError: such a parameter has a hook, which torch would not call for its part.
    """
    each = module.named_parameters(remove_duplicate=False)  # FSDP2 may give several modules their own of a shared one
    before = {name: (dict(vars(weight)), _hook_of(weight)) for name, weight in each}
    yield
    for name, weight in module.named_parameters():
        if dtensor_spec(weight) is None:
            continue
        attributes, hook = before[name]
        if hook:
            raise TaskError(
                f"the parameter {name!r} has a hook ({hook}), which torch does not call where ranks share the parameter (FSDP2, tensor or "
                'expert parallelism); try parallel="zero1", or do in the model\'s forward what the hook does'
            )
        for attribute in attributes.keys() - vars(weight).keys():
            setattr(weight, attribute, attributes[attribute])


def _hook_of(weight: nn.Parameter) -> str:
    """How a hook was added to a parameter; "" = it has none."""
    hooks = {"register_hook": weight._backward_hooks, "register_post_accumulate_grad_hook": weight._post_accumulate_grad_hooks}
    return next((name for name, added in hooks.items() if added), "")


def use_local_parameters(module: nn.Module) -> None:
    """Replace a module's sharded parameters by plain ones that hold this rank's part; its forwards still see the sharded ones.

    For DistributedDataParallel and for optimizers that take plain tensors only. torch's own way, `DistributedDataParallel(device_mesh=…)`,
    loses the parameters in the first forward.
    """
    for layer in module.modules():
        sharded: dict[str, Any] = {name: weight for name, weight in layer._parameters.items() if is_dtensor(weight)}
        for name, weight in sharded.items():
            plain = nn.Parameter(weight.to_local().detach(), requires_grad=weight.requires_grad)
            plain._dtensor_spec = weight._spec  # type: ignore[attr-defined]
            layer._parameters[name] = plain
        if sharded:
            swap = _ForwardSwap(tuple(sharded))
            layer.register_forward_pre_hook(swap.put_in, prepend=True)
            layer.register_forward_hook(swap.take_out, always_call=True)


class _ForwardSwap:
    """Puts the sharded parameters into a module while its forward runs."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def put_in(self, layer: nn.Module, *_: Any) -> None:
        for name in self._names:
            plain: Any = layer._parameters[name]
            vars(layer)[name] = from_local_part(plain, plain._dtensor_spec)  # looked up before _parameters

    def take_out(self, layer: nn.Module, *_: Any) -> None:
        for name in self._names:
            vars(layer).pop(name, None)


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], limit: float, device: torch.device, across: dist.ProcessGroup | None = None
) -> Tensor:
    """Scale gradients so that their norm over all parameters and ranks is at most `limit`, as torch's clip_grad_norm_ does.

    Args:
        parameters: sharded over one or several meshes, or not at all; in host or device memory.
        device: of the run, where its process groups communicate.
        across: ranks that have other parameters of the same model.

    Returns:
        The norm before, in fp32 on its device, which is not waited for.

    Raises:
        TaskError: a gradient is sparse.
    """
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    sparse = [tuple(weight.shape) for weight in with_gradients if weight.grad is not None and weight.grad.layout != torch.strided]
    if sparse:
        raise TaskError(
            f"clip_grad_norm={limit}: the gradient of a parameter of shape {sparse[0]} is sparse, and torch has no norm of those; try "
            "nn.Embedding(…, sparse=False), or leave clip_grad_norm out"
        )
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in with_gradients:
        assert parameter.grad is not None
        parts[shard_groups(parameter)].append(local_part(parameter.grad))
    if not any(parts) and across is None:
        return nn.utils.clip_grad_norm_(with_gradients, limit).float()
    squares = torch.zeros((), device=device)
    for groups, gradients in parts.items():
        square = nn.utils.get_total_norm(gradients).to(device, torch.float32).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares = squares + square
    if across is not None:
        dist.all_reduce(squares, group=across)
    factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)  # as torch has it
    for gradients in parts.values():
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
    return squares.sqrt()


def shard_groups(parameter: nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which a parameter is sharded."""
    if (spec := dtensor_spec(parameter)) is None:
        return ()
    from torch.distributed.tensor import Partial, Replicate

    assert not any(isinstance(placement, Partial) for placement in spec.placements)
    return tuple(spec.mesh.get_group(axis) for axis, placement in enumerate(spec.placements) if not isinstance(placement, Replicate))
