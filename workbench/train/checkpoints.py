"""Writes and reads a run's checkpoints, from which it resumes after it was interrupted. A file is written completely, or not at all.

The order of the samples continues, and so do the random numbers of each rank and of its workers: a resumed run is bit for bit the same as
an uninterrupted one, as far as its arithmetic is. `wb.prove_resume` finds out whether that holds for a task.
"""

import io
import math
import re
import time
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from workbench.core import run_directory, units
from workbench.runs.errors import is_out_of_memory
from workbench.train import checkpoint_file
from workbench.train.checkpoint_file import UnusableCheckpointError
from workbench.train.ranks import TIMEOUT, Ranks

if TYPE_CHECKING:
    from workbench.train.trainer import Trainer


KEPT = 2
"""Checkpoints that are kept: the last, and the one before in case the last is damaged with its disk."""
Checkpoint = tuple[Path, dict[str, Any]]
"""Path and content of a checkpoint."""


class Checkpoints:
    """The checkpoints of a run directory.

    Those that cannot be used are passed over. When the run goes on, their names get what they are as a suffix (`.damaged`, `.newer`,
    `.foreign`), and a row of `resumes.jsonl` says why.
    """

    def __init__(self, run_dir: Path, ranks: Ranks, every: int) -> None:
        self._folder, self._ranks, self._every = run_dir / run_directory.CHECKPOINTS, ranks, every
        self._passed_over: dict[Path, UnusableCheckpointError] = {}
        self._choices = 0

    def latest(self) -> Checkpoint | None:
        """The last usable checkpoint; None if there is none at all. Rank 0 chooses, so that all take the same.

        Raises:
            DamagedRunError: none can be used. Nothing was changed.
            OSError, MemoryError, RuntimeError: one could not be read now, though it may be undamaged. Nothing was changed.
        """
        path, state = self._latest_usable() if not self._ranks.rank else (None, {})
        self._choices += 1
        name = self._ranks.share(f"checkpoint {self._choices}", path.name.encode() if path else b"")[0].decode()
        if not name:
            return None
        return self._folder / name, state or self.read(self._folder / name)

    def _latest_usable(self) -> tuple[Path | None, dict[str, Any]]:
        for path in reversed(self._all()):
            if path in self._passed_over:
                continue
            try:
                return path, self.read(path)
            except UnusableCheckpointError as error:
                self._passed_over[path] = error
            except Exception as error:
                error.add_note(f"This happened while {path} was read. The run was not changed: it can be resumed from there later.")
                raise
        if self._passed_over:
            each = "; ".join(f"{path.name}: {why!s:.200}" for path, why in self._passed_over.items())
            raise run_directory.DamagedRunError(
                f"no checkpoint in {self._folder} can be used ({each}). The run was not changed: put an undamaged one there, or launch "
                "its spec as a new run"
            )
        return None, {}

    def read(self, path: Path) -> dict[str, Any]:
        """The content of a checkpoint, on this rank's device.

        Raises:
            UnusableCheckpointError: it is damaged, or no checkpoint of this step that this workbench reads.
            OSError, MemoryError, RuntimeError: it could not be read now: the error of the disk, of memory or of torch.
        """
        state = checkpoint_file.load(path, self._ranks.device)
        if state["step"] != _step_of(path):
            raise UnusableCheckpointError(f"it is of step {state['step']!r:.20}", "foreign")
        return state

    def resume(self, trainer: "Trainer", checkpoint: Checkpoint | None) -> int:
        """Load a checkpoint from `latest` into a trainer; returns the steps that had been taken, 0 without a checkpoint.

        One of another model is passed over. What this rank has written of later steps is removed, for they are taken again.

        Raises:
            DamagedRunError: none fits the model. Nothing was changed.
        """
        while checkpoint and (why := _mismatch(trainer, checkpoint[1])):
            self._passed_over[checkpoint[0]] = UnusableCheckpointError(why, "foreign")
            checkpoint = self.latest()  # raises if there is no other
        if not checkpoint:
            self._cut_rows(0, "")
            return 0
        path, state = checkpoint
        trainer.load_state(state)
        done = int(state["step"])
        rows = state.get("rows") or {}  # those of earlier workbenches have none
        self._cut_rows(done, rows.get(self._ranks.rank, ""))
        print(f"rank {self._ranks.rank} goes on from step {done}: {path}")
        if not self._ranks.rank:
            self._tell(path, state, trainer)
        return done

    def _tell(self, path: Path, state: Mapping[str, Any], trainer: "Trainer") -> None:
        """Say what was passed over, and why, in the log and in the run directory; rename it, so that it is not tried again."""
        passed_over = {unusable.name: str(why) for unusable, why in self._passed_over.items()}
        for unusable, why in self._passed_over.items():
            print(f"{unusable} is {why.kind} and passed over: {why}")
            unusable.rename(unusable.with_name(f"{unusable.name}.{why.kind}"))
        notes = []
        before, now = state.get("samples"), _samples(trainer)
        if "samples" in state and before != now:
            notes.append(f"the dataset has {_many(now)} now, and had {_many(before)} before: the order of the samples differs")
            print(f"note: {notes[-1]}")
        row = {"step": state["step"], "checkpoint": path.name, "passed_over": passed_over, "notes": notes, "time": time.time()}
        writer = run_directory.LineWriter(self._folder.parent / run_directory.RESUMES)
        writer.write([row])
        writer.close()

    def _cut_rows(self, done: int, last: str) -> None:
        """Keep the rows of the first `done` steps. Steps count from 0 in a rank's own file, from 1 in the others.

        Args:
            done: steps that were taken.
            last: the line of the last of them in the rank's own file, if that did not get there before the run ended.
        """
        rank, run_dir = self._ranks.rank, self._folder.parent
        files: dict[str, Callable[[Mapping[str, Any]], bool]] = {
            run_directory.rank_file(rank): lambda row: _step_in(row, row.get("profiled", [row.get("after", 0) - 1])[0]) < done,
            run_directory.noise_file(rank): lambda row: _step_in(row, 0) <= done,
        }
        if not rank:  # the evaluation after the last step is done again: it is the row without a learning rate
            for name in (run_directory.METRICS, run_directory.EVALUATIONS):
                files[name] = lambda row: _step_in(row, math.inf) < done + ("lr" in row or row.get("step") != row.get("steps"))
        for name, keep in files.items():
            if (run_dir / name).exists():
                run_directory.keep_rows(run_dir / name, keep)
        if last:
            path = run_dir / run_directory.rank_file(rank)
            if not any(_step_in(row, -1) == done - 1 for row in run_directory.LineTail(path).read()):
                writer = run_directory.LineWriter(path)
                writer.append(last.encode())
                writer.close()

    def due(self, step: int) -> bool:
        """Is a checkpoint written after a step?"""
        return not step % self._every

    def write(self, step: int, trainer: "Trainer", row: str = "") -> None:
        """Write a checkpoint, completely or not at all. All ranks call it, when they have written the rows of all earlier steps.

        Rank 0 writes. It waits for the others' rows: no rank's file lacks a step when the run goes on from here.

        Args:
            step: how many steps are done.
            trainer: whose state is written.
            row: the line of this step in the rank's own file, as far as it is known. It gets there when the next step begins.

        Raises:
            DiskFullError: the disk is full; the last checkpoint is kept.
            OSError: another error of the disk; the last checkpoint is kept.
        """
        parts = self._collect(step, {"row": row, "random": trainer.random_state()})
        if self._ranks.rank:
            return
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step{step:08d}.pt"
        part = path.with_suffix(".part")
        rows, random = ({rank: part[name] for rank, part in parts.items()} for name in ("row", "random"))
        state = {"step": step, "micro_batch": trainer.spec.micro_batch, "samples": _samples(trainer)}
        state |= {"rows": rows, "random": random, **trainer.state()}
        try:
            checkpoint_file.save(state, part)
            part.replace(path)
        except OSError as error:
            needed = max((file.stat().st_size for file in (part, *self._all()) if file.exists()), default=0)
            part.unlink(missing_ok=True)
            run_directory.raise_if_full(path, error, needed=f", and a checkpoint takes {units.bytes_(needed)} or more")
            raise
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        for old in [path for path in self._all() if _step_of(path) <= step][:-KEPT]:
            old.unlink(missing_ok=True)

    def _collect(self, step: int, part: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """On rank 0 what each rank adds to a checkpoint, by rank; the others hand theirs over and go on."""
        ranks, store = self._ranks, self._ranks.store
        keys = [f"{ranks.agreements}/checkpoint of step {step}, rank {rank}" for rank in range(ranks.world_size)]
        if ranks.rank:
            torch.save(part, file := io.BytesIO())
            store.set(keys[ranks.rank], file.getvalue())
            return {}
        parts = {0: part}
        for rank, key in list(enumerate(keys))[1:]:
            store.wait([key], TIMEOUT)
            parts[rank] = torch.load(io.BytesIO(store.get(key)), weights_only=True)
            store.delete_key(key)
        return parts

    def _all(self) -> list[Path]:
        """The checkpoints by step. A folder that cannot be listed is an error: it may not be empty."""
        try:
            paths = list(self._folder.iterdir())
        except FileNotFoundError:
            return []
        return sorted((path for path in paths if re.fullmatch(r"step\d+\.pt", path.name)), key=_step_of)


def _mismatch(trainer: "Trainer", state: Mapping[str, Any]) -> str:
    """In what a checkpoint differs from the model; "" = it was loaded, by the model's own rules: a buffer may have another shape."""
    try:
        trainer.module.load_state_dict(state["module"])
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        refused = f"it is of another model: {' '.join(str(error).split()):.200}"
    else:
        return ""
    mine, its = (
        {name: tuple(getattr(weight, "shape", ())) for name, weight in weights.items()}
        for weights in (trainer.module.state_dict(), state["module"])
    )
    for name, shape in mine.items():
        if name not in its:
            return f"it is of another model: it has no {name}"
        if its[name] != shape:
            return f"it is of another model: its {name} has the shape {its[name]}, this model's has {shape}"
    return next((f"it is of another model: this one has no {name}" for name in its if name not in mine), refused)


def _samples(trainer: "Trainer") -> int | None:
    """Samples of the dataset; None = a stream."""
    dataset = trainer.loader.dataset
    return len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset) else None


def _many(samples: int | None) -> str:
    return "no length" if samples is None else f"{samples:,} samples"


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step"))


def _step_in(row: Mapping[str, Any], default: float) -> float:
    """The number of a row's step, or the default."""
    step = row.get("step")
    return step if isinstance(step, int) else default
