"""Pictures of clothes with planted faults (leaks, duplicates, wrong labels, damaged files), and a small network to train on them."""

import io
import random
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from PIL import Image
from torch import Tensor, nn

from workbench.core.display.axes import ink, prepared
from workbench.data.samples import fashion_mnist

NAMES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
TRAIN, VALIDATION = 2000, 1000
PLANTED = {"leak": 400, "duplicate": 80, "conflicting labels": 40, "unreadable": 5, "huge": 2}
"""Fault → samples that have it."""
SIDE_OF_BOMB = 30_000


def _png(pixels: np.ndarray, level: int = 6) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=level)
    return file.getvalue()


def _bomb() -> bytes:
    """A PNG of less than 100 bytes that declares 900 million pixels."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", SIDE_OF_BOMB, SIDE_OF_BOMB, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(bytes(9))) + part(b"IEND", b"")


def plant(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Training and validation samples, with the faults of `PLANTED` among the training samples, in random order.

    A leak is a validation picture, saved anew: other bytes, the same pixels. A conflict is a pair with two labels, so half of its samples
    are copies.
    """
    pixels, labels = (each.numpy() for each in fashion_mnist())
    rng = random.Random(seed)
    clean = [{"__key__": f"{i:05d}", "png": _png(pixels[i, 0]), "cls": int(labels[i])} for i in range(TRAIN + VALIDATION)]
    train, validation = clean[:TRAIN], clean[TRAIN:]
    twice = rng.sample(range(TRAIN), PLANTED["duplicate"] + PLANTED["conflicting labels"] // 2)
    copies = [{**train[i], "__key__": f"again-{i:05d}"} for i in twice[: PLANTED["duplicate"]]]
    for i in twice[PLANTED["duplicate"] :]:
        copies.append({**train[i], "__key__": f"other-{i:05d}", "cls": (train[i]["cls"] + rng.randrange(1, 10)) % 10})
    for i in rng.sample(range(VALIDATION), PLANTED["leak"]):
        leak = {"__key__": f"leak-{i:05d}", "png": _png(pixels[TRAIN + i, 0], level=1), "cls": validation[i]["cls"]}
        copies.append(leak)
    for number in range(PLANTED["unreadable"]):
        data = train[number]["png"]
        copies.append({"__key__": f"cut-{number}", "png": data[: len(data) // 2], "cls": train[number]["cls"]})
    copies += [{"__key__": f"bomb-{number}", "png": _bomb(), "cls": 0} for number in range(PLANTED["huge"])]
    train = [*train, *copies]
    rng.shuffle(train)
    return {"train": train, "validation": validation}


def tensors(samples: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Inputs (samples × 784, 0..1) and labels; what Pillow cannot read is left out, as many loaders do it."""
    pixels, labels = [], []
    for sample in samples:
        try:
            pixels.append(np.asarray(Image.open(io.BytesIO(sample["png"]))).reshape(-1))
        except (OSError, Image.DecompressionBombError):
            continue
        labels.append(sample["cls"])
    return torch.from_numpy(np.stack(pixels)).float() / 255, torch.tensor(labels)


def train(data: tuple[Tensor, Tensor], seed: int = 0, epochs: int = 40) -> nn.Module:
    """A network of one hidden layer, trained until it knows its training samples by heart."""
    torch.manual_seed(seed)
    inputs, labels = data
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(128):
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def probabilities(model: nn.Module, inputs: Tensor) -> Tensor:
    """Of each class: samples × 10."""
    with torch.no_grad():
        return model(inputs).softmax(1)


def accuracy(models: Sequence[nn.Module], data: tuple[Tensor, Tensor]) -> float:
    """The mean share of right answers of several models."""
    inputs, labels = data
    return float(np.mean([float((probabilities(model, inputs).argmax(1) == labels).float().mean()) for model in models]))


def wrong_labels(labels: Tensor, share: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Labels of which a share was replaced by others, and which ones (True = wrong)."""
    draw = torch.Generator().manual_seed(seed)
    wrong = torch.zeros(len(labels), dtype=torch.bool)
    wrong[torch.randperm(len(labels), generator=draw)[: round(share * len(labels))]] = True
    shift = torch.randint(1, 10, labels.shape, generator=draw)
    return torch.where(wrong, (labels + shift) % 10, labels), wrong


def held_out(data: tuple[Tensor, Tensor], folds: int = 2) -> Tensor:
    """The probabilities of each sample's classes, by a model that was trained without the sample's part of the data."""
    inputs, labels = data
    found = torch.zeros(len(labels), 10)
    for fold in range(folds):
        out = torch.arange(len(labels)) % folds == fold
        found[out] = probabilities(train((inputs[~out], labels[~out]), epochs=12), inputs[out])
    return found


def draw(inputs: Tensor, labels: Tensor, wrong: Tensor) -> Axes:
    """Draw pictures in a row with the labels that they were given, and whether these were planted."""
    ax = prepared(None, 0.95 * len(labels), 1.6)
    for column, (pixels, label, planted) in enumerate(zip(inputs, labels, wrong, strict=True)):
        ax.imshow(1 - pixels.reshape(28, 28), extent=(column + 0.05, column + 0.95, 0.05, 0.95), cmap="gray", vmin=0, vmax=1)
        ax.text(column + 0.5, -0.08, NAMES[int(label)], ha="center", va="top", fontsize=8, color=ink(ax))
        ax.text(column + 0.5, -0.30, "planted" if planted else "as it was", ha="center", va="top", fontsize=7, color=ink(ax))
    ax.set_xlim(0, len(labels))
    ax.set_ylim(-0.5, 1)
    ax.set_axis_off()
    return ax
