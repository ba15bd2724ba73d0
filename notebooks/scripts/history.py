"""For notebook 12: a repository of six commits, one of which makes a training slower."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

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
CAUSE = "DISK_FACTOR"
"""Of what changed since yesterday, that which makes the training slower."""
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


def lines(path: Path) -> Iterator[str]:
    """What git says of the commits, oldest first."""
    log = subprocess.run(["git", "-C", path, "log", "--reverse", "--format=%s"], check=True, capture_output=True, text=True).stdout
    yield from log.splitlines()
