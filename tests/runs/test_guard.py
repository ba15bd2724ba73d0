"""The guard as a program of its own, with plain Python in torchrun's place: outcomes, times of death, full disks, memory kills."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import processes_with
from workbench.core import run_directory
from workbench.runs.launch import guard as guard_program

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
RANKS = """
import os, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": str(rank)}, start_new_session=True)
    for rank, code in enumerate(sys.argv[1:])
]
sys.exit(max(rank.wait() for rank in ranks))
"""


class Guarded:
    """A guard started by hand, the way `launch` does it."""

    def __init__(self, run_dir: Path, command: list[str], *, prefix: tuple[str, ...] = (), **config: Any) -> None:
        self.run_dir, self.id = run_dir, uuid.uuid4().hex
        run_directory.write_json(run_dir / run_directory.RUN_JSON, {"name": "by hand", "outcome": None})
        lock = os.open(run_dir / run_directory.LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        base = {"run_dir": str(run_dir), "id": self.id, "command": command, "lock": lock, "launcher": os.getpid()}
        config = {**base, "nproc": 1, "timeout": None, "grace": 1.0, **config}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        with open(run_dir / run_directory.LAUNCHER_LOG, "wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-I", guard_program.__file__, json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, run_directory.ENV_RUN_ID: self.id},
                pass_fds=(lock,),
                start_new_session=True,
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(lock)

    @property
    def said(self) -> str:
        return (self.run_dir / run_directory.LAUNCHER_LOG).read_text()

    def up(self) -> "Guarded":
        """Wait until the command has said that it is up."""
        while "up" not in self.said:
            assert self.process.poll() is None, self.said
            time.sleep(0.02)
        return self

    def outcome(self) -> dict[str, Any]:
        """What the guard wrote, once it has ended; nothing may be left by then."""
        assert self.process.wait(timeout=30) == 0, self.said
        assert processes_with(run_directory.ENV_RUN_ID, self.id) == []
        assert list(self.run_dir.glob("*.part")) == []
        assert not run_directory.is_locked(self.run_dir / run_directory.LOCK)
        info = run_directory.read_json(self.run_dir / run_directory.RUN_JSON)
        assert info["name"] == "by hand"
        outcome: dict[str, Any] = info["outcome"]
        return outcome


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., Guarded]]:
    """Start Python code under a guard: `guarded("print('up')", timeout=1)`."""
    started: list[Guarded] = []

    def start(code: str, *args: str, run_dir: Path = tmp_path, **options: Any) -> Guarded:
        started.append(Guarded(run_dir, [sys.executable, "-c", code, *args], **options))
        return started[-1]

    yield start
    for each in started:
        assert each.process.stdin
        each.process.stdin.close()
        each.process.wait(timeout=30)


@pytest.mark.parametrize(
    ("code", "state", "returncode"),
    [("pass", "finished", 0), ("raise SystemExit(7)", "failed", 7), ("import os; os.kill(os.getpid(), 9)", "failed", -9)],
)
def test_outcome(guarded: Callable[..., Guarded], code: str, state: str, returncode: int) -> None:
    outcome = guarded(code).outcome()
    assert (outcome["state"], outcome["returncode"], outcome["stopped_ns"]) == (state, returncode, None)
    assert 0 < outcome["seconds"] < 30


FOLDER = """
import os
os.environ["GROUP_RANK"] = "1"  # torchrun numbers machines as they come, so not always as their guards do
from workbench.core.temporary import use_multiprocessing_folder
use_multiprocessing_folder()
import multiprocessing.util, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(multiprocessing.util.get_temp_dir())
os.kill(os.getpid(), 9)
"""


def test_no_folder_of_multiprocessing_stays(guarded: Callable[..., Guarded], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert guarded(FOLDER, f"{tmp_path / 'folder'}", run_dir=tmp_path / "run").outcome()["returncode"] == -9
    folder = Path((tmp_path / "folder").read_text())
    assert folder.name.startswith("pymp-")
    assert not folder.exists()


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("raise SystemExit(7)", 1)])
def test_the_step_of_a_job_ends_as_the_run_does(guarded: Callable[..., Guarded], code: str, status: int) -> None:
    each = guarded(code, launcher=None)
    assert each.process.wait(timeout=30) == status  # else Slurm says COMPLETED of a training that failed


def test_a_command_that_cannot_start(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, ["/nowhere/python"])
    assert guarded.outcome()["returncode"] == 127
    assert "cannot start /nowhere/python" in guarded.said
    assert guarded.process.stdin
    guarded.process.stdin.close()


def test_the_three_ways_to_end_a_deaf_run(guarded: Callable[..., Guarded], tmp_path: Path) -> None:
    for way, state in [("term", "stopped"), ("pipe", "abandoned"), ("time", "timeout")]:
        (run_dir := tmp_path / way).mkdir()
        each = guarded(DEAF, run_dir=run_dir, timeout=0.5 if way == "time" else None).up()
        if way == "term":
            each.process.send_signal(signal.SIGINT)  # for the launching process, not for the guard
            each.process.send_signal(signal.SIGHUP)
            each.process.terminate()
        elif way == "pipe":
            assert each.process.stdin
            each.process.stdin.close()
        outcome = each.outcome()
        assert (outcome["state"], outcome["returncode"]) == (state, -signal.SIGKILL)
        assert outcome["stopped_ns"] < time.monotonic_ns()


class FakeTime:
    """Time that passes in `sleep` only."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("gone_after", "ours", "spent"),
    [(0.0, True, 0.0), (10.0, True, 10.0), (1e9, True, guard_program.END_LIMIT), (1e9, False, guard_program.FOREIGN_LIMIT)],
)
def test_what_was_killed_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gone_after: float, ours: bool, spent: float
) -> None:
    """The driver of a GPU takes seconds to free a large process's memory, and the next launch needs it."""
    clock = FakeTime()

    def kill(pid: int, number: int) -> None:
        if not ours:
            raise PermissionError

    monkeypatch.setattr(guard_program, "time", clock)
    monkeypatch.setattr(guard_program, "descendants", lambda *_: [7] if clock.now < gone_after else [])
    monkeypatch.setattr(guard_program, "reap", lambda wanted: None)
    monkeypatch.setattr(guard_program.os, "kill", kill)
    beats: list[float] = []
    assert guard_program.end_all(1, "x", lambda: beats.append(clock.now)) is None
    assert clock.now == pytest.approx(spent, abs=0.3)
    assert ("these processes still run" in capsys.readouterr().out) == (gone_after == 1e9)
    assert len(beats) >= clock.now  # other machines see that this one lives


def test_a_zombie_whose_threads_run_is_not_gone(tmp_path: Path) -> None:
    """Its files, such as those of a GPU, stay open until the last thread ends."""
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(30,)).start(); ctypes.CDLL(None).pthread_exit(None)"
    process = subprocess.Popen([sys.executable, "-I", "-c", code])
    try:
        limit = time.monotonic() + 10
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < limit:
            time.sleep(0.02)
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        assert process.pid in dict(guard_program.processes())
    finally:
        process.kill()
    limit = time.monotonic() + 10
    while process.pid in dict(guard_program.processes()) and time.monotonic() < limit:
        time.sleep(0.02)
    assert process.pid not in dict(guard_program.processes())  # not even before it is reaped
    process.wait()


def test_who_ends_well_by_itself_has_finished_even_if_asked_to_stop(guarded: Callable[..., Guarded]) -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); time.sleep(60)"
    each = guarded(code).up()
    each.process.terminate()
    assert each.outcome()["state"] == "finished"


def test_what_the_command_leaves_behind_is_killed(guarded: Callable[..., Guarded]) -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}], start_new_session=True)"
    assert guarded(code).outcome()["state"] == "finished"


def test_the_command_starts_with_ordinary_signals_and_no_lock(guarded: Callable[..., Guarded]) -> None:
    code = (
        "import os, signal; names = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)\n"
        "assert [signal.getsignal(n) for n in names[1:]] == [signal.SIG_DFL] * 3\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "assert sorted(os.listdir('/proc/self/fd')) == ['0', '1', '2', '3'], os.listdir('/proc/self/fd')"  # 3: the listing itself
    )
    each = guarded(code)
    assert each.outcome()["state"] == "finished", each.said


def test_times_of_death(guarded: Callable[..., Guarded], tmp_path: Path) -> None:
    def rank(delay: float) -> str:
        return f"import time; time.sleep({delay}); print(time.monotonic_ns(), flush=True)"

    each = guarded(RANKS, rank(1.2), rank(0.4), "import os, time; time.sleep(0.8); os._exit(3)", nproc=3)
    outcome = each.outcome()
    second, first = sorted(map(int, each.said.split()), reverse=True)
    assert set(outcome["exits"]) == {"0", "1", "2"}
    assert first < outcome["exits"]["1"] < outcome["exits"]["2"] < outcome["exits"]["0"]
    assert second < outcome["exits"]["0"] < time.monotonic_ns()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", where], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)


def test_a_full_disk_takes_the_last_word(guarded: Callable[..., Guarded], small_disk: Path) -> None:
    (small_disk / run_directory.RESERVE).write_bytes(bytes(run_directory.RESERVE_BYTES))
    each = guarded(DEAF, run_dir=small_disk).up()
    with contextlib.suppress(OSError), open(small_disk / "fill", "wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    each.process.terminate()
    assert each.outcome()["state"] == "stopped"
    assert not (small_disk / run_directory.RESERVE).exists()


@pytest.fixture
def small_memory() -> Iterator[tuple[str, ...]]:
    """A prefix that starts a command in a control group of 64 MiB."""
    base = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes"
    if not base.exists():
        base, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = base / f"workbench-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 << 20))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip("needs the right to make a control group with a memory limit")
    yield ("/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    while (group / "cgroup.procs").read_text():
        time.sleep(0.02)
    group.rmdir()


def test_memory_kills_are_counted(guarded: Callable[..., Guarded], small_memory: tuple[str, ...]) -> None:
    outcome = guarded("data = bytearray(256 << 20)", prefix=small_memory).outcome()
    assert (outcome["returncode"], outcome["oom_kills"]) == (-signal.SIGKILL, 1)


def test_names_of_files_are_those_of_the_run_directory() -> None:
    """The guard imports nothing of ours, and so has them a second time."""
    for name in ("RUN_JSON", "RESERVE", "NODES", "NODE_JSON", "BEAT", "HANG", "STOP", "PREEMPTED", "ENV_RUN_ID"):
        assert getattr(guard_program, name) == getattr(run_directory, name)


AT_ONCE = """
import os, signal, sys, time
from workbench.runs.launch import guard
signal.signal(signal.SIGTERM, lambda *_: None)
os.setsid = lambda: time.sleep(0.3)
pid, limit = guard.start([sys.executable, "-c", "import time; time.sleep(60)"]), time.monotonic() + 5
os.kill(pid, signal.SIGTERM)
while (code := guard.reap(pid)) is None:
    if time.monotonic() > limit:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.01)
print(code)
"""


def test_a_stop_that_comes_before_torchrun_is_there_is_not_lost() -> None:
    """Else it lives through the whole grace period."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=True)
    assert int(done.stdout) == -signal.SIGTERM
