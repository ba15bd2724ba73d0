"""Lists the runs of a folder: state, progress, last figures and the knobs in which they differ; a thousand in a second."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import run_directory, units
from workbench.core.display import table as display
from workbench.runs.rows import check_metric
from workbench.runs.run import Run, RunFormatError
from workbench.runs.spec import ScriptSpec

_LAST = 4096
"""Bytes at the end of a file in which its last whole row is looked for."""
_SHOWN = 100
"""The most rows that the table shows, of the newest runs."""


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
    """Of all ranks since the training began, warm-up included."""
    differs: str
    """The knobs in which it differs from other runs of its task in the list."""


@dataclass(frozen=True, slots=True)
class RunList(display.Shown):
    """The runs of a folder, the newest last."""

    folder: Path
    """The folder of the run directories."""
    runs: tuple[ListedRun, ...]
    """Oldest first."""

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[ListedRun]:
        return iter(self.runs)

    def __getitem__(self, place: int) -> ListedRun:
        return self.runs[place]

    @property
    def table(self) -> display.Table:
        """One row per run: of the newest hundred."""
        rows = [
            [
                str(run.path.relative_to(self.folder)),
                run.state,
                units.MISSING if run.done is None else f"{run.done} of {run.steps}" if run.steps else str(run.done),
                units.MISSING if run.loss is None else f"{run.loss:.4g}",
                units.rate(run.samples_per_sec) if run.samples_per_sec else units.MISSING,
                run.differs,
            ]
            for run in self.runs[-_SHOWN:]
        ]
        more = f"the newest {_SHOWN} of {len(self)}; to_frame() has all. " if len(self) > _SHOWN else ""
        note = f"{more}throughput: mean since the training began, warm-up included" if rows else "no runs here"
        columns = ("run", "state", "steps", "loss", "throughput", "differs in")
        return display.Table(columns=columns, rows=rows, title=f"Runs in {self.folder}", note=note)

    to_frame = display.frame_method("runs", ListedRun)

    def __repr__(self) -> str:
        return f"RunList({str(self.folder)!r}, {len(self)} runs)"


def list_runs(runs_dir: str | os.PathLike[str] | None = None) -> RunList:
    """List the runs of a folder, those of sweeps one by one.

    Args:
        runs_dir: where run directories are; None = `runs` in the current folder.

    Raises:
        ValueError: it is not a folder.
    """
    if runs_dir is not None and not isinstance(runs_dir, str | os.PathLike):
        raise ValueError(f"list_runs({runs_dir!r:.80}): expected the path of a folder with run directories")
    folder = Path(runs_dir or "runs").expanduser().absolute()
    if not folder.is_dir():
        raise ValueError(f"list_runs: {folder} is not a folder; runs go to `runs` in the current folder, or to launch(…, runs_dir=…)")
    read = sorted((_read(path) for path in _directories(folder)), key=lambda pair: (pair[0].created, pair[0].path))
    return RunList(folder, tuple(_with_differences(read)))


def _directories(folder: Path) -> Iterator[Path]:
    """Every readable run directory in a folder. A launch that several runs share is replaced by those runs."""
    for entry in os.scandir(folder):
        path = Path(entry.path)
        if _is_run(path):
            parts = sorted(path.glob("[0-9][0-9][0-9]*")) if _is_run(path / "000") else [path]
            yield from filter(_is_run, parts)


def _is_run(path: Path) -> bool:
    """Is it a run directory? One that this user may not read, such as another user's in a shared folder, does not count."""
    return os.path.exists(path / run_directory.RUN_JSON)


def _read(path: Path) -> tuple[ListedRun, Mapping[str, Any]]:
    """A run, and its spec as JSON; empty where it cannot be read."""
    try:
        run = Run.load(path)
        state = run.state
        spec = {"script": run.spec.script, "args": " ".join(run.spec.args)} if isinstance(run.spec, ScriptSpec) else run.spec.to_json()
        row = _last_metric(path / run_directory.METRICS)
    except (run_directory.DamagedRunError, RunFormatError, OSError):
        made = ListedRun(
            path=path, name=path.name, created=_written(path), state="damaged", done=None, steps=None, loss=None, samples_per_sec=None,
            differs="",
        )  # fmt: skip
        return made, {}
    samples, seconds, loss = row.get("samples"), row.get("seconds"), row.get("loss")
    listed = ListedRun(
        path=path,
        name=run.name,
        created=run.created,
        state=state,
        done=row.get("step"),
        steps=row.get("steps") or getattr(run.spec, "steps", None),
        loss=None if loss is None or not math.isfinite(loss) else loss,
        samples_per_sec=samples / seconds if samples and seconds else None,
        differs="",
    )
    return listed, spec


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
    found: dict[str, Any] = {}
    for line in reversed(lines):
        row = run_directory.parse_row(line)
        if row is not None and not check_metric(row):
            if found and row["step"] != found["step"]:
                break
            found = row | found
            if row.get("loss") is not None:
                break
    return found


def _with_differences(read: Sequence[tuple[ListedRun, Mapping[str, Any]]]) -> Iterator[ListedRun]:
    """The runs, each with the knobs in which runs of its task differ."""
    groups: dict[Any, dict[str, set[str]]] = {}
    for _, spec in read:
        values = groups.setdefault(spec.get("task", spec.get("script")), {})
        for name, value in spec.items():
            values.setdefault(name, set()).add(repr(value))
    for run, spec in read:
        values = groups[spec.get("task", spec.get("script"))]
        words = [f"{name}={_word(value)}" for name, value in spec.items() if len(values[name]) > 1]
        yield ListedRun(**{name: getattr(run, name) for name in ListedRun.__slots__} | {"differs": ", ".join(words)})


def _word(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
