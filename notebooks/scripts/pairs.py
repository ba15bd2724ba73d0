"""A loss that compares each point with all others: its memory grows with the square of the batch (notebook 04)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import workbench as wb

POINTS = 1024
"""Points of a sample."""


class Clouds(Dataset[Tensor]):
    """Clouds of random points: for memory only their number counts."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(POINTS, 4)


def all_pairs(model: nn.Module, batch: Tensor) -> Tensor:
    """Each point should be most similar to itself, among all points of all samples."""
    points = model(batch.flatten(0, 1))
    return F.cross_entropy(points @ points.T, torch.arange(len(points), device=points.device))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh())


def task() -> wb.Task:
    """A small network of points, with that loss."""
    return wb.Task(model=network, dataset=Clouds, loss=all_pairs, optimizer="sgd")


def measured(batch: int) -> wb.MemoryBreakdown:
    """The memory of real steps with a batch, taken in this process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(clouds: Tensor) -> None:
        optimizer.zero_grad()
        all_pairs(model, clouds).backward()
        optimizer.step()

    return wb.measure_memory(step, DataLoader(Clouds(), batch_size=batch), steps=2)
