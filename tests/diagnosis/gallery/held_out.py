"""More cases, kept apart: no rule and no threshold was chosen by looking at them."""

import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import COMPUTE, HOST, INPUT, STALLED, Case
from loops import Texts, reader, vectors
from parts import Loop, Pictures, Vectors, big_mlp, classify, convnet, decoded, deep, jpegs, mlp, rank, wait, wrap
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

import workbench as wb

SGD = "sgd(lr=0.01)"


class Crumbs(Vectors):
    """Samples of 48 small tensors each."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return [x[i * 5 : i * 5 + 5].clone() for i in range(48)], y


def swept_together(model: nn.Module, batch: list[Any]) -> Tensor:
    x = torch.stack([torch.cat(parts) for parts, _ in batch])
    return classify(model, (x, torch.tensor([y for _, y in batch])))


def small_tensors_through_a_queue() -> wb.Task:
    return wb.Task(model=partial(mlp, width=768, inputs=240), dataset=Crumbs, loss=swept_together, optimizer=SGD, collate=list)


class Zipped(IterableDataset[Any]):
    """A compressed stream of pictures: each worker has every n-th of them."""

    def __init__(self, planted: bool) -> None:
        chance = np.random.default_rng(0)
        raw = [chance.integers(0, 12, (3, 256, 256), dtype=np.uint8).tobytes() for _ in range(8)]
        self.packed, self.planted = [zlib.compress(one, 6) for one in raw], planted
        self.ready = [self.unpacked(i) for i in range(8)]

    def unpacked(self, index: int) -> Tensor:
        raw = np.frombuffer(zlib.decompress(self.packed[index % 8]), dtype=np.uint8).reshape(3, 256, 256)
        return torch.from_numpy(raw[:, ::8, ::8].astype(np.float32) / 12)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, all_ = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, 100_000, all_):
            yield self.unpacked(index) if self.planted else self.ready[index % 8], index % 10


def zipped_stream(planted: bool = True) -> wb.Task:
    return wb.Task(model=partial(convnet, channels=24), dataset=partial(Zipped, planted), loss=classify, optimizer=SGD)


def once(planted: bool = True) -> Loop:
    model = mlp(width=768)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(10_000):
            if planted:
                wait(0.006)
            yield torch.randn(32, 256), torch.arange(32) % 10

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()

    return Loop(step=step, loader=stream(), model=model, optimizer=optimizer)


def clipping_by_hand(planted: bool = True) -> Loop:
    model = deep(layers=50, width=96)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        classify(model, batch).backward()
        if planted:
            for weight in model.parameters():
                assert weight.grad is not None
                norm, largest = weight.grad.norm().item(), weight.grad.abs().max().item()
                if norm > 1 or largest > 0.5:
                    weight.grad.mul_(1 / norm)
                if torch.isnan(weight.grad).any().item() or torch.isinf(weight.grad).any().item():
                    weight.grad.zero_()
        optimizer.step()

    return Loop(step=step, loader=vectors(96), model=model, optimizer=optimizer, named=False)


def eight_threads(planted: bool = True) -> Loop:
    torch.set_num_threads(8 if planted else 1)
    model = mlp(width=640)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()

    return Loop(step=step, loader=vectors(32), model=model, optimizer=optimizer, threads=8 if planted else 1)


def large_table(planted: bool = True) -> Loop:
    model = nn.Sequential(nn.EmbeddingBag(40_000, 64), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 0.001)

    def step(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        classify(model, ((x.abs() * 9000).long() % 40_000, y)).backward()
        if planted:
            optimizer.step()

    return Loop(step=step, loader=vectors(16, size=32), model=model, optimizer=optimizer)


def mining_stall(planted: bool = True) -> Loop:
    model = mlp(width=768)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scores = np.random.default_rng(0).random(60_000).tolist()
    state = {"step": 0, "hardest": 0.0}

    def rank_the_hardest() -> float:
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        return sum(scores[i] * (0.5 + 0.5 / (1 + place)) for place, i in enumerate(order))

    def step(batch: Any) -> None:
        state["step"] += 1
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
        if planted and state["step"] % 13 == 0:
            state["hardest"] = rank_the_hardest()

    return Loop(step=step, loader=vectors(), model=model, optimizer=optimizer)


def long_texts_on_rank_1(planted: bool = True) -> Loop:
    loop = reader(Texts([[160 if planted and rank() == 1 else 70] * 8] * 40), width=48)
    model = loop.model = wrap(loop.model)
    optimizer = loop.optimizer

    def step(batch: Any) -> None:
        tokens = batch["input_ids"]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    loop.step = step
    return loop


def reduced_too_often() -> wb.Task:
    return wb.Task(model=partial(mlp, width=96, layers=3), dataset=Vectors, loss=classify, optimizer=SGD)


def healthy_accumulation() -> wb.Task:
    return wb.Task(model=big_mlp, dataset=Vectors, loss=classify)


class Thumbnails(Pictures):
    """Small JPEG pictures, decoded when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.files = jpegs(side=128)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return decoded(self.files[index % len(self.files)]), index % 10


def healthy_busy_worker() -> wb.Task:
    return wb.Task(model=partial(convnet, channels=40), dataset=Thumbnails, loss=classify, optimizer=SGD)


def healthy_large_steps(planted: bool = True) -> Loop:
    model = convnet(channels=48)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    batches = [(torch.randn(320, 3, 32, 32), torch.arange(320) % 10) for _ in range(6)]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()

    return Loop(step=step, loader=batches, model=model, optimizer=optimizer)


HERE = Path(__file__)
_CASES = (
    Case(
        name="small_tensors_through_a_queue",
        plants="each sample comes from its worker in 48 small tensors",
        answers={INPUT: ("transport", "oversubscribed")},
        spec={"micro_batch": 16, "num_workers": 1},
        removed={"num_workers": 0},
        file=HERE,
    ),
    Case(
        name="zipped_stream",
        plants="one worker unpacks a compressed stream, too slowly",
        answers={INPUT: ("dataset code",)},
        spec={"micro_batch": 16, "num_workers": 1},
        file=HERE,
    ),
    Case(name="once", plants="a generator waits for its source", answers={INPUT: ()}, file=HERE),
    Case(name="clipping_by_hand", plants="gradients are clipped tensor by tensor", answers={HOST: ()}, file=HERE),
    Case(name="eight_threads", plants="eight threads on two cores", answers={HOST: ("oversubscribed",)}, file=HERE),
    Case(name="large_table", plants="Adam updates all of a large table for a few rows", answers={"optimizer-bound": ()}, file=HERE),
    Case(name="mining_stall", plants="samples are ranked every 13 steps", answers={STALLED: ()}, period=13, file=HERE),
    Case(
        name="long_texts_on_rank_1",
        plants="rank 1 has the long texts",
        answers={"straggler": ("slow rank 1: compute",)},
        ranks=2,
        file=HERE,
    ),
    Case(
        name="reduced_too_often",
        plants="a small model is reduced after every millisecond of compute",
        answers={"communication-bound": ("latency",)},
        spec={"micro_batch": 64},
        removed={},
        ranks=2,
        file=HERE,
    ),
    Case(
        name="healthy_accumulation",
        plants="",
        answers={COMPUTE: ()},
        spec={"micro_batch": 64, "accumulation": 4},
        file=HERE,
    ),
    Case(name="healthy_busy_worker", plants="", answers={COMPUTE: ()}, spec={"micro_batch": 16, "num_workers": 1}, file=HERE),
    Case(name="healthy_large_steps", plants="", answers={COMPUTE: ()}, file=HERE),
)
HELD_OUT = {case.name: case for case in _CASES}
