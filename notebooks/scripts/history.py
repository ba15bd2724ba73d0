"""For notebook 12: a repository of six commits one of which makes a training slower, and a loop that becomes slower while it runs."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch

TASK = '''"""A small training; a sample takes {milliseconds} ms."""

import os
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import workbench as wb


class Numbers(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        time.sleep(0.001 * {milliseconds} * float(os.environ.get("DISK_FACTOR", "1")))
        return torch.ones(4), torch.zeros(2)


def build():
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    return wb.Task(model=lambda: nn.Linear(4, 2), dataset=Numbers, loss=loss, optimizer="sgd(lr=0.1)")
'''
SUBJECTS = ("First version", "Rename a variable", "Longer docstring", "Read samples one by one", "Fix a typo", "Prepare the release")
"""What each commit says of itself."""
SLOWER = 3
"""Number of the commit that makes a sample take more than twice as long."""


def repository(folder: str | Path) -> Path:
    """A repository with those commits, made anew."""
    path = Path(folder)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", path, "-c", "user.name=reader", "-c", "user.email=reader@example.org", *words], check=True)

    git("init", "-q", "-b", "main")
    for number, subject in enumerate(SUBJECTS):
        (path / "task.py").write_text(TASK.format(milliseconds=2 if number < SLOWER else 5) + f"# version {number}\n")
        git("add", "task.py")
        git("commit", "-q", "-m", subject)
    return path


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """Batches of which later ones take longer, as from a disk that somebody else begins to use."""

    def __init__(self, count: int, slower_from: int) -> None:
        self.count, self.slower_from = count, slower_from

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.003 if index < self.slower_from else 0.009)
        return torch.ones(4)


def becomes_slow(
    slower_from: int, count: int
) -> tuple[torch.nn.Module, torch.optim.Optimizer, "torch.utils.data.DataLoader[torch.Tensor]"]:
    """A model, its optimizer, and a loader whose batches take longer from one on."""
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), torch.utils.data.DataLoader(Batches(count, slower_from), batch_size=1)


def lines(path: Path) -> Iterator[str]:
    """What git says of the commits, oldest first."""
    log = subprocess.run(["git", "-C", path, "log", "--reverse", "--format=%s"], check=True, capture_output=True, text=True).stdout
    yield from log.splitlines()
