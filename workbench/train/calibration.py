"""Tasks that calibration runs: what they take of a GPU lies far apart. Zero-argument functions that return a Task."""

import dataclasses
from functools import partial
from typing import Any

from workbench.task import Task
from workbench.train.models import Gpt, ResNet
from workbench.train.tasks import WINDOW, clipart_resnet, text_gpt


def wide_gpt() -> Task:
    """A GPT with 101 M parameters."""
    return _gpt("wide-gpt", width=1024, layers=8)


def middle_gpt() -> Task:
    """A GPT with 19 M parameters."""
    return _gpt("middle-gpt", width=512, layers=6)


def wide_resnet() -> Task:
    """A ResNet-10 with 4.9 M parameters."""
    return _resnet("wide-resnet", width=64, blocks=(1, 1, 1, 1))


def deep_resnet() -> Task:
    """A ResNet-34 with 5.3 M parameters."""
    return _resnet("deep-resnet", width=32, blocks=(3, 4, 6, 3))


def _gpt(name: str, *, width: int, layers: int) -> Task:
    return dataclasses.replace(text_gpt(), model=partial(Gpt, length=WINDOW, width=width, layers=layers, heads=width // 64), name=name)


def _resnet(name: str, **sizes: Any) -> Task:
    return dataclasses.replace(clipart_resnet(), model=partial(ResNet, classes=10, **sizes), name=name)
