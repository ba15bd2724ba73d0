"""A training script like any other: two-layer net, DDP over gloo, a line per step; slow enough to be watched and stopped."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.01)
        return torch.full((32,), index % 7 / 7), torch.tensor(float(index % 7))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--fail-at", type=int, default=-1, help="step at which rank 1 raises")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, targets) in zip(range(options.steps), DataLoader(Slow(), batch_size=4), strict=False):
        if step == options.fail_at and dist.get_rank() == 1:
            raise ValueError("a broken picture: <data/cat.jpg>")
        loss = nn.functional.mse_loss(model(inputs)[:, 0], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
