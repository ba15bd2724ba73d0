"""Records what a step does with modules: how often and in which precision it calls them, and which rows of embedding tables it uses."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workbench.harness.ablations import DTYPES
from workbench.harness.discover import is_compiled


@dataclass(slots=True)
class ModuleCalls:
    """How the innermost modules with weights were called."""

    precisions: list[str] = field(default_factory=list)
    """Under which precision of autocast, each call that was."""
    counts: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    """(Number of a model, name of a module in it, its class) → how often."""


@contextlib.contextmanager
def recorded_calls(models: Sequence[nn.Module], device: torch.device) -> Iterator[ModuleCalls]:
    """Inside, calls of the innermost modules with weights are counted, but for those of compiled models."""
    seen = ModuleCalls()
    names = {dtype: name for name, dtype in DTYPES.items()}

    def called(who: tuple[int, str, str], *_: Any) -> None:
        seen.counts[who] += 1
        if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
            seen.precisions.append(names.get(torch.get_autocast_dtype(device.type), "fp32"))

    handles = [
        part.register_forward_pre_hook(partial(called, (number, name, type(part).__name__)))
        for number, model in enumerate(models)
        if not is_compiled(model)
        for name, part in model.named_modules()
        if not list(part.children()) and next(part.parameters(), None) is not None
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


MIN_TABLE = 100_000
"""Numbers of an embedding table below which its update costs next to nothing. Chosen: 0.1 ms or so on one core."""


@dataclass(slots=True)
class DenseTables:
    """Embedding tables with a dense gradient, as one optimizer step showed them."""

    rows: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Name of the module → numbers in its table, and the fraction of rows whose gradient is not zero."""


@contextlib.contextmanager
def recorded_tables(models: Sequence[nn.Module]) -> Iterator[DenseTables]:
    """Inside, the gradients of large embedding tables are examined when an optimizer is about to step, each once."""
    seen = DenseTables()
    tables = {
        id(part.weight): name
        for model in models
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and not part.sparse and part.weight.numel() >= MIN_TABLE
    }

    def stepping(optimizer: Optimizer, *_: Any) -> None:
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            name = tables.pop(id(weight), None)
            if name is None or weight.grad is None or type(weight.grad) is not torch.Tensor or weight.grad.layout != torch.strided:
                continue
            used = torch.linalg.vector_norm(weight.grad, ord=math.inf, dim=1) != 0  # no tensor as large as the table
            seen.rows[name] = weight.numel(), float(used.float().mean())

    handle = register_optimizer_step_pre_hook(stepping)
    try:
        yield seen
    finally:
        handle.remove()
