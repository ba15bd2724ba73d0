"""Reads a growing run directory and returns Snapshots of it. Each call reads only what is new, however long the run is."""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.runs.failure import Failure
from workbench.runs.hang import hang_note
from workbench.runs.loss_faults import faults_of, growing_besides
from workbench.runs.page import dense_peak, norms_of, usage_of
from workbench.runs.rank_ends import MANY_RANKS, SAMPLED, RankEnds
from workbench.runs.rank_steps import RankMeans, RankSteps
from workbench.runs.rows import Rows, check_metric, loss_note, losses_of, resume_notes, slowest, training_notes
from workbench.runs.run import ACTIVE, Run, State
from workbench.timeline.timeline import MAX_WARMUP, Step, StepSums, warmup_of

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # colours and cursor movements of a terminal
LOG_START = 64 * 1024
"""Bytes of each log that a panel opened late starts with."""
ENDS_EVERY = 10.0
"""Seconds between two looks at the ends of the files of very many ranks, while they run, and between two looks for spikes of the loss."""
LOSSES = 20_000
"""Losses, the last ones, in which spikes are looked for."""
KEPT = 240
"""Rows, the last ones, of a machine's usage and of the norms of gradients that are shown."""
Series = Mapping[str, tuple[tuple[int, float], ...]]
"""Name → (step, value), the last `KEPT`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """Where the mean step of one rank goes, so far."""

    rank: int
    """Rank of the process."""
    phases: tuple[float, ...]
    """Mean seconds per phase in the order of PHASES, warm-up left out; nan before there is a measured step."""
    steps: int
    """Steps done, warm-up included."""
    left_out: int
    """First steps that the means leave out."""
    samples_per_sec: float
    """Throughput of this rank over the measured steps; nan if not known."""
    memory: int | None
    """Peak bytes of the process; None if it was not read."""

    @classmethod
    def of(cls, rank: int, means: RankMeans) -> "RankShare":
        """Of the means of a rank's steps."""
        return cls(
            rank=rank,
            phases=means.sums.means,
            steps=means.steps,
            left_out=means.left_out,
            samples_per_sec=means.samples_per_sec,
            memory=means.memory,
        )

    @property
    def seconds(self) -> float:
        """Length of the mean step."""
        return sum(self.phases)

    @property
    def means(self) -> tuple[float, ...]:
        """The same as `phases`, as RankMeans has it."""
        return self.phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment, as a panel shows it."""

    state: State
    """The state of the run."""
    done: int
    """Optimizer steps done."""
    steps: int | None
    """How many there will be; None = not known (a script)."""
    seconds: float
    """Since launch; from launch to end for a run that has ended."""
    ranks: tuple[RankShare, ...] = ()
    """Those that have written a step."""
    losses: tuple[tuple[int, float], ...] = ()
    """(step, loss) as rank 0 reported them."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What an evaluation found."""
    evaluations: tuple[float, ...] = ()
    """Seconds of each evaluation, on the slowest rank; they are in no step."""
    usage: Series = field(default_factory=dict)
    """What the machine of rank 0 did, by the names of `page.USAGE`."""
    norms: Series = field(default_factory=dict)
    """Norms of the gradients by layer, of a run with `gradient_norms=`; one may be infinite or NaN."""
    flops_share: float | None = None
    """FLOPs of a sample over the dense peak of all GPUs, in FLOP/s; None = not known."""
    error: Failure | None = None
    """Why it failed."""
    notes: tuple[str, ...] = ()
    """What to know about its figures: see `Run.notes`."""

    @property
    def samples_per_sec(self) -> float:
        """Over all ranks; nan before there is a measured step."""
        return sum(rank.samples_per_sec for rank in self.ranks) if self.ranks else math.nan

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0..1; None where it is not known, or would be above 1."""
        used = self.samples_per_sec * (self.flops_share or math.nan)
        return used if used <= 1 else None

    @property
    def memory(self) -> int | None:
        """Peak bytes of the fullest rank."""
        return max((rank.memory for rank in self.ranks if rank.memory is not None), default=None)

    @property
    def left(self) -> float | None:
        """Seconds until the last step if the slowest rank goes on as it did; None if not known."""
        step = max((rank.seconds for rank in self.ranks), default=math.nan)
        if self.state not in ACTIVE or self.steps is None or math.isnan(step):
            return None
        return max(0, self.steps - self.done) * step


class _RankSums:
    """Running sums of one rank's steps; its first ones are kept, because how many are left out grows with the number of steps."""

    sampled = False

    def __init__(self, path: Path) -> None:
        self._ends: RankEnds | None = RankEnds(path)
        self._plain, self._was_plain = RankSteps(path), False
        self._rows = Rows(path)
        self._first: list[Step] = []
        self._sums = StepSums()
        self._memory: int | None = None
        self.other_rows: list[Mapping[str, Any]] = []
        """Rows that are no steps."""

    def read(self) -> str:
        """Take the steps that are new; returns a note on damaged rows, which are left out."""
        if self._ends and (ends := self._ends.whole()):
            self.other_rows, self._was_plain = [*ends.other_rows], True
            return ""
        self._ends = None  # from here on, what is new is read
        if self._plain.read():
            self.other_rows, self._was_plain = [*self._plain.other_rows], True
            return ""
        if self._was_plain:
            self.other_rows, self._was_plain = [], False
        rows = self._rows.read()
        if self._rows.anew:  # the run went on from a checkpoint: its file begins anew, without what came after that
            self._first, self._sums, self.other_rows = [], StepSums(), []
        steps = list[Step]()
        for row in rows:
            if "step" not in row:
                self.other_rows.append(row)
                continue
            try:
                steps.append(Step.of(row))
            except ValueError as error:
                self._rows.leave_out(str(error))
        self._first += steps[: MAX_WARMUP - len(self._first)]
        self._sums += StepSums.of(steps)
        peaks = [memory for memory in (self._memory, *(step.memory for step in steps)) if memory is not None]
        self._memory = max(peaks, default=None)
        return self._rows.note

    def share(self, rank: int) -> RankShare:
        if self._ends:
            return RankShare.of(rank, self._ends.means)
        if self._plain.plain:
            return RankShare.of(rank, self._plain.means)
        left_out = warmup_of(self._sums.count)
        measured = self._sums - StepSums.of(self._first[:left_out])
        return RankShare(
            rank=rank,
            phases=measured.means,
            steps=self._sums.count,
            left_out=left_out,
            samples_per_sec=measured.samples_per_sec,
            memory=self._memory,
        )


class _EndSums:
    """The means of a rank's last steps, of a run with very many ranks. What is read does not grow with the run."""

    def __init__(self, path: Path) -> None:
        self._ends = RankEnds(path)
        self.other_rows: Sequence[Mapping[str, Any]] = ()
        """Rows that are no steps."""
        self.sampled = False
        """Are the means those of the last steps only?"""

    def read(self) -> str:
        """Read the ends again; there is never a note on damaged rows, as most rows are not read."""
        self.other_rows, self.sampled = self._ends.read().other_rows, not self._ends.complete
        return ""

    def share(self, rank: int) -> RankShare:
        return RankShare.of(rank, self._ends.means)


class _Series:
    """The last values of a file whose rows have numbers by name."""

    def __init__(self, path: Path, values_of: Callable[[Mapping[str, Any]], dict[str, float]]) -> None:
        self._rows, self._values_of = Rows(path), values_of
        self._kept: dict[str, deque[tuple[int, float]]] = {}
        self.now: Series = {}

    def read(self) -> Series:
        """All that is kept, with what is new."""
        new = self._rows.read()
        if self._rows.anew:
            self._kept.clear()
        for row in new:
            for name, value in self._values_of(row).items():
                self._kept.setdefault(name, deque(maxlen=KEPT)).append((int(row["step"]), value))
        if new or self._rows.anew:
            self.now = {name: tuple(points) for name, points in self._kept.items()}
        return self.now


class Follower:
    """Reads a run as it grows. It has its own view on the directory, so it may live in a thread of its own."""

    def __init__(self, run: Run, flops: float | None = None) -> None:
        """Nothing is read yet; `flops`: those of a sample, for the MFU."""
        self._run, self._flops = Run.load(run.path), flops
        self._peak: float | None = None
        self._metrics = Rows(run.path / run_directory.METRICS, check_metric)
        self._resumes, self._resumed = Rows(run.path / run_directory.RESUMES), list[dict[str, Any]]()
        self._many = run.spec.world_size > MANY_RANKS
        sums: type[_RankSums | _EndSums] = _EndSums if self._many else _RankSums
        self._sums = {rank: sums(run.path / run_directory.rank_file(rank)) for rank in range(run.spec.world_size)}
        self._ranks: tuple[RankShare, ...] = ()
        self._damage, self._training = list[str](), list[str]()
        self._ranks_read, self._judged = -math.inf, -math.inf
        self._faults, self._seen = list[str](), 0
        self._logs: dict[Path, run_directory.TextTail] = {}
        self._losses: list[tuple[int, float]] = []
        self._figures: dict[str, float] = {}
        self._evaluations, self._evaluated = Rows(run.path / run_directory.EVALUATIONS), list[float]()
        self._usage = _Series(run.path / run_directory.USAGE, usage_of)
        self._norms = _Series(run.path / run_directory.GRADIENTS, norms_of)
        self._progress: tuple[int, int | None] = (0, getattr(run.spec, "steps", None))

    def snapshot(self) -> Snapshot:
        """The run as it is now.

        Raises:
            DamagedRunError: a file of the run cannot be read.
        """
        state = self._run.state  # before the files: once it has ended, they are whole
        rows = self._metrics.read()
        if self._metrics.anew:
            self._losses.clear()
        for row in rows:
            self._take(row)
        evaluated = self._evaluations.read()
        self._evaluated = [*([] if self._evaluations.anew else self._evaluated), *(slowest(row) for row in evaluated)]
        resumed = self._resumes.read()
        self._resumed = [*([] if self._resumes.anew else self._resumed), *resumed]
        resumes = resume_notes(self._resumed, self._run.path, self._run.spec.nnodes)
        if not self._many or state not in ACTIVE or time.monotonic() - self._ranks_read >= ENDS_EVERY:
            self._read_ranks()
        done, steps = self._progress
        return Snapshot(
            state=state,
            done=max(done, self._ranks[0].steps),
            steps=steps,
            seconds=self._run.seconds,
            ranks=tuple(rank for rank in self._ranks if rank.steps),
            losses=tuple(self._losses),
            figures=dict(self._figures),
            evaluations=tuple(self._evaluated),
            usage=self._usage.read(),
            norms=self._norms.read(),
            flops_share=self._flops_share(),
            error=self._run.error,
            notes=tuple(filter(None, [*self._problems(state), *self._training, *resumes, self._metrics.note, *self._damage])),
        )

    def _flops_share(self) -> float | None:
        if self._flops and not self._peak:  # the run says at its first step what it runs on
            self._peak, _ = dense_peak(self._run)
        return self._flops / self._peak if self._flops and self._peak else None

    def _problems(self, state: State) -> list[str]:
        """The hang, losses that are not finite, and, looked for now and then, what else is wrong with the loss."""
        not_finite = loss_note(self._losses)
        if time.monotonic() - self._judged >= ENDS_EVERY or len(self._losses) - self._seen >= LOSSES:
            self._judged, self._seen = time.monotonic(), len(self._losses)
            faults = faults_of(self._losses, LOSSES)
            faults += [] if not_finite else growing_besides(self._losses, faults)
            self._faults = [*map(str, faults)]
        return [hang_note(self._run.hang, state in (*ACTIVE, "stopped")), not_finite, *self._faults]

    def _read_ranks(self) -> None:
        self._damage = [sums.read() for sums in self._sums.values()]
        self._training = training_notes({rank: sums.other_rows for rank, sums in self._sums.items()}, len(self._sums))
        self._training += [SAMPLED.format(len(self._sums))] * any(sums.sampled for sums in self._sums.values())
        self._ranks = tuple(sums.share(rank) for rank, sums in self._sums.items())
        self._ranks_read = time.monotonic()

    def _take(self, row: Mapping[str, Any]) -> None:
        self._progress = row["step"], row.get("steps")
        self._losses += losses_of([row])
        self._figures |= {name: value for name, value in row.items() if name not in run_directory.METRIC_KEYS and value is not None}

    def log_lines(self, last: bool = False) -> list[tuple[int, str]]:
        """(rank, line) of what was printed since the last call; with `last`, unfinished lines too."""
        lines = []
        for rank, paths in self._run.log_files().items():
            for path in paths:
                if path not in self._logs:
                    self._logs[path] = run_directory.TextTail(path, start=max(0, path.stat().st_size - LOG_START))
                lines += [(rank, _ESCAPES.sub("", line)) for line in self._logs[path].read(last)]
        return lines
