"""Measures what the checksum of a checkpoint costs, against torch.save and torch.load alone, in interleaved pairs.

python benchmarks/checkpoints.py [MEGABYTES [FOLDER]]
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.train import checkpoint_file

ROUNDS = 11


def saved_by_torch(state: dict[str, Any], path: Path) -> None:
    """As a checkpoint is saved, but without a checksum."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Print the ratios."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    weights = {f"w{i}": torch.randn(megabytes * 1_000_000 // 64) for i in range(16)}
    state = {"step": 1, "module": weights, "optimizer": {}, "scheduler": {}, "scaler": {}}
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        plain, summed = Path(folder, "plain.pt"), Path(folder, "summed.pt")
        cpu = torch.device("cpu")
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "save": (lambda: saved_by_torch(state, plain), lambda: checkpoint_file.save(state, summed)),
            "load": (lambda: torch.load(plain, weights_only=True), lambda: checkpoint_file.load(summed, cpu)),
            "load a file without checksum": (lambda: torch.load(plain, weights_only=True), lambda: checkpoint_file.load(plain, cpu)),
        }
        for what, (bare, ours) in pairs.items():
            ratios = sorted(seconds(ours) / seconds(bare) for _ in range(ROUNDS))
            quarter = len(ratios) // 4
            print(f"{what}: {statistics.median(ratios):.2f} times ({ratios[quarter]:.2f} … {ratios[-1 - quarter]:.2f}), {megabytes} MB")


if __name__ == "__main__":
    main()
