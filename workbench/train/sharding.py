"""Wraps a model for several ranks as `RunSpec(parallel=…)` says: DistributedDataParallel, or FSDP2 shards.

"ddp" and "zero1" are torch's DistributedDataParallel (for the sharded optimizer of "zero1" see `optimizers`). "zero2", "fsdp" and "hsdp"
are torch's FSDP2, `fully_shard` on each repeated block and on the model: parameters, gradients and optimizer states are sharded, and
parameters gathered block by block; "zero2" keeps them gathered until the end of the backward.

Mixed precision: DDP computes under autocast. FSDP2 has its own policy instead: blocks are gathered and computed in 16 bit, gradients are
reduced in fp32, and the model's output is cast to fp32, so that a loss outside of it is fp32. Batch norms stay in fp32.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel, distributed

from workbench.harness.batches import map_tensors, tensors_of
from workbench.runs.spec import SHARDED, RunSpec, SpecError
from workbench.runs.task import TaskError
from workbench.runs.training_knobs import COMPRESSIONS, ONE_BUCKET, parse_call
from workbench.train.blocks import find_blocks
from workbench.train.offload import mark_on_host
from workbench.train.precision import TYPES
from workbench.train.ranks import Layout
from workbench.train.sharded_tensors import broadcast_parameters, full_tensor, is_dtensor, local_part, use_local_parameters


@contextlib.contextmanager
def without_first_broadcast() -> Iterator[dict[str, Any]]:
    """Inside, DistributedDataParallel is built without giving all ranks the weights and buffers of the first; yields options for it."""
    if "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters:
        yield {"init_sync": False}
        return
    broadcasts = {name: getattr(distributed, name) for name in ("_verify_param_shape_across_processes", "_sync_module_states")}  # torch 2.6
    try:
        for name in broadcasts:
            setattr(distributed, name, lambda *_, **__: None)
        yield {}
    finally:
        for name, call in broadcasts.items():
            setattr(distributed, name, call)


class _WithAttributes(DistributedDataParallel):
    """DistributedDataParallel with the attributes of its module, so that a loss may read `model.temperature` on any number of ranks."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not assigned yet
                raise
            return getattr(self.module, name)


_WithAttributes.__name__ = _WithAttributes.__qualname__ = DistributedDataParallel.__name__  # by which alarms, traces and people know it,
_WithAttributes.__module__ = DistributedDataParallel.__module__  # and `harness.discover`, that it is none of the user's objects


def distribute(module: nn.Module, spec: RunSpec, layout: Layout, device: torch.device, *, again: bool = False) -> nn.Module:
    """The module to call in place of `module`. Call it before the optimizer is built: parameters may be replaced.

    Args:
        module: the full model; the first rank's parameters count. On the device; for FSDP2 in host memory, from which blocks are moved one
            by one, so that the full model need not fit the device.
        again: DDP was around it before: each rank keeps its weights and buffers, such as its statistics of batch norm.

    Raises:
        SpecError: a knob does not fit this machine or this torch.
        TaskError: the model has a sparse buffer, or an embedding with sparse gradients that would be sharded.
    """
    if sparse := [name for name, buffer in module.named_buffers() if buffer.layout != torch.strided]:
        raise TaskError(
            f"the model's buffer {sparse[0]!r} is sparse, and torch cannot broadcast it to the ranks; try its to_dense(), or keep it as a "
            "plain attribute and move it to the device of the input in the forward"
        )
    if spec.parallel in SHARDED:
        if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise SpecError(
                f'parallel="{spec.parallel}": FSDP2 of torch {torch.__version__} needs a GPU; on a CPU take torch 2.7 or newer, or '
                'parallel="zero1"'
            )
        tables = [name for name, part in module.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
        if tables := [name for name in tables if module.get_submodule(name).weight.requires_grad]:
            raise TaskError(
                f'parallel="{spec.parallel}": the gradients of the embedding {tables[0]!r} are sparse, and FSDP2 shards only dense ones; '
                'try it with sparse=False, or parallel="ddp"'
            )
        broadcast_parameters(module, layout.data, device)
        return _sharded(module, spec, layout, device)
    if layout.tensor is not None:
        use_local_parameters(module)
    kind, options = parse_call("gradient_compression", spec.gradient_compression, COMPRESSIONS, "fp16")
    threads = kind == "powersgd" and device.type == "cpu" and dist.get_backend(layout.data) == "gloo"  # with two buckets, both would wait
    broadcast: AbstractContextManager[dict[str, Any]] = without_first_broadcast() if again else contextlib.nullcontext({})
    with broadcast as without:
        model = _WithAttributes(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=ONE_BUCKET if threads else spec.bucket_cap_mb,
            find_unused_parameters=spec.find_unused_parameters,
            gradient_as_bucket_view=spec.gradient_as_bucket_view,
            static_graph=spec.static_graph,
            process_group=layout.data,
            **without,
        )
    if kind == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(layout.data, options["rank"], options["start"], random_seed=spec.seed)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif kind != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        try:
            model.register_comm_hook(layout.data, hooks[kind])
        except TypeError as error:  # where the ranks have no GPU after all
            raise SpecError(f'gradient_compression="{spec.gradient_compression}": {error}; try "fp16"') from error
    return model


def compression_state(model: nn.Module) -> dict[str, Any] | None:
    """What PowerSGD keeps between two steps on this rank, as tensors and numbers; None = the model's gradients are not compressed by it."""
    if (state := _power_sgd(model)) is None:
        return None
    _, keys, *more = state.rng.get_state()
    tables = {name: dict(getattr(state, name)) for name in _TABLES}
    return {"iter": state.iter, "rng": [torch.from_numpy(keys.astype("int64")), *more], **tables}


def restore_compression(model: nn.Module, kept: Mapping[str, Any], device: torch.device) -> None:
    """Let PowerSGD go on with what a checkpoint kept; nothing but the number of steps (`iter`): with errors and matrices of its own.

    Call it when DDP has its final buckets, after a backward: what is kept is by bucket.
    """
    state = _power_sgd(model)
    state.iter = kept["iter"]
    for name in _TABLES:
        setattr(state, name, {int(bucket): value.to(device, copy=True) for bucket, value in kept.get(name, {}).items()})
    if "rng" in kept:
        keys, *more = kept["rng"]
        state.rng.set_state(("MT19937", keys.numpy().astype("uint32"), *more))


def changed_buckets(spec: RunSpec, state: Mapping[str, Any]) -> str:
    """In which knobs a spec differs from that of a checkpoint's content, so that what PowerSGD kept of a bucket does not fit; "" = none."""
    knobs, before = ("gradient_compression", "bucket_cap_mb", "find_unused_parameters", "static_graph"), state.get("spec") or {}
    pairs = {name: (getattr(spec, name), before.get(name, getattr(spec, name))) for name in knobs}
    return ", ".join(f"{name}={now} (it was {was})" for name, (now, was) in pairs.items() if now != was)


def _power_sgd(model: nn.Module) -> Any:
    """The state of PowerSGD's hook; None without it."""
    return next((state for _, state in getattr(model, "_comm_hooks", ()) if hasattr(state, "error_dict")), None)


POWERSGD_ANEW = "PowerSGD goes on compressing, without what it had left out of the gradients of each rank, and with new random matrices"
"""What it means for PowerSGD that a checkpoint was written by other ranks."""
_TABLES = ("error_dict", "p_memory_dict", "q_memory_dict")
BUCKET_MB = 25.0
"""Size in MiB of what is reduced at once, as DDP has it."""


@torch.no_grad()
def reduce_gradients(weights: Iterable[nn.Parameter], group: dist.ProcessGroup | None, bucket_cap_mb: float | None = None) -> None:
    """Set each gradient to the mean over ranks, after the backward and in buckets, where DDP's hooks do not see it complete. A collective.

    Args:
        weights: whose gradients; the same on all ranks.
        group: the ranks; None = all.
        bucket_cap_mb: size of a bucket in MiB, at most, unless a gradient is larger.
    """
    average([weight.grad for weight in weights if weight.grad is not None], group, bucket_cap_mb)


@torch.no_grad()
def average(tensors: Iterable[Tensor], group: dist.ProcessGroup | None, bucket_cap_mb: float | None = None) -> None:
    """Set each tensor to its mean over ranks, in buckets. A collective."""
    ranks, limit = dist.get_world_size(group), (bucket_cap_mb or BUCKET_MB) * 2**20
    buckets: list[list[Tensor]] = [[]]
    for tensor in tensors:
        last = buckets[-1]
        if last and (last[0].dtype != tensor.dtype or sum(each.nbytes for each in (*last, tensor)) > limit):
            buckets.append([])
        buckets[-1].append(tensor)
    for bucket in filter(None, buckets):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        flat.div_(ranks)
        for tensor, mean in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(mean.view_as(tensor))


def _sharded(module: nn.Module, spec: RunSpec, layout: Layout, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard  # takes long

    kind = TYPES[spec.precision]
    fp32 = torch.float32 if kind else None
    of_blocks = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=fp32)
    of_model = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=fp32, output_dtype=fp32)
    options: dict[str, Any] = {"mesh": layout.replicas, "reshard_after_forward": spec.parallel != "zero2"}
    if spec.offload == "optimizer":
        options["offload_policy"] = CPUOffloadPolicy() if device.type == "cuda" else OffloadPolicy()
    blocks = find_blocks(module)  # before anything is wrapped
    if kind:
        for norm in [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer is not module]:
            fully_shard(norm, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
    for block in blocks.values():
        fully_shard(block, mp_policy=of_blocks, **options)
    fully_shard(module, mp_policy=of_model, **options)
    for part in (*blocks.values(), module):
        hook = _copied_parameters if part._compiled_call_impl is None else torch.compiler.disable(_copied_parameters)  # type: ignore[no-untyped-call]
        part.register_forward_hook(hook, prepend=True)  # before FSDP2's own, which frees them
    if spec.offload == "optimizer":
        for weight in module.parameters():
            mark_on_host(local_part(weight))
    return module


def _copied_parameters(part: nn.Module, _: Any, output: Any) -> Any:
    """The output of a module with copies of the parameters, or views of them, in it: FSDP2 frees what it has gathered after the forward.

    Such are the learned weights of several losses, or a temperature, that a forward returns. A copy passes its gradient on.

    Raises:
        TaskError: an object of another kind holds one.
    """
    gathered = {_storage(weight) for weight in part.parameters() if not is_dtensor(weight)}

    def freed(tensor: Tensor) -> bool:
        return not is_dtensor(tensor) and tensor.layout == torch.strided and _storage(tensor) in gathered

    if not any(map(freed, tensors_of(output))):
        return None
    copied = map_tensors(lambda tensor: tensor.clone() if freed(tensor) else tensor, output)
    if any(map(freed, tensors_of(copied))):
        raise TaskError(
            f"the forward of {type(part).__name__} returns a {type(output).__name__} that holds a parameter, whose memory FSDP2 frees: "
            "return tensors, lists, dicts or dataclasses, or a copy of the parameter (weight * 1)"
        )
    return copied


def _storage(tensor: Tensor) -> int:
    """Which memory a tensor is in."""
    return int(tensor.untyped_storage()._cdata)


def accumulating(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Context of a micro-batch's forward and backward: gradients are reduced across the ranks after the `last` of a step only."""
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if last else model.no_sync()
    fsdp = sys.modules.get("torch.distributed.fsdp")  # only where models are sharded: it takes long to load
    if fsdp and isinstance(model, fsdp.FSDPModule):
        return _unreduced(model, last)
    return contextlib.nullcontext()


def check_reduced(model: nn.Module) -> None:
    """Raise DDP's error after a backward in which a parameter got no gradient on this rank.

    DDP itself raises it in the next forward. Where ranks exchange something before that, this one would wait for those that wait for its
    gradient.
    """
    if isinstance(model, DistributedDataParallel):
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def calling(model: nn.Module) -> Iterator[None]:
    """Context of a loss that calls a model: DDP prepares the reduction of a backward only in its own forward.

    Raises:
        TaskError: it did not call DDP, so that each rank would train a model of its own.
    """
    if not isinstance(model, DistributedDataParallel) or dist.get_world_size(model.process_group) == 1:
        yield
        return
    prepared: list[bool] = []
    handle = model.register_forward_pre_hook(lambda *_: prepared.append(torch.is_grad_enabled()))
    try:
        yield
    finally:
        handle.remove()
    if not any(prepared):
        raise TaskError(
            "the task's loss(model, batch) did not call model(…) itself, and only then are the gradients of the ranks averaged: put what "
            "it does with model.module or with methods, such as encode and decode, into the model's forward, and call model(…)"
        )


@contextlib.contextmanager
def _unreduced(model: Any, last: bool) -> Iterator[None]:
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last)
    yield


class ChangesInForward:
    """Refuses a forward that changes parameters, such as those of a momentum teacher: FSDP2 drops the change with what it has gathered."""

    def __init__(self, model: nn.Module, *, forwards: int, parallel: str) -> None:
        """Watch the next forwards of a model that FSDP2 shards; in the first one, a teacher may be equal to what it follows."""
        from torch.distributed.fsdp import FSDPModule

        self._model, self._forwards, self._parallel = model, forwards, parallel
        self._before: dict[nn.Module, dict[str, Tensor]] = {}
        self._handles = [
            handle
            for part in model.modules()
            if isinstance(part, FSDPModule)
            for handle in (part.register_forward_pre_hook(self._keep), part.register_forward_hook(self._compare, prepend=True))
        ]

    def _keep(self, part: Any, *_: Any) -> None:
        self._before[part] = _norms(part)

    def _compare(self, part: Any, *_: Any) -> None:
        before = self._before.pop(part, {})
        for name, norm in _norms(part).items():
            if name in before and not torch.equal(norm, before[name]) and not norm.isnan():
                name = next(full for full, weight in self._model.named_parameters() if weight is part.get_parameter(name))
                raise TaskError(
                    f'the forward changes the parameter {name!r}, and parallel="{self._parallel}" drops the change with the parameters '
                    'that it has gathered for the forward; try parallel="zero1", or keep what changes as a buffer'
                )
        self._forwards -= part is self._model
        if not self._forwards:
            for handle in self._handles:
                handle.remove()


def _norms(part: nn.Module) -> dict[str, Tensor]:
    """The norms of the parameters of a module that are gathered."""
    gathered = {name: weight.detach() for name, weight in part.named_parameters() if not is_dtensor(weight)}
    return {name: torch.linalg.vector_norm(weight, dtype=torch.float64) for name, weight in gathered.items() if weight.is_floating_point()}


def reshard(module: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, such as after a forward without a backward. Does nothing for other modules."""
    if fsdp := sys.modules.get("torch.distributed.fsdp"):
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()


def gathered(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The state_dict of a sharded module with full tensors, in host memory. A collective: all ranks must call it.

    Args:
        module: sharded by FSDP2 or by tensor parallelism, or neither.
        keep: does this rank get them? The others get an empty dict.
    """
    entries = {}
    for name, value in module.state_dict(keep_vars=True).items():
        full = full_tensor(value) if isinstance(value, Tensor) else value
        if keep:
            entries[name] = full.detach().to("cpu", copy=True) if isinstance(full, Tensor) else full
    return entries
