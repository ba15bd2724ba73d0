"""Task of notebook 11: a network on two ranks that lose time to one thing. Guess what it is before you read on below."""

import os
import time

from torch import Tensor, nn

from workbench import Task
from workbench.data.samples import FashionMnist

COMPUTE = 0.020
"""Seconds of a forward, EMULATED by sleeping, as if an accelerator computed: so ranks take no core from each other."""
CAUSE = "uneven data"
"""What goes wrong."""


class Pictures(FashionMnist):
    """Fashion-MNIST. Not all ranks have the same disk."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if os.environ.get("RANK") == "1":
            time.sleep(0.001)
        return super().__getitem__(index)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy, on a device that takes its time."""
    images, labels = batch
    time.sleep(COMPUTE)
    return nn.functional.cross_entropy(model(images), labels)


def build() -> Task:
    """The task."""
    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))  # noqa: E731
    return Task(model=network, dataset=Pictures, loss=loss, optimizer="sgd(lr=0.05)", name="two-ranks")
