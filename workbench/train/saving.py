"""Checkpoints: what a run needs to go on after it was ended from outside. Whole files only: one is there, or it is not.

The order of the samples goes on where it was. The random numbers of dropout and augmentation do not: they begin anew, with a seed of the
step; so a run that goes on is as good as one that was never ended, and bit for bit the same only where nothing is drawn at random.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench import rundir
from workbench.train.ranks import Ranks

if TYPE_CHECKING:
    from workbench.train.trainer import Trainer

KEPT = 2
"""Checkpoints that stay: the last, and one before, in case that the last was damaged with its disk."""


class Checkpoints:
    """Those of a run directory."""

    def __init__(self, run_dir: Path, ranks: Ranks, every: int) -> None:
        self._folder, self._ranks, self._every = run_dir / rundir.CHECKPOINTS, ranks, every

    def found(self) -> Path | None:
        """The last one. Rank 0 looks, so that all take the same."""
        mine = str(max(self._all(), default="", key=_step_of)).encode() if not self._ranks.rank else b""
        name = self._ranks.share("checkpoint", mine)[0].decode()
        return Path(name) if name else None

    def resume(self, trainer: "Trainer") -> int:
        """Put the last checkpoint into a trainer; how many steps had been taken, 0 if there is none."""
        path = self.found()
        if path is None:
            return 0
        state: dict[str, Any] = torch.load(path, map_location=self._ranks.device, weights_only=True)
        trainer.load_state(state)
        print(f"rank {self._ranks.rank} goes on from step {state['step']}: {path}")
        return int(state["step"])

    def due(self, step: int) -> bool:
        """Is one to be written by this rank after a step?"""
        return not step % self._every and not self._ranks.rank

    def write(self, step: int, trainer: "Trainer") -> None:
        """Write one, whole or not at all.

        Raises:
            DiskFullError: there is no room; the last one stays.
        """
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step{step:08d}.pt"
        part = path.with_suffix(".part")
        try:
            with open(part, "wb") as file:
                torch.save({"step": step, **trainer.state()}, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except (OSError, RuntimeError) as error:  # torch says a full disk as a RuntimeError of its zip file
            part.unlink(missing_ok=True)
            if isinstance(error, RuntimeError) and not re.search(r"PytorchStreamWriter|file write", str(error)):
                raise
            raise rundir.DiskFullError(getattr(error, "errno", None) or 28, rundir.full_message(path)) from error
        for old in sorted(self._all(), key=_step_of)[:-KEPT]:
            old.unlink(missing_ok=True)

    def _all(self) -> list[Path]:
        return [path for path in self._folder.glob("step*.pt") if re.fullmatch(r"step\d+", path.stem)]


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step"))
