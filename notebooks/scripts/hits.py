"""A training step that counts its hits while it trains, in two ways. Notebook 08 finds out what that costs; guess before you read on."""

import statistics
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import DataLoader

from workbench.data.samples import Fashion

Count = Callable[[Tensor, Tensor], int]
Step = Callable[[Any], None]


def one_by_one(scores: Tensor, labels: Tensor) -> int:
    """As it is thought: this picture, then the next."""
    return sum(int(score.argmax() == label) for score, label in zip(scores, labels, strict=True))


def all_at_once(scores: Tensor, labels: Tensor) -> int:
    """As it is computed."""
    return int((scores.argmax(1) == labels).sum())


def loop(count: Count) -> tuple[Step, DataLoader[Any]]:
    """A step on pictures of clothes, and its loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(196, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hits = []

    def step(batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        optimizer.zero_grad()
        scores = model(images)
        nn.functional.cross_entropy(scores, labels).backward()
        optimizer.step()
        with record_function("hits"):
            hits.append(count(scores, labels))

    return step, DataLoader(Fashion(), batch_size=256, collate_fn=Fashion.collate)


def side_by_side(one: Step, other: Step, loader: DataLoader[Any], rounds: int = 15, steps: int = 8) -> list[float]:
    """How many times faster the other is, without a profiler: the two take turns, and each ratio is of neighbours."""
    batches = list(islice(loader, steps))

    def seconds(step: Step) -> float:
        start = time.perf_counter()
        for batch in batches:
            step(batch)
        return time.perf_counter() - start

    seconds(one), seconds(other)
    return sorted(seconds(one) / seconds(other) for _ in range(rounds))


def middle(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)
