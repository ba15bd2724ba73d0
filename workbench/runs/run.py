"""Reads a run directory: the state of a run, its timelines, metrics, logs and errors; and waits for a run or stops it.

A Run holds nothing that the directory does not. So it can be read while it runs, after a crash, from another process, or a year later.
"""

import contextlib
import dataclasses
import math
import os
import platform
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, cast

from workbench.core import late, progress, run_directory, units
from workbench.core.checks import NearestAttribute, is_whole, path_of
from workbench.core.display import table
from workbench.core.run_directory import CHECKPOINTS, ERRORS, LOCK, LOGS, METRICS, NODES, RUN_JSON, TRACES, DamagedRunError
from workbench.runs.failure import Failure, RunError
from workbench.runs.guards import end_guard, find_guard, is_guarded
from workbench.runs.hang import Hang, hang_note
from workbench.runs.rank_steps import RankMeans
from workbench.runs.restarts import Restart, present_ranks, restart_notes, restarts_of
from workbench.runs.root_cause import first_failure
from workbench.runs.rows import RunRows, loss_note, losses_of, resume_notes
from workbench.runs.slurm_queue import Job, is_final
from workbench.runs.spec import AUTO, RunSpec, Spec, SpecError, spec_from_json
from workbench.timeline.timeline import Timeline

State = Literal["queued", "running", "finished", "failed", "stopped", "timeout", "abandoned", "lost"]
"""The state of a run. `queued`: Slurm has not begun it yet. `abandoned`: the process that launched it went away. `lost`: its guard was
killed, so nobody saw the end."""

ACTIVE = ("queued", "running")
"""States of a run that has not ended."""
_TICK, _CANCELLING = 0.05, 60.0
"""Seconds between two looks at the state of a run, and those that Slurm may take to end a job, at least."""
_OUTPUT = f"{LOGS}/*/attempt_*/*/std*.log"
_WRITTEN_BY_RANKS = ("*.jsonl", run_directory.ENERGY, f"{CHECKPOINTS}/*", f"{TRACES}/*", f"{ERRORS}/*", _OUTPUT, f"{NODES}/*/{_OUTPUT}")
"""Files that only the ranks of a run write: all others change also when somebody tries to resume it."""

_on_run_started: ContextVar[tuple[Callable[["Run"], None], ...]] = ContextVar("on_run_started", default=())


class RunFormatError(ValueError):
    """The directory was written by a newer workbench."""


class RunGoneError(DamagedRunError):
    """The directory of a run was deleted or moved."""


class Run(NearestAttribute):
    """One launched run. Get one from `launch`, or read one back with `Run.load`.

    Attributes:
        path: its directory.
        id: unique; every process of the run carries it in its environment.
        name: a name for people.
        spec: the RunSpec (or ScriptSpec) that was launched.
        experiment: what the workbench measured with it, such as "diagnose"; empty = it is a training.
    """

    def __init__(self, path: Path, info: Mapping[str, Any], written: run_directory.Version | None = None) -> None:
        self.path, self._written = path, written
        self.id: str = info["id"]
        self.name: str = info["name"]
        self.created: float = info["created"]
        self.spec: Spec = spec_from_json(info["spec"])
        self.experiment: str = run_directory.experiment_of(info)
        if info["launch_dir"] not in (".", ".."):
            raise DamagedRunError(f"{path / RUN_JSON} is damaged: launch_dir={info['launch_dir']!r:.80} leads out of it; only .. may")
        self._launch_dir = (path / info["launch_dir"]).resolve()
        self._host: str = info["host"]
        self._outcome: Mapping[str, Any] | None = None
        self._take(info)
        self._job = Job.of(path) if info.get("batch") else None
        if info.get("batch"):  # an outcome may be that of an attempt before the job went back into the queue
            self._outcome = None
        self._meeting: Mapping[str, Any] | None = info.get("rendezvous")
        self._limit: float | None = info.get("timeout")
        self._files = RunRows(path)
        self._read = self._files.read

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Run":
        """Read a run directory, in any state.

        Raises:
            DamagedRunError: it is not a run directory, or its run.json cannot be read.
            RunFormatError: a newer workbench wrote it.
        """
        file = path_of("run", path, "a Run, or the path of its directory") / RUN_JSON
        version = run_directory.version_of(file.parent)
        info = run_directory.read_json(file)
        written = info.get("format")
        if not isinstance(written, int):
            raise DamagedRunError(f"{file} is damaged: it has no format number")
        if written > run_directory.FORMAT:
            raise RunFormatError(
                f"{file.parent} was written in format {written} by a newer workbench; this one reads formats up to {run_directory.FORMAT}. "
                "Try: pip install --upgrade training-workbench"
            )
        run_directory.check_info(file, info)
        try:
            run = cls(file.parent, info, version)
        except (KeyError, TypeError, AttributeError, SpecError) as error:
            raise DamagedRunError(f"{file} is damaged: {type(error).__name__}: {error!s:.500}") from error
        for callback in _on_run_started.get():
            callback(run)
        return run

    # --- its state

    def _take(self, info: Mapping[str, Any]) -> None:
        """Take what run.json says that changes when a run goes on from a checkpoint."""
        self._host = info.get("host", self._host)
        self._outcome = info.get("outcome")
        self._begun: float = info.get("begun", self.created)
        self._before: float = info.get("seconds_before", 0.0)
        self._ranks = present_ranks(info)

    def _read_info(self) -> None:
        self._written = run_directory.version_of(self.path)  # before it is read: whatever is written later is read another time
        try:
            self._take(run_directory.read_json(self.path / RUN_JSON))
        except DamagedRunError as error:
            if (self.path / RUN_JSON).exists():
                raise
            since = "while it runs; its processes still run, and run.stop() ends them" if self._guard() else "before its end was seen"
            raise RunGoneError(f"{self.path / RUN_JSON} is missing: the directory was deleted or moved {since}") from error

    def _guard(self) -> int | None:
        """The id of the process that guards the run on this machine; None = none."""
        return find_guard(self._launch_dir, self.id if self._launch_dir == self.path.resolve() else None)

    @property
    def state(self) -> State:
        """The state of the run at this moment."""
        if self._job is not None and not is_final(self._outcome):
            state, self._outcome = self._job.standing(run_directory.read_json(self.path / RUN_JSON).get("outcome"))
            return cast(State, state)
        if self._job is None and self._outcome is not None and run_directory.version_of(self.path) not in (None, self._written):
            self._read_info()  # it goes on from a checkpoint, maybe
        if self._outcome is None:
            alive = is_guarded(self._launch_dir)  # first the lock, then the file: the guard writes, then lets go
            self._read_info()
            if self._outcome is None and self._launch_dir != self.path:  # one of a sweep: what ended the launch ended it
                self._outcome = run_directory.read_json(self._launch_dir / RUN_JSON).get("outcome")
            if self._outcome is None:
                return "running" if alive else "lost"
        return cast(State, self._outcome["state"])

    @property
    def ok(self) -> bool:
        """Whether it finished without an error."""
        return self.state == "finished"

    @property
    def error(self) -> Failure | None:
        """Why it failed: the rank that failed first, its traceback and what to do. None while it runs, or if it did not fail."""
        if self.state in (*ACTIVE, "finished", "stopped"):
            return None
        if self._outcome is not None and self._outcome.get("error"):  # one of a sweep that failed while the launch went on
            return self._with_advice(Failure.from_outcome(self._outcome["error"]))
        failure = first_failure(self._launch_dir, self._outcome or {"state": self.state})
        return failure and self._with_advice(failure)

    @property
    def hang(self) -> Hang | None:
        """Which rank holds up the run, its line of code, and what the others wait in. `over` = it continued; None = there was no hang."""
        return Hang.load(self._launch_dir)

    def _with_advice(self, failure: Failure) -> Failure:
        """Add where its rank's stderr is, and a hint to `would_fit` where memory ran out in steps that it can predict."""
        files = [] if failure.rank is None else self.log_files().get(failure.rank, [])
        with contextlib.suppress(OSError):  # deleted while we look
            printed = [str(path) for path in files if path.name == "stderr.log" and path.stat().st_size]
            failure = dataclasses.replace(failure, stderr=printed[-1] if printed else None)
        if failure.memory is None or not isinstance(self.spec, RunSpec) or self.spec.micro_batch == AUTO:
            return failure
        advice = "Which changes would have fitted: wb.would_fit(run)."
        return dataclasses.replace(failure, hint=" ".join(filter(None, [failure.hint, advice])))

    @property
    def seconds(self) -> float:
        """Seconds from launch to end, until now while it runs, or until its last written step if its end was not recorded.

        For a resumed run (`launch(resume=run)`), the sum over its attempts, without the time between them.
        """
        if self.state in ACTIVE:
            return self._before + max(0.0, time.time() - self._begun)
        if self._outcome is not None and self._outcome.get("seconds", math.nan) is not None:
            return self._before + float(self._outcome.get("seconds", math.nan))
        return self._before + self._last_sign() - self._begun

    def _last_sign(self) -> float:
        """When its ranks wrote last in its last attempt; the beginning of that attempt, if they have not written yet."""
        times = [self._begun]
        for path in (path for pattern in _WRITTEN_BY_RANKS for path in self.path.glob(pattern)):
            with contextlib.suppress(OSError):  # deleted while we look
                times.append(path.stat().st_mtime)
        return max(times)

    @property
    def progress(self) -> tuple[int, int | None]:
        """Steps done, and how many there will be (None = not known, as for a script)."""
        rows = self._read(METRICS)
        if rows:
            return rows[-1]["step"], rows[-1].get("steps")
        numbers = (row.get("step") for row in reversed(self._read(run_directory.rank_file(0))))
        return next((step + 1 for step in numbers if is_whole(step)), 0), getattr(self.spec, "steps", None)

    # --- what it does

    def wait(self, timeout: float | None = None, check: bool = False) -> "Run":
        """Wait for the end, with a progress line in a terminal. Interrupting the wait stops the run.

        Args:
            timeout: seconds to wait at most; the run itself continues after that. None = no limit.
            check: raise an error if the run did not finish well.

        Raises:
            TimeoutError: it still runs after `timeout` seconds.
            RunError: `check` is set and the run failed; the error shows the failing rank's traceback.
        """
        limit = math.inf if timeout is None else time.monotonic() + timeout
        line = progress.ProgressLine(self.progress_words)
        try:
            while self.state in ACTIVE:
                if time.monotonic() > limit:
                    raise TimeoutError(f"{self!r} still runs after {units.seconds(timeout)}: wait longer, or run.stop()")
                time.sleep(_TICK)
                line.show()
        except KeyboardInterrupt as why:
            self.stop()
            state = str(self).partition("\n")[0]
            words = f"stopped by {str(why) or 'Ctrl-C'}: {state}\n{progress.left_by(self.path)}"
            raise type(why)(words) from None  # without the traceback of the interrupted wait
        finally:
            line.close(self)
        if check and not self.ok:
            raise RunError(self.error or Failure.of_launcher(f"{self!r} was {self.state}"))
        return self

    def stop(self, timeout: float = 40.0) -> "Run":
        """End all processes of the run and return when they are gone. A finished run is left as it is; a run of a sweep ends the sweep.

        Raises:
            TimeoutError: a process still runs after `timeout` seconds.
            ValueError: it runs on another machine or in another container, or Slurm refuses to cancel it.
        """
        if self._job is not None:
            self._job.end(lambda: self.state in ACTIVE, max(timeout, _CANCELLING))
            return self
        lock, log = self._launch_dir / LOCK, self._launch_dir / run_directory.LAUNCHER_LOG
        gone = self._outcome is None and not (self._launch_dir / RUN_JSON).exists()
        if not gone and self.state == "running" and self._host != platform.node():
            raise ValueError(f"{self!r} runs on {self._host}, and this is {platform.node()}: stop it there")
        was = self._guard() if gone else None
        runs = (lambda: self._guard() == was is not None) if gone else (lambda: self.state == "running" and is_guarded(self._launch_dir))
        ended = end_guard(self._guard, runs, timeout)
        if ended == "late":
            raise TimeoutError(f"{self!r} has not ended {units.seconds(timeout)} after stop()" + ("" if gone else f": see {log}"))
        if ended == "none":
            raise ValueError(f"{self!r} has no guard among the processes here, though {lock} is locked: stop it in its own container")
        if gone:
            self._outcome = {"state": "stopped" if was else "lost", "returncode": None, "seconds": time.time() - self._begun}
        return self

    @property
    def join_command(self) -> str:
        """What to type on each further machine, for a run on several; "" = nothing."""
        several = self._meeting and getattr(self.spec, "nnodes", 1) > 1
        return f"workbench join {shlex.quote(str(self.path))}" if several else ""

    @property
    def queue(self) -> str | None:
        """The state of the run's job in Slurm's queue, as text; None for a run without a job."""
        return self._job.words if self._job else None

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """For a run on several machines, the last status of each machine that has joined: name, ranks by local rank, outcome."""
        files = [path for path in self.path.glob(f"{NODES}/*/{run_directory.NODE_JSON}") if path.parent.name.isdecimal()]
        return [run_directory.read_json(path) for path in sorted(files, key=lambda path: int(path.parent.name))]

    # --- what it has measured

    @property
    def timelines(self) -> Sequence[Timeline]:
        """One Timeline per rank that has written steps, by rank; with more than 128 ranks, each is read on demand."""
        return self._files.timelines

    @property
    def rank_means(self) -> list[RankMeans]:
        """The mean times of each rank's steps, much faster to read than `timelines`; with more than 128 ranks, those of the last steps."""
        return self._files.all_means

    @property
    def metrics(self) -> Any:
        """A DataFrame of what rank 0 reported: step, loss, lr, samples, seconds, and evaluation figures if any."""
        rows: dict[int, dict[str, Any]] = {}
        for row in self._read(METRICS):  # the evaluation after a step goes into that step's row
            rows.setdefault(row["step"], {}).update(row)
        return table.frame(rows.values(), columns=None if rows else sorted(run_directory.METRIC_KEYS))

    @property
    def metric_rows(self) -> list[dict[str, Any]]:
        """The same as `metrics`, as plain rows."""
        return list(self._read(METRICS))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """A row per evaluation: step, samples, figures, seconds of each rank; with logits also classes, calibration and worst."""
        return list(self._read(run_directory.EVALUATIONS))

    @property
    def gradient_norms(self) -> list[dict[str, Any]]:
        """For a run with `gradient_norms=`, a row per recorded step: the step, and norms by layer."""
        return list(self._read(run_directory.GRADIENTS))

    @property
    def usage(self) -> list[dict[str, Any]]:
        """At intervals, a row on the load of rank 0's machine: step, time, and what could be read; see `core.machine_usage`."""
        return list(self._read(run_directory.USAGE))

    @property
    def restarts(self) -> list[Restart]:
        """For a run with `max_restarts`, its restarts after failures: which ranks were lost, and how long it took; empty = none."""
        return restarts_of(self._read(run_directory.RESTARTS))

    @property
    def samples_per_sec(self) -> float:
        """Samples per second over all ranks, without warm-up; nan before there is a measured step."""
        rates = [rank.samples_per_sec for rank in self.rank_means if rank.count and rank.rank < self._ranks]
        return sum(rates) if rates else math.nan

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the run: a hang, NaN losses, ranks or workers that read the same samples, skipped checkpoints, skipped rows."""
        of_ranks, rows = self._files.rank_notes(self.spec.world_size)
        resumes = resume_notes(self._read(run_directory.RESUMES), self.path, self.spec.nnodes)
        set_back = self.state in ACTIVE and time.time() < self._begun
        clock = "the clock of this machine was set back: how long it ran is not known" * set_back
        first = hang_note(self.hang, self.state in (*ACTIVE, "stopped")), loss_note(losses_of(self._read(METRICS)))
        return tuple(filter(None, [*restart_notes(self.path, self.state), *first, *of_ranks, *resumes, clock, *rows, *self._files.notes]))

    @property
    def memory(self) -> list[int | None]:
        """Peak bytes of each rank: allocated on its GPU, or resident in main memory if it has none."""
        return [rank.memory for rank in self.rank_means]

    def memory_breakdown(self, rank: int | None = None) -> Any:
        """The MemoryBreakdown of a rank (None = the fullest) at its peak, for a run that `measure_memory(spec)` made.

        Raises:
            ValueError: the run was not made by `measure_memory`, or has no such rank.
        """
        read = late.load("MemoryBreakdown").from_json
        ranks = [read(run_directory.read_json(path)) for path in sorted(self.path.glob(f"{run_directory.MEMORY}/rank*.json"))]
        if not ranks:
            raise ValueError(f"{self!r} has no breakdown of its memory: measure_memory(spec) makes one. Its peaks are run.memory")
        if not (chosen := [breakdown for breakdown in ranks if rank in (None, breakdown.rank)]):
            raise ValueError(f"{self!r} has no rank {rank!r}: it has {', '.join(str(breakdown.rank) for breakdown in ranks)}")
        return max(chosen, key=lambda breakdown: breakdown.total)

    @property
    def traces(self) -> dict[int, Path]:
        """For a run with `profile=`, files of torch's profiler by rank; empty before they are written. `wb.trace(run)` reads them."""
        files = sorted((self.path / TRACES).glob("*.pt.trace.json.gz"))
        return dict(sorted((int(match[1]), path) for path in files if (match := re.match(r"rank(\d+)_", path.name))))

    def energy(self, **inputs: Any) -> Any:
        """The Energy that the steps used: read from hardware counters while it ran, or else estimated from its GPUs' design power.

        For a resumed run, the counters include all attempts; the estimate counts each recorded step once.

        Args:
            inputs: `price` (money per rank and hour), `electricity` (money per kWh), `intensity` (gCO2e per kWh), `pue`; `watts` for a
                device that is not in the device table.

        Raises:
            CostError: power was not measured, and the device's design power is not known.
        """
        ranks, machines = self.spec.world_size, getattr(self.spec, "nnodes", 1)
        counters = self.path / run_directory.ENERGY
        if counters.exists() and inputs.get("watts") is None:
            prices = {name: value for name, value in inputs.items() if name != "watts"}
            return late.load("Energy.measured")(run_directory.read_json(counters), ranks=ranks, machines=machines, **prices)
        timeline, rows = next(iter(self.timelines), None), self._read(run_directory.rank_file(0))
        busy = sum(timeline.share(phase) for phase in ("forward", "backward", "optimizer")) if timeline and timeline.count else 0
        return late.load("Energy.by_time")(
            seconds=sum(step.seconds for step in timeline.steps) if timeline else 0,
            ranks=ranks,
            device=rows[0].get("device", "cpu") if rows else "cpu",
            utilization=min(1.0, busy),
            **inputs,
        )

    @property
    def noise_scale(self) -> Any:
        """For a run with `noise_scale=True`, the NoiseScale of the gradients so far, also while it runs or after it failed.

        Raises:
            ValueError: the run does not measure it, has too few steps yet, or its gradients were NaN from the first step on.
        """
        if not getattr(self.spec, "noise_scale", False):
            loop = "in a loop of your own: workbench.batch.measure.noise_watch.NoiseWatch"
            raise ValueError(f"{self!r} does not measure its noise scale: launch it with noise_scale=True, or wb.noise_scale(spec); {loop}")
        ranks = [self._read(run_directory.noise_file(rank)) for rank in range(self.spec.world_size)]
        return late.load("NoiseScale.of_run")([rows for rows in ranks if rows])

    def log_files(self) -> dict[int, list[Path]]:
        """Files with the output of each rank, by rank."""
        files: dict[int, list[Path]] = {}
        for path, rank in run_directory.log_files(self._launch_dir):
            files.setdefault(rank, []).append(path)
        return dict(sorted(files.items()))

    def logs(self, rank: int | None = None) -> str:
        """What a rank printed (None = all ranks, each line prefixed by its rank). A run of a sweep has the log of the whole launch.

        Raises:
            ValueError: no such rank in this run.
        """
        files = self.log_files()
        if rank is not None and rank not in files:
            raise ValueError(f"{self!r} has no log of rank {rank!r}: it has ranks {', '.join(map(str, files)) or 'none yet'}")
        wanted = [(number, path) for number, paths in files.items() if rank in (None, number) for path in paths]
        lines = [f"[{number}] " * (rank is None) + line for number, path in wanted for line in run_directory.TextTail(path).read(last=True)]
        return "\n".join(lines)

    # --- how it shows itself

    @property
    def summary(self) -> str:
        """One line with state, steps and throughput; then the error, if any, and a line per note."""
        try:
            state = self.state
        except RunGoneError as gone:
            return str(gone)
        done, steps = self.progress
        parts = [state, f"{done} of {steps} steps" if steps else f"{done} steps"]
        if state == "queued":
            parts.insert(1, str(self.queue))
        elif missing := self._missing(state, done):
            parts.insert(1, missing)
        if not math.isnan(self.samples_per_sec):
            parts.append(units.rate(self.samples_per_sec))
        lines = [" · ".join([*parts, units.seconds(self.seconds)]), *(f"note: {note}" for note in self.notes)]
        why = self.error
        return "\n".join(lines if why is None else [lines[0], str(why), *lines[1:]])

    def _missing(self, state: str, done: int) -> str:
        """What the run still waits for: machines that have to join it; "" for nothing."""
        if state != "running" or done or not self.join_command:
            return ""
        have, want = len(self.nodes), self._ranks // self.spec.nproc_per_node
        return f"{have} of {want} machines are here; on each of the others: {self.join_command}" if have < want else ""

    def progress_words(self) -> str:
        """Its progress, in one line."""
        done, steps = self.progress
        if waiting := str(self.queue) if (state := self.state) == "queued" else self._missing(state, done):
            return f"{self.name}: {waiting}"
        return progress.progress_text(self.name, done, steps, self.seconds, self._read(METRICS), self._limit)

    def to_frame(self) -> Any:
        """A DataFrame with one row per rank and step."""
        return table.frame({"rank": t.rank, **row} for t in self.timelines for row in t.to_frame().to_dict("records"))

    plot = table.plot_method("step_time")

    def __repr__(self) -> str:
        several = f"nnodes={self.spec.nnodes}, " if self.spec.nnodes > 1 else ""  # no clock, no path: equal in every execution
        return f"Run({self.name!r}, {several}nproc_per_node={self.spec.nproc_per_node})"

    def __str__(self) -> str:
        return f"{self!r}: {self.summary}"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        try:
            return table.panel("run_panel")(self)._repr_mimebundle_(**options)
        except (ImportError, RunGoneError):  # a machine without the notebooks extra, or nothing left to show
            return {"text/plain": str(self)}


@contextlib.contextmanager
def on_run_started(callback: Callable[[Run], None]) -> Iterator[None]:
    """Meanwhile, call `callback` with each run as soon as this thread has launched or loaded it; what it raises is raised by the launch."""
    token = _on_run_started.set((callback, *_on_run_started.get()))  # nested ones are all called, the inner one first
    try:
        yield
    finally:
        _on_run_started.reset(token)
