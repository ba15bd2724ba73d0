"""Checkpoints: what a run needs to go on after it was ended from outside. Whole files only: one is there, or it is not.

The order of the samples goes on where it was. The random numbers of dropout and augmentation do not: they begin anew, with a seed of the
step; so a run that goes on is as good as one that was never ended, and bit for bit the same only where nothing is drawn at random.
"""

import os
import re
from collections.abc import Callable, Mapping
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

    def found(self) -> tuple[Path, dict[str, Any]] | None:
        """The last sound one, and what is in it. Rank 0 looks, so that all take the same; it passes over those that are damaged."""
        path, state = self._sound() if not self._ranks.rank else (None, {})
        name = self._ranks.share("checkpoint", path.name.encode() if path else b"")[0].decode()
        if not name:
            return None
        return self._folder / name, state or self._read(self._folder / name)

    def _sound(self) -> tuple[Path | None, dict[str, Any]]:
        for path in sorted(self._all(), key=_step_of, reverse=True):
            try:
                return path, self._read(path)
            except Exception as error:  # torch says what is wrong with a file in many ways
                print(f"{path} is damaged and passed over: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return None, {}

    def _read(self, path: Path) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(path, map_location=self._ranks.device, weights_only=True)
        if state["step"] != _step_of(path):
            raise ValueError(f"it is of step {state['step']}")
        return state

    def resume(self, trainer: "Trainer") -> int:
        """Put the last checkpoint into a trainer; how many steps had been taken, 0 if there is none.

        What this rank has written of later steps is taken away, for they are taken again.
        """
        found = self.found()
        done = found[1]["step"] if found else 0
        if found:
            trainer.load_state(found[1])
            print(f"rank {self._ranks.rank} goes on from step {done}: {found[0]}")
        self._cut(done)
        return int(done)

    def _cut(self, done: int) -> None:
        """Keep what was written of the first `done` steps. A rank's own steps count from 0, all others from 1."""
        rank, run_dir = self._ranks.rank, self._folder.parent
        files: dict[str, Callable[[Mapping[str, Any]], bool]] = {
            rundir.rank_file(rank): lambda row: row.get("step", row.get("profiled", [-1])[0]) < done,
            rundir.noise_file(rank): lambda row: row.get("step", 0) <= done,
        }
        if not rank:  # the evaluation after the last step is done again: it is the row without a learning rate
            files[rundir.METRICS] = lambda row: row["step"] < done or (row["step"] == done and "lr" in row)
        for name, keep in files.items():
            if (run_dir / name).exists():
                rundir.keep_rows(run_dir / name, keep)

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
