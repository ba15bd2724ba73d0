"""A task whose ranks may take half a GiB more than they have when their model is built, and that needs more: memory runs out for real."""

import os
import resource
from pathlib import Path

import torch
from torch import nn

import workbench as wb
from workbench.core import run_directory

MORE = 2**29
WIDTH, LAYERS, COUNT = 4096, 12, 8192


def model() -> nn.Module:
    """In a rank it limits the process; elsewhere, as in an estimate, it does not."""
    if run_directory.ENV_RUN_DIR in os.environ:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MORE, resource.RLIM_INFINITY))
    return nn.Sequential(nn.Linear(64, WIDTH), *(nn.Tanh() for _ in range(LAYERS)), nn.Linear(WIDTH, 1))


def wide() -> wb.Task:
    """Keeps WIDTH numbers per sample and layer."""
    return wb.Task(
        model=model, dataset=lambda: [torch.ones(64)] * COUNT, loss=lambda model, batch: model(batch).mean(), optimizer="sgd", name="wide"
    )
