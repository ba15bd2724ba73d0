"""Checkpoints: what a run needs to go on after it was ended from outside. Whole files only: one is there, or it is not.

The order of the samples goes on where it was. The random numbers of dropout and augmentation do not: they begin anew, with a seed of the
step; so a run that goes on is as good as one that was never ended, and bit for bit the same only where nothing is drawn at random.
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
from workbench.train.ranks import Ranks

if TYPE_CHECKING:
    from workbench.train.trainer import Trainer


KEPT = 2
"""Checkpoints that stay: the last, and one before, in case that the last was damaged with its disk."""
DAMAGED = ".damaged"
"""What the name of one that was passed over ends with from then on."""
_SAID_OF_DAMAGE = re.compile(r"PytorchStreamReader|inline_container|hasRecord|not resizable|record size|corrupt|unexpected EOF")
"""In the RuntimeErrors of torch.load that are about the file; those about memory or a device say nothing of it."""


class Checkpoints:
    """Those of a run directory."""

    def __init__(self, run_dir: Path, ranks: Ranks, every: int) -> None:
        self._folder, self._ranks, self._every = run_dir / run_directory.CHECKPOINTS, ranks, every

    def found(self) -> tuple[Path, dict[str, Any]] | None:
        """The last sound one, and what is in it; None where there is none at all. Rank 0 looks, so that all take the same.

        It passes over those that are damaged, and gives them another name.

        Raises:
            DamagedRunError: there are some, and all of them are damaged. Nothing was changed.
            OSError, MemoryError, RuntimeError: one could not be read now, which says nothing against it. Nothing was changed.
        """
        path, state = self._sound() if not self._ranks.rank else (None, {})
        name = self._ranks.share("checkpoint", path.name.encode() if path else b"")[0].decode()
        if not name:
            return None
        return self._folder / name, state or self.read(self._folder / name)

    def _sound(self) -> tuple[Path | None, dict[str, Any]]:
        passed: dict[Path, str] = {}
        for path in reversed(self._all()):
            try:
                state = self.read(path)
            except Exception as error:
                if not is_damage(error):
                    error.add_note(f"That was while {path} was read. Nothing of the run was changed: it can go on from there later.")
                    raise
                passed[path] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            for damaged, why in passed.items():
                print(f"{damaged} is damaged and passed over: {why}")
                damaged.rename(damaged.with_name(damaged.name + DAMAGED))
            return path, state
        if passed:
            each = "; ".join(f"{path.name}: {why:.120}" for path, why in passed.items())
            raise run_directory.DamagedRunError(
                f"no checkpoint in {self._folder} can be read ({each}). Nothing of the run was changed: put a sound one there, or launch "
                "its spec as a new run"
            )
        return None, {}

    def read(self, path: Path) -> dict[str, Any]:
        """What is in one, on the device of this rank; an error of the disk, of memory or of torch where it cannot be read."""
        with open(path, "rb") as file:  # opened here, what the disk says is an OSError; torch's own reader makes a RuntimeError of it
            state: dict[str, Any] = torch.load(file, map_location=self._ranks.device, weights_only=True)
        if state["step"] != _step_of(path):
            raise ValueError(f"it is of step {state['step']}")
        return state

    def resume(self, trainer: "Trainer", found: tuple[Path, dict[str, Any]] | None) -> int:
        """Put a checkpoint that was `found` into a trainer; how many steps had been taken, 0 if there is none.

        What this rank has written of later steps is taken away, for they are taken again.
        """
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
            run_directory.rank_file(rank): lambda row: _step_in(row, row.get("profiled", [-1])[0]) < done,
            run_directory.noise_file(rank): lambda row: _step_in(row, 0) <= done,
        }
        if not rank:  # the evaluation after the last step is done again: it is the row without a learning rate
            files[run_directory.METRICS] = lambda row: _step_in(row, math.inf) < done + ("lr" in row)
        for name, keep in files.items():
            if (run_dir / name).exists():
                run_directory.keep_rows(run_dir / name, keep)

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
                torch.save({"step": step, "micro_batch": trainer.spec.micro_batch, **trainer.state()}, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except (OSError, RuntimeError) as error:  # torch says a full disk as a RuntimeError of its zip file
            part.unlink(missing_ok=True)
            if isinstance(error, RuntimeError) and not re.search(r"PytorchStreamWriter|file write", str(error)):
                raise
            raise run_directory.DiskFullError(getattr(error, "errno", None) or 28, run_directory.full_message(path)) from error
        for old in [path for path in self._all() if _step_of(path) <= step][:-KEPT]:
            old.unlink(missing_ok=True)

    def _all(self) -> list[Path]:
        """Those that are there, by step. A folder that cannot be listed is an error: it is not an empty one."""
        try:
            paths = list(self._folder.iterdir())
        except FileNotFoundError:
            return []
        return sorted((path for path in paths if re.fullmatch(r"step\d+\.pt", path.name)), key=_step_of)


def is_damage(error: Exception) -> bool:
    """Does an error of torch.load say that the file is not whole, rather than that it could not be read now?"""
    if isinstance(error, OSError):
        return error.errno == errno.EINVAL  # a file so short that torch looks for its end before its beginning
    if isinstance(error, RuntimeError):
        return _SAID_OF_DAMAGE.search(str(error)) is not None and not isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, pickle.UnpicklingError | EOFError | ValueError | LookupError | TypeError | AttributeError)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step"))


def _step_in(row: Mapping[str, Any], otherwise: float) -> float:
    """The number of a row's step; `otherwise` where it has none."""
    step = row.get("step")
    return step if isinstance(step, int) else otherwise
