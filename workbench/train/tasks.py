"""The sample tasks: zero-argument functions that return a Task, as a user's own file would.

`moe_gpt` has no short name: `"workbench.train.tasks:moe_gpt"`. The last four are run by the calibration of memory estimates: their needs of
a GPU differ widely.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from workbench.data.samples import ByteText, ClipArt, Fashion
from workbench.runs.task import Task
from workbench.train.models import Gpt, MoeGpt, ResNet

WINDOW = 64
"""Bytes that the text model reads at once."""
BALANCE = 0.01
"""Weight of the experts' imbalance in the loss of `moe_gpt`. Source: Fedus et al. 2021, arXiv:2101.03961."""


def clipart_resnet() -> Task:
    """A ResNet-10 (0.3 M parameters) on 1,027 clip-art pictures in 10 classes; a fifth of a sample's time is JPEG decoding."""
    return Task(
        model=partial(ResNet, classes=10),
        dataset=ClipArt,
        loss=_classify,
        optimizer="adamw(lr=0.005, weight_decay=0.05)",
        evaluate=_accuracy,
        pipeline=ResNet.pieces,
        name="clipart-resnet",
    )


def text_gpt() -> Task:
    """A GPT with two layers (0.14 M parameters) that predicts the next byte of a novel; its data cost nothing."""
    return Task(
        model=partial(Gpt, length=WINDOW, width=64, layers=2, heads=4),
        dataset=partial(ByteText, length=WINDOW),
        loss=_next_byte,
        optimizer="adamw(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)",
        evaluate=_bits_per_byte,
        tensor_parallel={"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"},
        pipeline=Gpt.pieces,
        name="text-gpt",
    )


def fashion_mlp() -> Task:
    """A perceptron 196-64-10 (13,258 parameters) on 8,000 small pictures of clothes: steps so cheap that many runs can be compared."""
    return Task(
        model=lambda: nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10)),
        dataset=Fashion,
        loss=_classify,
        optimizer="sgd(lr=0.1)",
        collate=Fashion.collate,
        evaluate=_validated,
        name="fashion-mlp",
    )


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _next_byte(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _accuracy(model: nn.Module) -> dict[str, float]:
    """Fraction of the validation pictures that are put in the class they were filed under (by chance 0.1), and the mean loss on them."""
    data = ClipArt("validation")
    right, loss = 0, 0.0
    for images, labels in _batches(model, data):
        scores = model(images)
        right += int((scores.argmax(1) == labels).sum())
        loss += float(F.cross_entropy(scores, labels, reduction="sum"))
    return {"accuracy": right / len(data), "validation_loss": loss / len(data)}


def _validated(model: nn.Module) -> dict[str, float]:
    """Fraction of the 2,000 validation pictures that are put in their class (by chance 0.1), and the mean loss on them (at first 2.3)."""
    data = _validation_fashion()
    device = next(model.parameters()).device
    inputs, labels = data.inputs.to(device), data.labels.to(device)
    scores = model(inputs)
    return {"accuracy": float((scores.argmax(1) == labels).float().mean()), "loss": float(F.cross_entropy(scores, labels))}


@functools.cache
def _validation_fashion() -> Fashion:
    """The pictures, read once: an evaluation takes a millisecond, and there may be hundreds in a run."""
    return Fashion("validation")


def _bits_per_byte(model: nn.Module) -> dict[str, float]:
    """Bits the model needs for a byte of the validation text (8 = it knows nothing, 4.5 = it knows how frequent each byte is), and the
    mean loss on it, which is the same in nats.
    """
    data = ByteText("validation", length=WINDOW)
    loss = 0.0
    for (windows,) in _batches(model, data):
        loss += float(_next_byte(model, windows)) * len(windows)
    loss /= len(data)
    return {"bits_per_byte": loss / math.log(2), "validation_loss": loss}


def _batches(model: nn.Module, data: "Dataset[Any]") -> Iterator[list[Tensor]]:
    """All of a dataset in batches, as lists of tensors, on the model's device."""
    device = next(model.parameters()).device
    for batch in DataLoader(data, batch_size=128):
        yield [tensor.to(device) for tensor in ([batch] if isinstance(batch, torch.Tensor) else batch)]


def moe_gpt() -> Task:
    """The text model as a mixture of experts (0.20 M parameters): each byte passes 2 of 4 in each layer; a part of the loss balances."""
    model = partial(MoeGpt, length=WINDOW, width=64, layers=2, heads=4, experts=4)
    alone: dict[str, Any] = {"tensor_parallel": None, "pipeline": None}  # its perceptrons are experts, and its loss looks at all layers
    return dataclasses.replace(text_gpt(), model=model, loss=_next_byte_balanced, name="moe-gpt", **alone)


def _next_byte_balanced(model: nn.Module, batch: Tensor) -> Tensor:
    loss = _next_byte(model, batch)
    balanced: Any = getattr(model, "module", model)  # DDP's own
    total: Tensor = loss + BALANCE * balanced.imbalance
    return total


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
