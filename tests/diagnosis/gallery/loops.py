"""Cases with a loop of their own, as a user would hand it to `wb.diagnose(step, loader)`. `planted=False`: without what was planted."""

import gc
import io
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from parts import Loop, Vectors, classify, convnet, mlp, rank, sentences, wait, wrap
from torch import Tensor, nn
from torch.utils.data import DataLoader

from workbench.train.models import Gpt


def vectors(batch: int = 32, **more: Any) -> "DataLoader[Any]":
    return DataLoader(Vectors(**more), batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]


# --- input


class Augmented:
    """Batches of pictures, cropped, mirrored and made brighter by numpy when they are asked for."""

    def __init__(self, planted: bool) -> None:
        chance = np.random.default_rng(0)
        self.pictures, self.planted = chance.integers(0, 256, (256, 72, 72, 3), dtype=np.uint8), planted
        self.ready = self.batch(np.random.default_rng(1))

    def batch(self, chance: np.random.Generator) -> tuple[Tensor, Tensor]:
        pictures = []
        for _ in range(32):
            x, y = chance.integers(0, 8, 2)
            crop = self.pictures[chance.integers(256)][x : x + 64, y : y + 64].astype(np.float32) / 255
            crop = crop[:, :: -1 if chance.random() < 0.5 else 1]
            crop = np.clip(
                (crop - crop.mean((0, 1))) * chance.uniform(0.8, 1.2) + crop.mean((0, 1)) + chance.normal(0, 0.02, crop.shape), 0, 1
            )
            pictures.append(crop[::2, ::2].transpose(2, 0, 1).astype(np.float32))
        return torch.from_numpy(np.stack(pictures)), torch.arange(32) % 10

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        chance = np.random.default_rng(2)
        for _ in range(200):
            yield self.batch(chance) if self.planted else self.ready


def own_iterable(planted: bool = True) -> Loop:
    model = convnet(channels=24)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()

    return Loop(step=step, loader=Augmented(planted), model=model, optimizer=optimizer, named=False)


def heavy_transfer(planted: bool = True) -> Loop:
    model = nn.Sequential(nn.AvgPool1d(64), nn.Flatten(), nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    size = 256 * 64 if planted else 256
    batches = [(torch.randn(768, 1, size), torch.arange(768) % 10) for _ in range(8)]

    def step(batch: Any) -> None:
        x, y = (tensor.cuda() for tensor in batch)
        optimizer.zero_grad()
        F.cross_entropy(model(x if planted else x.repeat(1, 1, 64)), y).backward()
        optimizer.step()

    return Loop(step=step, loader=batches, model=model, optimizer=optimizer)


# --- host


def item_in_a_loop(planted: bool = True) -> Loop:
    model = mlp(width=160)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    history: list[tuple[float, bool]] = []

    def step(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        out = model(x)
        losses = F.cross_entropy(out, y, reduction="none")
        losses.mean().backward()
        optimizer.step()
        if planted:
            history[:] = [(losses[i].item(), (out[i].argmax() == y[i]).item()) for i in range(len(x))]

    return Loop(step=step, loader=vectors(256), model=model, optimizer=optimizer)


def printing(planted: bool = True) -> Loop:
    model = mlp(width=768)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    screen = open(os.devnull, "w")  # noqa: SIM115  (as long as the loop)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        if planted:
            print("loss", loss, file=screen, flush=True)
            for name, weight in model.named_parameters():
                print(name, weight.grad, file=screen, flush=True)

    return Loop(step=step, loader=vectors(), model=model, optimizer=optimizer)


def distance(a: list[int], b: list[int]) -> int:
    """Edits from one list to another (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def python_metric(planted: bool = True) -> Loop:
    model = mlp(width=768)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    truth, texts = sentences(15, 60, 70), sentences(15, 62, 72)

    def step(batch: Any) -> int:
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
        return sum(map(distance, truth, texts)) if planted else 0

    return Loop(step=step, loader=vectors(), model=model, optimizer=optimizer, named=False)


class Asking(nn.Module):
    """Asks somebody far away before it computes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.body, self.seconds = mlp(width=768), seconds

    def forward(self, x: Tensor) -> Tensor:
        wait(self.seconds)
        out: Tensor = self.body(x)
        return out


def sleeping_forward(planted: bool = True) -> Loop:
    model = Asking(0.008 if planted else 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()

    return Loop(step=step, loader=vectors(), model=model, optimizer=optimizer)


# --- straggler


def pauses_of_rank_1(planted: bool = True) -> Loop:
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    count = 0

    def step(batch: Any) -> None:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        if planted and rank() == 1 and count % 12 == 7:
            wait(0.12)
        classify(model, batch).backward()
        optimizer.step()

    return Loop(step=step, loader=vectors(), model=model, optimizer=optimizer)


# --- stalled


def checkpoint_stall(planted: bool = True) -> Loop:
    model = mlp(width=768)
    model.register_buffer("table", torch.randn(30_000_000))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    memory = Path("/dev/shm")  # a disk would be fast on one machine and slow on the next
    folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
    count = 0

    def save_checkpoint() -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder.name) / "last.pt")

    def step(batch: Any) -> None:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
        if planted and count % 20 == 0:
            save_checkpoint()

    return Loop(step=step, loader=vectors(), model=model, optimizer=optimizer)


def evaluation_stall(planted: bool = True) -> Loop:
    model = mlp(width=768)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    validation = [(torch.randn(128, 256), torch.arange(128) % 10) for _ in range(20)]
    count = 0

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        right = sum((model(x).argmax(1) == y).sum() for x, y in validation)
        model.train()
        return float(right) / (128 * len(validation))

    def step(batch: Any) -> None:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
        if planted and count % 25 == 0:
            evaluate()

    return Loop(step=step, loader=vectors(), model=model, optimizer=optimizer)


def logging_stall(planted: bool = True) -> Loop:
    model = mlp(width=768)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    log = logging.getLogger("gallery")
    log.propagate = False
    log.setLevel(logging.INFO)
    log.handlers = [logging.StreamHandler(io.StringIO())]
    count = 0

    def report() -> None:
        for name, weight in model.named_parameters():
            for kind, values in (("weight", weight), ("gradient", weight.grad)):
                assert values is not None
                counts, edges = np.histogram(values.detach().numpy(), bins="fd")
                log.info("%s %s %s %s", name, kind, counts.tolist(), edges.tolist())

    def step(batch: Any) -> None:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
        if planted and count % 30 == 0:
            report()

    return Loop(step=step, loader=vectors(), model=model, optimizer=optimizer)


def gc_collect(planted: bool = True) -> Loop:
    model = mlp(width=768)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    index = [{"path": f"{i}.jpg", "boxes": [i]} for i in range(60_000)]
    count = 0

    def step(batch: Any) -> int:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
        if planted and count % 16 == 0:
            gc.collect()
        return len(index)

    return Loop(step=step, loader=vectors(), model=model, optimizer=optimizer, named=False)


def gc_of_a_cache(planted: bool = True) -> Loop:
    model = mlp(width=768)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    known: list[Any] = [[i] if planted else i for i in range(60_000)]  # the collector has no business with bare numbers
    cache: list[Any] = []

    def step(batch: Any) -> int:
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
        if len(cache) > 60_000:
            cache.clear()
        cache.extend([i] if planted else i for i in range(3_000))
        return len(known)

    return Loop(step=step, loader=vectors(), model=model, optimizer=optimizer)


# --- compute


class Texts:
    """Batches of token sequences, padded to the longest one, with a mask; `even`: the same tokens, in sequences of one length."""

    def __init__(self, lengths: list[list[int]]) -> None:
        chance = torch.Generator().manual_seed(0)
        self.batches = []
        for row in lengths:
            mask = torch.arange(max(row)) < torch.tensor(row)[:, None]
            tokens = torch.randint(1, 256, mask.shape, generator=chance) * mask
            self.batches.append({"input_ids": tokens, "attention_mask": mask.long()})

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from self.batches


def reader(texts: Texts, width: int = 64) -> Loop:
    """A small GPT on texts."""
    torch.manual_seed(0)
    model = Gpt(length=160, width=width, layers=2, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.001)

    def step(batch: Any) -> None:
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        optimizer.zero_grad()
        losses = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        (losses * mask[:, 1:].flatten()).sum().div(mask.sum()).backward()
        optimizer.step()

    return Loop(step=step, loader=texts, model=model, optimizer=optimizer)


def padding_waste(planted: bool = True) -> Loop:
    chance = np.random.default_rng(0)
    rows = [[128, *chance.integers(30, 70, 7).tolist()] for _ in range(60)]
    return reader(Texts(rows if planted else [[round(sum(row) / 8)] * 8 for row in rows]))


# --- healthy


def healthy_gpt(planted: bool = True) -> Loop:
    return reader(Texts([[128] * 8] * 60))


def healthy_lengths(planted: bool = True) -> Loop:
    chance = np.random.default_rng(0)
    return reader(Texts([[int(chance.integers(40, 160))] * 8 for _ in range(60)]))


def healthy_adamw(planted: bool = True) -> Loop:
    model = mlp(width=768)
    optimizer = torch.optim.AdamW(model.parameters(), 0.001, fused=True)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()

    return Loop(step=step, loader=vectors(128), model=model, optimizer=optimizer)


def healthy_now_and_then(planted: bool = True) -> Loop:
    """Two kinds of step take turns, as with a generator and its critic; there is nothing to be had."""
    model, critic = mlp(), mlp(width=768)
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], 0.01)
    count = 0

    def step(batch: Any) -> None:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        classify(model, batch).backward()
        if count % 3 == 0:
            classify(critic, batch).backward()
        optimizer.step()

    return Loop(step=step, loader=vectors(64), model=model, optimizer=optimizer)
