"""Writes and reads a run's checkpoints, from which it resumes after it was interrupted. A file is written completely, or not at all.

The order of the samples continues. The random numbers of dropout and augmentation do not: they are seeded again, by the step. So a resumed
run is as good as an uninterrupted one, and bit for bit the same only where nothing is random.
"""

import errno
import math
import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.core import run_directory
from workbench.runs.errors import is_out_of_memory
from workbench.train.ranks import Ranks

if TYPE_CHECKING:
    from workbench.train.trainer import Trainer


KEPT = 2
"""Checkpoints that are kept: the last, and the one before in case the last is damaged with its disk."""
DAMAGED = ".damaged"
"""Suffix that a damaged checkpoint's name gets when it is skipped."""
_DAMAGE_PATTERN = re.compile(r"PytorchStreamReader|inline_container|hasRecord|not resizable|record size|corrupt|unexpected EOF")
"""Marks RuntimeErrors of torch.load that are about the file, unlike those about memory or a device."""


class Checkpoints:
    """The checkpoints of a run directory."""

    def __init__(self, run_dir: Path, ranks: Ranks, every: int) -> None:
        self._folder, self._ranks, self._every = run_dir / run_directory.CHECKPOINTS, ranks, every

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The last undamaged checkpoint and its content; None if there is none at all. Rank 0 chooses, so that all take the same.

        Damaged ones are skipped and renamed.

        Raises:
            DamagedRunError: all are damaged. Nothing was changed.
            OSError, MemoryError, RuntimeError: one could not be read now, though it may be undamaged. Nothing was changed.
        """
        path, state = self._latest_undamaged() if not self._ranks.rank else (None, {})
        name = self._ranks.share("checkpoint", path.name.encode() if path else b"")[0].decode()
        if not name:
            return None
        return self._folder / name, state or self.read(self._folder / name)

    def _latest_undamaged(self) -> tuple[Path | None, dict[str, Any]]:
        skipped: dict[Path, str] = {}
        for path in reversed(self._all()):
            try:
                state = self.read(path)
            except Exception as error:
                if not is_damage(error):
                    error.add_note(f"That was while {path} was read. Nothing of the run was changed: it can go on from there later.")
                    raise
                skipped[path] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            for damaged, why in skipped.items():
                print(f"{damaged} is damaged and passed over: {why}")
                damaged.rename(damaged.with_name(damaged.name + DAMAGED))
            return path, state
        if skipped:
            each = "; ".join(f"{path.name}: {why:.120}" for path, why in skipped.items())
            raise run_directory.DamagedRunError(
                f"no checkpoint in {self._folder} can be read ({each}). Nothing of the run was changed: put a sound one there, or launch "
                "its spec as a new run"
            )
        return None, {}

    def read(self, path: Path) -> dict[str, Any]:
        """The content of a checkpoint, on this rank's device; raises the error of the disk, of memory or of torch if it cannot be read."""
        with open(path, "rb") as file:  # torch's own reader would turn the disk's OSError into a RuntimeError
            state: dict[str, Any] = torch.load(file, map_location=self._ranks.device, weights_only=True)
        if state["step"] != _step_of(path):
            raise ValueError(f"it is of step {state['step']}")
        return state

    def resume(self, trainer: "Trainer", checkpoint: tuple[Path, dict[str, Any]] | None) -> int:
        """Load a checkpoint from `latest` into a trainer; returns the steps that had been taken, 0 without a checkpoint.

        What this rank has written of later steps is removed, for they are taken again.
        """
        done = checkpoint[1]["step"] if checkpoint else 0
        if checkpoint:
            trainer.load_state(checkpoint[1])
            print(f"rank {self._ranks.rank} goes on from step {done}: {checkpoint[0]}")
        self._truncate_logs(done)
        return int(done)

    def _truncate_logs(self, done: int) -> None:
        """Keep the rows of the first `done` steps. Steps count from 0 in a rank's own file, from 1 in the others."""
        rank, run_dir = self._ranks.rank, self._folder.parent
        files: dict[str, Callable[[Mapping[str, Any]], bool]] = {
            run_directory.rank_file(rank): lambda row: _step_in(row, row.get("profiled", [-1])[0]) < done,
            run_directory.noise_file(rank): lambda row: _step_in(row, 0) <= done,
        }
        if not rank:  # the evaluation after the last step is done again: it is the row without a learning rate
            files[run_directory.METRICS] = lambda row: _step_in(row, math.inf) < done + ("lr" in row)
        for name, keep in files.items():
            if (run_dir / name).exists():
                run_directory.keep_rows(run_dir / name, keep)

    def due(self, step: int) -> bool:
        """Does this rank write a checkpoint after a step?"""
        return not step % self._every and not self._ranks.rank

    def write(self, step: int, trainer: "Trainer") -> None:
        """Write a checkpoint, completely or not at all.

        Raises:
            DiskFullError: the disk is full; the last checkpoint is kept.
        """
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step{step:08d}.pt"
        part = path.with_suffix(".part")
        try:
            with open(part, "wb") as file:
                torch.save({"step": step, "micro_batch": trainer.spec.micro_batch, **trainer.state()}, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its zip file
            part.unlink(missing_ok=True)
            if isinstance(error, RuntimeError) and not re.search(r"PytorchStreamWriter|file write", str(error)):
                raise
            raise run_directory.DiskFullError(getattr(error, "errno", None) or 28, run_directory.full_message(path)) from error
        for old in [path for path in self._all() if _step_of(path) <= step][:-KEPT]:
            old.unlink(missing_ok=True)

    def _all(self) -> list[Path]:
        """The checkpoints by step. A folder that cannot be listed is an error: it may not be empty."""
        try:
            paths = list(self._folder.iterdir())
        except FileNotFoundError:
            return []
        return sorted((path for path in paths if re.fullmatch(r"step\d+\.pt", path.name)), key=_step_of)


def is_damage(error: Exception) -> bool:
    """Does an error of torch.load mean that the file is damaged, rather than that it could not be read now?"""
    if isinstance(error, OSError):
        return error.errno == errno.EINVAL  # a file so short that torch seeks before its beginning
    if isinstance(error, RuntimeError):
        return _DAMAGE_PATTERN.search(str(error)) is not None and not is_out_of_memory(error)
    return isinstance(error, pickle.UnpicklingError | EOFError | ValueError | LookupError | TypeError | AttributeError)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step"))


def _step_in(row: Mapping[str, Any], default: float) -> float:
    """The number of a row's step, or the default."""
    step = row.get("step")
    return step if isinstance(step, int) else default
