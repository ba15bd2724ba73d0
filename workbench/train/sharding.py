"""Parallel: a model on several ranks, in the way that a spec wants: copies that reduce their gradients, or one that they share.

"ddp" and "zero1" are torch's DistributedDataParallel (with "zero1" each rank keeps the optimizer states of its part of the parameters;
see `optimizers`). "zero2", "fsdp" and "hsdp" are torch's FSDP2, `fully_shard` on each repeated block and on the whole: parameters,
gradients and optimizer states are dealt out, and gathered block by block; "zero2" keeps them gathered until the end of the backward.

Mixed precision: DDP computes under autocast. FSDP2 has a way of its own, which stands in the place of autocast: blocks are gathered in
16 bit and compute in it, gradients are reduced in fp32, and the model's output comes back in fp32, so that a loss outside of it is fp32.
Batch norms stay in fp32.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from workbench.runs.spec import SHARDED, RunSpec
from workbench.train.blocks import find_blocks
from workbench.train.layout import Layout
from workbench.train.offload import told
from workbench.train.precision import TYPES
from workbench.train.sharded_tensors import local, localize, same_everywhere, whole_of


def distribute(module: nn.Module, spec: RunSpec, layout: Layout, device: torch.device) -> nn.Module:
    """The module to call in place of `module`. Comes before the optimizer: parameters may become others.

    Args:
        module: whole, and the same on each rank (that of the first rank is taken). On its device; where it is to be sharded in the host's
            memory, from which FSDP2 takes one block after the other: it need not fit the device as a whole.
        spec: its `parallel`, and what goes with it.
        layout: of the ranks.
        device: of this rank.
    """
    if spec.parallel in SHARDED:
        same_everywhere(module, layout.data, device)
        return _sharded(module, spec, layout, device)
    if layout.tensor is not None:
        localize(module)
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=spec.bucket_cap_mb,
        find_unused_parameters=spec.find_unused_parameters,
        gradient_as_bucket_view=spec.gradient_as_bucket_view,
        process_group=layout.data,
    )


def _sharded(module: nn.Module, spec: RunSpec, layout: Layout, device: torch.device) -> nn.Module:
    kind = TYPES[spec.precision]
    half = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32 if kind else None)
    whole = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=half.reduce_dtype, output_dtype=torch.float32 if kind else None)
    options: dict[str, Any] = {"mesh": layout.replicas, "reshard_after_forward": spec.parallel != "zero2"}
    if spec.offload == "optimizer":
        options["offload_policy"] = CPUOffloadPolicy() if device.type == "cuda" else OffloadPolicy()
    blocks = find_blocks(module)
    if kind:
        for part in [part for part in module.modules() if isinstance(part, _BatchNorm) and part is not module]:
            fully_shard(part, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
    for block in blocks.values():
        fully_shard(block, mp_policy=half, **options)
    fully_shard(module, mp_policy=whole, **options)
    if spec.offload == "optimizer":
        for weight in module.parameters():
            told(local(weight))
    return module


def accumulating(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Around the forward and backward of a micro-batch: gradients are reduced across the ranks after the `last` of a step only."""
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if last else model.no_sync()
    if isinstance(model, FSDPModule):
        return _unreduced(model, last)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _unreduced(model: FSDPModule, last: bool) -> Iterator[None]:
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last)
    yield


def gathered(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """The whole tensors of a module that is dealt out, by name, in the host's memory. All ranks have to come here.

    Args:
        module: sharded by FSDP2, or split over ranks, or neither.
        keep: is this one of the ranks that get them? The others get none.
    """
    whole = {}
    for name, value in module.state_dict(keep_vars=True).items():
        full = whole_of(value)
        if keep:
            whole[name] = full.detach().to("cpu", copy=True)
    return whole
