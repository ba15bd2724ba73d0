"""What pytest keeps to here: no process is left behind, no test goes on for ever, interrupts are heard, GPUs are hidden."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import workbench as wb
from tests.conftest import selects_gpu
from tests.forked import Forks

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import conftest
from tests.conftest import *
conftest.PATIENCE, conftest.LIMIT = 0.5, 2.0
"""
STARTS = """
import pathlib, signal, subprocess, sys, time
def start(name):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pathlib.Path(name).write_text(str(child.pid))
"""
LEAVES = """
def test_leaves_one():
    start("left")
"""
ENDS_BADLY = """
def test_fails():
    start("failed")
    assert False
def test_hangs():
    start("hung")
    time.sleep(60)
def test_hears():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1, stderr=-1)
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in child.communicate()[1]
"""


def executed(folder: Path, tests: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """pytest, started as `nohup` and `&` start it: deaf to interrupts."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_one.py").write_text(STARTS + tests)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:nbval",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        *arguments,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")} | {"PYTHONPATH": str(ROOT)}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    finally:
        signal.signal(signal.SIGINT, before)


def runs(file: Path) -> bool:
    """Does the process live whose number stands there?"""
    try:
        return Path(f"/proc/{file.read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("arguments", [[], ["-n", "1"]], ids=["here", "in a worker"])
def test_a_process_that_is_left_is_killed_and_fails_the_session(tmp_path: Path, arguments: list[str]) -> None:
    done = executed(tmp_path, LEAVES, *arguments)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    assert "time.sleep(60)" in done.stdout
    assert not runs(tmp_path / "left")


def test_what_a_failing_or_hanging_test_has_started_is_killed_and_interrupts_are_heard(tmp_path: Path) -> None:
    done = executed(tmp_path, ENDS_BADLY, "-n", "1")
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "the test took longer than its limit of 2 s" in done.stdout
    assert "processes left behind" not in done.stdout
    assert not runs(tmp_path / "failed")
    assert not runs(tmp_path / "hung")


def test_a_fork_starts_and_ends_as_a_new_process_does(tmp_path: Path, forks: Forks) -> None:
    script = tmp_path / "script.py"
    script.write_text("import atexit, sys\natexit.register(print, 'last')\nprint(__name__, sys.argv, sys.path[0])\nsys.exit(3)\n")
    done = forks.run(tmp_path, script, "--lr", "1")
    plain = subprocess.run([sys.executable, str(script), "--lr", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr) == (3, plain.stdout, "")
    code = "import os, sys\nassert 'torch' in sys.modules\nshown = open('/proc/self/environ').read().rstrip(chr(0))\n"
    done = forks.run(tmp_path, "-c", code + "raise ValueError(os.environ['MINE'], shown)", env={"MINE": "boom"})
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: ('boom', 'MINE=boom')")
    assert forks.run(tmp_path, "-c", "import os; os.kill(os.getpid(), 9)").returncode == -9


def test_forked_ranks_meet_and_where_one_fails_the_others_are_killed(tmp_path: Path, forks: Forks) -> None:
    meet = "import os, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    told = "print(f'{os.environ[\"LOCAL_RANK\"]} {dist.get_rank()} {dist.get_world_size()}\\n', end='')"  # one text: both write to one file
    done = forks.ranks(2, tmp_path, "-c", f"{meet}dist.barrier()\n{told}")
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, ["0 0 2", "1 1 2"], "")
    done = forks.ranks(2, tmp_path, "-c", f"{meet}assert dist.get_rank() == 0, 'of rank 1'\ndist.barrier()")
    assert done.returncode == 1
    assert "AssertionError: of rank 1" in done.stderr


@pytest.mark.usefixtures("forked_ranks")
def test_a_launch_with_forks_for_ranks_ends_as_one_with_processes_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\nassert 'torch' in sys.modules\n"
        "def end(*_):\n    time.sleep(0.1 * int(os.environ['RANK']))\n    print('told to end', flush=True)\n    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print(os.getpid(), sys.argv[1:], flush=True)\n"
        "if os.environ['RANK'] == '1' and sys.argv[1] == 'fails':\n    raise ValueError('boom')\ntime.sleep(600)\n"
    )
    failed = wb.launch(script, args=["fails"], nproc_per_node=2, runs_dir=tmp_path / "runs").wait(60)
    assert failed.state == "failed"
    assert failed.error is not None
    assert (failed.error.rank, failed.error.message) == (1, "ValueError: boom")
    run = wb.launch(script, args=["--", "-m"], nproc_per_node=2, runs_dir=tmp_path / "runs")
    while len(run.log_files()) < 2 or not all("['--', '-m']" in run.logs(rank) for rank in range(2)):
        assert run.state == "running", run
        time.sleep(0.05)
    pids = tmp_path / "pids"
    assert run.stop().state == "stopped"
    assert all("told to end" in run.logs(rank) for rank in range(2))
    for rank in range(2):
        pids.write_text(run.logs(rank).split()[0])
        limit = time.monotonic() + 20
        while runs(pids):
            assert time.monotonic() < limit
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("expression", "paths", "selected"),
    [
        ("gpu", [], True),
        ("slow or gpu", [], True),
        ("", ["tests/gpu"], True),
        ("", ["tests/gpu/test_timer_gpu.py::test_x"], True),
        ("", [], False),
        ("", ["tests/gpu", "tests/core"], False),
        ("not gpu and not browser", ["tests"], False),
        ("not gpu", ["tests/gpu"], False),
        ("slow", ["tests/gpu"], False),
    ],
)
def test_gpus_are_seen_where_they_are_asked_for(expression: str, paths: list[str], selected: bool) -> None:
    assert selects_gpu(expression, paths) is selected
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "this test asks for none"


def test_a_session_that_leaves_nothing_passes_and_removes_what_torchrun_has_written(tmp_path: Path) -> None:
    """PET_LOG_DIR is torchrun's --log-dir; without one it leaves a folder in the temporary directory."""
    assert Path(os.environ["PET_LOG_DIR"]).is_dir()
    made = tmp_path / "made"
    tests = f"def test_one():\n    import os\n    pathlib.Path({str(made)!r}).write_text(os.environ['PET_LOG_DIR'])\n"
    done = executed(tmp_path, tests, "-n", "1")
    assert done.returncode == 0, done.stdout
    assert "left behind" not in done.stdout
    assert not Path(made.read_text()).exists()
