"""An ordinary DDP training script. It knows nothing of the workbench; notebook 01 launches it as it is."""

import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FASHION = next(folder / "data_samples" for folder in Path(__file__).parents if (folder / "data_samples").is_dir()) / "fashion_mnist"


def read(name: str, skip: int) -> torch.Tensor:
    """An IDX file: a header of `skip` bytes, then unsigned bytes."""
    return torch.from_numpy(np.frombuffer(gzip.decompress((FASHION / name).read_bytes()), np.uint8, offset=skip).copy())


def main() -> None:
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    images = read("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28).float() / 255
    data = TensorDataset(images, read("t10k-labels-idx1-ubyte.gz", 8).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)
    layers = [nn.Conv2d(1, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 10)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
