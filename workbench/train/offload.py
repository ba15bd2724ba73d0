"""Offload: what waits in the host's memory instead of the GPU's: activations until the backward, or the optimizer with its states."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from workbench.runs.spec import RunSpec, SpecError
from workbench.train.sharded_tensors import from_part


@dataclass(frozen=True, slots=True)
class Pretence:
    """How a dry run, whose tensors are all on the CPU, learns which of them would lie in the host's memory."""

    born: Callable[[Tensor], None]
    """Called with each tensor that lies there: a copy that was just made, or a shard of a model that is kept there."""
    working: Callable[[], AbstractContextManager[Any]]
    """Entered while the host computes: all that is born inside lies there."""


_pretence: Pretence | None = None


@contextlib.contextmanager
def pretended(pretence: Pretence) -> Iterator[None]:
    """Inside, runs on the CPU may offload: they copy as if they were on a GPU, and tell what would lie in the host's memory."""
    global _pretence
    before, _pretence = _pretence, pretence
    try:
        yield
    finally:
        _pretence = before


def check_offload(spec: RunSpec, device: torch.device) -> None:
    """Refuse to offload from where there is nothing to offload from.

    Raises:
        SpecError: the run computes on the CPU.
    """
    if spec.offload != "none" and device.type == "cpu" and _pretence is None:
        raise SpecError(
            f'offload="{spec.offload}" on the CPU: there is nothing to offload from, all memory is the host\'s; try offload="none". '
            "What it would save on a GPU can be estimated here: wb.estimate_memory(spec)"
        )


def to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, page-locked for a GPU. Every copy that this package offloads is made here.

    Args:
        tensor: on the run's device.
    """
    if tensor.device.type == "cpu":
        copy = tensor.detach().clone()
        told(copy)
        return copy
    copy = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=tensor.is_cuda and not tensor.is_sparse)
    copy.copy_(tensor.detach())
    return copy


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor that waited in the host's memory.

    Args:
        tensor: made by `to_host`.
        device: of the run.
    """
    return tensor.clone() if device.type == "cpu" else tensor.to(device, non_blocking=True)


def told(tensor: Tensor) -> None:
    """Tell a dry run that a tensor lies in the host's memory; nothing in a real run."""
    if _pretence:
        _pretence.born(tensor)


def on_host() -> AbstractContextManager[Any]:
    """Entered while the host computes on what it keeps; nothing in a real run."""
    return _pretence.working() if _pretence else contextlib.nullcontext()


def activations_on_host() -> AbstractContextManager[Any]:
    """Inside a forward, what it saves for the backward waits in the host's memory; weights stay, they are on the device anyway."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> Any:
    source = tensor if tensor._base is None else tensor._base
    if isinstance(source, nn.Parameter):
        return tensor
    if isinstance(tensor, DTensor):  # of a layer that is split over ranks
        return tensor.device, to_host(tensor.to_local()), tensor._spec
    return tensor.device, to_host(tensor), None


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, copy, spec = packed
    tensor = to_device(copy, device)
    return tensor if spec is None else from_part(tensor, spec)


class HostOptimizer(Optimizer):
    """An optimizer whose states and weights lie in the host's memory, where it steps; the device has weights and gradients only.

    Per step the gradients go to the host and the weights come back: 8 bytes per fp32 parameter over the bus, and an update that takes the
    CPU's time.
    """

    def __init__(self, groups: Any, kind: type[Optimizer], **defaults: Any) -> None:
        """Copy the weights.

        Args:
            groups: of parameters on the device, each with its options.
            kind: the class of the optimizer that steps on the host.
            **defaults: options of the groups that have none.
        """
        super().__init__(groups, dict(defaults))
        with on_host():
            copies = [{**group, "params": [_master(weight) for weight in group["params"]]} for group in self.param_groups]
            self.inner = kind(copies, **defaults)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(inner))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Gradients to the host, the step there, weights back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._tell()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for weight, master in zip(group["params"], inner["params"], strict=True):
                master.grad = None if weight.grad is None else to_host(weight.grad)
        with on_host():
            self.inner.step()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for weight, master in zip(group["params"], inner["params"], strict=True):
                if master.grad is not None:
                    weight.copy_(master, non_blocking=True)
                    master.grad = None
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer on the host."""
        self._tell()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Into the optimizer on the host."""
        self.inner.load_state_dict(dict(state_dict))
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(inner))

    def _tell(self) -> None:
        """Options that a schedule has changed, to the inner one."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options(group))


def _master(weight: Tensor) -> nn.Parameter:
    made = nn.Parameter(to_host(weight), requires_grad=weight.requires_grad)
    if hasattr(weight, "_dealt"):  # how it was dealt out: norms of a whole layer need it
        made._dealt = weight._dealt  # type: ignore[attr-defined]
    return made


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
