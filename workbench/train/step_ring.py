"""Keeps what a rank's last steps had in the run directory: samples, random numbers, gradient scale, loss. `wb.replay` reads it."""

import base64
import contextlib
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
RANDOM_EVERY_S = 0.01
"""Seconds between two copies of the random numbers, which take 0.03 ms: of shorter steps, not each has one."""


class StepRing:
    """The last steps of a rank."""

    def __init__(self, path: Path, trainer: "Trainer", samples: StepSamples, done: int) -> None:
        self._path, self._trainer, self._samples = path, trainer, samples
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=STEPS)
        self._written, self._copied, self._last = time.monotonic(), 0.0, done

    def step(self, step: int, loss: torch.Tensor) -> None:
        """Called after each step, with this rank's loss: its random numbers are those with which the next begins."""
        device, now, state = self._trainer.ranks.device, time.monotonic(), None
        if now - self._copied > RANDOM_EVERY_S:
            cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            state, self._copied = (torch.get_rng_state(), np.random.get_state(), random.getstate(), cuda), now
        scaler = self._trainer.precision.scaler
        scale = scaler.get_scale() if scaler.is_enabled() else None  # the step has waited for the device already
        self._kept.append((step, self._samples.of(step), state, scale, loss.detach()))
        self._last = step
        if now - self._written > EVERY_S:
            self._write()

    def close(self) -> None:
        """Write the rest. What was fetched for a step that failed is kept, too; where the device has failed, losses are left out."""
        failed = self._samples.of(self._last + 1) if self._kept else None
        self._write([{"step": self._last + 1, "samples": failed}] if failed and -1 not in failed else [])

    def _write(self, more: list[dict[str, Any]] | None = None) -> None:
        losses: list[float | None]
        try:
            losses = torch.stack([loss for *_, loss in self._kept]).tolist() if self._kept else []  # one wait for all
        except RuntimeError:  # the device has failed; all else is in the host's memory
            losses = [None] * len(self._kept)
        rows: list[dict[str, Any]] = []
        for (step, samples, state, scale, _), loss in zip(self._kept, losses, strict=True):
            row = {"step": step, "samples": samples, "scale": scale, "random": _packed(state)}
            rows.append(row if loss is None else row | {"loss": repr(loss)})
        if rows:
            with contextlib.suppress(OSError):  # a full disk ends the run by what it lacks, not by this
                run_directory.write_json(self._path, {"steps": rows + (more or [])})
        self._written = time.monotonic()


def _packed(state: tuple[Any, ...] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    on_host, (_, keys, position, has_gauss, gauss), (version, numbers, next_gauss), cuda = state
    return {
        "torch": _text(on_host.numpy()),
        "numpy": [_text(np.asarray(keys)), int(position), int(has_gauss), float(gauss)],
        "python": [version, _text(np.array(numbers, np.uint32)), next_gauss],
        "cuda": None if cuda is None else _text(cuda.numpy()),
    }


def _unpacked(packed: dict[str, Any]) -> dict[str, Any]:
    keys, *rest = packed["numpy"]
    version, numbers, next_gauss = packed["python"]
    state: dict[str, Any] = {
        "torch": _tensor(packed["torch"], np.uint8),
        "numpy": [_tensor(keys, np.uint32), *rest],
        "python": [version, _tensor(numbers, np.uint32), next_gauss],
    }
    if (len(state["torch"]), len(state["numpy"][0]), len(state["python"][1])) != (len(torch.get_rng_state()), 624, 625):
        raise ValueError("random numbers of another length than their generators take")
    return state if packed["cuda"] is None else state | {"cuda": _tensor(packed["cuda"], np.uint8)}


def _text(array: "np.ndarray[Any, Any]") -> str:
    return base64.b64encode(array.tobytes()).decode()


def _tensor(text: str, kind: Any) -> torch.Tensor:
    array = np.frombuffer(base64.b64decode(text), kind)
    return torch.from_numpy(array.astype(np.int64) if kind is np.uint32 else array.copy())


def read_ring(path: Path) -> dict[int, dict[str, Any]]:
    """What is known of a rank's last steps, by step; empty = nothing, or the file is damaged. Random numbers as `restore_random_state`
    takes them.
    """
    if not path.exists():
        return {}
    try:
        rows = run_directory.read_json(path)["steps"]
        for row in rows:
            if packed := row.get("random"):
                row["random"] = _unpacked(packed)
        return {int(row["step"]): row for row in rows}
    except (LookupError, TypeError, ValueError, AttributeError):  # damaged: then the run is repeated without it
        return {}
