"""The report of a run, `metrics.jsonl`: a line per optimizer step, written a few times per second."""

import time
from pathlib import Path

import torch
from torch import Tensor

from workbench.core import run_directory

INTERVAL = 0.3
"""Seconds between two writes: the only moments when the host waits for the losses."""


PRINTS = 10
"""Lines on rank 0's log in a run, for those who read it."""


class Metrics:
    """Writes what rank 0 reports."""

    def __init__(self, run_dir: Path, *, steps: int) -> None:
        """Begin, at the start of the first step.

        Args:
            run_dir: of the run.
            steps: optimizer steps there will be.
        """
        before = run_directory.LineTail(run_dir / run_directory.METRICS).read()  # of a run that goes on
        self._writer = run_directory.LineWriter(run_dir / run_directory.METRICS)
        self._steps = steps
        self._flushed = time.perf_counter()
        self._began = self._flushed - (before[-1].get("seconds", 0.0) if before else 0.0)
        self._rows: list[dict[str, float]] = []
        self._losses: list[Tensor] = []
        self._printed = 0

    def step(self, step: int, *, loss: Tensor, lr: float, samples: int) -> None:
        """Report an optimizer step, sooner or later.

        Args:
            step: how many are done.
            loss: of rank 0's samples; stays on its device for now.
            lr: learning rate of the step.
            samples: seen so far by all ranks.

        Raises:
            DiskFullError: there was no room; the lines before are whole.
        """
        now = time.perf_counter()
        self._losses.append(loss)
        self._rows.append({"step": step, "steps": self._steps, "lr": lr, "samples": samples, "seconds": now - self._began})
        if now - self._flushed > INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Write all that was reported."""
        if self._rows:
            losses = torch.stack(self._losses).tolist()  # one wait for all
            self._writer.write({**row, "loss": loss} for row, loss in zip(self._rows, losses, strict=True))
            step = int(self._rows[-1]["step"])
            if PRINTS * step // self._steps > self._printed:
                self._printed = PRINTS * step // self._steps
                print(f"step {step} of {self._steps}: loss {losses[-1]:.3f}")
            self._rows.clear()
            self._losses.clear()
        self._flushed = time.perf_counter()

    def figures(self, values: dict[str, float]) -> None:
        """Write the figures of an evaluation after the last step."""
        self._writer.write([{"step": self._steps, "steps": self._steps, **values}])

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
