"""Writes and reads a run's checkpoints, from which it resumes after it was interrupted. A file is written completely, or not at all.

With "ddp" a checkpoint is one file, `step00000100.pt`. Where ranks share the model or the optimizer, or have parameters of their own
(`local_sgd`), each writes its part into its own file, `step00000100.rank1.pt`; the one file names them with their checksums, and is written
when all of them are on the disk. Parts have the names of the parameters, so that other numbers of ranks and other values of `parallel` can
load them, too (`named_state`).

The order of the samples continues, and so do the random numbers of each rank and of its workers: a resumed run is bit for bit the same as
an uninterrupted one, as far as its arithmetic is. `wb.prove_resume` finds out whether that holds for a task.
"""

import contextlib
import functools
import io
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from workbench.core import run_directory, units
from workbench.runs.restarts import checkpoints_of, step_of
from workbench.train import checkpoint_file, named_state, provenance
from workbench.train.checkpoint_file import UnusableCheckpointError
from workbench.train.early_stop import lost_best
from workbench.train.optimizers import optimizer_class
from workbench.train.provenance import classes_of, dataset_identity, sample_count
from workbench.train.ranks import Ranks, layout_knobs
from workbench.train.sharding import compression_state

if TYPE_CHECKING:
    from workbench.train.trainer import Trainer


WAIT_S = 0.01
"""Seconds between two looks for the parts of other ranks."""
UNDO = "undo that change"
"""What to do about a checkpoint of other classes or of another model than the task's."""
Checkpoint = tuple[Path, dict[str, Any]]
"""Path and content of a checkpoint."""


class Checkpoints:
    """The checkpoints of a run directory.

    Those that cannot be used are passed over. When the run goes on, their files get what they are as a suffix (`.damaged`, `.newer`,
    `.foreign`, `.not-finite`), and a row of `resumes.jsonl` says why.
    """

    def __init__(self, run_dir: Path, ranks: Ranks, every: int) -> None:
        self._folder, self._ranks, self._every = run_dir / run_directory.CHECKPOINTS, ranks, every
        self._passed_over: dict[Path, UnusableCheckpointError] = {}
        self._thread: threading.Thread | None = None
        self._begun, self._given_up = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._failed = 0  # saves in a row
        self._step = self._choices = 0
        self._best: tuple[float, int] | None = None
        self._warn: Callable[[str], None] = print
        self._code: dict[str, Any] = {}
        self._finite = 0
        self._note: str | None = None
        self._undeleted: str | None = None
        self.first_samples: dict[str, list[Any]] | None = None

    def latest(self) -> Checkpoint | None:
        """The last usable checkpoint; None if there is none at all. Rank 0 chooses, so that all take the same.

        Raises:
            DamagedRunError: none can be used. Nothing was changed.
            OSError, MemoryError, RuntimeError: one could not be read now, though it may be undamaged. Nothing was changed.
        """
        while True:
            usable, state = self._latest_usable() if not self._ranks.rank else (None, {})
            name = self._share(usable.name if usable else "")[0]
            if not name:
                return None
            path = self._folder / name
            state = state or self.read(path)
            answers = self._share(json.dumps(self._damage(path, state))) if state.get("shards") else []
            bad = [json.loads(text) for text in answers if text != "null"]
            if not bad:
                return path, state
            self._passed_over[path] = UnusableCheckpointError(*bad[0])

    def best(self, last: Checkpoint) -> Checkpoint | None:
        """The checkpoint that `RunSpec.best` says, as the last one has it; None = nothing was evaluated where one was written.

        Raises:
            UnusableCheckpointError: it is damaged.
        """
        if not last[1].get("best"):
            return None
        path = self._path(last[1]["best"][1])
        state = self.read(path)
        if state.get("shards") and (damage := self._damage(path, state)):
            raise UnusableCheckpointError(*damage)
        return path, state

    def _share(self, text: str) -> list[str]:
        self._choices += 1
        return [value.decode() for value in self._ranks.share(f"checkpoint {self._choices}", text.encode())]

    def _damage(self, path: Path, state: Mapping[str, Any]) -> tuple[str, str] | None:
        """What is wrong with the ranks' files of a checkpoint, and its kind. Each rank looks at some of them."""
        shards: list[Any] = state["shards"] if isinstance(state["shards"], list) else [None]
        for number in range(self._ranks.rank, len(shards), self._ranks.world_size):
            part = part_path(path, number)
            try:
                stated = shards[number]["crc32"]
                with open(part, "rb") as file:
                    checksum = checkpoint_file.verify(file)
                if checksum != stated:
                    raise UnusableCheckpointError("it is of another checkpoint than the others: its checksum (CRC-32) differs")
                checkpoint_file.load_part(part)
            except FileNotFoundError:
                return f"{part.name} is missing", "partial"
            except UnusableCheckpointError as error:
                return f"{part.name}: {error}", error.kind
            except (LookupError, TypeError):
                return "its list of the ranks' files is not a list of them", "foreign"
        return None

    def _latest_usable(self) -> tuple[Path | None, dict[str, Any]]:
        for path in reversed(checkpoints_of(self._folder.parent)):
            if path in self._passed_over:
                continue
            try:
                state = self.read(path)
                if (finite := state.get("finite at")) and finite != state["step"] and self._path(finite).exists():
                    raise UnusableCheckpointError("its weights are NaN or infinite", "not-finite")
                return path, state
            except UnusableCheckpointError as error:
                self._passed_over[path] = error
            except Exception as error:
                error.add_note(f"This happened while {path} was read. The run was not changed: it can be resumed from there later.")
                raise
        if self._passed_over:
            each = "; ".join(f"{path.name}: {why!s:.200}" for path, why in self._passed_over.items())
            todo = ", or ".join(dict.fromkeys(why.todo for why in self._passed_over.values()))
            raise run_directory.DamagedRunError(
                f"no checkpoint in {self._folder} can be used ({each}). The run was not changed: {todo}, or launch its spec as a new run"
            )
        return None, {}

    def read(self, path: Path) -> dict[str, Any]:
        """The content of a checkpoint, on this rank's device.

        Raises:
            UnusableCheckpointError: it is damaged, or no checkpoint of this step that this workbench reads.
            OSError, MemoryError, RuntimeError: it could not be read now: the error of the disk, of memory or of torch.
        """
        state = checkpoint_file.load(path, self._ranks.device)
        if state["step"] != step_of(path):
            raise UnusableCheckpointError(f"it is of step {state['step']!r:.20}", "foreign")
        return state

    def resume(self, trainer: "Trainer", checkpoint: Checkpoint | None) -> int:
        """Load a checkpoint from `latest` into a trainer; returns the steps that had been taken, 0 without a checkpoint.

        One of another model is passed over. What this rank has written of later steps is removed, for they are taken again.

        Raises:
            DamagedRunError: none fits the model. Nothing was changed.
            TaskError: one that was imported does not fit, one is of another optimizer, or no checkpoint of this trainer could be loaded
                again. Nothing was changed.
        """
        source, groups = None, {"param_groups": named_state.optimizer_groups(trainer)}
        checkpoint_file.Copies(tensors=False)({"module": named_state.other_entries(trainer.module), "optimizer": groups})
        self._code = provenance.code_parts(trainer.task, trainer.spec.schedule) if not self._ranks.rank else {}
        while checkpoint:
            try:
                source = self._source(trainer, checkpoint)
                text = provenance.mismatch(trainer, checkpoint[1], source)
                why = UnusableCheckpointError(text, "foreign", *[UNDO] * text.startswith("it is of ")) if text else None
            except UnusableCheckpointError as error:
                why = error
            if trainer.pipeline:  # each rank has compared its own stages only
                answers = [json.loads(text) for text in self._share(json.dumps(why and [str(why), why.kind, why.todo]))]
                why = next((UnusableCheckpointError(*answer) for answer in answers if answer), None)
            if not why:
                provenance.refuse_other_optimizer(trainer, checkpoint[0].name, checkpoint[1], source)
                break
            named_state.refuse_import(checkpoint[1], why)
            self._passed_over[checkpoint[0]] = why
            checkpoint = self.latest()  # raises if there is no other
        if not checkpoint:
            self._cut_rows(0, {})
            return 0
        path, state = checkpoint
        options = provenance.optimizer_options(trainer)
        trainer.load_state(state, source)
        done = int(state["step"])
        best = state.get("best")
        if best and not lost_best(trainer.spec.best, state) and self._path(best[1]).exists():
            self._best = best
        self._finite = state.get("finite at", 0)
        self._cut_rows(done, state.get("rows") or {})  # those of earlier workbenches have none
        print(f"rank {self._ranks.rank} goes on from step {done}: {path}")
        if not self._ranks.rank:
            self._tell(path, state, provenance.changes(trainer, state, self._code, options))
        return done

    def _source(self, trainer: "Trainer", checkpoint: Checkpoint) -> named_state.Source | None:
        """A checkpoint's tensors by name, where ranks share the model or the optimizer, now or before."""
        path, state = checkpoint
        if not state.get("shards") and not _is_shared(trainer):
            return None
        try:
            return named_state.Source(state, functools.partial(part_path, path), (trainer.ranks.rank, trainer.ranks.world_size))
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, UnusableCheckpointError):
                raise
            raise UnusableCheckpointError(f"its parts have no names: {error!r:.100}", "foreign") from error

    def _tell(self, path: Path, state: Mapping[str, Any], notes: list[str]) -> None:
        """Say what has changed and what was passed over, in the log and the run directory; rename that, so that it is not tried again."""
        passed_over = {unusable.name: str(why) for unusable, why in self._passed_over.items()}
        if any(why.kind == "not-finite" for why in self._passed_over.values()):
            for earlier in self._folder.glob("*.not-finite"):  # of resumes before: they would fill the disk
                earlier.unlink(missing_ok=True)
        for unusable, why in self._passed_over.items():
            print(f"{unusable} is {why.kind} and passed over: {why}")
            checkpoint_file.set_aside(unusable, why.kind)
        self.first_samples = state.get("first samples")
        for note in notes:
            print(f"note: {note}")
        row = {"step": state["step"], "checkpoint": path.name, "passed_over": passed_over, "notes": notes, "time": time.time()}
        writer = run_directory.LineWriter(self._folder.parent / run_directory.RESUMES)
        writer.write([row])
        writer.close()

    def _cut_rows(self, done: int, last: Mapping[int, str]) -> None:
        """Keep the rows of the first `done` steps. Steps count from 0 in a rank's own file, from 1 in the others.

        Args:
            done: steps that were taken.
            last: by rank, the line of the last of them in its own file, if that did not get there before the run ended.
        """
        rank, run_dir = self._ranks.rank, self._folder.parent
        files: dict[str, Callable[[Mapping[str, Any]], bool]] = {
            run_directory.rank_file(rank): lambda row: _step_in(row, row.get("profiled", [row.get("after", 0) - 1])[0]) < done,
            run_directory.noise_file(rank): lambda row: _step_in(row, 0) <= done,
        }
        if not rank:  # the evaluation after the last step is done again: it is the row without a learning rate
            for name in (run_directory.METRICS, run_directory.EVALUATIONS, run_directory.GRADIENTS, run_directory.USAGE):
                files[name] = lambda row: _step_in(row, math.inf) < done + ("lr" in row or row.get("step") != row.get("steps"))
            names = [path.name for path in run_dir.glob("rank*.jsonl")]  # of ranks that were lost, too
            more = [name for name in names if (run_directory.rank_of(name) or 0) >= self._ranks.world_size]
            files |= dict.fromkeys(more, files[run_directory.rank_file(0)])
        for name, keep in files.items():
            if (run_dir / name).exists():
                run_directory.keep_rows(run_dir / name, keep)
        for path, line in ((run_dir / name, last.get(run_directory.rank_of(name) or 0)) for name in files if name.startswith("rank")):
            there = {_step_in(row, -1) for row in run_directory.LineTail(path).read()}
            if line and path.exists() and done - 1 not in there:  # a new run that begins with this checkpoint has no rows of before
                with contextlib.closing(run_directory.LineWriter(path)) as writer:
                    writer.append(line.encode())

    def _path(self, step: int) -> Path:
        return self._folder / f"step{step:08d}.pt"

    def due(self, step: int) -> bool:
        """Is a checkpoint written after a step?"""
        return not step % self._every

    def write(self, step: int, trainer: "Trainer", row: str = "", *, wait: bool = True, score: float | None = None) -> None:
        """Write a checkpoint, completely or not at all. All ranks call it, when they have written the rows of all earlier steps.

        Rank 0 waits for the others' rows, and for their parts: no rank's file lacks a step when the run goes on from here.

        Args:
            step: how many steps are done.
            row: the line of this step in the rank's own file, as far as it is known. It gets there when the next step begins.
            wait: until it is written. Else the state is copied to host memory, and a thread writes it; what goes wrong there is a warning
                of the trainer, and the training goes on.
            score: of an evaluation after this step; the checkpoint with the lowest is kept beside the last ones. Rank 0 knows it.

        Raises:
            DiskFullError: the disk is full; the last checkpoint is kept.
            OSError: another error of the disk; the last checkpoint is kept.
        """
        self.finish(goes_on=True)
        best = self._best
        if score is not None and not math.isnan(score) and (best is None or score < best[0]):
            best = float(score), step
        job = self._job(step, trainer, row, checkpoint_file.Copies(tensors=not wait), best)
        if wait:
            job()
            return
        self._step, self._warn = step, trainer.warn
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()

    def _run(self, job: Callable[[], None]) -> None:
        self._begun.set()
        try:
            job()
        except BaseException as error:
            self._error = error

    def finish(self, *, goes_on: bool = False) -> None:
        """Wait until the last checkpoint is written, and warn if it was not, and when the next is tried if the training `goes_on`.

        Raises:
            Exception: an error that is not about the disk.
        """
        if self._thread is None:
            return
        if self._begun.wait(1.0):  # else an interrupt came before it was started, and it cannot be waited for
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if isinstance(error, OSError):
            self._failed += 1
            last = "their folder cannot be listed"  # which ends no training
            with contextlib.suppress(OSError):
                last = next((f"the last is {path.name}" for path in reversed(checkpoints_of(self._folder.parent))), "there is none yet")
            again = f" (the {self._failed} latest all failed)" * (self._failed > 1)
            words = f"the checkpoint after step {self._step} could not be written{again}, and {last}: {checkpoint_file.said(error)}"
            following = (self._step // self._every + 1) * self._every
            if not goes_on or self._failed & (self._failed - 1) == 0:  # the 1st, 2nd, 4th, 8th: a full disk stays full
                self._warn(words + f". The training goes on, and the next is tried after step {following}" * goes_on)
        elif error:
            raise error
        else:
            if self._failed > 1:
                self._warn(f"the checkpoint after step {self._step} was written, after {self._failed} that could not be")
            self._failed = 0
        if self._note:
            self._warn(self._note)
            self._note = ""
        if self._undeleted:
            self._warn(self._undeleted)
            self._undeleted = ""

    @property
    def last_step(self) -> int:
        """Of the checkpoint from which the run goes on: the last whole one with finite weights, or the last; 0 if there is none."""
        return self._finite or max(map(step_of, checkpoints_of(self._folder.parent)), default=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind:
            self._given_up.set()  # another rank may be dead, whose part never comes
        self.finish()

    def _job(
        self, step: int, trainer: "Trainer", row: str, copy: checkpoint_file.Copies, best: tuple[float, int] | None
    ) -> Callable[[], None]:
        """What remains to be done when the training goes on; it uses copies only."""
        path, shared = self._path(step), _is_shared(trainer)
        mine: dict[str, Any] = {"row": row, "random": trainer.random_state()}
        part, state, weights = dict[str, Any](), dict[str, Any](), list[Any]()
        if shared:
            parts, values = named_state.parts_to_write(trainer)
            tensors = checkpoint_file.Copies()  # always: a view would bring all that it is a view of
            part = {"parts": {key: tensors(each.tensor) for key, each in parts.items()}}
            part |= {"other": copy(named_state.other_entries(trainer.module), "module"), "same": named_state.other_names(trainer.module)}
            if compression := compression_state(trainer.model):
                part["compression"] = tensors(compression)
            where = {key: (each.shape, each.offset, tuple(each.tensor.shape)) for key, each in parts.items()}
            mine["shard"] = {"parts": where, "values": copy(values)}
            weights = [tensor for (section, _, _), tensor in part["parts"].items() if section == "module"]
        groups = named_state.optimizer_groups(trainer)
        if trainer.pipeline and not trainer.layout.readers.rank:
            mine["groups"] = copy(groups, "optimizer")
        if not self._ranks.rank:
            state = {
                "step": step,
                "micro_batch": trainer.spec.micro_batch,
                "samples": sample_count(trainer),
                "spec": trainer.spec.to_json(),
            }
            state |= {"layout": layout_knobs(trainer.spec), "best": best, "position": trainer.position(step)}
            state |= {"classes": classes_of(trainer.loader.dataset), "data": dataset_identity(trainer.loader.dataset)}
            state |= {"code": self._code, "optimizer class": optimizer_class(trainer.optimizer).__name__}
            state["first samples"] = self.first_samples
            if shared:
                small = {name: value for name, value in trainer.state().items() if name in ("scheduler", "scaler")}
                state = copy(state | {**small, "module": {}, "optimizer": {"groups": groups}, "ema": {}})
            else:
                state = copy(state | {**trainer.state(), "names": [group["names"] for group in groups]})
                weights = [state["module"].get(name) for name, _ in trainer.module.named_parameters()]
        return functools.partial(self._finish_job, step, path, mine, part, state, weights, trainer.spec.keep_checkpoints)

    def _finish_job(
        self, step: int, path: Path, mine: dict[str, Any], part: dict[str, Any], state: dict[str, Any], weights: list[Any], keep: int
    ) -> None:
        own: OSError | None = None
        mine["finite"] = checkpoint_file.are_finite(weights)
        if part:
            try:
                mine["shard"]["crc32"] = self._save(part, part_path(path, self._ranks.rank))
            except OSError as error:
                own = error
                mine["error"] = [error.errno, error.strerror or str(error)]
        parts = self._collect(step, mine)
        if self._ranks.rank or not parts:
            return
        try:
            for rank, each in parts.items():
                if "error" in each:
                    code, why = each["error"]
                    raise own or OSError(code, f"rank {rank} could not write its part: {why}", str(part_path(path, rank)))
            state |= {name: {rank: each[key] for rank, each in parts.items()} for name, key in (("rows", "row"), ("random", "random"))}
            if part:
                state["shards"] = [parts[rank]["shard"] for rank in sorted(parts)]
            if "groups" in mine:
                state["optimizer"]["groups"] = [group for rank in sorted(parts) for group in parts[rank].get("groups", ())]
            state["finite at"] = step if all(each["finite"] for each in parts.values()) else self._finite
            self._save(state, path)
            self._best = state["best"]  # not before: the best so far is kept if this could not be written
            self._finite = state["finite at"]
            if self._finite != step and self._note is None:
                kept = f"after step {self._finite} they are finite: that checkpoint is kept, and wb.launch(resume=run) goes on from it"
                self._note = f"weights in the checkpoint after step {step} are NaN or infinite" + f"; {kept}" * bool(self._finite)
        except BaseException:
            for file in self._folder.glob(f"{path.stem}.rank*.pt"):
                file.unlink(missing_ok=True)
            raise
        try:
            checkpoint_file.delete_old(self._folder, step, keep, (self._finite, self._best and self._best[1]))
        except OSError as error:
            if self._undeleted is None:
                why = checkpoint_file.said(error)
                self._undeleted = f"the checkpoint after step {step} was written, but older ones could not be deleted: {why}"

    def _save(self, state: dict[str, Any], path: Path) -> str:
        """Write a file, completely or not at all; returns its checksum."""
        part = path.with_suffix(".part")
        try:
            self._folder.mkdir(exist_ok=True)
            checksum = checkpoint_file.save(state, part)
            part.replace(path)
        except OSError as error:
            needed = 0
            with contextlib.suppress(OSError):
                needed = max((file.stat().st_size for file in (part, *checkpoints_of(self._folder.parent)) if file.exists()), default=0)
                part.unlink(missing_ok=True)
            run_directory.raise_if_full(path, error, needed=f", and a checkpoint takes {units.bytes_(needed)} or more")
            raise
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return checksum

    def _collect(self, step: int, part: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """On rank 0 what each rank adds to a checkpoint, by rank, or nothing if one does not come; the others go on at once."""
        ranks, store = self._ranks, self._ranks.store
        keys = [f"{ranks.agreements}/checkpoint of step {step}, rank {rank}" for rank in range(ranks.world_size)]
        if ranks.rank:
            torch.save(part, file := io.BytesIO())
            store.set(keys[ranks.rank], file.getvalue())
            return {}
        parts = {0: part}
        for rank, key in list(enumerate(keys))[1:]:
            while not store.check([key]):  # not wait(): it would keep the store from the training
                if self._given_up.wait(WAIT_S):
                    return {}
            parts[rank] = torch.load(io.BytesIO(store.get(key)), weights_only=True)
            store.delete_key(key)
        return parts


def part_path(path: Path, rank: int) -> Path:
    """The file of a rank, beside that of the checkpoint."""
    return path.with_name(f"{path.stem}.rank{rank}.pt")


def _is_shared(trainer: "Trainer") -> bool:
    """Do ranks share the model or the optimizer, or has each its own?"""
    spec = trainer.spec
    return spec.parallel != "ddp" or not spec.whole_models or spec.local_sgd != "none" or trainer.compresses


def _step_in(row: Mapping[str, Any], default: float) -> float:
    """The number of a row's step, or the default."""
    step = row.get("step")
    return step if isinstance(step, int) else default
