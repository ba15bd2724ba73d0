"""A small GPT that trains in this process with any knobs of a RunSpec: its seconds, its memory and its losses (notebook 15)."""

import atexit
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import workbench as wb
from workbench.core.display.axes import WIDTH, area, ink, legend, prepared, style_axes
from workbench.core.display.colors import GROUPS, LIMIT, LINE
from workbench.runs.task import resolve
from workbench.train.models import Gpt
from workbench.train.ranks import Ranks
from workbench.train.tasks import WINDOW, text_gpt
from workbench.train.trainer import Trainer

LAYERS = 3


def gpt() -> wb.Task:
    """Three layers of width 64 that predict the next byte of a novel."""
    model = partial(Gpt, length=WINDOW, width=64, layers=LAYERS, heads=4)
    return dataclasses.replace(text_gpt(), model=model, optimizer="adamw(lr=0.003)", name="gpt")


@functools.cache
def only_rank() -> Ranks:
    """This process as the only rank of a process group."""
    atexit.register(Ranks.leave)
    return Ranks.join(wb.RunSpec(task="text-gpt", device="cpu"))


class Training:
    """A spec's training in this process, a step at a time: the Trainer of launched runs, on one rank."""

    def __init__(self, spec: wb.RunSpec) -> None:
        self.trainer = Trainer(spec, resolve(spec.task), only_rank())
        self.module, self.optimizer = self.trainer.module, self.trainer.optimizer
        self._batches = self.trainer.batches()

    def batch(self) -> list[Any]:
        """The micro-batches of a step."""
        return [next(self._batches) for _ in range(self.trainer.spec.accumulation)]

    def step(self, batch: list[Any]) -> float:
        """One optimizer step; its loss."""
        return float(self.trainer.step(batch))

    def next(self) -> float:
        """A step with the next batch; its loss."""
        return self.step(self.batch())

    def losses(self, steps: int) -> list[float]:
        """Of so many steps."""
        return [self.next() for _ in range(steps)]

    def gradients(self) -> Tensor:
        """All gradients of the next batch, as one vector."""
        for batch in self.batch():
            self.trainer.backward(self.trainer.forward(batch))
        found = torch.cat([weight.grad.flatten() for weight in self.module.parameters() if weight.grad is not None])
        self.optimizer.zero_grad()
        return found

    def memory(self) -> wb.MemoryBreakdown:
        """What a step holds at its peak, measured."""
        return wb.measure_memory(self.step, [self.batch()] * 3, model=self.module, optimizer=self.optimizer, steps=2)


def seconds(steps: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Seconds in which a core works for each: the median of calls that take turns. Other processes do not change them."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            if round_:  # the first warms up
                found[name].append(time.process_time() - begin)
    return {name: statistics.median(each) for name, each in found.items()}


class Deep(nn.Module):
    """Sixteen layers with a checkpoint in front of each `every` of them; 16 = none."""

    def __init__(self, every: int, layers: int = 16, width: int = 64) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Tanh()) for _ in range(layers)]
        self.segments = nn.Sequential(*(nn.Sequential(*parts[first : first + every]) for first in range(0, layers, every)))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, width) → the same."""
        for segment in self.segments:
            x = segment(x) if len(self.segments) == 1 else checkpoint(segment, x, use_reentrant=False)
        return x


def kept(every: int, samples: int = 1024) -> int:
    """Bytes of activations at the peak of a step of `Deep`, measured."""
    model = Deep(every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return wb.measure_memory(step, [torch.randn(samples, 64)] * 3, model=model, optimizer=optimizer, steps=2).activations


def figures(rows: Mapping[str, tuple[float, float, float]], predicted: Mapping[str, float]) -> None:
    """Draw what each technique gives: time and memory as multiples of those without it, and how far the losses move.

    Args:
        rows: technique → time, memory, largest difference of a loss.
        predicted: technique → memory.
    """
    from matplotlib import pyplot

    first = prepared(None, WIDTH, 0.9 + 0.42 * len(rows))
    figure = first.figure
    figure.clear()
    axes = [style_axes(ax) for ax in figure.subplots(1, 3, sharey=True)]
    names, places = list(rows), range(len(rows))
    words = "time (× as it is)", "peak memory (× as it is)", "largest change of a loss"
    for column, (ax, word) in enumerate(zip(axes, words, strict=True)):
        values = [rows[name][column] for name in names]
        if column < 2:
            ax.barh(places, values, height=0.62, label="measured", **area(ax, LINE if column == 0 else GROUPS["activations"]))
            ax.axvline(1, color=ink(ax), linestyle=":", linewidth=1)
        else:
            floor = 1e-8  # a logarithmic axis has no zero
            ax.barh(places, [max(value, floor) for value in values], height=0.62, **area(ax, GROUPS["temporaries"]))
            ax.set_xscale("log")
            ax.set_xlim(floor, 10)
        ax.set_xlabel(word)
        ends = [f"{value:.2f}" if column < 2 else f"{value:.0e}" if value else "0" for value in values]
        for place, value, end in zip(places, values, ends, strict=True):
            ax.annotate(
                end,
                (max(value, 1e-8), place),
                xytext=(9 if column == 1 else 4, 0),
                textcoords="offset points",
                va="center",
                color=ink(ax),
                fontsize=8,
            )
        if column < 2:
            ax.set_xlim(0, 1.3 * max(values))
    axes[0].set_yticks(places, names)
    axes[0].invert_yaxis()
    drawn = axes[1].plot([predicted[name] for name in names], places, "D", markerfacecolor="none", markeredgecolor=ink(axes[1]),
                         markersize=6, label="predicted")  # fmt: skip
    legend(axes[1], [axes[1].containers[0], *drawn])
    pyplot.figure(figure.number)


def coarse(gradients: Tensor, scale: float) -> float:
    """Share of the gradients (of those that are not 0) that fp16 has with fewer digits, or as 0, when the loss is multiplied by `scale`."""
    there = gradients[gradients != 0].abs() * scale
    return float((there < torch.finfo(torch.float16).smallest_normal).float().mean())


def magnitudes(gradients: Tensor, scale: float) -> Axes:
    """Draw how large gradients are, as they are and scaled, and what fp16 can hold."""
    ax = prepared(None, WIDTH, 2.8)
    there = gradients[gradients != 0].abs().log2()
    for move, look, label in ((0.0, area(ax, LINE, pale=True), "as they are"), (math.log2(scale), area(ax, LINE), f"times {scale:g}")):
        ax.hist((there + move).numpy(), bins=[*range(-48, 18)], label=label, alpha=0.85, **look)
    for place, words in ((-25, "0 in fp16"), (-14, "fewer digits"), (16, "infinite")):
        ax.axvline(place, color=LIMIT, linewidth=1.4)
        side = "right" if place < 0 else "left"
        ax.annotate(words, (place, 1), xycoords=("data", "axes fraction"), xytext=(-4 if place < 0 else 4, -8),
                    textcoords="offset points", ha=side, va="top", fontsize=8.5, color=ink(ax))  # fmt: skip
    ax.set(xlabel="size of a gradient (power of two)", ylabel="gradients", xlim=(-48, 24))
    legend(ax, ax.get_legend_handles_labels()[0])
    return ax
