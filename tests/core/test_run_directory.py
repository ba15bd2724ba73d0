"""Files that stay whole: under crashes, half-written lines and full disks."""

import errno
import fcntl
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core import run_directory


@given(st.binary(max_size=200), st.lists(st.integers(0, 60), max_size=6))
@settings(max_examples=60)
def test_a_tail_sees_whole_lines_however_the_bytes_arrive(tmp_path_factory, noise: bytes, cuts: list[int]) -> None:  # type: ignore[no-untyped-def]
    rows = [{"n": i, "text": noise.hex()[:i]} for i in range(5)]
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    path = tmp_path_factory.mktemp("tail") / "f.jsonl"
    tail, seen, start = run_directory.LineTail(path), [], 0
    assert tail.read() == []
    for end in [*sorted(cuts), len(data)]:
        with open(path, "ab") as file:
            file.write(data[start:end])
        seen, start = seen + tail.read(), max(start, end)
    assert seen == rows


def test_rows_that_are_taken_away_are_forgotten_by_who_follows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(5)) + '{"step": 5, "lo')
    tail = run_directory.LineTail(path)
    assert [row["step"] for row in tail.read()] == [0, 1, 2, 3, 4]
    run_directory.keep_rows(path, lambda row: row["step"] < 3)
    with open(path, "a") as file:  # longer than it was when it was read last
        file.write("".join(f'{{"step": {step}, "again": true}}\n' for step in range(3, 9)))
    assert not tail.anew
    assert [row["step"] for row in tail.read()] == list(range(9))
    assert tail.anew
    assert tail.read() == []
    assert not tail.anew
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    before = path.stat().st_ino
    run_directory.keep_rows(path, lambda row: True)
    assert path.stat().st_ino == before  # nothing to take away, nothing is written


def test_two_with_the_same_pid_do_not_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 12)  # as two containers have it
    assert run_directory.part_of(tmp_path / "run.json") != run_directory.part_of(tmp_path / "run.json")
    assert run_directory.part_of(tmp_path / "run.json").name.endswith(".part")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"step": 0}\n\x00\x00garbage\n')
    tail = run_directory.LineTail(path)
    for _ in range(2):  # a second look does not pass over it
        with pytest.raises(run_directory.DamagedRunError, match=r"rank0\.jsonl is damaged: .*garbage.* is not a JSON object"):
            tail.read()


def test_a_log_with_a_progress_bar_keeps_its_last_state(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"10%\r50%\r100%\r\nplain\nunfinished")
    tail = run_directory.TextTail(path)
    assert tail.read() == ["100%", "plain"]
    assert tail.read(last=True) == ["unfinished"]
    assert tail.read(last=True) == []


def test_a_bar_that_never_ends_its_line_is_kept_in_its_last_state(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    tail = run_directory.TextTail(path)
    for percent in range(100):
        with open(path, "a") as file:
            file.write(f"{percent} %\r")
        assert tail.read() == []
    assert len(tail._rest) < 20
    assert tail.read(last=True) == ["99 %"]


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run_directory.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        run_directory.write_json(path, {"a": object()})
    assert run_directory.read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(("text", "said"), [(None, "is missing"), ("{", "is damaged"), ("[1]", "holds a list"), ("", "is damaged")])
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(run_directory.DamagedRunError, match=said):
        run_directory.read_json(path)


SMALL_DISK = """
import json, resource, signal, sys
from pathlib import Path
from workbench.core import run_directory
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # no file may grow further: the kernel answers as a full disk does
path = Path(sys.argv[1])
"""


def on_a_small_disk(code: str, path: Path) -> list[str]:
    """Lines that a process of its own prints: the limit would hold for the tests' own output, too."""
    command = [sys.executable, "-c", SMALL_DISK + code, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    code = """
writer = run_directory.LineWriter(path)
row = {"step": 1, "text": "x" * 100}
for n in range(100):
    try:
        writer.write([row, row, row])
    except run_directory.DiskFullError as error:
        print(n)
        print(error)
        break
writer.close()
writer.close()
"""
    written, said = on_a_small_disk(code, path)
    assert re.search(r"rank0\.jsonl may not grow any more: files of this process have a limit \(ulimit -f\)", said)
    assert re.search(
        r"no space to write .*rank0\.jsonl \(free there: [\d,]+ bytes\): make room", run_directory.full_message(path, errno.ENOSPC)
    )
    rows = run_directory.LineTail(path).read()
    assert len(rows) == 3 * int(written) == 33
    assert path.read_bytes().endswith(b"}\n")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    code = """
run_directory.write_json(path, {"old": True})
try:
    run_directory.write_json(path, {"text": "x" * 10_000})
except run_directory.DiskFullError:
    print("full")
"""
    assert on_a_small_disk(code, path) == ["full"]
    assert run_directory.read_json(path) == {"old": True}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_the_lock_says_whether_its_holder_lives(tmp_path: Path) -> None:
    path = tmp_path / "guard.lock"
    assert not run_directory.is_locked(path)
    code = f"import fcntl, time; f = open({str(path)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert run_directory.is_locked(path)
        assert run_directory.is_locked(path)  # asking does not take it
        holder.kill()
        holder.wait()
    assert not run_directory.is_locked(path)


def test_asking_for_the_lock_leaves_it_free(tmp_path: Path) -> None:
    path = tmp_path / "guard.lock"
    path.touch()
    run_directory.is_locked(path)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_reserve_is_given_back(tmp_path: Path) -> None:
    (tmp_path / run_directory.RESERVE).write_bytes(os.urandom(10))
    run_directory.free_reserve(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # no run: a file of this name is somebody else's
    (tmp_path / run_directory.RUN_JSON).touch()
    run_directory.free_reserve(tmp_path)
    run_directory.free_reserve(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [run_directory.RUN_JSON]


def test_numbers_that_json_does_not_have_come_back_wherever_they_are(tmp_path: Path) -> None:
    row = {"loss": -math.inf, "of": [1.0, math.inf, {"each": (math.inf, "NaN of a text")}], "text": "Infinity War", "none": None}
    writer = run_directory.LineWriter(tmp_path / "rows.jsonl")
    writer.write([row, {"loss": 1.0}])
    writer.close()
    for line in (tmp_path / "rows.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    back, _ = run_directory.LineTail(tmp_path / "rows.jsonl").read()
    assert back == row | {"of": [1.0, math.inf, {"each": [math.inf, "NaN of a text"]}]}
