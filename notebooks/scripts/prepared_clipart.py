"""The clip-art task on pictures that were decoded beforehand: what "prepare your data offline" means."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from workbench import Task
from workbench.data.samples import ClipArt
from workbench.train.tasks import clipart_resnet


class Prepared(Dataset[tuple[Tensor, int]]):
    """The training pictures as arrays in memory; their augmentation is frozen at what it was when they were prepared."""

    def __init__(self) -> None:
        pictures = ClipArt()
        samples = [pictures[index] for index in range(len(pictures))]
        self._images = torch.stack([image for image, _ in samples])
        self._labels = [label for _, label in samples]

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], self._labels[index]


def build() -> Task:
    """The sample task on prepared pictures."""
    return replace(clipart_resnet(), dataset=Prepared, name="prepared-clipart")
