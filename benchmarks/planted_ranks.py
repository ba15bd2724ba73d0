"""A task whose ranks lose time for a reason that is planted: the environment variable PLANTED says which (see `why_not_linear.py` here).

Computing is sleep, so that many ranks fit on two cores and the truth is known; gradients, loaders, locks and workers are real.
"""

import fcntl
import json
import os
import tempfile
import time
from typing import Any

import torch
from torch import Tensor, nn

import workbench as wb

SAMPLES = 1 << 20


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


def locked(name: str, seconds: float) -> None:
    """Use something for some seconds that serves one process at a time."""
    with open(os.path.join(tempfile.gettempdir(), f"planted-{name}-{os.environ.get('PLANTED_ID', '')}"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(seconds)


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
        if "locked" in what:
            locked("device", what["locked"])
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
            locked("disk", what["disk"] / 8)
        length = 1.0 + (what.get("longer", 0.0) if last() else 0.0)
        if what.get("uneven") and int(torch.randint(0, 24, ())) == 0:
            length += what["uneven"]
        return torch.tensor(length)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss that does not matter."""
    result: Tensor = model(batch).square().mean()
    return result


def task() -> wb.Task:
    """With whatever PLANTED says."""
    return wb.Task(model=Work, dataset=Lengths, loss=squares, optimizer="sgd(lr=0.0001)")
