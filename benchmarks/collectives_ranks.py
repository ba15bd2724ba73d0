"""Runs on both ranks of `collectives.py`: a sweep of all-reduces, then DDP with and without its reduction; rank 0 prints the times."""

import gc
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.cluster.measure.links import time_links

WIDTH, LAYERS, BATCH = 768, 12, 192
CAPS = (2.0, 8.0, 25.0)
ROUNDS, STEPS = 9, 3
SIZES = [4**power for power in range(6, 13)]


def seconds_of(ddp: nn.Module, x: torch.Tensor, reduce: bool) -> tuple[float, float]:
    """Of a step's forward and backward."""
    dist.barrier()
    forward = backward = 0.0
    for _ in range(STEPS):
        begin = time.perf_counter()
        if reduce:
            loss = ddp(x).square().mean()
            middle = time.perf_counter()
            loss.backward()
        else:
            with ddp.no_sync():  # type: ignore[operator]
                loss = ddp(x).square().mean()
                middle = time.perf_counter()
                loss.backward()
        end = time.perf_counter()
        forward, backward = forward + middle - begin, backward + end - middle
        ddp.zero_grad()
    return forward / STEPS, backward / STEPS


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    points = time_links(["all_reduce"], SIZES, device=torch.device("cpu"), repeats=9, budget_s=10)
    x = torch.randn(BATCH, WIDTH)
    rows = []
    for cap in CAPS:
        ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))), bucket_cap_mb=cap)
        for _ in range(2):
            seconds_of(ddp, x, True)
        found = [(seconds_of(ddp, x, False), seconds_of(ddp, x, True)) for _ in range(ROUNDS)]
        middle = [[statistics.median(one[kind][part] for one in found) for part in (0, 1)] for kind in (0, 1)]
        rows.append({"cap": cap, "alone": middle[0], "reduced": middle[1]})
        del ddp
        gc.collect()
    if dist.get_rank() == 0:
        print(json.dumps({"points": [[point.size, point.median] for point in points], "rows": rows}), flush=True)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
