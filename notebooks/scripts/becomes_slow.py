"""For notebook 18: a loop and a task on two ranks, both of which become slower while they run. Guess what happens before you read on."""

import itertools
import os
import time
from collections.abc import Sequence
from statistics import median

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from workbench import Task, Timeline
from workbench.core.display.axes import WIDTH, legend, note_beside, prepared, style_axes
from workbench.core.display.colors import PHASES
from workbench.core.vocabulary import PHASES as NAMES

FAST, SLOW = 0.005, 0.020
"""Seconds of a forward before and after, EMULATED by sleeping, as if an accelerator computed."""
RANK, SINCE = 1, 350
"""The rank that becomes slower, and the first step in which it is, from 0."""
BLOCK = 8
CALLS = itertools.count()


class Batches(Dataset[Tensor]):
    """Batches of which later ones take longer, as from a disk that somebody else begins to use."""

    def __init__(self, count: int, slower_from: int) -> None:
        self.count, self.slower_from = count, slower_from

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.003 if index < self.slower_from else 0.012)
        return torch.ones(4)


def loop(slower_from: int, count: int) -> tuple[nn.Module, torch.optim.Optimizer, "DataLoader[Tensor]"]:
    """A model, its optimizer, and a loader whose batches take longer from one on."""
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Batches(count, slower_from), batch_size=1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Squared error, on a device that becomes slower on one rank."""
    slow = next(CALLS) >= SINCE and os.environ.get("RANK") == str(RANK)
    time.sleep(SLOW if slow else FAST)
    squares: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return squares


def build() -> Task:
    """The task."""
    numbers = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    dataset = lambda: TensorDataset(numbers, numbers.flip(1)[:, :4] + numbers[:, :4].roll(1, 0))  # noqa: E731
    return Task(model=lambda: nn.Linear(16, 4), dataset=dataset, loss=loss, optimizer="sgd(lr=0.01)", name="becomes-slow")


def blocks(timeline: Timeline, phase: str) -> list[float]:
    """Milliseconds of a phase: the median of each 8 steps."""
    place = NAMES.index(phase)
    seconds = [step.phases[place] for step in timeline.steps]
    return [1e3 * median(seconds[at : at + BLOCK]) for at in range(0, len(seconds) - BLOCK + 1, BLOCK)]


def longer(timeline: Timeline, phase: str) -> float:
    """Milliseconds by which a phase is longer since SINCE than before."""
    values = blocks(timeline, phase)
    return median(values[SINCE // BLOCK + 2 :]) - median(values[5 : SINCE // BLOCK - 1])


def draw(timelines: Sequence[Timeline], reported: int, ax: Axes | None = None) -> Axes:
    """Draw the forward of the rank that becomes slower and the backward of the other, with the step that was reported."""
    ax = style_axes(prepared(ax, WIDTH, 3.2))
    lines = []
    for rank, phase in ((RANK, "forward"), (1 - RANK, "backward")):
        values = blocks(next(timeline for timeline in timelines if timeline.rank == rank), phase)
        lines += ax.plot(
            [BLOCK * place for place in range(len(values))], values, color=PHASES[phase], label=f"{phase} of rank {rank}, measured"
        )
    note_beside(ax, SINCE, f"planted: step {SINCE}", left=True, fontsize=9)
    note_beside(ax, reported, f"reported: step {reported}", left=False, fontsize=9)
    ax.set_xlabel("step")
    ax.set_ylabel("median of 8 steps (ms)")
    ax.set_ylim(0, 1.25 * ax.get_ylim()[1])
    legend(ax, lines)
    return ax
