"""Measures what a checkpoint takes beside torch.save and torch.distributed.checkpoint (DCP): to save, to load, and the training beside it.

Saving and loading are timed in rounds, in each of which every way has its turn; what is printed are ratios within a round. All write with
fsync.

The training is the sample GPT. Blocks of steps are interleaved: without a checkpoint, with one by `torch.save` or `dcp.save` in the loop,
and with one by a thread, as the workbench writes it or as `dcp.async_save` does. The price is the time of a block beyond that of a block
without: the stall, in which the loop waits, and what the steps beside it take longer. The two are printed apart.

python benchmarks/checkpoints.py [MEGABYTES [FOLDER]]
"""

import dataclasses
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from workbench.runs.spec import RunSpec
from workbench.runs.task import resolve
from workbench.train import checkpoint_file
from workbench.train.checkpoints import Checkpoints
from workbench.train.models import Gpt
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer

ROUNDS = 11
KINDS = ("none", "torch.save", "dcp.save", "dcp.async_save", "the workbench's thread")
"""Of blocks: without a checkpoint, and the ways to write one."""


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


def compare(folder: Path, megabytes: int, rounds: int = ROUNDS) -> None:
    """Print what saving and loading take, as ratios within rounds in which each way has its turn, with their interquartile ranges."""
    weights = {f"w{i}": torch.randn(megabytes * 1_000_000 // 64) for i in range(16)}
    state = {"step": 1, "module": weights, "optimizer": {}, "scheduler": {}, "scaler": {}}
    plain, summed, directory, cpu = folder / "plain.pt", folder / "summed.pt", folder / "dcp", torch.device("cpu")
    wanted = {"module": {name: torch.zeros_like(value) for name, value in weights.items()}}
    saving: dict[str, Callable[[], object]] = {
        "torch.save": lambda: saved_by_torch(state, plain),
        "dcp.save": lambda: save(state, checkpoint_id=directory, no_dist=True),
        "the workbench": lambda: checkpoint_file.save(state, summed),
    }
    loading: dict[str, Callable[[], object]] = {
        "torch.load": lambda: torch.load(plain, weights_only=True),
        "dcp.load": lambda: load(wanted, checkpoint_id=directory, no_dist=True),
        "the workbench": lambda: checkpoint_file.load(summed, cpu),
        "the workbench, a file without checksum": lambda: checkpoint_file.load(plain, cpu),
    }
    for what, ways in (("save", saving), ("load", loading)):
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds + 1):  # the first one is left out: it makes the files, and imports
            for way in list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]:
                times[way].append(seconds(ways[way]))
        for peer, ours in [(peer, ours) for peer in list(ways)[:2] for ours in ways if ours != peer and not ours.startswith("torch")]:
            ratios = [mine / other for mine, other in zip(times[ours][1:], times[peer][1:], strict=True)]
            print(f"{what}: {ours} beside {peer}: {spread(ratios)}, {megabytes} MB")
    assert all(torch.equal(value, weights[name]) for name, value in wanted["module"].items())


def spread(values: Sequence[float]) -> str:
    """The median, with the quartiles."""
    ordered, quarter = sorted(values), len(values) // 4
    return f"{statistics.median(ordered):.2f} ({ordered[quarter]:.2f} … {ordered[-1 - quarter]:.2f})"


def prices(folder: Path, blocks: int = 8, steps: int = 12) -> None:
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
    number, stalls, late = 0, dict[str, list[float]](), dict[str, list[float]]()

    def block(kind: str) -> float:
        nonlocal number
        saving: Any = None
        begin = time.perf_counter()
        for step in range(steps):
            trainer.step([next(batches)])
            if not step:
                number += 1
                before = time.perf_counter()
                if kind == "torch.save":
                    saved_by_torch(trainer.state(), folder / "plain.pt")
                elif kind == "dcp.save":
                    save(trainer.state(), checkpoint_id=folder / "dcp")
                elif kind == "dcp.async_save":
                    saving = async_save(trainer.state(), checkpoint_id=folder / "dcp async")
                elif kind != "none":
                    checkpoints.write(number, trainer, wait=False)
                stalls.setdefault(kind, []).append(time.perf_counter() - before)
        seconds = time.perf_counter() - begin
        checkpoints.finish()
        if saving:
            saving.result()
        late.setdefault(kind, []).append(time.perf_counter() - begin - seconds)
        return seconds

    block("dcp.async_save")  # the first one imports
    stalls, late = {}, {}
    rounds = [{kind: block(kind) for kind in KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]} for turn in range(blocks)]
    size = (folder / "plain.pt").stat().st_size
    step_s = statistics.median(each["none"] for each in rounds) / steps
    print(f"GPT, a checkpoint of {size / 1e6:.0f} MB in {steps} steps of {step_s:.3f} s")
    for kind in KINDS[1:]:
        price, slower = price_of(rounds, stalls[kind], kind)
        stall = statistics.median(stalls[kind])
        print(f"by {kind}: price {spread([each[kind] - each['none'] for each in rounds])} s, {price / 60:.2%} at one a minute")
        print(f"  stall {stall:.3f} s ({stall / 60:.2%}), slower steps beside it {slower:.3f} s ({slower / 60:.2%})")
        if (after := statistics.median(late[kind])) > step_s:
            print(f"  and {after:.2f} s of it came after the block's steps: the price lacks what it takes there")


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
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        compare(Path(folder), megabytes)
        prices(Path(folder))


if __name__ == "__main__":
    main()
