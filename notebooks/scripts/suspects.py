"""Five training steps, each slow for a reason of its own; `suspect("A")` gives a step and its loader. Guess before you read on below."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Loop = tuple[Callable[[Any], None], DataLoader[Any]]


class Numbers(Dataset[Tensor]):
    """Rows of 256 numbers, each after a wait."""

    def __init__(self, wait: float = 0.0) -> None:
        self._wait = wait

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        if self._wait:
            time.sleep(self._wait)
        return torch.full((256,), index / len(self))


def suspect(letter: str) -> Loop:
    """The step and the loader behind a letter."""
    torch.manual_seed(0)
    return {"A": _a, "B": _b, "C": _c, "D": _d, "E": _e}[letter]()


def _trainer(width: int = 1024, depth: int = 2, **loader: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    layers = [nn.Linear(256, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 1)]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(Numbers(loader.pop("wait", 0.0)), batch_size=32, **loader)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


# --- what they are

VERDICTS = {"A": "host-bound", "B": "optimizer-bound", "C": "stalled", "D": "input-bound"}
"""Letter → what each step but the healthy one loses its time to."""


def _a() -> Loop:
    model, optimizer, loader = _trainer()

    def step(batch: Tensor) -> None:
        loss = _update(model, optimizer, batch)
        report = {"loss": loss.item(), "batch": [[round(value, 3) for value in row] for row in batch.tolist()]}
        report["percent"] = [[round(100 * value) for value in row] for row in batch.tolist()]
        json.loads(json.dumps(report))  # "structured logging"

    return step, loader


def _b() -> Loop:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(600))
    optimizer = torch.optim.AdamW([*model.parameters(), *experts.parameters()], lr=1e-3)
    loader = DataLoader(Numbers(), batch_size=32)
    for parameter in experts.parameters():
        parameter.grad = torch.zeros_like(parameter)  # experts that no sample of this batch was sent to

    def step(batch: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch[:, :16]).square().mean().backward()
        optimizer.step()

    return step, loader


def _c() -> Loop:
    model, optimizer, loader = _trainer()
    folder, done = Path(tempfile.mkdtemp()), 0

    def save_checkpoint() -> None:
        for part in range(6):
            torch.save([model.state_dict() for _ in range(4)], folder / f"{part}.pt")

    def step(batch: Tensor) -> None:
        nonlocal done
        _update(model, optimizer, batch)
        done += 1
        if done % 20 == 0:
            save_checkpoint()

    return step, loader


def _d() -> Loop:
    model, optimizer, loader = _trainer(wait=0.002, num_workers=2, prefetch_factor=8)
    return lambda batch: _update(model, optimizer, batch) and None, loader


def _e() -> Loop:
    model, optimizer, loader = _trainer()
    return lambda batch: _update(model, optimizer, batch) and None, loader
