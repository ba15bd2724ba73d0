"""The right culprit under signals: to any rank, to torchrun, the guard and the launching program, alone and together, all of them sent."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import workbench as wb
from tests.conftest import processes_with
from workbench.core import run_directory
from workbench.runs import entrypoints
from workbench.runs.run import Run

SCRIPT = Path(__file__).parents[1] / "scripts" / "signalled.py"
AT_ONCE = 4
READY, ENDED = 120.0, 60.0
"""Seconds that a run may take until its ranks are there, and to end."""
LAUNCH = """
import sys, time
import workbench as wb
run = wb.launch(sys.argv[1], args=[sys.argv[2]], nproc_per_node=2, runs_dir=sys.argv[3])
time.sleep(600)
"""
Sent = tuple[tuple[str, str], ...]
"""To whom, and which signal."""

OF_RANK = {
    "KILL": r"rank {0}: was killed \(SIGKILL\)",
    "TERM": "rank {0}: was ended from outside by SIGTERM",
    "INT": "rank {0}: was ended from outside by SIGINT",
    "SEGV": r"rank {0}: crashed \(SIGSEGV\)",
}
OF_TORCHRUN = {
    "KILL": "torchrun was ended from outside by SIGKILL",
    "TERM": "torchrun was ended from outside by SIGTERM",
    "INT": "torchrun was ended from outside by SIGINT",
    "SEGV": r"torchrun crashed \(SIGSEGV\)",
}
LOST, STOPPED, ABANDONED = "its guard was killed", "stopped", "stopped because the process that launched it ended"
OF_GUARD = {"KILL": LOST, "TERM": STOPPED, "INT": "running", "SEGV": LOST}


def expected(sent: Sent) -> list[str]:
    """Patterns of the truth: any of those that a signal was sent to may be named."""
    patterns = []
    for whom, name in sent:
        kinds = {"rank 0": OF_RANK, "rank 1": OF_RANK, "torchrun": OF_TORCHRUN, "guard": OF_GUARD}
        patterns.append(kinds[whom][name].format(whom[-1]) if whom in kinds else ABANDONED)
    return patterns


ALONE: list[Sent] = [
    ((whom, name),)
    for whom, name in itertools.product(("rank 0", "rank 1", "torchrun", "guard", "launching program"), ("KILL", "TERM", "INT", "SEGV"))
]
TOGETHER: list[Sent] = [
    *[(("rank 0", name), ("rank 1", name)) for name in ("KILL", "TERM", "INT", "SEGV")],
    (("rank 1", "TERM"), ("torchrun", "TERM")),
    (("torchrun", "TERM"), ("rank 0", "KILL")),
    (("rank 0", "SEGV"), ("torchrun", "INT")),
    (("rank 1", "INT"), ("torchrun", "KILL")),
    (("rank 0", "TERM"), ("guard", "TERM")),
    (("rank 1", "KILL"), ("guard", "KILL")),
    (("rank 0", "TERM"), ("launching program", "KILL")),
    (("rank 1", "TERM"), ("rank 0", "KILL")),
]
BY_GLOO: list[Sent] = [((whom, name),) for whom, name in itertools.product(("rank 0", "rank 1"), ("KILL", "TERM", "INT", "SEGV"))]


def watched_by(keeper: int) -> set[int]:
    """The processes of whose end the guard, a child of its keeper, will learn: it has a pidfd of each."""
    found = set()
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
            for info in Path(f"/proc/{child}/fdinfo").iterdir():
                found |= {int(pid) for pid in re.findall(r"^Pid:\s+(\d+)$", info.read_text(), re.MULTILINE)}
    return found


def told(sent: Sent, way: str, folder: Path) -> str:
    """What is said of a run after the signals were sent. This process launches it, unless the program that does is to get one."""
    folder.mkdir()
    program = run = None
    try:
        if any(whom == "launching program" for whom, _ in sent):
            program = subprocess.Popen([sys.executable, "-c", LAUNCH, SCRIPT, way, folder], stderr=subprocess.DEVNULL)
        else:
            run = wb.launch(SCRIPT, args=[way], nproc_per_node=2, runs_dir=folder)
        limit = time.monotonic() + READY
        while len(pids := list(folder.glob("*/pid?"))) < 2:
            assert time.monotonic() < limit, (sent, [path.read_text() for path in folder.glob("*/launcher.log")])
            time.sleep(0.05)
        run = run or Run.load(pids[0].parent)
        of = {f"rank {path.name[-1]}": int(path.read_text()) for path in pids}
        of["guard"] = int((run.path / run_directory.LOCK).read_text())
        if program:
            of["launching program"] = program.pid
        for pid in processes_with(run_directory.ENV_RUN_ID, run.id):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if entrypoints.TORCHRUN.encode() in command and b"guard.py" not in command:
                of["torchrun"] = pid
        while not {of["rank 0"], of["rank 1"]} <= watched_by(of["guard"]):  # what a guard has not seen yet it cannot judge
            assert time.monotonic() < limit, sent
            time.sleep(0.05)
        for whom, name in sent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(of[whom], getattr(signal, f"SIG{name}"))
        if sent == (("guard", "INT"),):  # which ignores it: an interrupt is for the launching process
            time.sleep(1.0)
        else:
            limit = time.monotonic() + ENDED
            while run.state == "running" and time.monotonic() < limit:
                time.sleep(0.05)
        state = run.state
        return str(run.error) if run.error else state
    finally:
        if program:
            program.kill()
            program.wait()
        elif run:
            run.stop()
        limit = time.monotonic() + ENDED
        while any(path for path in folder.glob("*/run.json") if Run.load(path.parent).state == "running") and time.monotonic() < limit:
            time.sleep(0.05)


def check(trials: list[tuple[Sent, str]], tmp_path: Path) -> None:
    gate = threading.Lock()
    wrong = list[str]()

    def one(number: int) -> None:
        sent, way = trials[number]
        text = told(sent, way, tmp_path / str(number))
        if not any(re.match(pattern, text) for pattern in expected(sent)):
            with gate:
                wrong.append(f"{way} {sent}: {text}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(len(trials))))
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
def test_the_right_culprit_of_40_signals(tmp_path: Path) -> None:
    check([*((sent, "socket") for sent in [*ALONE, *TOGETHER]), *((sent, "gloo") for sent in BY_GLOO)], tmp_path)
