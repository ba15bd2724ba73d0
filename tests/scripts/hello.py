"""Two ranks shake hands."""

import sys

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {int(total)}: {' '.join(sys.argv[1:])}")
    dist.destroy_process_group()
