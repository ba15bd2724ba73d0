"""Files that are closed after writing are seen, by whichever process, and logs are left out; what happened last is known."""

import os
import random
import resource
import shutil
import subprocess
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.core.run_directory import ENV_RUN_ID
from workbench.runs.launch.cut_saves import AT_ONCE, ClosedFiles, cut, is_held

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is of Linux")


def test_what_is_closed_after_writing_is_seen_and_logs_are_not(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with closing(ClosedFiles(tmp_path, lambda name: name.endswith(".csv"))) as closed:
        (tmp_path / "last.pt").write_text("one")
        (tmp_path / "there" / "model").write_text("one")
        (tmp_path / "loss.csv").write_text("1")
        assert closed.look() == ["last.pt", "there/model"]
        assert (closed.last, closed.is_latest) == ("there/model", True)
        (tmp_path / "new").mkdir()
        assert not closed.look()
        assert not closed.is_latest
        subprocess.run(["cp", tmp_path / "last.pt", tmp_path / "new" / "copy"], check=True)
        assert closed.look() == ["new/copy"]
        for text in ("1\n", "2\n", "3\n"):
            with (tmp_path / "log").open("a") as log:
                log.write(text)
            assert closed.look() == ["log"] * (text == "1\n")  # it only grows
        (tmp_path / "last.pt").write_text("other")
        assert closed.look() == ["last.pt"]
        os.replace(tmp_path / "last.pt", tmp_path / "best.pt")
        (tmp_path / "best.pt").read_text()
        assert not closed.look()
        assert (closed.last, closed.is_latest) == ("last.pt", False)


def test_a_folder_that_is_renamed_has_its_new_name_and_so_have_those_below_it(tmp_path: Path) -> None:
    with closing(ClosedFiles(tmp_path)) as closed:
        (tmp_path / "tmp").mkdir()
        assert not closed.look()
        (tmp_path / "tmp" / "shards").mkdir()
        assert not closed.look()
        (tmp_path / "tmp").rename(tmp_path / "final")
        (tmp_path / "final" / "model.pt").write_text("one")
        (tmp_path / "final" / "shards" / "0").write_text("one")
        assert closed.look() == ["final/model.pt", "final/shards/0"]
        (tmp_path / "tmp").mkdir()
        assert not closed.look()
        (tmp_path / "tmp" / "model.pt").write_text("two")
        assert closed.look() == ["tmp/model.pt"]


def test_what_is_renamed_at_once_is_known_and_what_is_renamed_later_is_not(tmp_path: Path) -> None:
    with closing(ClosedFiles(tmp_path)) as closed:
        (tmp_path / "part").write_text("one")
        (tmp_path / "later").write_text("one")
        (tmp_path / "stays").write_text("one")
        (tmp_path / "tmp").mkdir()
        closed.look()
        (tmp_path / "tmp" / "model").write_text("one")
        (tmp_path / "part").rename(tmp_path / "last")
        (tmp_path / "tmp").rename(tmp_path / "final")
        closed.look()
        assert closed.renamed == {"part": "part", "tmp/model": "tmp"}
        time.sleep(2 * AT_ONCE)
        (tmp_path / "later").rename(tmp_path / "last")
        closed.look()
        assert "later" not in closed.renamed


def test_a_folder_that_is_gone_when_it_is_looked_into_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(folder: Path) -> Any:
        shutil.rmtree(folder)
        return listed(folder)

    with closing(ClosedFiles(tmp_path)) as closed:
        listed = Path.iterdir
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(Path, "iterdir", vanish)
        assert not closed.look()
        monkeypatch.undo()
        (tmp_path / "last.pt").write_text("one")
        assert closed.look() == ["last.pt"]


def test_more_than_1024_files_may_be_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1300:
        pytest.skip(f"at most {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    opened = list[int]()
    try:
        while not opened or opened[-1] < 1024:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        with closing(ClosedFiles(tmp_path)) as closed:
            (tmp_path / "last.pt").write_text("one")
            assert closed.look(0.001) == ["last.pt"]
            assert not closed.look(0.001)
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("more", [False, True])
def test_what_was_written_last_is_cut_and_its_rank_killed_unless_something_was_done_since(tmp_path: Path, more: bool) -> None:
    run: Any = SimpleNamespace(id=uuid.uuid4().hex, path=tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, ENV_RUN_ID: run.id, "RANK": "0"})
    with closing(ClosedFiles(out)) as closed:
        (out / "last.pt").write_bytes(bytes(1000))
        assert closed.look() == ["last.pt"]
        if more:
            (out / "last.pt").rename(out / "best.pt")
        assert cut(run, out, closed, random.Random(0)) == (None if more else "last.pt")
    assert not is_held(run.id)
    if more:
        assert process.poll() is None
        assert (out / "best.pt").stat().st_size == 1000
        process.kill()
    else:
        assert (out / "last.pt").stat().st_size < 1000
    assert process.wait() == -9
