"""Two ranks look for a learning rate under DDP; each writes what it found, and whether all was put back, into the folder given."""

import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group is there: its default arguments would keep it alive
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from workbench.batch.analysis.lr_range import LrRangeError
from workbench.batch.measure.lr_range import find


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    search(folder)  # its model must be gone before the group goes
    gc.collect()
    dist.destroy_process_group()


def search(folder: str) -> None:
    """All of it."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    data = TensorDataset(inputs, inputs @ torch.randn(8, 1) + 0.1 * torch.randn(512, 1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    torch.manual_seed(10 + rank)
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, 2, rank))
    count = 0

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        """One optimizer step."""
        nonlocal count
        count += 1
        optimizer.zero_grad()
        loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def state() -> list[Any]:
        weights = [weight.detach().clone().numpy().tobytes() for weight in model.parameters()]
        return [weights, torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()), count, len(optimizer.state)]

    step((inputs[:16], inputs[:16, :1]))
    before = state()
    found = find(step, loader, sweeps=3, iterations=40, race_steps=10)
    restored = state() == before

    def fails(batch: tuple[Tensor, Tensor]) -> Tensor | None:
        loss = step(batch)
        return None if rank else loss

    try:
        find(fails, loader, model=model, optimizer=optimizer)
        trouble = ""
    except LrRangeError as error:
        trouble = str(error)
    restored &= state() == before
    Path(folder, f"{rank}.json").write_text(json.dumps({"found": found.to_json(), "restored": restored, "trouble": trouble}))
    step((inputs[:16], inputs[:16, :1]))  # training goes on, and the ranks still agree
    sums = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(sums, sum((weight.detach().sum() for weight in model.parameters()), torch.zeros(())).reshape(1))
    assert torch.equal(*sums)


if __name__ == "__main__":
    main(*sys.argv[1:])
