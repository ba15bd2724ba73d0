"""A task whose ranks lose time for a reason that is planted: the environment variable PLANTED says which (see `why_not_linear.py` here).

Computing is sleep, so that many ranks fit on two cores and the truth is known; gradients, loaders, locks and workers are real.
"""

import json
import mmap
import os
import random
import tempfile
import time
from typing import Any

import torch
from torch import Tensor, nn

import workbench as wb

SAMPLES = 1 << 20
RANKS = 16
"""The most there may be."""
SLICE = 0.002
"""Seconds for which something shared is used before its other users are counted again."""


def planted() -> dict[str, float]:
    """What is planted: seconds by name, and the numbers of tensors and of samples."""
    values: dict[str, float] = json.loads(os.environ.get("PLANTED", "{}"))
    return values


def rank() -> int:
    """Of this process."""
    return int(os.environ.get("RANK", "0"))


def last() -> bool:
    """Is this the last rank?"""
    return rank() > 0 and rank() == int(os.environ.get("WORLD_SIZE", "1")) - 1


def burn(seconds: float) -> None:
    """Compute for some CPU seconds."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def shared(name: str, seconds: float) -> None:
    """Use something whose speed is divided among those that use it at a moment, such as the bandwidth of memory or of a disk."""
    path = os.path.join(tempfile.gettempdir(), f"planted-{name}-{os.environ.get('PLANTED_ID', '')}")
    with open(path, "a+b") as file:
        if os.fstat(file.fileno()).st_size < RANKS:
            os.ftruncate(file.fileno(), RANKS)
        users = mmap.mmap(file.fileno(), RANKS)
    users[rank()] = 1
    try:
        left, before = seconds, time.perf_counter()
        while left > 0:
            time.sleep(min(SLICE, left))
            now = time.perf_counter()
            left -= (now - before) / max(1, sum(users[:]))
            before = now
    finally:
        users[rank()] = 0
        users.close()


class Pass(torch.autograd.Function):
    """Takes its time in forward and backward, and gives each weight a gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float, *weights: Tensor) -> Tensor:
        ctx.seconds, ctx.weights = seconds, weights
        time.sleep(seconds / 3)
        return inputs * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        time.sleep(2 * ctx.seconds / 3)
        return gradients[0], None, *(torch.zeros_like(weight) for weight in ctx.weights)


class Work(nn.Module):
    """Sleeps for each sample, and what is planted besides."""

    def __init__(self) -> None:
        super().__init__()
        what = planted()
        tensors = int(what.get("tensors", 4))
        each = int(what.get("numbers", 40_000)) // tensors
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(each)) for _ in range(tensors)])
        self.first = nn.Linear(1, 1)
        self.what = what

    def forward(self, lengths: Tensor) -> Tensor:
        what = self.what
        seconds = what.get("computing", 0.03) * float(lengths.mean()) * len(lengths) / 8 + what.get("fixed", 0.0)
        seconds += what.get("slow", 0.0) if last() else 0.0
        if last():
            burn(what.get("burner", 0.0))
        burn(what.get("burn", 0.0))
        if "shared" in what:
            shared("memory", what["shared"])
        if "uneven" in what and random.random() < 0.5:
            seconds += what["uneven"]
        return Pass.apply(self.first(lengths[:, None]), seconds, *self.weights)  # type: ignore[no-any-return, no-untyped-call]


class Lengths(torch.utils.data.Dataset[Tensor]):
    """Samples with a length, which decides how long they take."""

    def __init__(self) -> None:
        self.what = planted()

    def __len__(self) -> int:
        return int(self.what.get("samples", SAMPLES))

    def __getitem__(self, index: int) -> Tensor:
        what = self.what
        if last() and what.get("data"):
            time.sleep(what["data"] / 8)
        if what.get("disk"):
            shared("disk", what["disk"] / 8)
        length = 1.0 + (what.get("longer", 0.0) if last() else 0.0)
        return torch.tensor(length)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss that does not matter."""
    result: Tensor = model(batch).square().mean()
    return result


def task() -> wb.Task:
    """With whatever PLANTED says."""
    return wb.Task(model=Work, dataset=Lengths, loss=squares, optimizer="sgd(lr=0.0001)")
