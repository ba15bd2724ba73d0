"""Two ranks diagnose steps, one for each trouble that the last arguments name; rank 0 writes the evidence to the first, by trouble.

two_ranks.py FOUND.json BUDGET TROUBLE…
"""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group is there: its default arguments would keep it alive
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from workbench.diagnosis.measure.experiment import experiment


def diagnosed(mode: str, budget: float) -> dict[str, Any]:
    """The evidence about a step with this trouble; training goes on afterwards as if nobody had looked."""

    class Samples(Dataset[Tensor]):
        """Slow on one rank, if that is the trouble."""

        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> Tensor:
            if mode == "input" and dist.get_rank() == 1:
                time.sleep(0.002)
            return torch.full((32,), float(index % 5))

    torch.manual_seed(0)
    width = 1500 if mode == "gradients" else 32
    model: nn.Module = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))
    if mode == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif mode != "gathered":
        model = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.001)
    if mode == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # here: its package warns when it is imported

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.001, momentum=0.9)

    def step(batch: Tensor) -> None:
        """One optimizer step."""
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if mode == "compute" and dist.get_rank() == 1:
            time.sleep(0.01)
        if mode == "gathered":
            for weight in model.parameters():
                assert weight.grad is not None
                theirs = [torch.zeros_like(weight.grad) for _ in range(2)]
                dist.all_gather(theirs, weight.grad)
                weight.grad.copy_(sum(theirs) / 2)
        optimizer.step()

    before = [weight.detach().clone() for weight in model.parameters()]
    evidence = experiment(step, DataLoader(Samples(), batch_size=8), budget_s=budget)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(torch.ones(8, 32))  # training goes on, and the ranks still agree
    sums = [torch.zeros(1) for _ in range(2)]
    whole = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
    dist.all_gather(sums, sum((weight.detach().sum() for weight in whole), torch.zeros(())).reshape(1))
    assert torch.equal(*sums)
    return evidence.to_json()


def main(path: str, budget: str, *modes: str) -> None:
    dist.init_process_group("gloo")
    found = {}
    for mode in modes:
        found[mode] = diagnosed(mode, float(budget))
        gc.collect()  # the model goes: then destroying the group ends its threads, before Python ends
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
