"""Cases whose loop a RunSpec describes. Each function returns the task, or the same one without what was planted."""

import atexit
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parts import Pictures, Vectors, big_mlp, classify, convnet, decoded, deep, jpegs, mlp, rank, sentences, wait
from torch import Tensor, nn

import workbench as wb

SGD = "sgd(lr=0.01)"


class Waiting:
    """Some samples wait for their storage."""

    def __init__(self, seconds: float, every: int = 1) -> None:
        self.seconds, self.every = seconds, every

    def __call__(self, index: int) -> None:
        if index % self.every == 0:
            wait(self.seconds)


def stored(cost: Waiting | None) -> wb.Task:
    return wb.Task(model=big_mlp, dataset=partial(Vectors, cost=cost), loss=classify, optimizer=SGD)


def slow_storage(planted: bool = True) -> wb.Task:
    return stored(Waiting(0.00025) if planted else None)


class Files:
    """Samples of 64 small files each, or of one file with the same bytes."""

    def __init__(self, pieces: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="gallery-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.pieces, size = pieces, 1024 * 64 // pieces
        self.paths = [folder / f"{index:03d}.bin" for index in range(10 * pieces)]
        for path in self.paths:
            path.write_bytes(bytes(range(64)) * (size // 64))

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        first = index % 10 * self.pieces
        content = b"".join(path.read_bytes() for path in self.paths[first : first + self.pieces])
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)[:256].float(), index % 10


def small_files(planted: bool = True) -> wb.Task:
    return wb.Task(model=big_mlp, dataset=partial(Files, 64 if planted else 1), loss=classify, optimizer=SGD)


class Photographs:
    """Pictures that are decoded when they are asked for, or were before."""

    def __init__(self, planted: bool) -> None:
        self.files = jpegs()
        self.ready = None if planted else [decoded(file) for file in self.files]

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        which = index % len(self.files)
        return self.ready[which] if self.ready else decoded(self.files[which]), index % 10


def heavy_decode(planted: bool = True) -> wb.Task:
    return wb.Task(model=convnet, dataset=partial(Photographs, planted), loss=classify, optimizer=SGD)


class Sentences:
    """Lists of tokens."""

    def __init__(self) -> None:
        self.texts = sentences(64, 480, 500)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self.texts[index % 64], index % 10


SPELLING = {token: token * 7 % 256 for token in range(256)}


def collate_in_python(samples: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    longest = 512
    rows = []
    for tokens, _ in samples:
        row = [SPELLING[token] / 255 for token in tokens]
        while len(row) < longest:
            row.append(0.0)
        smooth = [(a + b + c) / 3 for a, b, c in zip(row, [*row[1:], 0.0], [0.0, *row[:-1]], strict=True)]
        rows.append([min(1.0, max(0.0, value)) for value in smooth])
    return torch.tensor(rows), torch.tensor([label for _, label in samples])


def heavy_collate(planted: bool = True) -> wb.Task:
    model = partial(mlp, inputs=512, width=768)
    if planted:
        return wb.Task(model=model, dataset=Sentences, loss=classify, collate=collate_in_python, optimizer=SGD)
    return wb.Task(model=model, dataset=partial(Vectors, size=512), loss=classify, optimizer=SGD)


def respawned_workers() -> wb.Task:
    return wb.Task(model=big_mlp, dataset=partial(Vectors, length=8 * 32), loss=classify, optimizer=SGD)


def too_many_workers() -> wb.Task:
    model = partial(nn.Sequential, nn.AvgPool2d(4), *convnet(channels=12))
    return wb.Task(model=model, dataset=partial(Pictures, side=128), loss=classify)


def hidden_by_the_queue(planted: bool = True) -> wb.Task:
    cost = Waiting(0.0005) if planted else None  # 16 ms for a batch, longer than this model trains on it on a slow machine, too
    return wb.Task(model=mlp, dataset=partial(Vectors, cost=cost), loss=classify, optimizer=SGD)


def one_slow_sample_in_twenty(planted: bool = True) -> wb.Task:
    return stored(Waiting(0.02, every=20) if planted else None)


def tiny_batches() -> wb.Task:
    return wb.Task(model=partial(deep, layers=60, width=32), dataset=Vectors, loss=classify, optimizer=SGD)


def oversubscribed_threads() -> wb.Task:
    return wb.Task(model=mlp, dataset=Vectors, loss=classify, optimizer=SGD)


def many_tensors() -> wb.Task:
    return wb.Task(model=partial(deep, layers=250), dataset=Vectors, loss=classify)


def big_gradients() -> wb.Task:
    return wb.Task(model=partial(mlp, width=2000, inputs=1000), dataset=partial(Vectors, size=1000), loss=classify, optimizer=SGD)


def small_buckets() -> wb.Task:
    return wb.Task(model=partial(deep, layers=60, width=64), dataset=Vectors, loss=classify, optimizer=SGD)


def slow_input_on_rank_1(planted: bool = True) -> wb.Task:
    cost = Waiting(0.0004) if planted and rank() == 1 else None
    return wb.Task(model=partial(convnet, channels=24), dataset=partial(Pictures, cost=cost), loss=classify, optimizer=SGD)


def slow_compute_on_rank_1(planted: bool = True) -> wb.Task:
    twice = planted and rank() == 1

    def loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return classify(model, (torch.cat([x, x]), torch.cat([y, y])) if twice else batch)

    return wb.Task(model=partial(convnet, channels=24), dataset=Pictures, loss=loss, optimizer=SGD)


def healthy_mlp() -> wb.Task:
    return wb.Task(model=big_mlp, dataset=Vectors, loss=classify, optimizer=SGD)


def healthy_convnet() -> wb.Task:
    return wb.Task(model=convnet, dataset=Pictures, loss=classify, optimizer="sgd(lr=0.01, momentum=0.9)")


def healthy_workers() -> wb.Task:
    return stored(Waiting(0.0001))  # 12 ms for a batch of 64, of which training takes 17


def healthy_ddp() -> wb.Task:
    return wb.Task(model=partial(convnet, channels=24), dataset=Pictures, loss=classify, optimizer="sgd(lr=0.01, momentum=0.9)")
