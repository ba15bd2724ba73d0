"""Measures what a checksum costs a checkpoint, against torch.save and torch.load alone, and what a checkpoint costs the training beside it.

The training is the sample GPT. Blocks of steps are interleaved: without a checkpoint, with one by torch.save in the loop, and with one as
the workbench writes it, by a thread. The price is the time of a block beyond that of a block without: the stall, in which the loop waits,
and what the steps beside it take longer. The two are printed apart.

python benchmarks/checkpoints.py [MEGABYTES [FOLDER]]
"""

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.runs.spec import RunSpec
from workbench.runs.task import resolve
from workbench.train import checkpoint_file
from workbench.train.checkpoints import Checkpoints
from workbench.train.models import Gpt
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer

ROUNDS = 11


def saved_by_torch(state: dict[str, Any], path: Path) -> None:
    """As a checkpoint is saved, but without a checksum."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def prices(folder: Path, blocks: int = 5, steps: int = 12) -> None:
    """Print what a checkpoint costs a training of the sample GPT, made wider, in seconds and as a share of the time at one a minute."""
    spec = RunSpec(task="text-gpt", device="cpu", micro_batch=4, optimizer="adamw", checkpoint_every=1)
    ranks = Ranks.join(spec)
    try:
        prices_of(spec, ranks, folder, blocks, steps)
    finally:
        ranks.leave()


def prices_of(spec: RunSpec, ranks: Ranks, folder: Path, blocks: int, steps: int) -> None:
    """The same, in a process group."""
    task = dataclasses.replace(resolve(spec.task), model=lambda: Gpt(length=64, width=384, layers=8, heads=6))
    trainer = Trainer(spec, task, ranks)
    checkpoints, batches = Checkpoints(folder, ranks, 1), trainer.batches()
    trainer.step([next(batches)])
    number, stalls = 0, dict[str, list[float]]()

    def block(kind: str) -> float:
        nonlocal number
        begin = time.perf_counter()
        for step in range(steps):
            trainer.step([next(batches)])
            if not step:
                number += 1
                before = time.perf_counter()
                if kind == "torch.save":
                    saved_by_torch(trainer.state(), folder / "plain.pt")
                elif kind == "a thread":
                    checkpoints.write(number, trainer, wait=False)
                stalls.setdefault(kind, []).append(time.perf_counter() - before)
        seconds = time.perf_counter() - begin
        checkpoints.finish()
        return seconds

    rounds = [{kind: block(kind) for kind in ("none", "torch.save", "a thread")} for _ in range(blocks)]
    size = (folder / "plain.pt").stat().st_size
    step_s = statistics.median(each["none"] for each in rounds) / steps
    print(f"GPT, a checkpoint of {size / 1e6:.0f} MB in {steps} steps of {step_s:.3f} s")
    for kind in ("torch.save", "a thread"):
        price, slower = price_of(rounds, stalls[kind], kind)
        stall = statistics.median(stalls[kind])
        print(f"by {kind}: stall {stall:.3f} s, slower steps {slower:.3f} s, price {price:.3f} s, {price / 60:.2%} at one a minute")


def price_of(rounds: Sequence[Mapping[str, float]], stalls: Sequence[float], kind: str) -> tuple[float, float]:
    """The price of a checkpoint, and that without its stall: what the neighbouring steps take longer. Medians over rounds, in seconds.

    Args:
        rounds: seconds of a block of steps, by kind of checkpoint.
        stalls: of the checkpoint in each round, in seconds.
        kind: of checkpoint.
    """
    prices = [each[kind] - each["none"] for each in rounds]
    return statistics.median(prices), statistics.median(price - stall for price, stall in zip(prices, stalls, strict=True))


def main() -> None:
    """Print the ratios and the prices."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    weights = {f"w{i}": torch.randn(megabytes * 1_000_000 // 64) for i in range(16)}
    state = {"step": 1, "module": weights, "optimizer": {}, "scheduler": {}, "scaler": {}}
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        plain, summed = Path(folder, "plain.pt"), Path(folder, "summed.pt")
        cpu = torch.device("cpu")
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "save": (lambda: saved_by_torch(state, plain), lambda: checkpoint_file.save(state, summed)),
            "load": (lambda: torch.load(plain, weights_only=True), lambda: checkpoint_file.load(summed, cpu)),
            "load a file without checksum": (lambda: torch.load(plain, weights_only=True), lambda: checkpoint_file.load(plain, cpu)),
        }
        for what, (bare, ours) in pairs.items():
            ratios = sorted(seconds(ours) / seconds(bare) for _ in range(ROUNDS))
            quarter = len(ratios) // 4
            print(f"{what}: {statistics.median(ratios):.2f} times ({ratios[quarter]:.2f} … {ratios[-1 - quarter]:.2f}), {megabytes} MB")
        prices(Path(folder))


if __name__ == "__main__":
    main()
