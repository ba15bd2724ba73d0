"""Two ranks train a small model in the ways that are named, each watched; rank 0 writes the norms of all steps to the first argument."""

import contextlib
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group is there: its default arguments would keep it alive
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from workbench.batch.analysis.noise_scale_estimator import NoiseScaleError
from workbench.batch.measure.noise_watch import NoiseWatch

STEPS, MICRO_BATCH = 4, 4


def made() -> nn.Module:
    """The same on all ranks and in all ways; one layer is not used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 3))
    return nn.ModuleDict({"used": model, "unused": nn.Linear(5, 5)})


def batch(step: int, group: int) -> tuple[Tensor, Tensor]:
    """That of a group: the same data, whoever takes it."""
    generator = torch.Generator().manual_seed(100 * step + group)
    return torch.randn(MICRO_BATCH, 8, generator=generator), torch.randint(0, 3, (MICRO_BATCH,), generator=generator)


class Called(nn.Module):
    """Calls the part that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = made()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.parts["used"](inputs)  # type: ignore[index, no-any-return]


def wrapped(how: str) -> nn.Module:
    """The model, as it is reduced or shared."""
    model: nn.Module = Called()
    world_size = dist.get_world_size()
    if how == "alone":
        return model
    if how.startswith("ddp"):
        model = DistributedDataParallel(
            model,
            find_unused_parameters=True,
            bucket_cap_mb=0.0001 if how == "ddp, small buckets" else None,
            gradient_as_bucket_view=how == "ddp, views",
        )
        if how == "ddp, own hook":
            model.register_comm_hook(None, fp16_compress_hook)
        return model
    shape, names = ((world_size, 1), ("replica", "shard")) if how == "hsdp" else ((world_size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    kind = torch.bfloat16 if how == "fsdp2, bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
    for layer in model.parts["used"]:  # type: ignore[union-attr, index]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def trained(how: str, accumulation: int) -> list[tuple[float, float]]:
    """The norms of steps of 2 × accumulation groups, however they are spread."""
    model = wrapped(how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rank, alone = dist.get_rank(), how == "alone"
    groups = 2 * accumulation
    mine = range(groups) if alone else range(rank * accumulation, (rank + 1) * accumulation)
    with NoiseWatch(model, optimizer, micro_batch=MICRO_BATCH) as watch:
        for step in range(STEPS):
            for group in mine:
                last = group == mine[-1]
                inputs, labels = batch(step, group)
                with unsynchronised(model, last):
                    loss = nn.functional.cross_entropy(model(inputs).float(), labels) / len(mine)
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01 if step == 0 else 1e9)  # after the gradients are seen
            optimizer.step()
            optimizer.zero_grad()
        with contextlib.suppress(NoiseScaleError):
            NoiseWatch(model, optimizer, micro_batch=MICRO_BATCH).__enter__()
            raise AssertionError("two watches on one model")
    result = watch.result()
    assert result.groups == groups
    assert result.micro_batch == MICRO_BATCH
    return list(result.pairs)


def unsynchronised(model: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Around a micro-batch that is not the last."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


WAYS = ("alone", "ddp", "ddp, small buckets", "ddp, views", "ddp, own hook", "fsdp2", "fsdp2, bf16", "hsdp")


def main(path: str) -> None:
    """Train in each way."""
    dist.init_process_group("gloo")
    found = {f"{how} × {accumulation}": trained(how, accumulation) for accumulation in (1, 3) for how in WAYS}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    gc.collect()  # the models are gone: let destroying the group end its threads, before Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
