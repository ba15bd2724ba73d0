"""Nothing outlives a run: every way to end one is really taken, with ranks that resist, and processes are counted by the run's id."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench as wb
from tests.conftest import processes_with
from workbench.core import run_directory
from workbench.runs import entrypoints

DEAF = Path(__file__).parents[1] / "scripts" / "deaf.py"
LIMIT = 10.0
"""Seconds after which nothing may be left."""
PROCESSES = 9
"""Of a run of deaf.py in 2 ranks: keeper, guard, torchrun, and per rank itself, its worker and its orphan. A watchdog comes later."""


def wait_ready(run: wb.Run, limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while len(run.log_files()) < 2 or not all("ready" in run.logs(rank) for rank in (0, 1)):
        assert run.state == "running", (run.error, (run.path / run_directory.LAUNCHER_LOG).read_text())
        assert time.monotonic() < end, run.logs()
        time.sleep(0.05)
    while len(up := set(commands(run)) - set(pids(run, entrypoints.WATCHDOG))) > PROCESSES:
        assert time.monotonic() < end, commands(run)  # on a busy machine what torch asked at its import is still there
        time.sleep(0.05)
    assert len(up) == PROCESSES


def gone(run: wb.Run) -> float:
    """Seconds until no process of the run is left."""
    start = time.monotonic()
    while left := processes_with(run_directory.ENV_RUN_ID, run.id):
        assert time.monotonic() - start < LIMIT, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        time.sleep(0.02)
    run.wait(timeout=5)  # the very last one may still be closing its files
    assert not list(Path(tempfile.gettempdir()).glob(f"pymp-{run.id[:12]}*"))  # of multiprocessing
    return time.monotonic() - start


def commands(run: wb.Run) -> dict[int, str]:
    found = {}
    for pid in sorted(processes_with(run_directory.ENV_RUN_ID, run.id)):
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def pids(run: wb.Run, part: str) -> list[int]:
    return [pid for pid, command in commands(run).items() if part in command.split("{")[0]]


@pytest.fixture
def deaf(tmp_path: Path, request: pytest.FixtureRequest) -> wb.Run:
    """deaf.py in two ranks, with all of it up."""
    run = wb.launch(DEAF, args=getattr(request, "param", []), nproc_per_node=2, runs_dir=tmp_path)
    wait_ready(run)
    return run


def report(what: str, seconds: float) -> None:
    print(f"\n{what}: gone after {seconds:.1f} s")


@pytest.mark.parametrize("deaf", [["torch"]], indirect=True, ids=["torch"])
def test_stop(deaf: wb.Run) -> None:
    start = time.monotonic()
    deaf.stop()
    report("stop", time.monotonic() - start + gone(deaf))
    assert (deaf.state, deaf.error) == ("stopped", None)


def test_stop_at_once(tmp_path: Path) -> None:
    run = wb.launch(DEAF, nproc_per_node=2, runs_dir=tmp_path).stop()
    gone(run)
    assert run.state == "stopped"


def test_time_limit(tmp_path: Path) -> None:
    run = wb.launch(DEAF, nproc_per_node=2, runs_dir=tmp_path, timeout=1.5)
    run.wait()
    gone(run)
    assert run.state == "timeout"
    assert run.error is not None
    assert str(run.error).startswith("stopped at its time limit, timeout=1.5 s")


def test_torchrun_killed(deaf: wb.Run) -> None:
    run = deaf
    (torchrun,) = pids(run, entrypoints.TORCHRUN)
    os.kill(torchrun, signal.SIGKILL)
    report("torchrun killed", gone(run))
    assert run.state == "failed"
    assert run.error is not None
    assert (run.error.rank, run.error.kind) == (None, "launcher")
    assert run.error.message.startswith("torchrun was ended from outside by SIGKILL")


@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["keeper", "guard"])
def test_guard_killed(deaf: wb.Run, which: int) -> None:
    run = deaf
    pair = pids(run, "guard.py")
    assert pair[0] == int((run.path / run_directory.LOCK).read_text())
    os.kill(pair[which], signal.SIGKILL)
    report(f"{['keeper', 'guard'][which]} killed", gone(run))
    assert run.state == "lost"
    assert run.error is not None
    assert "its guard was killed" in run.error.message


def launch_code(runs_dir: Path, args: list[str]) -> str:
    """Python that launches deaf.py and says where."""
    return f"""
import os, sys
import workbench as wb
run = wb.launch({str(DEAF)!r}, args={args}, nproc_per_node=2, runs_dir={str(runs_dir)!r})
print(run.path, flush=True)
"""


def launched_elsewhere(runs_dir: Path, args: list[str], then: str) -> tuple[subprocess.Popen[str], wb.Run]:
    """A Python program that has launched deaf.py, and goes on with `then`."""
    code = launch_code(runs_dir, args) + then
    program = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout
    run = wb.Run.load(program.stdout.readline().strip())
    wait_ready(run)
    return program, run


@pytest.mark.parametrize(
    ("how", "then"),
    [
        pytest.param("ends", "sys.stdin.read()", marks=pytest.mark.slow),
        ("is killed", "sys.stdin.read()"),
        ("is killed, but not its child, which has the pipe open", "os.fork(); sys.stdin.read()"),
    ],
)
def test_launching_program(tmp_path: Path, how: str, then: str) -> None:
    program, run = launched_elsewhere(tmp_path, [] if how == "is killed" else ["polite"], then)
    assert program.stdin
    assert program.stdout
    if how == "ends":
        program.stdin.close()
    else:
        program.kill()
    program.wait()
    report(f"launching program {how}", gone(run))
    assert run.state == "abandoned"
    assert run.error is not None
    assert "the process that launched it ended" in run.error.message
    program.stdin.close()
    program.stdout.close()


class Notebook:
    """A real kernel that has launched deaf.py in its first cell."""

    def __init__(self, runs_dir: Path, args: list[str]) -> None:
        jupyter_client = pytest.importorskip("jupyter_client")
        pytest.importorskip("ipykernel")
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(runs_dir))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.said = ""
        self.finish(self.begin(launch_code(runs_dir, args)))
        self.run = wb.Run.load(self.said.strip())
        wait_ready(self.run)

    def begin(self, code: str) -> str:
        return str(self.client.execute(code))

    def finish(self, cell: str) -> None:
        """Follow a cell to its end; what it printed or raised is added to `said`."""
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != cell:
                continue
            match message["content"]:
                case {"text": text}:
                    self.said += text
                case {"ename": name}:
                    self.said += name
                case {"execution_state": "idle"}:
                    return

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def notebook(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    opened = Notebook(tmp_path, getattr(request, "param", ["polite"]))
    yield opened
    opened.close()


WAIT_AND_SAY_SO = """
import sys, threading, time
def say_so(waiting=threading.get_ident()):
    frames = []
    while wb.Run.wait.__code__ not in frames:
        time.sleep(0.2)
        frame, frames = sys._current_frames()[waiting], []
        while frame:
            frames.append(frame.f_code)
            frame = frame.f_back
    time.sleep(0.2)
    print("waiting", flush=True)
threading.Thread(target=say_so, daemon=True).start()
run.wait()
"""
"""What is printed before `run.wait()` may be read here before it is called there, and an interrupt then meets no wait."""


def test_kernel_interrupted_while_it_waits(notebook: Notebook) -> None:
    cell = notebook.begin(WAIT_AND_SAY_SO)
    while notebook.client.get_iopub_msg(timeout=60)["content"].get("text") != "waiting\n":
        pass
    start = time.monotonic()
    notebook.manager.interrupt_kernel()
    notebook.finish(cell)
    report("kernel interrupted", time.monotonic() - start + gone(notebook.run))
    assert notebook.said.endswith("KeyboardInterrupt")
    assert notebook.run.state == "stopped"


def test_kernel_interrupted_while_it_does_something_else(notebook: Notebook) -> None:
    notebook.manager.interrupt_kernel()
    time.sleep(0.5)
    assert notebook.run.state == "running"
    notebook.manager.restart_kernel(now=False)
    report("kernel restarted", gone(notebook.run))
    assert notebook.run.state == "abandoned"


@pytest.mark.parametrize("notebook", [[]], indirect=True, ids=["deaf"])
def test_kernel_killed(notebook: Notebook) -> None:
    notebook.manager.signal_kernel(signal.SIGKILL)
    report("kernel killed", gone(notebook.run))
    assert notebook.run.state == "abandoned"


def test_stop_without_its_directory(deaf: wb.Run) -> None:
    while deaf.path.exists():  # its ranks still write
        shutil.rmtree(deaf.path, ignore_errors=True)
    assert deaf.stop(60).state == "stopped"
    gone(deaf)
