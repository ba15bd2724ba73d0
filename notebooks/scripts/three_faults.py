"""Task of notebook 03 with three faults at once: `wb.climb` takes them one after the other. Guess them before you read on below."""

import time

import torch
from torch import Tensor, nn

from workbench import Task
from workbench.data.samples import FashionMnist

EXPERTS, WIDTH, CLASSES = 1200, 16, 10


class Slow(FashionMnist):
    """Fashion-MNIST from a busy disk: each picture takes its time, EMULATED by sleeping."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.0004)  # 1
        return super().__getitem__(index)


class Committee(nn.Module):
    """Many small experts vote, each a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, WIDTH), nn.ReLU())
        self.experts = nn.ParameterList(torch.randn(WIDTH, CLASSES) / WIDTH for _ in range(EXPERTS))  # 2

    def forward(self, images: Tensor) -> Tensor:
        votes: Tensor = torch.stack(list(self.experts)).mean(0)
        return self.features(images) @ votes


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy, and a report to a server that takes its time."""
    images, labels = batch
    time.sleep(0.006)  # 3
    return nn.functional.cross_entropy(model(images), labels)


def build() -> Task:
    """The task; a spec's knobs can mend the first two faults, and make the third matter less."""
    return Task(model=Committee, dataset=Slow, loss=loss, optimizer="adamw(lr=0.001)", name="three-faults")
