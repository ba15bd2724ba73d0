"""A loop whose loader is too slow, and looks fine at first: its workers filled a queue while the model was built."""

import statistics
import time

import torch
from torch.utils.data import DataLoader, Dataset

from workbench.core import units
from workbench.core.display.table import Table

WORKERS, PREFETCH, BATCH = 2, 8, 8
SERVICE, TRAINING = 0.025, 0.010
"""Seconds per batch of all workers together, and of the training."""


class Slow(Dataset[torch.Tensor]):
    """Samples that take their time; no processor is used meanwhile."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SERVICE * WORKERS / BATCH)
        return torch.zeros(8)


def three_timers(steps: int = 80) -> tuple[dict[str, float], Table]:
    """Seconds that a step waits for data, as three ways to ask report them, and the same as a table."""
    loader = DataLoader(Slow(), batch_size=BATCH, num_workers=WORKERS, prefetch_factor=PREFETCH)
    batches = iter(loader)
    time.sleep(1.0)  # the model is built, a checkpoint is loaded: the queue fills
    seen = []
    for _ in range(steps):
        start = time.perf_counter()
        next(batches)
        seen.append(time.perf_counter() - start)
        time.sleep(TRAINING)
    start = time.perf_counter()
    for _ in range(16):
        next(batches)
    alone = (time.perf_counter() - start) / 16
    del batches
    waits = {
        "a profile of steps 2 to 4": statistics.fmean(seen[2:5]),
        f"the median of all {steps} steps": statistics.median(seen),
        "the mean of the last 20 steps": statistics.fmean(seen[-20:]),
        "the loader alone, less the training": alone - TRAINING,
    }
    rows = [[name, units.seconds(wait)] for name, wait in waits.items()]
    return waits, Table(
        columns=("asked how", "a step waits for data"),
        rows=rows,
        note=f"measured: {WORKERS} workers, a queue of {WORKERS * PREFETCH} batches, one every {units.seconds(SERVICE)}, "
        f"{units.seconds(TRAINING)} of training",
    )
