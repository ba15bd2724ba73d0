"""multiprocessing's folder: one per run and machine, private, never one that somebody else has put there."""

import multiprocessing.process
import multiprocessing.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.core import run_directory
from workbench.core.temporary import multiprocessing_folder, use_multiprocessing_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(run_directory.ENV_RUN_ID, "0123456789abcdef")
    monkeypatch.setenv(run_directory.ENV_MACHINE, "3")
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    before = config.pop("tempdir", None)
    yield multiprocessing_folder("0123456789abcdef", "3")
    config.pop("tempdir", None)
    if before:
        config["tempdir"] = before


def chosen() -> str | None:
    return multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]


def test_all_processes_of_a_run_share_one(folder: Path) -> None:
    before = os.umask(0)
    try:
        use_multiprocessing_folder()
    finally:
        os.umask(before)
    assert multiprocessing.util.get_temp_dir() == str(folder)
    assert folder.name == "pymp-0123456789ab-3"
    assert folder.stat().st_mode & 0o777 == 0o700
    use_multiprocessing_folder()
    assert chosen() == str(folder)


@pytest.mark.parametrize("variable", [run_directory.ENV_RUN_ID, run_directory.ENV_MACHINE])
def test_no_variable_leads_it_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    for name in ("pymp-", "pymp-0123456789ab-"):
        (folder.parent / name).mkdir()
    monkeypatch.setenv(variable, "/../elsewhere/x")
    use_multiprocessing_folder()
    assert chosen() is None
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("trap", ["link", "open", "file"])
def test_what_somebody_else_has_put_there_is_not_used(folder: Path, trap: str) -> None:
    if trap == "link":
        (folder.parent / "theirs").mkdir(mode=0o700)
        folder.symlink_to("theirs")
    elif trap == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.touch()
    use_multiprocessing_folder()
    assert chosen() is None


def test_outside_of_a_run_nothing_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_directory.ENV_RUN_ID)
    use_multiprocessing_folder()
    assert chosen() is None
    assert not folder.exists()
