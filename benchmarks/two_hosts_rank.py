"""Runs on a rank of `two_hosts.py`: all-reduces of several sizes, and DDP steps with and without their reduction, at two rates."""

import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZES = [2**k for k in range(16, 22)]
"""Bytes: some less and some more than a bucket."""
LAYERS, WIDTH, BATCH = 10, 256, 256
CAP = 2**19
"""Bytes of a bucket: two layers."""
ROUNDS, STEPS = 10, 4
TICK = 0.01


class Rates:
    """Asks whoever holds the cable for another rate."""

    def __init__(self, folder: Path) -> None:
        self._want, self._now = folder / "want", folder / "now"

    def to(self, name: str) -> None:
        """Wait until the cable has a rate."""
        if dist.get_rank() == 0:
            self._want.write_text(name)
            while not self._now.exists() or self._now.read_text() != name:
                time.sleep(TICK)
        dist.barrier()


class Steps:
    """A model under DDP, and how long its steps take."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
        self._model = DistributedDataParallel(self.module, bucket_cap_mb=CAP / 2**20)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        self._batch = torch.randn(BATCH, WIDTH)
        self.taken: dict[str, list[float]] = defaultdict(list)

    def block(self, name: str, reduced: bool) -> None:
        """Some steps, from a common start; without reduction also their parts."""
        dist.barrier()
        for _ in range(STEPS):
            marks = [time.perf_counter()]
            with torch.enable_grad() if reduced else self._model.no_sync():
                loss = self._model(self._batch).square().mean()
                marks.append(time.perf_counter())
                loss.backward()
            marks.append(time.perf_counter())
            self._optimizer.step()
            self._optimizer.zero_grad()
            marks.append(time.perf_counter())
            self.taken[name].append(marks[-1] - marks[0])
            if not reduced:
                for part, began, ended in zip(("forward", "backward", "optimizer"), marks, marks[1:], strict=False):
                    self.taken[part].append(ended - began)


def sweep(taken: dict[int, list[float]]) -> None:
    """An all-reduce of each size."""
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        taken[size].append(time.perf_counter() - began)


def measured(rates: Rates) -> dict[str, Any]:
    """Medians over all rounds; the first is left out."""
    steps, sizes = Steps(), defaultdict(list)
    for number in range(ROUNDS + 1):
        rates.to("fast")
        for _ in range(3):
            sweep(sizes)
        for name, reduced in (("alone", False), ("fast", True)):
            steps.block(name, reduced)
        rates.to("slow")
        steps.block("slow", True)
        if not number:
            steps.taken.clear()
            sizes.clear()
    found = {name: statistics.median(values) for name, values in steps.taken.items()}
    gradients = [4 * weight.numel() for weight in steps.module.parameters()]
    swept = [(size, statistics.median(values)) for size, values in sizes.items()]
    return {**found, "sweep": swept, "gradients": gradients, "cap": CAP, "batch": 2 * BATCH}


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    found = measured(Rates(out.parent))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found) + "\n")
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
