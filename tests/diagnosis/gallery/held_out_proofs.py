"""Cases that test the ranges of predicted gains, different in shape from the gallery's: no formula and no range was fitted to them."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import COMPUTE, HOST, INPUT, Case
from parts import Loop, Vectors, classify, mlp, sentences
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import workbench as wb

SGD = "sgd(lr=0.01)"


class Shards(IterableDataset[Any]):
    """A remote stream, split by worker: each shard of sixteen samples takes a while to arrive, each sample a little to unpack."""

    def __init__(self, planted: bool) -> None:
        self.latency, self.bank = 0.03 * planted, np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, workers = (info.id, info.num_workers) if info else (0, 1)
        for shard in range(first, 5_000, workers):
            time.sleep(self.latency)
            for sample in range(16):
                spectrum = np.abs(np.fft.rfft(self.bank[(shard + sample) % 64]))[:384]
                yield torch.from_numpy(spectrum.astype(np.float32)), sample % 10


def remote_shards(planted: bool = True) -> wb.Task:
    return wb.Task(model=partial(mlp, width=512, inputs=384), dataset=partial(Shards, planted), loss=classify, optimizer=SGD)


class Reviews:
    """Texts as strings."""

    def __init__(self) -> None:
        self.texts = [" ".join(f"w{token}" for token in tokens) for tokens in sentences(64, 150, 250)]

    def __len__(self) -> int:
        return 50_000

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.texts[index % 64], index % 10


VOCABULARY = {f"w{token}": token for token in range(256)}


def tokenise(samples: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
    rows = [[VOCABULARY.get(word.strip().lower(), 0) for word in text.split()] for text, _ in samples]
    length = max(map(len, rows))
    return torch.tensor([row + [0] * (length - len(row)) for row in rows]), torch.tensor([label for _, label in samples])


class Tagger(nn.Module):
    """An embedding, a GRU and a classifier."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.table, self.memory, self.out = nn.Embedding(256, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.out(self.memory(self.table(tokens))[0].mean(1))
        return hidden


def tokenised_in_one_worker() -> wb.Task:
    return wb.Task(model=Tagger, dataset=Reviews, loss=classify, collate=tokenise, optimizer="adam(lr=0.001)")


class Mixed:
    """Every third sample waits for a server, the others are computed."""

    def __init__(self, planted: bool) -> None:
        self.planted, self.noise = planted, np.random.default_rng(0).normal(size=(32, 96, 96))

    def __len__(self) -> int:
        return 30_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.noise[index % 32]
        if self.planted and index % 3 == 0:
            time.sleep(0.004)
        elif self.planted:
            picture = np.sort(picture, axis=1)
        return torch.from_numpy(picture[:16, :16].astype(np.float32).ravel()), index % 10


def half_waiting_half_computing(planted: bool = True) -> wb.Task:
    return wb.Task(model=partial(mlp, width=640), dataset=partial(Mixed, planted), loss=classify, optimizer=SGD)


def short_epochs() -> wb.Task:
    return wb.Task(model=partial(mlp, width=896), dataset=partial(Vectors, length=14 * 48), loss=classify, optimizer="adam(lr=0.001)")


def gradients_of_a_recommender() -> wb.Task:
    return wb.Task(model=partial(mlp, width=900, layers=5), dataset=Vectors, loss=classify, optimizer="adam(lr=0.001)")


class Towers(nn.Module):
    """Many small networks beside each other, on slices of the input."""

    def __init__(self, count: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.LayerNorm(24)) for _ in range(count))
        self.out = nn.Linear(24 * count, 10)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.split(8, 1)
        out: Tensor = self.out(torch.cat([tower(piece) for tower, piece in zip(self.towers, pieces, strict=True)], 1))
        return out


def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, clip: float = 0.0) -> Loop:
    """A loop without anything special."""

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        classify(model, batch).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return Loop(step=step, loader=loader, model=model, optimizer=optimizer)


def towers_with_adam(planted: bool = True) -> Loop:
    model = Towers()
    optimizer = torch.optim.Adam(model.parameters(), 0.001, foreach=False if planted else None, fused=None if planted else True)
    return ordinary(model, optimizer, DataLoader(Vectors(), batch_size=24), clip=1.0)


def segmentation(planted: bool = True) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.SiLU()),
        *(nn.ConvTranspose2d(32, 16, 2, stride=2), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 10, 1)),
    )
    optimizer = torch.optim.NAdam(model.parameters(), 0.001)
    batches = [(torch.randn(4, 3, 72, 72), torch.randint(0, 10, (4, 72, 72))) for _ in range(24)]
    return ordinary(model, optimizer, batches)


class Encoder(nn.Module):
    """A small transformer on vectors that are cut into sixteen tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(96, 4, 256, dropout=0.1, batch_first=True)
        self.enter, self.body, self.out = nn.Linear(16, 96), nn.TransformerEncoder(layer, 3), nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.body(self.enter(x.unflatten(1, (16, 16)))).mean(1))
        return out


def encoder_with_dropout(planted: bool = True) -> Loop:
    model = Encoder()
    return ordinary(model, torch.optim.AdamW(model.parameters(), 0.001), DataLoader(Vectors(), batch_size=20), clip=0.5)


def lstm_by_hand(planted: bool = True) -> Loop:
    """A cell that is called for each of forty positions."""
    torch.manual_seed(0)
    cell, out = nn.LSTMCell(12, 64), nn.Linear(64, 10)
    model = nn.ModuleDict({"cell": cell, "out": out})
    optimizer = torch.optim.RMSprop(model.parameters(), 0.001)

    def step(batch: Any) -> None:
        x, y = batch
        state = (x.new_zeros(len(x), 64), x.new_zeros(len(x), 64))
        for position in x[:, :240].unflatten(1, (20, 12)).unbind(1):
            state = cell(position, state)
        optimizer.zero_grad()
        nn.functional.cross_entropy(out(state[0]), y).backward()
        optimizer.step()

    return Loop(step=step, loader=DataLoader(Vectors(), batch_size=12), model=model, optimizer=optimizer)


HERE = Path(__file__)
_CASES = (
    Case(
        name="remote_shards",
        plants="each shard of a remote stream is waited for",
        answers={INPUT: ()},
        spec={"micro_batch": 16},
        file=HERE,
    ),
    Case(
        name="tokenised_in_one_worker",
        plants="one worker splits texts into words in Python",
        answers={INPUT: (), COMPUTE: (), HOST: ()},
        spec={"micro_batch": 16, "num_workers": 1},
        removed={"num_workers": 2},
        file=HERE,
    ),
    Case(
        name="half_waiting_half_computing",
        plants="some samples wait for a server, the others are sorted",
        answers={INPUT: ()},
        spec={"micro_batch": 18},
        file=HERE,
    ),
    Case(
        name="short_epochs",
        plants="three workers start for every epoch of fourteen steps",
        answers={INPUT: ("worker start-up",)},
        spec={"micro_batch": 48, "num_workers": 3},
        removed={"persistent_workers": True},
        period=14,
        file=HERE,
    ),
    Case(
        name="gradients_of_a_recommender",
        plants="two ranks reduce three million gradients after batches of eight",
        answers={"communication-bound": (), "optimizer-bound": ()},
        spec={"micro_batch": 8},
        removed={},
        ranks=2,
        file=HERE,
    ),
    Case(
        name="towers_with_adam", plants="Adam without foreach over 130 small tensors", answers={"optimizer-bound": (), HOST: ()}, file=HERE
    ),
    Case(name="segmentation", plants="", answers={COMPUTE: ()}, file=HERE),
    Case(name="encoder_with_dropout", plants="", answers={COMPUTE: (), HOST: ()}, file=HERE),
    Case(name="lstm_by_hand", plants="", answers={COMPUTE: (), HOST: (), "optimizer-bound": ()}, file=HERE),
)
HELD_OUT_PROOFS = {case.name: case for case in _CASES}
