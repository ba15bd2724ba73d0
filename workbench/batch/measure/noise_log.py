"""The norms of a run's gradients, `noise<r>.jsonl` of each rank: what `run.noise_scale` is made of. Ranks tell each other nothing."""

import time
from collections.abc import Sized
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from workbench.batch.measure.gradient_norms import GroupNorms, Row, Stride, read
from workbench.core import run_directory
from workbench.train.metrics import INTERVAL
from workbench.train.optimizers import described
from workbench.train.trainer import Trainer


class NoiseLog:
    """Writes what a rank sees; a first line says of what, then comes a line per optimizer step, some times a second."""

    def __init__(self, trainer: Trainer, run_dir: Path) -> None:
        """Attach to a trainer.

        Args:
            trainer: whose gradients.
            run_dir: of the run.

        Raises:
            NoiseScaleError: its gradients cannot be watched.
        """
        readers = trainer.layout.readers
        self._trainer, self._accumulation = trainer, trainer.spec.accumulation
        self._stride = Stride(None if trainer.spec.noise_scale is True else int(trainer.spec.noise_scale))
        self._norms = GroupNorms(trainer.model, readers.world_size, self._accumulation)
        self._writer = run_directory.LineWriter(run_dir / run_directory.noise_file(readers.rank))
        self._rows: list[tuple[int, Row]] = []
        self._flushed = time.perf_counter()
        head = {
            "rank": readers.rank,
            "world_size": readers.world_size,
            "micro_batch": trainer.spec.micro_batch,
            "accumulation": self._accumulation,
            "every": self._stride.every,
            "dataset_size": _size(trainer.loader.dataset),
            "optimizer": described(trainer.optimizer),
        }
        self._writer.write([head])

    def step(self, step: int) -> None:
        """The gradients of a step are there, and not used yet.

        Args:
            step: from 1.

        Raises:
            DiskFullError: there was no room; the lines before are whole.
        """
        if self._norms.looking:
            row = self._norms.step(self._trainer.precision.loss_scale())
            if row is not None:
                self._rows.append((step, row))
            if time.perf_counter() - self._flushed > INTERVAL:
                self.flush()
        self._norms.look(self._stride.step())

    def flush(self) -> None:
        """Write what was seen. A step whose micro-batches were taken in parts has no norms of whole ones."""
        found = read(row for _, row in self._rows)
        self._writer.write(
            {"step": step, "small": small, "big": big} if count == self._accumulation else {"step": step, "small": None, "big": None}
            for (step, _), (small, big, count) in zip(self._rows, found, strict=True)
        )
        self._rows.clear()
        self._flushed = time.perf_counter()

    def close(self) -> None:
        """Write the rest, detach, and close the file."""
        self._norms.close()
        try:
            self.flush()
        finally:
            self._writer.close()


def _size(dataset: Any) -> int | None:
    """Samples that an epoch deals out without repetition; None = a stream does not say."""
    return len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset) else None
