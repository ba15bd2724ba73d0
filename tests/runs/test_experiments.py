"""The line that is shown while a launched experiment runs."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.core import run_directory
from workbench.programs.experiment import progress_writer
from workbench.runs.launch.experiments import so_far, time_left
from workbench.runs.spec import RunSpec


def test_it_shows_what_is_tried_and_what_is_known_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    words, run = so_far("diagnose", 60), SimpleNamespace(path=tmp_path, spec=RunSpec(task="text-gpt", nproc_per_node=2))
    now[0] += 3
    assert words(run) == "diagnose: starting 2 processes, which load torch … 3 s of at most 60 s"  # type: ignore[arg-type]
    write = progress_writer(tmp_path)
    write("the first steps", "")
    now[0] += 1
    write("no optimizer step", "no loader: 61 % less so far")
    now[0] += 4
    known = "no loader: 61 % less so far"
    assert words(run) == f"diagnose: {known}; now: no optimizer step … 8 s of at most 60 s"  # type: ignore[arg-type]
    (tmp_path / run_directory.PROGRESS).write_text("half a")
    assert "starting" in words(run)  # type: ignore[arg-type]


def test_the_time_left_is_never_more_than_that_of_the_budget() -> None:
    """A search of 60 s said "37 min 44 s left"."""
    run = SimpleNamespace(path=Path("find-lr"), metric_rows=[{"step": 19, "steps": 1880, "seconds": 23.0}])
    assert time_left("{done} of about {steps} steps", 60.0)(run) == "find-lr: step 19, 23.0 s of 1 min 00 s"  # type: ignore[arg-type]
    run.metric_rows = [{"step": 100, "steps": 200, "seconds": 20.0}]
    for budget in (60.0, None):
        assert time_left("{done} of about {steps} steps", budget)(run) == "find-lr: 100 of about 200 steps · 20.0 s left"  # type: ignore[arg-type]


def test_progress_that_cannot_be_written_or_read_ends_nothing(tmp_path: Path) -> None:
    """Only rank 0 writes it: the others would wait for a rank that is gone."""
    (tmp_path / run_directory.PROGRESS).mkdir()
    progress_writer(tmp_path)("the first steps", "")
    assert "starting" in so_far("diagnose", 60)(SimpleNamespace(path=tmp_path, spec=RunSpec(task="text-gpt")))  # type: ignore[arg-type]


def test_progress_is_written_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [100.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run_directory, "write_json", lambda path, value: written.append(value["now"]))
    write = progress_writer(tmp_path)
    for tenth in range(25):
        now[0] = 100 + tenth / 10
        write(str(tenth), "")
    assert written == ["0", "10", "20"]
