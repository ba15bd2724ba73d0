"""Training loops with a planted bottleneck, and healthy loops that a tool may misjudge.

Each `Case` builds its loop with and without what was planted, so that the wall clock tells what it costs. Sizes follow the GPU: a plain
step takes about STEP seconds on any.
"""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_check.machine import Bench

STEP = 0.02
"""Seconds of a plain step: long enough that launching its 60 kernels (about 1 ms) is nothing beside it, short enough for hundreds."""
LAYERS = 4
MIN_SHARED_MEMORY = 2**30
"""Bytes; containers often have 64 MiB of it, and a checkpoint takes some 200."""
Loop = tuple[Callable[[Any], None], Any]
"""A step, and its loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What makes a plain step take STEP seconds here."""

    device: str
    width: int
    rows: int
    seconds: float
    """What it takes."""

    def numbers(self, rows: int = 0) -> Tensor:
        """A batch in main memory."""
        return torch.randn(rows or self.rows, self.width)

    def model(self, layers: int = LAYERS) -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(layers)]).to(self.device)


def sizes(bench: Bench) -> Sizes:
    """Find the rows of a batch with which a plain step takes STEP seconds."""
    width, rows = bench.pick(2048, 128), bench.pick(2048, 64)
    now = Sizes(device=bench.kind, width=width, rows=rows, seconds=STEP)
    for _ in range(3):  # small batches do not use the whole GPU, so the first answers are too small
        step, loader = plain(now, 6)
        seconds = bench.seconds_per_step(step, loader, at_least=0.15)
        now = Sizes(device=now.device, width=width, rows=now.rows, seconds=seconds)
        if not bench.gpu or abs(seconds / STEP - 1) < 0.15:
            break
        rows = max(256, min(1 << 17, round(now.rows * STEP / seconds / 128) * 128))
        now = Sizes(device=now.device, width=width, rows=rows, seconds=STEP)
    return now


class Batches:
    """A loader that gives the same batches again and again.

    Args:
        batches: in turn.
        count: of a pass.
        sleep: seconds before each batch, as of a disk or a network.
        work: seconds of Python before each batch, as of decoding.
        start: seconds at which each pass begins late.
    """

    def __init__(self, batches: Sequence[Tensor], count: int, *, sleep: float = 0.0, work: float = 0.0, start: float = 0.0) -> None:
        self.batches, self.count, self.sleep, self.work, self.start = batches, count, sleep, work, start

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        if self.start:
            time.sleep(self.start)
        for number in range(self.count):
            if self.sleep:
                time.sleep(self.sleep)
            if self.work:
                compute(self.work)
            yield self.batches[number % len(self.batches)]


class Prefetched:
    """A loader that copies each batch from page-locked memory on a stream of its own, while the step before computes."""

    def __init__(self, batch: Tensor, count: int, device: str) -> None:
        self.batch, self.count, self.device = batch, count, device

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        if self.device != "cuda":
            yield from [self.batch] * self.count
            return
        stream = torch.cuda.Stream()
        following = self._copy(stream)
        for number in range(self.count):
            torch.cuda.current_stream().wait_stream(stream)
            batch = following
            batch.record_stream(torch.cuda.current_stream())
            if number + 1 < self.count:
                following = self._copy(stream)
            yield batch

    def _copy(self, stream: Any) -> Tensor:
        with torch.cuda.stream(stream):
            return self.batch.to(self.device, non_blocking=True)


def compute(seconds: float) -> None:
    """Keep Python busy, as decoding or augmentation does."""
    end, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        total += sum(range(200))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused, the fastest, so that it is no bottleneck of its own."""
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


def resident(sizes: Sizes) -> Tensor:
    """A batch on the device."""
    return sizes.numbers().to(sizes.device)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    item: int = 0,
    chunks: int = 1,
    host: Callable[[], None] | None = None,
    after: Callable[[int], None] | None = None,
) -> Callable[[Tensor], None]:
    """A step.

    Args:
        model: trained.
        optimizer: of it.
        item: the loss is read in each so many steps; 0 = never.
        chunks: micro-batches of a step, whose gradients add up.
        host: called between backward and optimizer.
        after: called at the end with the number of steps so far.
    """
    device = next(model.parameters()).device
    done = 0

    def step(batch: Tensor) -> None:
        nonlocal done
        done += 1
        x = batch.to(device, non_blocking=True)
        optimizer.zero_grad()
        for part in x.chunk(chunks):
            loss = model(part).square().mean() / chunks
            loss.backward()
        if host is not None:
            host()
        optimizer.step()
        if item and done % item == 0:
            loss.item()
        if after is not None:
            after(done)

    return step


def plain(sizes: Sizes, count: int = 60, **options: Any) -> Loop:
    """A loop with batches on the device, in which the GPU computes all the time."""
    model = sizes.model()
    return train(model, adamw(model), **options), Batches([resident(sizes)], count)


# The cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loop, what was planted in it, and what is right to say of it."""

    name: str
    build: Callable[[Sizes, bool], Loop]
    """Sizes, and with what was planted? → the loop."""
    answers: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"compute-bound": ()})
    """Right verdicts where what was planted costs much, and what the cause of each may begin with; () = any."""
    otherwise: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"compute-bound": ()})
    """The same where the wall clock shows that it costs nothing."""
    planted: bool = True
    """False = a healthy loop: there is nothing to take away."""
    pauses: bool = False
    """Does it wait for files now and then, whose time varies?"""
    unproved: bool = False
    """True: no loop without what was planted can be built to compare with."""


def _plain(item: int) -> Callable[[Sizes, bool], Loop]:
    return lambda sizes, _: plain(sizes, max(60, item), item=item)


def _prefetched(sizes: Sizes, _: bool) -> Loop:
    model, batch = sizes.model(), sizes.numbers()
    return train(model, adamw(model), item=1), Prefetched(batch.pin_memory() if sizes.device == "cuda" else batch, 60, sizes.device)


def _accumulating(sizes: Sizes, _: bool) -> Loop:
    return plain(sizes, 60, item=10, chunks=4)


def _uneven(sizes: Sizes, _: bool) -> Loop:
    """Batches of twelve lengths, from 0.3 to 1.7 of the usual."""
    whole = sizes.numbers(int(1.7 * sizes.rows) + 1).to(sizes.device)
    batches = [whole[: int(sizes.rows * (0.3 + 1.4 * place / 11))] for place in range(12)]
    random.Random(7).shuffle(batches)
    model = sizes.model()
    return train(model, adamw(model), item=10), Batches(batches, 72)


def _hidden_loader(sizes: Sizes, planted: bool) -> Loop:
    step, loader = plain(sizes, item=25)
    loader.sleep = 0.4 * sizes.seconds * planted
    return step, loader


def _short_passes(sizes: Sizes, planted: bool) -> Loop:
    step, loader = plain(sizes, 12, item=10)
    loader.start = 2.5 * sizes.seconds * planted
    return step, loader


def _slow_loader(sizes: Sizes, planted: bool) -> Loop:
    step, loader = plain(sizes, 30, item=10)
    loader.sleep = 2 * sizes.seconds * planted
    return step, loader


def _computing_loader(sizes: Sizes, planted: bool) -> Loop:
    step, loader = plain(sizes, 30, item=10)
    loader.work = 2 * sizes.seconds * planted
    return step, loader


def _sleeping(sizes: Sizes, planted: bool) -> Loop:
    seconds = 2 * sizes.seconds
    return plain(sizes, 30, item=10, host=(lambda: time.sleep(seconds)) if planted else None)


def _python(sizes: Sizes, planted: bool) -> Loop:
    seconds = 2 * sizes.seconds
    return plain(sizes, 30, item=10, host=(lambda: compute(seconds)) if planted else None)


def _small_kernels(sizes: Sizes, _: bool) -> Loop:
    width, rows = 128, 256
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(60)]).to(sizes.device)
    return train(model, adamw(model), item=10), Batches([torch.randn(rows, width).to(sizes.device)], 150)


class Watched(nn.Module):
    """Layers whose outputs are looked at: three figures of each, read one by one, or left on the device."""

    def __init__(self, width: int, depth: int, read: bool) -> None:
        super().__init__()
        self.layers, self.read = nn.ModuleList(nn.Linear(width, width) for _ in range(depth)), read

    def forward(self, x: Tensor) -> Tensor:
        numbers: list[Any] = []
        for layer in self.layers:
            x = layer(x)
            seen = x.detach()
            figures = (seen.abs().amax(), seen.mean(), seen.square().mean())
            numbers += [figure.item() for figure in figures] if self.read else figures
        self.seen = len(numbers)
        return x


def _items(sizes: Sizes, planted: bool) -> Loop:
    width = sizes.width // 2
    model = Watched(width, 80, planted).to(sizes.device)
    return train(model, adamw(model), item=10), Batches([torch.randn(512, width).to(sizes.device)], 100)


def _pageable(sizes: Sizes, planted: bool) -> Loop:
    model, batch = sizes.model(1), sizes.numbers()
    return train(model, adamw(model), item=10), Batches([batch if planted else batch.to(sizes.device)], 60)


class Pieces(nn.Module):
    """Two square layers whose weights are kept in many narrow pieces."""

    def __init__(self, width: int, pieces: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(nn.Parameter(torch.randn(width, width // pieces) / width**0.5) for _ in range(2 * pieces))

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.pieces) // 2
        return x @ torch.cat(list(self.pieces[:half]), 1) @ torch.cat(list(self.pieces[half:]), 1)


def _many_tensors(sizes: Sizes, planted: bool) -> Loop:
    model = Pieces(sizes.width, min(256, sizes.width // 8)).to(sizes.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False) if planted else adamw(model)
    return train(model, optimizer, item=10), Batches([resident(sizes)], 60)


def checkpoint_file() -> Path:
    """Where a loop saves its checkpoints: in memory where that is possible, so that a slow disk is not measured."""
    folder = Path("/dev/shm")
    in_memory = os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > MIN_SHARED_MEMORY
    return (folder if in_memory else Path(os.environ.get("GPU_CHECK_SCRATCH", "."))) / f"gpu-check-{os.getpid()}.pt"


def _checkpoints(sizes: Sizes, planted: bool) -> Loop:
    model = sizes.model()
    optimizer, path = adamw(model), checkpoint_file()

    def save_checkpoint(done: int) -> None:
        if done % 10 == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    return train(model, optimizer, item=10, after=save_checkpoint if planted else None), Batches([resident(sizes)], 60)


INPUT, HOST = "input-bound", "host-bound"
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(name="healthy, loss never read", build=_plain(0), planted=False),
        Case(name="healthy, loss read each step", build=_plain(1), planted=False),
        Case(name="healthy, loss read each 10 steps", build=_plain(10), planted=False),
        Case(name="healthy, loss read each 50 steps", build=_plain(50), planted=False),
        Case(name="healthy, loss read each 100 steps", build=_plain(100), planted=False),
        Case(name="healthy, pinned copies prefetched", build=_prefetched, planted=False),
        Case(name="healthy, gradients accumulated", build=_accumulating, planted=False),
        Case(name="healthy, twelve lengths", build=_uneven, planted=False),
        Case(name="loader hidden behind the step", build=_hidden_loader, answers={INPUT: ()}),
        Case(name="short passes that begin late", build=_short_passes, answers={INPUT: ()}),
        Case(name="loader sleeps", build=_slow_loader, answers={INPUT: ("storage",)}),
        Case(name="loader computes", build=_computing_loader, answers={INPUT: ("dataset code", "loader", "transport")}),
        Case(name="host sleeps in the step", build=_sleeping, answers={HOST: ("sleeping or I/O",)}),
        Case(name="Python works in the step", build=_python, answers={HOST: ("python",)}),
        Case(
            name="many small kernels", build=_small_kernels, answers={HOST: ("launches",), "compute-bound": ("small batch",)}, unproved=True
        ),
        Case(name=".item() after each layer", build=_items, answers={HOST: ("syncs",)}, otherwise={"compute-bound": (), HOST: ()}),
        Case(name="large pageable batches", build=_pageable, answers={"transfer-bound": ("pageable copy",)}),
        Case(name="optimizer loops over many tensors", build=_many_tensors, answers={"optimizer-bound": ()}),
        Case(name="checkpoint each 10 steps", build=_checkpoints, answers={"stalled": ("checkpoint",)}, pauses=True),
    )
}
