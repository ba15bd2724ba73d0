"""What the gallery is built of: models, data, and the ordinary loop that a spec describes."""

import io
import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from workbench.runs.spec import RunSpec
from workbench.runs.task import Task
from workbench.train.loader import build_loader
from workbench.train.optimizers import build_optimizer
from workbench.train.ranks import Ranks


@dataclass(kw_only=True)
class Loop:
    """A training loop: `for batch in loader: step(batch)`."""

    step: Callable[[Any], Any]
    loader: Iterable[Any]
    model: nn.Module
    optimizer: Optimizer
    samples: float = 1.0
    """Per step: what two loops are compared by, if they differ in it."""
    threads: int = 1
    named: bool = True
    """Are model and optimizer told to `diagnose`, or left for it to find?"""

    def batches(self) -> Iterator[Any]:
        """Batches without end."""
        while True:
            yield from self.loader


def from_spec(spec: RunSpec, task: Task, ranks: Ranks, *, reduce: bool = True) -> Loop:
    """The loop of a spec, written out as one would by hand: for tools that do not know what a spec is.

    Args:
        spec: its knobs.
        task: what is trained.
        ranks: this process among the others.
        reduce: reduce the gradients over the ranks.
    """
    torch.set_num_threads(spec.threads)
    torch.manual_seed(spec.seed)
    module = task.model()
    optimizer = build_optimizer(module, task.optimizer, override=spec.optimizer, lr=spec.lr)
    loader = build_loader(task, spec, ranks, ranks.rank)
    model: nn.Module = module
    if ranks.world_size > 1 and reduce:
        model = DistributedDataParallel(module, bucket_cap_mb=spec.bucket_cap_mb)

    count = 0

    def step(batch: Any) -> None:
        nonlocal count
        count += 1
        (task.loss(model, batch) / spec.accumulation).backward()
        if count % spec.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Loop(step=step, loader=loader, model=model, optimizer=optimizer, samples=spec.micro_batch, threads=spec.threads)


def rank() -> int:
    """This process among the others, known even before they have met."""
    return int(os.environ.get("RANK", "0"))


# --- models


def mlp(width: int = 512, layers: int = 4, inputs: int = 256, outputs: int = 10) -> nn.Sequential:
    """Linear layers with ReLU."""
    torch.manual_seed(0)
    sizes = [inputs] + [width] * (layers - 1)
    hidden = [module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def deep(layers: int = 120, width: int = 16, inputs: int = 256) -> nn.Sequential:
    """Very many very small layers."""
    return nn.Sequential(nn.Linear(inputs, width), *(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 10))


def convnet(channels: int = 32, side: int = 32) -> nn.Sequential:
    """Three convolutions on pictures of `side` pixels."""
    return nn.Sequential(
        *(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Flatten()),
        nn.Linear(channels * (side // 4) ** 2, 10),
    )


def big_mlp(inputs: int = 256) -> nn.Sequential:
    """About 8 ms per step on one core, with a batch of 32."""
    return mlp(width=1024, inputs=inputs)


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of a classifier."""
    x, y = batch
    return F.cross_entropy(model(x), y)


# --- data


class Vectors:
    """Vectors with labels, ready in memory; reading one may take its time."""

    def __init__(self, size: int = 256, length: int = 100_000, cost: Callable[[int], Any] | None = None) -> None:
        chance = torch.Generator().manual_seed(0)
        self.bank, self.length, self.cost = torch.randn(512, size, generator=chance), length, cost

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= self.length:
            raise IndexError(index)
        if self.cost:
            self.cost(index)
        return self.bank[index % 512], index % 10


class Pictures:
    """Small pictures as tensors, in memory."""

    def __init__(self, side: int = 32, length: int = 100_000, bank: int = 64, cost: Callable[[int], Any] | None = None) -> None:
        self.bank, self.length = torch.randn(bank, 3, side, side, generator=torch.Generator().manual_seed(0)), length
        self.cost = cost

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.cost:
            self.cost(index)
        return self.bank[index % len(self.bank)], index % 10


def jpegs(count: int = 16, side: int = 256) -> list[bytes]:
    """JPEG pictures that look a little like photographs: smooth noise."""
    chance, files = np.random.default_rng(0), []
    for _ in range(count):
        small = Image.fromarray(chance.integers(0, 256, (side // 4, side // 4, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        small.resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
        files.append(buffer.getvalue())
    return files


def decoded(file: bytes, side: int = 32) -> Tensor:
    """A JPEG as a tensor of `side` pixels."""
    picture = Image.open(io.BytesIO(file)).convert("RGB")
    full = torch.from_numpy(np.array(picture))
    return full[:: full.shape[0] // side, :: full.shape[1] // side].permute(2, 0, 1) / 255


def sentences(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Lists of tokens of different lengths."""
    chance = random.Random(0)
    return [[chance.randrange(256) for _ in range(chance.randint(shortest, longest))] for _ in range(count)]


def wait(seconds: float) -> None:
    """Wait for somebody else: storage, a server."""
    time.sleep(seconds)


def wrap(module: nn.Module) -> nn.Module:
    """With DDP, where there are several ranks."""
    return DistributedDataParallel(module) if dist.is_initialized() and dist.get_world_size() > 1 else module
