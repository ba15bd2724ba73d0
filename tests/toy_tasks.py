"""Tasks for the tests of the training program: exact arithmetic, and every way in which a user's task can be wrong."""

import datetime
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from workbench.runs.task import Task
from workbench.train import ranks

Pair = tuple[Tensor, Tensor]


class Numbers(Dataset[Pair]):
    """Fixed random vectors, to be mapped to others."""

    def __init__(self, count: int = 64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.targets = torch.randn(count, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Pair:
        return self.inputs[index], self.targets[index]


class Stream(IterableDataset[Pair]):
    """The same numbers as a stream."""

    def __init__(self, *, shared: bool = False, count: int = 64) -> None:
        self.shared, self.count = shared, count

    def __iter__(self) -> Iterator[Pair]:
        first, stride = (0, 1) if self.shared else (dist.get_rank(), dist.get_world_size())
        numbers = Numbers(self.count)
        return (numbers[i] for i in range(first, self.count, stride))


def network() -> nn.Module:
    """No batch statistics, no dropout: what a sample adds to the gradient does not depend on its batch."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def squared_error(model: nn.Module, batch: Pair) -> Tensor:
    error: Tensor = model(batch[0]) - batch[1]
    return error.square().mean()


def parameters(model: nn.Module) -> dict[str, float]:
    """The trained parameters, as figures of an evaluation."""
    values = torch.cat([p.flatten() for p in model.parameters()]).tolist()
    return {f"p{i}": value for i, value in enumerate(values)}


def numbers(**changes: Any) -> Task:
    """Learns, and reports its parameters."""
    known: dict[str, Any] = {
        "model": network,
        "dataset": Numbers,
        "loss": squared_error,
        "optimizer": "sgd(lr=0.1)",
        "evaluate": parameters,
    }
    return Task(**known | changes)


def noisy_error(model: nn.Module, batch: Pair) -> Tensor:
    """Draws random numbers, as dropout does."""
    return squared_error(model, (batch[0] + 0.1 * torch.randn_like(batch[0]) * model.training, batch[1]))


def classify(model: nn.Module, batch: Pair) -> dict[str, Any]:
    """Which of the two targets is larger; it draws random numbers, too, and says what it had as parameters."""
    assert not model.training
    torch.rand(7)
    logits = model(batch[0])
    whole = {} if any(hasattr(weight, "to_local") for weight in model.parameters()) else parameters(model)
    return {"logits": logits, "targets": batch[1].argmax(1), "error": (logits - batch[1]).square().mean(1), **whole}


def validated(**changes: Any) -> Task:
    """Its validation data have 13 samples, which no number of ranks divides."""
    return numbers(**{"loss": noisy_error, "evaluate": classify, "validation": lambda: Numbers(13), **changes})


def shared_stream() -> Task:
    """Every rank reads the same."""
    return numbers(dataset=lambda: Stream(shared=True))


def parted_stream() -> Task:
    """Every rank reads its own part."""
    return numbers(dataset=Stream)


def uneven() -> Task:
    """Two ranks that took every second sample would have 8 and 7 of them."""
    return numbers(dataset=lambda: Numbers(15))


def uneven_stream() -> Task:
    """Two ranks have 8 and 7 samples."""
    return numbers(dataset=lambda: Stream(count=15))


def too_large() -> Task:
    """Asks its device for more memory than there is."""

    def loss(model: nn.Module, batch: Pair) -> Tensor:
        return torch.zeros(2**60, device=batch[0].device)

    return numbers(loss=loss)


def boom_on_rank_1() -> Task:
    """One rank fails in its third step, while the other waits for its gradients."""
    ranks.FAILED_TIMEOUT = datetime.timedelta(seconds=1)
    calls = 0

    def loss(model: nn.Module, batch: Pair) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3 and dist.get_rank() == 1:
            raise ValueError("boom")
        return squared_error(model, batch)

    return numbers(loss=loss)


class LateNumbers(Numbers):
    """The same numbers; one rank waits for each of its own."""

    def __getitem__(self, index: int) -> Pair:
        if dist.get_rank() == 1:
            time.sleep(0.01)
        return super().__getitem__(index)


def late_data_on_rank_1() -> Task:
    """A straggler, by its loader."""
    return numbers(dataset=lambda: LateNumbers(4096))


def stack() -> nn.Module:
    """Three equal blocks, which can be compiled, recomputed, split and put into stages."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
    return nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 2))


def larger_of_two(model: nn.Module, batch: Pair) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1].argmax(1))


def any_knob(**changes: Any) -> Task:
    """For which each knob of a RunSpec can be turned, but those of experts."""
    plan = {"*.0": "colwise", "*.2": "rowwise"}
    return validated(**{"model": stack, "loss": larger_of_two, "tensor_parallel": plan, **changes})
