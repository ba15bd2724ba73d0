"""Tensors that are dealt out over ranks (torch's DTensor): this rank's part, the whole, and the norm of gradients."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is dealt out; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor that is dealt out, on each of its ranks; all of them have to come here. Any other tensor itself."""
    if (spec := spec_of(tensor)) is None:
        return tensor
    part = local(tensor.detach())
    if part.device.type != spec.mesh.device_type:  # it waits in the host's memory, and is gathered on the device
        part = part.to(spec.mesh.device_type)
    return from_part(part, spec).full_tensor()


def from_part(part: Tensor, spec: Any) -> DTensor:
    """The dealt-out tensor that has `part` on this rank.

    Args:
        part: of this rank.
        spec: how it is dealt out: torch's DTensorSpec.
    """
    return DTensor.from_local(part, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


def spec_of(tensor: Tensor) -> Any:
    """How a tensor is dealt out; None = not at all."""
    return tensor._spec if isinstance(tensor, DTensor) else getattr(tensor, "_dealt", None)


def same_everywhere(module: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Give all ranks the parameters and buffers of the first one, as DistributedDataParallel does.

    Args:
        module: whole or dealt out, changed in place; on the device or on the host, whence each tensor goes to the device and back.
        group: the ranks; None = all.
        device: of this rank, between which the ranks can speak.
    """
    everyone: Any = group or dist.group.WORLD
    first = dist.get_process_group_ranks(everyone)[0]
    for tensor in (*module.parameters(), *module.buffers()):
        mine = local(tensor.detach())
        there = mine.to(device)
        dist.broadcast(there, first, group=everyone)
        if there is not mine:
            mine.copy_(there)


def localize(module: nn.Module) -> None:
    """Put plain parameters in the place of those that are dealt out, each with this rank's part; forwards see the dealt-out ones.

    For DistributedDataParallel, and optimizers that know plain tensors only. torch's own way, `DistributedDataParallel(device_mesh=…)`,
    loses the parameters in the first forward.

    Args:
        module: changed in place.
    """
    for part in module.modules():
        found: dict[str, Any] = {name: weight for name, weight in part._parameters.items() if isinstance(weight, DTensor)}
        for name, weight in found.items():
            plain = nn.Parameter(weight.to_local().detach(), requires_grad=weight.requires_grad)
            plain._dealt = weight._spec  # type: ignore[attr-defined]
            part._parameters[name] = plain
        if found:
            swap = _Swap(tuple(found))
            part.register_forward_pre_hook(swap.put_in, prepend=True)
            part.register_forward_hook(swap.take_out, always_call=True)


class _Swap:
    """The dealt-out parameters of a module, there while its forward runs."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def put_in(self, part: nn.Module, *_: Any) -> None:
        for name in self._names:
            plain: Any = part._parameters[name]
            vars(part)[name] = from_part(plain, plain._dealt)  # found before what is in _parameters

    def take_out(self, part: nn.Module, *_: Any) -> None:
        for name in self._names:
            vars(part).pop(name, None)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, device: torch.device) -> None:
    """Scale gradients so that the norm of all of them, over all ranks that hold a part, is `limit` at most; as torch's clip_grad_norm_.

    Args:
        parameters: with gradients, on one or several meshes, in the host's memory or the device's.
        limit: the largest norm.
        device: of the run, on which its process groups reduce.
    """
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in with_gradients:
        assert parameter.grad is not None
        parts[holders(parameter)].append(local(parameter.grad))
    if not any(parts):
        nn.utils.clip_grad_norm_(with_gradients, limit)
        return
    squares = torch.zeros((), device=device)
    for groups, gradients in parts.items():
        square = nn.utils.get_total_norm(gradients).to(device, torch.float32).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares = squares + square
    factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)  # as torch has it
    for gradients in parts.values():
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))


def holders(parameter: nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which a parameter is dealt out."""
    if (spec := spec_of(parameter)) is None:
        return ()
    assert not any(isinstance(placement, Partial) for placement in spec.placements)
    return tuple(spec.mesh.get_group(axis) for axis, placement in enumerate(spec.placements) if not isinstance(placement, Replicate))
