"""Offloads to host memory: activations until the backward needs them, or the optimizer with its states."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.runs.combinations import on_cpu
from workbench.runs.spec import RunSpec, SpecError
from workbench.train.sharded_tensors import from_local_part, is_dtensor


@dataclass(frozen=True, slots=True)
class DryRunHooks:
    """Tell a dry run, whose tensors are all on the CPU, which of them a real run would keep in host memory."""

    on_host: Callable[[Tensor], None]
    """Called with each such tensor: a copy that was just made, or a shard of a model that is kept there."""
    host_computes: Callable[[], AbstractContextManager[Any]]
    """Entered while the host computes: tensors allocated inside are in host memory."""


_dry_run: DryRunHooks | None = None


@contextlib.contextmanager
def offloading_dry_run(hooks: DryRunHooks) -> Iterator[None]:
    """Inside, runs on the CPU may offload: they copy as on a GPU, and the hooks report what would be in host memory."""
    global _dry_run
    before, _dry_run = _dry_run, hooks
    try:
        yield
    finally:
        _dry_run = before


def check_offload(spec: RunSpec, device: torch.device) -> None:
    """Refuse what a CPU cannot do, such as to offload.

    Raises:
        SpecError: the run computes on the CPU.
    """
    if device.type == "cpu" and _dry_run is None and (why := on_cpu(spec)):
        raise SpecError(why)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, page-locked for a GPU. Every offloaded copy is made here."""
    if tensor.device.type == "cpu":
        copy = tensor.detach().clone()
        mark_on_host(copy)
        return copy
    copy = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=tensor.is_cuda and not tensor.is_sparse)
    copy.copy_(tensor.detach())
    return copy


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the run's device of a tensor made by `to_host`."""
    return tensor.clone() if device.type == "cpu" else tensor.to(device, non_blocking=True)


def mark_on_host(tensor: Tensor) -> None:
    """Report to a dry run that a tensor is in host memory; does nothing in a real run."""
    if _dry_run:
        _dry_run.on_host(tensor)


def host_computes() -> AbstractContextManager[Any]:
    """Entered while the host computes, for dry runs; does nothing in a real run."""
    return _dry_run.host_computes() if _dry_run else contextlib.nullcontext()


def activations_on_host() -> AbstractContextManager[Any]:
    """Context of a forward whose saved activations are moved to host memory; weights stay on the device."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> Any:
    source = tensor if tensor._base is None else tensor._base
    if isinstance(source, nn.Parameter):
        return tensor
    if is_dtensor(tensor):  # of a layer under tensor parallelism
        return tensor.device, to_host(tensor.to_local()), tensor._spec
    return tensor.device, to_host(tensor), None


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, copy, spec = packed
    tensor = to_device(copy, device)
    return tensor if spec is None else from_local_part(tensor, spec)


class HostOptimizer(Optimizer):
    """An optimizer that keeps its states and master weights in host memory and steps there; the device has weights and gradients only.

    Per step the gradients are copied to the host and the weights back: 8 bytes per fp32 parameter over the bus, and the CPU's time for the
    update.
    """

    def __init__(self, groups: Any, kind: type[Optimizer], **defaults: Any) -> None:
        """Copy the weights.

        Args:
            groups: of parameters on the device, each with its options.
            kind: class of the optimizer that steps on the host.
            **defaults: options of groups without their own.
        """
        super().__init__(groups, dict(defaults))
        with host_computes():
            copies = [{**group, "params": [_master_copy(weight) for weight in group["params"]]} for group in self.param_groups]
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
        self._copy_options()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for weight, master in zip(group["params"], inner["params"], strict=True):
                master.grad = None if weight.grad is None else to_host(weight.grad)
        with host_computes():
            self.inner.step()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for weight, master in zip(group["params"], inner["params"], strict=True):
                if master.grad is not None:
                    weight.copy_(master, non_blocking=True)
                    master.grad = None
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer on the host."""
        self._copy_options()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state into the optimizer on the host; its copies of the weights become what the weights are now."""
        self.inner.load_state_dict(dict(state_dict))
        with torch.no_grad():
            for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
                for weight, master in zip(group["params"], inner["params"], strict=True):
                    master.copy_(weight)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(inner))

    def _copy_options(self) -> None:
        """Give the inner optimizer the options that a schedule has changed."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options(group))


def _master_copy(weight: Tensor) -> nn.Parameter:
    master = nn.Parameter(to_host(weight), requires_grad=weight.requires_grad)
    if hasattr(weight, "_dtensor_spec"):  # for norms of the full layer
        master._dtensor_spec = weight._dtensor_spec  # type: ignore[attr-defined]
    return master


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
