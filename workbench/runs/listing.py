"""Lists the runs of a folder: state, progress, last figures and the knobs in which they differ; a thousand in a second."""

import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import run_directory, units
from workbench.core.checks import did_you_mean
from workbench.core.display import table as display
from workbench.core.synonyms import accept_synonyms
from workbench.runs.compare import word
from workbench.runs.rank_ends import MANY_RANKS, RankEnds
from workbench.runs.rows import check_metric
from workbench.runs.run import ACTIVE, Run, RunFormatError
from workbench.runs.slurm_queue import is_final
from workbench.runs.spec import ScriptSpec

_LAST = 4096
"""Bytes at the end of a file in which its last whole row is looked for."""
_SHOWN = 100
"""The most rows that the table shows."""
COLUMNS = {"run": "path", "state": "state", "steps": "done", "loss": "loss", "throughput": "samples_per_sec", "differs in": "differs"}
"""Column of the table → the field of ListedRun that it is sorted by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run in a list, as described by the ends of its files."""

    path: Path
    """Its directory; `Run.load(path)` reads it."""
    name: str
    """The name that people see."""
    created: float
    """Seconds since 1970."""
    state: str
    """As `run.state`; "damaged" where run.json cannot be read."""
    done: int | None
    """Steps that rank 0 has reported; None = none yet."""
    steps: int | None
    """Steps that the run will take; None = not known."""
    loss: float | None
    """The last loss reported; None = none yet."""
    samples_per_sec: float | None
    """As `run.samples_per_sec`, warm-up left out; where no step is measured, mean since the training began; None = not known yet."""
    differs: str
    """The knobs in which it differs from other runs of its task in the list, or else its task if there are others."""
    experiment: str = ""
    """What the workbench measured by it, such as "diagnose"; empty = it is a training."""
    script: bool = False
    """Is it the run of a script, whose loss is not recorded?"""

    def __fspath__(self) -> str:
        """Its directory, so that it can be given wherever the path of a run can."""
        return str(self.path)


@dataclass(frozen=True, slots=True)
class RunList(display.Shown):
    """The runs of a folder, the newest last unless they were sorted."""

    folder: Path
    """The folder of the run directories."""
    runs: tuple[ListedRun, ...]
    """Oldest first, unless they were sorted."""
    total: int | None = None
    """Runs in the folder, if only some of them are listed; None = all are."""
    order: str = ""
    """The column that they were sorted by; empty = oldest first."""
    hidden: int = 0
    """Experiments of the workbench that are not listed."""

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[ListedRun]:
        return iter(self.runs)

    def __getitem__(self, place: int) -> ListedRun:
        return self.runs[place]

    def filter(self, text: str) -> "RunList":
        """The runs whose directory, name, state or differing knobs contain each word of a text: `runs.filter("failed lr=0.1")`."""
        words = text.lower().split()
        texts = [f"{self.label(run)} {run.name} {run.state} {run.differs}".lower() for run in self.runs]
        chosen = tuple(run for run, its in zip(self.runs, texts, strict=True) if all(word in its for word in words))
        return dataclasses.replace(self, runs=chosen, total=len(self) if self.total is None else self.total) if words else self

    def sort(self, by: str, *, descending: bool = False) -> "RunList":
        """The same runs in another order; those without a value come last.

        Args:
            by: "created", or a column of the table: "run", "state", "steps", "loss", "throughput", "differs in".
            descending: the largest first.

        Raises:
            ValueError: there is no such column.
        """
        fields = {"created": "created", **COLUMNS}
        if by not in fields:
            raise ValueError(f"sort({by!r}): {did_you_mean(by, fields)}runs can be sorted by {', '.join(fields)}")
        known = [run for run in self.runs if getattr(run, fields[by]) not in (None, "")]
        known.sort(key=lambda run: getattr(run, fields[by]), reverse=descending)
        unknown = [run for run in self.runs if getattr(run, fields[by]) in (None, "")]
        return dataclasses.replace(self, runs=(*known, *unknown), order=by)

    def label(self, run: ListedRun) -> str:
        """The directory of a run, relative to the folder."""
        return str(run.path.relative_to(self.folder))

    def cells(self, run: ListedRun) -> list[str]:
        """A run's row of the table."""
        return [
            self.label(run),
            run.state,
            units.MISSING if run.done is None else f"{run.done} of {run.steps}" if run.steps else str(run.done),
            units.MISSING if run.loss is None else f"{run.loss:.4g}",
            units.rate(run.samples_per_sec) if run.samples_per_sec else units.MISSING,
            run.differs,
        ]

    @property
    def table(self) -> display.Table:
        """One row per run: of the newest hundred, or of the first hundred if they were sorted."""
        rows = [self.cells(run) for run in (self.runs[:_SHOWN] if self.order else self.runs[-_SHOWN:])]
        of = "" if self.total is None else f"{len(self)} of {self.total} runs match. "
        which = "first" if self.order else "newest"
        more = f"the {which} {_SHOWN} of {len(self)}; to_frame() has all. " if len(self) > _SHOWN else ""
        note = f"{of}{more}throughput: of all ranks, warm-up left out" if rows else of.strip() or _none_in(self.folder)
        if any(run.loss is None and run.script and run.done for run in self.runs):
            note += "; the loss of a script is not recorded"
        if self.hidden:
            note += f"; {units.several(self.hidden, 'experiment')} of the workbench hidden (--all or experiments=True shows them)"
        return display.Table(columns=tuple(COLUMNS), rows=rows, title=f"Runs in {self.folder}", note=note)

    to_frame = display.frame_method("runs", ListedRun)

    def __repr__(self) -> str:
        return f"RunList({str(self.folder)!r}, {len(self)} runs)"


@accept_synonyms
def list_runs(runs_dir: str | os.PathLike[str] | None = None, *, experiments: bool = True) -> RunList:
    """List the runs in a folder, including each run of a sweep.

    Args:
        runs_dir: where run directories are; None = `runs` in the current folder.
        experiments: also list launches in which the workbench measured something (`diagnose(spec)`, `find_lr(spec)`).

    Raises:
        ValueError: it is not a folder.
    """
    return RunFolder(runs_dir, experiments=experiments).read()


class RunFolder:
    """A folder of run directories that is listed again and again. Runs that have ended are read once.

    Attributes:
        path: of the folder.
    """

    def __init__(self, runs_dir: str | os.PathLike[str] | None = None, *, experiments: bool = True) -> None:
        """See `list_runs`."""
        if runs_dir is not None and not isinstance(runs_dir, str | os.PathLike):
            raise ValueError(f"list_runs({runs_dir!r:.80}): expected the path of a folder with run directories")
        self.path = Path(runs_dir or "runs").expanduser().absolute()
        self._experiments = experiments
        self._ended: dict[Path, tuple[_Versions, _Read]] = {}
        """Path → which run.json was read, its own and that of its launch, and what came of it."""
        self._loaded: dict[Path, tuple[_Versions, Run]] = {}
        """The same of the other runs, which are kept because the job of a run queries Slurm once in a while only."""

    def read(self) -> RunList:
        """The runs that are there now.

        Raises:
            ValueError: it is not a folder.
        """
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is not a folder; runs go to `runs` in the current folder, or to launch(…, runs_dir=…)")
        ended, self._ended = self._ended, {}
        loaded, self._loaded = self._loaded, {}
        read = []
        for path in _directories(self.path):
            versions = run_directory.version_of(path), run_directory.version_of(path.parent)
            known, before = ended.get(path), loaded.get(path)
            if known and known[0] == versions:
                self._ended[path] = known
                read.append(known[1])
                continue
            run, listed = _read(path, before[1] if before and before[0] == versions else None)
            if not _may_change(path, listed[0].state):
                self._ended[path] = versions, listed
            elif run:
                self._loaded[path] = versions, run
            read.append(listed)
        shown = [pair for pair in read if self._experiments or not pair[0].experiment]
        ordered = sorted(shown, key=lambda pair: (pair[0].created, pair[0].path))
        return RunList(self.path, tuple(_with_differences(ordered)), hidden=len(read) - len(shown))


_Read = tuple[ListedRun, Mapping[str, Any]]
"""A run, and its spec as JSON; empty where it cannot be read."""

_Versions = tuple[run_directory.Version | None, run_directory.Version | None]


def _directories(folder: Path) -> Iterator[Path]:
    """Every readable run directory in a folder. A launch that several runs share is replaced by those runs."""
    for entry in os.scandir(folder):
        if _is_run(entry.path):
            path = Path(entry.path)
            yield from filter(_is_run, sorted(path.glob("[0-9][0-9][0-9]*"))) if _is_run(f"{entry.path}/000") else [path]


def _none_in(folder: Path) -> str:
    """What a list without runs says: where they are, if that is the folder `runs` in this one."""
    if not folder.is_dir():
        return "no runs here yet: the first launch makes the folder"
    inner = folder / "runs"
    count = len(list(_directories(inner))) if inner.is_dir() else 0
    return f"no runs here, but {units.several(count, 'run')} in {inner}" if count else "no runs here"


def _is_run(path: str | Path) -> bool:
    """Is it a run directory? One that this user may not read, such as another user's in a shared folder, does not count."""
    return os.path.exists(f"{path}/{run_directory.RUN_JSON}")


def _may_change(path: Path, state: str) -> bool:
    """May a run change although its run.json stays? One without a guard may just begin, and a read that failed may succeed."""
    if state in (*ACTIVE, "lost", "damaged"):
        return True
    if not os.path.exists(path / run_directory.JOB):
        return False
    try:
        return not is_final(run_directory.read_json(path / run_directory.RUN_JSON).get("outcome"))  # Slurm may begin the job again
    except (run_directory.DamagedRunError, OSError):
        return True


def _read(path: Path, run: Run | None) -> tuple[Run | None, _Read]:
    """Read a run, which may be loaded already; returns it, unless it is damaged."""
    try:
        run = run or Run.load(path)
        state = run.state
        script, spec = isinstance(run.spec, ScriptSpec), run.spec.to_json()
        steps, rate = _last_steps(path, run.spec.world_size)
        row = _last_metric(path / run_directory.METRICS) or {"step": steps}
    except (run_directory.DamagedRunError, RunFormatError, OSError):
        made = ListedRun(
            path=path,
            name=path.name,
            created=_written(path),
            state="damaged",
            done=None,
            steps=None,
            loss=None,
            samples_per_sec=None,
            differs="",
        )
        return None, (made, {})
    samples, seconds, loss = row.get("samples"), row.get("seconds"), row.get("loss")
    rate = samples / seconds if math.isnan(rate) and samples and seconds else rate
    listed = ListedRun(
        path=path,
        name=run.name,
        created=run.created,
        state=state,
        done=row.get("step"),
        steps=row.get("steps") or getattr(run.spec, "steps", None),
        loss=None if loss is None or not math.isfinite(loss) else loss,
        samples_per_sec=None if math.isnan(rate) else rate,
        differs="",
        experiment=run.experiment,
        script=script,
    )
    return run, (listed, spec)


def _written(path: Path) -> float:
    try:
        return (path / run_directory.RUN_JSON).stat().st_mtime
    except OSError:
        return time.time()


def _last_metric(path: Path) -> dict[str, Any]:
    """The last rows of METRICS, merged into one, since an evaluation has its own row; empty if all rows are damaged."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LAST))
            *lines, _unfinished = file.read().split(b"\n")
    except FileNotFoundError:
        return {}
    last: dict[str, Any] = {}
    for line in reversed(lines):
        row = run_directory.parse_row(line)
        if row is not None and not check_metric(row):
            if last and row["step"] != last["step"]:
                break
            last = row | last
            if row.get("loss") is not None:
                break
    return last


def _last_steps(path: Path, ranks: int) -> tuple[int | None, float]:
    """By the ends of the files of ranks: steps of the first, and samples per second of all; None and nan = not known."""
    means = [RankEnds(path / run_directory.rank_file(rank)).read().means for rank in range(min(ranks, MANY_RANKS))]
    known = [rank.samples_per_sec for rank in means if rank.count]
    return means[0].steps or None, sum(known) * max(1.0, ranks / MANY_RANKS) if known else math.nan


def _with_differences(read: Sequence[_Read]) -> Iterator[ListedRun]:
    """The runs, each with the knobs in which runs of its task differ, or its task if only that differs from others."""
    tasks = {spec.get("task", spec.get("script")) for _, spec in read if spec}
    groups: dict[Any, dict[str, set[str]]] = {}
    for _, spec in read:
        values = groups.setdefault(spec.get("task", spec.get("script")), {})
        for name, value in spec.items():
            values.setdefault(name, set()).add(repr(value))
    for run, spec in read:
        values = groups[spec.get("task", spec.get("script"))]
        words = [f"{name}={word(value, name)}" for name, value in spec.items() if len(values[name]) > 1]
        if not words and len(tasks) > 1 and "task" in spec:
            words = [f"task={spec['task']}"]
        yield dataclasses.replace(run, differs=", ".join(words))
