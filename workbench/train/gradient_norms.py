"""Writes the norm of the gradients of each layer, every so many steps: which layer explodes, vanishes or learns nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.core import run_directory
from workbench.train.sharded_tensors import local_part, shard_groups

if TYPE_CHECKING:
    from workbench.train.trainer import Trainer

KEPT = 16
"""Rows that are written together: only then the host waits for the device."""


class GradientNorms:
    """The norms of a training. All ranks call `step`, since they communicate where they share the model; rank 0 writes."""

    def __init__(self, trainer: "Trainer", path: Path, every: int) -> None:
        """Open the file."""
        self._trainer, self._every = trainer, every
        self._writer = None if trainer.ranks.rank else run_directory.LineWriter(path)
        self._rows: list[tuple[int, list[str], Tensor]] = []

    def step(self, step: int) -> None:
        """Take the norms of a step, from 1, if it is its turn."""
        if step % self._every:
            return
        parts: dict[Any, dict[str, Tensor]] = {}
        for name, weight in self._trainer.module.named_parameters():
            if weight.grad is not None:
                layer = name.rpartition(".")[0] or name
                square = local_part(weight.grad).detach().to(self._trainer.ranks.device, torch.float32).square().sum()
                of_groups = parts.setdefault(shard_groups(weight), {})
                of_groups[layer] = of_groups.get(layer, torch.zeros_like(square)) + square
        squares: dict[str, Tensor] = {}
        for groups, layers in parts.items():
            values = torch.stack(list(layers.values()))
            for group in groups:
                dist.all_reduce(values, group=group)
            for layer, value in zip(layers, values, strict=True):
                squares[layer] = squares.get(layer, torch.zeros_like(value)) + value
        if self._writer is None or not squares:
            return
        scale = self._trainer.precision.loss_scale()
        norms = torch.stack(list(squares.values())).sqrt()
        self._rows.append((step, list(squares), norms if scale is None else norms / scale))
        if len(self._rows) >= KEPT:
            self.flush()

    def flush(self) -> None:
        """Write the steps so far."""
        if self._writer and self._rows:
            rows, self._rows = self._rows, []
            self._writer.write({"step": step, "norms": dict(zip(names, norms.tolist(), strict=True))} for step, names, norms in rows)

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        if self._writer:
            self._writer.close()
