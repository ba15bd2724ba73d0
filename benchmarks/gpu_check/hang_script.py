"""A script for torchrun: `recorder` prints what the flight recorder has of NCCL's reductions; `gloo` and `nccl` hang after 40 steps."""

import json
import sys
import time

import torch
import torch.distributed as dist

from workbench.runs import flight_recorder


def hang() -> None:
    """Rank 1 sleeps while the others wait for its gradients."""
    print("HANG", time.time(), flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    what, kind = sys.argv[1:]
    dist.init_process_group("gloo" if what == "gloo" else "nccl")
    rank = dist.get_rank()
    if kind == "cuda":
        torch.cuda.set_device(rank if what == "nccl" else 0)
    tensor = torch.ones(1 << 10, device=kind)
    for step in range(45):
        if rank == 1 and step == 40:
            hang()
        dist.all_reduce(tensor)  # the line that is to be named
        tensor.div_(dist.get_world_size()).sum().item()
    if what == "recorder" and kind == "cuda":
        print(json.dumps(flight_recorder.last_collectives()[-1:]), flush=True)
        torch.cuda._sleep(5_000_000_000)  # clock cycles, some seconds: what follows on the stream has not begun yet
        dist.all_reduce(tensor)
        print(json.dumps(flight_recorder.last_collectives()[-1:]), flush=True)
    dist.destroy_process_group()
