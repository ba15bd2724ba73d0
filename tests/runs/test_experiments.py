"""The line that is shown while a launched experiment runs."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.core import run_directory
from workbench.programs.experiment import progress_writer
from workbench.runs.launch.experiments import so_far


def test_it_shows_what_is_tried_and_what_is_known_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    words, run = so_far("diagnose", 60), SimpleNamespace(path=tmp_path)
    now[0] += 3
    assert words(run) == "diagnose: starting the ranks … 3 s of at most 60 s"  # type: ignore[arg-type]
    write = progress_writer(tmp_path)
    write("the first steps", "")
    write("no optimizer step", "no loader: 61 % less (55 to 67)")
    now[0] += 5
    known = "no loader: 61 % less (55 to 67)"
    assert words(run) == f"diagnose: {known}; now: no optimizer step … 8 s of at most 60 s"  # type: ignore[arg-type]
    (tmp_path / run_directory.PROGRESS).write_text("half a")
    assert "starting" in words(run)  # type: ignore[arg-type]
