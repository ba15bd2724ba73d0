"""A test that leaves a process behind fails the session, whichever process of pytest ran it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import conftest
from tests.conftest import pytest_configure, pytest_sessionfinish
conftest.PATIENCE = 0.5
"""
LEAVES = """
import pathlib, subprocess, sys
def test_leaves_one():
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pathlib.Path("left").write_text(str(left.pid))
"""


@pytest.mark.parametrize("arguments", [[], ["-n", "1"]], ids=["here", "in a worker"])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_process_that_is_left_fails_the_session(tmp_path: Path, arguments: list[str], leaves: bool) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(LEAVES if leaves else "def test_passes(): pass")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path), *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False
    )
    if leaves:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == (1 if leaves else 0)
    assert ("time.sleep(60)" in done.stdout) == leaves
