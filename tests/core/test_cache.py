"""The user's cache: where it is without a home, and that a write which fails leaves nothing."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from workbench.core import cache
from workbench.core.cache import cache_folder, write_private
from workbench.core.machine_speeds import Machine, MachineSpeeds, Speed


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No HOME and a user without a name, as in some containers; the folder of temporary files."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("WORKBENCH_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._own_folder.cache_clear()
    return tmp_path


def test_without_a_home_the_cache_is_a_private_temporary_folder(homeless: Path) -> None:
    folder = cache_folder()
    assert folder == homeless / f"workbench-{os.geteuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder
    speeds = MachineSpeeds(machine=Machine(host="h"), speeds={"dispatch": Speed(median=1e-6)})
    assert speeds.save() == ""
    assert MachineSpeeds.load(Machine(host="h")).get("dispatch") == 1e-6


@pytest.mark.parametrize("trap", ["link", "open", "file"])
def test_what_somebody_else_has_put_there_is_not_used(homeless: Path, trap: str) -> None:
    taken = homeless / f"workbench-{os.geteuid()}"
    if trap == "link":
        (homeless / "theirs").mkdir(mode=0o700)
        taken.symlink_to("theirs")
    elif trap == "open":
        taken.mkdir()
        taken.chmod(0o777)
    else:
        taken.touch()
    folder = cache_folder()
    assert folder not in (taken, homeless / "theirs")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def refuse(*_: object) -> None:
        raise error

    write_private(tmp_path / "file.json", json.dumps("old"))
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(type(error)):
        write_private(tmp_path / "file.json", json.dumps("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    assert json.loads((tmp_path / "file.json").read_text()) == "old"
