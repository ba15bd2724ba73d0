"""A script for torchrun: all of its ranks reduce a tensor on the first GPU by NCCL, which refuses more than one rank there."""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    assert tensor[0].item() == dist.get_world_size()
    print(f"reduced by {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()
