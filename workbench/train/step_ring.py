"""Keeps what a rank's last steps had in the run directory: samples, random numbers, gradient scale. `wb.replay` reads it."""

import base64
import contextlib
import io
import random
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.core import run_directory
from workbench.train.sample_order import StepSamples

if TYPE_CHECKING:
    from workbench.train.trainer import Trainer

STEPS = 16
"""Steps that are kept."""
EVERY_S = 1.0
"""Seconds between two writes; the file is written at the end, too, also after an error."""


class StepRing:
    """The last steps of a rank."""

    def __init__(self, path: Path, trainer: "Trainer", samples: StepSamples, done: int) -> None:
        """
        Args:
            path: of the file.
            trainer: whose steps are kept.
            samples: of its steps.
            done: steps that were taken before.
        """
        self._path, self._trainer, self._samples = path, trainer, samples
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=STEPS)
        self._written, self._last = time.monotonic(), done

    def step(self, step: int) -> None:
        """Called after each step: its random numbers are those with which the next begins."""
        device = self._trainer.ranks.device
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        state = (torch.get_rng_state(), np.random.get_state(), random.getstate(), cuda)
        scaler = self._trainer.precision.scaler
        scale = scaler.get_scale() if scaler.is_enabled() else None  # the step has waited for the device already
        self._kept.append((step, self._samples.of(step), state, scale))
        self._last = step
        if time.monotonic() - self._written > EVERY_S:
            self._write()

    def close(self) -> None:
        """Write the rest. What was fetched for a step that failed is kept, too."""
        failed = self._samples.of(self._last + 1) if self._kept else None
        self._write([{"step": self._last + 1, "samples": failed}] if failed and -1 not in failed else [])

    def _write(self, more: list[dict[str, Any]] | None = None) -> None:
        rows = [{"step": step, "samples": samples, "scale": scale, "random": _text(state)} for step, samples, state, scale in self._kept]
        if rows:
            with contextlib.suppress(OSError):  # a full disk ends the run by what it lacks, not by this
                run_directory.write_json(self._path, {"steps": rows + (more or [])})
        self._written = time.monotonic()


def _text(state: tuple[Any, ...]) -> str:
    on_host, (_, keys, position, has_gauss, gauss), (version, numbers, next_gauss), cuda = state
    packed = {
        "torch": on_host,
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(numbers), next_gauss],
        **({} if cuda is None else {"cuda": cuda}),
    }
    torch.save(packed, file := io.BytesIO())
    return base64.b64encode(file.getvalue()).decode()


def read_ring(path: Path) -> dict[int, dict[str, Any]]:
    """What is known of a rank's last steps, by step; empty = nothing. Random numbers as `restore_random_state` takes them."""
    if not path.exists():
        return {}
    rows = run_directory.read_json(path)["steps"]
    for row in rows:
        if text := row.get("random"):
            row["random"] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return {row["step"]: row for row in rows}
